"""The sync counter: every kind of wait with its line, what only looks like one, and the CUDA side of it."""

import inspect
import json
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import rnn

from kimivl_lab import count_host_syncs
from kimivl_lab.syncs import cuda as cuda_syncs
from kimivl_lab.syncs import rules
from kimivl_lab.syncs.counter import HostSyncCounter, HostSyncError, on_device
from tests.conftest import tiny_tower


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


# --- small functions -------------------------------------------------------------------------------------------------

# x: 6 float32 0..5, i: int64 2, counts: 5 int64 1, 2, 0, 1, 1, on the device; host: 6 float32 on the host.
SYNCS = {
    "item": ("x[0].item()", {"item": 1}),
    "tolist": ("x.tolist()", {"tolist": 1}),
    "bool": ("bool(x.sum() > 0)", {"bool": 1}),
    "an if": ("1 if x.max() > 0 else 0", {"bool": 1}),
    "a while": ("any(v > 4 for v in x)", {"bool": 6}),
    "int": ("int(x.max())", {"int": 1}),
    "float": ("float(x[1])", {"float": 1}),
    "index of a list": ("[1, 2, 3][i]", {"index": 1}),
    "range": ("list(range(i))", {"index": 1}),
    "slice bound": ("x[:i]", {"index": 1}),
    "selected row": ("x[i]", {"index": 1}),
    "a number that is a tensor": ("torch.full((2,), x[0])", {"item": 1}),
    "arange to a tensor": ("torch.arange(0, i)", {"item": 1}),
    "membership": ("x[0] in x", {"item": 1}),
    "iteration": ("[int(v) for v in x]", {"int": 6}),
    "maximum of a sequence": ("max(x)", {"bool": 5}),
    "cpu": ("x.cpu()", {"copy to host": 1}),
    "to cpu": ("x.to('cpu')", {"copy to host": 1}),
    "to a host tensor's place": ("x.to(host)", {"copy to host": 1}),
    "copy into the host": ("host.clone().copy_(x)", {"copy to host": 1}),
    "as_tensor on the host": ("torch.as_tensor(x, device='cpu')", {"copy to host": 1}),
    "copy from the host": ("x.clone().copy_(host)", {"copy to device": 1}),
    "to cuda": ("host.to('cuda')", {"copy to device": 1}),
    "cuda": ("host.cuda()", {"copy to device": 1}),
    "tensor of a list": ("torch.tensor([1, 2], device='cuda')", {"copy to device": 1}),
    "tensor of an array": ("torch.as_tensor(np.arange(3), device='cuda')", {"copy to device": 1}),
    "new_tensor": ("x.new_tensor([1, 2])", {"copy to device": 1}),
    "list as index": ("x[[0, 2]]", {"copy to device": 1}),
    "host tensor as index": ("x[torch.tensor([0, 2])]", {"copy to device": 1}),
    "one number written": ("x.clone().__setitem__(0, 3.0)", {"copy to device": 1}),
    "pinned, but blocking": ("host.pin_memory().to('cuda')", {"copy to device": 1}),
    "where with a host number": ("torch.where(x > 2, x, torch.tensor(0.0))", {"copy to device": 1}),
    "list of numbers": ("torch.tensor([x[0], x[1]])", {"item": 2}),
    "nonzero": ("x.nonzero()", {"nonzero": 1}),
    "where": ("torch.where(x > 1)", {"nonzero": 1}),
    "boolean mask": ("x[x > 2]", {"boolean mask": 1}),
    "two masks": ("torch.ones(6, 6, device='cuda')[x > 2, x > 2]", {"boolean mask": 2}),
    "masked_select": ("x.masked_select(x > 2)", {"boolean mask": 1}),
    "mask written by a device value": ("x.clone().__setitem__(x > 9, x[0])", {"boolean mask": 1}),
    "unique": ("torch.unique(x)", {"unique": 1}),
    "unique_consecutive": ("torch.unique_consecutive(x)", {"unique": 1}),
    "repeat_interleave": ("torch.repeat_interleave(counts, counts)", {"repeat": 2}),
    "bincount": ("torch.bincount(counts)", {"bincount": 2}),
    "equal": ("torch.equal(x, x + 1)", {"equal": 1}),
    "allclose": ("torch.allclose(x, x + 1)", {"equal": 1}),
    "argwhere": ("torch.argwhere(x)", {"nonzero": 1}),
    "one_hot of unknown size": ("F.one_hot(counts)", {"item": 1}),
    "segment_reduce": (
        "torch.segment_reduce(x, 'sum', lengths=torch.tensor([2, 4], device='cuda'))",
        {"copy to device": 1, "segment_reduce": 2},
    ),
    "histc of unknown range": ("torch.histc(x, 4)", {"histc": 2}),
    "bincount of bytes": ("torch.bincount(counts.to(torch.uint8))", {"bincount": 1}),
    "one sample": ("torch.multinomial(x, 1)", {"multinomial": 2}),
    "samples without replacement": ("torch.multinomial(x, 2)", {"multinomial": 2}),
    "searchsorted with a sorter": ("torch.searchsorted(x, x, sorter=x.argsort())", {"searchsorted": 2}),
    "filled with a device value": ("x.masked_fill(x > 2, x[0])", {"item": 1}),
    "line between device values": ("torch.linspace(x[0], x[5], 4)", {"item": 2}),
    "normal with given spreads": ("torch.normal(x, x)", {"bool": 1}),
    "is_nonzero": ("torch.is_nonzero(x[0])", {"item": 1}),
    "unique with counts": ("torch.unique(x, return_inverse=True, return_counts=True)", {"unique": 1}),
    "packed sequences, to be sorted": (
        "rnn.pack_padded_sequence(x.view(3, 2), [1, 3], enforce_sorted=False)",
        {"copy to device": 1},
    ),
    "print": ("str(x)", {"print": 1}),
    "format": ("f'{x[0]:.1f}'", {"print": 1}),
}
LOOKALIKES = {
    "item of a host tensor": "host[0].item()",
    "host tensor to a list": "host.tolist()",
    "cpu of a host tensor": "host.cpu()",
    "nonzero of a host tensor": "host.nonzero()",
    "mask on the host": "host[host > 2]",
    "int of a host tensor": "int(host.max())",
    "shape": "x.shape[0] * x.numel() + x.dim() + len(x)",
    "slice by integers": "x[1:3]",
    "element by an integer": "x[2]",
    "iteration alone": "list(x)",
    "split by integers": "x.split([2, 4])",
    "device tensor as index": "x[counts]",
    "index_select": "x.index_select(0, counts)",
    "gather": "x.gather(0, counts)",
    "mask filled with a number": "x.clone().__setitem__(x > 2, 0.0)",
    "slice filled with a number": "x.clone().__setitem__(slice(0, 3), 1.0)",
    "where with both branches": "torch.where(x > 2, x, 0.0)",
    "host number in a product": "x * torch.tensor(2.0)",
    "new tensors on the device": "torch.zeros(3, device='cuda') + torch.arange(3, device=x.device)",
    "repeat_interleave of known size": "torch.repeat_interleave(counts, counts, output_size=5)",
    "repeat by an integer": "x.repeat_interleave(2)",
    "pinned and not blocking": "host.pin_memory().to('cuda', non_blocking=True)",
    "to where it is": "x.to('cuda').to(torch.float64)",
    "comparison with itself": "torch.equal(x, x)",
    "nothing copied": "x[:0].tolist() + x[:0].cpu().tolist()",
    "complex view": "torch.view_as_complex(x.view(3, 2)).abs()",
    "the largest, kept on the device": "x.max()",
    "one_hot of known size": "F.one_hot(counts, 3)",
    "segment_reduce, unchecked": "torch.segment_reduce(x, 'sum', lengths=counts[:2] * 2, unsafe=True)",
    "histc of known range": "torch.histc(x, 4, min=0, max=5)",
    "many samples with replacement": "torch.multinomial(x, 3, replacement=True)",
    "quantile, its range unchecked": "torch.quantile(x, x[:2])",
    "searchsorted and bucketize": "torch.searchsorted(x, x), torch.bucketize(x, x)",
    "masked_scatter": "x.masked_scatter(x > 2, x)",
    "isin a few": "torch.isin(x, x[:2])",
    "nonzero of known size": "torch.nonzero_static(x, size=6)",
    "filled with a host value": "x.masked_fill(x > 2, torch.tensor(1.0))",
    "tensor_split at host positions": "torch.tensor_split(x, torch.tensor([2, 4]))",
    "scaled_dot_product_attention": "F.scaled_dot_product_attention(*[x.view(1, 1, 3, 2)] * 3)",
    "a bag": "F.embedding_bag(counts.view(1, 5), x.view(3, 2))",
    "dropout, convolution and norm": "F.group_norm(F.conv1d(F.dropout(x.view(1, 1, 6)), x.view(1, 1, 6)[..., :2]), 1)",
    "packed sequences": "rnn.pack_padded_sequence(x.view(3, 2), [3, 1])",
    "packed sequences, back": ("rnn.pad_packed_sequence(rnn.pack_padded_sequence(x.view(3, 2), [3, 1]))"),
    "streams in order": "torch.cuda.Stream().wait_stream(torch.cuda.current_stream()), torch.cuda.Event().record()",
    "padding and sorting": "F.pad(x, (1, 0)).sort().values.cumsum(0)",
}


