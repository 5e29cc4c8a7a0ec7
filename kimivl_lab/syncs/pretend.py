"""A GPU that is not there: tensors that say they live on it, and memory that says it is pinned.

A `DeviceTensor` is a host tensor under another name. Its values, views, in-place updates and gradients are those of the
host tensor, so code that reads it goes on with right numbers; `device` and `is_cuda` answer as on a GPU, so code takes
its GPU path. While a `PretendDevice` is entered, `device="cuda"` and `.to("cuda")` give such tensors, and every torch
function that uses one is watched: its copies between host and device here, its operators in `syncs.watch`.
torch.cuda.synchronize, streams and events exist, and their waits are reported. `torch.cuda.is_available()` stays False.

A device tensor and a host tensor do not mix, except where torch lets them: single numbers, indices and `copy_`.
Not covered: a second device, and what the code of an extension does.
Test: tests/test_syncs.py.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..private_api import tree_leaves, tree_map_only
from .rules import SYNCHRONIZE, UNKNOWN_FUNCTIONS
from .watch import OperatorWatch, Watcher, is_pinned, mark_pinned

DEVICE = torch.device("cuda", 0)

_MIXING = ("copy_", "__getitem__", "__setitem__", "index_put", "index_put_", "__set__")
_MIXING += ("_has_compatible_shallow_copy_type",)  # called by Module.to with the old parameter and the new
_MIXING += ("tensor_split", "_pack_padded_sequence", "_pad_packed_sequence")  # their lengths are host tensors
_MIXING += tuple(UNKNOWN_FUNCTIONS)


class DeviceTensor(Tensor):
    """A host tensor that says it lives on a CUDA device."""

    counts_versions = True  # an update in place moves its version counter, as any plain tensor's

    @property
    def device(self) -> torch.device:  # ty: ignore[incompatible-property-override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # ty: ignore[incompatible-property-override]
        return True

    @property
    def is_cpu(self) -> bool:  # ty: ignore[incompatible-property-override]
        return False

    def get_device(self) -> int:
        return DEVICE.index

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy: copy it to the host first, by cpu()")

    def record_stream(self, s: Any) -> None:
        """Nothing to do: memory on the pretended device is never given to another stream."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(Watcher(), func, args, kwargs or {})


class PretendDevice(TorchFunctionMode):
    """Entered, tensors move to and are made on a CUDA device, whose waits, copies and launches go to `watcher`.

    Compiled functions run uncompiled: their operators are seen one by one. `torch.cuda` itself knows of no device.
    """

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher
        self._undo = ExitStack()

    def __enter__(self) -> "PretendDevice":
        future = torch.__future__
        self._undo.callback(
            future.set_overwrite_module_params_on_conversion, future.get_overwrite_module_params_on_conversion()
        )
        future.set_overwrite_module_params_on_conversion(True)  # a module moves by new parameters: the old are no GPU's
        self._undo.enter_context(torch.compiler.set_stance("force_eager"))
        _entered.append(self.watcher)
        self._undo.callback(_entered.pop)
        for owner, name, pretended in _TORCH_CUDA:
            self._undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, pretended)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._undo.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(self.watcher, func, args, kwargs or {})


def pretend_tensor(tensor: Tensor) -> Tensor:
    """A copy of `tensor` on the pretended device; itself if it is there."""
    return tensor if isinstance(tensor, DeviceTensor) else _mark(tensor.detach().clone())


