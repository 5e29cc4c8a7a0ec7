"""What an operator makes the host wait for when its tensors live on a GPU: the rules, and a mode that applies them.

What waits is what torch's CUDA code waits for:

    one value read: item, bool, int, float, index       one wait each, also of a device tensor given as a number
    a copy to the host or from it, blocking             one wait, pinned or not
    nonzero, each boolean index, masked_select, unique  one wait: the size of the result
    repeat_interleave with device counts                two, the total and that none is negative; none with output_size
    equal, allclose                                     one; bincount two
    an index given as a list or a host tensor           one: it is copied to the device, as is a host tensor in where

`x[mask] = number` does not wait (it is a masked fill); `x[0] = number` does (one value copied from pageable memory). A
non-blocking copy between the device and pageable memory is "staged": the driver may wait for the stream before it
copies through a buffer of its own. torch's debug mode does not see it, so it is reported apart. Not covered: the checks
of torch.linalg, streams, events, a second device, and what an extension's own code does.

Sources: torch's aten/src/ATen/native/cuda (Copy, CUDAScalar, Nonzero, UniqueCub, SummaryOps), Repeat.h and
python_variable_indexing.cpp; NVIDIA's "API synchronization behavior".
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPY_TO_DEVICE = "copy to device"
COPY_TO_HOST = "copy to host"

_READS = {"__bool__": "bool", "__int__": "int", "__float__": "float"}
_READS |= dict.fromkeys(("__index__", "__getitem__", "__setitem__"), "index")
_SIZE_BYTES = 4
# Operators that read something back, by name: (kind, waits, bytes a wait).
_READERS = {
    "nonzero": ("nonzero", 1, _SIZE_BYTES),
    "masked_select": ("boolean mask", 1, _SIZE_BYTES),
    "_unique2": ("unique", 1, 8),
    "unique_dim": ("unique", 1, 8),
    "unique_consecutive": ("unique", 1, 8),
    "equal": ("equal", 1, 1),
    "allclose": ("equal", 1, 1),
    "bincount": ("bincount", 2, 8),
}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
# Arguments with which an operator runs on the host whose kernels are for GPUs alone.
_HOST_FORMS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "kimivl_lab::packed_attention": lambda q, k, v, cu_seqlens, max_seqlen, _: (q, k, v, cu_seqlens, max_seqlen, "sdpa")
}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_pinned: set[StorageWeakRef] = set()


class Watcher:
    """What waits, copies and launches are reported to; this one ignores the waits."""

    def __init__(self) -> None:
        self.launches = 0
        self.bytes_to_device = 0
        self.bytes_to_host = 0

    def wait(self, kind: str) -> None:
        """The host is about to wait for the device."""

    def stage(self, kind: str) -> None:
        """A non-blocking copy is about to go through pageable memory."""

    def read(self, kind: str, nbytes: int) -> None:
        """`nbytes` are about to be read back while the host waits."""
        self.wait(kind)
        self.bytes_to_host += nbytes

    def transfer(self, target: Tensor, source: Tensor, *, to_device: bool, non_blocking: bool) -> None:
        """`source` is about to be copied to `target`, one of them on the host.

        A dtype is converted on the host when the copy blocks and on the device when it does not.
        """
        if source.numel() == 0:
            return
        kind = COPY_TO_DEVICE if to_device else COPY_TO_HOST
        if not non_blocking:
            self.wait(kind)
        elif not (is_pinned(source if to_device else target) and target.stride() == source.stride()):
            self.stage(kind)
        size = target.numel() * (target if to_device != non_blocking else source).element_size()
        if to_device:
            self.bytes_to_device += size
        else:
            self.bytes_to_host += size


def is_pinned(tensor: Tensor) -> bool:
    """Whether a host tensor lies in pretended pinned memory."""
    return StorageWeakRef(tensor.untyped_storage()) in _pinned


def mark_pinned(tensor: Tensor) -> None:
    """From now on `tensor`'s memory is pinned."""
    for freed in [storage for storage in _pinned if storage.expired()]:
        _pinned.discard(freed)
    _pinned.add(StorageWeakRef(tensor.untyped_storage()))


class OperatorWatch(TorchDispatchMode):
    """Watches the operators that one torch function runs.

    Args:
        function: the function's name, which tells a `bool()` from an `item()`.
        on_device: those of its tensors that live on the device. Results of operators that take one of them do, too, and
            so do new tensors.
    """

    def __init__(self, watcher: Watcher, function: str, on_device: Iterable[Tensor]) -> None:
        super().__init__()
        self.watcher = watcher
        self.function = function
        self.kept: list[Tensor] = []  # a freed storage's address could be taken for another's
        self.storages: set[int] = set()
        self._add(on_device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            with self:  # in inference mode such an operator arrives here before its parts do
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        tensors = _tensors((args, kwargs))
        on_device = [self._is_on_device(tensor) for tensor in tensors]
        if name == "copy_" and on_device[0] != on_device[1]:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self.watcher.transfer(args[0], args[1], to_device=on_device[0], non_blocking=non_blocking)
            return func(*args, **kwargs)
        if any(on_device):
            self._report_reads(name, args, kwargs)
        out = func(*_HOST_FORMS.get(name, lambda *same: same)(*args), **kwargs)
        made = _tensors(out) if any(on_device) or not tensors else []
        self._add(made)
        if any(tensor.numel() for tensor in made) and not func.is_view and name not in _ALLOCATIONS:
            self.watcher.launches += 1
        return out

    def _report_reads(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if name == "_local_scalar_dense":
            self.watcher.read(_READS.get(self.function, "item"), args[0].element_size())
        elif name in _INDEXING:
            self._report_index(args)
        elif name == "where":
            self._report_copies(args)
        elif name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) == 1 and args[0].numel():
            self.watcher.read("repeat", args[0].element_size())
            self.watcher.read("repeat", 1)
        elif name in _READERS and _reads(name, args):
            kind, waits, nbytes = _READERS[name]
            for _ in range(waits):
                self.watcher.read(kind, nbytes)

    def _report_index(self, args: Sequence[Any]) -> None:
        """`args`: the indexed tensor, its indices, then, when it is written, the values."""
        indices = [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        written = args[2:3]
        by_number = len(written) == 1 and written[0].numel() == 1 and not self._is_on_device(written[0])
        if by_number and len(masks) == len(indices) == 1 and self._is_on_device(masks[0]):
            return  # a masked fill
        self._report_copies((*indices, *written))
        for _ in masks:
            self.watcher.read("boolean mask", _SIZE_BYTES)

    def _report_copies(self, tensors: Iterable[Tensor]) -> None:
        """Those on the host are copied to the device first."""
        for tensor in tensors:
            if not self._is_on_device(tensor):
                self.watcher.transfer(tensor, tensor, to_device=True, non_blocking=False)

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.kept.append(tensor)
            self.storages.add(_storage(tensor))

    def _is_on_device(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self.storages


def _reads(name: str, args: Sequence[Any]) -> bool:
    """Whether the operator reads anything back for these arguments."""
    if name == "equal":
        one, other = args
        same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.dtype == other.dtype
        return one.shape == other.shape and one.numel() > 0 and not same
    return name == "nonzero" or args[0].numel() > 0


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
