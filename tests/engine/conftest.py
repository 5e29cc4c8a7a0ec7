"""Real vLLM engines, each in a process group that ends with its test. `make test-engine` runs these tests."""

import importlib.util
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from kimivl_lab.engines.server import free_port, own_group, wait_for_health
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


def run_in_process(checkpoint, parts, out, environment):
    """Runs in_process.py; gives its exit code and what it wrote."""
    command = [sys.executable, str(HERE / "in_process.py"), str(checkpoint), json.dumps(parts), str(out)]
    single = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    log = Path(out).with_suffix(".log")
    with own_group(command, log, single) as process:
        process.wait(150)
    return process.returncode, log.read_text()


@contextmanager
def served(checkpoint, parts, environment, folder):
    """An HTTP client of a server with these parts, and the server's process."""
    log, port = folder / "server.log", free_port()
    url = f"http://127.0.0.1:{port}"
    overrides = {"architectures": [ARCHITECTURE], "kimivl_lab_parts": parts}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
        *("--served-model-name", "kimi-vl", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--enforce-eager", "--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--max-num-seqs", "4"),
        *("--hf-overrides", json.dumps(overrides)),
    ]
    with (
        own_group(command, log, environment) as process,
        httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
    ):
        wait_for_health(url, process, log)
        yield client, process
