"""Kimi-VL's vision encoder as a small, exact reference library: geometry, tower, and each serving optimisation.

Where a name is known from elsewhere:

    here                                  SGLang                          vLLM
    ------------------------------------  ------------------------------  -----------------------------------------
    MoonVitPretrainedModel                MoonVitPretrainedModel          MoonVitPretrainedModel
    Learnable2DInterpPosEmb               Learnable2DInterpPosEmb         Learnable2DInterpPosEmb
    Rope2DPosEmb                          Rope2DPosEmb                    Rope2DPosEmb
    prepare_encoder_metadata              inside the tower's forward      prepare_encoder_metadata
    patch_merger                          patch_merger                    patch_merger
    patch_merger_packed                   -                               patch_merger_packed
    build_merge_gather_idx                -                               build_merge_gather_idx
    KimiVLMultiModalProjector             KimiVLMultiModalProjector       KimiVLMultiModalProjector
    KimiVLEncoder.get_image_features      get_image_feature               embed_multimodal
"""

from .config import EncoderOptions, KimiVLConfig, MoonViTConfig
from .geometry import ImageGeometry, image_geometry
from .image_processor import KimiVLImageProcessor
from .kimi_vl import KimiVLEncoder
from .moonvit.merger import build_merge_gather_idx, patch_merger, patch_merger_packed, split_image_features
from .moonvit.metadata import EncoderMetadata, prepare_encoder_metadata
from .moonvit.model import MoonVitPretrainedModel

__all__ = [
    "EncoderMetadata",
    "EncoderOptions",
    "ImageGeometry",
    "KimiVLConfig",
    "KimiVLEncoder",
    "KimiVLImageProcessor",
    "MoonViTConfig",
    "MoonVitPretrainedModel",
    "build_merge_gather_idx",
    "image_geometry",
    "patch_merger",
    "patch_merger_packed",
    "prepare_encoder_metadata",
    "split_image_features",
]
