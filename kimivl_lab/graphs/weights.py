"""Compares a module's weights with those that its graphs were captured with.

A graph reads weights at fixed addresses. A change in place (an optimiser, `load_state_dict`) is seen by the next
replay. A weight that was replaced, moved or cast, or a layer that was replaced, leaves the graph with an address that
is no longer right: `CapturedWeights.check` raises before any replay. Packed copies of weights, which CPU layers make,
are brought up to date instead.

Test: tests/test_graph_runner.py.
"""

import weakref
from typing import Any

from torch import Tensor, nn

from ..kernels.packed_linear import PackedCopy, packed_copy
from .trace_program import HasCurrentTensor


class StaleGraphError(RuntimeError):
    """A replay would use weights that the module no longer has; the message names the first of them."""


class CapturedWeights:
    """The parameters, buffers and submodules of `module` as they are now.

    All are held by weak reference: a weight that the module drops is freed at once, not at the next `reset`.
    """

    def __init__(self, module: nn.Module) -> None:
        # By part of the module, parents first: the part, "_modules", "_parameters" or "_buffers", the name in it.
        self._known: list[tuple[weakref.ref[nn.Module], str, str, weakref.ref[Any], Any, str]] = []
        self._linears: list[weakref.ref[nn.Linear]] = []
        self._copies: list[tuple[weakref.ref[nn.Linear], PackedCopy]] = []
        for path, part in module.named_modules():
            for kind in ("_modules", "_parameters", "_buffers"):
                for name, value in vars(part)[kind].items():
                    if value is not None:
                        full = f"{path}.{name}" if path else name
                        known = (weakref.ref(part), kind, name, weakref.ref(value), _address(value), full)
                        self._known.append(known)
            if isinstance(part, nn.Linear):
                self._linears.append(weakref.ref(part))

    def packed_copies(self) -> dict[int, HasCurrentTensor]:
        """The packed copies that exist now, by the id of the tensor.

        They are kept and brought up to date even if a layer later packs its weight for another kernel: graphs read
        them.
        """
        found = [(ref, packed_copy(layer)) for ref in self._linears if (layer := ref()) is not None]
        self._copies = [(ref, copy) for ref, copy in found if copy is not None and copy.current is not None]
        return {id(copy.current): copy for _, copy in self._copies}

    def check(self) -> None:
        """Call it before every replay: brings packed copies up to date.

        Raises:
            StaleGraphError: a layer or weight is another object than at the capture, or a weight lies elsewhere.
        """
        for part_ref, kind, name, ref, address, path in self._known:
            part = part_ref()
            value = None if part is None else vars(part)[kind].get(name)
            if value is None or value is not ref() or _address(value) != address:
                what = (
                    f"module {path} was replaced"
                    if kind == "_modules"
                    else f"weight {path} was replaced, moved or cast"
                )
                raise StaleGraphError(f"{what} after the graphs were captured: call reset(), then capture() anew")
        for ref, copy in self._copies:
            if (layer := ref()) is not None:
                copy.refresh(layer.weight)


def _address(value: nn.Module | Tensor) -> tuple[Any, ...] | None:
    """What a graph has frozen of a weight. The dtype tells a cast weight that took the old address."""
    return (value.data_ptr(), value.dtype) if isinstance(value, Tensor) else None
