"""Linear layers cut over the ranks of a group, so that each computes a part of Y = X W + b, W of (in, out).

    column    W = [W_0 | W_1 | ..], b likewise     Y_r = X W_r + b_r          no collective; Y stays cut
    row       W = [W_0 ; W_1 ; ..], X cut          Y = sum_r X_r W_r + b      one all-reduce; b once, after it

A column-parallel layer, anything that works number by number, then a row-parallel layer: one all-reduce for the pair.
nn.Linear keeps W^T, so a column-parallel rank holds rows of `weight` and a row-parallel rank columns. wqkv is cut by
heads in each of its three parts: of 4 heads of 2, rank 0 of 2 holds rows 0-3 (q), 8-11 (k) and 16-19 (v).

A rank either holds a contiguous copy of its part, and the full weight can be freed, or it views a full weight that
stays, so that one copy of the weights serves the whole and the cut tower. For inference only: a row-parallel layer
passes no gradient.

Test: tests/test_parallel_ranks.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.dispatch import is_untouched
from ..kernels.packed_linear import GELU_TANH, FusedModule, PackedKernel, fused_linear
from ..private_api import onednn_linear
from .collectives import all_reduce
from .groups import SharedGroup, check_group

Cut = Callable[[Tensor], Tensor]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LinearView(nn.Module):
    """The part of `full` that `cut` views. Nothing is copied, and a change of `full` is seen at once."""

    def __init__(self, full: nn.Linear, cut: Cut, *, bias: bool) -> None:
        super().__init__()
        self._full = (full,)  # in a tuple it is no submodule: its weights keep one owner
        self._cut = cut
        self._has_bias = bias

    @property
    def full(self) -> nn.Linear:
        return self._full[0]

    @property
    def weight(self) -> Tensor:
        """(out, in) of this rank, or (parts, out, in)."""
        return self._cut(self.full.weight)

    @property
    def bias(self) -> Tensor | None:
        """(out,) of this rank, or (parts, out)."""
        return self._cut(self.full.bias) if self._has_bias else None

    @torch.no_grad()
    def forward(self, input: Tensor, activation: str | None = None, *, kernel: PackedKernel | None = None) -> Tensor:
        """The product, then the activation. A view is not packed, but with any `kernel` oneDNN fuses the activation."""
        weight, bias = self.weight, self.bias
        if weight.ndim == 3:
            assert bias is not None and activation is None
            y = input.new_empty(input.shape[0], weight.shape[0] * weight.shape[1])  # (L, parts * out)
            for part, one_weight, one_bias in zip(y.chunk(len(weight), -1), weight, bias, strict=True):
                torch.addmm(one_bias, input, one_weight.t(), out=part)
            return y
        if activation == GELU_TANH and kernel is not None:
            return onednn_linear(input, weight, bias, gelu_tanh=True)
        y = F.linear(input, weight, bias)
        return F.gelu(y, approximate="tanh") if activation == GELU_TANH else y


class _ParallelLinear(FusedModule):
    """`local` multiplies by this rank's part; the subclass communicates."""

    def __init__(self, full: nn.Linear, group: dist.ProcessGroup, cut: Cut, *, bias: bool, view: bool) -> None:
        super().__init__()
        self._group = SharedGroup(group)
        self.cut = cut
        self.local = LinearView(full, cut, bias=bias) if view else _own_part(full, cut, bias=bias)
        self.register_load_state_dict_pre_hook(_take_part)

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group.get()

    @group.setter
    def group(self, group: dist.ProcessGroup) -> None:
        self._group = SharedGroup(group)

    def forward(
        self,
        input: Tensor,
        activation: str | None = None,
        residual: Tensor | None = None,
        *,
        kernel: PackedKernel | None = None,
    ) -> Tensor:
        """(L, in) -> (L, out / ranks)."""
        assert residual is None, "the outputs are cut, a residual is whole"
        return self._multiply(input, activation, kernel)

    def _multiply(self, input: Tensor, activation: str | None, kernel: PackedKernel | None) -> Tensor:
        if isinstance(self.local, LinearView):
            return self.local(input, activation, kernel=kernel)
        return fused_linear(self.local, input, kernel, gelu=activation == GELU_TANH)


class ColumnParallelLinear(_ParallelLinear):
    """Y_r = X W_r + b_r, with the outputs cut into runs."""

    @classmethod
    def from_linear(cls, full: nn.Linear, group: dist.ProcessGroup, *, view: bool = False) -> Self:
        """This rank's part of `full`: a copy, or a view. ValueError if it cannot be cut."""
        _check_can_cut(full, group, full.out_features, "outputs")
        cut = partial(_rows, rank=group.rank(), ranks=group.size())
        return cls(full, group, cut, bias=True, view=view)


