"""Compiles the kernels' C code on the machine that runs it, once, and loads it.

The machine's C compiler builds a library in a few seconds, for one instruction set at a time. The code uses no header
of Python or torch and is called through ctypes, so one build serves every version of both. The file is kept in the
user's cache, named by a hash of its sources, flags and compiler. Two processes that build at the same time end with the
same file, and a file of another user is not loaded. The library is not linked to an OpenMP runtime: it shares the
runtime, and the threads, that torch has loaded.

    "amx"    Intel's matrix extensions, bfloat16: attention, linear layers, rope
    "simd"   AVX-512, or AVX2 where there is no AVX-512, float32 and bfloat16: attention, computed in float32

The environment variable KIMIVL_LAB_ISA (none, avx2, avx512 or amx) is the highest instruction set that is used, so that
each kernel that a machine can run can be tested on it. It is read once in a process.

Test: tests/test_amx.py, tests/test_simd.py.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..private_api import cpu_supports, init_amx
from .dispatch import wants_gradient

_LOG = logging.getLogger(__name__)
_FLAGS = "-O3 -std=gnu11 -Wall -fopenmp -fvisibility=hidden -fPIC"
_AVX2 = "-mavx2 -mfma"
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
_TIMEOUT_S = 120
ISA_VARIABLE = "KIMIVL_LAB_ISA"
ISAS = ("none", "avx2", "avx512", "amx")

_POINTER, _INT, _LONG, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
_ROWS = _POINTER, _LONG, _INT, _INT  # memory, stride, rows, numbers in a row
_ATTENTION = {
    "attention_scratch": (_SIZE, (_INT, _INT)),
    "attention": (_INT, (*6 * (_POINTER,), *3 * (_INT,), ctypes.c_float, *2 * (_INT,), _POINTER, _SIZE)),
}


class BuildError(RuntimeError):
    """This machine has no kernels; the message says why."""


@dataclass(frozen=True)
class Library:
    """C sources under `kimivl_lab.kernels`, the functions they give, the dtypes of their operands, and the compiler's
    flags by instruction set, the one that is preferred first."""

    title: str
    sources: tuple[str, ...]
    functions: Mapping[str, tuple[Any, tuple[Any, ...]]]
    dtypes: tuple[torch.dtype, ...]
    flags: Mapping[str, str]


LIBRARIES = {
    "amx": Library(
        "AMX kernels",
        ("common.h", "tasks.h", "amx/tiles.h", "amx/attention.c", "amx/linear.c", "amx/rope.c"),
        {
            **_ATTENTION,
            "rotate": (None, (_POINTER, _LONG, _POINTER, _INT, _INT, _INT, _INT)),
            "linear_scratch": (_SIZE, (_INT, _INT)),
            "pack_weight": (None, (_POINTER, _INT, _INT, _POINTER, _INT)),
            "linear": (
                None,
                (
                    _POINTER,
                    _LONG,
                    *2 * (_INT,),
                    _POINTER,
                    _INT,
                    *2 * (_POINTER,),
                    _INT,
                    _POINTER,
                    _INT,
                    _POINTER,
                    _SIZE,
                ),
            ),
        },
        (torch.bfloat16,),
        {"amx": f"{_AVX512} -mavx512bf16 -mamx-tile -mamx-bf16"},
    ),
    "simd": Library(
        "AVX kernels",
        ("common.h", "tasks.h", "simd/attention.c"),
        _ATTENTION,
        (torch.float32, torch.bfloat16),
        {"avx512": f"{_AVX512} -mprefer-vector-width=512", "avx2": _AVX2},
    ),
}


def unavailable(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the library called `name` cannot run on `device` in `dtype`, or None when it can.

    The first call in a process may take seconds: it builds the library if the processor supports it.
    """
    wanted = LIBRARIES[name]
    if device.type != "cpu":
        return f"the {wanted.title} are for CPUs, not for {device.type}"
    if dtype not in wanted.dtypes:
        taken = " and ".join(str(known).removeprefix("torch.") for known in wanted.dtypes)
        return f"the {wanted.title} take {taken}, not {dtype}"
    found = _load(name)
    return found if isinstance(found, str) else None


def library(name: str) -> ctypes.CDLL:
    """The loaded library called `name`, built if necessary. BuildError if this machine cannot have it."""
    found = _load(name)
    if isinstance(found, str):
        raise BuildError(found)
    return found