UNKNOWN = {
    "matrix inverse": ("torch.linalg.inv(x[:4].view(2, 2) + 1)", ["linalg_inv_ex"], {"linalg check": 1}),
    "unique rows": ("torch.unique(x.view(2, 3), dim=0)", ["unique_dim"], {}),
    "isin many": ("torch.isin(x, x.repeat(9))", ["isin"], {}),
    "a sparse tensor": ("x.view(2, 3).to_sparse()", ["_to_sparse"], {}),
    "a transform": ("torch.fft.fft(x)", ["_fft_r2c"], {}),
    "recurrence": ("torch.nn.LSTM(2, 3).to('cuda')(x.view(3, 2))[0]", ["lstm"], {"copy to device": 4}),
    "ctc": ("F.ctc_loss(x.view(3, 1, 2), counts[:1], (3,), (1,))", ["ctc_loss"], {}),
}


def inputs(pretended):
    host = torch.arange(6.0)
    away = [torch.arange(6.0), torch.tensor(2), torch.tensor([1, 2, 0, 1, 1])]
    names = dict(zip(("x", "i", "counts"), on_device(away, pretended=pretended), strict=True))
    return {**names, "host": host, "torch": torch, "np": np, "F": F, "rnn": rnn}


@pytest.mark.parametrize("name", SYNCS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad], ids=["inference", "grad"])
def test_every_sync_is_counted_by_its_kind(name, mode):
    expression, kinds = SYNCS[name]
    with mode():
        counter = count_host_syncs(eval, expression, inputs(pretended=True), pretended=True)
    assert counter.by_kind == kinds
    assert (counter.total, counter.unknown) == (sum(kinds.values()), [])
    assert counter.bytes_to_host + counter.bytes_to_device > 0


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_looks_like_a_sync_and_is_none(name):
    with HostSyncCounter(pretended=True) as counter:
        eval(LOOKALIKES[name], inputs(pretended=True))
    assert (counter.total, counter.staged, counter.unknown) == (0, [], [])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SYNCS, *LOOKALIKES])
