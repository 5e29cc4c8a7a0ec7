"""The precision in which angles, interpolation and softmax statistics are computed, whatever the tower's own."""

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every dtype but float64, which stays float64 (used by parity tests)."""
    return torch.float64 if dtype == torch.float64 else torch.float32
