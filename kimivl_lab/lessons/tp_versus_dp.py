"""What notebook 50 runs on several ranks, and the tables and lists between its cells.

`run_ranks` calls a function of this module on every rank: another process can import a module, but not a cell of a
notebook.

Test: tests/test_parallel_lessons.py.
"""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..bench.fit_cost_model import CollectivePoint, MeasuredPoint, fit_cost_model, prediction_errors
from ..bench.parallel import summary
from ..config import KimiVLConfig, MoonViTConfig
from ..datasets import data_path, draw_sizes
from ..geometry import Grid, image_geometry, patch_counts
from ..gpus import find_gpu
from ..kimi_vl.encoder import KimiVLEncoder
from ..measure.accuracy import relative_error
from ..measure.ranks import run_ranks, time_on_ranks
from ..measure.records import find_record, read_record
from ..measure.timing import Timing
from ..moonvit.merger import split_image_features
from ..moonvit.model import MoonVitPretrainedModel
from ..parallel.balance import (
    QuadraticCost,
    balance_by_cost,
    get_dp_encoder_lb_assignment,
    lower_bound,
    round_robin_assignment,
)
from ..parallel.collectives import Collective, all_gather, all_reduce, broadcast, record_collectives
from ..parallel.cost_model import CostModel
from ..parallel.data_parallel import Balance, run_dp_sharded_vision_model
from ..parallel.gpu_rates import cost_model_of_gpu, gpu_rates
from ..parallel.groups import RankError, init_group
from ..parallel.linear import RowParallelLinear
from ..parallel.tensor_parallel import tensor_parallel

Measured = list[dict[str, tuple[MeasuredPoint, Timing]]]  # of each batch, way -> point and spread


@dataclass(frozen=True)
class Encoded:
    """One batch, as one rank saw it.

    Attributes:
        error: relative, of all features to those of the whole encoder on one rank.
        patches: that went through this rank's blocks.
        collectives: in their order.
    """

    error: float
    patches: int
    collectives: list[Collective]


@torch.no_grad()
def encode_in_modes(config: KimiVLConfig, grids: list[Grid], modes: Sequence[str]) -> dict[str, Encoded]:
    """Encodes one batch in each of `modes` (of `ENCODER_PARALLEL`); mode -> what this rank saw."""
    group = init_group()  # of all ranks that run_ranks started
    whole, pixels = seeded_encoder(config), noise(grids, seed=0)  # the same on every rank
    alone = whole.get_image_features(pixels, grids)  # the right features: one process, nothing shared
    seen = {}
    for mode in modes:
        encoder = copy.deepcopy(whole).set_encoder_parallel(mode, group)
        patches = lengths_through(encoder.vision_tower.encoder)
        with record_collectives() as collectives:
            features = encoder.get_image_features(pixels, grids)
        seen[mode] = Encoded(relative_error(features, alone), sum(patches), collectives)
    return seen


def encode_as_before(tower: MoonVitPretrainedModel, pixels: Tensor, grids: list[Grid], group: dist.ProcessGroup) -> Any:
    """Data parallel with a fault: a short cut for one rank, which returns another type than the long way."""
    if group.size() == 1:
        return split_image_features(tower(pixels, grids), grids)
    return run_dp_sharded_vision_model(tower, pixels, grids, group)


@dataclass(frozen=True)
class Waited:
    """What became of a rank that waited for others in vain.

    Attributes:
        missing: the ranks that did not come.
        words: the error's, less those of the library below.
    """

    missing: list[int]
    words: str


