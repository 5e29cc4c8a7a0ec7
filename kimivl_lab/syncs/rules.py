"""Which torch operators make the host wait when their tensors live on a GPU: the one table for counting and refusing.

Use it to answer "does this line wait?" without a GPU: `python -m kimivl_lab.syncs` prints it. It has three parts:

    RULES              operators that can wait, each with the rule that says when and for how many bytes
    NEVER_WAIT         operators that never do; those that torch tags as pointwise belong to it without being listed
    READING_FUNCTIONS  Python-level torch functions that read a value on the host, with the kind of the wait

An operator in neither of the first two parts is unknown, and is reported so: it is not counted as 0. Operators that a
composite operator runs are looked up one by one. A composite operator whose code for CUDA differs from its code for
the CPU stands in `syncs.pretend` (one_hot, quantile), or in UNKNOWN_FUNCTIONS.

Examples: one `x.nonzero()` waits once and reads 4 bytes. `torch.histc(x)` waits twice, `torch.histc(x, 8, 0, 1)` never.
`torch.linalg.inv(x)` waits once for its check, and its factorisation is unknown: the solver library is chosen by size.

Sources: torch 2.13, aten/src/ATen/native: Onehot.cpp, SegmentReduce.cpp, Distributions.cpp, BucketizationUtils.h,
TensorAdvancedIndexing.cpp, BatchLinearAlgebra.cpp, and cuda/ Copy, CUDAScalar, Nonzero, UniqueCub, SummaryOps, Repeat;
python_variable_indexing.cpp; NVIDIA's "API synchronization behavior". torch.unique with a dim sorts by thrust, whose
waits torch's debug mode does not see: unknown.
Test: tests/test_syncs.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..private_api import operator_names, operator_schema, overload_name

COPY_TO_DEVICE = "copy to device"
COPY_TO_HOST = "copy to host"
SYNCHRONIZE = "synchronize"
SIZE_BYTES = 4

# Torch functions, by name, that always read a value, or a size that depends on values, on the host.
READING_FUNCTIONS = {
    **{name: name for name in ("item", "tolist", "nonzero", "unique", "unique_consecutive", "bincount", "equal")},
    **{"__bool__": "bool", "is_nonzero": "bool", "__int__": "int", "__float__": "float", "__complex__": "complex"},
    **{"__index__": "index", "__contains__": "item", "allclose": "equal", "argwhere": "nonzero"},
    **{"cpu": COPY_TO_HOST, "numpy": COPY_TO_HOST, "__array__": COPY_TO_HOST, "masked_select": "boolean mask"},
    **{"__repr__": "print", "__format__": "print"},
}
# Torch functions, by name, whose code for CUDA is another one than for the CPU, with unknown waits.
UNKNOWN_FUNCTIONS = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu", "ctc_loss"))


def value_read_by(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The kind of read that a torch function does for these arguments, None if it reads nothing.

    Use it to refuse reads, as a graph capture must. "repeat_interleave" with a tensor of counts gives "repeat", and
    with an `output_size` None. It knows functions by their names: `item`, `__bool__`, `where`.
    """

    def argument(position: int, name: str, default: Any = None) -> Any:
        return kwargs.get(name, args[position] if len(args) > position else default)

    if function == "where":
        return "nonzero" if len(args) + len(kwargs) == 1 else None
    if function == "repeat_interleave":
        counts = argument(1, "repeats", argument(0, "repeats"))
        return "repeat" if isinstance(counts, Tensor) and kwargs.get("output_size") is None else None
    if function == "__getitem__":
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        return "boolean mask" if any(isinstance(index, Tensor) and _is_mask(index) for index in indices) else None
    if function == "one_hot":
        return "item" if argument(1, "num_classes", -1) == -1 else None
    if function == "multinomial":
        return "multinomial" if argument(1, "num_samples") == 1 or not argument(2, "replacement", False) else None
    if function == "histc":
        return "histc" if argument(2, "min", 0) == argument(3, "max", 0) else None
    return READING_FUNCTIONS.get(function)