def require_host(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """ValueError unless `tensor`, called `name`, is plain host memory of that shape and dtype and wants no gradient.

    The kernels read memory by its address and have no backward.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise ValueError(f"{name} must be a plain tensor, got a {type(tensor).__name__}")
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be {tuple(shape)} {dtype} on the CPU, got {tuple(tensor.shape)} {tensor.dtype} on "
            f"{tensor.device}"
        )
    if wants_gradient(tensor):
        raise ValueError(f"{name} wants a gradient, which this kernel does not give: call it under torch.no_grad()")


@cache
def kernel_isa(name: str) -> str:
    """The instruction set that the library called `name` uses here. BuildError if it has none; ValueError if
    KIMIVL_LAB_ISA has a value that is unknown."""
    highest = os.environ.get(ISA_VARIABLE, ISAS[-1])
    if highest not in ISAS:
        raise ValueError(f"{ISA_VARIABLE}={highest!r:.40}: one of {', '.join(ISAS)}")
    title = LIBRARIES[name].title
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildError(f"the {title} are for Linux on x86-64, not for {sys.platform} on {platform.machine()}")
    reasons = []
    for isa in LIBRARIES[name].flags:
        reason = _isa_unavailable(isa)
        if reason is None and ISAS.index(isa) > ISAS.index(highest):
            reason = f"{ISA_VARIABLE}={highest} does not allow {isa}"
        if reason is None:
            return isa
        reasons.append(reason)
    raise BuildError("; ".join(reasons))


def _isa_unavailable(isa: str) -> str | None:
    """Why this processor cannot run `isa`, or None when it can."""
    if isa == "avx2":
        return None if cpu_supports("avx2") else "this processor has no AVX2"
    if isa == "avx512":
        return None if cpu_supports("avx512") else "this processor has no AVX-512"
    if not cpu_supports("amx_tile", "avx512_bf16"):
        return "this processor has no matrix extensions (AMX) for bfloat16"
    if not init_amx():
        return "the operating system does not let this process use the processor's matrix extensions (AMX)"
    return None


@cache
def _load(name: str) -> ctypes.CDLL | str:
    """The library, or why there is none. A process tries once."""
    title = LIBRARIES[name].title
    try:
        isa = kernel_isa(name)
    except BuildError as error:
        return str(error)
    try:
        target = _target(name, isa)
        _build_unless_there(name, isa, target)
        try:
            return _open(name, target)
        except (OSError, AttributeError):  # the file is damaged: build it again, once
            target.unlink()
            _build_unless_there(name, isa, target)
            return _open(name, target)
    except (BuildError, OSError, AttributeError, RuntimeError, ValueError) as error:  # odd values of CC and HOME too
        reason = f"the {title} could not be built: {error}"
        _LOG.warning("%s; this process runs without them, and `kimivl-lab info` repeats the reason", reason)
        return reason


def _open(name: str, target: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(target))
    for function_name, (result, arguments) in LIBRARIES[name].functions.items():
        function = getattr(loaded, function_name)
        function.restype, function.argtypes = result, arguments
    return loaded


def cache_directory() -> Path:
    """The folder of the built libraries: kimivl-lab in $XDG_CACHE_HOME, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kimivl-lab"


def _target(name: str, isa: str) -> Path:
    """The library's file, named by a hash of everything that it is made of."""
    made_of = _compiler(), _flags(name, isa), sorted(_sources(name).items())
    return cache_directory() / f"{isa}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"


def _flags(name: str, isa: str) -> list[str]:
    return f"{_FLAGS} {LIBRARIES[name].flags[isa]}".split()


def _sources(name: str) -> dict[str, bytes]:
    """Texts by file name: headers and sources lie side by side when they are compiled."""
    folder = files("kimivl_lab.kernels")
    return {source.rpartition("/")[2]: folder.joinpath(source).read_bytes() for source in LIBRARIES[name].sources}


def _compiler() -> list[str]:
    # gcc before cc, which may be clang: its code asks for another OpenMP runtime than the one torch's wheels bring
    named = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "cc")), None)
    if named is None:
        raise BuildError("they need a C compiler, and neither gcc nor cc is installed")
    return shlex.split(named)


def _build_unless_there(name: str, isa: str, target: Path) -> None:
    if target.exists():
        _require_own(target.parent, target)
        return
    _LOG.info("building the %s with %s: once, a few seconds", LIBRARIES[name].title, shlex.join(_compiler()))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_own(target.parent)
        building = tempfile.TemporaryDirectory(dir=target.parent)
    except OSError as error:
        raise BuildError(f"{error.strerror}: {target.parent}; XDG_CACHE_HOME names another folder") from error
    with building as folder:
        for source, text in _sources(name).items():
            (Path(folder) / source).write_bytes(text)
        built = _compile([*_compiler(), *_flags(name, isa)], Path(folder))
        with built.open("rb") as file:
            os.fsync(file.fileno())
        built.replace(target)


def _require_own(*paths: Path) -> None:
    """BuildError for a file or folder that another user, root excepted, could fill with code for this process."""
    for path in paths:
        if (owner := path.stat().st_uid) not in (os.getuid(), 0):
            raise BuildError(f"{path} belongs to another user ({owner}); XDG_CACHE_HOME names another folder")


def _compile(compiler: list[str], folder: Path) -> Path:
    objects = []
    for source in sorted(folder.glob("*.c")):
        objects.append(source.with_suffix(".o"))
        _run([*compiler, "-c", str(source), "-o", str(objects[-1])])
    linked = folder / "kernels.so"  # without -fopenmp: the runtime that torch has loaded provides OpenMP's symbols
    _run([*_compiler(), "-shared", *map(str, objects), "-lm", "-o", str(linked)])
    return linked


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {_TIMEOUT_S} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise BuildError(f"{command[0]} said {next((line for line in said if 'error' in line), said[0])}")
