"""Captures and replays a forward as a `torch.cuda.CUDAGraph`.

A graph is a fixed list of kernels at fixed addresses. Capture freezes every host value; inputs are rewritten where they
lie before a replay. All graphs take memory from one private pool, so a replay overwrites the output of every other
graph. `guards` says what a capture refuses. `trace` is the same for a CPU.

Test: tests/test_graph_backends.py, tests/test_pretended_gpu.py, tests/test_streams.py. Record: graphs__*.csv.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ..syncs.counter import HostSyncCounter, HostSyncError
from .guards import CollectiveGuard, GraphCaptureError, capture_errors

_STREAMS = 32  # torch's streams of one device and priority: `torch.cuda.Stream` hands them out in turn
_SMALL_BYTES = 2**20  # torch's allocator serves requests up to this size from separate segments


class CapturedGraph(NamedTuple):
    """A captured forward.

    Attributes:
        output: where a replay leaves its result; the next replay of any graph of the same backend overwrites it.
        replay: computes the output anew from what the inputs hold.
        kept: objects that a replay needs, kept alive.
    """

    output: Tensor
    replay: Callable[[], None]
    kept: Any


class CudaBackend:
    """CUDA graphs that share one private pool, captured on a stream that no other backend of the process captures on.

    The error mode of a capture is "thread_local": an unsafe call of this thread ends the capture, while calls of other
    threads (a communicator's watchdog, a loader that pins memory) do not.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = _stream_of_its_own(device)
        self._poison: torch.cuda.CUDAGraph | None = None
        _LIVE.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool.

        Its segments are summed, because `memory_reserved` also counts eager memory, which a capture gives back: the
        growth of that number can be negative.
        """
        return sum(segment["total_size"] for segment in self._segments())

    def capture(
        self,
        forward: Callable[..., Tensor],
        inputs: Mapping[str, Tensor],
        packed_copies: Callable[[], Mapping[int, Any]],
        allow_collectives: bool,
    ) -> CapturedGraph:
        """Captures `forward(*inputs.values())`; the graph reads `inputs` where they lie now.

        Args:
            packed_copies: not used; weights are packed on CPUs only.
            allow_collectives: the forward may run collectives of a communicator that can be captured.

        Raises:
            GraphCaptureError: the forward does what no graph can hold.
        """
        tensors = tuple(inputs.values())
        self._poison = None  # it fills blocks that this capture may take
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if not allow_collectives:
                # Before all else: a collective that is launched waits for ranks that may capture nothing.
                with torch.compiler.set_stance("force_eager"), CollectiveGuard():
                    forward(*tensors)
            # Warm up the exact callable: compiled kernels, workspaces and handles are made at the first use, and making
            # them inside a capture fails or freezes them into the graph's pool.
            forward(*tensors)
            # Rehearse, uncompiled and watched: a read on the host is refused with its line. Only now, because a first
            # call may copy constants to the device, which waits once and never again.
            try:
                with torch.compiler.set_stance("force_eager"), HostSyncCounter(error=True, pretended=False):
                    forward(*tensors)
            except HostSyncError as error:
                raise GraphCaptureError(f"capture: {error}") from error
        graph = torch.cuda.CUDAGraph()
        with capture_errors(), torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            output = forward(*tensors)
        return CapturedGraph(output, graph.replay, (graph, tensors))

    def poison(self) -> None:
        """Fills the free blocks of the pool with NaN, so that a replay which reads before it writes gives NaN."""
        if self._poison is None:
            # Memory of the pool can only be taken inside a capture. So the fill is a graph, too.
            self._poison = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._poison, self.pool, self.stream, capture_error_mode="thread_local"):
                blocks = [torch.empty(size // 4, device=self.device) for size in self._free_sizes()]
                for block in blocks:
                    block.fill_(float("nan"))
        self._poison.replay()

    def _segments(self) -> list[dict[str, Any]]:
        """The pool's parts of torch's memory."""
        return [
            segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(self.pool)
        ]

    def _free_sizes(self) -> list[int]:
        """Bytes to request, largest first, so that the pool hands out all it has and does not grow."""
        sizes = []
        for segment in self._segments():
            most = _SMALL_BYTES if segment["segment_type"] == "small" else segment["total_size"]
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    sizes += [most] * (block["size"] // most) + [block["size"] % most]
        return sorted((size for size in sizes if size), reverse=True)


_LIVE: WeakSet[CudaBackend] = WeakSet()
_CAPTURE_STREAMS: dict[torch.device, list[torch.cuda.Stream]] = {}


def _stream_of_its_own(device: torch.device) -> torch.cuda.Stream:
    """A stream that no other backend captures on; streams of backends that are gone are taken again.

    cuBLAS has one workspace for each stream, and a graph holds the address of its capture stream's. Two graphs with one
    workspace must not run at the same time, as those of two runners may. A workspace stays to the end of the
    process, so a new stream for each capture would fill the memory.
    """
    known = _CAPTURE_STREAMS.setdefault(device, [])
    taken = [backend.stream for backend in _LIVE]
    for stream in known:
        if stream not in taken:
            return stream
    made = [torch.cuda.Stream(device) for _ in range(_STREAMS)]
    known.append(next((stream for stream in made if stream not in known), made[0]))
    return known[-1]
