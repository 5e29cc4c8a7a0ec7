"""Which parts of Kimi-VL a vLLM server takes from this library, and whether this vLLM is one that they fit.

    "processor"  images and prompts by `KimiVLProcessor`: no code of the checkpoint, refusals with their reason
    "metadata"   position embeddings from a cache bounded in bytes, grids that stay on the host, a longest image that
                 counts patches, padding in segments that no image attends to; the layers stay vLLM's
    "tower"      this library's tower, with its own metadata

Chosen by `--hf-overrides '{..., "kimivl_lab_parts": ["processor", "tower"]}'`; "processor" and "metadata" where nothing
is said. "processor" cannot be left out, because the processor comes with the package.

Test: tests/test_vllm_plugin.py.
"""

import logging
from importlib import import_module
from typing import Any

_LOG = logging.getLogger(__name__)

KNOWN = ("processor", "metadata", "tower")
DEFAULT = ("processor", "metadata")
TESTED = "0.32"
# What the plugin replaces or calls: module of vLLM -> names in it, with attributes of classes behind a dot.
SEAMS = {
    "vllm.model_executor.models.kimi_vl": (
        *("KimiVLProcessingInfo.get_hf_processor", "KimiVLProcessingInfo.get_num_image_tokens"),
        *("KimiVLMultiModalProcessor._call_hf_processor", "KimiVLDummyInputsBuilder", "MoonVitPretrainedModel"),
        *("KimiVLForConditionalGeneration.get_encoder_cudagraph_config",),
        *("KimiVLForConditionalGeneration.get_encoder_cudagraph_item_specs",),
        *("KimiVLForConditionalGeneration.select_encoder_cudagraph_items",),
        *("KimiVLForConditionalGeneration.prepare_encoder_cudagraph_capture_inputs",),
        *("KimiVLForConditionalGeneration.prepare_encoder_cudagraph_replay_buffers",),
        *("KimiVLForConditionalGeneration.encoder_cudagraph_forward",),
        *("KimiVLForConditionalGeneration._process_image_pixels", "KimiVLForConditionalGeneration._mark_tower_model"),
    ),
    "vllm.v1.worker.encoder_cudagraph_defs": ("EncoderCudaGraphCaptureInputs", "EncoderCudaGraphReplayBuffers"),
    "vllm.multimodal": ("MULTIMODAL_REGISTRY.register_processor",),
}


class Parts(tuple[str, ...]):
    """Names of parts. ValueError for an unknown or repeated name, or without "processor"."""

    def __new__(cls, names: Any) -> "Parts":
        given = list(names) if isinstance(names, list | tuple) else [names]
        if "processor" not in given or any(given.count(name) > 1 or name not in KNOWN for name in given):
            raise ValueError(
                f'kimivl_lab_parts must list "processor" and any of "metadata" and "tower", got {names!r:.200}'
            )
        return super().__new__(cls, given)

    @classmethod
    def read(cls, config: Any) -> "Parts":
        """The parts that a model's configuration names, or the default ones."""
        return cls(getattr(config, "kimivl_lab_parts", DEFAULT))


def check_engine() -> None:
    """Warns where vLLM is not of the tested release. RuntimeError naming what the plugin needs and vLLM has not."""
    version = import_module("vllm").__version__
    if version != TESTED and not version.startswith((f"{TESTED}.", f"{TESTED}+")):
        _LOG.warning("kimivl_lab's plugin was tested with vLLM %s, this is vLLM %s", TESTED, version)
    missing = [f"{module}.{name}" for module, names in SEAMS.items() for name in names if not _has(module, name)]
    if missing:
        raise RuntimeError(
            f"kimivl_lab's plugin was tested with vLLM {TESTED}; vLLM {version} has no {', '.join(missing)}"
        )


def _has(module: str, name: str) -> bool:
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True
