"""Every private function of torch and transformers that the library uses, each behind one that works without it.

Private functions may move or go in any release. Here each has one place and one answer for a release without it: a
slower path that is right (an operator call instead of a direct one, a plain layer instead of a packed one), or an error
that says what is missing. `tests/test_private_api.py` finds private names in other modules, and removes each of these.

Test: tests/test_private_api.py.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch._guards
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as _nn_module

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
    from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
else:
    try:
        from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
    except ImportError:

        class TorchDispatchMode:
            """Says that this torch has no dispatch modes: nothing can count or refuse operators."""

            def __init__(self) -> None:
                raise RuntimeError(f"torch {torch.__version__} has no TorchDispatchMode: operators cannot be watched")

        def is_in_torch_dispatch_mode() -> bool:
            return True  # kernels are called as operators, which is right in every mode

    try:
        from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
    except ImportError:

        def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
            if isinstance(tree, dict):
                return {key: tree_map(function, value) for key, value in tree.items()}
            if isinstance(tree, list | tuple):
                parts = [tree_map(function, value) for value in tree]
                return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
            return function(tree)

        def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
            return tree_map(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, tree)

        def tree_leaves(tree: Any) -> list[Any]:
            leaves: list[Any] = []
            tree_map(leaves.append, tree)
            return leaves


__all__ = ["TorchDispatchMode", "is_in_torch_dispatch_mode", "tree_leaves", "tree_map", "tree_map_only"]


def outside_modes() -> AbstractContextManager[Any]:
    """A context in which operators run without the dispatch modes around it; where torch has none such, within them."""
    from torch.utils import _python_dispatch

    disable = getattr(_python_dispatch, "_disable_current_modes", nullcontext)
    return disable()


def in_fake_mode() -> bool:
    """Whether results have no values and must not be kept; True in any dispatch mode where torch does not tell."""
    if not is_in_torch_dispatch_mode():
        return False
    active = getattr(torch._guards, "active_fake_mode", None)
    return active is None or active() is not None


# --- what decides between a kernel's fast call and its operator ------------------------------------------------------


# Looked up once: a forward asks hundreds of times.
_profiler_enabled: Callable[[], bool] | None = getattr(torch.autograd, "_profiler_enabled", None)
_has_any_global_hook: Callable[[], bool] | None = getattr(_nn_module, "_has_any_global_hook", None)


def is_profiled() -> bool:
    """Whether a profiler records; True where torch does not tell, so that a kernel is called as an operator."""
    return _profiler_enabled is None or _profiler_enabled()


def may_have_global_hooks() -> bool:
    """Whether hooks of all modules may be set; True where torch does not tell, so that layers are called."""
    return _has_any_global_hook is None or _has_any_global_hook()


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` replaced its forward."""
    return getattr(module, "_compiled_call_impl", None) is not None


# --- weights ---------------------------------------------------------------------------------------------------------


def weight_version(weight: Tensor) -> int | None:
    """torch's count of in-place changes; None where there is none: made in inference mode, or not told."""
    return None if weight.is_inference() else getattr(weight, "_version", None)


def counts_versions() -> bool:
    """Whether torch tells the version of a tensor."""
    return hasattr(Tensor, "_version")


def storage_id(tensor: Tensor) -> int:
    """What tells the storage of `tensor` from every other one that lives.

    The address of its memory where torch does not tell: also right for storages that live, but for empty ones.
    """
    storage = tensor.untyped_storage()
    return storage._cdata if hasattr(storage, "_cdata") else storage.data_ptr()


# --- oneDNN's packed linear layers -----------------------------------------------------------------------------------

_MKLDNN = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")


def onednn_unavailable(dtype: torch.dtype) -> str | None:
    """Why oneDNN's packed linear layers cannot run in `dtype`, or None when they can."""
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    missing = [name for name in _MKLDNN if not hasattr(torch.ops.mkldnn, name)]
    if missing:
        return f"torch {torch.__version__} has no torch.ops.mkldnn.{missing[0]}"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no bfloat16 instructions that oneDNN uses"
    return None


def onednn_pack(weight: Tensor, rows: int) -> Tensor:
    """`weight` in oneDNN's layout for products with about `rows` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu_tanh: bool) -> Tensor:
    """The product with a packed or plain weight, and the activation in the same pass."""
    activation = ("gelu", [], "tanh") if gelu_tanh else ("none", [], "")
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, *activation)


def onednn_linear_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product with a packed weight, plus `residual`."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")


# --- processors ------------------------------------------------------------------------------------------------------


def cpu_supports(*features: str) -> bool:
    """Whether this processor has all of these, such as "avx2" or "amx_tile"; False where torch does not tell."""
    tests = [getattr(torch.cpu, f"_is_{feature}_supported", None) for feature in features]
    return all(test is not None and test() for test in tests)


def init_amx() -> bool:
    """Asks the operating system for the matrix extensions; False where it or torch does not give them."""
    init = getattr(torch.cpu, "_init_amx", None)
    return init is not None and bool(init())


# --- process groups --------------------------------------------------------------------------------------------------


def group_timeout_s(group: dist.ProcessGroup) -> float | None:
    """The longest that a collective of `group` waits for a rank; None where torch does not tell."""
    try:  # this runs while an error is handled, which another error would hide
        return group._get_backend(group._device_types[0]).options._timeout.total_seconds()
    except (AttributeError, IndexError, RuntimeError):
        return None


# --- operators -------------------------------------------------------------------------------------------------------


def operator_schema(operator: Any) -> Any:
    """The schema of an operator of torch.ops: its name, arguments and results."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        raise RuntimeError(f"torch {torch.__version__} does not tell the schema of {operator}")
    return schema


def overload_name(operator: Any) -> str:
    """Of an operator of torch.ops: "Tensor" of `aten::add.Tensor`."""
    return operator_schema(operator).overload_name


def direct_operator(operator: Any) -> Callable[..., Any]:
    """The C++ function of an operator, which costs less to call than the operator; else the operator."""
    return getattr(operator, "_op", operator)


def composite_form(operator: Any) -> Callable[..., Any] | None:
    """Runs an operator that is made of others, part by part; None if it is none, or torch does not tell."""
    has_kernel = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    key = getattr(getattr(torch._C, "DispatchKey", None), "CompositeImplicitAutograd", None)
    if has_kernel is None or key is None or not hasattr(operator, "_op_dk") or not has_kernel(operator.name(), key):
        return None
    return partial(operator._op_dk, key)


def operator_names() -> Iterable[str]:
    """The full names of all registered operators; where torch does not tell, of those in torch.ops.aten by now."""
    names = getattr(torch._C, "_dispatch_get_all_op_names", None)
    if names is not None:
        return names()
    packets = {name: getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)}
    return [
        f"aten::{name}.{overload}"
        for name, packet in packets.items()
        if hasattr(packet, "overloads")
        for overload in packet.overloads()
    ]
