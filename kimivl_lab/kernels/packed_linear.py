"""Products of linear layers with their activation or residual, from packed copies of the weights.

A packed copy is the weight in one kernel's own layout, made once, and again when the weight changes. It is as large as
the weight. With it the product, its bias and the activation or residual are one pass over the result.

    "prepacked"   oneDNN's product, float32 and bfloat16
    "amx"         our own, bfloat16, for processors with matrix extensions: see `kimivl_lab.kernels.amx`

`RAISED` is oneDNN's product in float32 with weights of half precision, raised when they are packed: the copy then has 4
bytes a weight. `kimivl_lab.kernels.precision` says where that is faster.

Test: tests/test_attention.py, tests/test_amx.py, tests/test_faults_weights.py. Record: encoder__*.csv, linear__*.csv.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..private_api import onednn_linear, onednn_linear_add, onednn_pack, onednn_unavailable
from .amx.linear import multiply, pack, packed_linear
from .dispatch import is_untouched, must_dispatch
from .library import unavailable
from .weight_state import WeightState

GELU_TANH = "gelu_tanh"
_SLOT = "packed_copy"  # in a layer's __dict__: neither parameter nor buffer, so never in a state dict
_LAYOUT_ROWS = 1024  # the number of rows the blocked layout is chosen for; it serves any other


@dataclass(frozen=True)
class PackedKernel:
    """A product with packed weights.

    pack: (out, in) -> the copy.
    multiply: (x, copy, out, bias, residual, whether the activation is gelu_tanh or none) -> activation(x W^T + b) +
        residual. The activation and the residual are not given together.
    """

    pack: Callable[[Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor, int, Tensor | None, Tensor | None, bool], Tensor]


class FusedModule(nn.Module):
    """A layer of the library that takes `fused_linear`'s activation, residual and kernel in its own call.

    Its submodule `local` is the layer that multiplies, and that is packed if it is an nn.Linear.
    """


class PackedCopy:
    """One kernel's copy of one weight: `current` since the last `refresh`. Copies and pickles of it are empty."""

    def __init__(self, kernel: PackedKernel | None, checked: bool = True) -> None:
        self.kernel = kernel
        self.checked = checked
        self.current: Tensor | None = None
        self._state: WeightState | None = None

    def refresh(self, weight: Tensor) -> None:
        """Packs `weight` again if it changed since the last call.

        Makes no copy if a change of `weight` could not be detected (a tensor subclass, a tensor without values).
        """
        assert self.kernel is not None
        if self._state is not None and self._state.still_holds(weight):
            return
        if WeightState.is_traceable(weight, self.checked):
            state = WeightState(weight, self.checked)
            # The old copy stays until the new one is there: a recorded graph in another thread may be reading it.
            self.current, self._state = self.kernel.pack(weight.detach()), state
        else:
            self.current = self._state = None

    def __reduce__(self) -> tuple[Any, tuple[None]]:
        return PackedCopy, (None,)


