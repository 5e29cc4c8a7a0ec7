"""A linear layer by `linear.c`: activation(x W^T + b) + residual in one pass, from a packed copy of W.

`packed_linear` is the operator `kimivl_lab::packed_linear` of torch.library. A trace holds it as one node, with the
packed weight as an input. It has no backward: a packed copy is for inference.

Test: tests/test_amx.py. Record: encoder__*__bfloat16__*.csv.
"""

import math

import torch
from torch import Tensor

from ..library import library, require_host
from ..memory import aligned, empty_rows, scratch

_SIDE, _TILE = 32, 512  # as in tiles.h


def pack(weight: Tensor) -> Tensor:
    """(out, in) bfloat16 -> (out / 32, in / 32, 2, 512), both rounded up: the same numbers as tiles, filled with zeros.

    ValueError unless `weight` is plain host memory. Example: (56, 72) gives (2, 3, 2, 512).
    """
    kernels = library("amx")
    require_host("weight", weight, weight.shape)
    weight = weight.contiguous()
    shape = _packed_shape(*weight.shape)
    packed = aligned(math.prod(shape), weight.dtype).view(shape)
    kernels.pack_weight(weight.data_ptr(), *weight.shape, packed.data_ptr(), torch.get_num_threads())
    return packed


def multiply(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None, gelu_tanh: bool
) -> Tensor:
    """(L, in) -> (L, out) bfloat16, contiguous.

    Args:
        packed: `pack` of the weight (out, in).
        bias, residual: (out,) and (L, out), or None.
        gelu_tanh: whether the activation is gelu_tanh or none; it is applied before the residual is added.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or an operand that wants a gradient.
        BuildError: there are no kernels on this machine.
    """
    kernels = library("amx")
    rows, inputs = x.shape
    require_host("x", x, x.shape)
    require_host("the packed weight", packed, _packed_shape(out_features, inputs))
    if bias is not None:
        require_host("bias", bias, (out_features,))
        bias = bias.contiguous()
    if residual is not None:
        require_host("residual", residual, (rows, out_features))
        residual = residual.contiguous()
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = empty_rows(rows, out_features, x.dtype)
    if not rows or not out_features:
        return y
    threads = torch.get_num_threads()
    each = kernels.linear_scratch(rows, inputs)
    added = (None if one is None else one.data_ptr() for one in (bias, residual))
    memory = (threads, scratch(threads * each).data_ptr(), each)
    operands = (x.data_ptr(), x.stride(0), rows, inputs, packed.data_ptr(), out_features)
    kernels.linear(*operands, *added, gelu_tanh, y.data_ptr(), *memory)
    return y


packed_linear = torch.library.custom_op("kimivl_lab::packed_linear", multiply, mutates_args=())


@packed_linear.register_fake
def _(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None, gelu_tanh: bool
) -> Tensor:
    return x.new_empty((x.shape[0], out_features))


def _packed_shape(outputs: int, inputs: int) -> tuple[int, int, int, int]:
    if inputs < 1:
        raise ValueError(f"a linear layer needs at least 1 input, got {inputs}")
    return -(-outputs // _SIDE), -(-inputs // _SIDE), 2, _TILE
