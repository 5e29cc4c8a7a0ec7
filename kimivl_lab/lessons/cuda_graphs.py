"""Notebook 70: a graph in 20 lines, the sizes up to which graphs can win, whole calls that are timed, broken graphs.

    graph = NaiveGraph(lambda: tower(static, grids))    # capture
    static.copy_(pixels); graph.replay()                # the same operators at the same addresses

Example: a device that does 3.56 GFLOP during one launch does 1.26 TFLOP during 355 launches, and an image of
`largest_image(1.26e12)` patches costs a little less than that.
Test: tests/test_lessons_graphs.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..config import EncoderOptions, MoonViTConfig
from ..gpus import Gpu, find_gpu
from ..graphs.guards import GraphCaptureError
from ..graphs.inputs import StaticInputs, TowerGraphs
from ..graphs.runner import EncoderCudaGraphRunner
from ..graphs.trace_program import FlatProgram, MemoryPool, record
from ..graphs.weights import StaleGraphError
from ..measure.accuracy import relative_error
from ..measure.published import graph_rows
from ..measure.roofline import matmul_peak_tflops
from ..measure.timing import Timing, time_interleaved
from ..moonvit.flops import tower_flops
from ..moonvit.model import MoonVitPretrainedModel
from ..planner.plan import BudgetPlan
from ..planner.replay_cost import LAUNCH_S, PUBLISHED_LAUNCH_S, SUSTAINED, kernels
from ..planner.workload import TokenCounts
from ..private_api import TorchDispatchMode, tree_leaves
from ..syncs.counter import count_host_syncs, on_device

Grids: TypeAlias = Sequence[tuple[int, int]]
Encoder: TypeAlias = Callable[[Tensor, Grids], Tensor]
Lanes: TypeAlias = dict[str, tuple[list[tuple[float, float]], list[tuple[float, float]]]]


class NaiveGraph(TorchDispatchMode):
    """Remembers the operators of `forward()`. `replay` runs them again; each result stays where it was."""

    def __init__(self, forward: Callable[[], Tensor]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        with self:
            self.output = forward()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for operator, args, kwargs, result in self.calls:
            again = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def small_tower() -> MoonVitPretrainedModel:
    """A tower of two blocks with the same random weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = EncoderOptions(linear="plain", rope="in_place")
        return MoonVitPretrainedModel(MoonViTConfig.preset("tiny"), options).eval()


def same(got: Tensor, want: Tensor) -> bool:
    """Equal up to the rounding of float32: a relative error below 1e-5. NaN is never the same."""
    return got.shape == want.shape and relative_error(got, want) < 1e-5


def refusal(call: Callable[[], object]) -> str:
    """The error of the graphs that `call()` raises, without the place in the code; "no error" if there is none."""
    try:
        call()
    except (GraphCaptureError, StaleGraphError) as error:
        return f"{type(error).__name__}, {str(error).partition(' at ')[0].partition(' after ')[0]}"
    return "no error"


# --- up to which size a graph can win --------------------------------------------------------------------------------


def count_kernels(layers: int) -> int:
    """Kernels that one forward in bfloat16 launches, counted on a pretended GPU: 355 for 27 layers."""
    config = MoonViTConfig.preset("tiny", num_hidden_layers=layers)
    tower = MoonVitPretrainedModel(config, EncoderOptions(rope="in_place")).to(torch.bfloat16)
    pixels, metadata = torch.zeros(16, 3, 14, 14, dtype=torch.bfloat16), tower.prepare_encoder_metadata([(4, 4)])
    model, patches, given = (on_device(one, pretended=True) for one in (tower, pixels, metadata))
    return count_host_syncs(model, patches, encoder_metadata=given, pretended=True).launches