def test_torchs_debug_mode_counts_the_same(name):
    expression, kinds = SYNCS[name] if name in SYNCS else (LOOKALIKES[name], {})
    with HostSyncCounter(pretended=False) as counter:
        eval(expression, inputs(pretended=False))
    assert counter.total == sum(kinds.values())
    assert counter.staged == []


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_reported_and_not_counted_as_nothing(name):
    expression, operators, kinds = UNKNOWN[name]
    counter = count_host_syncs(eval, expression, inputs(pretended=True), pretended=True)
    assert [event.kind for event in counter.unknown] == operators
    assert counter.by_kind == kinds
    assert f"{operators[0]} at " in str(counter)


def test_every_operator_that_torch_tags_as_reading_has_a_rule_or_is_unknown():
    reading = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    for full_name in torch._C._dispatch_get_all_op_names():
        name, _, overload = full_name.removeprefix("aten::").partition(".")
        if full_name.startswith("aten::") and reading & set(
            getattr(getattr(torch.ops.aten, name), overload or "default").tags
        ):
            assert rules.known().get(name) != "never waits", name


def test_the_rules_count_what_a_different_code_path_of_the_cpu_hides():
    labels = torch.tensor([1, 2, 0])
    counter = count_host_syncs(F.one_hot, on_device(labels, pretended=True), 4, pretended=True)
    assert torch.equal(counter.value.cpu(), F.one_hot(labels, 4))
    assert (counter.launches, counter.bytes_to_host) == (2, 0)  # zeros, scatter_
    counter = count_host_syncs(F.one_hot, on_device(labels, pretended=True), pretended=True)
    assert torch.equal(counter.value.cpu(), F.one_hot(labels))
    assert (counter.launches, counter.bytes_to_host) == (3, 8)
    with HostSyncCounter(pretended=True), pytest.raises(RuntimeError, match="to be on cpu"):
        torch.tensor_split(torch.ones(6, device="cuda"), torch.tensor([2, 4], device="cuda"))
    with HostSyncCounter(pretended=True), pytest.raises(RuntimeError, match="CPU tensor"):
        rnn.pack_padded_sequence(torch.ones(3, 2, 1, device="cuda"), torch.tensor([3, 1], device="cuda"))


