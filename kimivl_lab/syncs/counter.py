"""Counting host syncs: the moments at which Python waits for the GPU before it goes on.

    counter = count_host_syncs(fn, *args)      # counter.total, .by_kind, .events (kind, file, line, function), .value
    print(counter)                             # one line for each wait and for each operator whose waits are unknown
    with HostSyncCounter(error=True): ...      # the first sync raises HostSyncError, which names its line

Use it in a test that must hold without a GPU, or to find the line that waits. On a CUDA device the syncs are those that
torch.cuda.set_sync_debug_mode reports; launches and bytes are the profiler's. Without one the same code runs on a
pretended device, under the rules in `syncs.rules`. `on_device` puts tensors and modules on whichever it is.
Example: `count_host_syncs(lambda x: int(x.max()), on_device(torch.arange(6))).by_kind` is {"int": 1}.
Test: tests/test_syncs.py, tests/test_tower_syncs.py. Record: syncs__*.csv.
"""

import copy
import dataclasses
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..private_api import tree_map
from .cuda import CudaWatch
from .pretend import PretendDevice, pretend_module, pretend_tensor
from .watch import Watcher

_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, warnings.__file__)


@dataclasses.dataclass(frozen=True)
class HostSync:
    """One wait: its kind, and the innermost line outside torch and this package that caused it."""

    kind: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.kind} at {Path(self.file).name}:{self.line} in {self.function}"


class HostSyncError(RuntimeError):
    """The host would have waited for the device; `event` says where."""

    def __init__(self, event: HostSync) -> None:
        super().__init__(f"host sync: {event.kind} at {event.file}:{event.line} in {event.function}")
        self.event = event


class HostSyncCounter(Watcher):
    """Counts what the code inside it makes the host wait for. The innermost of nested counters counts.

    Args:
        error: the first wait raises `HostSyncError`, before it happens.
        pretended: whether to count on a pretended device; None: where there is no CUDA device.

    Attributes:
        events: every wait, in order.
        staged: non-blocking copies between the device and pageable memory, in order. The driver copies them through a
            buffer of its own and may wait for the stream first; torch's debug mode does not see them, and `total`
            leaves them out.
        unknown: operators that are not known to wait or not, each with its line; `kind` is the operator's name.
            `total` leaves them out, and `error` does not raise for them. A GPU's own debug mode knows all operators.
        launches: kernels launched; on a pretended device, operators that launch at least one.
        bytes_to_device, bytes_to_host: copied each way.
        value: what the function given to `count_host_syncs` returned.
    """

    def __init__(self, *, error: bool = False, pretended: bool | None = None) -> None:
        super().__init__()
        self.error = error
        self.pretended = _is_pretended(pretended)
        self.events: list[HostSync] = []
        self.staged: list[HostSync] = []
        self.unknown: list[HostSync] = []
        self.value: Any = None

    @property
    def total(self) -> int:
        """Waits counted."""
        return len(self.events)

    @property
    def by_kind(self) -> dict[str, int]:
        """Waits of each kind, the most frequent first."""
        return dict(Counter(event.kind for event in self.events).most_common())

    def __enter__(self) -> Self:
        self._device: Any = (
            PretendDevice(self) if self.pretended else CudaWatch(self, error=self.error, profiled=not self.error)
        )
        self._device.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._device.__exit__(*error)

    def wait(self, kind: str) -> None:
        event = HostSync(kind, *_users_line())
        if self.error:
            raise HostSyncError(event)
        self.events.append(event)

    def stage(self, kind: str) -> None:
        self.staged.append(HostSync(kind, *_users_line()))

    def not_known(self, operator: str) -> None:
        self.unknown.append(HostSync(operator, *_users_line()))

    def __str__(self) -> str:
        lines = [f"{self.total} host syncs", *(f"  {event}" for event in self.events)]
        for title, found in (("staged copies", self.staged), ("unknown operators", self.unknown)):
            if found:
                lines += [f"{len(found)} {title}", *(f"  {event}" for event in found)]
        return "\n".join(lines)


def count_host_syncs(
    fn: Callable[..., Any], *args: Any, error: bool = False, pretended: bool | None = None, **kwargs: Any
) -> HostSyncCounter:
    """Runs `fn(*args, **kwargs)` once and counts its host syncs; see `HostSyncCounter`.

    Tensors that `fn` finds on the host stay there: move its arguments with `on_device` first, or inside `fn`.

    Raises:
        ValueError: `fn` used no tensor on the device, so that nothing could be counted.
    """
    with HostSyncCounter(error=error, pretended=pretended) as counter:
        counter.value = fn(*args, **kwargs)
    if not counter.touched:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise ValueError(
            f"count_host_syncs: {name} used no tensor on the device, so no sync could be counted: move its tensors and "
            f"modules first, with on_device of kimivl_lab.syncs.counter, as in count_host_syncs({name}, on_device(x))"
        )
    return counter


def on_device(value: Any, *, pretended: bool | None = None) -> Any:
    """A copy of a tensor, module, dataclass, list, tuple or dict of them, on the device that the counter counts on.

    On a pretended device a module's copy shares its weights' memory. What is on the GPU already is returned unchanged.
    """
    pretends = _is_pretended(pretended)

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return pretend_module(leaf) if pretends else _module_on_gpu(leaf)
        if isinstance(leaf, Tensor):
            return pretend_tensor(leaf) if pretends else leaf.cuda()
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
            return dataclasses.replace(leaf, **tree_map(moved, fields))
        return leaf

    return tree_map(moved, value)


def _module_on_gpu(module: nn.Module) -> nn.Module:
    weights = [*module.parameters(), *module.buffers()]
    if weights and all(weight.is_cuda for weight in weights):
        return module
    # Each weight is copied once, to the GPU: a deep copy alone would take the memory of the whole module here, too.
    there = {
        id(weight): nn.Parameter(weight.detach().cuda(), weight.requires_grad)
        if isinstance(weight, nn.Parameter)
        else weight.cuda()
        for weight in weights
    }
    return copy.deepcopy(module, there).cuda()


def _is_pretended(pretended: bool | None) -> bool:
    return not torch.cuda.is_available() if pretended is None else pretended


def _users_line() -> tuple[str, int, str]:
    """File, line and function of the innermost frame that is neither torch's nor the counter's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname
