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
    QKVParallelLinear, RowParallelLinear  QKVParallelLinear, ...          QKVParallelLinear, ...
    KimiVLEncoder.set_encoder_parallel    mm_enable_dp_encoder            mm_encoder_tp_mode
    run_dp_sharded_vision_model           run_dp_sharded_mrope_..._model  run_dp_sharded_mrope_vision_model
    get_dp_encoder_lb_assignment          get_dp_encoder_lb_assignment    get_load_balance_assignment
    EncoderCudaGraphRunner                ViTCudaGraphRunner              EncoderCudaGraphManager
    plan_budgets                          -                               encoder_cudagraph_token_budgets
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import EncoderOptions, KimiVLConfig, MoonViTConfig
    from .geometry import ImageGeometry, image_geometry
    from .graphs.runner import EncoderCudaGraphRunner
    from .images.processor import KimiVLImageProcessor
    from .kimi_vl.encoder import KimiVLEncoder
    from .moonvit.merger import build_merge_gather_idx, patch_merger, patch_merger_packed, split_image_features
    from .moonvit.metadata import EncoderMetadata, prepare_encoder_metadata
    from .moonvit.model import MoonVitPretrainedModel
    from .parallel.data_parallel import run_dp_sharded_vision_model
    from .planner.plan import plan_budgets
    from .syncs.counter import count_host_syncs, on_device

__all__ = [
    "EncoderCudaGraphRunner",
    "EncoderMetadata",
    "EncoderOptions",
    "ImageGeometry",
    "KimiVLConfig",
    "KimiVLEncoder",
    "KimiVLImageProcessor",
    "MoonViTConfig",
    "MoonVitPretrainedModel",
    "build_merge_gather_idx",
    "count_host_syncs",
    "image_geometry",
    "on_device",
    "patch_merger",
    "patch_merger_packed",
    "plan_budgets",
    "prepare_encoder_metadata",
    "run_dp_sharded_vision_model",
    "split_image_features",
]

_HOME = {
    "EncoderCudaGraphRunner": ".graphs.runner",
    "EncoderMetadata": ".moonvit.metadata",
    "EncoderOptions": ".config",
    "ImageGeometry": ".geometry",
    "KimiVLConfig": ".config",
    "KimiVLEncoder": ".kimi_vl.encoder",
    "KimiVLImageProcessor": ".images.processor",
    "MoonViTConfig": ".config",
    "MoonVitPretrainedModel": ".moonvit.model",
    "build_merge_gather_idx": ".moonvit.merger",
    "count_host_syncs": ".syncs.counter",
    "on_device": ".syncs.counter",
    "image_geometry": ".geometry",
    "patch_merger": ".moonvit.merger",
    "patch_merger_packed": ".moonvit.merger",
    "plan_budgets": ".planner.plan",
    "prepare_encoder_metadata": ".moonvit.metadata",
    "run_dp_sharded_vision_model": ".parallel.data_parallel",
    "split_image_features": ".moonvit.merger",
}


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that `kimivl-lab --help` need not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value
