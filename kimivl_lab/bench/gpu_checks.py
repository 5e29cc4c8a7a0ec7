"""Checks that what only a GPU can show holds there: the first thing to run on a new GPU, before anything is timed.

    python -m kimivl_lab.bench.gpu_checks [--device cuda] [--only gradients] [--quick]

Each check is one function of a device. Its docstring's first sentence says what holds when the check passes, and the
check raises an error where that is not so. `run_checks` runs all of them: one that fails does not stop the others. A
check that needs a GPU is skipped on a CPU, where the others run as a rehearsal. The last line is one JSON document.

Test: tests/test_gpu_checks.py.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import MoonViTConfig
from ..geometry import GridLike
from ..graphs.cuda import CudaBackend
from ..graphs.runner import EncoderCudaGraphRunner
from ..kernels.dispatch import compile_unavailable
from ..kernels.packed_attention import WITHOUT_BACKWARD, attention_unavailable
from ..kernels.rotation import rotate_compiled, rotate_complex
from ..measure.roofline import copy_gbps_of
from ..measure.timing import time_interleaved
from ..moonvit.attention import ATTENTION_BACKENDS
from ..moonvit.metadata import EncoderMetadata
from ..moonvit.model import MoonVitPretrainedModel
from ..syncs.counter import count_host_syncs
from . import harness
from .encoder import parts
from .towers import noise

GRIDS: Sequence[GridLike] = ((4, 6), (2, 2), (10, 4))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative, of features of the preset "tiny"


class Check(NamedTuple):
    """One finding.

    Attributes:
        name: of the check.
        ok: None where the device cannot show it.
        means: what holds if `ok`, else what went wrong, or why the check was skipped.
        seconds: that it took.
    """

    name: str
    ok: bool | None
    means: str
    seconds: float


class Skipped(Exception):
    """This device cannot show what the check is about; the message says why."""


# --- what is checked -------------------------------------------------------------------------------------------------


def same_as_cpu(device: torch.device) -> None:
    """Float and raw uint8 patches give on the device the features that float32 gives on the CPU."""
    raw = torch.randint(0, 256, (sum(h * w for h, w in GRIDS), 3, 14, 14), dtype=torch.uint8, device="cpu")
    floats = (raw.float() / 255 - 0.5) / 0.5
    want = _tower(torch.device("cpu"), torch.float32)(floats, GRIDS)
    for dtype, tolerance in TOLERANCE.items():
        tower = _tower(device, dtype)
        for pixels in (floats, raw):
            _compare(tower(pixels, GRIDS).cpu(), want, tolerance)


def compiler(device: torch.device) -> None:
    """Triton, a C compiler and Python's headers are there, so that the rotation of q and k can be compiled."""
    _needs_cuda(device)
    assert not (reason := compile_unavailable(device)), reason


def compiled_rotation(device: torch.device) -> None:
    """The compiled rotation of q and k equals the reference, and it is not the fallback that ran."""
    _needs_cuda(device)
    qk = torch.randn(96, 2, 4, 72, device=device, dtype=torch.bfloat16)
    angles = torch.randn(96, 36, device=device)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=-1)
    _compare(rotate_compiled(qk, cos_sin), rotate_complex(qk, cos_sin), 0.01)
    assert not rotate_compiled.errors, f"it fell back: {rotate_compiled.errors}"


def graphs_float32(device: torch.device) -> None:
    """A runner of a float32 tower captures, and replays the eager features."""
    _compare_graphs(device, torch.float32)


def graphs_bfloat16(device: torch.device) -> None:
    """A runner of a bfloat16 tower captures, and replays the eager features."""
    _compare_graphs(device, torch.bfloat16)


def pool_bytes(device: torch.device) -> None:
    """The bytes that a runner reports for its graphs are positive, and no graph has a negative part of them."""
    runner = EncoderCudaGraphRunner(_tower(device, torch.float32), [4, 16, 64])
    runner.capture()
    parts = {budget: calls.nbytes for budget, calls in runner.stats.graphs.items()}
    assert min(parts.values()) >= 0 and sum(parts.values()) > 0, f"bytes by budget: {parts}"