def test_synchronize_of_the_device_of_streams_and_of_events_is_counted():
    def synchronize():
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(torch.cuda.Stream()) as stream:
            event.record()
            torch.ones(3, device="cuda").record_stream(stream)
        torch.cuda.synchronize()  # here
        torch.cuda.current_stream().synchronize()
        stream.synchronize()
        event.synchronize()
        torch.accelerator.synchronize()
        later = stream.record_event()
        return event.query() and event.elapsed_time(later) >= 0

    original = torch.cuda.synchronize
    counter = count_host_syncs(synchronize, pretended=True)
    assert counter.by_kind == {"synchronize": 5} and counter.value
    lines, first = inspect.getsourcelines(synchronize)
    line = first + next(n for n, text in enumerate(lines) if "# here" in text)
    assert [event.line for event in counter.events] == list(range(line, line + 5))
    with pytest.raises(HostSyncError, match=f"synchronize at .*test_syncs.py:{line}"):
        count_host_syncs(synchronize, error=True, pretended=True)
    assert torch.cuda.synchronize is original


def test_a_function_that_uses_no_device_tensor_is_an_error_that_says_how_to_move_it():
    with pytest.raises(ValueError, match=r"mean.*on_device.*kimivl_lab.syncs.counter"):
        count_host_syncs(torch.mean, torch.ones(3), pretended=True)
    with pytest.raises(ValueError, match="MoonVitPretrainedModel"):
        count_host_syncs(tiny_tower(), torch.ones(24, 3, 14, 14), [(4, 6)])
    moved = on_device(torch.ones(3), pretended=True)
    assert count_host_syncs(torch.mean, moved, pretended=True).total == 0


def test_the_counter_prints_kind_file_and_line():
    x = on_device(torch.arange(6.0), pretended=True)
    text = str(count_host_syncs(lambda: (x.max().item(), torch.fft.fft(x)), pretended=True))
    assert re.search(r"1 host syncs\n  item at test_syncs.py:\d+ in ", text)
    assert re.search(r"1 unknown operators\n  _fft_r2c at test_syncs.py:\d+ in ", text)


@pytest.mark.parametrize(
    ("function", "arguments", "kind"),
    [
        ("item", (torch.ones(()),), "item"),
        ("where", (torch.ones(3) > 0,), "nonzero"),
        ("where", (torch.ones(3) > 0, torch.ones(3), 0.0), None),
        ("repeat_interleave", (torch.ones(3), torch.tensor([1, 2, 0])), "repeat"),
        ("repeat_interleave", (torch.tensor([1, 2, 0]),), "repeat"),
        ("repeat_interleave", (torch.ones(3), 2), None),
        ("__getitem__", (torch.ones(3), torch.ones(3) > 0), "boolean mask"),
        ("__getitem__", (torch.ones(3), torch.tensor([0, 1])), None),
        ("one_hot", (torch.tensor([1]),), "item"),
        ("one_hot", (torch.tensor([1]), 3), None),
        ("multinomial", (torch.ones(3), 2, True), None),
        ("add", (torch.ones(3), 1), None),
    ],
)
def test_the_table_answers_for_torch_functions(function, arguments, kind):
    assert rules.value_read_by(function, arguments, {}) == kind


