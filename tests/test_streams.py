"""What calls on several CUDA streams share is ordered: cache entries, a runner's inputs and outputs, capture streams.

Streams and events are stubs that record what is asked of them; tensors lie on the host and say that they are on a GPU.
"""

import copy
from contextlib import contextmanager

import pytest
import torch

from kimivl_lab import EncoderCudaGraphRunner
from kimivl_lab.graphs import cuda
from kimivl_lab.kernels.streams import StreamOrder
from kimivl_lab.moonvit.position_cache import PositionCache
from tests.conftest import pixels_for, relative_error, small_tower

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.marked))


class Streams:
    """torch.cuda with named streams: `log` holds waits and uses, in order."""

    def __init__(self, monkeypatch):
        self.log, self.marks, self.capturing = [], 0, False
        self.current = Stream("a", self.log)
        self.named, outer = {"a": self.current}, self

        class Event:
            marked = None

            def record(self, stream):
                outer.marks += 1
                self.marked = f"{stream.name}{outer.marks}"

        for name, value in {
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: self.capturing,
            "current_stream": lambda device=None: self.current,
            "Event": Event,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def on(self, name):
        before, self.current = self.current, self.named.setdefault(name, Stream(name, self.log))
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


class Recorded(torch.Tensor):
    """A host tensor that says it is on a GPU, and records `record_stream`."""

    device = GPU
    is_cuda = True

    def record_stream(self, stream):  # ty: ignore[lost-keyword-for-regular-parameter]
        stream.log.append((stream.name, "reads", tuple(self.shape)))


def recorded(*shape):
    return torch.zeros(shape).as_subclass(Recorded)


def test_a_cache_entry_is_read_behind_the_event_of_the_stream_that_wrote_it(streams):
    cache = PositionCache()
    cache.get("grid", lambda: recorded(2, 3))
    cache.get("grid", pytest.fail)
    assert streams.log == [], "the same stream is in order"
    with streams.on("b"):
        cache.get("grid", pytest.fail)
        assert streams.log == [("b", "waits for", "a1"), ("b", "reads", (2, 3))]
        cache.get("other", lambda: (recorded(4), recorded(5)))
    del streams.log[:]
    cache.get("other", pytest.fail)
    assert streams.log == [("a", "waits for", "b2"), ("a", "reads", (4,)), ("a", "reads", (5,))]


def test_an_entry_that_goes_was_recorded_on_every_stream_that_found_it(streams):
    """Its memory is then not used again before they have read it, though the cache forgets it at once."""
    cache = PositionCache(max_bytes=None, max_entries=1)
    cache.get(1, lambda: recorded(1))
    for name in "bcb":
        with streams.on(name):
            cache.get(1, pytest.fail)
    cache.get(2, lambda: recorded(2))
    readers = [entry[0] for entry in streams.log if entry[1:] == ("reads", (1,))]
    assert readers == ["b", "c", "b"] and len(cache) == 1


def test_nothing_is_asked_of_cuda_on_a_cpu_nor_inside_a_capture(streams):
    order = StreamOrder(torch.device("cpu"))
    order.mark()
    assert streams.marks == 0
    order = StreamOrder(GPU)
    order.mark()
    streams.capturing = True
    with streams.on("b"):
        order.wait()
        order.mark()
    assert streams.log == [] and streams.marks == 1


def test_a_cache_neither_keeps_nor_reads_inside_a_capture(streams):
    """The value of a captured operator is there at the first replay, and an entry that a graph reads may be dropped."""
    cache = PositionCache()
    kept = cache.get("grid", lambda: recorded(1))
    streams.capturing = True
    assert cache.get("grid", lambda: recorded(2)) is not kept
    cache.get("other", lambda: recorded(3))
    streams.capturing = False
    assert cache.get("grid", pytest.fail) is kept and len(cache) == 1


class OnGpu(EncoderCudaGraphRunner):
    """A runner on the CPU whose order is that of a GPU."""

    def reset(self):
        super().reset()
        self._order = StreamOrder(GPU)


@pytest.fixture
def runner(streams, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", Recorded.record_stream)
    monkeypatch.setattr("kimivl_lab.graphs.runner.reserve_pinned", lambda nbytes: None)  # a CPU cannot pin memory
    tower = small_tower()
    made, grids = OnGpu(tower, [4, 16], max_images=2), [(4, 4)]
    real = made.capture()
    write = type(real.inputs).write

    def watched(inputs, *arguments):
        streams.log.append((streams.current.name, "writes", "inputs"))
        return write(inputs, *arguments)

    monkeypatch.setattr(type(real.inputs), "write", watched)
    return made, pixels_for(grids), grids


def test_a_call_on_another_stream_waits_for_the_last_call_before_it_writes_the_inputs(runner, streams):
    made, pixels, grids = runner
    made(pixels, grids)
    assert streams.log == [("a", "writes", "inputs")], "the same stream is in order"
    after_first = f"a{streams.marks}"
    del streams.log[:]
    with streams.on("b"):
        got = made(pixels, grids)
        marked = f"b{streams.marks}"
    waits = [entry for entry in streams.log if entry[1] != "reads"]
    assert waits == [("b", "waits for", after_first), ("b", "writes", "inputs")]
    read = {entry[2] for entry in streams.log if entry[1] == "reads"}
    assert read == {tuple(buffer.shape) for buffer in made.capture().inputs.buffers.values()}
    del streams.log[:]
    made(pixels, grids)
    assert streams.log[0] == ("a", "waits for", marked), "the output was copied out before"
    with torch.no_grad():
        assert relative_error(got, made.tower(pixels, grids)) < 1e-5


def test_a_call_that_fails_midway_is_waited_for_too(runner, streams, monkeypatch):
    made, pixels, grids = runner
    before = streams.marks
    with monkeypatch.context() as patch:
        patch.setattr(type(made), "_replay", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made(pixels, grids)
    assert streams.marks == before + 1
    with streams.on("b"):
        made(pixels, grids)
    assert streams.log[0] == ("b", "waits for", f"a{before + 1}")


def test_no_two_runners_capture_on_one_stream(monkeypatch):
    """torch hands out 32 streams in turn; cuBLAS has one workspace for each."""
    handed = iter(range(10_000))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream {next(handed) % 32}")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(cuda, "_CAPTURE_STREAMS", {})
    backends = []
    for _ in range(8):
        backends.append(cuda.CudaBackend(GPU))
        for _ in range(31):  # the user's
            torch.cuda.Stream(GPU)
    streams = {backend.stream for backend in backends}
    assert len(streams) == 8
    for _ in range(5):
        backends.pop()
        backends.append(cuda.CudaBackend(GPU))
        assert {backend.stream for backend in backends} == streams, "each has a workspace that stays"


def test_a_copied_cache_has_no_events(streams):
    cache = PositionCache()
    cache.get("grid", lambda: recorded(2))
    assert len(copy.deepcopy(cache)) == 0


@pytest.mark.gpu
def test_calls_on_two_streams_give_the_features_of_one():
    tower, grids = small_tower().cuda(), [(10, 12)]
    runner = EncoderCudaGraphRunner(tower, [32], max_waste=None)
    batches = [pixels_for(grids, seed) for seed in range(20)]
    with torch.no_grad():
        want = [tower(pixels, grids) for pixels in batches]
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(3)], []
    for number, pixels in enumerate(batches):
        with torch.cuda.stream(streams[number % 3]):
            got.append(runner(pixels, grids))
    torch.cuda.synchronize()
    assert max(relative_error(one, other) for one, other in zip(got, want, strict=True)) < 1e-4
