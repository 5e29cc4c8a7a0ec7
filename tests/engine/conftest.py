"""Real vLLM engines, each in a process group that ends with its test. `make test-engine` runs these tests."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import torch

from kimivl_lab.kimi_vl.random_checkpoint import write_random_checkpoint

HERE = Path(__file__).parent
ARCHITECTURE = "KimiVLLabForConditionalGeneration"


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="needs vLLM: `make engine-venv`, then `make test-engine`")
        for item in items:
            if HERE in Path(item.path).parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), vocab_size=1024, dtype=torch.float32)


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm")),
    }


@contextmanager
def own_group(command, **kwargs):
    """A process in a group that nobody of survives the block, however it ends, by `kill -9` of this process too."""
    process = subprocess.Popen(command, start_new_session=True, **kwargs)
    # The shell waits for the end of its input, which comes when this process ends.
    watcher = subprocess.Popen(
        ["sh", "-c", "read -r _; kill -KILL -$0", str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        for sign, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 20)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            if wait_until(lambda: process.poll() is not None and not group_lives(process.pid), patience):
                break
        watcher.kill()
        watcher.communicate()


def group_lives(group):
    """Whether a process of the group runs; those that ended and that nobody has waited for do not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                return True
    return False


def wait_until(done, seconds):
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.1)
    return done()


def run_in_process(checkpoint, parts, out, environment):
    """Runs in_process.py; gives its exit code and what it wrote."""
    command = [sys.executable, HERE / "in_process.py", checkpoint, json.dumps(parts), out]
    single = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    log = Path(out).with_suffix(".log")
    with log.open("w") as file, own_group(command, stdout=file, stderr=file, env=single) as process:
        process.wait(150)
    return process.returncode, log.read_text()


@contextmanager
def served(checkpoint, parts, environment, folder):
    """An HTTP client of a server with these parts, and the server's process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = folder / "server.log"
    overrides = {"architectures": [ARCHITECTURE], "kimivl_lab_parts": parts}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint),
        *("--served-model-name", "kimi-vl", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--enforce-eager", "--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--max-num-seqs", "4"),
        *("--hf-overrides", json.dumps(overrides)),
    ]
    with (
        log.open("w") as file,
        own_group(command, stdout=file, stderr=file, env=environment) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client,
    ):

        def is_up():
            with suppress(httpx.TransportError):
                return client.get("/health").status_code == 200
            return process.poll() is not None

        assert wait_until(is_up, 150) and process.poll() is None, log.read_text()[-4000:]
        yield client, process
