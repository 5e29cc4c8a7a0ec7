"""Telling one state of a weight from another: what every cache of something made from weights asks first."""

import weakref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_SAMPLES = 4  # each a cache miss; an update through .data changes whole tensors, so a few are enough


class WeightState:
    """A weight as it is now, without keeping it alive.

    A change that `still_holds` sees: another tensor or storage, dtype or device, and every in-place update that
    autograd's version counter counts (optimisers, `load_state_dict`, `copy_`). An update through `.data` escapes that
    counter; on a CPU a sample of the values finds it, on a GPU a look would cost a sync.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weakref.ref(weight)
        self.storage = StorageWeakRef(weight.untyped_storage())  # while it lives, no other storage is equal to it
        self.version = weight._version
        self.form = (weight.dtype, weight.device, weight.shape)
        self.sample = _sample(weight).clone() if weight.device.type == "cpu" else None

    def still_holds(self, weight: Tensor) -> bool:
        """Whether `weight` is, as far as can be seen, the weight that this state was taken of, unchanged."""
        return (
            self.weight() is weight
            and self.version == weight._version
            and self.storage.cdata == weight.untyped_storage()._cdata
            and self.form == (weight.dtype, weight.device, weight.shape)
            and (self.sample is None or torch.equal(self.sample, _sample(weight)))
        )

    @staticmethod
    def is_traceable(weight: Tensor) -> bool:
        """Whether a change of `weight` would be seen: plain tensors (or such as say so) with values, not made in
        inference mode."""
        plain = type(weight) in (torch.nn.Parameter, Tensor) or getattr(weight, "counts_versions", False)
        return plain and not weight.is_inference() and not weight.is_meta


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)]