class QKVParallelLinear(_ParallelLinear):
    """q, k and v of this rank's heads: (L, D) -> (L, 3 * heads / ranks * d)."""

    @classmethod
    def from_linear(cls, full: nn.Linear, num_heads: int, group: dist.ProcessGroup, *, view: bool = False) -> Self:
        """As `ColumnParallelLinear.from_linear`, by whole heads."""
        _check_can_cut(full, group, num_heads, "heads")
        cut = partial(_rows_of_qkv, rank=group.rank(), ranks=group.size())
        return cls(full, group, cut, bias=True, view=view)


class RowParallelLinear(_ParallelLinear):
    """Y = sum over ranks of X_r W_r, + b, + residual."""

    bias: nn.Parameter | None

    def __init__(self, full: nn.Linear, group: dist.ProcessGroup, cut: Cut, *, view: bool) -> None:
        super().__init__(full, group, cut, bias=False, view=view)
        self.register_parameter("bias", None if view else _parameter(full.bias))

    @classmethod
    def from_linear(cls, full: nn.Linear, group: dist.ProcessGroup, *, view: bool = False) -> Self:
        """As `ColumnParallelLinear.from_linear`, by the inputs."""
        _check_can_cut(full, group, full.in_features, "inputs")
        return cls(full, group, partial(_columns, rank=group.rank(), ranks=group.size()), view=view)

    @torch.no_grad()
    def forward(
        self,
        input: Tensor,
        activation: str | None = None,
        residual: Tensor | None = None,
        *,
        kernel: PackedKernel | None = None,
    ) -> Tensor:
        """(L, in / ranks) -> (L, out), the same bits on every rank."""
        assert activation is None, "an activation of a partial sum is no part of the activation"
        y = self._multiply(input, None, kernel)  # (L, out), one rank's summand
        all_reduce(y, self.group)
        bias = self.local.full.bias if isinstance(self.local, LinearView) else self.bias
        assert bias is not None
        y += bias
        return y if residual is None else y.add_(residual)


def check_plain(full: nn.Module) -> None:
    """ValueError unless `full` is a linear layer of plain floating-point tensors, weight and bias.

    A quantised, wrapped, reparametrised, hooked or already cut layer is not what its weight says: slices of it would
    be wrong in silence.
    """
    weight: Any = getattr(full, "weight", None)
    if not (
        is_untouched(full, nn.Linear)
        and set(full._parameters) == {"weight", "bias"}
        and type(weight) is type(full.bias) is nn.Parameter
        and weight.layout == torch.strided
        and weight.dtype in _DTYPES
    ):
        what = f"{type(full).__name__} with a weight of {type(weight).__name__} {getattr(weight, 'dtype', '')}"
        raise ValueError(
            f"only plain floating-point nn.Linear layers with a bias and without hooks are cut, got {what}: cut first, "
            f"then quantise or wrap each rank's part"
        )


def _check_can_cut(full: nn.Linear, group: dist.ProcessGroup, units: int, unit: str) -> None:
    check_plain(full)
    ranks = check_group(group).size()
    if units % ranks:
        legal = ", ".join(str(size) for size in range(1, units + 1) if units % size == 0)
        raise ValueError(f"{units} {unit} do not divide by {ranks} ranks: legal sizes are {legal}")


def _own_part(full: nn.Linear, cut: Cut, *, bias: bool) -> nn.Linear:
    weight = _part(full.weight, cut)
    with torch.device("meta"):
        part = nn.Linear(weight.shape[1], weight.shape[0])
    part.weight = _parameter(weight)
    part.register_parameter("bias", _parameter(_part(full.bias, cut)) if bias else None)
    return part


def _take_part(layer: _ParallelLinear, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Before loading: an unsharded checkpoint's tensors become this rank's parts."""
    for name, _ in layer.local.named_parameters():
        full = state_dict.pop(prefix + name, None)
        if full is not None:
            state_dict[f"{prefix}local.{name}"] = _part(full, layer.cut)


def _part(full: Tensor, cut: Cut) -> Tensor:
    """What `cut` leaves, its parts one after another."""
    part = cut(full)
    return part.flatten(0, part.ndim - full.ndim)


def _parameter(tensor: Tensor) -> nn.Parameter:
    """A contiguous copy, so that the tensor it was cut from can be freed."""
    return nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


def _rows(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks)[rank]


def _rows_of_qkv(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """(3 * heads * d, ...) -> (3, heads / ranks * d, ...)."""
    return tensor.unflatten(0, (3, ranks, -1))[:, rank]


def _columns(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks, -1)[rank]
