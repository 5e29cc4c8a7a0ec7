"""Compares a module's weights and layers with those that its graphs were captured with.

A graph reads weights at fixed addresses. A change in place (an optimiser, `load_state_dict`) is seen by the next
replay. A weight that was replaced, moved or cast leaves the graph with an address that is no longer right, and a layer
or hook that is new is not in the graph: `CapturedWeights.check` raises before any replay. Packed copies of weights,
which CPU layers make, are brought up to date instead, by the rule of `kimivl_lab.kernels.weight_state`.

Test: tests/test_graph_runner.py.
"""

import weakref

import torch
from torch import Tensor, nn

from ..kernels.packed_linear import PackedCopy, packed_copy
from .trace_program import HasCurrentTensor


class StaleGraphError(RuntimeError):
    """A replay would not do what the module does now; the message names the first weight or module that differs."""


class CapturedWeights:
    """The parameters, buffers, submodules and hooks of `module` as they are now.

    All are held by weak reference: a weight that the module drops is freed at once, not at the next `reset`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._copies: list[tuple[weakref.ref[nn.Linear], PackedCopy]] = []
        # Parents come first, so that a replaced layer is named before the weights in it. An owner is held and not its
        # dictionary, because that would keep the weights of a replaced layer.
        self._hooks: list[tuple[weakref.ref[nn.Module], tuple[int, ...], str]] = []
        self._children: list[tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module], str]] = []
        self._weights: list[tuple[weakref.ref[nn.Module], str, str, weakref.ref[Tensor], int, torch.dtype, str]] = []
        for path, part in module.named_modules():
            owner = weakref.ref(part)
            self._hooks.append((owner, _hooks_of(part), path or type(part).__name__))
            for name, child in part._modules.items():
                if child is not None:
                    self._children.append((owner, name, weakref.ref(child), f"{path}.{name}".lstrip(".")))
            for kind in ("_parameters", "_buffers"):
                for name, weight in vars(part)[kind].items():
                    if weight is not None:
                        full = f"{path}.{name}".lstrip(".")
                        known = (owner, kind, name, weakref.ref(weight), weight.data_ptr(), weight.dtype, full)
                        self._weights.append(known)

    def packed_copies(self) -> dict[int, HasCurrentTensor]:
        """The packed copies that exist now, by the id of the tensor.

        They are kept and brought up to date even if a layer later packs its weight for another kernel: graphs read
        them.
        """
        module = self._module()
        assert module is not None
        linears = [
            (weakref.ref(layer), packed_copy(layer)) for layer in module.modules() if isinstance(layer, nn.Linear)
        ]
        self._copies = [(ref, copy) for ref, copy in linears if copy is not None and copy.current is not None]
        return {id(copy.current): copy for _, copy in self._copies}

    def check(self) -> None:
        """Call it before every replay: brings packed copies up to date.

        Raises:
            StaleGraphError: a layer or weight is another object than at the capture, a weight lies elsewhere, or a
                module has other hooks.
        """
        for owner, name, ref, path in self._children:
            part, child = owner(), ref()
            if part is None or child is None or part._modules.get(name) is not child:
                raise StaleGraphError(f"module {path} was replaced {_ADVICE}")
        for owner, hooks, path in self._hooks:
            part = owner()
            if part is None or _hooks_of(part) != hooks:
                raise StaleGraphError(f"hooks of module {path} were added or removed {_ADVICE}")
        for owner, kind, name, ref, address, dtype, path in self._weights:
            weight = ref()
            if (
                weight is None
                or vars(owner())[kind].get(name) is not weight
                or weight.data_ptr() != address
                or weight.dtype is not dtype  # a cast weight may have taken the old address
            ):
                raise StaleGraphError(f"weight {path} was replaced, moved or cast {_ADVICE}")
        for ref, copy in self._copies:
            if (layer := ref()) is not None:
                copy.refresh(layer.weight)


def _hooks_of(module: nn.Module) -> tuple[int, ...]:
    """The numbers that torch gives to the forward hooks of `module`; each is used once."""
    return (*module._forward_pre_hooks, *module._forward_hooks)


_ADVICE = "after the graphs were captured: call reset(), then capture() anew"
