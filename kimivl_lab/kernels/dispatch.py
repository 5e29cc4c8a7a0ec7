"""Whether kernels are called as operators of torch.library or by the short way."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def is_watched(x: Tensor) -> bool:
    """Whether a compiler, a trace, a mode or a profiler looks at what becomes of `x`, or `x` is more than plain memory.

    Then a kernel has to be an operator; elsewhere its dispatch, tens of microseconds, is saved.
    """
    return (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or is_in_torch_dispatch_mode()
        or torch.jit.is_tracing()
        or torch.autograd._profiler_enabled()
    )