def test_values_read_are_right_and_stay_marked():
    x = on_device(torch.arange(6.0), pretended=True)
    assert (x.device.type, x.is_cuda, x.get_device(), x.dtype) == ("cuda", True, 0, torch.float32)
    assert [x[2].item(), int(x.max()), x[x > 3].tolist(), x.cpu().tolist()[:2]] == [2.0, 5, [4.0, 5.0], [0.0, 1.0]]
    for made in (x + 1, x[1:], x.view(2, 3).T, x.max(), x.sort().values, torch.cat([x, x]), x.new_zeros(2), x.double()):
        assert made.device == x.device
    assert x.cpu().device.type == "cpu" and "device='cuda:0'" in repr(x)
    y = x.clone()
    y[1:3] += 10
    assert y.tolist() == [0, 11, 12, 3, 4, 5] and x.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_a_gpu_refuses_is_refused():
    x, host = on_device(torch.arange(6.0), pretended=True), torch.arange(6.0)
    with pytest.raises(RuntimeError, match="same device.*add"):
        x + host
    with pytest.raises(TypeError, match="cuda:0.*numpy"):
        x.numpy()
    with pytest.raises(TypeError, match="cuda:0.*numpy"):
        np.asarray(x)
    with HostSyncCounter(pretended=True), pytest.raises(RuntimeError, match="only host memory"):
        x.pin_memory()


def test_copies_are_counted_in_bytes_and_staged_ones_apart():
    host = torch.zeros(10, dtype=torch.float64)
    with HostSyncCounter(pretended=True) as counter:
        host.to("cuda", non_blocking=True)
        host.pin_memory().to("cuda", non_blocking=True)
        host.pin_memory()[::2].to("cuda", non_blocking=True)  # made dense in pageable memory first
        device = torch.empty(10, pin_memory=True).to("cuda", torch.float64, non_blocking=True)  # converted there
    assert counter.total == 0
    assert [event.kind for event in counter.staged] == ["copy to device"] * 2
    assert counter.staged[0].line == counter.staged[1].line - 2
    assert counter.bytes_to_device == 80 + 80 + 40 + 40
    with HostSyncCounter(pretended=True) as counter:
        device.to("cpu", non_blocking=True)
        host.copy_(device, non_blocking=True)
    assert (counter.total, len(counter.staged), counter.bytes_to_host) == (0, 1, 160)


def test_launches_are_operators_that_do_something():
    x = on_device(torch.arange(6.0), pretended=True)
    for expression, launches in {
        "x + 1": 1,
        "(x * 2 + 1).relu_()": 3,
        "x.view(2, 3).T[1:].unsqueeze(0)": 0,
        "x.clone(), x.double(), x.float()": 2,
        "torch.empty(3, device='cuda'), torch.empty_like(x)": 0,
        "torch.zeros(3, device='cuda'), torch.arange(3, device='cuda')": 2,
        "x[:0] + 1": 0,
        "F.linear(x.view(2, 3), x.view(2, 3))": 1,
        "x.cpu()": 0,
    }.items():
        counter = count_host_syncs(eval, expression, {"x": x, "torch": torch, "F": F}, pretended=True)
        assert counter.launches == launches, expression


def test_the_first_sync_raises_and_names_its_line():
    x = on_device(torch.arange(6.0), pretended=True)
    reached = []

    def read_twice():
        reached.append("before")
        x.max().item()  # this one
        reached.append("after")
        x.min().item()

    lines, first = inspect.getsourcelines(read_twice)
    line = first + next(n for n, text in enumerate(lines) if "this one" in text)
    with pytest.raises(HostSyncError, match=rf"item at .*test_syncs.py:{line} in .*read_twice") as caught:
        count_host_syncs(read_twice, error=True, pretended=True)
    assert reached == ["before"]
    assert (caught.value.event.line, caught.value.event.file) == (line, __file__)
    counter = count_host_syncs(read_twice, pretended=True)
    assert [event.line for event in counter.events] == [line, line + 2]


def test_on_a_gpu_a_module_is_copied_once_and_not_again(monkeypatch):
    """No copy on the host first; a module on the GPU already is not copied at all. The GPU is pretended by clones."""
    tower, moved = tiny_tower(), []

    def cuda(tensor):
        moved.append(tensor.shape)
        return tensor.clone()

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cuda", cuda)
        patch.setattr(torch.nn.Module, "cuda", lambda module: module)
        for kind in (torch.Tensor, torch.nn.Parameter):
            patch.setattr(kind, "__deepcopy__", lambda tensor, memo: pytest.fail("copied on the host"))
        away = on_device(tower, pretended=False)
        assert len(moved) == len(list(tower.parameters()))
        assert [name for name, _ in away.named_parameters()] == [name for name, _ in tower.named_parameters()]
        for (_, one), (_, other) in zip(away.named_parameters(), tower.named_parameters(), strict=True):
            assert one is not other and torch.equal(one, other) and one.requires_grad == other.requires_grad
        patch.setattr(torch.Tensor, "is_cuda", True)
        assert on_device(away, pretended=False) is away


