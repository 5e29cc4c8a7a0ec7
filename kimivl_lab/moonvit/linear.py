"""Linear layers whose activation or residual is part of the product.

`FusedLinear` is an nn.Linear under the checkpoint's names. Called plainly it is F.linear, then the activation, then
the residual: the reference. With `prepack=True` oneDNN does all three in one pass over the result, from a copy of the
weight in its own blocked layout, which `refresh_packed` makes once, and anew when the weight changes. The copy is as
large as the weight.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .weight_state import WeightState

GELU_TANH = "gelu_tanh"
_LAYOUT_ROWS = 1024  # the number of rows the blocked layout is chosen for; it serves any other


class FusedLinear(nn.Linear):
    """y = activation(x W^T + b) + residual."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.packed = _PackedWeight()

    def forward(
        self, input: Tensor, activation: str | None = None, residual: Tensor | None = None, *, prepack: bool = False
    ) -> Tensor:
        """(L, in) -> (L, out). `activation`: None or "gelu_tanh"; not together with `residual`."""
        assert activation in (None, GELU_TANH) and (activation is None or residual is None)
        if prepack and (weight := self.packed.current) is not None:
            if residual is not None:
                return _onednn().binary(input, residual, weight, self.bias, "add")
            if activation is not None:
                return _onednn()(input, weight, self.bias, "gelu", [], "tanh")
            return _onednn()(input, weight, self.bias, "none", [], "")
        y = F.linear(input, self.weight, self.bias)
        if activation is not None:
            y = F.gelu(y, approximate="tanh")
        return y if residual is None else residual + y


class _PackedWeight:
    """oneDNN's copy of one weight, `current` since the last `refresh`; never copied or serialised."""

    def __init__(self) -> None:
        self.current: Tensor | None = None
        self._state: WeightState | None = None

    def refresh(self, weight: Tensor) -> None:
        """Packs `weight` if it is not what it was. Of a weight whose changes leave no trace there is no copy."""
        if self._state is not None and self._state.still_holds(weight):
            return
        self.current = self._state = None
        if WeightState.is_traceable(weight):
            self.current = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _LAYOUT_ROWS)
            self._state = WeightState(weight)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _PackedWeight, ()


def refresh_packed(module: nn.Module) -> None:
    """Brings the packed copies of all `FusedLinear`s in `module` up to date: once a forward, before its first layer.

    In between a layer only looks its copy up, for a look at every weight amid the products costs more than it seems.
    A trace records no refreshing: whoever replays it refreshes first.
    """
    if get_proxy_mode() is not None:
        return
    for layer in module.modules():
        if isinstance(layer, FusedLinear):
            layer.packed.refresh(layer.weight)


def prepack_unavailable(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why prepacked linear layers cannot run on `device` in `dtype`, or None when they can."""
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
