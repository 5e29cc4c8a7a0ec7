"""The benchmark of graphs: checked, recorded, and what it makes of its rows."""

import argparse

import pytest

from kimivl_lab.bench import graphs
from kimivl_lab.geometry import num_tokens
from kimivl_lab.measure.records import record_problems


def test_a_quick_run_writes_a_valid_record_of_every_phase(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "DEPTHS", (1, 2))
    monkeypatch.setattr(graphs, "QUICK_BUDGETS", (4, 9))
    options = argparse.Namespace(quick=True, preset="tiny", dtype="bfloat16", device="cpu", seed=0, out=tmp_path)
    rows = graphs.run(options)
    (record,) = tmp_path.glob("*.csv")
    assert record_problems(record) == []
    assert {row["phase"] for row in rows} == {"budget", "capture", "host"}
    host = [row for row in rows if row["phase"] == "host"]
    assert [row["case"] for row in host[::2]] == ["narrow, 2 layers, 16 patches", "tiny, 16 patches"]
    assert all(row["launches_count"] > 0 for row in rows if row["phase"] != "capture")
    assert [row["pool_mib"] > 0 for row in rows if row["phase"] == "capture"] == [False, True]


@pytest.mark.parametrize("tokens", [1, 7, 64, 255, 1104, 2208, 257])
def test_an_image_of_so_many_tokens(tokens):
    assert num_tokens(graphs.image_of(tokens)) == (256 if tokens == 257 else tokens)  # 257 is prime, a side holds 255


def test_crossover_is_where_replays_stop_paying_for_good():
    def rows(ratios):
        common = {"phase": "budget", "variant": "replay"}
        full = [
            {**common, "tokens": budget, "budget_tokens": budget, "speedup_ratio": ratio}
            for budget, ratio in ratios.items()
        ]
        return [*full, {**common, "tokens": 1, "budget_tokens": 2, "speedup_ratio": 0.1}]

    assert graphs.crossover(rows({4: 3.0, 16: 2.0})) is None
    assert graphs.crossover(rows({4: 3.0, 16: 1.0, 64: 1.2, 256: 1.01, 1024: 0.9})) == 256