def reset_frees(device: torch.device) -> None:
    """A runner that is reset gives its pool and inputs back to the device."""
    _needs_cuda(device)
    runner = EncoderCudaGraphRunner(_tower(device, torch.bfloat16), [1104])
    reserved, held = [], 0
    for _ in range(5):  # the first make workspaces that stay
        runner.capture()
        held = runner.stats.nbytes
        runner.reset()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved(device))
    grown = reserved[-1] - reserved[1]
    assert grown < held, f"{grown / 2**20:.0f} MiB are left of three captures of {held / 2**20:.0f} MiB"


def half_full_graphs(device: torch.device) -> None:
    """A graph half full of padding takes less than `max_waste` (2) times as long as the eager call of its images."""
    _needs_cuda(device)
    tower = _tower(device, torch.bfloat16, "lab")
    runner = EncoderCudaGraphRunner(tower, [512], max_waste=None)
    for grids in ([(32, 32)], [(8, 16)] * 8):
        pixels = noise(grids, 0).to(device, torch.bfloat16)
        runs = {"eager": lambda: tower(pixels, grids), "replay": lambda: runner(pixels, grids)}  # noqa: B023
        times = time_interleaved(runs, device=device, warmup=3, repeats=15)
        eager, replay = times["eager"].p50_ms, times["replay"].p50_ms
        assert replay < 2 * eager, f"{len(grids)} images: {replay:.2f} ms by a graph, {eager:.2f} ms eager"


def rows_past_the_images(device: torch.device) -> None:
    """Rows past the last offset come out as zeros with every attention backend that runs here."""
    for name, dtype, metadata, (q, k, v) in _attention_cases(device):
        padded = [torch.cat((x, torch.full_like(x[:7], float("nan")))) for x in (q, k, v)]
        out = ATTENTION_BACKENDS[name](padded[0], padded[1], padded[2], metadata)
        assert not out[len(q) :].count_nonzero(), f"{name} in {dtype} leaves something in rows of no image"
        _compare(out[: len(q)], ATTENTION_BACKENDS["eager"](q, k, v, metadata), 0.02)


def gradients(device: torch.device) -> None:
    """Every attention backend that has a backward gives the gradients of the reference."""
    for name, _, metadata, (q, k, v) in _attention_cases(device):
        if name in WITHOUT_BACKWARD:
            continue
        found = [_gradients(ATTENTION_BACKENDS[which], q, k, v, metadata) for which in (name, "eager")]
        for got, want in zip(*found, strict=True):
            _compare(got, want, 0.02)


def weights_announced(device: torch.device) -> None:
    """A write to `weight.data` reaches the features once `weights_changed` has announced it."""
    tower = _tower(device, torch.float32)
    weight, pixels = tower.patch_embed.pos_emb.weight, noise(GRIDS, 0)
    tower(pixels, GRIDS)
    weight.data.copy_(torch.randn_like(weight))
    tower.weights_changed()
    changed = tower(pixels, GRIDS)
    tower.set_options(position="interpolate")
    _compare(changed, tower(pixels, GRIDS), 1e-4)


def no_waits(device: torch.device) -> None:
    """A warm forward and a warm replay make the host wait for nothing, and allocate no pinned memory."""
    _needs_cuda(device)
    tower, pixels = _tower(device, torch.bfloat16), noise(GRIDS, 0)
    runner = EncoderCudaGraphRunner(tower, [64])
    runner.capture()
    before = _pinned_allocations()
    runner(pixels, GRIDS)
    assert _pinned_allocations() == before, "the first replay allocated pinned memory, though a capture reserves it"
    for name, run in {"forward": tower, "replay": runner}.items():
        run(pixels, GRIDS), run(pixels, GRIDS)
        torch.cuda.synchronize()
        before = _pinned_allocations()
        counter = count_host_syncs(run, pixels, GRIDS)
        assert not counter.total, f"{name}: {counter}"
        assert _pinned_allocations() == before, f"a warm {name} allocated pinned memory"


