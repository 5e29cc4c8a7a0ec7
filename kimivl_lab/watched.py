"""Whether kernels are called as operators of torch.library or by the short way."""

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def is_watched() -> bool:
    """Whether a compiler, a trace or a profiler is looking: an operator's dispatch costs tens of microseconds, and
    only they need it."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None or torch.autograd._profiler_enabled()
