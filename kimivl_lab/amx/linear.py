"""A linear layer by `linear.c`: activation(x W^T + b) + residual in one pass, from a packed copy of W.

`packed_linear` is an operator of torch.library, `kimivl_lab::packed_linear`, with the packed weight as data: a trace
holds it as one node.
"""

import torch
from torch import Tensor

from ..host_memory import empty_rows
from .library import library
from .memory import aligned, check, scratch


def pack(weight: Tensor) -> Tensor:
    """(out, in) bfloat16 -> (n,) bfloat16: the same numbers as tiles, with zeros up to multiples of 32."""
    kernels = library()
    weight = weight.contiguous()
    packed = aligned(kernels.packed_numbers(*weight.shape), weight.dtype)
    kernels.pack_weight(weight.data_ptr(), *weight.shape, packed.data_ptr(), torch.get_num_threads())
    return packed


def multiply(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None, gelu_tanh: bool
) -> Tensor:
    """(L, in) -> (L, out) bfloat16, contiguous.

    Args:
        packed: `pack` of the weight (out, in).
        bias, residual: (out,) and (L, out), or None.
        gelu_tanh: whether the activation is gelu_tanh or none; it comes before the residual.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    kernels = library()
    rows, inputs = x.shape
    if packed.numel() != kernels.packed_numbers(out_features, inputs):
        raise ValueError(
            f"the packed weight holds {packed.numel()} numbers, {out_features} outputs of {inputs} inputs make "
            f"{kernels.packed_numbers(out_features, inputs)}"
        )
    check("x", x, x.shape)
    check("packed", packed, packed.shape)
    if bias is not None:
        check("bias", bias, (out_features,))
    if residual is not None:
        check("residual", residual, (rows, out_features))
    x = x if x.stride(-1) == 1 else x.contiguous()
    bias, residual = (None if tensor is None else tensor.contiguous() for tensor in (bias, residual))
    y = empty_rows(rows, out_features, x.dtype)
    if rows:
        threads = torch.get_num_threads()
        each = kernels.linear_scratch(rows, inputs, threads)
        work = scratch(threads * each)
        kernels.linear(
            x.data_ptr(),
            x.stride(0),
            rows,
            inputs,
            packed.data_ptr(),
            out_features,
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            gelu_tanh,
            y.data_ptr(),
            threads,
            work.data_ptr(),
            each,
        )
    return y


packed_linear = torch.library.custom_op("kimivl_lab::packed_linear", multiply, mutates_args=())


@packed_linear.register_fake
def _(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None, gelu_tanh: bool
) -> Tensor:
    return x.new_empty((x.shape[0], out_features))
