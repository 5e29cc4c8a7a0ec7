"""Orders CUDA streams that use the same memory: what is kept between calls may be used by the next call on another one.

Work on one stream runs in the order of its launches; work on two streams does not. A tensor that one call leaves behind
(a cached embedding, the static inputs of a graph) is therefore marked with an event, and a call on another stream makes
its stream wait for that event. The host never waits.

Without a CUDA device nothing is done: a pretended device and fake tensors have no streams to order.

Test: tests/test_streams.py.
"""

import torch
from torch import Tensor


class StreamOrder:
    """Behind which event the memory of one owner may be used.

    Example, memory that each call of a runner rewrites:

        order.wait()     the current stream waits for the last call, if that ran on another stream
        ...              the work of this call
        order.mark()     the next call waits for the work so far
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None

    def mark(self) -> None:
        """The memory may be used after what the current stream does up to now."""
        if not _may_order(self.device):
            return
        if self._event is None:
            self._event = torch.cuda.Event()
        self._stream = torch.cuda.current_stream(self.device)
        self._event.record(self._stream)

    def wait(self, *kept: Tensor) -> None:
        """Makes the current stream wait for `mark`, if that was on another stream.

        Args:
            kept: tensors that this stream reads and that their owner may free at any time: their memory is not used
                again before this stream has read them.
        """
        if self._event is None or not _may_order(self.device):
            return
        stream = torch.cuda.current_stream(self.device)
        if stream == self._stream:
            return
        stream.wait_event(self._event)
        for tensor in kept:
            tensor.record_stream(stream)


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph: what it computes is not there before the first replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _may_order(device: torch.device) -> bool:
    # A capture begins with a synchronisation, and an event of uncaptured work in it is an error.
    return device.type == "cuda" and torch.cuda.is_initialized() and not is_capturing()
