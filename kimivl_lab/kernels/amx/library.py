"""Compiles the kernels' C code on the machine that runs it, once, and loads it.

The machine's C compiler builds the library in a few seconds. The code uses no header of Python or torch and is called
through ctypes, so one build serves every version of both. The file is kept in the user's cache, named by a hash of its
sources, flags and compiler. Two processes that build at the same time end with the same file. The library is not linked
to an OpenMP runtime: it shares the runtime, and the threads, that torch has loaded.

Test: tests/test_amx.py.
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
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from ..dispatch import wants_gradient

_LOG = logging.getLogger(__name__)
_SOURCES = ("tiles.h", "attention.c", "linear.c", "rope.c")
_FLAGS = (
    "-O3 -std=gnu11 -Wall -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mamx-tile -mamx-bf16 "
    "-fopenmp -fvisibility=hidden -fPIC"
)
_TIMEOUT_S = 120

_POINTER, _INT, _LONG, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
_SIGNATURES = {
    "attention_scratch": (_SIZE, (_INT, _INT)),
    "attention": (_INT, (*6 * (_POINTER,), *3 * (_INT,), ctypes.c_float, _INT, _POINTER, _SIZE)),
    "rotate": (None, (_POINTER, _LONG, _POINTER, _INT, _INT, _INT, _INT)),
    "linear_scratch": (_SIZE, (_INT, _INT)),
    "pack_weight": (None, (_POINTER, _INT, _INT, _POINTER, _INT)),
    "linear": (
        None,
        (_POINTER, _LONG, _INT, _INT, _POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _SIZE),
    ),
}


class BuildError(RuntimeError):
    """This machine has no kernels; the message says why."""


def amx_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on `device` in `dtype`, or None when they can.

    The first call in a process may take seconds: it builds the kernels if the processor supports them.
    """
    if device.type != "cpu":
        return f"the AMX kernels are for CPUs, not for {device.type}"
    if dtype != torch.bfloat16:
        return f"the AMX kernels take bfloat16, not {dtype}"
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


def library() -> ctypes.CDLL:
    """The loaded kernels, built if necessary. BuildError if this machine cannot have them."""
    found = _load()
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
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none. A process tries once."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the AMX kernels are for Linux on x86-64, not for {sys.platform} on {platform.machine()}"
    try:
        if not (torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported()):
            return "this processor has no matrix extensions (AMX) for bfloat16"
        if not torch.cpu._init_amx():
            return "the operating system does not let this process use the processor's matrix extensions (AMX)"
        target = _target()
        _build_unless_there(target)
        try:
            return _open(target)
        except (OSError, AttributeError):  # the file is damaged: build it again, once
            target.unlink()
            _build_unless_there(target)
            return _open(target)
    except (BuildError, OSError, AttributeError, RuntimeError, ValueError) as error:  # odd values of CC and HOME too
        return f"the AMX kernels could not be built: {error}"


def _open(target: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(target))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def cache_directory() -> Path:
    """The folder of the built library: kimivl-lab in $XDG_CACHE_HOME, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kimivl-lab"


def _target() -> Path:
    """The library's file, named by a hash of everything that it is made of."""
    digest = hashlib.sha256(repr((_compiler(), _FLAGS, sorted(_sources().items()))).encode()).hexdigest()[:16]
    return cache_directory() / f"amx-{digest}.so"


def _sources() -> dict[str, bytes]:
    return {name: files("kimivl_lab.kernels.amx").joinpath(name).read_bytes() for name in _SOURCES}


def _compiler() -> list[str]:
    named = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc")), None)
    if named is None:
        raise BuildError("they need a C compiler, and neither cc nor gcc is installed")
    return shlex.split(named)


def _build_unless_there(target: Path) -> None:
    if target.exists():
        return
    _LOG.info("building the AMX kernels with %s: once, a few seconds", shlex.join(_compiler()))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        for name, text in _sources().items():
            (Path(folder) / name).write_bytes(text)
        built = _compile(_compiler(), Path(folder))
        with built.open("rb") as file:
            os.fsync(file.fileno())
        built.replace(target)


def _compile(compiler: list[str], folder: Path) -> Path:
    objects = []
    for source in sorted(folder.glob("*.c")):
        objects.append(source.with_suffix(".o"))
        _run([*compiler, *_FLAGS.split(), "-c", str(source), "-o", str(objects[-1])])
    linked = folder / "amx.so"  # without -fopenmp: the runtime that torch has loaded provides OpenMP's symbols
    _run([*compiler, "-shared", *map(str, objects), "-lm", "-o", str(linked)])
    return linked


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {_TIMEOUT_S} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise BuildError(f"{command[0]} said {next((line for line in said if 'error' in line), said[0])}")
