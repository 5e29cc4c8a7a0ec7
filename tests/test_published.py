"""Published numbers beside predictions: every row is whole, and verdicts are what they say."""

import pytest

from kimivl_lab.datasets import data_path
from kimivl_lab.measure import published
from kimivl_lab.measure.published import (
    graph_cases,
    graph_rows,
    not_predictable,
    parallel_cases,
    parallel_rows,
    published_rows,
)


@pytest.mark.parametrize(
    "name",
    sorted(path.stem for path in data_path("published").glob("*.csv") if path.stem not in ("devices", "encoders")),
)
def test_every_row_has_a_link_and_a_metric(name):
    rows = published_rows(name)
    assert rows
    for row in rows:
        assert row["url"].startswith("https://") and row["source"] and row["metric"]
        assert None not in row and None not in row.values(), "a field too many or too few"


def test_numbers_are_numbers_and_one_side_missing_is_said():
    for row in published_rows("encoder_graphs"):
        assert float(row["eager"]) > 0 and float(row["graph"]) > 0 and row["kind"] in ("case", "control")
    for row in published_rows("encoder_parallel"):
        sides = [float(row[side]) > 0 for side in ("tensor", "data") if row[side]]
        assert all(sides) and (len(sides) == 2 or row["note"]), row["source"]


def test_every_encoder_has_the_sizes_and_the_source_that_its_model_has():
    sizes = ("layers", "width", "mlp")
    known = {row["model"]: row for row in published_rows("encoders")}
    assert all(row["source"] and row["url"].startswith("https://") and None not in row for row in known.values())
    used = {}
    for name in ("encoder_graphs", "encoder_parallel"):
        used |= {row["model"]: [row[size] for size in sizes] for row in published_rows(name) if row["layers"]}
    assert used == {model: [row[size] for size in sizes] for model, row in known.items()}


def test_the_named_pull_requests_are_there():
    sources = {row["source"] for row in published_rows("encoder_parallel")}
    assert {"vllm#18368", "vllm#23817", "vllm#24955", "vllm#53735", "sglang#31212"} <= sources


def test_a_benchmark_counts_once_and_controls_stand_apart():
    rows = graph_rows()
    kimi = [row for row in rows if row["source"] == "vllm#41992"]
    assert [row["metric"] for row in kimi] == ["TTFT mean"], "of mean, median and P99"
    assert not any("padded" in row["workload"] for row in rows)
    assert {row["kind"] for row in graph_rows("control")} == {"control"}
    throughput = [row["metric"] for row in parallel_rows() if row["source"] == "vllm#23909"]
    assert throughput == ["request throughput"]


def test_every_predictable_benchmark_is_a_case():
    graphs, parallel = graph_cases(), parallel_cases()
    assert (len(graph_rows()) - len(graphs), len(parallel_rows()) - len(parallel)) == not_predictable()
    for case in (*graphs, *parallel):
        assert 0 < case.low <= case.high and case.published > 0
        on_both_sides = case.low < 1 < case.high
        assert (case.verdict == "open") == on_both_sides


def test_faster_is_above_one_for_times_and_for_throughput():
    by_source = {case.source: case.published for case in graph_cases()}
    assert by_source["vllm#41759"] == pytest.approx(81.82 / 76.81)
    first = next(case for case in parallel_cases() if case.words.startswith("InternVL3_5"))
    assert first.published == pytest.approx(9.84 / 9.30)


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ((1.2, 2.0, 3.0), "right"),
        ((0.8, 0.2, 0.9), "right"),
        ((1.2, 0.2, 0.9), "miss"),
        ((0.8, 2.0, 3.0), "miss"),
        ((1.2, 0.9, 1.1), "open"),
        ((1.01, 0.2, 0.9), "right"),
        ((1.01, 2.0, 3.0), "miss"),
    ],
)
def test_a_verdict_compares_directions(numbers, verdict):
    row = dict.fromkeys(("source", "url", "model", "gpu", "workload"), "x")
    assert published._case(row, *numbers).verdict == verdict
