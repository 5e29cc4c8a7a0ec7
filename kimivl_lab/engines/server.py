"""A server started for a measurement or a test, in a process group that ends with it.

    with own_group(command, log) as process:
        wait_for_health(url, process, log)

Test: tests/test_engine_bench.py, tests/engine.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

_LAST_BYTES = 1500  # of a log, in a message


class ServerError(RuntimeError):
    """A server that did not come up, or that does not answer any more; the message says why."""


@contextmanager
def own_group(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, patience: float = 10
) -> Generator[subprocess.Popen[bytes]]:
    """Runs a command whose output goes to `log`. No process of its group survives the block, however it ends.

    At its end the group gets SIGTERM, and after `patience` seconds SIGKILL. If this process is killed, a shell that
    waits for the end of its input kills the group.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    waits = ["sh", "-c", "read -r _; kill -KILL -$0", str(process.pid)]
    watcher = subprocess.Popen(waits, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 20)):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, sign)
            if wait_until(lambda: process.poll() is not None and not group_lives(process.pid), seconds):
                break
        watcher.kill()
        watcher.communicate()


def group_lives(group: int) -> bool:
    """Whether a process of the group runs. One that ended, and for which nobody has waited, does not."""
    if not Path("/proc/self/stat").exists():  # macOS
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            return True
        return False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_group = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                return True
    return False


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Asks ten times a second; whether it came true in time."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.1)
    return done()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens to at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def wait_for_health(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 180) -> None:
    """Waits until `url`/health answers. ServerError with the end of the log if the process ends, or at the limit."""
    with httpx.Client(timeout=5, trust_env=False) as client:

        def is_up_or_gone() -> bool:
            with suppress(httpx.TransportError):
                return client.get(f"{url}/health").status_code == 200
            return process.poll() is not None

        ready = wait_until(is_up_or_gone, seconds)
    if process.poll() is not None:
        raise ServerError(f"the server ended at its start, exit code {process.returncode}: {log_end(log)}")
    if not ready:
        raise ServerError(f"the server did not come up in {seconds:.0f} s: {log_end(log)}")


def log_end(log: Path) -> str:
    return log.read_bytes()[-_LAST_BYTES:].decode(errors="replace").strip() or "it printed nothing"