def two_streams(device: torch.device) -> None:
    """Calls in turn on three streams give the features of calls on one: eager, and by graphs."""
    _needs_cuda(device)
    tower, batches = _tower(device, torch.float32), [noise(GRIDS, seed) for seed in range(12)]
    runner = EncoderCudaGraphRunner(tower, [64], max_waste=None)
    runner.capture()
    want = [tower(pixels, GRIDS) for pixels in batches]
    tower.patch_embed.pos_emb.cache.drop_entries()
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for number, pixels in enumerate(batches):
        with torch.cuda.stream(streams[number % 3]):
            found.append((tower(pixels, GRIDS), runner(pixels, GRIDS)))
    torch.cuda.synchronize()
    for pair, right in zip(found, want, strict=True):
        for got in pair:
            _compare(got, right, 1e-4)


def kernel_time_once(device: torch.device) -> None:
    """The parts of a profiled forward add up to no more than the time that it took."""
    tower, pixels = _tower(device, torch.bfloat16), noise(GRIDS, 0).to(device)
    tower(pixels, GRIDS)
    _synchronize(device)
    start = time.perf_counter()
    spent = parts(lambda: tower(pixels, GRIDS))
    _synchronize(device)
    took = (time.perf_counter() - start) * 1e3
    assert 0 < sum(spent.values()) <= took, f"{sum(spent.values()):.3f} ms in {took:.3f} ms: {spent}"
    assert spent["linear"] and spent["attention"], f"no time in linear layers or attention: {spent}"


def second_level_cache(device: torch.device) -> None:
    """A copy of 16 MiB, which the second-level cache holds, is at least as fast as one of 512 MiB."""
    _needs_cuda(device)
    small, large = copy_gbps_of(16 * 2**20, device), copy_gbps_of(2**29, device)
    assert small > 0.8 * large, f"{small:.0f} GB/s for 16 MiB, {large:.0f} GB/s for 512 MiB"


def out_of_memory(device: torch.device) -> None:
    """Too large a request stays an out-of-memory error, and the tower works after it."""
    _needs_cuda(device)
    tower, pixels = _tower(device, torch.float32), noise(GRIDS, 0)
    want = tower(pixels, GRIDS)
    with suppress(torch.OutOfMemoryError):
        torch.empty(2**50, dtype=torch.uint8, device=device)
    _compare(tower(pixels, GRIDS), want, 1e-4)


def nccl_alone(device: torch.device) -> None:
    """A group of one rank by NCCL sums, gathers, broadcasts and is captured, with no variable of torchrun set."""
    _needs_cuda(device)
    if dist.is_initialized() or not dist.is_nccl_available():
        raise Skipped("a group exists already, or torch has no NCCL")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        ones, gathered, said = torch.ones(3, device="cuda:0"), torch.zeros(3, device="cuda:0"), ["a cost model"]
        dist.all_reduce(ones, group=dist.group.WORLD)
        dist.all_gather_into_tensor(gathered, ones, group=dist.group.WORLD)
        dist.broadcast_object_list(said, src=0, group=dist.group.WORLD, device=ones.device)
        assert gathered.tolist() == [1, 1, 1] and said == ["a cost model"]

        def doubled_sum(x: Tensor) -> Tensor:
            y = 2 * x
            dist.all_reduce(y, group=dist.group.WORLD)
            return y

        graph = CudaBackend(ones.device).capture(doubled_sum, {"x": ones}, dict, allow_collectives=True)
        ones.fill_(3)
        graph.replay()
        assert graph.output.tolist() == [6, 6, 6], "a captured all_reduce reads what was there at the capture"
    finally:
        dist.destroy_process_group()


CHECKS: dict[str, Callable[[torch.device], None]] = {
    "graphs_bfloat16": graphs_bfloat16,
    "graphs_float32": graphs_float32,
    "same_as_cpu": same_as_cpu,
    "pool_bytes": pool_bytes,
    "reset_frees": reset_frees,
    "rows_past_the_images": rows_past_the_images,
    "gradients": gradients,
    "weights_announced": weights_announced,
    "no_waits": no_waits,
    "two_streams": two_streams,
    "half_full_graphs": half_full_graphs,
    "kernel_time_once": kernel_time_once,
    "second_level_cache": second_level_cache,
    "compiler": compiler,
    "compiled_rotation": compiled_rotation,
    "out_of_memory": out_of_memory,
    "nccl_alone": nccl_alone,
}


# --- running them ----------------------------------------------------------------------------------------------------


