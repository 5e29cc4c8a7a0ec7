"""The weights that graphs were captured with: still where they were, or an error.

A graph reads weights at fixed addresses. Values may change in place (optimisers, `load_state_dict`): the next replay
sees them. A parameter that was replaced, moved or cast leaves the graph with the old one, so that is an error before
any replay. Packed copies of weights, which CPU layers keep, are brought up to date instead.
"""

from typing import Any

from torch import Tensor, nn

from ..kernels.packed_linear import FusedLinear, PackedCopy
from .trace_program import Holder


class StaleGraphError(RuntimeError):
    """Graphs would replay with weights that the module no longer has; the message names the first."""


class CapturedWeights:
    """`module`'s parameters, buffers and submodules as they are now. Keeps the weights' memory alive."""

    def __init__(self, module: nn.Module) -> None:
        self._modules: list[tuple[dict[str, Any], str, nn.Module | None, str]] = []
        self._tensors: list[tuple[dict[str, Any], str, int, str]] = []
        self._memory: list[Tensor] = []
        self._fused: list[FusedLinear] = []
        self._copies: dict[FusedLinear, PackedCopy] = {}
        for path, part in module.named_modules():
            prefix = f"{path}." if path else ""
            self._modules += [(part._modules, name, child, prefix + name) for name, child in part._modules.items()]
            for slots in (part._parameters, part._buffers):
                for name, tensor in slots.items():
                    if tensor is not None:
                        self._tensors.append((slots, name, tensor.data_ptr(), prefix + name))
                        self._memory.append(tensor.detach())
            if isinstance(part, FusedLinear):
                self._fused.append(part)

    def packed_copies(self) -> dict[int, Holder]:
        """Holders of the packed copies that there are now, by the id of the copy; kept, whatever the layers turn to."""
        self._copies = {layer: layer.packed for layer in self._fused if layer.packed.current is not None}
        return {id(copy.current): copy for copy in self._copies.values()}

    def check(self) -> None:
        """StaleGraphError unless every weight lies where it did; packed copies are up to date after it."""
        for slots, name, child, path in self._modules:
            if slots.get(name) is not child:
                raise StaleGraphError(f"module {path} was replaced after the graphs were captured: {_ADVICE}")
        for slots, name, address, path in self._tensors:
            tensor = slots.get(name)
            if tensor is None or tensor.data_ptr() != address:
                raise StaleGraphError(
                    f"weight {path} was replaced, moved or cast after the graphs were captured: {_ADVICE}"
                )
        for layer, copy in self._copies.items():
            copy.refresh(layer.weight)


_ADVICE = "call reset(), then capture() anew"
