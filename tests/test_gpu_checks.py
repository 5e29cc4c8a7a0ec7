"""The checks for a first GPU: a rehearsal on the CPU passes, and each finds the fault that it is for."""

import json

import pytest
import torch

from kimivl_lab.bench import gpu_checks
from kimivl_lab.bench.gpu_checks import CHECKS, run_checks
from kimivl_lab.graphs.trace import TraceBackend
from kimivl_lab.kernels.weight_state import WeightState
from kimivl_lab.moonvit.attention import ATTENTION_BACKENDS
from kimivl_lab.moonvit.checkpoint import StrictPreTrainedModel


def test_a_rehearsal_on_the_cpu_passes_and_says_what_needs_a_gpu():
    found = run_checks("cpu")
    assert [one.name for one in found] == list(CHECKS)
    assert [one for one in found if one.ok is False] == []
    assert {one.ok for one in found} == {True, None} and all(one.means for one in found)


def leaves_rows(q, k, v, metadata):
    return torch.ones_like(q)


FAULTS = {
    "rows_past_the_images": lambda patch: patch.setitem(ATTENTION_BACKENDS, "sdpa", leaves_rows),
    "gradients": lambda patch: patch.setitem(ATTENTION_BACKENDS, "sdpa", lambda q, k, v, metadata: 2 * q + k + v),
    "pool_bytes": lambda patch: patch.setattr(TraceBackend, "nbytes", property(lambda self: -1)),
    "weights_announced": lambda patch: (
        patch.setattr(StrictPreTrainedModel, "weights_changed", lambda self: None),
        patch.setattr(WeightState, "still_holds", lambda self, weight: True),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_check_finds_its_fault_and_names_it(name, monkeypatch):
    FAULTS[name](monkeypatch)
    (found,) = run_checks("cpu", [name])
    assert found.ok is False and found.means.startswith("AssertionError: ")


def test_a_failing_check_stops_no_other_and_ends_the_program_with_1(monkeypatch, capsys):
    def explodes(device):
        raise RuntimeError("CUDA error\nmany lines")

    monkeypatch.setattr(gpu_checks, "CHECKS", {"explodes": explodes, "pool_bytes": gpu_checks.pool_bytes})
    with pytest.raises(SystemExit) as ended:
        gpu_checks.main(["--device", "cpu"])
    assert ended.value.code == 1
    document = json.loads(capsys.readouterr().out)
    assert document["failed"] == ["explodes"] and [one["ok"] for one in document["checks"]] == [False, True]
    assert "test_gpu_checks.py" in document["checks"][0]["means"]
