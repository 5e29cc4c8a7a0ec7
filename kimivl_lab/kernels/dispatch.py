"""Decides how a computation runs: as an operator or by a direct call, compiled or not, and in which precision.

Each kernel of this package exists twice: as an operator of torch.library, which compilers, traces and profilers see as
one node, and as the plain function behind it, which costs tens of microseconds less per call. `must_dispatch` chooses.

Test: tests/test_compiled.py, tests/test_attention.py, tests/test_faults_weights.py.
"""

import importlib.util
import logging
import os
import re
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..private_api import is_compiled, is_in_torch_dispatch_mode, is_profiled, may_have_global_hooks

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE = 1000  # calls: about 40 forwards of 27 layers
# Triton reports the driver's errors as a plain RuntimeError
_DEVICE_ERRORS = re.compile(
    r"out of memory|illegal memory access|device-side assert|misaligned address|unspecified launch failure"
    r"|launch timed out|uncorrectable ECC",
    re.IGNORECASE,
)


def is_traced(x: Tensor) -> bool:
    """Whether operators on `x` are recorded or replaced: then the values of `x` must not be read.

    True while compiling or tracing, inside a dispatch mode, and if `x` is a tensor subclass.
    """
    return (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, nn.Parameter)
        or is_in_torch_dispatch_mode()
        or torch.jit.is_tracing()
    )


def must_dispatch(x: Tensor) -> bool:
    """Whether a kernel that takes `x` must be called as an operator: when traced, and for a profiler, by its name."""
    return is_traced(x) or is_profiled()


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records what is computed from `tensors`: a kernel without backward must not run then."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of angles, interpolation and softmax statistics in a tower of `dtype`.

    float32 for every dtype but float64, which stays float64 (parity tests compare in it).
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether `module` is exactly a `kind`, without hooks (its own or global ones) and without a replaced `forward`.

    A fast path computes a layer's result from its weights and does not call the layer, which is right for an untouched
    layer only: any other is called, with its input and nothing else. A subclass is touched, and so is a parametrised
    module, because its class is generated.
    """
    own = vars(module)
    return (  # several times in each layer of each call: no loop
        type(module) is kind
        and not own["_forward_hooks"]
        and not own["_forward_pre_hooks"]
        and not own["_backward_hooks"]
        and not own["_backward_pre_hooks"]
        and "forward" not in own
        and not is_compiled(module)
        and not may_have_global_hooks()
    )


def is_untouched_throughout(module: nn.Module) -> bool:
    """Whether `module` and every submodule do only what their classes say."""
    if not module._modules:
        return is_untouched(module, type(module))
    return all(is_untouched(part, type(part)) for part in module.modules())


class CompiledFunction:
    """Calls `function` compiled by torch.compile, once for all shapes. The first call logs that it compiles.

    torch keeps separate code for gradients on, for no_grad and for inference mode, and each is compiled at its first
    call. Graphs are captured under no_grad, as a runner calls the tower.

    Where compiling or starting the compiled code fails (no C++ compiler, a compile worker that died, a GPU that the
    code does not run on), `fallback` computes the call, by default `function` itself, uncompiled. Any such error is
    counted in `errors` and logged. The next calls run the fallback, 1,000 of them at first and ten times as many after
    each further failure; then compiled code is tried again. So one bad call does not turn compiled code off for good,
    and a machine without a compiler does not wait for one at each call.

    Not replaced: an error that the fallback has, too, and those of the device, `is_of_the_device`.

    Attributes:
        errors: by type and first line, how often it came.
    """

    failing: ClassVar[WeakSet["CompiledFunction"]] = WeakSet()  # those with errors, for `compile_errors`

    def __init__(self, function: Callable[..., Any], name: str, fallback: Callable[..., Any] | None = None) -> None:
        self.function = function
        self.name = name
        self.fallback = fallback or function
        self.errors: Counter[str] = Counter()
        self._skip, self._skip_next = 0, _FIRST_PAUSE  # calls: left to the fallback, and after the next failure

    @property
    def works(self) -> bool:
        """Whether the next call tries compiled code."""
        return not self._skip

    def __call__(self, *args: Any) -> Any:
        if self._skip:
            self._skip -= 1
            return self.fallback(*args)
        try:
            return self._compiled(*args)
        except Exception as error:
            if is_of_the_device(error):
                raise
            value = self.fallback(*args)  # raises what is wrong with the call itself
            text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
            self.errors[text] += 1
            self.failing.add(self)
            _LOG.warning(
                "compiled code of %s failed (%s); the next %d calls run uncompiled", self.name, text, self._skip_next
            )
            self._skip, self._skip_next = self._skip_next, 10 * self._skip_next
            return value

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        _LOG.warning("compiling %s: the first call takes from seconds to a minute", self.name)
        return torch.compile(self.function, dynamic=True)


def compile_errors() -> dict[str, int]:
    """How often compiled code failed in this process, by "function: error"; empty where it always worked."""
    return {
        f"{function.name}: {error}": count
        for function in CompiledFunction.failing
        for error, count in function.errors.items()
    }


def compile_unavailable(device: torch.device) -> str | None:
    """Why torch.compile would fail for `device`, as far as can be seen without compiling, or None."""
    compilers = ("CC", "cc", "gcc", "clang") if device.type == "cuda" else ("CXX", "g++", "clang++")
    missing = [f"a {'C' if device.type == 'cuda' else 'C++'} compiler ({', '.join(compilers[1:])})"]
    if os.environ.get(compilers[0]) or any(map(shutil.which, compilers[1:])):
        missing = []
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        missing.append("triton")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        missing.append(str(header))
    return f"torch.compile needs {' and '.join(missing)}; without it functions run uncompiled" if missing else None


def is_of_the_device(error: BaseException | None) -> bool:
    """Whether `error`, or one that it came from, says that the device is out of memory or in an error state.

    Other code would hide the first and cannot repair the second. Compilers wrap errors, so causes are searched.
    """
    accelerator = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # since torch 2.8
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, accelerator)) or _DEVICE_ERRORS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
