"""Process groups whose every wait ends: finite timeouts, and an error that names the ranks that did not come.

A group is always an argument. The default group is used silently nowhere: ranks that shard by one group and reduce over
a larger one wait for each other for ever. Note that `torch.distributed.new_group` does not inherit the timeout of
`init_process_group`: give it its own.

gloo reports a lost peer by its address and a silent one not at all. So after a failed collective the ranks hold a roll
call in the store that connected them: who has not answered when the timeout is over is named. On GPUs NCCL's own
watchdog ends the process, and torchrun names the rank that failed first.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT_S = 60.0
_GRACE_S = 2.0  # ranks time out one after another, not at once
_POLL_S = 0.05
_LEFT = "left: "


class RankError(RuntimeError):
    """A collective failed because of other ranks. The group is of no further use.

    Attributes:
        missing: ranks (of the whole job) that did not come, or left with an error of their own.
    """

    def __init__(self, message: str, missing: list[int]) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[type["RankError"], tuple[str, list[int]]]:
        return RankError, (str(self), self.missing)


def init_group(device: torch.device | str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S) -> dist.ProcessGroup:
    """Joins the processes that torchrun or `run_ranks` started, and returns the group of all of them.

    Args:
        device: where this rank computes; "cuda" connects by NCCL and takes the GPU of the local rank, others by gloo.
        timeout_s: the longest that a collective waits for a rank.
    """
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s}")
    timeout = timedelta(seconds=timeout_s)
    if torch.device(device).type == "cuda":
        gpu = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", timeout=timeout, device_id=gpu)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    return group


def check_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """ValueError if `group` is not a process group that this rank belongs to."""
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group that this rank belongs to, got {group!r}")
    return group


@contextmanager
def naming_missing(group: dist.ProcessGroup, what: str) -> Generator[None]:
    """Turns the failure of a collective into a `RankError` that names the ranks that did not come.

    It comes within the group's timeout and a little more, counted from this rank's arrival.
    """
    arrived = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        waiting, left = _roll_call(group, arrived + _timeout_s(group) + _GRACE_S)
        reasons = [f"rank {rank} did not come" for rank in sorted(waiting)]
        reasons += [f"rank {rank} left with {left[rank]}" for rank in sorted(left)]
        blame = "; ".join(reasons) or "all ranks are there, the link between them failed"
        raise RankError(f"{what} on {group.size()} ranks: {blame} ({error})", sorted({*waiting, *left})) from error


@contextmanager
def telling_others(group: dist.ProcessGroup) -> Generator[None]:
    """Around work before a collective: an error in it is left where the roll call of the others will find it."""
    try:
        yield
    except Exception as error:
        if group.size() > 1:
            _store().set(_key(group, dist.get_rank()), f"{_LEFT}{type(error).__name__}: {error}")
        raise


def _roll_call(group: dist.ProcessGroup, deadline: float) -> tuple[set[int], dict[int, str]]:
    """Ranks without an answer at the deadline, and those that left with an error."""
    waiting = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    left = {}
    try:
        store = _store()
        store.set(_key(group, dist.get_rank()), "here")
        while waiting:
            for rank in [rank for rank in waiting if store.check([_key(group, rank)])]:
                waiting.remove(rank)
                answer = store.get(_key(group, rank)).decode()
                if answer.startswith(_LEFT):
                    left[rank] = answer.removeprefix(_LEFT)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
    except dist.DistError:  # the store is gone, and with it the process that kept it: torchrun, or else rank 0
        waiting = waiting & {0} or waiting
    return waiting, left


def _key(group: dist.ProcessGroup, rank: int) -> str:
    return f"kimivl_lab/roll_call/{group.group_name}/{rank}"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _timeout_s(group: dist.ProcessGroup) -> float:
    return group._get_backend(group._device_types[0]).options._timeout.total_seconds()