class Wait(NamedTuple):
    """One wait of the host: its kind, and the bytes that it reads back."""

    kind: str
    nbytes: int


Waits = Sequence[Wait | Tensor] | None  # a host tensor stands for its copy to the device; None: unknown
Arguments = Mapping[str, Any]
IsOnDevice = Callable[[Tensor], bool]


class Rule(NamedTuple):
    """When an operator waits: in words, and as a function of its arguments by name."""

    words: str
    waits: Callable[[Arguments, IsOnDevice], Waits]


def waits_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_on_device: IsOnDevice) -> Waits:
    """The waits of one operator call, in order; None if the operator is unknown.

    Args:
        func: the operator, a torch.ops overload such as `torch.ops.aten.nonzero.default`.
        args, kwargs: what it is called with.
        is_on_device: whether a tensor among them lives on the device.
    """
    name = operator_schema(func).name.removeprefix("aten::")
    rule = RULES.get(name)
    if rule is None:
        return () if _never_waits(name, func) else None
    given = {argument.name: argument.default_value for argument in operator_schema(func).arguments}
    given |= {**dict(zip(given, args, strict=False)), **kwargs}
    return rule.waits(given, is_on_device)


def known() -> dict[str, str]:
    """Every operator whose waits are known, by name, with the rule in words."""
    words = dict.fromkeys(NEVER_WAIT | _pointwise(), "never waits") | {name: rule.words for name, rule in RULES.items()}
    return dict(sorted(words.items()))


def _never_waits(name: str, func: Any) -> bool:
    if name.startswith("_foreach_"):
        return (
            "_foreach_addc" not in name or overload_name(func) != "Tensor"
        )  # that form copies its numbers to the host
    return name in NEVER_WAIT or func.is_view or torch.Tag.pointwise in func.tags


def _pointwise() -> set[str]:
    """Operators of torch that are tagged as pointwise ."""
    names = set()
    for full_name in operator_names():
        name, _, overload = full_name.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, name, None) if full_name.startswith("aten::") else None
        if packet is not None and torch.Tag.pointwise in getattr(packet, overload or "default").tags:
            names.add(name)
    return names


# --- the rules -------------------------------------------------------------------------------------------------------


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _always(kind: str, nbytes: int) -> Callable[[Arguments, IsOnDevice], Waits]:
    return lambda given, is_on_device: (Wait(kind, nbytes),)


def _unless_empty(kind: str, nbytes: int) -> Callable[[Arguments, IsOnDevice], Waits]:
    return lambda given, is_on_device: (Wait(kind, nbytes),) if given["self"].numel() else ()


