"""Compiled blocks: the same values, one graph, and a fallback where there is no compiler."""

import pytest
import torch

from kimivl_lab import EncoderOptions
from kimivl_lab.graphs.stats import RunnerStats
from kimivl_lab.kernels import library
from kimivl_lab.kernels.dispatch import CompiledFunction, compile_errors, compile_unavailable
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_tower


def test_one_graph_serves_every_block_and_batch(monkeypatch):
    """Compiled without code generation: what is tested is the capture."""
    graphs = []

    def capture(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = CompiledFunction(type(tiny_tower().encoder.blocks[0]).forward, "a block")
    compiled.__dict__["_compiled"] = torch.compile(compiled.function, backend=capture, dynamic=True)
    monkeypatch.setattr("kimivl_lab.moonvit.layers.compiled_block", compiled)
    tower, eager = (tiny_tower(seed=1, options=EncoderOptions(compile=flag)) for flag in (True, False))
    with torch.no_grad():
        for grids in (MIXED_GRIDS, [(4, 4), (8, 8)], [(2, 2)] * 3):
            pixels = pixels_for(grids)
            assert relative_error(tower(pixels, grids), eager(pixels, grids)) < 1e-5
    assert len(graphs) == 1
    nodes = [node for node in graphs[0].graph.nodes if "packed_attention" in str(node.target)]
    assert len(nodes) == 1, "attention is one node, whatever the images"


def test_W1_a_compiled_tower_has_the_eager_gradients(monkeypatch):
    compiled = CompiledFunction(type(tiny_tower().encoder.blocks[0]).forward, "a block")
    compiled.__dict__["_compiled"] = torch.compile(compiled.function, backend="aot_eager", dynamic=True)
    monkeypatch.setattr("kimivl_lab.moonvit.layers.compiled_block", compiled)
    tower, eager = (tiny_tower(seed=1, options=EncoderOptions(compile=flag)) for flag in (True, False))
    for model in (tower, eager):
        model(pixels_for(MIXED_GRIDS), MIXED_GRIDS).square().sum().backward()
    for (name, one), (_, other) in zip(tower.named_parameters(), eager.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None, name
        assert relative_error(one.grad, other.grad) < 1e-4, name
    assert compiled.works


def failing_backend(graph, inputs):
    raise RuntimeError("no compiler here")


def test_without_a_compiler_the_fallback_takes_over(caplog):
    function = CompiledFunction(lambda x: x + 1, "a sum", fallback=lambda x: x + 2)
    function.__dict__["_compiled"] = torch.compile(function.function, backend=failing_backend)
    assert function(torch.zeros(1)).item() == 2
    assert "a sum failed" in caplog.text
    assert function(torch.zeros(1)).item() == 2 and not function.works
    assert sum(count for text, count in compile_errors().items() if text.startswith("a sum: ")) == 1


@pytest.mark.parametrize(("device", "wanted"), [("cpu", ("g++",)), ("cuda", ("gcc", "triton"))])
def test_a_machine_that_cannot_compile_says_what_is_missing(device, wanted, monkeypatch):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = compile_unavailable(torch.device(device))
    assert reason and all(word in reason for word in wanted)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("pathlib.Path.exists", lambda path: True)
    assert compile_unavailable(torch.device(device)) is None


def test_what_runs_uncompiled_stands_below_a_runners_counters():
    function = with_compiled(Launches({0: OSError("no Python.h")}))
    assert function(0) == 2
    assert "not compiled: a sum: OSError: no Python.h (1 times)" in str(RunnerStats())


class Launches:
    """Compiled code whose n-th call raises `errors[n]`, if there is one."""

    def __init__(self, errors):
        self.errors, self.calls = errors, 0

    def __call__(self, x):
        self.calls += 1
        if error := self.errors.get(self.calls - 1):
            raise error
        return x + 1


def with_compiled(launches, fallback=lambda x: x + 2):
    function = CompiledFunction(lambda x: x + 1, "a sum", fallback=fallback)
    function.__dict__["_compiled"] = launches
    return function


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: no kernel image is available for execution on the device"),
        OSError("Python.h: No such file or directory"),
        ImportError("libcuda.so.1"),
        BrokenPipeError("a compile worker died"),
        TypeError("launcher() takes 17 arguments"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_error_of_a_first_launch_is_computed_without_the_compiler(error):
    function = with_compiled(Launches({0: error}))
    assert function(torch.zeros(1)).item() == 2
    assert list(function.errors.values()) == [1] and type(error).__name__ in next(iter(function.errors))


def test_one_bad_call_does_not_turn_compiled_code_off_for_good():
    launches = Launches({0: OSError("busy"), 2: OSError("busy")})
    function, calls = with_compiled(launches), 0
    for tries, pause in ((1, 1000), (3, 10_000)):
        while launches.calls < tries:  # from the second on: one that works, then one that fails
            function(0)
            calls += 1
        for _ in range(pause):
            assert function(0) == 2
        assert function.works and launches.calls == tries
    assert calls == 3 and function(0) == 1 and function.errors == {"OSError: busy": 2}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=str,
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_devices_errors_pass_through(error, wrapped):
    raised = error
    if wrapped:
        raised = RuntimeError("backend='inductor' raised")
        raised.__cause__ = error
    function = with_compiled(Launches({0: raised}))
    with pytest.raises(type(raised)):
        function(0)
    assert function.works and not function.errors


def test_kernels_that_cannot_be_built_are_said_where_a_user_sees_it(monkeypatch, caplog):
    """A process tries once: a compiler that took too long leaves it with slower kernels to its end."""

    def too_slow(*arguments):
        raise library.BuildError("cc took more than 120 s")

    monkeypatch.setattr(library, "kernel_isa", lambda name: "avx2")
    monkeypatch.setattr(library, "_build_unless_there", too_slow)
    reason = library._load.__wrapped__("simd")
    assert isinstance(reason, str) and "cc took more than 120 s" in reason and reason in caplog.text


def test_the_functions_own_errors_pass_through():
    def broken(x):
        raise KeyError("mine")

    function = with_compiled(broken, fallback=broken)
    with pytest.raises(KeyError, match="mine"):
        function(torch.zeros(1))
    assert function.works and not function.errors
