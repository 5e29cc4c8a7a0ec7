"""The GPU path of towers and runners from grids to features, with no GPU: the pretended device and a stub of captures.

A capture runs the forward as `CudaBackend` does, on tensors that say they are on a GPU; a replay computes the captured
forward anew from the static inputs. Compiling fails, so that "auto" falls back.
"""

import pytest
import torch

from kimivl_lab import EncoderCudaGraphRunner, EncoderOptions
from kimivl_lab.graphs.cuda import CudaBackend
from kimivl_lab.kernels import rotation
from kimivl_lab.kernels.dispatch import CompiledFunction
from kimivl_lab.syncs.counter import HostSyncCounter, on_device
from tests.conftest import pixels_for, relative_error, small_tower, tiny_encoder
from tests.test_graph_backends import FakeCuda

GRIDS = [(4, 6), (2, 2), (6, 4)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.fixture
def gpu(monkeypatch):
    """Everything of torch.cuda that a runner calls; a host sync inside the counter raises."""
    FakeCuda(monkeypatch)
    capture = CudaBackend.capture

    def replayed(self, forward, inputs, *more, **settings):
        graph = capture(self, forward, inputs, *more, **settings)

        def replay():
            graph.output.copy_(forward(*inputs.values()))

        return graph._replace(replay=replay)

    def no_compiler(*arguments):
        raise OSError("no C compiler")

    compiled = CompiledFunction(rotation.rotate_real, "a rotation", fallback=rotation.rotate_complex)
    compiled.__dict__["_compiled"] = no_compiler
    monkeypatch.setattr(CudaBackend, "capture", replayed)
    monkeypatch.setitem(rotation.ROPE_IMPLEMENTATIONS, "compiled", compiled)
    return HostSyncCounter(error=True, pretended=True)


def on_the_host(tensor):
    assert tensor.is_cuda
    return tensor.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [("auto", torch.float32), *((name, dtype) for name in ("sdpa", "sdpa_masked") for dtype in TOLERANCE)],
    ids=str,
)
def test_a_runner_replays_the_features_of_the_cpu(gpu, dtype, attention):
    here, pixels = small_tower().to(dtype), pixels_for(GRIDS, dtype=dtype)
    with torch.no_grad():
        want = here(pixels, GRIDS)
    there = on_device(small_tower(options=EncoderOptions(attention=attention)).to(dtype), pretended=True)
    with gpu:
        runner = EncoderCudaGraphRunner(there, [16, 64], max_waste=None)
        got = [runner(pixels, GRIDS), runner(pixels[24:28], GRIDS[1:2]), runner(pixels, GRIDS)]
    assert runner.backend.name == "cuda"
    assert (runner.stats.hits, runner.stats.misses) == (3, 0)
    assert runner.stats.total.pairs == 3 * 64**2, "one mask over all patches of the graph"
    for features, right in zip(got, (want, want[6:7], want), strict=True):
        assert relative_error(on_the_host(features), right) < TOLERANCE[dtype]


def test_images_that_no_graph_takes_run_eager_and_are_counted(gpu):
    tower = on_device(small_tower(), pretended=True)
    pixels = pixels_for([(10, 12)])
    with torch.no_grad():
        want = small_tower()(pixels, [(10, 12)])
    with gpu:
        runner = EncoderCudaGraphRunner(tower, [16])
        got = runner(pixels, [(10, 12)])
    assert runner.stats.eager["too large"].calls == 1
    assert relative_error(on_the_host(got), want) < 1e-5


def test_an_encoder_with_its_projector_runs_by_graphs(gpu):
    here, pixels = tiny_encoder(), pixels_for(GRIDS)
    with torch.no_grad():
        want = here(pixels, GRIDS)
    there = on_device(tiny_encoder(), pretended=True)
    with gpu:
        there.set_graphs(budgets=[16, 64], max_images=8)
        got = there(pixels, GRIDS)
    assert relative_error(on_the_host(got), want) < 1e-5
