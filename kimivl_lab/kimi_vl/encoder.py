"""The vision half of Kimi-VL: tower and projector, under the published checkpoint's names.

Three switches, which combine:

    encoder.set_options(attention="sdpa", position_cache_bytes=2**28)      how the tower computes
    encoder.set_encoder_parallel("data", group)                            which rank encodes which image
    encoder.set_graphs(budgets=[64, 256, 1104], max_images=8)              each rank replays graphs of its own

Example: 5 images of one request on 2 ranks. Rank 0 replays its 3 images, rank 1 its 2. One collective gathers the
features on both ranks, in the order of the request, and the projector runs on the packed result.

Test: tests/test_encoder_graphs.py, tests/test_parallel_ranks.py, tests/test_parallel_calls.py.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import EncoderOptions, KimiVLConfig
from ..geometry import Grid
from ..graphs.inputs import SupportsEncoderCudaGraph
from ..graphs.runner import EncoderCudaGraphRunner
from ..moonvit.checkpoint import StrictPreTrainedModel
from ..moonvit.metadata import EncoderMetadata
from ..moonvit.model import MoonVitPretrainedModel
from ..parallel.auto import AutoParallelTower
from ..parallel.calls import same_call
from ..parallel.cost_model import CostModel
from ..parallel.data_parallel import run_dp_sharded_vision_model
from ..parallel.groups import SharedGroup, check_group
from ..parallel.tensor_parallel import CutTower, tensor_parallel

ENCODER_PARALLEL = ("none", "data", "tensor", "auto")
_IN_GRAPHS = {"attention", "rope", "linear", "compile", "compute"}  # the options that a captured graph has frozen


class KimiVLMultiModalProjector(nn.Module):
    """LayerNorm on each patch, the 4 patches of a token side by side, linear, exact (erf) GELU, linear."""

    def __init__(self, config: KimiVLConfig) -> None:
        super().__init__()
        vision, text = config.vision_config, config.text_config
        self.hidden_size = vision.hidden_size * vision.merge_size
        self.pre_norm = nn.LayerNorm(vision.hidden_size, eps=1e-5)
        self.linear_1 = nn.Linear(self.hidden_size, self.hidden_size)
        self.linear_2 = nn.Linear(self.hidden_size, text.hidden_size)

    def forward(self, image_features: Tensor) -> Tensor:
        """(T, 4, D) -> (T, text hidden size)."""
        x = self.pre_norm(image_features).view(-1, self.hidden_size)  # (T, 4D)
        return self.linear_2(F.gelu(self.linear_1(x)))


class KimiVLEncoder(SupportsEncoderCudaGraph, StrictPreTrainedModel):
    """Tower and projector: images in, rows for the language model out. Loads from a full Kimi-VL checkpoint."""

    config_class = KimiVLConfig
    config: KimiVLConfig
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoonVitEncoderLayer"]
    _checkpoint_renames = {r"^model\.(vision_tower|multi_modal_projector)\.": r"\1."}
    _checkpoint_ignores = r"^(model\.)?(language_model|lm_head)\."

    def __init__(self, config: KimiVLConfig, options: EncoderOptions | None = None) -> None:
        super().__init__(config)
        self.vision_tower = MoonVitPretrainedModel(config.vision_config, options)
        self.multi_modal_projector = KimiVLMultiModalProjector(config)
        self.out_hidden_size = config.text_config.hidden_size
        self.encoder_parallel = "none"
        self._group = SharedGroup()
        self._auto: AutoParallelTower | None = None
        self._graphs: dict[str, Any] | None = None  # the runner's arguments
        self._runner: EncoderCudaGraphRunner | None = None
        self.post_init()

    def set_options(self, **changes: Any) -> Self:
        """Changes how the tower computes, by `EncoderOptions`' names; call it between requests.

        What goes with a change, and is made anew when it is needed:
            attention, rope, linear, compile, compute   captured graphs and their counters
            linear="plain", compile=True                the packed copies of the weights
            position other than "cached"                the entries of the position cache
            position_cache_bytes                        the entries that are over the new bound

        Raises:
            TypeError: a name that `EncoderOptions` does not have.
            ValueError: `position_cache_bytes` that is no count of bytes. Names of kernels are checked at the next call.
        """
        before = self.vision_tower.options
        self.vision_tower.set_options(**changes)
        if any(getattr(before, name) != getattr(self.vision_tower.options, name) for name in _IN_GRAPHS):
            self._runner = None
        return self

    def set_graphs(self, budgets: Iterable[int] | None, max_images: int = 8, **options: Any) -> Self:
        """Encodes by captured graphs from now on, or by none if `budgets` is None. Call `graph_runner.capture()` next.

        The graphs hold the tower. The projector runs behind them, and on ranks behind the gather, so that it is one
        computation in every mode, can be trained behind a tower that replays, and can be replaced. The result is that
        of the encoder without graphs, within the rounding of matrix products of another size.

        Ranks: each captures and replays alone, so this call is not shared and the budgets may differ. A rank without
        images replays nothing. In mode "auto" the batches that go to tensor parallel are eager, counted as "tensor
        parallel". In mode "tensor" the collectives are captured: NCCL and the same budgets on every rank.

        Gradient: a replay has none. In mode "none" a batch is eager, counted as "gradient", if gradients are enabled
        and a weight of the tower or the pixels require one.

        What drops the graphs: `set_options`, see there; `.to()` and its kin, when device or dtype change; another tower
        in place of this one; `set_encoder_parallel`. A deep copy and a pickle keep these settings and hold no graphs.
        They are captured anew at the next call. A layer, weight or hook of the tower that changes after the capture is
        a `StaleGraphError`: call `graph_runner.reset()`. Hooks that were there before are in the graphs, as the
        operators that they called.

        Args:
            budgets: merged tokens of each graph.
            max_images: most images in one replay.
            options: of `EncoderCudaGraphRunner`: backend, packing, replay_cost, max_waste, pixel_dtype, poison.

        Raises:
            ValueError: what the runner refuses, or mode "tensor" over a group that is not NCCL's.
        """
        graphs = None if budgets is None else {"budgets": list(budgets), "max_images": max_images, **options}
        runner = self._runner_of(graphs, self.encoder_parallel, self._group.group)
        self._graphs, self._runner = graphs, runner
        return self

    @property
    def graph_runner(self) -> EncoderCudaGraphRunner | None:
        """What holds the graphs of `set_graphs` and counts in `.stats`; None without. Its `capture()` needs no peer."""
        if self._runner is None or self._runner.tower is not self.vision_tower:
            self._runner = self._runner_of(self._graphs, self.encoder_parallel, self._group.group)
        return self._runner

    def _runner_of(
        self, graphs: dict[str, Any] | None, encoder_parallel: str, group: dist.ProcessGroup | None
    ) -> EncoderCudaGraphRunner | None:
        if graphs is None:
            return None
        shared = {"tensor_parallel_group": group} if encoder_parallel == "tensor" else {}
        return EncoderCudaGraphRunner(self.vision_tower, **graphs, **shared)

    def set_encoder_parallel(
        self, encoder_parallel: str, group: dist.ProcessGroup | None = None, cost_model: CostModel | None = None
    ) -> Self:
        """Chooses how ranks share the tower's work. The projector runs on every rank, on one packed tensor.

        The tower and the projector may be replaced afterwards: each call takes those that the encoder then has. A deep
        copy shares the group. An encoder that was pickled comes back in mode "none". A tower that was cut ("tensor")
        is neither saved nor pickled.

        Args:
            encoder_parallel: "none"; "data", images shared out (the engines' `mm_enable_dp_encoder`); "tensor", layers
                cut over the ranks, for good; or "auto", data or tensor by the batch, from one copy of the weights.
            group: the ranks, unless "none". All of them make this call, and every `get_image_features`, alike.
            cost_model: what "auto" chooses by; see `AutoParallelTower`.

        Raises:
            ValueError: an unknown mode, no group, a tower that the ranks cannot share or that is cut already.
            RankError: a rank chooses another mode, or none within the group's timeout.
        """
        if encoder_parallel not in ENCODER_PARALLEL:
            raise ValueError(f"unknown encoder_parallel {encoder_parallel!r}: one of {', '.join(ENCODER_PARALLEL)}")
        if isinstance(self.vision_tower, CutTower):
            raise ValueError("the tower is cut over ranks already: load it anew")
        auto = None
        if encoder_parallel != "none":
            with same_call(check_group(group)) as call:
                layers, width = self.config.vision_config.num_hidden_layers, self.config.vision_config.hidden_size
                call.about = f"set_encoder_parallel({encoder_parallel!r}) of {layers} layers of {width}, {self.dtype}"
                self._runner_of(self._graphs, encoder_parallel, group)  # refuses now what cannot be captured
                if encoder_parallel == "tensor":
                    tensor_parallel(self.vision_tower, check_group(group))
            if encoder_parallel == "auto":
                auto = AutoParallelTower(self.vision_tower, check_group(group), cost_model)
        self.encoder_parallel, self._group, self._auto = encoder_parallel, SharedGroup(group), auto
        self._runner = None
        return self

    def get_image_features(
        self,
        pixel_values: Tensor,
        image_grid_hws: Sequence[Grid] | Tensor | None = None,
        *,
        encoder_metadata: EncoderMetadata | None = None,
    ) -> Tensor:
        """(L, 3, 14, 14) patches and (n, 2) grids -> (T, text hidden size), T = L / 4, in the order of the images.

        Arguments and errors are the tower's. Ranks and graphs build their own metadata and take none.
        """
        alone = self.encoder_parallel in ("none", "tensor")
        runner = self.graph_runner
        if alone and runner is None:
            features = self.vision_tower(pixel_values, image_grid_hws, encoder_metadata=encoder_metadata)  # (T, 4, D)
        elif image_grid_hws is None or encoder_metadata is not None:
            with_graphs = " with graphs" * (runner is not None)
            raise ValueError(
                f"encoder_parallel={self.encoder_parallel!r}{with_graphs} takes image_grid_hws, not encoder_metadata"
            )
        else:
            features = self._encode(pixel_values, image_grid_hws, runner)
        # On every rank: at the published width it has 2 % of the tower's FLOPs, and behind the collective it works
        # alike for every mode, tower and graph runner.
        return self.multi_modal_projector(features)

    forward = get_image_features

    def _encode(
        self, pixel_values: Tensor, image_grid_hws: Sequence[Grid] | Tensor, runner: EncoderCudaGraphRunner | None
    ) -> Tensor:
        """The tower's features, by ranks, by graphs or by both; a batch that passes by the graphs is counted."""
        start, eager = time.perf_counter(), None
        if self._auto is not None:
            self._auto.tower = self.vision_tower
            features = self._auto(pixel_values, image_grid_hws, runner)
            eager = "tensor parallel" if self._auto.last_choice == "tensor" else None
        elif self.encoder_parallel == "data":
            tower = runner or self.vision_tower
            features = run_dp_sharded_vision_model(tower, pixel_values, image_grid_hws, self._group.get())
        elif runner is None or self._wants_gradient(pixel_values):
            features, eager = self.vision_tower(pixel_values, image_grid_hws), "gradient"
        else:
            features = runner(pixel_values, image_grid_hws)
        if runner is not None and eager is not None:
            runner.count_eager(eager, image_grid_hws, time.perf_counter() - start)
        return features

    def _wants_gradient(self, pixel_values: Tensor) -> bool:
        if not torch.is_grad_enabled():
            return False
        return pixel_values.requires_grad or any(weight.requires_grad for weight in self.vision_tower.parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `.to()` and its kin call: graphs of another device or dtype go."""
        before = self.vision_tower.device, self.vision_tower.dtype
        super()._apply(fn, recurse)
        if before != (self.vision_tower.device, self.vision_tower.dtype):
            self._runner = None
        return self

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As transformers' `save_pretrained`; ValueError if the tower is cut over ranks."""
        if isinstance(self.vision_tower, CutTower):
            self.vision_tower.save_pretrained()
        super().save_pretrained(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_runner": None}  # graphs read this encoder's memory, no copy's

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._group.group is None:  # from a pickle, or a copy of an encoder without a group
            self.encoder_parallel, self._auto = "none", None
