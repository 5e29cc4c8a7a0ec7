"""Watching the operators that one torch function runs: which wait, which launch, which are unknown.

`OperatorWatch` looks each operator up in `syncs.rules` and reports to a `Watcher`; subclass `Watcher` to receive waits,
copies and launches in order. Example: `x[mask]` on the device reports one wait, "boolean mask", of 4 bytes.

A non-blocking copy between the device and pageable memory is "staged": the driver may wait for the stream before it
copies through a buffer. torch's debug mode does not see it, so it is reported apart. `x[0] = number` waits (one value
is copied from pageable memory), `x[mask] = number` does not (it is a masked fill).
Test: tests/test_syncs.py.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..private_api import TorchDispatchMode, composite_form, operator_schema, storage_id, tree_leaves
from .rules import COPY_TO_DEVICE, COPY_TO_HOST, waits_of

_READS = {"__bool__": "bool", "__int__": "int", "__float__": "float"}
_READS |= dict.fromkeys(("__index__", "__getitem__", "__setitem__"), "index")
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
# Arguments with which an operator runs on the host whose kernels are for GPUs alone.
_HOST_FORMS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "kimivl_lab::packed_attention": lambda q, k, v, cu_seqlens, max_seqlen, _: (q, k, v, cu_seqlens, max_seqlen, "sdpa")
}
_pinned: set[StorageWeakRef] = set()


class Watcher:
    """Receives waits, copies, launches and unknown operators; this class ignores the waits and the unknown ones.

    Attributes:
        touched: whether any watched function has worked on the device.
        launches: operators that launched at least one kernel.
        bytes_to_device, bytes_to_host: bytes copied each way.
    """

    def __init__(self) -> None:
        self.touched = False
        self.launches = 0
        self.bytes_to_device = 0
        self.bytes_to_host = 0

    def wait(self, kind: str) -> None:
        """The host is about to wait for the device."""

    def stage(self, kind: str) -> None:
        """A non-blocking copy is about to go through pageable memory."""

    def not_known(self, operator: str) -> None:
        """An operator is about to run whose waits are not known."""

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
        watcher: what is reported to.
        function: the function's name, which tells a `bool()` from an `item()`.
        on_device: those of its tensors that live on the device. Results of operators that take one of them do, too, and
            so do new tensors.
        reports: False if the function's waits are reported by its caller: only launches are reported here.
    """

    def __init__(self, watcher: Watcher, function: str, on_device: Iterable[Tensor], *, reports: bool = True) -> None:
        super().__init__()
        self.watcher = watcher
        self.function = function
        self.reports = reports
        self.kept: list[Tensor] = []  # a freed storage's address could be taken for another's
        self.storages: set[int] = set()
        self._add(on_device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (composite := composite_form(func)) is not None:
            with self:  # in inference mode such an operator arrives here before its parts do
                return composite(*args, **kwargs)
        name = operator_schema(func).name.removeprefix("aten::")
        tensors = _tensors((args, kwargs))
        on_device = [self._is_on_device(tensor) for tensor in tensors]
        if name == "copy_" and on_device[0] != on_device[1]:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self.watcher.transfer(args[0], args[1], to_device=on_device[0], non_blocking=non_blocking)
            return func(*args, **kwargs)
        if self.reports and (any(on_device) or not tensors):
            self._report_waits(name, func, args, kwargs)
        out = func(*_HOST_FORMS.get(name, lambda *same: same)(*args), **kwargs)
        made = _tensors(out) if any(on_device) or not tensors else []
        self._add(made)
        if any(tensor.numel() for tensor in made) and not func.is_view and name not in _ALLOCATIONS:
            self.watcher.launches += 1
        return out

    def _report_waits(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        waits = waits_of(func, args, kwargs, self._is_on_device)
        if waits is None:
            self.watcher.not_known(name)
            return
        for wait in waits:
            if isinstance(wait, Tensor):
                self.watcher.transfer(wait, wait, to_device=True, non_blocking=False)
            else:
                kind = _READS.get(self.function, wait.kind) if name == "_local_scalar_dense" else wait.kind
                self.watcher.read(kind, wait.nbytes)

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.kept.append(tensor)
            self.storages.add(_storage(tensor))

    def _is_on_device(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self.storages


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return id(tensor)  # a sparse tensor has no storage; `kept` keeps its id from being used again
    return storage_id(tensor)