def run_checks(device: torch.device | str, names: Iterable[str] | None = None) -> list[Check]:
    """The findings of the checks called `names` (None: all) on `device`, in their order; no error passes."""
    return [_run(name, torch.device(device)) for name in (CHECKS if names is None else names)]


def _run(name: str, device: torch.device) -> Check:
    check, start = CHECKS[name], time.perf_counter()
    try:
        check(device)
        ok, means = True, (check.__doc__ or "").strip().splitlines()[0]
    except Skipped as reason:
        ok, means = None, str(reason)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).splitlines() or [""])[0]
        ok, means = False, f"{type(error).__name__}: {text:.500} ({Path(frame.filename).name}:{frame.lineno})"
    return Check(name, ok, means, round(time.perf_counter() - start, 2))


def _needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Skipped("needs a GPU")


def _tower(device: torch.device, dtype: torch.dtype, preset: str = "tiny") -> MoonVitPretrainedModel:
    torch.manual_seed(0)
    return MoonVitPretrainedModel(MoonViTConfig.preset(preset)).eval().requires_grad_(False).to(device, dtype)


def _pinned_allocations() -> int:
    return torch.cuda.host_memory_stats().get("num_host_alloc", 0)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compare(got: Tensor, want: Tensor, tolerance: float) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= tolerance, f"off by {error:.3g} relative, allowed {tolerance:g}"  # NaN is not allowed


def _compare_graphs(device: torch.device, dtype: torch.dtype) -> None:
    tower, pixels = _tower(device, dtype), noise(GRIDS, 0)
    poison = ("pool", "padding") if device.type == "cuda" else ("pool",)
    runner = EncoderCudaGraphRunner(tower, [4, 64], max_waste=None, poison=poison)
    for grids in (GRIDS, GRIDS[:1], GRIDS[1:2]):
        patches = pixels[: sum(h * w for h, w in grids)]
        _compare(runner(patches, grids), tower(patches, grids), TOLERANCE[dtype])
    assert runner.stats.hits and not runner.stats.misses, f"not all were replays:\n{runner.stats}"


def _attention_cases(
    device: torch.device,
) -> Iterator[tuple[str, torch.dtype, EncoderMetadata, tuple[Tensor, Tensor, Tensor]]]:
    """(backend, dtype, metadata, (q, k, v)) for every backend that runs here."""
    for dtype in (torch.bfloat16, torch.float32):
        metadata = _tower(device, dtype).prepare_encoder_metadata(GRIDS, max_images=5)
        q, k, v = torch.randn(3, metadata.num_patches, 4, 72, device=device).to(dtype).unbind(0)
        for name in ATTENTION_BACKENDS:
            if attention_unavailable(name, device, dtype) is None:
                yield name, dtype, metadata, (q, k, v)


def _gradients(attend: Callable[..., Tensor], *inputs: Tensor | EncoderMetadata) -> list[Tensor]:
    *tensors, metadata = inputs
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors if isinstance(tensor, Tensor)]
    out = attend(*leaves, metadata)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    with torch.enable_grad():
        return list(torch.autograd.grad((out.float() * weights).sum(), leaves))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("gpu_checks", __doc__)
    parser.add_argument("--only", help="checks whose name begins so, e.g. graphs")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --device cpu is a rehearsal")
    chosen = [name for name in CHECKS if name.startswith(options.only or "")]
    if not chosen:
        parser.error(f"no check begins with {options.only!r}: {', '.join(CHECKS)}")
    sys.exit(report(options, chosen))


def report(options: argparse.Namespace, names: Iterable[str]) -> int:
    """Runs the checks, prints a line for each and one JSON document at the end; 1 if one failed, else 0."""
    found = []
    for name in names:
        found += run_checks(options.device, [name])
        word = {True: "ok", False: "FAILED", None: "skipped"}[found[-1].ok]
        harness.progress(f"{word:8}{found[-1].name}: {found[-1].means} ({found[-1].seconds} s)")
    failed = [one.name for one in found if one.ok is False]
    harness.finish(
        {
            "benchmark": "gpu_checks",
            "device": options.device,
            "failed": failed,
            "checks": [one._asdict() for one in found],
        }
    )
    return 1 if failed else 0


if __name__ == "__main__":
    main()
