"""Process groups whose every wait ends.

A group is always an argument, and no function here falls back to the default group. The reason: ranks that share work
over one group and sum over a larger one wait for each other for ever. `torch.distributed.new_group` does not inherit
the timeout of `init_process_group`: pass it a `timeout` too. What ends a wait is in `calls`.

Test: tests/test_parallel_failures.py.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import private_api
from ..checks import as_not_negative

DEFAULT_TIMEOUT_S = 60.0


class RankError(RuntimeError):
    """Other ranks did not do what this rank did: they are absent, failed, or are at another call.

    After a collective that failed the group is of no further use. A `RankError` that came before the collective (a rank
    failed on its images, or is at another call) leaves the group usable.

    Attributes:
        missing: those ranks, numbered in the whole job.
    """

    def __init__(self, message: str, missing: list[int]) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> tuple[type["RankError"], tuple[str, list[int]]]:
        return RankError, (str(self), self.missing)


class SharedGroup:
    """Holds a process group for an object that is copied: a deep copy shares the group, a pickle does not have it.

    A group is a connection of this process, so another process cannot read it from a file.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def get(self) -> dist.ProcessGroup:
        """The group; ValueError in an object that came from a pickle."""
        return check_group(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedGroup":
        return self

    def __reduce__(self) -> tuple[type["SharedGroup"], tuple[()]]:
        return SharedGroup, ()


def init_group(device: torch.device | str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S) -> dist.ProcessGroup:
    """Joins the processes that torchrun or `run_ranks` started, and returns the group of all of them.

    Args:
        device: where this rank computes; "cuda" connects by NCCL and takes the GPU of the local rank, others by gloo.
        timeout_s: the longest that a collective waits for a rank. What ends a wait differs: on gloo a `RankError` that
            names the ranks that are missing; on NCCL its watchdog, which ends the process, see `calls.rank_errors`.

    Raises:
        ValueError: a timeout that is not positive; on "cuda", no GPU for this rank, or several and no LOCAL_RANK.
    """
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s}")
    timeout = timedelta(seconds=timeout_s)
    if torch.device(device).type == "cuda":
        gpu = torch.device("cuda", _gpu_of_this_rank(torch.cuda.device_count()))
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", timeout=timeout, device_id=gpu)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    return group


def _gpu_of_this_rank(gpus: int) -> int:
    """LOCAL_RANK, which torchrun sets; without it, as under SLURM or mpirun, the only GPU that this process sees."""
    local = os.environ.get("LOCAL_RANK")
    if local is None and gpus != 1:
        raise ValueError(
            f"which of the {gpus} GPUs is this rank's? Start it by torchrun, set LOCAL_RANK (0, 1, ... on each "
            f"machine), or let each process see one GPU (CUDA_VISIBLE_DEVICES)"
        )
    number = 0 if local is None else as_not_negative("LOCAL_RANK", int(local) if local.isdecimal() else local)
    if number >= gpus:
        raise ValueError(f"LOCAL_RANK={number} needs {number + 1} GPUs, this process sees {gpus}")
    return number


def check_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """ValueError if `group` is not a process group that this rank belongs to."""
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a process group that this rank belongs to, got {group!r}")
    return group


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """The longest that a collective of `group` waits for a rank; `DEFAULT_TIMEOUT_S` where torch does not tell."""
    known = private_api.group_timeout_s(group)
    return DEFAULT_TIMEOUT_S if known is None else known
