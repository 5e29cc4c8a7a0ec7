"""vLLM's Kimi-VL with parts of this library. Only vLLM imports this module, by the name that the plugin enters.

Source: the classes of vLLM 0.32 that are replaced (vllm/model_executor/models/kimi_vl.py, moonvit.py).
Test: tests/engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models import kimi_vl as upstream
from vllm.model_executor.models.utils import maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphCaptureInputs, EncoderCudaGraphReplayBuffers

from ...config import MoonViTConfig
from ...geometry import as_grid_list
from ...graphs.inputs import CapturedMetadata
from ...graphs.inputs import SupportsEncoderCudaGraph as LabGraphs
from ...kernels.dispatch import compute_dtype
from ...kernels.weight_state import announce_change
from ...kimi_vl.processor import KimiVLProcessor
from ...moonvit.merger import split_image_features
from ...moonvit.metadata import EncoderMetadata, prepare_encoder_metadata
from ...moonvit.model import MoonVitPretrainedModel
from ...moonvit.position import Learnable2DInterpPosEmb
from ...moonvit.rope import Rope2DPosEmb
from .graph_inputs import graph_values, write_offsets
from .parts import Parts

_SIZES = (
    *("patch_size", "num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("init_pos_emb_height", "init_pos_emb_width", "merge_kernel_size"),
)


class LabProcessingInfo(upstream.KimiVLProcessingInfo):
    """This library's processor, with the keywords that vLLM hands on, and its count of tokens."""

    def get_hf_processor(self, **kwargs: object) -> KimiVLProcessor:
        return self.ctx.get_hf_processor(KimiVLProcessor, **kwargs)

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        processor = self.get_hf_processor().image_processor
        merge_h, merge_w = processor.merge_kernel_size
        return processor.get_number_of_image_patches(image_height, image_width) // (merge_h * merge_w)


class LabMultiModalProcessor(upstream.KimiVLMultiModalProcessor):
    """vLLM's, whose refusals say what the processor said. vLLM alone names the data and keeps the reason in its log."""

    def _call_hf_processor(self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]) -> Any:
        try:
            return super()._call_hf_processor(hf_data, hf_kwargs)
        except ValueError as error:
            if isinstance(error.__cause__, ValueError | TypeError):
                raise ValueError(str(error.__cause__)) from error
            raise


