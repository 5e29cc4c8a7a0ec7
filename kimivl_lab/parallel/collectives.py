"""The three collectives of the encoder, each over an explicit group.

A lost rank becomes a `RankError` that names it, and `record_collectives` counts and times what runs.

Test: tests/test_parallel_failures.py, tests/test_parallel_lessons.py.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .calls import rank_errors


@dataclass(frozen=True)
class Collective:
    """One collective as this rank saw it.

    Attributes:
        kind: "all_reduce", "all_gather" or "broadcast".
        bytes: of the tensor that it leaves on every rank.
        seconds: from this rank's arrival, so the wait for later ranks is in it.
    """

    kind: str
    bytes: int
    seconds: float


_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
_LOG: ContextVar[list[Collective] | None] = ContextVar("collectives", default=None)


@contextmanager
def record_collectives() -> Generator[list[Collective]]:
    """A list that fills with this thread's collectives. On a GPU each is then waited for, so time nothing else."""
    log: list[Collective] = []
    token = _LOG.set(log)
    try:
        yield log
    finally:
        _LOG.reset(token)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """`tensor` becomes the sum over the ranks, in place; nothing on one rank."""
    if group.size() > 1:
        with _watched("all_reduce", tensor, group):
            dist.all_reduce(tensor, group=group)


def all_gather(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
    """`gathered` (ranks * n, ...) becomes the ranks' `mine` (n, ...), one after another. n is the same everywhere."""
    with _watched("all_gather", gathered, group):
        _all_gather_single(gathered, mine, group=group)


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """`tensor` becomes that of rank `source` of the group."""
    with _watched("broadcast", tensor, group):
        dist.broadcast(tensor, group=group, group_src=source)


@contextmanager
def _watched(kind: str, result: Tensor, group: dist.ProcessGroup) -> Generator[None]:
    log = _LOG.get()
    start = _now(result) if log is not None else 0.0
    with rank_errors(group, kind):
        yield
    if log is not None:
        log.append(Collective(kind, result.nbytes, _now(result) - start))


def _now(result: Tensor) -> float:
    if result.is_cuda:
        torch.cuda.synchronize(result.device)
    return time.perf_counter()