def test_on_device_moves_everything_inside():
    tower = tiny_tower()
    metadata = tower.prepare_encoder_metadata([(4, 6)])
    moved = on_device({"tower": tower, "inputs": [metadata, (torch.ones(2), "name", 3)]}, pretended=True)
    assert moved["tower"].device.type == "cuda" and tower.device.type == "cpu"
    assert {parameter.device.type for parameter in moved["tower"].parameters()} == {"cuda"}
    assert list(moved["tower"].state_dict()) == list(tower.state_dict())
    weight = "encoder.blocks.0.wqkv.weight"
    assert moved["tower"].get_parameter(weight).data_ptr() == tower.get_parameter(weight).data_ptr()
    assert moved["inputs"][0].cu_seqlens.device.type == "cuda" and moved["inputs"][0].grid_hws == ((4, 6),)
    assert moved["inputs"][1][0].device.type == "cuda" and moved["inputs"][1][1:] == ("name", 3)


@torch.enable_grad()
def test_a_module_moves_and_trains_on_the_pretended_device():
    with HostSyncCounter(pretended=True) as counter:
        layer = torch.nn.Linear(3, 4).to("cuda")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        before = layer.weight.detach().clone()
        layer(torch.ones(2, 3, device="cuda")).sum().backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), max_norm=100)  # groups its tensors by device
        optimizer.step()
        grad = layer.weight.grad
    assert (counter.by_kind, counter.unknown) == ({"copy to device": 2}, [])
    assert grad is not None and grad.device.type == "cuda"
    assert torch.allclose(layer.weight, before - 0.2)


# --- the CUDA side, without one --------------------------------------------------------------------------------------


@pytest.fixture
def debug_mode(monkeypatch):
    """torch's debug mode as far as the counter sees it: `reading(x)` warns or raises as a reading operator would."""
    state = {"mode": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: state["mode"])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: state.update(mode=mode))

    def item(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(item, (x,), x)
        if state["mode"] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if state["mode"] == "warn":
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        return x.item()

    return state, item


def test_the_debug_modes_warnings_become_events(debug_mode, monkeypatch):
    state, item = debug_mode
    trace = [
        {"cat": "kernel", "name": "gemm"},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 100}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 8}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 64}},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel"},
    ]

    class Profile:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def export_chrome_trace(self, path):
            with open(path, "w") as file:
                json.dump({"traceEvents": trace}, file)

    monkeypatch.setattr(cuda_syncs, "profile", Profile)
    with pytest.warns(UserWarning, match="another"), HostSyncCounter() as counter:
        assert state["mode"] == "warn"
        for _ in range(2):
            item(torch.ones(()))
        warnings.warn("another", stacklevel=1)
    assert state["mode"] == 0
    assert [(event.kind, event.file) for event in counter.events] == [("item", __file__)] * 2
    assert {event.function for event in counter.events} == {"debug_mode.<locals>.item"}
    assert (counter.launches, counter.bytes_to_device, counter.bytes_to_host) == (2, 100, 8)


def test_the_debug_modes_error_names_the_line(debug_mode):
    state, item = debug_mode
    with pytest.raises(HostSyncError, match="item at .*test_syncs.py"), HostSyncCounter(error=True):
        item(torch.ones(()))
    assert state["mode"] == 0
    with pytest.raises(RuntimeError, match="shape"), HostSyncCounter(error=True):
        torch.ones(3).view(2, 2)


def test_synchronize_counts_once_on_a_gpu_whether_the_debug_mode_sees_it_or_not(debug_mode, monkeypatch):
    _, item = debug_mode
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: item(torch.ones(())))
    stream: Any = None
    counter = HostSyncCounter(pretended=True)
    with cuda_syncs.CudaWatch(counter, error=False, profiled=False):
        torch.cuda.synchronize()  # the debug mode does not see it
        torch.cuda.Stream.synchronize(stream)  # it does
    assert counter.by_kind == {"synchronize": 2} and counter.touched
    with pytest.raises(HostSyncError, match="synchronize at .*test_syncs.py"), HostSyncCounter(error=True):
        torch.cuda.synchronize()