def pretend_module(module: nn.Module) -> nn.Module:
    """A copy of `module` on the pretended device that shares the memory of its weights."""
    twins = {}
    for tensor in (*module.parameters(), *module.buffers()):
        twin = _mark(tensor.detach())
        twins[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    return copy.deepcopy(module, twins)


def _mark(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor:
        tensor.__class__ = DeviceTensor
    return tensor


def _plain(tensor: Tensor) -> Tensor:
    """The same memory under its true name."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, DeviceTensor) else tensor


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


# --- torch functions -------------------------------------------------------------------------------------------------


def _call(watcher: Watcher, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        special = _SPECIAL.get(func)
        if special is not None:
            out = special(watcher, func, *args, **kwargs)
            watcher.touched |= any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs, out)))
            return out
        return _run(watcher, func, args, kwargs)


def _run(watcher: Watcher, func: Any, args: Any, kwargs: dict[str, Any], *, reports: bool = True) -> Any:
    """`func`, watched if it works on the device: its tensors live there, or it makes one there."""
    name = getattr(func, "__name__", str(func))
    tensors = _tensors((args, kwargs))
    on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    makes_pinned = bool(kwargs.get("pin_memory"))
    if makes_pinned:
        kwargs = {**kwargs, "pin_memory": False}
    result_on_device = bool(on_device)
    if kwargs.get("device") is not None and not isinstance(kwargs["device"], Tensor):
        result_on_device = _is_cuda(kwargs["device"])
        if result_on_device:
            kwargs = {**kwargs, "device": "cpu"}
    if not (on_device or result_on_device):
        out = func(*args, **kwargs)
        if makes_pinned:
            mark_pinned(out)
        return out
    watcher.touched = True
    if name in UNKNOWN_FUNCTIONS:
        watcher.not_known(name)
        reports = False
    mixed = [tensor for tensor in tensors if tensor.ndim and not isinstance(tensor, DeviceTensor)]
    if on_device and mixed and name not in _MIXING:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} was given tensors on {DEVICE} and on the host"
        )
    if isinstance(func, FunctionType):  # torch's own Python code would make tensors on the device it is told
        args, kwargs = tree_map_only(DeviceTensor, _plain, (args, kwargs))
    with OperatorWatch(watcher, name, on_device, reports=reports):
        out = func(*args, **kwargs)
    given = {id(tensor) for tensor in tensors}
    if result_on_device:
        tree_map_only(Tensor, lambda tensor: tensor if id(tensor) in given else _mark(tensor), out)
    return out


def _tensors(values: Any) -> list[Tensor]:
    """Every tensor in nested containers, bounds of slices included."""
    found = []
    for leaf in tree_leaves(values):
        bounds = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
        found += [bound for bound in bounds if isinstance(bound, Tensor)]
    return found


def _to(
    watcher: Watcher,
    func: Any,
    tensor: Tensor,
    *args: Any,
    device: Any = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Tensor.to in all its forms: (device, dtype), (dtype) and (other), then non_blocking and copy."""
    rest = list(args)
    if rest and isinstance(rest[0], Tensor):
        other = rest.pop(0)
        device, dtype = other.device, other.dtype
    else:
        if rest and not isinstance(rest[0], torch.dtype | None) and not isinstance(rest[0], bool):
            device = rest.pop(0)
        if rest and isinstance(rest[0], torch.dtype | None):
            dtype = rest.pop(0) or dtype
    if rest:
        non_blocking = rest.pop(0)
    if rest:
        kwargs["copy"] = rest.pop(0)
    to_device = isinstance(tensor, DeviceTensor) if device is None else _is_cuda(device)
    return _moved(watcher, tensor, to_device, dtype or tensor.dtype, non_blocking, kwargs)


def _moved(
    watcher: Watcher, tensor: Tensor, to_device: bool, dtype: torch.dtype, non_blocking: bool, kwargs: dict[str, Any]
) -> Tensor:
    if to_device == isinstance(tensor, DeviceTensor):
        return _run(watcher, Tensor.to, (tensor, dtype), kwargs)
    kwargs["copy"] = True
    moved: Tensor = _plain(tensor).to(dtype, **kwargs)
    if not to_device and non_blocking:
        mark_pinned(moved)  # torch takes pinned memory for it
    watcher.transfer(moved, _plain(tensor), to_device=to_device, non_blocking=non_blocking)
    return _mark(moved) if to_device else moved


def _cuda(watcher: Watcher, func: Any, tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
    return _moved(watcher, tensor, True, tensor.dtype, non_blocking, {})


def _cpu(watcher: Watcher, func: Any, tensor: Tensor, **kwargs: Any) -> Tensor:
    return _moved(watcher, tensor, False, tensor.dtype, False, kwargs)


def _tolist(watcher: Watcher, func: Any, tensor: Tensor) -> Any:
    if isinstance(tensor, DeviceTensor) and tensor.numel():
        watcher.read("tolist", tensor.nbytes)
    return _plain(tensor).tolist()


def _text(watcher: Watcher, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> str:
    """repr and format."""
    if not isinstance(tensor, DeviceTensor):
        return func(tensor, *args, **kwargs)
    watcher.read("print", tensor.nbytes)
    text = func(_plain(tensor), *args, **kwargs)
    return f"{text[:-1]}, device='{DEVICE}')" if text.endswith(")") else text


def _from_data(watcher: Watcher, func: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """torch.tensor, as_tensor, asarray and Tensor.new_tensor: made on the host, then copied."""
    data = args[1] if func is Tensor.new_tensor else args[0]
    to_device = isinstance(args[0], DeviceTensor) if device is None else _is_cuda(device)
    if isinstance(data, Tensor) and isinstance(data, DeviceTensor) == to_device:
        return _run(watcher, func, args, kwargs)
    if isinstance(data, DeviceTensor):
        made = func(*map(_plain, args), **kwargs).clone()
        watcher.transfer(made, made, to_device=False, non_blocking=False)
        return made
    for number in _tensors(data):  # in a list: each is read
        if isinstance(number, DeviceTensor):
            watcher.read("item", number.element_size())
    made = func(*args, **kwargs, device="cpu")
    if not to_device:
        return made
    made = made.clone()
    watcher.transfer(made, made, to_device=True, non_blocking=False)
    return _mark(made)


def _pin_memory(watcher: Watcher, func: Any, tensor: Tensor, device: Any = None) -> Tensor:
    if isinstance(tensor, DeviceTensor):
        raise RuntimeError("cannot pin a tensor on the device: only host memory is pinned")
    if not is_pinned(tensor):
        tensor = tensor.clone()
        mark_pinned(tensor)
    return tensor


def _is_pinned(watcher: Watcher, func: Any, tensor: Tensor, device: Any = None) -> bool:
    return not isinstance(tensor, DeviceTensor) and is_pinned(tensor)


def _one_hot(watcher: Watcher, func: Any, tensor: Tensor, num_classes: int = -1) -> Tensor:
    """The steps of one_hot on CUDA, which leaves out the checks of values that it does on the CPU."""
    if not isinstance(tensor, DeviceTensor) or tensor.numel() == 0:
        return _run(watcher, func, (tensor, num_classes), {})
    if num_classes == -1:
        num_classes = int(_run(watcher, Tensor.item, (_run(watcher, Tensor.max, (tensor,), {}),), {})) + 1
    made = _run(watcher, torch.zeros, ((*tensor.shape, num_classes),), {"dtype": torch.int64, "device": DEVICE})
    return _run(watcher, Tensor.scatter_, (made, -1, _mark(tensor.unsqueeze(-1)), 1), {})


def _unchecked(watcher: Watcher, func: Any, *args: Any, **kwargs: Any) -> Any:
    """quantile: its check of `q` reads values on the CPU only, and nothing else in it waits."""
    return _run(watcher, func, args, kwargs, reports=False)


def _tensor_split(watcher: Watcher, func: Any, tensor: Tensor, parts: Any, dim: int = 0) -> Any:
    if isinstance(parts, DeviceTensor):
        raise RuntimeError(f"tensor_split expected tensor_indices_or_sections to be on cpu, but it's on {DEVICE}")
    return _run(watcher, func, (tensor, parts, dim), {})


def _with_lengths(watcher: Watcher, func: Any, values: Tensor, lengths: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Packing of sequences: the lengths that go in and come back second are host tensors."""
    if isinstance(lengths, DeviceTensor):
        raise RuntimeError(f"{func.__name__}: lengths must be a CPU tensor, but it's on {DEVICE}")
    values, lengths = _run(watcher, func, (values, lengths, *args), {})
    return values, _plain(lengths)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    Tensor.cpu: _cpu,
    Tensor.tolist: _tolist,
    Tensor.pin_memory: _pin_memory,
    Tensor.is_pinned: _is_pinned,
    Tensor.new_tensor: _from_data,
    Tensor.__repr__: _text,
    Tensor.__format__: _text,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    torch._C._nn.one_hot: _one_hot,
    **dict.fromkeys((torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile), _unchecked),
    **dict.fromkeys((torch.tensor_split, Tensor.tensor_split), _tensor_split),
    **dict.fromkeys((torch._pack_padded_sequence, torch._pad_packed_sequence), _with_lengths),
}


# --- torch.cuda ------------------------------------------------------------------------------------------------------

_entered: list[Watcher] = []  # the watchers of the devices that are entered, the innermost last


def _synchronize(*args: Any, **kwargs: Any) -> None:
    """Stands in for every synchronize: one wait."""
    _entered[-1].touched = True
    _entered[-1].wait(SYNCHRONIZE)


class PretendEvent:
    """torch.cuda.Event on the pretended device; elapsed times are those of the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self.recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Orders two streams on the device: the host does not wait."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "PretendEvent") -> float:
        """Milliseconds between the two records."""
        if self.recorded_s is None or end.recorded_s is None:
            raise ValueError("elapsed_time: both events must be recorded first")
        return (end.recorded_s - self.recorded_s) * 1e3

    synchronize = _synchronize


class PretendStream:
    """torch.cuda.Stream on the pretended device."""

    device = DEVICE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Orders two streams on the device: the host does not wait."""

    def wait_event(self, event: Any) -> None:
        """Orders a stream and an event on the device: the host does not wait."""

    def record_event(self, event: PretendEvent | None = None) -> PretendEvent:
        event = event or PretendEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> "PretendStream":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    synchronize = _synchronize


_group_by_device = torch._C._group_tensors_by_device_and_dtype


def _group_by_pretended_device(tensors: Any, with_indices: bool = False) -> dict[Any, Any]:
    """The groups of torch's foreach functions: C++ sees host tensors, so the device of each group is put right."""
    groups = _group_by_device(tensors, with_indices).items()
    return {
        (DEVICE if any(isinstance(tensor, DeviceTensor) for tensor in lists[0]) else device, dtype): (lists, indices)
        for (device, dtype), (lists, indices) in groups
    }


_STREAM = PretendStream()
# What is put in place of torch's own while a device is entered.
_TORCH_CUDA = (
    (torch.cuda, "synchronize", _synchronize),
    (torch.accelerator, "synchronize", _synchronize),
    (torch.cuda, "Stream", PretendStream),
    (torch.cuda, "Event", PretendEvent),
    (torch.cuda, "current_stream", lambda device=None: _STREAM),
    (torch.cuda, "default_stream", lambda device=None: _STREAM),
    (torch.cuda, "stream", lambda stream: stream or _STREAM),
    (torch.cuda, "set_stream", lambda stream: None),
    (torch.cuda, "current_device", lambda: DEVICE.index),
    (torch.cuda, "device", lambda device: nullcontext()),
    (torch.cuda, "device_of", lambda tensor: nullcontext()),
    (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
    (torch._C, "_group_tensors_by_device_and_dtype", _group_by_pretended_device),
)
