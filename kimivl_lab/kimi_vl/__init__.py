"""Kimi-VL: the tower with its projector."""

from .encoder import KimiVLEncoder, KimiVLMultiModalProjector

__all__ = ["KimiVLEncoder", "KimiVLMultiModalProjector"]