def _unknown_with_dim(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    return None if given["dim"] is not None else _unless_empty("unique", 8)(given, is_on_device)


def _equal(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    one, other = given["self"], given["other"]
    same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.dtype == other.dtype
    return (Wait("equal", 1),) if one.shape == other.shape and one.numel() > 0 and not same else ()


def _bincount(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    numbers = given["self"]
    reads = 0 if numbers.numel() == 0 else 1 if numbers.dtype == torch.uint8 else 2  # bytes are never negative
    return (Wait("bincount", numbers.element_size()),) * reads


def _histc(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    reads = 2 if given["min"] == given["max"] and given["self"].numel() else 0
    return (Wait("histc", given["self"].element_size()),) * reads


def _multinomial(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    return (Wait("multinomial", 1),) * 2 if given["num_samples"] == 1 or not given["replacement"] else ()


def _repeat_interleave(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    counts = given["repeats"]
    if given["output_size"] is not None or counts.numel() == 0:
        return ()
    return Wait("repeat", counts.element_size()), Wait("repeat", 1)


def _segment_reduce(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    lengths = given["lengths"]
    if lengths is None or given["unsafe"]:
        return ()
    return Wait("segment_reduce", lengths.element_size()), Wait("segment_reduce", 1)


def _searchsorted(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    sorter = given.get("sorter")
    return (Wait("searchsorted", 8),) * 2 if sorter is not None and sorter.numel() else ()


def _isin(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    elements, tests = given.get("elements"), given.get("test_elements")
    if elements is None or tests is None or tests.numel() < 10 * elements.numel() ** 0.145:
        return ()
    return None  # sorted, and made unique first


def _numbers(*names: str) -> Callable[[Arguments, IsOnDevice], Waits]:
    """One read of each argument in `names` that is a tensor on the device."""

    def waits(given: Arguments, is_on_device: IsOnDevice) -> Waits:
        tensors = [given[name] for name in names if isinstance(given.get(name), Tensor)]
        return [Wait("item", tensor.element_size()) for tensor in tensors if is_on_device(tensor)]

    return waits


def _normal(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    spread = given.get("std")
    return (Wait("bool", 1),) if isinstance(spread, Tensor) and spread.numel() else ()


def _index(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    """Indices and values on the host are copied; each mask is turned into positions, whose number is read."""
    indices = [index for index in given["indices"] if index is not None]
    masks = [index for index in indices if _is_mask(index)]
    values = [given["values"]] if "values" in given else []
    by_number = len(values) == 1 and values[0].numel() == 1 and not is_on_device(values[0])
    if by_number and len(masks) == len(indices) == 1 and is_on_device(masks[0]):
        return ()  # a masked fill
    copies = [tensor for tensor in (*indices, *values) if not is_on_device(tensor)]
    return [*copies, *(Wait("boolean mask", SIZE_BYTES) for _ in masks)]


def _where(given: Arguments, is_on_device: IsOnDevice) -> Waits:
    tensors = (given["condition"], given["self"], given["other"])
    return [tensor for tensor in tensors if isinstance(tensor, Tensor) and not is_on_device(tensor)]


_INDEX = Rule("one for each boolean mask, and one for each index or value on the host; x[mask] = number: none", _index)
_NUMBER = Rule("one if the value is a tensor on the device", _numbers("value"))
_LINE = Rule("one for each of start and end that is a tensor on the device", _numbers("start", "end"))
RULES: dict[str, Rule] = {
    "_local_scalar_dense": Rule("one: item(), bool(), int(), float(), index", _numbers("self")),
    "nonzero": Rule("one: the size of the result", _always("nonzero", SIZE_BYTES)),
    "masked_select": Rule("one: the size of the result", _unless_empty("boolean mask", SIZE_BYTES)),
    "masked_scatter_backward": Rule("one: the size of the result", _always("boolean mask", SIZE_BYTES)),
    "_unique2": Rule("one: the size of the result", _unless_empty("unique", 8)),
    "_unique": Rule("one: the size of the result", _unless_empty("unique", 8)),
    "unique_consecutive": Rule("one: the size of the result; with a dim unknown", _unknown_with_dim),
    "equal": Rule("one, unless the shapes differ or both are the same memory", _equal),
    "allclose": Rule("one", _always("equal", 1)),
    "bincount": Rule("two: the smallest and the largest number; uint8 one", _bincount),
    "histc": Rule("two if min equals max: the range of the values; otherwise none", _histc),
    "multinomial": Rule(
        "two for one sample or without replacement: checks of the weights; otherwise none", _multinomial
    ),
    "repeat_interleave": Rule(
        "two: the total, and that no count is negative; with output_size none", _repeat_interleave
    ),
    "segment_reduce": Rule("two with lengths: that none is negative, and their sum; with unsafe none", _segment_reduce),
    "searchsorted": Rule("two with a sorter: its smallest and its largest index; otherwise none", _searchsorted),
    "isin": Rule("none for few test elements; for many unknown", _isin),
    "normal": Rule("one if std is a tensor: that none is negative", _normal),
    "where": Rule("one for each argument on the host", _where),
    "_linalg_check_errors": Rule("one", _always("linalg check", 1)),
    **dict.fromkeys(("masked_fill", "masked_fill_", "index_fill", "index_fill_"), _NUMBER),
    **dict.fromkeys(("linspace", "logspace"), _LINE),
    **dict.fromkeys(("index", "index_put", "index_put_", "_index_put_impl_"), _INDEX),
    **dict.fromkeys(("_unsafe_index", "_unsafe_index_put"), _INDEX),
}
_LISTED = """
    arange empty empty_like empty_strided empty_permuted eye full full_like ones ones_like zeros zeros_like
    new_empty new_empty_strided new_full new_ones new_zeros scalar_tensor tril_indices triu_indices
    bartlett_window blackman_window hamming_window hann_window kaiser_window fft_fftfreq fft_rfftfreq
    rand rand_like randn randn_like randint randint_like randperm random random_ uniform uniform_ normal_
    normal_functional bernoulli bernoulli_ exponential exponential_ geometric geometric_ cauchy cauchy_
    log_normal log_normal_ native_dropout native_dropout_backward _fused_dropout

    alias detach detach_ lift lift_fresh clone copy copy_ _to_copy fill fill_ zero zero_ set_ resize_ resize_as_
    as_strided_ squeeze_ unsqueeze_ t_ transpose_ _reshape_alias unsafe_split unsafe_split_with_sizes
    alias_copy as_strided_copy detach_copy diagonal_copy expand_copy narrow_copy permute_copy select_copy slice_copy
    split_copy split_with_sizes_copy squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy
    view_copy view_as_real_copy view_as_complex_copy _unsafe_view
    cat stack _stack repeat flip roll rot90 tril tril_ triu triu_ diag_embed block_diag channel_shuffle
    constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle im2col col2im

    index_select index_add index_add_ index_copy index_copy_ index_reduce index_reduce_ gather take put put_
    scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ masked_scatter masked_scatter_
    select_scatter slice_scatter diagonal_scatter as_strided_scatter nonzero_static bucketize
    _pack_padded_sequence

    sum mean prod nansum amax amin aminmax max min argmax argmin any all std std_mean var var_mean norm
    linalg_vector_norm logsumexp count_nonzero dist trace median nanmedian kthvalue sort topk
    cumsum cumprod cummax cummin _cummax_helper _cummin_helper logcumsumexp _is_all_true _is_any_true

    mm bmm addmm addmm_ addmv addmv_ addbmm addbmm_ baddbmm baddbmm_ addr addr_ mv dot vdot linear
    _addmm_activation linalg_cross _cdist_forward _euclidean_dist _pdist_forward

    embedding _embedding_bag _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward
    native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_no_training _native_batch_norm_legit_functional _batch_norm_with_update
    _batch_norm_no_update cudnn_batch_norm batch_norm_stats batch_norm_elemt _fused_rms_norm
    convolution _convolution cudnn_convolution conv_depthwise3d _conv_depthwise2d
    softmax _softmax log_softmax _log_softmax _safe_softmax _masked_softmax
    nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss
    binary_cross_entropy binary_cross_entropy_with_logits
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d
    adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    grid_sampler_2d grid_sampler_3d affine_grid_generator _weight_norm_interface glu
    _thnn_fused_lstm_cell _thnn_fused_gru_cell
    _fused_sdp_choice _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _flash_attention_forward _efficient_attention_forward

    select_backward slice_backward diagonal_backward unfold_backward native_layer_norm_backward
    native_group_norm_backward native_batch_norm_backward convolution_backward linear_backward
    _softmax_backward_data _log_softmax_backward_data nll_loss_backward nll_loss2d_backward mse_loss_backward
    smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward
    glu_backward _fused_rms_norm_backward
    avg_pool2d_backward max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward

    is_same_size is_set_to is_pinned record_stream _assert_async _functional_assert_async _assert_tensor_metadata
    _fused_adam_ _fused_adamw_ _fused_sgd_ _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_
    kimivl_lab::packed_attention
"""
NEVER_WAIT = frozenset(_LISTED.split())
