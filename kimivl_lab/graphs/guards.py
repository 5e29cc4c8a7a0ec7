"""Refuses what no graph can hold, on either backend, and names the line that did it.

A graph replays operators at fixed addresses and nothing else. So during a capture it is an error to

    read a device value on the host       the value, and every branch that depends on it, would be frozen
    look a grid up in a position cache    the embedding of that grid would be frozen, or the cache would keep memory of
                                          the graph
    run a collective                      a rank without images captures nothing, so its peers would wait for ever;
                                          allowed where the caller says so and the communicator can be captured

Test: tests/test_graph_backends.py, tests/test_faults_graphs.py.
"""

import os
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch
import typing_extensions
from torch import nn
from torch.overrides import TorchFunctionMode

from ..moonvit.position_cache import PositionCache
from ..private_api import TorchDispatchMode
from ..syncs.rules import value_read_by

_NOT_THE_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    typing_extensions.__file__,  # wraps those functions of torch that are deprecated
)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class GraphCaptureError(RuntimeError):
    """A forward cannot be captured; the message names the line that prevents it."""


class HostReadGuard(TorchFunctionMode):
    """Inside it, a read of a tensor's value, or of a size that depends on values, raises `GraphCaptureError`.

    For a CPU, where the host can read every tensor; on a GPU `HostSyncCounter` sees the reads. Reads inside an operator
    that is registered with torch.library are not checked: a trace holds that operator as one node.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if value_read_by(name, args, kwargs or {}) is not None:
            where = _where(walk_stack(sys._getframe(1)))
            raise GraphCaptureError(f"capture: {name.strip('_')}() reads a device value {where}")
        return func(*args, **(kwargs or {}))


class CollectiveGuard(TorchDispatchMode):
    """Inside it, a collective raises `GraphCaptureError` before it is launched."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            where = _where(walk_stack(sys._getframe(1)))
            raise GraphCaptureError(
                f"capture: collective {func} {where}; data parallelism captures each rank's own work, outside of "
                f"collectives, and tensor parallelism needs tensor_parallel_group and NCCL"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def position_caches_untouched(module: nn.Module) -> Generator[None]:
    """Raises `GraphCaptureError` at its end if a position cache in `module` was used inside it."""
    caches = [cache for part in module.modules() for cache in vars(part).values() if isinstance(cache, PositionCache)]
    before = [_lookups(cache) for cache in caches]
    yield
    if [_lookups(cache) for cache in caches] != before:
        raise GraphCaptureError(
            "capture: a position cache was looked into, and its grid would be frozen in the graph: "
            "position embeddings are an input, made by prepare_encoder_metadata before the replay"
        )


@contextmanager
def capture_errors() -> Generator[None]:
    """Inside it, a RuntimeError becomes a `GraphCaptureError` that names the innermost line outside torch."""
    try:
        yield
    except GraphCaptureError:
        raise
    except RuntimeError as error:
        raise GraphCaptureError(
            f"capture: {str(error).splitlines()[0]} {_where(reversed(list(walk_tb(error.__traceback__))))}"
        ) from error


def _lookups(cache: PositionCache) -> int:
    return cache.stats.hits + cache.stats.misses


def _where(frames: Iterable[tuple[FrameType, int]]) -> str:
    """ "at file:line in function", for the first of (frame, line) that is neither torch's nor this package's."""
    for frame, line in frames:
        if not os.path.abspath(frame.f_code.co_filename).startswith(_NOT_THE_USERS):
            return f"at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return "inside torch"
