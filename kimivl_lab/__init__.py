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
    KimiVLForConditionalGeneration        KimiVLForConditionalGeneration  KimiVLForConditionalGeneration
    KimiVLEncoder.set_encoder_parallel    mm_enable_dp_encoder            mm_encoder_tp_mode
    run_dp_sharded_vision_model           run_dp_sharded_mrope_..._model  run_dp_sharded_mrope_vision_model
    get_dp_encoder_lb_assignment          get_dp_encoder_lb_assignment    get_load_balance_assignment
    EncoderCudaGraphRunner                ViTCudaGraphRunner              EncoderCudaGraphManager
    plan_budgets                          -                               encoder_cudagraph_token_budgets

Test: tests/test_public_names.py.
"""

import sys
from importlib import import_module
from typing import Any

from .auto_classes import enter_names

# Each public name and the module that defines it. Nothing is imported before its first use, so that `--help` on the
# command line and the planner need no torch.
_MODULE_OF = {
    "EncoderCudaGraphRunner": "graphs.runner",
    "EncoderMetadata": "moonvit.metadata",
    "EncoderOptions": "config",
    "ImageGeometry": "geometry",
    "KimiVLConfig": "config",
    "KimiVLEncoder": "kimi_vl.encoder",
    "KimiVLForConditionalGeneration": "kimi_vl.model",
    "KimiVLImageProcessor": "images.processor",
    "KimiVLProcessor": "kimi_vl.processor",
    "MoonViTConfig": "config",
    "MoonVitPretrainedModel": "moonvit.model",
    "TikTokenTokenizer": "kimi_vl.tokenizer",
    "build_merge_gather_idx": "moonvit.metadata",
    "count_host_syncs": "syncs.counter",
    "image_geometry": "geometry",
    "on_device": "syncs.counter",
    "patch_merger": "moonvit.merger",
    "patch_merger_packed": "moonvit.merger",
    "plan_budgets": "planner.plan",
    "prepare_encoder_metadata": "moonvit.metadata",
    "run_dp_sharded_vision_model": "parallel.data_parallel",
    "split_image_features": "moonvit.merger",
}

__all__ = list(_MODULE_OF)

enter_names(sys.modules[__name__])


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
