"""Kimi-VL: the tower with its projector, and the whole model."""

from .encoder import KimiVLEncoder, KimiVLMultiModalProjector

__all__ = ["KimiVLEncoder", "KimiVLMultiModalProjector"]
