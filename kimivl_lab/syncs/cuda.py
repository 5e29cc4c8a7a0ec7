"""The host syncs of a real CUDA device: torch's sync debug mode says when, the profiler what was launched and copied.

`syncs.counter` uses it where there is a CUDA device. The kind of a wait is that of the torch function that was running,
since the debug mode does not know it. The reads of one printing count as one. `synchronize` of torch.cuda, of streams
and of events is counted by a wrapper: the debug mode does not see all of them.
Test: tests/test_syncs.py.
"""

import functools
import json
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from ..private_api import tree_leaves
from .rules import COPY_TO_DEVICE, COPY_TO_HOST, READING_FUNCTIONS, SYNCHRONIZE
from .watch import Watcher

_MESSAGE = "called a synchronizing CUDA operation"
_MOVES = (Tensor.to, Tensor.cuda, Tensor.copy_)
_KINDS = READING_FUNCTIONS | {
    "__getitem__": "boolean mask",
    "__setitem__": "boolean mask",
    "cuda": COPY_TO_DEVICE,
    "tensor": COPY_TO_DEVICE,
    "as_tensor": COPY_TO_DEVICE,
    "new_tensor": COPY_TO_DEVICE,
    "where": "nonzero",
    "repeat_interleave": "repeat",
}


class CudaWatch(TorchFunctionMode):
    """Reports every wait to `watcher` and, with `profiled`, adds launches and bytes when it is left."""

    def __init__(self, watcher: Watcher, *, error: bool, profiled: bool) -> None:
        super().__init__()
        self.watcher = watcher
        self.error = error
        self.profile = profile(activities=[ProfilerActivity.CUDA]) if profiled else None
        self._running: tuple[Any, Any] | None = None
        self._waits = 0
        self._synchronizing = False
        self._undo = ExitStack()

    def __enter__(self) -> "CudaWatch":
        if self.profile is not None:
            torch.cuda.synchronize()
            self.profile.__enter__()
        self._undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=_MESSAGE)
        self._undo.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("error" if self.error else "warn")
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            self._count_synchronize(owner)
        self._show_others = warnings.showwarning
        warnings.showwarning = self._show  # ty: ignore[invalid-assignment]
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._undo.close()
        if self.profile is not None:
            torch.cuda.synchronize()
            self.profile.__exit__(exc_type, exc_val, exc_tb)
            self._add_trace(self.profile)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._running, self._waits = (func, args), 0
        try:
            out = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if _MESSAGE not in str(error):
                raise
            self.watcher.wait(_kind(func, args))  # raises HostSyncError
            raise
        else:
            if func in _MOVES and not self._waits:
                self._find_staged(func, args, out)
        finally:
            self._running = None
        if not self.watcher.touched:
            leaves = tree_leaves((args, kwargs, out))
            self.watcher.touched = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)
        return out

    def _count_synchronize(self, owner: Any) -> None:
        """Until this watch is left, a call of `owner.synchronize` counts as one wait."""
        original = owner.synchronize

        @functools.wraps(original)
        def synchronize(*args: Any, **kwargs: Any) -> None:
            self.watcher.touched = True
            self.watcher.wait(SYNCHRONIZE)
            self._synchronizing = True
            try:
                original(*args, **kwargs)
            finally:
                self._synchronizing = False

        self._undo.callback(setattr, owner, "synchronize", original)
        owner.synchronize = synchronize

    def _show(self, message: Warning | str, *where: Any, **more: Any) -> None:
        """Stands in for warnings.showwarning."""
        if _MESSAGE not in str(message):
            self._show_others(message, *where, **more)
            return
        if self._synchronizing:
            return
        kind = _kind(*self._running) if self._running else "unknown"
        self._waits += 1
        if kind != "print" or self._waits == 1:
            self.watcher.wait(kind)

    def _find_staged(self, func: Any, args: Any, out: Tensor) -> None:
        """A copy between host and device that did not wait asked for non_blocking: pinned memory or staged?"""
        source, target = (args[1], args[0]) if func is Tensor.copy_ else (args[0], out)
        if source.is_cuda != target.is_cuda and source.numel():
            host = source if target.is_cuda else target
            if not (host.is_pinned() and source.stride() == target.stride()):
                self.watcher.stage(COPY_TO_DEVICE if target.is_cuda else COPY_TO_HOST)

    def _add_trace(self, profile: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        for event in events:
            category, name = event.get("cat"), event.get("name", "")
            if category == "gpu_memcpy" and "HtoD" in name:
                self.watcher.bytes_to_device += event["args"]["bytes"]
            elif category == "gpu_memcpy" and "DtoH" in name:
                self.watcher.bytes_to_host += event["args"]["bytes"]
            elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
                self.watcher.launches += 1


def _kind(func: Any, args: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("to", "copy_"):
        source = args[1] if name == "copy_" else args[0]
        return COPY_TO_HOST if source.is_cuda else COPY_TO_DEVICE
    return _KINDS.get(name, name)
