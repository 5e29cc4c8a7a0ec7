"""When a rank does not come: the others end within the timeout, with an error that names it; and what is refused."""

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from kimivl_lab import MoonViTConfig
from kimivl_lab.measure.ranks import run_ranks
from kimivl_lab.parallel.data_parallel import run_dp_sharded_vision_model
from kimivl_lab.parallel.groups import RankError, init_group
from kimivl_lab.parallel.linear import check_plain
from kimivl_lab.parallel.tensor_parallel import check_tensor_parallel_size, tensor_parallel, tensor_parallel_sizes
from tests.conftest import pixels_for, tiny_encoder, tiny_tower
from tests.rank_cases import GRIDS, StubTower

TIMEOUT_S = 3.0
SCENARIOS = {  # name: ranks, those that do not come
    "dies": (4, [1]),
    "keeper of the store dies": (3, [0]),
    "hangs": (2, [1]),
    "shards by a half, reduces over all": (4, [2, 3]),
    "cannot read its images": (3, [1]),
}


def lose_a_rank(scenario: str, rank: int, ranks: int, port: int, timeout_s: float, queue) -> None:
    """One rank of a group that loses some on the way to an all-gather; puts (scenario, rank, error, ...) in `queue`."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    everyone = init_group(timeout_s=30)  # a slow start is not what is tested
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    dist.barrier(everyone)

    def load(mine):
        if scenario == "cannot read its images" and rank == 1:
            raise FileNotFoundError("page_7.png")
        return torch.cat([pixels_for([GRIDS[image]]) for image in mine])

    if scenario == "dies" and rank == 1 or scenario == "keeper of the store dies" and rank == 0:
        os._exit(1)
    if scenario == "hangs" and rank == 1 or scenario.startswith("shards") and rank >= 2:
        time.sleep(60)
    start = time.monotonic()
    try:
        run_dp_sharded_vision_model(StubTower(), None, GRIDS, group, load_pixels=load)
    except Exception as error:
        missing = getattr(error, "missing", [])
        queue.put((scenario, rank, type(error).__name__, str(error), missing, time.monotonic() - start))
    time.sleep(60)  # until killed: nobody's leaving may end the others


@pytest.fixture(scope="module")
def survivors():
    """scenario -> (rank, kind of error, its text, missing ranks, seconds) of every rank that came. All run at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kimivl_lab.kimi_vl.encoder", "tests.test_parallel_failures"])
    queue, processes = context.Queue(), []
    for scenario, (ranks, _) in SCENARIOS.items():
        port = free_port()
        for rank in range(ranks):
            process = context.Process(target=lose_a_rank, args=(scenario, rank, ranks, port, TIMEOUT_S, queue))
            process.start()
            processes.append(process)
    found = {scenario: [] for scenario in SCENARIOS}
    expected = sum(ranks - len(lost) for ranks, lost in SCENARIOS.values()) + 1  # one lost rank tells why
    try:
        for _ in range(expected):
            scenario, *result = queue.get(timeout=30)
            found[scenario].append(result)
    except Empty:
        pass  # the tests below say who hung
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_others_end_in_time_and_name_who_is_missing(survivors, scenario):
    ranks, lost = SCENARIOS[scenario]
    found = {rank: rest for rank, *rest in survivors[scenario]}
    assert set(range(ranks)) - set(lost) <= set(found), "a rank hangs"
    for rank in set(range(ranks)) - set(lost):
        kind, text, missing, seconds = found[rank]
        assert kind == "RankError", text
        assert missing == lost, text
        assert all(f"rank {one}" in text for one in lost)
        assert seconds < TIMEOUT_S + 5


def test_the_reason_reaches_the_other_ranks(survivors):
    texts = {rank: (kind, text) for rank, kind, text, *_ in survivors["cannot read its images"]}
    assert texts[1] == ("FileNotFoundError", "page_7.png")
    assert "rank 1 left with FileNotFoundError: page_7.png" in texts[0][1]


# --- refused ---------------------------------------------------------------------------------------------------------


