"""Decides how a computation runs: as an operator or by a direct call, compiled or not, and in which precision.

Each kernel of this package exists twice: as an operator of torch.library, which compilers, traces and profilers see as
one node, and as the plain function behind it, which costs tens of microseconds less per call. `must_dispatch` chooses.

Test: tests/test_compiled.py, tests/test_attention.py, tests/test_faults_weights.py.
"""

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_LOG = logging.getLogger(__name__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
    return is_traced(x) or torch.autograd._profiler_enabled()


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
    return (
        type(module) is kind
        and not any(own[hooks] for hooks in _HOOKS)
        and "forward" not in own
        and module._compiled_call_impl is None
        and not _has_any_global_hook()
    )


def is_untouched_throughout(module: nn.Module) -> bool:
    """Whether `module` and every submodule do only what their classes say."""
    return all(is_untouched(part, type(part)) for part in module.modules())


class CompiledFunction:
    """Calls `function` compiled by torch.compile, once for all shapes. The first call logs that it compiles.

    Where compiling fails (for example without a C++ compiler) a warning is logged, and from then on `fallback` runs, by
    default `function` itself, uncompiled. Errors of `function` itself pass through.
    """

    def __init__(self, function: Callable[..., Any], name: str, fallback: Callable[..., Any] | None = None) -> None:
        self.function = function
        self.name = name
        self.fallback = fallback or function
        self.works = True

    def __call__(self, *args: Any) -> Any:
        if self.works:
            from torch._dynamo.exc import TorchDynamoException  # slow to import, so only when something is compiled

            try:
                return self._compiled(*args)
            except TorchDynamoException as error:
                self.works = False
                _LOG.warning("torch.compile of %s failed (%s); it runs uncompiled", self.name, type(error).__name__)
        return self.fallback(*args)

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        _LOG.warning("compiling %s: the first call takes from seconds to a minute", self.name)
        return torch.compile(self.function, dynamic=True)
