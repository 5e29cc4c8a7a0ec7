"""Encodes images by captured graphs: capture the forward, copy inputs, replay, copy out.

    runner = EncoderCudaGraphRunner(tower, budgets=[64, 256, 1104], max_images=8)
    features = runner(batch.pixel_values, batch.image_grid_hws)         # (T, 4, D), a new tensor
    print(runner.stats)

A graph of budget B always computes B merged tokens. Images are packed into budgets (`packing`); an image that fits no
budget, or whose replay is predicted to be too slow for its padding (`max_waste`), runs eager, is counted, and is right.
Everything that depends on the images is an input of the graph (`inputs`) and comes from the metadata builder that the
eager tower uses.

Test: tests/test_graph_runner.py, tests/test_graph_waste.py, tests/test_faults_graphs.py. Record: graphs__*.csv.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_backend

from ..checks import as_positive
from ..config import MoonViTConfig
from ..geometry import GridLike, as_grid_list, patch_counts, token_counts
from ..kernels.memory import reserve_pinned
from ..kernels.streams import StreamOrder
from ..moonvit.attention import attends_all_pairs
from ..moonvit.flops import pair_rows
from ..moonvit.model import MoonVitPretrainedModel
from ..parallel.calls import describe_images, same_call
from ..planner.replay_cost import REPLAY_COST, eager_cost, predicted_rows
from .cuda import CapturedGraph, CudaBackend
from .guards import position_caches_untouched
from .inputs import EncoderItemSpec, StaticInputs, SupportsEncoderCudaGraph, TowerGraphs, padding_pairs
from .packing import Replay, as_budgets, pack
from .stats import Calls, GraphCalls, RunnerStats
from .trace import TraceBackend
from .weights import CapturedWeights


@dataclass(frozen=True)
class Captured:
    """What replays need: graphs by budget, the inputs that they read, the weights that they were captured with."""

    graphs: dict[int, CapturedGraph]
    inputs: StaticInputs
    weights: CapturedWeights
    all_pairs: bool  # attention of the graphs computes all pairs of a graph's patches, see `attends_all_pairs`


class Planned(NamedTuple):
    """A replay or eager call of a batch, before it runs.

    Attributes:
        counted_as: the budget, or the reason to run eager.
        image_pairs, pairs: attention pairs of the images, and those computed; see `Calls`.
    """

    replay: Replay
    counted_as: int | str
    image_pairs: int
    pairs: int


class EncoderCudaGraphRunner:
    """Called like the tower or encoder that it runs, and usable in its place, also by `run_dp_sharded_vision_model`.

    Not for several threads at once: all graphs share their inputs and their pool. Calls on several CUDA streams run one
    after another: each call makes its stream wait for the work of the call before, the host does not wait. The pixels
    that a call is given and the features that it returns belong to the stream of that call, as those of any operator.
    The Python code of hooks runs at the capture only; the operators that it calls are replayed.

    Args:
        model: a tower, (T, 4, D) out, or a KimiVLEncoder, (T, text hidden size) out.
        budgets: merged tokens of each graph.
        max_images: most images in one replay; may exceed the smallest budget.
        backend: "cuda", "trace" (on a CPU) or "auto".
        packing: how several images share replays, a key of `PACKERS`.
        replay_cost: the fixed time of a replay, in merged tokens that the device computes in it; packing "exact"
            accepts more padding where that saves replays. None: 0 on a CPU, where an operator starts in microseconds
            and a token takes milliseconds, so that ties alone go to fewer replays; the planner's price of an H100 on a
            GPU. `kimivl_lab.planner.replay_cost` predicts or measures it for another one.
        max_waste: a replay may take this many times as long as the eager call of the same images, by prediction; images
            whose replay would take longer run eager. 1 takes graphs only where they are predicted to be at least as
            fast; None always. The prediction, in merged tokens: those computed, padding included; attention pairs,
            padding included, at `pair_rows` each; and `replay_cost` for a replay, twice as much for an eager call
            (`kimivl_lab.planner.replay_cost`). Example: 9 tokens in a graph of 16, with a price of 0 and attention
            left out, take 16/9 = 1.8 times as long.
        pixel_dtype: of the patches that will come: the tower's floats when None, torch.uint8 for raw ones. The other
            kind runs eager.
        tensor_parallel_group: the group of a tensor-parallel tower: its collectives are captured. Without it a
            collective is refused: in data parallelism each rank captures and replays its part of the work alone.
        poison: debugging: fill memory with NaN before each replay, so that a read of what was not written shows.
            "pool": intermediate results and the output. "padding": input rows past the images. Leave padding at zero
            in production: NaN there passes through masked attention and some bfloat16 products of a CPU.

    Raises:
        ValueError: budgets that are empty, doubled, not positive, or that no images can reach; an unknown name; a
            backend that does not run on the model's device; a group whose communicator cannot be captured.
    """

    def __init__(
        self,
        model: MoonVitPretrainedModel | SupportsEncoderCudaGraph,
        budgets: Iterable[int],
        max_images: int = 8,
        *,
        backend: str = "auto",
        packing: str = "exact",
        replay_cost: int | None = None,
        max_waste: float | None = 2.0,
        pixel_dtype: torch.dtype | None = None,
        tensor_parallel_group: ProcessGroup | None = None,
        poison: Collection[str] = (),
    ) -> None:
        self.model = TowerGraphs(model) if isinstance(model, MoonVitPretrainedModel) else model
        self.max_images = as_positive("max_images", max_images)
        self.budgets = _checked(budgets, self.model.get_encoder_cudagraph_budget_range(self.max_images)[1])
        pack([], self.budgets, self.max_images, packing, replay_cost or 0)  # what cannot be used is an error now
        if max_waste is not None and not max_waste >= 1:
            raise ValueError(f"max_waste is predicted time over that of an eager call, at least 1, got {max_waste}")
        if tensor_parallel_group is not None and (name := get_backend(tensor_parallel_group)) != "nccl":
            raise ValueError(f"tensor_parallel_group: {name} cannot be captured, NCCL can")
        if unknown := set(poison) - {"pool", "padding"}:
            raise ValueError(f"poison: 'pool' and 'padding' are known, not {', '.join(sorted(unknown))}")
        self.packing, self.max_waste = packing, max_waste
        self._replay_cost = replay_cost
        self.pixel_dtype = pixel_dtype
        self.tensor_parallel_group = tensor_parallel_group
        self.poison = poison
        self._backend_name = backend
        self._merge_size = self.config.merge_size
        self._pair_rows = pair_rows(self.config)
        self.reset()

    @property
    def tower(self) -> MoonVitPretrainedModel:
        return self.model.vision_tower

    @property
    def config(self) -> MoonViTConfig:
        return self.tower.config

    @property
    def device(self) -> torch.device:
        return self.tower.device

    @property
    def dtype(self) -> torch.dtype:
        return self.tower.dtype

    @property
    def replay_cost(self) -> int:
        """Rows that one replay counts as beside its own; see the class."""
        if self._replay_cost is not None:
            return self._replay_cost
        return REPLAY_COST if self.device.type == "cuda" else 0

    def reset(self) -> None:
        """Drops graphs, buffers and counters; the next call captures anew, with the weights as they are then."""
        self._captured: Captured | None = None
        self.backend = resolve_backend(self._backend_name, self.device)
        self.stats = RunnerStats()
        self._order = StreamOrder(self.device)  # of the static inputs, the pool and the output

    def capture(self) -> Captured:
        """Captures a graph for every budget, if that is not done yet; the first call of the runner does it otherwise.

        Raises:
            ValueError: a compiled tower with backend="trace".
            GraphCaptureError: the forward does what no graph can hold; the message names the line.
        """
        if self._captured is not None:
            return self._captured
        options = self.tower.options
        if self.backend.name == "trace" and (options.compile or options.rope == "compiled"):
            raise ValueError("backend='trace' records operators, which compiled code hides: compile=False, rope='auto'")
        module = self.model if isinstance(self.model, nn.Module) else self.tower
        names = self.model.get_encoder_cudagraph_config()["buffer_keys"]

        def forward(*values: Tensor) -> Tensor:
            with position_caches_untouched(module):
                return self.model.encoder_cudagraph_forward(dict(zip(names, values, strict=True)))

        graphs: dict[int, CapturedGraph] = {}
        calls: dict[int, GraphCalls] = {}
        # The first capture may happen in a caller's inference mode. Buffers made there could not be written outside
        # it, so leave that mode. Leaving it turns gradients on, and a graph holds no backward: so no_grad comes second.
        with torch.inference_mode(False), torch.no_grad():
            buffers = self.model.prepare_encoder_cudagraph_capture_inputs(
                self.budgets[-1], self.max_images, self.pixel_dtype
            )
            inputs, weights = StaticInputs(buffers), CapturedWeights(module)
            for budget in reversed(self.budgets):  # the largest first: smaller graphs then fit in its part of the pool
                start, before = time.perf_counter(), self.backend.nbytes
                graphs[budget] = self.backend.capture(
                    forward,
                    inputs.views(budget * self._merge_size),
                    weights.packed_copies,
                    allow_collectives=self.tensor_parallel_group is not None,
                )
                calls[budget] = GraphCalls(
                    capture_seconds=time.perf_counter() - start, nbytes=self.backend.nbytes - before
                )
        self.stats.graphs = {budget: calls[budget] for budget in self.budgets}
        self.stats.input_bytes = inputs.nbytes
        with torch.no_grad():  # as the capture, which takes kernels without a backward
            attend = self.tower.resolve_options().attend
        all_pairs = attends_all_pairs(attend, self.device, lengths_on_host=False)
        self._captured = Captured(graphs, inputs, weights, all_pairs)
        self._order.mark()
        pixels = buffers["pixel_values"]  # a host's float32 pixels are cast on the device
        reserve_pinned(max(pixels.numel() * (4 if pixels.is_floating_point() else 1), inputs.nbytes - pixels.nbytes))
        return self._captured

    @torch.no_grad()
    def __call__(self, pixel_values: Tensor, image_grid_hws: Sequence[GridLike] | Tensor) -> Tensor:
        """Encodes all images of a batch, in graphs where they fit.

        Args:
            pixel_values: (L, 3, 14, 14), on the host or the device.
            image_grid_hws: (n, 2) host integers (h, w) in patches.

        Returns:
            The model's result, packed in the order of the images, in a new tensor without gradient.

        Raises:
            ValueError: grids and pixels that the model refuses.
            RankError: a rank of `tensor_parallel_group` is at another call.
            StaleGraphError: a weight, layer or hook was replaced, moved, added or removed after the capture.
        """
        self.capture().weights.check()
        batch = {"pixel_values": pixel_values, "image_grid_hws": as_grid_list(image_grid_hws)}
        if self.tensor_parallel_group is not None:  # a replay runs the tower's collectives, but not its comparison
            with same_call(self.tensor_parallel_group) as call:
                call.about = describe_images(
                    f"graphs {self.budgets}", batch["image_grid_hws"], self.dtype, pixel_values
                )
        specs = self.model.get_encoder_cudagraph_item_specs(batch)
        self.tower.check_pixels(pixel_values, sum(spec.input_size for spec in specs))
        if not specs:
            return self.model.encoder_eager_forward(batch)
        self._order.wait(*self.capture().inputs.buffers.values())
        try:
            return self._encode(batch, specs)
        finally:
            self._order.mark()

    def _encode(self, batch: dict[str, Any], specs: Sequence[EncoderItemSpec]) -> Tensor:
        offsets = list(accumulate((spec.output_tokens for spec in specs), initial=0))
        out = None
        for replay, counted_as, image_pairs, pairs in self._plan(specs, batch["pixel_values"].dtype):
            start = time.perf_counter()
            images = sorted(replay.images)
            part = self.model.select_encoder_cudagraph_items(batch, images)
            features = self.model.encoder_eager_forward(part) if replay.budget is None else self._replay(part, replay)
            if out is None:
                out = features.new_empty((offsets[-1], *features.shape[1:]))
            # copy out: the next replay overwrites the graph's output, and the caller gets the images' own order
            sizes = [specs[image].output_tokens for image in images]
            for image, rows in zip(images, features[: replay.tokens].split(sizes), strict=True):
                out[offsets[image] : offsets[image + 1]].copy_(rows)
            seconds = time.perf_counter() - start
            self._calls(counted_as).add(len(images), replay.tokens, replay.rows, image_pairs, pairs, seconds)
        assert out is not None
        return out

    def count_eager(self, reason: str, image_grid_hws: Sequence[GridLike] | Tensor, seconds: float) -> None:
        """Counts a batch that the caller encoded without the graphs, under `reason`."""
        grids = as_grid_list(image_grid_hws)
        tokens = sum(token_counts(grids, self.config.merge_kernel_size))
        _, _, *pairs = self._planned_eager(Replay((), tokens, None), patch_counts(grids), reason)
        self._calls(reason).add(len(grids), tokens, tokens, *pairs, seconds)

    def graph(self, budget: int) -> CapturedGraph:
        """The graph of one of the budgets, captured if it has not been, for measurements.

        Its `replay` reads what the inputs hold: do not call it after a replay of another budget, whose offsets may lie
        past its end.
        """
        return self.capture().graphs[budget]

    def _replay(self, part: dict[str, Any], replay: Replay) -> Tensor:
        """The graph's static output, of which the first `replay.tokens` rows are the images'."""
        assert replay.budget is not None
        graph, inputs = self.graph(replay.budget), self.capture().inputs
        rows = replay.budget * self._merge_size
        # copy inputs
        values = self.model.prepare_encoder_cudagraph_replay_buffers(part, self.max_images)
        inputs.write(values, len(replay.images), rows)
        if "padding" in self.poison:
            inputs.poison(rows)
        if "pool" in self.poison:
            self.backend.poison()
            graph.output.fill_(float("nan"))
        # replay
        graph.replay()
        return graph.output

    def _plan(self, specs: Sequence[EncoderItemSpec], pixel_dtype: torch.dtype) -> list[Planned]:
        """Replays and eager calls (budget None)."""
        tokens = [spec.output_tokens for spec in specs]
        if pixel_dtype.is_floating_point != (self.pixel_dtype or self.dtype).is_floating_point:
            whole = Replay(tuple(range(len(specs))), sum(tokens), None)
            return [self._planned_eager(whole, [spec.input_size for spec in specs], "pixels")]
        plan: list[Planned] = []
        price = self.replay_cost
        for replay in pack(tokens, self.budgets, self.max_images, self.packing, price):
            patches = [specs[image].input_size for image in replay.images]
            if replay.budget is None:
                plan.append(self._planned_eager(replay, patches, "too large"))
                continue
            own = _image_pairs(patches)
            planned = Planned(replay, replay.budget, own, self._replay_pairs(patches, own, replay.budget))
            if self._is_slow(planned, own, price):  # first by the least that an eager call computes
                eager = self._planned_eager(replace(replay, budget=None), patches, "padding")
                if self._is_slow(planned, eager.pairs, price):
                    planned = eager
            plan.append(planned)
        return plan

    def _is_slow(self, planned: Planned, eager_pairs: int, price: int) -> bool:
        """Whether the replay is predicted to take more than `max_waste` times as long as an eager call."""
        if self.max_waste is None:
            return False
        replay = planned.replay
        eager = predicted_rows(replay.tokens, eager_pairs, self._pair_rows, eager_cost(price))
        return predicted_rows(replay.rows, planned.pairs, self._pair_rows, price) > self.max_waste * eager

    def _planned_eager(self, replay: Replay, patches: Sequence[int], reason: str) -> Planned:
        attend = self.tower.resolve_options().attend
        dense = attends_all_pairs(attend, self.device, lengths_on_host=True)
        own = _image_pairs(patches)
        return Planned(replay, reason, own, sum(patches) ** 2 if dense else own)

    def _replay_pairs(self, patches: Sequence[int], own: int, budget: int) -> int:
        """Attention pairs that the graph of `budget` computes for images of `patches`, which have `own` themselves."""
        rows = budget * self._merge_size
        if self.capture().all_pairs:
            return rows**2
        return own + padding_pairs(rows - sum(patches), self.max_images + 1 - len(patches))

    def _calls(self, counted_as: int | str) -> Calls:
        if isinstance(counted_as, int):
            return self.stats.graphs[counted_as]
        return self.stats.eager.setdefault(counted_as, Calls())


def _image_pairs(patches: Iterable[int]) -> int:
    return sum(count * count for count in patches)


def resolve_backend(name: str, device: torch.device) -> CudaBackend | TraceBackend:
    """The backend called `name` for a tower on `device`; "auto" is "cuda" on a GPU, "trace" on a CPU."""
    wanted = {"cuda": "cuda", "cpu": "trace"}.get(device.type)
    if name not in ("auto", "cuda", "trace"):
        raise ValueError(f"unknown graph backend {name!r}: auto, cuda or trace")
    if wanted is None or name not in ("auto", wanted):
        raise ValueError(f"backend={name!r} with a tower on {device}: 'cuda' needs a GPU, 'trace' a CPU")
    return CudaBackend(device) if wanted == "cuda" else TraceBackend()


def _checked(budgets: Iterable[int], most: int) -> tuple[int, ...]:
    """Budgets ascending. ValueError for none, one that is not positive, one twice, one that nothing can reach."""
    given = [as_positive("a budget", budget) for budget in budgets]
    ladder = as_budgets(given)
    if len(ladder) != len(given):
        raise ValueError(f"budgets must differ, got {given}")
    for below, budget in pairwise(ladder):
        if below >= most:
            raise ValueError(
                f"budget {budget} is never reached: {below} holds the {most} tokens that max_images allows"
            )
    return tuple(ladder)
