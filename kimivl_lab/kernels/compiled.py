"""A function compiled by torch.compile when it can be, run as it is when it cannot."""

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

_LOG = logging.getLogger(__name__)


class CompiledFunction:
    """Calls `function` compiled, once for all shapes; the first call announces itself, for it takes a while.

    Where compiling fails (a machine without a C++ compiler, say) a warning is logged and `fallback`, by default the
    function itself, takes over for good. Any other error is the function's own and passes through.
    """

    def __init__(self, function: Callable[..., Any], name: str, fallback: Callable[..., Any] | None = None) -> None:
        self.function = function
        self.name = name
        self.fallback = fallback or function
        self.works = True

    def __call__(self, *args: Any) -> Any:
        if self.works:
            from torch._dynamo.exc import TorchDynamoException  # heavy, and only needed here

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
