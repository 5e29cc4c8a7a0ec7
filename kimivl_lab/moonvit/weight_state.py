"""Telling one state of a weight from another: what every cache of something made from weights asks first."""

import weakref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_SAMPLES = 16  # each a cache miss; an update through .data changes whole tensors, so a few are enough


class WeightState:
    """A weight as it is now, without keeping it alive; two are equal when nothing shows a change in between.

    Seen: another tensor or storage, dtype or device, and every in-place update that autograd's version counter counts
    (optimisers, `load_state_dict`, `copy_`). An update through `.data` escapes that counter; on a CPU a sample of the
    values finds it, on a GPU a look would cost a sync.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weakref.ref(weight)
        self.storage = StorageWeakRef(weight.untyped_storage())  # while it lives, no other storage is equal to it
        self.version = weight._version
        self.form = (weight.dtype, weight.device, weight.shape)
        flat = weight.detach().reshape(-1)
        self.sample = flat[:: max(1, flat.numel() // _SAMPLES)].clone() if weight.device.type == "cpu" else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightState):
            return NotImplemented
        same_tensor = self.weight() is other.weight() and self.storage.cdata == other.storage.cdata
        if not (same_tensor and self.version == other.version and self.form == other.form):
            return False
        return self.sample is None or other.sample is None or torch.equal(self.sample, other.sample)

    @staticmethod
    def is_traceable(weight: Tensor) -> bool:
        """Whether a change of `weight` would be seen: plain tensors, not made in inference mode."""
        return type(weight) in (torch.nn.Parameter, Tensor) and not weight.is_inference()
