"""What a capture records, shares and refuses."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from kimivl_lab import EncoderCudaGraphRunner, EncoderOptions
from kimivl_lab.graphs.cuda import CudaBackend
from kimivl_lab.graphs.guards import GraphCaptureError
from kimivl_lab.graphs.inputs import TowerGraphs
from kimivl_lab.graphs.runner import resolve_backend
from kimivl_lab.graphs.trace import TraceBackend
from kimivl_lab.graphs.trace_program import MemoryPool
from kimivl_lab.moonvit.model import MoonVitPretrainedModel
from tests.conftest import pixels_for, relative_error, small_tower


def capture(forward, *tensors, backend=None, allow_collectives=False):
    inputs = {f"input_{number}": tensor for number, tensor in enumerate(tensors)}
    return (backend or TraceBackend()).capture(forward, inputs, dict, allow_collectives)


# --- programs --------------------------------------------------------------------------------------------------------


def test_a_program_reads_its_inputs_where_they_lie_and_runs_no_module(monkeypatch):
    layer = torch.nn.Linear(4, 3)
    x = torch.randn(5, 4)
    with torch.no_grad():
        graph = capture(lambda x: torch.nn.functional.gelu(layer(x), approximate="tanh") + 1, x)
    monkeypatch.setattr(layer, "forward", None)
    for seed in range(3):  # with gradients on
        x.copy_(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        want = torch.nn.functional.gelu(x @ layer.weight.T + layer.bias, approximate="tanh") + 1
        assert relative_error(graph.output, want) < 1e-6 and not graph.output.requires_grad


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: (x * 2).t() + x.t(),
        lambda x: x.exp(),
        lambda x: torch.cat((x, x)) * float("inf"),
        lambda x: x.clone().mul_(3)[1:].add_(1),
        lambda x: torch.stack(x.unbind(1)).softmax(0),
        lambda x: torch.empty_like(x).copy_(x).view(-1)[::2],
        lambda x: x.new_zeros(7, 2),
        lambda x: (x + x.sum(0, keepdim=True)).unsqueeze(0).expand(2, -1, -1),
    ],
)
def test_views_updates_in_place_and_fresh_results(forward):
    backend, x = TraceBackend(), torch.randn(6, 4)
    graph = capture(forward, x, backend=backend)
    for _ in range(2):
        x.normal_()
        backend.poison()
        kept = x.clone()
        graph.replay()
        assert torch.equal(graph.output, forward(x.clone())) and torch.equal(x, kept)
    assert graph.output.data_ptr() != x.data_ptr()


def test_programs_share_a_pool_and_may_run_in_any_order():
    backend, inputs = TraceBackend(), [torch.randn(rows, 8) for rows in (32, 16, 4)]
    weight = torch.randn(8, 8)
    graphs, nbytes = [], []
    for x in inputs:
        graphs.append(capture(lambda x: (x @ weight + 1) * (x + 2) + x, x, backend=backend))
        nbytes.append(backend.nbytes)
    assert nbytes[0] > 0 and nbytes == nbytes[:1] * 3
    for index in (2, 0, 1, 2, 1, 0):
        graphs[index].replay()
        x = inputs[index]
        assert torch.allclose(graphs[index].output, (x @ weight + 1) * (x + 2) + x, atol=1e-5)


def test_fresh_results_are_freed_after_their_last_use():
    graph = capture(lambda x: x.exp().exp().exp().sum(0), torch.randn(3, 3))
    lines = graph.kept.source.splitlines()
    made = {line.split(" = ")[0] for line in lines if " = " in line}
    deleted = {line.removeprefix("del ") for line in lines if line.startswith("del ")}
    assert len(made) == 4 and len(made - deleted) == 1, "all but the result"
    assert graph.kept.operators == 4


def test_blocks_of_a_pool():
    pool = MemoryPool()
    large, small = pool.take(1000), pool.take(10)
    assert (large.nbytes, small.nbytes, pool.nbytes) == (1024, 64, 1088)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(60) is small and pool.take(60) is large and pool.take(1).nbytes == 64
    pool.reuse()
    assert pool.take(1024) is large and pool.nbytes == 1152


def test_backends_by_name_and_device():
    assert resolve_backend("auto", torch.device("cpu")).name == resolve_backend("trace", torch.device("cpu")).name
    with pytest.raises(ValueError, match="'cuda' with a tower on cpu"):
        resolve_backend("cuda", torch.device("cpu"))
    with pytest.raises(ValueError, match="'trace' with a tower on cuda"):
        resolve_backend("trace", torch.device("cuda"))
    with pytest.raises(ValueError, match="unknown graph backend 'graph'"):
        resolve_backend("graph", torch.device("cpu"))


# --- what is refused -------------------------------------------------------------------------------------------------


class Planted(MoonVitPretrainedModel):
    """A tower that does one more thing to its features."""

    plant = staticmethod(lambda x: None)

    def forward(self, *args, **kwargs):
        x = super().forward(*args, **kwargs)
        self.plant(x)
        return x


def planted(plant, **options):
    tower = Planted(small_tower().config, EncoderOptions(**options)).eval()
    tower.plant = plant
    return tower


READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: 1 if x.sum() > 0 else 2,
    "float": lambda x: float(x.sum()),
    "index": lambda x: [1, 2][x.long().sum() * 0],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "getitem": lambda x: x[x > 0],
    "nonzero": lambda x: torch.nonzero(x),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: torch.unique(x),
    "repeat_interleave": lambda x: x[:, 0, 0].repeat_interleave((x[:, 0, 0] > 0).long()),
    "equal": lambda x: torch.equal(x, x + 1),
    "format": lambda x: f"{x}",
}


@pytest.mark.parametrize("read", READS)
def test_a_host_read_is_refused_and_its_line_named(read):
    line = READS[read].__code__.co_firstlineno
    with pytest.raises(GraphCaptureError, match=rf"{read}\(\) reads a device value at .*{__name__[6:]}.py:{line} in"):
        EncoderCudaGraphRunner(planted(READS[read]), [4]).capture()


@pytest.mark.gpu
@pytest.mark.parametrize("read", ["item", "getitem"])
def test_on_a_gpu_too(read):
    tower = planted(READS[read]).to(device="cuda", dtype=torch.bfloat16)
    with pytest.raises(GraphCaptureError, match=rf"{__name__[6:]}.py:{READS[read].__code__.co_firstlineno} in"):
        EncoderCudaGraphRunner(tower, [4]).capture()
    tower.plant = lambda x: None
    EncoderCudaGraphRunner(tower, [4]).capture()


def test_host_lengths_would_be_frozen():
    with pytest.raises(GraphCaptureError, match="takes the images' lengths from the host"):
        EncoderCudaGraphRunner(small_tower(options=EncoderOptions(attention="eager")), [4]).capture()


def test_sdpa_off_the_cpu_takes_no_lengths_from_the_host():
    """So float32, for which a GPU has no packed kernel, can be captured there; "meta" stands for the GPU."""
    tower = small_tower(options=EncoderOptions(attention="sdpa")).to("meta")
    protocol = TowerGraphs(tower)
    inputs = protocol.prepare_encoder_cudagraph_capture_inputs(token_budget=4, max_images=2)
    with torch.no_grad():
        assert protocol.encoder_cudagraph_forward(inputs).shape == (4, 4, tower.config.hidden_size)


@pytest.mark.parametrize("options", [{"compile": True}, {"rope": "compiled"}])
def test_compiled_code_hides_its_operators(options):
    with pytest.raises(ValueError, match="backend='trace' records operators"):
        EncoderCudaGraphRunner(small_tower(options=EncoderOptions(**options)), [4]).capture()


def test_any_other_error_of_a_capture_names_its_line():
    def broken(x):
        if get_proxy_mode() is not None:
            raise RuntimeError("only while captured")

    line = broken.__code__.co_firstlineno + 2
    with pytest.raises(GraphCaptureError, match=f"only while captured at .*:{line} in broken"):
        EncoderCudaGraphRunner(planted(broken), [4]).capture()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_I9_I10_collectives_are_refused_before_they_are_launched(group):
    with pytest.raises(
        GraphCaptureError, match=r"collective c10d.allreduce_.* at .*test_graph_backends.py:\d+ in <lam"
    ):
        EncoderCudaGraphRunner(planted(lambda x: dist.all_reduce(x, group=group)), [4]).capture()
    with pytest.raises(ValueError, match="gloo cannot be captured, NCCL can"):
        EncoderCudaGraphRunner(small_tower(), [4], tensor_parallel_group=group)
    with pytest.raises(GraphCaptureError, match="a CPU's collectives are calls of the host"):
        capture(lambda x: x + 1, torch.zeros(1), allow_collectives=True)


class FakeCuda:
    """The calls of torch.cuda by which `CudaBackend` captures, for a machine without a GPU."""

    def __init__(self, monkeypatch):
        self.segments, self.capturing = [], False
        for name, value in {
            "graph_pool_handle": lambda: (0, 1),
            "Stream": lambda device: SimpleNamespace(wait_stream=lambda stream: None),
            "current_stream": lambda device: None,
            "stream": lambda stream: nullcontext(),
            "graph": self.graph,
            "CUDAGraph": SimpleNamespace,
            "memory_snapshot": lambda: self.segments,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr("kimivl_lab.graphs.cuda.HostSyncCounter", lambda **settings: nullcontext())
        monkeypatch.setattr("kimivl_lab.graphs.cuda._CAPTURE_STREAMS", {})  # no stub may be left for a real GPU

    @contextmanager
    def graph(self, graph, *args, **kwargs):
        graph.replay = lambda: None
        self.capturing = True
        yield
        self.capturing = False
        self.segments = [  # the capture has emptied the cache of eager memory, and made two segments of its own
            {"segment_pool_id": (0, 1), "total_size": 2**21},
            {"segment_pool_id": (0, 1), "total_size": 2**20},
            {"segment_pool_id": (0, 0), "total_size": 2**30},
        ]


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_on_a_gpu_collectives_are_refused_before_the_first_run_launches_one(monkeypatch, group):
    FakeCuda(monkeypatch)
    gathered = torch.zeros(2)
    with pytest.raises(GraphCaptureError, match=rf"collective c10d._allgather_base_.*{__name__[6:]}.* in <lambda>"):
        capture(
            lambda x: dist.all_gather_into_tensor(gathered, x, group=group),  # torch wraps it twice
            torch.ones(2),
            backend=CudaBackend(torch.device("cpu")),
        )
    assert gathered.tolist() == [0, 0]


def test_on_a_gpu_the_exact_callable_runs_uncompiled_warm_uncompiled_then_captured(monkeypatch):
    cuda, stance, runs = FakeCuda(monkeypatch), ["default"], []

    @contextmanager
    def set_stance(name):
        stance.append(name)
        yield
        stance.pop()

    monkeypatch.setattr(torch.compiler, "set_stance", set_stance)
    backend = CudaBackend(torch.device("cpu"))
    assert backend.nbytes == 0

    def forward(x):
        runs.append("captured" if cuda.capturing else stance[-1])
        return x + 1

    graph = capture(forward, torch.ones(2), backend=backend)
    assert runs == ["force_eager", "default", "force_eager", "captured"]
    assert torch.equal(graph.output, torch.full((2,), 2.0)) and backend.nbytes == 3 * 2**20


def test_after_a_refusal_the_tower_can_still_be_captured():
    tower = planted(READS["item"])
    runner = EncoderCudaGraphRunner(tower, [4])
    with pytest.raises(GraphCaptureError):
        runner.capture()
    tower.plant = lambda x: None
    pixels = pixels_for([(4, 4)])
    with torch.no_grad():
        assert relative_error(runner(pixels, [(4, 4)]), tower(pixels, [(4, 4)])) < 1e-5
