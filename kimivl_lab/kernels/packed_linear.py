"""Linear layers whose activation or residual is part of the product.

`FusedLinear` is an nn.Linear under the checkpoint's names. Called plainly it is F.linear, then the activation, then
the residual: the reference. With a `PackedKernel` all three are one pass over the result, from a copy of the weight in
that kernel's own layout, which `refresh_packed` makes once, and anew when the weight changes. The copy is as large as
the weight.

    "prepacked"   oneDNN's product, float32 and bfloat16
    "amx"         our own, bfloat16, for processors with matrix extensions: see `kimivl_lab.kernels.amx`
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .amx.library import amx_unavailable
from .amx.linear import multiply, pack, packed_linear
from .dispatch import must_dispatch
from .weight_state import WeightState

GELU_TANH = "gelu_tanh"
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


class FusedLinear(nn.Linear):
    """y = activation(x W^T + b) + residual."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.packed = PackedCopy(None)

    def forward(
        self,
        input: Tensor,
        activation: str | None = None,
        residual: Tensor | None = None,
        *,
        kernel: PackedKernel | None = None,
    ) -> Tensor:
        """(L, in) -> (L, out). `activation`: None or "gelu_tanh"; not together with `residual`.

        Args:
            kernel: used if the weight is packed for it, which `refresh_packed` sees to; the reference otherwise.
        """
        assert activation in (None, GELU_TANH) and (activation is None or residual is None)
        packed = self.packed
        if kernel is not None and packed.kernel is kernel and packed.current is not None:
            gelu = activation is not None
            return kernel.multiply(input, packed.current, self.out_features, self.bias, residual, gelu)
        y = F.linear(input, self.weight, self.bias)
        if activation is not None:
            y = F.gelu(y, approximate="tanh")
        return y if residual is None else residual + y


class PackedCopy:
    """One kernel's copy of one weight, `current` since the last `refresh`; never copied or serialised."""

    def __init__(self, kernel: PackedKernel | None) -> None:
        self.kernel = kernel
        self.current: Tensor | None = None
        self._state: WeightState | None = None

    def refresh(self, weight: Tensor) -> None:
        """Packs `weight` if it is not what it was. Of a weight whose changes leave no trace there is no copy."""
        assert self.kernel is not None
        if self._state is not None and self._state.still_holds(weight):
            return
        self.current = self._state = None
        if WeightState.is_traceable(weight):
            self.current = self.kernel.pack(weight.detach())
            self._state = WeightState(weight)

    def __reduce__(self) -> tuple[Any, tuple[None]]:
        return PackedCopy, (None,)


def refresh_packed(module: nn.Module, kernel: PackedKernel) -> None:
    """Brings the packed copies of all `FusedLinear`s in `module` up to date: once a forward, before its first layer.

    In between a layer only looks its copy up, for a look at every weight amid the products costs more than it seems.
    A layer keeps the copy of one kernel, the last; whoever holds on to another's has that refreshed himself. A trace
    records no refreshing: whoever replays it refreshes first.
    """
    if get_proxy_mode() is not None:
        return
    for layer in module.modules():
        if isinstance(layer, FusedLinear):
            if layer.packed.kernel is not kernel:
                layer.packed = PackedCopy(kernel)
            layer.packed.refresh(layer.weight)


def _onednn_pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)


def _onednn_multiply(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None, gelu_tanh: bool
) -> Tensor:
    if residual is not None:
        return _onednn().binary(x, residual, packed, bias, "add")
    return _onednn()(x, packed, bias, *(("gelu", [], "tanh") if gelu_tanh else ("none", [], "")))


def _amx_multiply(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None, gelu_tanh: bool
) -> Tensor:
    call = packed_linear if must_dispatch(x) else multiply
    return call(x, packed, out_features, bias, residual, gelu_tanh)


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
        return amx_unavailable(device, dtype)
    if device.type != "cpu":
        return f"oneDNN prepacks for CPUs, not for {device.type}"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of torch has no oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no bfloat16 instructions that oneDNN uses"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"oneDNN's fused products take float32 and bfloat16, not {dtype}"
    return None


@cache
def _onednn() -> Any:
    return torch.ops.mkldnn._linear_pointwise