def image_flops(patches: int) -> int:
    """FLOPs of Kimi-VL's tower for one image; `patches` is even."""
    return sum(tower_flops(MoonViTConfig.preset("kimi-vl-a3b"), [(2, patches // 2)]).values())


def largest_image(flops: float) -> int:
    """Patches of the largest image, a multiple of 4, that costs fewer FLOPs than these; 0 if there is none."""
    low, high = 0, 4
    while image_flops(high) < flops:
        low, high = high, 2 * high
    while high - low > 4:
        middle = (low + high) // 8 * 4
        low, high = (middle, high) if image_flops(middle) < flops else (low, middle)
    return low


def block_timeline(sizes: Iterable[int], flops_a_launch: float) -> Lanes:
    """Launches and kernels of one block, eager and as a graph: what `plots.graphs.launch_timeline` draws.

    Time is counted in launches. The kernels of a block share its FLOPs equally; the device's own gaps are left out.
    """
    lanes: Lanes = {}
    config = MoonViTConfig.preset("kimi-vl-a3b", num_hidden_layers=1)
    of_a_block = kernels(2) - kernels(1)
    for patches in sizes:
        work = tower_flops(config, [(2, patches // 2)])
        length = (work["linear"] + work["attention"]) / of_a_block / flops_a_launch
        for way, ready in {"eager": range(1, of_a_block + 1), "graph": [1] * of_a_block}.items():
            kernels_at, end = [], 0.0
            for at in ready:
                kernels_at.append((max(end, at), length))
                end = sum(kernels_at[-1])
            launches = [(at - 1.0, 1.0) for at in sorted(set(ready))]
            lanes[f"{patches:,} patches, {way}"] = launches, kernels_at
    return lanes


def gpu_limit(gpu: Gpu, launch_s: float = LAUNCH_S) -> int:
    """Patches of a call up to which a graph can win on this GPU: FLOPs < k p tau, with 0.6 of the data sheet's p."""
    return largest_image(kernels() * SUSTAINED * gpu.flops_per_s * launch_s)


def gpu_table(names: Iterable[str], workloads: Mapping[str, TokenCounts]) -> str:
    """One line a GPU: GFLOP a launch, the limit in patches and as a square, the share of images below it."""
    shares = " ".join(f"{name.split()[0]:>11s}" for name in workloads)
    lines = [f"{'':12s}    GFLOP    up to  square   share of images below it      launch of 21 us:"]
    lines += [f"{'':12s} a launch  patches  pixels {shares}     patches"]
    for gpu in map(find_gpu, names):
        limit, slow = gpu_limit(gpu), gpu_limit(gpu, PUBLISHED_LAUNCH_S)
        below = [one.counts[4 * one.tokens <= limit].sum() / one.images for one in workloads.values()]
        cells = f"{SUSTAINED * gpu.flops_per_s * LAUNCH_S / 1e9:8.2f} {limit:8,} {int(14 * limit**0.5):7}"
        lines.append(f"{gpu.name[:12]:12s} {cells} {' '.join(f'{share:11.0%}' for share in below)} {slow:11,}")
    return "\n".join(lines)


def published_table() -> str:
    """The published benchmarks that the rule cannot predict, then the experiments with a graph of another size."""
    lines = ["time with graphs / without"]
    open_rows = [row for row in graph_rows() if not all(row[name] for name in ("gpu", "layers", "images", "patches"))]
    for kind, rows in {"": open_rows, "control: ": graph_rows("control")}.items():
        ratios = [(float(row["graph"]) / float(row["eager"]), row) for row in rows]
        for ratio, row in sorted(ratios, key=lambda pair: pair[0]):
            words = [row["model"], row["gpu"], row["workload"].partition(" a request,")[0], row["metric"]]
            lines.append(f"{ratio:6.2f}  {kind}{', '.join(filter(None, words))}")
    return "\n".join(lines)


def plan_table(plan: BudgetPlan) -> str:
    """Waste, replays a call and predicted time by images a call: the engine's own budgets, then the planned ones."""
    before = plan.powers_of_two
    assert before is not None
    lines = ["of each pair: the engine's own budgets, then the planned ones"]
    lines += ["images      waste         replays a call   predicted time   without a graph"]
    for images in plan.waste:
        waste, replays, time, eager = (
            f"{getattr(before, name)[images]:{form}} {getattr(plan, name)[images]:{form}}"
            for name, form in (("waste", "6.2f"), ("replays_a_call", "6.2f"), ("time", "6.2f"), ("eager", "4.0%"))
        )
        lines.append(f"{images:6} {waste}    {replays}    {time}      {eager}")
    return "\n".join(lines)


# --- the inputs of a graph -------------------------------------------------------------------------------------------


def graph_offsets(lengths: Sequence[int], slots: int, rows: int) -> list[int]:
    """`cu_seqlens` as a graph of `rows` patches with `slots` segments reads it, for images of these lengths."""
    offsets = torch.zeros(slots + 1, dtype=torch.int32, device="cpu")
    inputs = StaticInputs({"pixel_values": torch.zeros(rows, 1, device="cpu"), "cu_seqlens": offsets})
    used = list(accumulate(lengths, initial=0))
    values = torch.tensor(used + [used[-1]] * (slots + 1 - len(used)), dtype=torch.int32, device="cpu")
    pixels = torch.zeros(used[-1], 1, device="cpu")
    inputs.write({"pixel_values": pixels, "cu_seqlens": values}, images=len(lengths), rows=rows)
    return inputs.buffers["cu_seqlens"].tolist()


def flat_program(tower: MoonVitPretrainedModel, budget: int, max_images: int) -> tuple[StaticInputs, FlatProgram]:
    """The static inputs of one graph and its program, as the runner's "trace" backend records it on a CPU.

    Its attention is torch's, so that the listing is the same on every processor.
    """
    tower.set_options(attention="sdpa")
    model = TowerGraphs(tower)
    inputs = StaticInputs(model.prepare_encoder_cudagraph_capture_inputs(budget, max_images))

    def forward(*values: Tensor) -> Tensor:
        return model.encoder_cudagraph_forward(dict(zip(inputs.buffers, values, strict=True)))

    return inputs, record(forward, inputs.views(4 * budget), MemoryPool(), {})


def drawn_request(
    lengths: Sequence[int], inputs: StaticInputs, program: FlatProgram
) -> tuple[Sequence[int], int, list[int], dict[str, str], int]:
    """What `plots.graphs.request_to_output` draws: lengths, budget, offsets, shapes of the inputs, operators."""
    shapes = {name: str(tuple(one.shape)) for name, one in inputs.buffers.items() if name != "cu_seqlens"}
    slots, rows = len(inputs.buffers["cu_seqlens"]) - 1, len(inputs.buffers["pixel_values"])
    return lengths, rows // 4, graph_offsets(lengths, slots, rows), shapes, program.operators


def replay_values(tower: MoonVitPretrainedModel, pixels: Tensor, grids: Grids, max_images: int) -> dict[str, Tensor]:
    """What is written into the static inputs before a replay for these images, by name."""
    asked = {"pixel_values": pixels, "image_grid_hws": list(grids)}
    return TowerGraphs(tower).prepare_encoder_cudagraph_replay_buffers(asked, max_images)


class ForgetfulGraph:
    """A program of 8 tokens whose inputs were written for the grid 4 x 8; each later call rewrites all but one.

    Attributes:
        inputs: the names of the static inputs.
    """

    def __init__(self) -> None:
        self._tower = small_tower()
        self._static, self._program = flat_program(self._tower, budget=8, max_images=3)
        self._pixels = torch.randn(32, 3, 14, 14, device="cpu")
        self.inputs = list(self._static.buffers)

    def is_right(self, grid: tuple[int, int], also: str | None = None) -> bool:
        """Whether one image of this grid comes out as eager. The input called `also` is rewritten too.

        Raises:
            ValueError: a grid of other than 32 patches; an input that does not exist.
        """
        if grid[0] * grid[1] != 32 or also not in (None, *self.inputs):
            raise ValueError(
                f"a grid of 32 patches and one of {', '.join(self.inputs)} are needed, got {grid}, {also!r}"
            )
        first, values = (replay_values(self._tower, self._pixels, [one], 3) for one in ((4, 8), grid))
        self._static.write(first, images=1, rows=32)
        names = {"pixel_values", "pos_embeds", "rope_cos_sin", "cu_seqlens"}
        for name in names if also is None else names | {also}:
            self._static.buffers[name].copy_(values[name])
        self._program.run()
        return same(self._program.output, self._tower(self._pixels, [grid]))


# --- whole calls on this machine -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedCalls:
    """Attributes:
    eager, replay: merged tokens of one image -> time of a whole call. Replays are of full budgets.
    alone: the forward of 1 token without metadata, packing and copies: eager, and replayed.
    operators: of one eager call.
    work_ms: tokens -> FLOPs beyond those of 1 token, over the speed of a large matrix product here.
    """

    eager: dict[int, Timing]
    replay: dict[int, Timing]
    alone: tuple[Timing, Timing]
    operators: int
    work_ms: dict[int, float]

    @property
    def host_ms(self) -> float:
        """The time of the smallest eager call, which is nearly all Python."""
        return self.eager[1].p50_ms

    @property
    def unclear(self) -> list[int]:
        """Budgets where the spreads (p20 to p80) of eager and replay overlap."""
        pairs = ((tokens, self.eager[tokens], timing) for tokens, timing in self.replay.items())
        return [tokens for tokens, a, b in pairs if max(a.p20_ms, b.p20_ms) <= min(a.p80_ms, b.p80_ms)]

    def predicted(self) -> dict[str, list[float]]:
        """Two predictions of eager in ms, at each number of tokens: the host's time, and with the work added."""
        with_work = [self.host_ms + one for one in self.work_ms.values()]
        return {"predicted, host alone": [self.host_ms] * len(with_work), "predicted, host + FLOPs / p": with_work}

    def table(self) -> str:
        """One line a budget: eager with its spread, eager as predicted, replay, and how many times as fast it is."""
        lines = [f"{self.operators} operators; host {self.host_ms:.2f} ms"]
        lines += ["tokens   eager ms (p20 to p80)   predicted   replay ms   eager / replay"]
        for tokens, replay in self.replay.items():
            eager = self.eager[tokens]
            spread = f"{eager.p50_ms:.2f} ({eager.p20_ms:.2f} to {eager.p80_ms:.2f})"
            times = f"{self.host_ms + self.work_ms[tokens]:11.2f} {replay.p50_ms:11.2f}"
            lines.append(f"{tokens:6} {spread:>23s} {times} {eager.p50_ms / replay.p50_ms:16.2f}")
        unclear = ", ".join(map(str, self.unclear)) or "none"
        eager, replay = (one.p50_ms for one in self.alone)
        lines += [
            f"the forward alone, 1 token: eager {eager:.2f} ms, replay {replay:.2f} ms, {eager / replay:.2f} times"
        ]
        return "\n".join([*lines, f"budgets where the spreads overlap, so that nothing is told apart: {unclear}"])


def time_calls(repeats: int = 9) -> TimedCalls:
    """Times a narrow tower, one image a call, eager and in graphs with budgets 1, 2, 4, .. 128, in random order.

    One published head wide, six blocks: wide enough for every operator, narrow enough that a CPU waits for Python.
    """
    shape = {"hidden_size": 72, "num_attention_heads": 1, "intermediate_size": 288, "num_hidden_layers": 6}
    config = MoonViTConfig.preset("tiny", **shape)
    tower = MoonVitPretrainedModel(config, EncoderOptions(linear="plain", rope="in_place")).eval()
    runner = EncoderCudaGraphRunner(tower, [2**k for k in range(8)], max_images=1, max_waste=None)
    runner.capture()
    calls: dict[str, Callable[[], object]] = {}
    lengths = sorted({*runner.budgets, *(3 * budget // 2 for budget in runner.budgets[1:-1])})
    for tokens in lengths:
        pixels, grids = torch.randn(4 * tokens, 3, 14, 14, device="cpu"), [(2, 2 * tokens)]
        calls[f"eager {tokens}"] = lambda pixels=pixels, grids=grids: tower(pixels, grids)
        if tokens in runner.budgets:
            calls[f"replay {tokens}"] = lambda pixels=pixels, grids=grids: runner(pixels, grids)
            if not same(runner(pixels, grids), tower(pixels, grids)):
                raise AssertionError(f"the replay of {tokens} tokens differs from eager")
    alone, metadata = torch.zeros(4, 3, 14, 14, device="cpu"), tower.prepare_encoder_metadata([(2, 2)])
    calls["eager alone"] = lambda: tower(alone, encoder_metadata=metadata)
    calls["replay alone"] = EncoderCudaGraphRunner(tower, [1], max_images=1).graph(1).replay
    timed = time_interleaved(calls, warmup=2, repeats=repeats)
    peak = matmul_peak_tflops(torch.float32, size=1024)
    eager = {tokens: timed[f"eager {tokens}"] for tokens in lengths}
    replay = {tokens: timed[f"replay {tokens}"] for tokens in runner.budgets}
    flops = {tokens: sum(tower_flops(config, [(2, 2 * tokens)]).values()) for tokens in eager}
    work = {tokens: (flops[tokens] - flops[1]) / peak / 1e9 for tokens in eager}
    operators = len(NaiveGraph(lambda: tower(alone, [(2, 2)])).calls)
    return TimedCalls(eager, replay, (timed["eager alone"], timed["replay alone"]), operators, work)


# --- encoders to judge -----------------------------------------------------------------------------------------------


class Candidate:
    """An encoder that may be broken; its repr does not say whether it is."""

    def __init__(self, number: int, encode: Encoder, right: bool) -> None:
        self.number, self.encode, self.right = number, encode, right

    def __call__(self, pixels: Tensor, grids: Grids) -> Tensor:
        """(T, 4, D) features of the images, like the tower's."""
        return self.encode(pixels, grids)

    def __repr__(self) -> str:
        return f"encoder {self.number}"


def candidates(tower: MoonVitPretrainedModel) -> list[Candidate]:
    """New encoders of the same tower that use graphs, some of them broken as in faults 2 to 5 of notebook 70."""
    good = EncoderCudaGraphRunner(tower, [4, 8, 16])
    padded = EncoderCudaGraphRunner(tower, [4, 8, 16], max_waste=None)
    encoders: Mapping[Encoder, bool] = {
        _ByTotal(tower): False,
        good: True,
        _ByGrids(tower, copies=False): False,
        _Crossing(tower): False,
        padded: True,
        _ByGrids(tower, frozen=True): False,
    }
    return [Candidate(number, encode, right) for number, (encode, right) in enumerate(encoders.items(), 1)]


class _ByGrids:
    """One graph for each list of grids; returns its own buffer (not `copies`), or reads the first images (`frozen`)."""

    def __init__(self, tower: MoonVitPretrainedModel, *, copies: bool = True, frozen: bool = False) -> None:
        self.tower, self.copies, self.frozen = tower, copies, frozen
        self.graphs: dict[Any, tuple[Tensor, NaiveGraph]] = {}

    def key(self, pixels: Tensor, grids: Grids) -> Any:
        return tuple(map(tuple, grids))

    def __call__(self, pixels: Tensor, grids: Grids) -> Tensor:
        key = self.key(pixels, grids)
        if key not in self.graphs:
            static = pixels.clone()
            self.graphs[key] = static, NaiveGraph(lambda: self.tower(static, grids))
        static, graph = self.graphs[key]
        if not self.frozen:
            static.copy_(pixels)
        graph.replay()
        return graph.output.clone() if self.copies else graph.output


class _ByTotal(_ByGrids):
    """One graph for each number of patches: equal totals meet the wrong graph."""

    def key(self, pixels: Tensor, grids: Grids) -> Any:
        return len(pixels)


class _Crossing:
    """Padding is joined to the image as if it belonged to it, unless the image fills the graph of 32 patches."""

    def __init__(self, tower: MoonVitPretrainedModel) -> None:
        self.tower = tower

    def __call__(self, pixels: Tensor, grids: Grids) -> Tensor:
        if len(pixels) >= 32:
            return self.tower(pixels, grids)
        large, small = (self.tower.prepare_encoder_metadata(one) for one in ([(4, 8)], grids))
        for name in ("pos_embeds", "rope_cos_sin", "merge_gather_idx"):
            getattr(large, name)[: len(pixels)].copy_(getattr(small, name))
        padded = torch.cat([pixels, pixels.new_zeros(32 - len(pixels), *pixels.shape[1:])])
        return self.tower(padded, encoder_metadata=large)[: len(pixels) // 4]
