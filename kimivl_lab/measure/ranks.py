"""Ranks on this machine: starting them by torchrun's own launcher, and timing variants on all of them at once.

A rank that fails ends the others, and the error says which it was, with its traceback.

Of variants in turn, every run starts from a barrier and the slowest rank counts. A rank waits in a collective for two
things: the transfer, and the ranks that come later. The last rank to arrive waits only for the transfer. So the
transfer is the minimum over the ranks, and the skew is the spread of the ranks' own work.

Test: tests/test_parallel_bench.py, tests/test_parallel_failures.py.
"""

import ast
import multiprocessing
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..parallel.collectives import record_collectives
from .timing import Timing, round_orders

Result = TypeVar("Result")

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # the launcher takes them and does not give them back
_SPLIT_ROUNDS = 2  # counting collectives waits for each, so these rounds are not among the timed ones


def run_ranks(worker: Callable[..., Result], ranks: int, *args: object) -> list[Result]:
    """Calls `worker(*args)` in `ranks` processes of one thread each; their results, by rank.

    The processes fork from a server that has imported torch and this package, so that they start in no time.

    Args:
        worker: a function of a module (not of a notebook's cell) that begins with `init_group`.
        args: picklable, as are the results.

    Raises:
        RuntimeError: a script calls this outside of `if __name__ == "__main__":`. Each rank imports the script, and
            would start ranks in turn.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed; it is named.
    """
    _require_main_guard()
    start_method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(["kimivl_lab.kimi_vl.encoder", worker.__module__])
    with TemporaryDirectory() as logs, _handlers_restored():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.02,
            start_method=start_method,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        results = elastic_launch(config, _begin)(worker, *args)
    return [results[rank] for rank in range(ranks)]


def _begin(worker: Callable[..., Result], *args: object) -> Result:
    torch.set_num_threads(1)
    result = worker(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _require_main_guard() -> None:
    """RuntimeError if the script that is running came here by a line that its ranks would run too.

    Python says so as well, from within every rank, below a hundred lines of tracebacks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break
        frame = frame.f_back
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if frame is None or not script.is_file() or frame.f_code.co_filename != str(script):
        return  # a notebook, `python -c` or a debugger: the ranks import no script
    try:
        tree = ast.parse(script.read_bytes())
    except SyntaxError:
        return
    for node in ast.walk(tree):
        around = isinstance(node, ast.If) and node.lineno <= frame.f_lineno <= (node.end_lineno or 0)
        if around and any(isinstance(name, ast.Name) and name.id == "__name__" for name in ast.walk(node.test)):
            return
    raise RuntimeError(
        f'{script}, line {frame.f_lineno}: put this call under `if __name__ == "__main__":`. Each rank imports the '
        f"script, and without that line would start ranks in turn"
    )


@contextmanager
def _handlers_restored() -> Generator[None]:
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class RankTiming:
    """One variant on all ranks; times in milliseconds, medians over rounds.

    Attributes:
        latency: of the slowest rank.
        compute_ms: the slowest rank's own work.
        skew_ms: by how much the slowest rank's own work exceeds the fastest's.
        collective_ms: in collectives, less the wait for later ranks.
        collectives, bytes: how many in one run, and of what size together (see `Collective.bytes`).
    """

    latency: Timing
    compute_ms: float
    skew_ms: float
    collective_ms: float
    collectives: int
    bytes: int

    def row(self) -> dict[str, Any]:
        """The columns of a record."""
        return {
            **self.latency.row(),
            "compute_ms": round(self.compute_ms, 4),
            "skew_ms": round(self.skew_ms, 4),
            "collective_ms": round(self.collective_ms, 4),
            "collective_count": self.collectives,
            "collective_bytes": self.bytes,
        }


def time_on_ranks(
    variants: Mapping[str, Callable[[], object]],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    repeats: int = 5,
) -> dict[str, RankTiming]:
    """Runs each variant `repeats` times on all ranks of `group`; every rank gets the same result.

    Every round runs all variants in a new random order, the same order on every rank (see `measure.timing`).

    There is no warm-up: the check before it is one.

    Args:
        variants: the same names in the same order on every rank; a rank without work passes a function that returns.
    """
    names = list(variants)
    rounds: dict[str, list[float]] = {name: [] for name in names}
    splits: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    counts: dict[str, tuple[int, int]] = {}
    orders = round_orders(names, repeats + _SPLIT_ROUNDS)  # seeded alike: all ranks must run the same variant
    for order in islice(orders, repeats):
        for name in order:
            rounds[name].append(_seconds(variants[name], group, device))
    for order in orders:
        for name in order:
            with record_collectives() as log:
                seconds = _seconds(variants[name], group, device)
            shared = sum(one.seconds for one in log)
            splits[name].append((seconds - shared, shared))
            counts[name] = (len(log), sum(one.bytes for one in log))
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, (rounds, splits, counts), group=group)
    return {name: _summary(*([one[part][name] for one in ranks] for part in range(3))) for name in names}


def _seconds(run: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    dist.barrier(group)
    _synchronise(device)
    start = time.perf_counter()
    run()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(
    rounds: list[list[float]], splits: list[list[tuple[float, float]]], counts: list[tuple[int, int]]
) -> RankTiming:
    """From each rank's samples, lists by rank."""
    by_round = [list(zip(*ranks, strict=True)) for ranks in zip(*splits, strict=True)]  # (computes, collectives)
    computes = [computes for computes, _ in by_round]
    return RankTiming(
        latency=Timing.of([1e3 * max(ranks) for ranks in zip(*rounds, strict=True)]),
        compute_ms=1e3 * median(max(one) for one in computes),
        skew_ms=1e3 * median(max(one) - min(one) for one in computes),
        collective_ms=1e3 * median(min(collectives) for _, collectives in by_round),
        collectives=max(count for count, _ in counts),
        bytes=max(size for _, size in counts),
    )
