"""What a graph reads: which inputs there are, their values for a batch, and the buffers where they lie.

`SupportsEncoderCudaGraph` says how a model's inputs are made. Its methods have the names of vLLM's protocol (those that
images need, as read in release 0.32), so that the two can be read side by side. They differ in this:

    grids            host integers (`image_grid_hws`), never a tensor on the device
    max_seqlen       a host integer that counts PATCHES
    budget range     what `max_images` can hold, not what a scheduler allows
    capture inputs   one set for the largest budget; smaller budgets are views of it

`StaticInputs` are the buffers. One replay of 2 images, L patches together, in a graph of R patches and 5 slots:

    pixel_values      | images 0..L | zeros   |
    pos_embeds        | images 0..L | zeros   |
    rope_cos_sin      | images 0..L | zeros   |
    merge_gather_idx  | 0..L        | zeros   |
    cu_seqlens        0 .. L1 .. L .. . .. . .. R       the padding is cut evenly over the 3 unused slots

The padding lies in segments that hold no image. So every operator writes every row, and no image attends to padding.

Test: tests/test_graph_runner.py, tests/test_faults_graphs.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..geometry import MAX_GRID_SIDE, as_grid_list, num_patches, num_tokens, patch_counts
from ..kernels.dispatch import compute_dtype
from ..kernels.memory import upload
from ..moonvit.metadata import EncoderMetadata
from ..moonvit.model import MoonVitPretrainedModel
from .guards import GraphCaptureError


@dataclass(frozen=True)
class EncoderItemSpec:
    """One image: `input_size` patches in, `output_tokens` merged tokens out."""

    input_size: int
    output_tokens: int


@dataclass(frozen=True)
class CapturedMetadata(EncoderMetadata):
    """Metadata inside a graph: its tensors are rewritten before each replay, and it has no lengths on the host.

    Raises if attention needs host lengths: they would be frozen at capture and wrong in every later replay.
    """

    lengths_on_host: ClassVar[bool] = False

    @property
    def seqlens(self) -> list[int]:
        raise GraphCaptureError(
            "capture: this attention takes the images' lengths from the host, where a graph freezes them: capture with "
            "'flash_attn', 'torch_varlen' or 'sdpa'"
        )

    @property
    def num_patches(self) -> int:
        return self.merge_gather_idx.shape[0]


class SupportsEncoderCudaGraph:
    """Mixed into a module whose `get_image_features` takes (pixel_values, image_grid_hws) or encoder_metadata=.

    `mm_kwargs` is {"pixel_values": (L, 3, 14, 14), "image_grid_hws": list of host pairs (h, w)}. Tensors by name are
    plain dicts, where vLLM wraps them in classes.
    """

    vision_tower: MoonVitPretrainedModel
    get_image_features: Callable[..., Tensor]
    out_hidden_size: int

    def get_encoder_cudagraph_config(self) -> dict[str, Any]:
        """The modalities, the names of the inputs that are rewritten before a replay, the width of a row of output."""
        keys = ("pixel_values", "pos_embeds", "rope_cos_sin", "cu_seqlens", "merge_gather_idx")
        return {"modalities": ("image",), "buffer_keys": keys, "out_hidden_size": self.out_hidden_size}

    def get_encoder_cudagraph_budget_range(self, max_images: int) -> tuple[int, int]:
        """(least, most) merged tokens of one replay: one smallest image, `max_images` largest images."""
        kernel = self.vision_tower.config.merge_kernel_size
        kh, kw = kernel
        largest = (MAX_GRID_SIDE - 1) // kh * kh, (MAX_GRID_SIDE - 1) // kw * kw
        return num_tokens(kernel, kernel), max_images * num_tokens(largest, kernel)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: Mapping[str, Any]) -> list[EncoderItemSpec]:
        """The size of each image, in order. ValueError for grids that are bad or cannot be merged."""
        kernel = self.vision_tower.config.merge_kernel_size
        grids = as_grid_list(mm_kwargs["image_grid_hws"])
        return [EncoderItemSpec(num_patches(grid), num_tokens(grid, kernel)) for grid in grids]

    def select_encoder_cudagraph_items(self, mm_kwargs: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
        """The images at `indices`, in that order. The pixels of neighbours are a view, those of others a copy."""
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
    ) -> dict[str, Tensor]:
        """Inputs of zeros, by name, for `token_budget` merged tokens of up to `max_images` images.

        The offsets have one slot more than images: a batch of `max_images` images still needs a slot for the padding.

        Args:
            pixel_dtype: the tower's when None; torch.uint8 for raw patches.
        """
        tower, config, device = self.vision_tower, self.vision_tower.config, self.vision_tower.device
        rows = token_budget * config.merge_size
        patch = (rows, 3, config.patch_size, config.patch_size)
        angles = (rows, config.head_dim // 2, 2)
        return {
            "pixel_values": torch.zeros(patch, dtype=pixel_dtype or tower.dtype, device=device),
            "pos_embeds": torch.zeros((rows, config.hidden_size), dtype=tower.dtype, device=device),
            "rope_cos_sin": torch.zeros(angles, dtype=compute_dtype(tower.dtype), device=device),
            "cu_seqlens": torch.zeros(max_images + 2, dtype=torch.int32, device=device),
            "merge_gather_idx": torch.zeros(rows, dtype=torch.int64, device=device),
        }

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: Mapping[str, Any], max_images: int
    ) -> dict[str, Tensor]:
        """Values for the inputs of the same names: the rows of the images, without padding.

        They come from the metadata builder that the eager tower uses. The offsets have `max_images` slots and one for
        the padding; unused slots repeat the total.
        """
        metadata = self.vision_tower.prepare_encoder_metadata(mm_kwargs["image_grid_hws"], max_images=max_images + 1)
        _, *names = self.get_encoder_cudagraph_config()["buffer_keys"]
        return {"pixel_values": mm_kwargs["pixel_values"], **{name: getattr(metadata, name) for name in names}}

    def encoder_cudagraph_forward(self, values: Mapping[str, Tensor]) -> Tensor:
        """The forward that is captured: everything that depends on the images is in `values`.

        `max_seqlen` is frozen as the number of patches that the graph has room for, a bound for any batch that fits.
        """
        rows = values["pixel_values"].shape[0]
        tensors = {name: value for name, value in values.items() if name != "pixel_values"}
        return self.get_image_features(
            values["pixel_values"], encoder_metadata=CapturedMetadata(grid_hws=(), max_seqlen=rows, **tensors)
        )

    def encoder_eager_forward(self, mm_kwargs: Mapping[str, Any]) -> Tensor:
        """The forward of images that no graph takes."""
        return self.get_image_features(mm_kwargs["pixel_values"], mm_kwargs["image_grid_hws"])


class TowerGraphs(SupportsEncoderCudaGraph):
    """The protocol for a tower without a projector: (T, 4, D) features."""

    def __init__(self, tower: MoonVitPretrainedModel) -> None:
        self.vision_tower = tower
        self.get_image_features = tower
        self.out_hidden_size = tower.config.hidden_size


class StaticInputs:
    """The buffers at fixed addresses that all graphs read; a graph of R patches reads the first R rows.

    Args:
        buffers: zeros by name, (rows, ...) each; `cu_seqlens` is (slots + 1,).
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.buffers = dict(buffers)
        self._used = 0  # rows that the last write filled
        self._zero_from = 0  # rows from here on are zero

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def views(self, rows: int) -> dict[str, Tensor]:
        """What a graph of `rows` patches reads: views of the buffers. The offsets become those of equal images."""
        offsets = self.buffers["cu_seqlens"]
        offsets.copy_(upload(_evenly(0, rows, len(offsets) - 1), offsets.device))
        return {name: value if value is offsets else value[:rows] for name, value in self.buffers.items()}

    def write(self, values: Mapping[str, Tensor], images: int, rows: int) -> None:
        """Copies the values of `images` images, L <= `rows` patches, to the front, and pads them to `rows`.

        The padding is cut evenly over the unused slots, of which there is always one. As one segment it would cost
        attention the square of its length: 84 patches in a graph of 160 with 9 slots leave 76 patches of padding,
        5,776 attention pairs as one segment and 724 as eight.
        """
        self._used = used = values["pixel_values"].shape[0]
        stale = min(self._zero_from, rows)  # an earlier replay has left something up to here
        for name, buffer in self.buffers.items():
            value = upload(values[name], buffer.device)
            if name == "cu_seqlens":
                # Images take the first slots, so their offsets are the eager ones. The last slot is never an image's:
                # rows that no segment covers would not be written by attention.
                buffer[:images].copy_(value[:images])
                buffer[images:].copy_(upload(_evenly(used, rows, len(buffer) - 1 - images), buffer.device))
            else:
                buffer[:used].copy_(value)
                if stale > used:
                    buffer[used:stale].zero_()
        if self._zero_from <= rows:
            self._zero_from = used

    def poison(self, rows: int) -> None:
        """Fills the padding of the replay that was just written with NaN."""
        for buffer in self.buffers.values():
            if buffer.is_floating_point():
                buffer[self._used : rows].fill_(float("nan"))
        self._zero_from = max(self._zero_from, rows)


def padding_pairs(patches: int, segments: int) -> int:
    """Attention pairs of `patches` of padding in so many segments, as `StaticInputs.write` cuts them.

    Example: 76 patches in 8 segments are 4 of 9 and 4 of 10, 724 pairs.
    """
    length, longer = divmod(patches, segments)
    return longer * (length + 1) ** 2 + (segments - longer) * length**2


def _evenly(start: int, end: int, parts: int) -> Tensor:
    """(parts + 1,) int32 offsets that cut start..end into equal parts: 84, 160 and 8 give 84, 93, 103, ... 160."""
    offsets = [start + (end - start) * part // parts for part in range(parts + 1)]
    return torch.tensor(offsets, dtype=torch.int32, device="cpu")