class Int8Weight(torch.Tensor):
    """A weight-only quantised weight as torchao makes them: a subclass that looks like float32 and holds int8."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.scale = weight.detach().abs().amax(1, keepdim=True) / 127
        self.int8 = (weight.detach() / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # ty: ignore[incompatible-method-override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        return func(*(one.int8 * one.scale if isinstance(one, Int8Weight) else one for one in args), **(kwargs or {}))


def quantised(linear: Any) -> nn.Linear:
    linear.weight = nn.Parameter(Int8Weight(linear.weight), requires_grad=False)
    return linear


@pytest.fixture(scope="module")
def alone():
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_quantised_layer_works_whole_and_is_refused_before_anything_is_cut(alone):
    tower: Any = tiny_tower()
    quantised(tower.encoder.blocks[1].mlp.fc1)
    pixels = torch.randn(4, 3, 14, 14)
    with torch.no_grad():
        want = tower(pixels, [(2, 2)])
        with pytest.raises(ValueError, match="Int8Weight torch.float32: cut first"):
            tensor_parallel(tower, alone)
        assert all(type(block.wqkv) is torch.nn.Linear for block in tower.encoder.blocks)
        assert torch.equal(tower(pixels, [(2, 2)]), want)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 4, bias=False),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.Linear(4, 4).to(torch.float8_e4m3fn),
        nn.Bilinear(4, 4, 4),
        nn.Identity(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_only_plain_layers_are_cut(layer):
    with pytest.raises(ValueError, match="only plain floating-point nn.Linear layers"):
        check_plain(layer)


def test_G8_legal_sizes_divide_heads_and_columns():
    assert tensor_parallel_sizes(MoonViTConfig()) == [1, 2, 4, 8, 16]
    with pytest.raises(ValueError, match="16 heads and 4304 MLP columns .* 3 ranks: legal sizes are 1, 2, 4, 8, 16"):
        check_tensor_parallel_size(MoonViTConfig(), 3)


def test_the_mode_and_its_group_are_checked(alone):
    encoder = tiny_encoder()
    with pytest.raises(ValueError, match="'sharded': one of none, data, tensor, auto"):
        encoder.set_encoder_parallel("sharded", alone)
    for mode in ("data", "tensor", "auto"):
        with pytest.raises(ValueError, match="group .* got None"):
            encoder.set_encoder_parallel(mode)
    metadata = encoder.vision_tower.prepare_encoder_metadata([(2, 2)])
    with pytest.raises(ValueError, match="takes image_grid_hws"):
        encoder.set_encoder_parallel("data", alone)(torch.zeros(4, 3, 14, 14), encoder_metadata=metadata)
    with pytest.raises(ValueError, match="cut over ranks already"):
        encoder.set_encoder_parallel("tensor", alone).set_encoder_parallel("data", alone)


def test_the_error_comes_back_from_another_process_whole():
    error = pickle.loads(pickle.dumps(RankError("all_reduce: rank 2 did not come", [2])))
    assert (str(error), error.missing) == ("all_reduce: rank 2 did not come", [2])


@pytest.mark.parametrize(
    ("local", "gpus", "expected"),
    [
        ("1", 2, 1),
        (None, 1, 0),
        (None, 8, "which of the 8 GPUs"),
        (None, 0, "which of the 0 GPUs"),
        ("2", 2, "LOCAL_RANK=2 needs 3 GPUs, this process sees 2"),
        ("-1", 2, "LOCAL_RANK"),
        ("one", 2, "LOCAL_RANK"),
    ],
)
def test_the_gpu_of_a_rank_with_and_without_torchrun(monkeypatch, local, gpus, expected):
    """Faked GPUs and NCCL: which GPU is taken, and that a bad one is refused before any connection."""
    joined = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: joined.append(device.index))
    nccl = SimpleNamespace(
        init_process_group=lambda backend, **more: joined.append((backend, more["device_id"])),
        group=SimpleNamespace(WORLD=object()),
    )
    monkeypatch.setattr("kimivl_lab.parallel.groups.dist", nccl)
    if isinstance(expected, int):
        init_group("cuda")
        assert joined == [expected, ("nccl", torch.device("cuda", expected))]
    else:
        with pytest.raises(ValueError, match=expected):
            init_group("cuda")
        assert joined == []


def test_a_group_needs_a_finite_timeout():
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        init_group(timeout_s=0)


def fail_on_rank_1() -> None:
    if dist.get_node_local_rank() == 1:
        raise ValueError("no picture")


def test_the_launcher_names_the_rank_that_failed_and_keeps_the_signal_handlers():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ChildFailedError, match=r"rank\s+: 1[\s\S]*no picture"):
        run_ranks(fail_on_rank_1, 2)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


GUARD = 'if __name__ == "__main__":\n    '
CALL = "print(len(set(run_ranks(os.getpid, 2))))\n"


@pytest.mark.parametrize("text", [CALL, f"def main():\n    {CALL}\nmain()\n", f"{GUARD}pass\n{CALL}"])
def test_a_script_without_a_main_guard_reads_the_reason_first(tmp_path, text):
    done = run_script(tmp_path, text)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert len(lines) <= 20 and sum("Traceback" in line for line in lines) == 1
    assert "script.py, line" in lines[-1] and '__name__ == "__main__"' in lines[-1]


def test_a_script_with_a_main_guard_starts_ranks(tmp_path):
    assert run_script(tmp_path, f"def main():\n    {CALL}\n{GUARD}main()\n").stdout == "2\n"


def run_script(folder, text):
    (folder / "script.py").write_text(f"import os\n\nfrom kimivl_lab.measure.ranks import run_ranks\n\n{text}")
    return subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=120)
