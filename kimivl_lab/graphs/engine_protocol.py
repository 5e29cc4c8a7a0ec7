"""What a graph runner needs to know of an encoder, under the serving engines' names.

vLLM asks a model for it through its protocol `SupportsEncoderCudaGraph`; the methods here are those of that protocol
that images need, as read in release 0.32, so that either runner can be read beside the other. Where they differ:

    mm_kwargs           grids are host integers (`image_grid_hws`), never a tensor of the device
    max_seqlen          a host integer that counts PATCHES
    budget range        of what `max_images` can hold, not of a scheduler
    capture inputs      made once, for the largest budget: smaller ones are views of it
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypedDict, cast

import torch
from torch import Tensor

from ..geometry import MAX_GRID_SIDE, Grid, as_grid_list, num_patches, num_tokens, patch_counts
from ..kernels.dispatch import compute_dtype
from ..moonvit.metadata import EncoderMetadata
from ..moonvit.model import MoonVitPretrainedModel
from .guards import GraphCaptureError


class ImageInputs(TypedDict):
    """Images of one call: pixel_values (L, 3, 14, 14) and their grids (h, w)."""

    pixel_values: Tensor
    image_grid_hws: list[Grid]


@dataclass(frozen=True)
class EncoderItemSpec:
    """One image: `input_size` patches in, `output_tokens` merged tokens out."""

    input_size: int
    output_tokens: int


@dataclass(frozen=True)
class EncoderCudaGraphConfig:
    """Attributes:
    modalities: of the inputs.
    buffer_keys: names of the inputs that are rewritten before a replay, in order.
    out_hidden_size: width of a row of the result.
    """

    modalities: tuple[str, ...]
    buffer_keys: tuple[str, ...]
    out_hidden_size: int


@dataclass(frozen=True)
class EncoderCudaGraphCaptureInputs:
    """Inputs by name at full size, at the addresses that a graph will read."""

    values: dict[str, Tensor]


@dataclass(frozen=True)
class EncoderCudaGraphReplayBuffers:
    """What to copy into the capture inputs of the same names: rows of the real images only."""

    values: dict[str, Tensor]


@dataclass(frozen=True)
class CapturedMetadata(EncoderMetadata):
    """Metadata inside a graph: tensors that are rewritten before each replay, and no lengths on the host.

    What would take the lengths from the host is refused, for a graph would keep those of its capture for ever.
    """

    lengths_on_host: ClassVar[bool] = False

    @property
    def seqlens(self) -> list[int]:
        raise GraphCaptureError(
            "capture: this attention takes the images' lengths from the host, where a graph freezes them: capture with "
            "'flash_attn' or 'torch_varlen' (bfloat16, float16) or 'sdpa_masked' on a GPU, with 'sdpa' on a CPU"
        )

    @property
    def num_patches(self) -> int:
        return self.merge_gather_idx.shape[0]


class SupportsEncoderCudaGraph:
    """Mixed into a module that is called with (pixel_values, image_grid_hws) or (pixel_values, encoder_metadata=)."""

    vision_tower: MoonVitPretrainedModel
    forward: Callable[..., Tensor]
    out_hidden_size: int

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """What is rewritten before a replay, and how wide the result is."""
        keys = ("pixel_values", "pos_embeds", "rope_cos_sin", "cu_seqlens", "merge_gather_idx")
        return EncoderCudaGraphConfig(("image",), keys, self.out_hidden_size)

    def get_encoder_cudagraph_budget_range(self, max_images: int) -> tuple[int, int]:
        """(least, most) merged tokens that one replay can be asked for: one smallest image, `max_images` largest."""
        kernel = self.vision_tower.config.merge_kernel_size
        kh, kw = kernel
        largest = (MAX_GRID_SIDE - 1) // kh * kh, (MAX_GRID_SIDE - 1) // kw * kw
        return num_tokens(kernel, kernel), max_images * num_tokens(largest, kernel)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: ImageInputs) -> list[EncoderItemSpec]:
        """One for each image, in order. ValueError for grids that cannot be merged, and other bad ones."""
        kernel = self.vision_tower.config.merge_kernel_size
        grids = as_grid_list(mm_kwargs["image_grid_hws"])
        return [EncoderItemSpec(num_patches(grid), num_tokens(grid, kernel)) for grid in grids]

    def select_encoder_cudagraph_items(self, mm_kwargs: ImageInputs, indices: Sequence[int]) -> ImageInputs:
        """The images at `indices`, in that order; a view of the pixels where they are neighbours."""
        grids = mm_kwargs["image_grid_hws"]
        pixels = mm_kwargs["pixel_values"]
        chosen = [grids[index] for index in indices]
        if list(indices) == list(range(indices[0], indices[0] + len(indices))):
            start = sum(patch_counts(grids[: indices[0]]))
            return {"pixel_values": pixels.narrow(0, start, sum(patch_counts(chosen))), "image_grid_hws": chosen}
        images = pixels.split(patch_counts(grids))
        return {"pixel_values": torch.cat([images[index] for index in indices]), "image_grid_hws": chosen}

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, max_images: int, pixel_dtype: torch.dtype | None = None
    ) -> EncoderCudaGraphCaptureInputs:
        """Inputs of zeros for `token_budget` merged tokens of up to `max_images` images, and one slot for the padding.

        Args:
            pixel_dtype: the tower's when None; torch.uint8 for raw patches.
        """
        tower, config, device = self.vision_tower, self.vision_tower.config, self.vision_tower.device
        rows = token_budget * config.merge_size
        patch = (rows, 3, config.patch_size, config.patch_size)
        angles = (rows, config.head_dim // 2, 2)
        values = {
            "pixel_values": torch.zeros(patch, dtype=pixel_dtype or tower.dtype, device=device),
            "pos_embeds": torch.zeros((rows, config.hidden_size), dtype=tower.dtype, device=device),
            "rope_cos_sin": torch.zeros(angles, dtype=compute_dtype(tower.dtype), device=device),
            "cu_seqlens": torch.zeros(max_images + 2, dtype=torch.int32, device=device),
            "merge_gather_idx": torch.zeros(rows, dtype=torch.int64, device=device),
        }
        return EncoderCudaGraphCaptureInputs(values)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: ImageInputs, max_images: int
    ) -> EncoderCudaGraphReplayBuffers:
        """The images' own rows, from the one metadata builder; offsets for `max_images` and the padding's slot."""
        metadata = self.vision_tower.prepare_encoder_metadata(mm_kwargs["image_grid_hws"], max_images=max_images + 1)
        names = self.get_encoder_cudagraph_config().buffer_keys
        values = {name: cast(Tensor, getattr(metadata, name)) for name in names if name != "pixel_values"}
        return EncoderCudaGraphReplayBuffers({"pixel_values": mm_kwargs["pixel_values"], **values})

    def encoder_cudagraph_forward(self, values: Mapping[str, Tensor]) -> Tensor:
        """The forward that is captured: everything that depends on the images is in `values`.

        `max_seqlen` is frozen as the number of patches that there is room for, a bound of any batch that fits.
        """
        rows = values["pixel_values"].shape[0]
        tensors = {name: value for name, value in values.items() if name != "pixel_values"}
        return self.forward(
            values["pixel_values"], encoder_metadata=CapturedMetadata(grid_hws=(), max_seqlen=rows, **tensors)
        )

    def encoder_eager_forward(self, mm_kwargs: ImageInputs) -> Tensor:
        """The same for images that no graph takes."""
        return self.forward(mm_kwargs["pixel_values"], mm_kwargs["image_grid_hws"])


class TowerGraphs(SupportsEncoderCudaGraph):
    """A tower alone, seen through the protocol: (T, 4, D) features."""

    def __init__(self, tower: MoonVitPretrainedModel) -> None:
        self.vision_tower = tower
        self.forward = tower
        self.out_hidden_size = tower.config.hidden_size