class MetadataTower(upstream.MoonVitPretrainedModel):
    """vLLM's layers with this library's position embeddings and metadata."""

    def __init__(self, config: Any, prefix: str = "") -> None:
        super().__init__(config, prefix=prefix)
        self.patch_embed.pos_emb = Learnable2DInterpPosEmb(*self.patch_embed.pos_emb.weight.shape)
        self.lab_rope = Rope2DPosEmb(config.hidden_size // config.num_attention_heads)

    def lab_metadata(self, grids: Sequence[tuple[int, int]], max_images: int | None = None) -> EncoderMetadata:
        return prepare_encoder_metadata(
            grids,
            pos_emb=self.patch_embed.pos_emb,
            rope=self.lab_rope,
            merge_kernel_size=tuple(self.merge_kernel_size),
            max_images=max_images,
            position="cached",
        )

    def forward(self, pixel_values: Tensor, grid_hw: Any = None, *, encoder_metadata: Any = None) -> Any:
        """With grids: a list of an image's features each. With values of a graph: one packed tensor."""
        if encoder_metadata is not None:
            values = dict(encoder_metadata)
            values["rope_freqs_cis"] = torch.view_as_complex(values.pop("rope_cos_sin"))
            return super().forward(pixel_values, None, encoder_metadata=values)
        grids = as_grid_list(grid_hw)
        packed = self(pixel_values, encoder_metadata=graph_values(self.lab_metadata(grids)))
        return split_image_features(packed, grids, tuple(self.merge_kernel_size))


class LabTower(MoonVitPretrainedModel):
    """This library's tower behind vLLM's calls."""

    vit_processing_type = "rope_2d"

    def __init__(self, config: Any, prefix: str = "") -> None:
        super().__init__(MoonViTConfig(**{name: getattr(config, name) for name in _SIZES}))
        self.merge_kernel_size = self.config.merge_kernel_size
        self.eval().requires_grad_(False)

    def lab_metadata(self, grids: Sequence[tuple[int, int]], max_images: int | None = None) -> EncoderMetadata:
        return self.prepare_encoder_metadata(grids, max_images)

    def forward(self, pixel_values: Tensor, grid_hw: Any = None, *, encoder_metadata: Any = None) -> Any:
        """As `MetadataTower.forward`. Values of a graph have no lengths on the host: see `CapturedMetadata`."""
        if encoder_metadata is not None:
            values = dict(encoder_metadata)
            bound = int(values.pop("max_seqlen"))  # on the host
            return super().forward(
                pixel_values, encoder_metadata=CapturedMetadata(grid_hws=(), max_seqlen=bound, **values)
            )
        grids = as_grid_list(grid_hw)
        return split_image_features(super().forward(pixel_values, grids), grids, self.merge_kernel_size)


@MULTIMODAL_REGISTRY.register_processor(
    LabMultiModalProcessor, info=LabProcessingInfo, dummy_inputs=upstream.KimiVLDummyInputsBuilder
)
class KimiVLLabForConditionalGeneration(upstream.KimiVLForConditionalGeneration):
    """vLLM's model with the parts that its configuration names; parameter names stay the published ones."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        parts = Parts.read(vllm_config.model_config.hf_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.must_be_whole = vllm_config.load_config.load_format != "dummy"
        tower = LabTower if "tower" in parts else MetadataTower if "metadata" in parts else None
        self.replaced = False
        if tower and isinstance(self.vision_tower, upstream.MoonVitPretrainedModel):  # else vLLM serves text alone
            self.replaced = True
            with self._mark_tower_model(vllm_config, "image"):
                self.vision_tower = tower(self.config.vision_config, prefix=maybe_prefix(prefix, "vision_tower"))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As vLLM's. ValueError if the first load leaves out a vision weight: vLLM would serve with a missing bias."""
        loaded = super().load_weights(weights)
        announce_change(self.vision_tower.parameters())  # vLLM writes to `.data`, which torch does not count
        vision = ("vision_tower.", "multi_modal_projector.")
        missing = {name for name, _ in self.named_parameters() if name.startswith(vision)} - loaded
        if missing and self.must_be_whole:
            raise ValueError(f"the checkpoint lacks {len(missing)} vision weights: {', '.join(sorted(missing)[:8])}")
        self.must_be_whole = False  # a running server may be given new weights in portions
        return loaded

    def get_encoder_cudagraph_config(self) -> Any:
        config = super().get_encoder_cudagraph_config()
        if self.replaced:
            config.buffer_keys = ["rope_cos_sin" if key == "rope_freqs_cis" else key for key in config.buffer_keys]
            config.padding_logics["cu_seqlens"] = write_offsets
        return config

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        if not self.replaced:
            return super().select_encoder_cudagraph_items(mm_kwargs, indices)
        grids = as_grid_list(mm_kwargs["image_grid_hws"])
        if not indices:
            return {"pixel_values": mm_kwargs["pixel_values"][:0], "image_grid_hws": []}
        return LabGraphs.select_encoder_cudagraph_items(self, {**mm_kwargs, "image_grid_hws": grids}, indices)

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, max_batch_size: int, *args: Any, **kwargs: Any
    ) -> EncoderCudaGraphCaptureInputs:
        """Inputs of zeros. The graph computes `token_budget` tokens, without vLLM's rounding (`planner.vllm_rows`)."""
        if not self.replaced:
            return super().prepare_encoder_cudagraph_capture_inputs(token_budget, max_batch_size, *args, **kwargs)
        vision, weight = self.config.vision_config, next(self.vision_tower.parameters())
        kh, kw = vision.merge_kernel_size
        rows, slots = token_budget * kh * kw, max_batch_size + 1
        angles = (rows, vision.hidden_size // vision.num_attention_heads // 2, 2)
        values = {
            "pixel_values": torch.zeros(
                (rows, 3, vision.patch_size, vision.patch_size), dtype=weight.dtype, device=weight.device
            ),
            "pos_embeds": torch.zeros((rows, vision.hidden_size), dtype=weight.dtype, device=weight.device),
            "rope_cos_sin": torch.zeros(angles, dtype=compute_dtype(weight.dtype), device=weight.device),
            "cu_seqlens": (torch.arange(slots + 1, device=weight.device) * rows // slots).int(),
            "max_seqlen": torch.tensor(rows, dtype=torch.int32, device="cpu"),
            "merge_gather_idx": torch.zeros(rows, dtype=torch.int64, device=weight.device),
        }
        return EncoderCudaGraphCaptureInputs(values=values)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, *args: Any, **kwargs: Any
    ) -> EncoderCudaGraphReplayBuffers:
        if not self.replaced:
            return super().prepare_encoder_cudagraph_replay_buffers(mm_kwargs, max_batch_size, *args, **kwargs)
        grids = as_grid_list(mm_kwargs["image_grid_hws"])
        values = graph_values(self.vision_tower.lab_metadata(grids, max_batch_size + 1))
        del values["max_seqlen"]  # the bound of the capture holds for the padding too
        return EncoderCudaGraphReplayBuffers(values={"pixel_values": mm_kwargs["pixel_values"], **values})