@torch.no_grad()
def encode_in_halves(
    config: KimiVLConfig, grids: list[Grid], busy: Sequence[bool], over_all: bool, timeout_s: float
) -> float | Waited | None:
    """Half of the ranks share one encoder, tensor parallel, the other half another; either has images of its own.

    Args:
        busy: whether the first half has images, and the second.
        over_all: the fault: layers are cut over a half, their sums go over all ranks.
        timeout_s: the longest that a rank waits in a collective.

    Returns:
        The relative error of this rank's features; what ended its wait; or None, it had no images.
    """
    world, timeout = init_group(), timedelta(seconds=timeout_s)
    everyone, (half, _) = dist.new_group(timeout=timeout), dist.new_subgroups(world.size() // 2, timeout=timeout)
    number = world.rank() // half.size()
    pixels, outcome = noise(grids, seed=number), None
    encoder = seeded_encoder(config).set_encoder_parallel("tensor", half)
    if over_all:
        sum_over(everyone, encoder)
    if busy[number]:
        try:
            features = encoder.get_image_features(pixels, grids)
            outcome = relative_error(features, seeded_encoder(config).get_image_features(pixels, grids))
        except RankError as error:
            outcome = Waited(error.missing, str(error).partition(" (")[0])
    dist.barrier(world)  # a rank without images stays until the others are done
    return outcome


def sum_over(group: dist.ProcessGroup, encoder: nn.Module) -> None:
    """The fault: the layers were cut over one group, and from now on their sums go over another one."""
    for layer in encoder.modules():
        if isinstance(layer, RowParallelLinear):
            layer.group = group


def outcome_words(outcome: float | Waited | None) -> str:
    """What `encode_in_halves` returned on one rank, as a sentence."""
    if outcome is None:
        return "no images"
    if isinstance(outcome, Waited):
        return outcome.words
    return "features right" if outcome < 1e-5 else "features WRONG, and no error"


@torch.no_grad()
def time_modes(config: MoonViTConfig, batches: Sequence[list[Grid]], modes: Sequence[str], repeats: int) -> Measured:
    """For every batch, mode -> its median and its spread.

    Args:
        modes: "single", "tensor", "data", or, to place the images as another balance does, "data, by patches" or
            "data, round robin".
    """
    group, measured = init_group(), []
    torch.manual_seed(0)
    tower = MoonVitPretrainedModel(config).eval()
    cut = tensor_parallel(copy.deepcopy(tower), group)
    named = balances(config)
    placed = {"data": named["by cost"]} | {f"data, {name}": named[name] for name in ("by patches", "round robin")}
    for grids in batches:
        pixels, sizes = noise(grids, seed=0), patch_counts(grids)
        runs: dict[str, Callable[[], object]] = {
            "single": partial(tower, pixels, grids) if group.rank() == 0 else lambda: None,
            "tensor": partial(cut, pixels, grids),
        }
        for name, balance in placed.items():
            runs[name] = partial(run_dp_sharded_vision_model, tower, pixels, grids, group, balance=balance)
        timed = time_on_ranks({mode: runs[mode] for mode in modes}, group, torch.device("cpu"), repeats=repeats)
        points = {}
        for mode, timing in timed.items():
            ranks = 1 if mode == "single" else group.size()
            by_rank = placed[mode](sizes, ranks).by_rank if mode in placed else None
            seconds = timing.latency.p50_ms / 1e3
            points[mode] = MeasuredPoint(mode.partition(",")[0], sizes, ranks, seconds, by_rank), timing.latency
        measured.append(points)
    return measured


def measure_two_ranks(
    config: MoonViTConfig, fit_on: Sequence[list[Grid]], check_on: Sequence[list[Grid]], uneven: list[Grid]
) -> tuple[CostModel, Measured, Measured]:
    """The cost model of this machine, fitted on the batches `fit_on`; those batches, measured; and others, measured.

    Args:
        check_on: measured on one rank, data parallel and tensor parallel.
        uneven: measured data parallel only, with each of the balances.
    """
    modes, placed = ("single", "data", "tensor"), ("data, round robin", "data, by patches", "data")
    collectives = run_ranks(time_collectives, 2, [2**power for power in range(12, 23)], 5)[0]
    fitted = run_ranks(time_modes, 2, config, fit_on, modes, 5)[0]
    checked = run_ranks(time_modes, 2, config, check_on, modes, 5)[0]
    checked += run_ranks(time_modes, 2, config, [uneven], placed, 5)[0]
    points = [point for batch in fitted for point, _ in batch.values()]
    return fit_cost_model(config, torch.float32, points, collectives, source="fitted here"), fitted, checked


def time_collectives(sizes: Sequence[int], repeats: int) -> list[CollectivePoint]:
    """Every kind of collective that leaves each of `sizes` bytes on every rank."""
    group, points = init_group(), []
    for size in sizes:
        whole = torch.zeros(size // 4, device="cpu")
        own = torch.zeros(len(whole) // group.size(), device="cpu")
        runs = {
            "all_reduce": partial(all_reduce, whole, group),
            "all_gather": partial(all_gather, whole, own, group),
            "broadcast": partial(broadcast, whole, 0, group),
        }
        for kind, timing in time_on_ranks(runs, group, torch.device("cpu"), repeats=repeats).items():
            points.append(CollectivePoint(kind, group.size(), whole.nbytes, timing.latency.p50_ms / 1e3))
    return points


def seeded_encoder(config: KimiVLConfig) -> KimiVLEncoder:
    """The same on every rank, with biases: new ones are 0, and one that is added twice would not show."""
    torch.manual_seed(0)
    encoder = KimiVLEncoder(config).eval()
    for name, parameter in encoder.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.1)
    return encoder


def lengths_through(module: nn.Module) -> list[int]:
    """A list that fills with the length of what the module is called on."""
    lengths: list[int] = []
    module.register_forward_pre_hook(lambda _, inputs: lengths.append(len(inputs[0])))
    return lengths


def noise(grids: Sequence[Grid], seed: int) -> Tensor:
    """(L, 3, 14, 14), different in every patch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(patch_counts(grids)), 3, 14, 14, generator=generator, device="cpu")


# --- tables and lists between the cells -------------------------------------------------------------------------------

OUTCOMES = ("features right", "features wrong, no error", "the ranks wait in vain")
BALANCES = ("round robin", "by patches", "by cost")


def balances(config: MoonViTConfig) -> dict[str, Balance]:
    """The three balances of `BALANCES`, by name; "by cost" counts the FLOPs of a tower of this config."""
    by_cost = partial(balance_by_cost, cost=QuadraticCost.of_flops(config))
    return dict(zip(BALANCES, (round_robin_assignment, get_dp_encoder_lb_assignment, by_cost), strict=True))


def real_batches(limit: int, images: int = 32, count: int = 40) -> list[list[int]]:
    """Batches of photographs, screens, camera files and receipts in equal shares, in patches, the same every time.

    Args:
        limit: of the processor, in patches before padding.
    """
    workloads = ("coco_val2017", "device_screens", "cameras", "receipts")
    each = images * count // len(workloads)
    patches = [
        image_geometry(*size, in_token_limit=limit).patches
        for workload in workloads
        for size in draw_sizes(workload, each, seed=0)
    ]
    random.Random(0).shuffle(patches)
    return [patches[start : start + images] for start in range(0, len(patches), images)]


def schedules(config: MoonViTConfig, sizes: Sequence[int], ranks: int) -> dict[str, list[list[tuple[int, float]]]]:
    """Balance -> for each rank its images as (patches, TFLOP), as `plots.parallel.schedule` draws them."""
    cost = QuadraticCost.of_flops(config)
    return {
        name: [[(sizes[image], cost(sizes[image]) / 1e12) for image in rank] for rank in place(sizes, ranks).by_rank]
        for name, place in balances(config).items()
    }


def bound(config: MoonViTConfig, sizes: Sequence[int], ranks: int) -> float:
    """TFLOP that the slowest rank has at least, whatever the balance."""
    cost = QuadraticCost.of_flops(config)
    return lower_bound([cost(size) for size in sizes], ranks) / 1e12


def idle_percent(ranks: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Of the time of all ranks until the slowest one is done, the part in which ranks wait; ranks as in `schedules`."""
    busy = [sum(work for _, work in images) for images in ranks]
    return 100 * (1 - sum(busy) / (len(busy) * max(busy)))


def mean_excess(config: MoonViTConfig, batches: Sequence[Sequence[int]], ranks: int) -> dict[str, float]:
    """Balance -> by how much its slowest rank exceeds `bound`, the mean over `batches` (patches of each image)."""
    over: dict[str, list[float]] = {name: [] for name in BALANCES}
    for sizes in batches:
        least = bound(config, sizes, ranks)
        for name, by_rank in schedules(config, sizes, ranks).items():
            over[name].append(max(sum(work for _, work in images) for images in by_rank) / least - 1)
    return {name: mean(values) for name, values in over.items()}


def print_encoded(ranks: Sequence[Mapping[str, Encoded]], by_hand: Mapping[str, int] | None = None) -> None:
    """What `encode_in_modes` returned on all ranks; `by_hand`: mode -> bytes, to print beside the counted ones."""
    for mode in ranks[0]:
        seen = [rank[mode] for rank in ranks]
        equal, collectives = max(one.error for one in seen) < 1e-5, seen[0].collectives
        print(
            f"{mode:6s} equal to one process: {equal}, patches of the ranks {[one.patches for one in seen]},", end=" "
        )
        print(f"{len(collectives)} {collectives[0].kind}")
        if by_hand is not None:
            counted = sum(one.bytes for one in collectives)
            print(f"       bytes by hand {by_hand[mode]:,}, counted {counted:,}")


def symbols(model: CostModel) -> list[tuple[str, str, float, str]]:
    """The rates of a cost model as notebook 50 writes them: (symbol, meaning, value, unit)."""
    micro, work = 1e6, model.work
    lines = [
        ("t_call", "each forward", model.call_s * micro, "us"),
        ("t_image", "each image", model.image_s * micro, "us"),
        ("t_patch", "each patch, not divided", model.patch_s * micro, "us"),
        ("t_linear", "each patch, divided", model.linear_s_per_flop * work.linear_flops * micro, "us"),
        ("t_pair", "each pair of patches, divided", model.attention_s_per_flop * work.attention_flops * micro, "us"),
        ("t_wait", "each collective, until all ranks are there", model.sync_overhead_s * micro, "us"),
    ]
    for kind, link in model.links.items():
        words = kind.replace("_", "-")
        lines.append(("t_step", f"each step of {words}", link.alpha * micro, "us"))
        lines.append(("1 / t_byte", f"bytes of {words}", 1e-9 / link.beta if link.beta else float("inf"), "GB/s"))
    return lines


def print_rates(model: CostModel, other: CostModel) -> None:
    """The `symbols` of two models side by side: the first is fitted on this machine, the second is an H100."""
    print(f"{'rate':11s} {'of':43s} {'fitted here':>11s} {'H100':>9s}")
    for (symbol, meaning, here, unit), (*_, there, _) in zip(symbols(model), symbols(other), strict=True):
        print(f"{symbol:11s} {meaning:43s} {here:11.4g} {there:9.3g} {unit}")


def print_gpu_rates(names: Sequence[str], patches: int, counts: Sequence[int]) -> None:
    """Rates of GPUs by `gpu_rates`, and what one all-reduce of so many patches takes on several of them."""
    print("GPU, link          p, TFLOP/s  b, GB/s  launch, us  t_step, us  link, GB/s")
    config = MoonViTConfig.preset("kimi-vl-a3b")
    for gpu in map(find_gpu, names):
        rates = gpu_rates(gpu)
        numbers = (rates.flops_per_s / 1e12, rates.bytes_per_s / 1e9, rates.launch_s * 1e6, rates.link_s * 1e6)
        words = f"{gpu.name}, {gpu.link}"
        print(f"{words:22s}{numbers[0]:7.0f} {numbers[1]:8.0f} {numbers[2]:11.0f} {numbers[3]:11.0f}", end=" ")
        print(f"{rates.link_bytes_per_s / 1e9:11.1f}")
    print(f"\none all-reduce for {patches:,} patches, us, on {', '.join(map(str, counts))} GPUs:")
    for gpu in map(find_gpu, names):
        model = cost_model_of_gpu(config, gpu)
        size, link = model.work.activation_bytes(patches), model.links["all_reduce"]
        times = (f"{1e6 * link.seconds('all_reduce', ranks, size):9,.0f}" for ranks in counts)
        print(f"{gpu.name:22s}", *times)


def print_predictions(model: CostModel, measured: Measured) -> None:
    """Predicted and measured milliseconds of every batch and way."""
    print("batch (patches)          way               predicted ms   measured ms (p20 to p80)   ratio")
    for batch in measured:
        for way, (point, timing) in batch.items():
            predicted = 1e3 * model.predict(point.mode, point.sizes, point.ranks, point.by_rank).seconds
            sizes = ", ".join(map(str, point.sizes[:3])) + ", .." * (len(point.sizes) > 3)
            spread = f"{timing.p50_ms:9.1f} ({timing.p20_ms:.1f} to {timing.p80_ms:.1f})"
            print(f"{sizes:24s} {way:17s} {predicted:10.1f}     {spread:26s} {predicted / timing.p50_ms:5.2f}")
    spreads = [timing.p80_ms / timing.p20_ms for batch in measured for _, timing in batch.values()]
    if median(spreads) > 1.25:
        print("The spreads are wide: something else runs on this machine, and the rates above are not its own.")


def gains(model: CostModel, batch: dict[str, tuple[MeasuredPoint, Timing]], mode: str) -> tuple[float, float]:
    """(predicted, measured): how many times as fast as one rank `mode` is on a measured batch."""
    point, alone = batch[mode][0], batch["single"][0].seconds
    predicted = model.predict("single", point.sizes, 1).seconds
    return predicted / model.predict(mode, point.sizes, point.ranks).seconds, alone / point.seconds


def timed_pairs(model: CostModel, measured: Measured) -> dict[str, list[tuple[Timing, float]]]:
    """Mode -> (measured, predicted ms) of every batch, as `plots.cost_model.predicted_against_measured` draws them."""
    pairs: dict[str, list[tuple[Timing, float]]] = {"single": [], "data": [], "tensor": []}
    for batch in measured:
        for point, timing in batch.values():
            predicted = model.predict(point.mode, point.sizes, point.ranks, point.by_rank).seconds
            pairs[point.mode].append((timing, 1e3 * predicted))
    return pairs


def median_errors(model: CostModel, measured: Measured) -> dict[str, float]:
    """Mode -> the median of |predicted / measured - 1| over the batches."""
    points = [point for batch in measured for point, _ in batch.values()]
    errors = list(zip(points, prediction_errors(model, points), strict=True))
    modes = dict.fromkeys(point.mode for point in points)
    return {mode: median(abs(error) for point, error in errors if point.mode == mode) for mode in modes}


def recorded_sweep() -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """(rows, origin, "7 of 8") of the record of ranks on a CPU: in how many batches auto is within 5 % of the best."""
    records, origin = read_record(find_record("parallel", data_path("measurements"), device="cpu-*", dtype="float32"))
    ratios = summary(records)["auto_over_best"].values()
    close = f"{sum(ratio < 1.05 for ratio in ratios)} of {len(ratios)}"
    return [row for row in records if row["phase"] == "sweep"], origin, close


def tp_mode(model: CostModel, sizes: Sequence[int], ranks: int) -> str:
    """The value of vLLM's `--mm-encoder-tp-mode` that is predicted to be faster."""
    return {"data": "data", "tensor": "weights"}[model.choose(sizes, ranks)]


def data_parallel_from(model: CostModel, patches: int, ranks: int, most: int = 64) -> int:
    """The number of equal images from which on data parallel is chosen, for it and every larger number up to `most`."""
    tensor = [count for count in range(1, most + 1) if model.choose([patches] * count, ranks) == "tensor"]
    return max(tensor, default=0) + 1


def mlp_summand(x: Tensor, w0: Tensor, b0: Tensor, w1: Tensor, rank: int, ranks: int) -> Tensor:
    """One rank's part of an MLP x W0 + b0, GELU, W1: columns of W0 and b0, rows of W1; the sum over ranks lacks b1."""
    columns, bias = w0.chunk(ranks, 1)[rank], b0.chunk(ranks)[rank]
    return torch.nn.functional.gelu(x @ columns + bias) @ w1.chunk(ranks)[rank]


def tensor_parallel_parts(model: CostModel, patches: int, ranks: int) -> tuple[float, float, float]:
    """(not divided, divided, one all-reduce) in ms, of one image; as in the formula of notebook 50."""
    work = model.work
    whole, alone = model.image_cost(patches) + model.call_s, (model.call_s, model.image_s, model.patch_s * patches)
    reduced = model.links["all_reduce"].seconds("all_reduce", ranks, work.activation_bytes(patches))
    return 1e3 * sum(alone), 1e3 * (whole - sum(alone)), 1e3 * (reduced + model.sync_overhead_s)


def fools_patches(config: MoonViTConfig, sizes: Sequence[int] | None, times: float = 1.25) -> bool | None:
    """Whether, on two ranks, the slowest rank "by patches" has at least `times` the work that it has "by cost".

    None for no answer; False, with a line that says why, for a batch that is not allowed.
    """
    if sizes is None:
        return None
    if not 1 <= len(sizes) <= 64 or not all(4 <= size <= 16384 for size in sizes):
        print("a batch has 1 to 64 images of 4 to 16,384 patches")
        return False
    slowest = {
        name: max(sum(work for _, work in images) for images in by_rank)
        for name, by_rank in schedules(config, sizes, 2).items()
    }
    ratio = slowest["by patches"] / slowest["by cost"]
    print(f"by patches: {slowest['by patches']:.1f} TFLOP, by cost: {slowest['by cost']:.1f} TFLOP, {ratio:.2f} times")
    return ratio >= times
