"""Captures and replays a forward on a CPU, under the rules of a CUDA graph: the twin of `cuda`.

The forward is recorded once as a `FlatProgram`: a list of operators at fixed addresses. A replay runs the operators and
none of the modules' Python. It freezes host values, keeps inputs where they lie and refuses what a CUDA graph refuses.

Test: tests/test_graph_backends.py. Record: graphs__cpu-*.csv.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from .cuda import CapturedGraph
from .guards import CollectiveGuard, GraphCaptureError, HostReadGuard, capture_errors
from .trace_program import HasCurrentTensor, MemoryPool, record


class TraceBackend:
    """Recorded programs that share one pool of memory."""

    name = "trace"

    def __init__(self) -> None:
        self.pool = MemoryPool()

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.pool.nbytes

    def capture(
        self,
        forward: Callable[..., Tensor],
        inputs: Mapping[str, Tensor],
        packed_copies: Callable[[], Mapping[int, HasCurrentTensor]],
        allow_collectives: bool,
    ) -> CapturedGraph:
        """Records `forward(*inputs.values())`; arguments and errors as of `CudaBackend.capture`.

        Args:
            packed_copies: called after the first run, which packs weights; see `record`.
        """
        if allow_collectives:
            raise GraphCaptureError("capture: a CPU's collectives are calls of the host, which no graph can hold")
        with CollectiveGuard():
            forward(*inputs.values())  # warm up: weights are packed and kernels are built at the first use
        with capture_errors(), HostReadGuard():
            program = record(forward, inputs, self.pool, packed_copies())
        return CapturedGraph(program.output, program.run, program)

    def poison(self) -> None:
        """Fills the pool with NaN, so that a replay which reads before it writes gives NaN."""
        self.pool.poison()
