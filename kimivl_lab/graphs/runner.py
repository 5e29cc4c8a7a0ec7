"""The encoder by captured graphs: images packed into token budgets, replayed, copied out to the caller in order.

    runner = EncoderCudaGraphRunner(tower, budgets=[64, 256, 1104], max_images=8)
    features = runner(batch.pixel_values, batch.image_grid_hws)         # (T, 4, D), the caller's own
    print(runner.stats)

A graph of budget B computes B merged tokens whatever it is given. What fits no budget, or would waste more than
`max_waste`, runs eager, is counted, and is right. Everything that depends on the images is an input of the graph and
comes from the one metadata builder that the eager tower uses.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_backend

from ..checks import as_positive
from ..config import MoonViTConfig
from ..geometry import Grid, as_grid_list
from ..moonvit.model import MoonVitPretrainedModel
from .backends import Graph, resolve_backend
from .engine_protocol import EncoderItemSpec, ImageInputs, SupportsEncoderCudaGraph, TowerGraphs
from .guards import position_caches_untouched
from .inputs import StaticInputs
from .packing import PACKERS, Cost, Replay, as_budgets
from .stats import Calls, GraphCalls, RunnerStats
from .weights import CapturedWeights


@dataclass(frozen=True)
class Captured:
    """What replays need: graphs by budget, the inputs that they read, the weights that they were captured with."""

    graphs: dict[int, Graph]
    inputs: StaticInputs
    weights: CapturedWeights


class EncoderCudaGraphRunner:
    """Called like the tower or encoder that it runs, and in its place, also by `run_dp_sharded_vision_model`.

    Not for several threads at once: all graphs share their inputs and their pool.

    Args:
        model: a tower, (T, 4, D) out, or a KimiVLEncoder, (T, text hidden size) out.
        budgets: merged tokens of each graph.
        max_images: most images in one replay; may exceed the smallest budget.
        backend: "cuda", "trace" or "auto", see `backends`.
        packing: of several images, a key of `PACKERS`.
        costs: of one replay by budget, by which "exact" packs; rows when None.
        max_waste: rows over real merged tokens, above which images run eager; None: no bound.
        pixel_dtype: of the patches that will come, the tower's floats when None, torch.uint8 for raw ones. Others run
            eager.
        tensor_parallel_group: a tensor-parallel tower's group, to say that its collectives may be captured. Without it
            a collective inside is refused: in data parallelism each rank captures and replays its own work alone.
        poison: what to fill with NaN before each replay, to find out who reads it: "pool" (and the output), which none
            may read before it is written, "padding" or both. Padding is zero otherwise, and should be: masked attention
            lets its NaN through, and so do some bfloat16 products of a CPU.

    Raises:
        ValueError: budgets that are none, doubled, not positive, or that no images can reach; an unknown name; a
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
        costs: Cost | None = None,
        max_waste: float | None = 2.0,
        pixel_dtype: torch.dtype | None = None,
        tensor_parallel_group: ProcessGroup | None = None,
        poison: Collection[str] = (),
    ) -> None:
        self.model = TowerGraphs(model) if isinstance(model, MoonVitPretrainedModel) else model
        self.max_images = as_positive("max_images", max_images)
        self.budgets = _checked(budgets, self.model.get_encoder_cudagraph_budget_range(max_images)[1])
        if packing not in PACKERS:
            raise ValueError(f"unknown packing {packing!r}: one of {', '.join(PACKERS)}")
        PACKERS[packing]([1], self.budgets, max_images, costs)  # a cost that is missing or wrong shows now
        if max_waste is not None and not max_waste >= 1:
            raise ValueError(f"max_waste is rows over real tokens, at least 1, got {max_waste}")
        if tensor_parallel_group is not None and (name := get_backend(tensor_parallel_group)) != "nccl":
            raise ValueError(f"tensor_parallel_group: {name} cannot be captured, NCCL can")
        if unknown := set(poison) - {"pool", "padding"}:
            raise ValueError(f"poison: 'pool' and 'padding' are known, not {', '.join(sorted(unknown))}")
        self.packing, self.costs, self.max_waste = packing, costs, max_waste
        self.pixel_dtype = pixel_dtype
        self.tensor_parallel_group = tensor_parallel_group
        self.poison = poison
        self._backend_name = backend
        self._merge_size = self.config.merge_size
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

    def reset(self) -> None:
        """Drops graphs, buffers and counters; the next call captures anew, with the weights as they are then."""
        self.__dict__.pop("captured", None)
        self.backend = resolve_backend(self._backend_name, self.device)
        self.stats = RunnerStats()

    def capture(self) -> None:
        """Captures every budget, the largest first; does nothing when that is done. The first call does it otherwise.

        Raises:
            ValueError: a compiled tower with backend="trace".
            GraphCaptureError: the forward does what no graph can hold; the message names the line.
        """
        _ = self.captured

    @cached_property
    def captured(self) -> Captured:
        """What `capture` made."""
        options = self.tower.options
        if self.backend.name == "trace" and (options.compile or options.rope == "compiled"):
            raise ValueError("backend='trace' records operators, which compiled code hides: compile=False, rope='auto'")
        module = self.model if isinstance(self.model, nn.Module) else self.tower
        names = self.model.get_encoder_cudagraph_config().buffer_keys

        def forward(*values: Tensor) -> Tensor:
            with position_caches_untouched(module):
                return self.model.encoder_cudagraph_forward(dict(zip(names, values, strict=True)))

        with torch.inference_mode(False), torch.no_grad():  # in this order: the first turns gradients on
            buffers = self.model.prepare_encoder_cudagraph_capture_inputs(
                self.budgets[-1], self.max_images, self.pixel_dtype
            )
            inputs, weights = StaticInputs(buffers.values), CapturedWeights(module)
            graphs = {
                budget: self.backend.capture(
                    forward,
                    inputs.first(budget * self._merge_size),
                    weights.packed_copies,
                    allow_collectives=self.tensor_parallel_group is not None,
                )
                for budget in reversed(self.budgets)
            }
        self.stats.input_bytes = inputs.nbytes
        for budget in self.budgets:
            graph = graphs[budget]
            self.stats.graphs[budget] = GraphCalls(capture_seconds=graph.seconds, nbytes=graph.nbytes)
        return Captured(graphs, inputs, weights)

    @torch.no_grad()
    def __call__(self, pixel_values: Tensor, image_grid_hws: Sequence[Grid] | Tensor) -> Tensor:
        """Encodes all images of a batch, in graphs where they fit.

        Args:
            pixel_values: (L, 3, 14, 14), on the host or the device.
            image_grid_hws: (n, 2) host integers (h, w) in patches.

        Returns:
            The model's own result, packed in the order of the images, in memory of its own; without gradient.

        Raises:
            ValueError: grids and pixels that the model refuses.
            StaleGraphError: a weight was replaced or moved after the capture.
        """
        self.captured.weights.check()
        inputs: ImageInputs = {"pixel_values": pixel_values, "image_grid_hws": as_grid_list(image_grid_hws)}
        specs = self.model.get_encoder_cudagraph_item_specs(inputs)
        self.tower.check_pixels(pixel_values, sum(spec.input_size for spec in specs))
        if not specs:
            return self.model.encoder_eager_forward(inputs)
        offsets = list(accumulate((spec.output_tokens for spec in specs), initial=0))
        out = None
        for replay, counted in self._plan(specs, pixel_values.dtype):
            start = time.perf_counter()
            images = sorted(replay.images)
            part = self.model.select_encoder_cudagraph_items(inputs, images)
            features = self.model.encoder_eager_forward(part) if replay.budget is None else self._replay(part, replay)
            if out is None:
                out = features.new_empty((offsets[-1], *features.shape[1:]))
            sizes = [specs[image].output_tokens for image in images]
            for image, rows in zip(images, features[: replay.tokens].split(sizes), strict=True):
                out[offsets[image] : offsets[image + 1]].copy_(rows)
            counted.add(len(images), replay.tokens, replay.rows, time.perf_counter() - start)
        assert out is not None
        return out

    def graph(self, budget: int) -> Graph:
        """The graph of one of the budgets, captured if it has not been."""
        return self.captured.graphs[budget]

    def _plan(self, specs: Sequence[EncoderItemSpec], pixel_dtype: torch.dtype) -> list[tuple[Replay, Calls]]:
        """Replays and eager calls (budget None), each with its counter."""
        tokens = [spec.output_tokens for spec in specs]
        if pixel_dtype.is_floating_point != (self.pixel_dtype or self.dtype).is_floating_point:
            return [(Replay(tuple(range(len(specs))), sum(tokens), None), self._eager("pixels"))]
        plan: list[tuple[Replay, Calls]] = []
        for replay in PACKERS[self.packing](tokens, self.budgets, self.max_images, self.costs):
            if replay.budget is None:
                plan.append((replay, self._eager("too large")))
            elif self.max_waste is not None and replay.rows > self.max_waste * replay.tokens:
                plan.append((replace(replay, budget=None), self._eager("padding")))
            else:
                plan.append((replay, self.stats.graphs[replay.budget]))
        return plan

    def _eager(self, reason: str) -> Calls:
        return self.stats.eager.setdefault(reason, Calls())

    def _replay(self, part: ImageInputs, replay: Replay) -> Tensor:
        """The graph's static output, of which the first `replay.tokens` rows are the images'."""
        assert replay.budget is not None
        graph, inputs = self.graph(replay.budget), self.captured.inputs
        rows = replay.budget * self._merge_size
        inputs.write(self.model.prepare_encoder_cudagraph_replay_buffers(part, self.max_images).values, rows)
        if "padding" in self.poison:
            inputs.poison(rows)
        if "pool" in self.poison:
            self.backend.poison()
            graph.output.fill_(float("nan"))
        graph.replay()
        return graph.output


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
