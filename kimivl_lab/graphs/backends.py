"""Two ways to capture a forward and replay it, under the same rules.

    "cuda"    torch.cuda.CUDAGraph
    "trace"   a `FlatProgram`: on a CPU, one operator after the other, no module's Python

The exact callable runs once before it is captured, so that what is made on first use (compiled kernels, workspaces) is
there. Host values are frozen. Inputs lie at fixed addresses and are rewritten before a replay; the output lies in
memory that the next replay of any graph of the same backend overwrites, for all of them share one private pool:
capture the largest first, and the others find room in it. `capture.py` says what is refused.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..syncs.counter import HostSyncCounter, HostSyncError
from .guards import CollectiveGuard, GraphCaptureError, HostReadGuard, errors_named
from .memory_pool import MemoryPool
from .trace_program import FlatProgram, Holder, record

_SMALL_BYTES = 2**20  # torch's allocator takes requests up to this from segments of their own


@dataclass(frozen=True)
class Graph:
    """A captured forward.

    Attributes:
        output: what the last replay computed; the next one, of any graph of the pool, overwrites it.
        replay: computes it anew from what the inputs hold.
        seconds: that warm-up and capture took.
        nbytes: that the pool grew by.
        kept: all that a replay needs, so that nothing of it is freed.
    """

    output: Tensor
    replay: Callable[[], None]
    seconds: float
    nbytes: int
    kept: Any


class Backend(Protocol):
    """Captures graphs into one pool."""

    name: str

    def capture(
        self,
        forward: Callable[..., Tensor],
        inputs: Mapping[str, Tensor],
        holders: Callable[[], Mapping[int, Holder]],
        allow_collectives: bool,
    ) -> Graph:
        """Captures `forward(*inputs.values())`; the graph reads `inputs` where they lie now.

        Args:
            holders: after the first run, who holds constants that may be replaced; see `record`.
            allow_collectives: the forward may run collectives of a communicator that can be captured.

        Raises:
            GraphCaptureError: the forward does what no graph can hold.
        """
        ...

    def poison(self) -> None:
        """Fills the pool with NaN: a replay that reads before it writes shows."""
        ...


class TraceBackend:
    """Graphs of a CPU."""

    name = "trace"

    def __init__(self) -> None:
        self.pool = MemoryPool()

    def capture(
        self,
        forward: Callable[..., Tensor],
        inputs: Mapping[str, Tensor],
        holders: Callable[[], Mapping[int, Holder]],
        allow_collectives: bool,
    ) -> Graph:
        start, before = time.perf_counter(), self.pool.nbytes
        if allow_collectives:
            raise GraphCaptureError("capture: a CPU's collectives are calls of the host, which no graph can hold")
        with CollectiveGuard():
            forward(*inputs.values())
        with errors_named(), HostReadGuard():
            program: FlatProgram = record(forward, inputs, self.pool, holders())
        return Graph(program.output, program.run, time.perf_counter() - start, self.pool.nbytes - before, program)

    def poison(self) -> None:
        self.pool.poison()


class CudaBackend:
    """Graphs of a CUDA device, captured on a stream of their own.

    The capture's error mode is "thread_local": what other threads (a communicator's watchdog, a loader that pins
    memory) do meanwhile does not end it, while an unsafe call of its own thread does.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self._poison: torch.cuda.CUDAGraph | None = None

    def capture(
        self,
        forward: Callable[..., Tensor],
        inputs: Mapping[str, Tensor],
        holders: Callable[[], Mapping[int, Holder]],
        allow_collectives: bool,
    ) -> Graph:
        start, before = time.perf_counter(), torch.cuda.memory_reserved(self.device)
        tensors = tuple(inputs.values())
        self._poison = None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            forward(*tensors)
            self._rehearse(forward, tensors, allow_collectives)
        graph = torch.cuda.CUDAGraph()
        with errors_named(), torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            output = forward(*tensors)
        nbytes = torch.cuda.memory_reserved(self.device) - before
        return Graph(output, graph.replay, time.perf_counter() - start, nbytes, (graph, tensors))

    def _rehearse(self, forward: Callable[..., Tensor], tensors: tuple[Tensor, ...], allow_collectives: bool) -> None:
        """Once more, uncompiled and watched: what it does now it would do in the capture."""
        collectives = nullcontext() if allow_collectives else CollectiveGuard()
        try:
            with torch.compiler.set_stance("force_eager"), HostSyncCounter(error=True, pretended=False), collectives:
                forward(*tensors)
        except HostSyncError as error:
            raise GraphCaptureError(f"capture: {error}") from error

    def poison(self) -> None:
        if self._poison is None:
            self._poison = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._poison, self.pool, self.stream, capture_error_mode="thread_local"):
                blocks = [torch.empty(size // 4, device=self.device) for size in self._free_sizes()]
                for block in blocks:
                    block.fill_(float("nan"))
        self._poison.replay()

    def _free_sizes(self) -> list[int]:
        """Bytes to ask for, largest first, so that the pool gives all that it has and grows no further."""
        sizes = []
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == tuple(self.pool):
                most = _SMALL_BYTES if segment["segment_type"] == "small" else segment["total_size"]
                for block in segment["blocks"]:
                    if block["state"] == "inactive":
                        sizes += [most] * (block["size"] // most) + [block["size"] % most]
        return sorted((size for size in sizes if size), reverse=True)


def resolve_backend(name: str, device: torch.device) -> Backend:
    """The backend called `name` for a tower on `device`; "auto" is "cuda" on a GPU, "trace" on a CPU."""
    wanted = {"cuda": "cuda", "cpu": "trace"}.get(device.type)
    if name not in ("auto", "cuda", "trace"):
        raise ValueError(f"unknown graph backend {name!r}: auto, cuda or trace")
    if wanted is None or name not in ("auto", wanted):
        raise ValueError(f"backend={name!r} with a tower on {device}: 'cuda' needs a GPU, 'trace' a CPU")
    return CudaBackend(device) if wanted == "cuda" else TraceBackend()
