"""Detects that a weight changed. A cache derived from a weight compares a stored `WeightState` before it is used.

The rule, for packed copies, the position cache and captured graphs alike: on a CPU the next forward sees every change
of a weight, however it was made; on a GPU, or with `EncoderOptions(weights="announced")`, a change that torch does not
count (a write to `weight.data`, from numpy, by another library) must be announced by `tower.weights_changed()`.

Test: tests/test_faults_weights.py, tests/test_position_cache.py.
"""

import logging
import weakref
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from ..private_api import counts_versions, in_fake_mode, storage_id, weight_version

_LOG = logging.getLogger(__name__)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightState:
    """A weight as it is now; the weight itself is not kept alive.

    Args:
        weight: one that `is_traceable`.
        checked: also keep a copy of the values of a CPU weight, as large as the weight, so that a write that torch
            does not count is seen. `still_holds` then reads both once.
    """

    def __init__(self, weight: Tensor, checked: bool = True) -> None:
        self.weight = weakref.ref(weight)
        self.storage = StorageWeakRef(weight.untyped_storage())  # while it lives, no other storage is equal to it
        self.version = weight_version(weight)
        self.form = (weight.dtype, weight.device, weight.shape, weight.stride())
        self.values = _bits(weight).clone() if checked and weight.device.type == "cpu" else None

    def still_holds(self, weight: Tensor) -> bool:
        """Whether `weight` is the tensor that this state was taken of, unchanged."""
        return (
            self.weight() is weight
            and self.version == weight_version(weight)
            and self.storage.cdata == storage_id(weight)
            and self.form == (weight.dtype, weight.device, weight.shape, weight.stride())
            and (self.values is None or torch.equal(self.values, _bits(weight)))
        )

    @staticmethod
    def is_traceable(weight: Tensor, checked: bool = True) -> bool:
        """Whether a change of `weight` would be seen.

        True for plain tensors with values (and subclasses that say `counts_versions`). A tensor made in inference mode
        has no version counter: it is traceable only where values are compared. In torch's FakeTensorMode no weight is,
        because what would be kept has no values.
        """
        plain = type(weight) in (torch.nn.Parameter, Tensor) or getattr(weight, "counts_versions", False)
        if not plain or weight.is_meta or in_fake_mode():
            return False
        compared = checked and weight.device.type == "cpu"
        if not compared and (weight.is_inference() or not counts_versions()):
            _log_inference_weights()
            return False
        return True


def announce_change(weights: Iterable[Tensor]) -> None:
    """Moves torch's version counter of each weight, as an in-place operator does: every `WeightState` sees it."""
    increment_version([weight for weight in weights if not weight.is_inference()])


@cache
def _log_inference_weights() -> None:
    _LOG.warning(
        "weights have no version counter, as those made in torch.inference_mode(): nothing is cached from them"
    )


def _bits(weight: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself; 8 bytes at a time where possible, which is 4 times as
    fast as 2 at a time."""
    weight = weight.detach()
    if weight.is_contiguous() and weight.nbytes % 8 == 0 and weight.numel():
        return weight.view(-1).view(torch.int64)
    return weight.view(_INTEGERS[weight.element_size()])