def fused_linear(
    layer: nn.Module, x: Tensor, kernel: PackedKernel | None, *, gelu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """gelu_tanh(layer(x)) or layer(x) + residual, in one pass over the result where `layer` is packed for `kernel`.

    Use it wherever a linear layer is followed by an activation or a residual. A layer that `refresh_packed` did not
    pack is called with x only, and activation and residual are computed outside: the reference. Hooks, adapters and
    replaced layers then see and give what they would in plain PyTorch.

    Args:
        layer: (L, in) -> (L, out).
        kernel: None computes the reference.
        residual: (L, out); not together with `gelu`.
    """
    assert not gelu or residual is None
    if kernel is not None and not torch.is_grad_enabled():  # packed products have no backward
        packed = packed_copy(layer)
        # Read once: another thread may be packing a changed weight.
        current = None if packed is None else packed.current
        if packed is not None and packed.kernel is kernel and current is not None:
            assert isinstance(layer, nn.Linear)
            return kernel.multiply(x, current, layer.out_features, layer.bias, residual, gelu)
        if isinstance(layer, FusedModule) and is_untouched(layer, type(layer)):
            return layer(x, GELU_TANH if gelu else None, residual, kernel=kernel)
    y = layer(x)
    if gelu:
        y = F.gelu(y, approximate="tanh")
    return y if residual is None else residual + y


def refresh_packed(layers: Iterable[nn.Module], kernel: PackedKernel, checked: bool = True) -> None:
    """Brings the packed copies of `layers` up to date. Call it once a forward, before the first layer.

    Only an untouched nn.Linear is packed (see `is_untouched`); any other layer loses its copy. Checking all weights
    here is cheaper than checking each between two products. A layer stores one copy, for the kernel that was used
    last: code that keeps a copy made for another kernel must call `refresh` on it. A trace does not contain the
    refresh: call it before each replay.

    Args:
        checked: also detect changes that torch does not count, see `WeightState`.
    """
    if get_proxy_mode() is not None:
        return
    for layer in layers:
        if not (isinstance(layer, nn.Linear) and is_untouched(layer, nn.Linear) and "weight" in layer._parameters):
            release_packed(layer)  # also the copy of a layer that an adapter wraps
            continue
        packed = packed_copy(layer)
        if packed is None or packed.kernel is not kernel or packed.checked != checked:
            packed = vars(layer)[_SLOT] = PackedCopy(kernel, checked)
        packed.refresh(layer.weight)


def packed_copy(layer: nn.Module) -> PackedCopy | None:
    """The copy that `refresh_packed` keeps with `layer`, or None."""
    return vars(layer).get(_SLOT)


def are_packed(layers: Iterable[nn.Module], kernel: PackedKernel) -> bool:
    """Whether each of `layers` has a copy for `kernel`, which `fused_linear` then uses."""
    copies = map(packed_copy, layers)
    return all(copy is not None and copy.kernel is kernel and copy.current is not None for copy in copies)


def release_packed(module: nn.Module) -> None:
    """Frees the packed copies of all layers in `module`."""
    for layer in module.modules():
        vars(layer).pop(_SLOT, None)


def _onednn_pack(weight: Tensor) -> Tensor:
    return onednn_pack(weight, _LAYOUT_ROWS)


def _onednn_multiply(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None, gelu_tanh: bool
) -> Tensor:
    if residual is not None:
        return onednn_linear_add(x, residual, packed, bias)
    return onednn_linear(x, packed, bias, gelu_tanh)


def _amx_multiply(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None, gelu_tanh: bool
) -> Tensor:
    call = packed_linear if must_dispatch(x) else multiply
    return call(x, packed, out_features, bias, residual, gelu_tanh)


def _raised_multiply(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None, gelu_tanh: bool
) -> Tensor:
    return _onednn_multiply(x, packed, out_features, None if bias is None else bias.to(x.dtype), residual, gelu_tanh)


RAISED = PackedKernel(lambda weight: _onednn_pack(weight.float()), _raised_multiply)
PACKED_KERNELS = {
    "amx": PackedKernel(pack, _amx_multiply),
    "prepacked": PackedKernel(_onednn_pack, _onednn_multiply),
}


def resolve_linear(name: str, device: torch.device, dtype: torch.dtype) -> PackedKernel | None:
    """The kernel called `name`, None for "plain"; "auto" takes the first of the list that runs here.

    Packed copies are for inference: where gradients are enabled, layers are plain. ValueError if `name` is unknown or
    cannot run here.
    """
    if name not in ("auto", "plain", *PACKED_KERNELS):
        raise ValueError(f"unknown linear implementation {name!r}: auto, plain, {' or '.join(PACKED_KERNELS)}")
    if name == "auto" and not torch.is_grad_enabled():
        name = next((known for known in PACKED_KERNELS if not packed_unavailable(known, device, dtype)), "plain")
    elif name in PACKED_KERNELS and (reason := packed_unavailable(name, device, dtype)):
        raise ValueError(f"linear={name!r}: {reason}")
    return None if torch.is_grad_enabled() else PACKED_KERNELS.get(name)


def packed_unavailable(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel called `name` cannot run on `device` in `dtype`, or None when it can."""
    if name == "amx":
        return unavailable("amx", device, dtype)
    if device.type != "cpu":
        return f"oneDNN prepacks for CPUs, not for {device.type}"
    if reason := onednn_unavailable(dtype):
        return reason
    if dtype not in (torch.bfloat16, torch.float32):
        return f"oneDNN's fused products take float32 and bfloat16, not {dtype}"
    return None
