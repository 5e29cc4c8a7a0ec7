"""Starts ranks on this machine by torchrun's own launcher, from a script, a test or a notebook.

A rank that fails ends the others, and the error says which it was, with its traceback.
"""

import multiprocessing
import signal
import threading
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

Result = TypeVar("Result")

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # the launcher takes them and does not give them back


def run_ranks(worker: Callable[..., Result], ranks: int, *args: object, threads: int = 1) -> list[Result]:
    """Calls `worker(*args)` in `ranks` processes, each of `threads` threads; their results, by rank.

    The processes fork from a server that has imported torch and this package, so that they start in no time.

    Args:
        worker: a function of a module (not of a notebook's cell) that begins with `init_group`.
        args: picklable, as are the results.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed; it is named.
    """
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
        results = elastic_launch(config, _begin)(threads, worker, *args)
    return [results[rank] for rank in range(ranks)]


def _begin(threads: int, worker: Callable[..., Result], *args: object) -> Result:
    torch.set_num_threads(threads)
    result = worker(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


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
