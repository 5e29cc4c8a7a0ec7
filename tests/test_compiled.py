"""Compiled blocks: the same values, one graph, and a fallback where there is no compiler."""

import pytest
import torch

from kimivl_lab import EncoderOptions
from kimivl_lab.kernels.dispatch import CompiledFunction
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


def test_the_functions_own_errors_pass_through():
    def broken(x):
        raise KeyError("mine")

    function = CompiledFunction(broken, "a broken one")
    function.__dict__["_compiled"] = broken
    with pytest.raises(KeyError, match="mine"):
        function(torch.zeros(1))
    assert function.works
