"""What others published about their own servers, beside what this project predicts for the same case.

Two questions: are CUDA graphs faster than eager (`graph_cases`), and is data parallel faster than tensor parallel
(`parallel_cases`)? A prediction needs the GPU, the encoder and the patches of a call. Many published rows do not state
all three; `not_predictable` counts them.

A published number is often one of a whole server, of which the encoder is a part, so only the direction is compared:
faster, slower, or no change (less than 3 %).

Test: tests/test_published.py. Data: data/published/encoder_graphs.csv, encoder_parallel.csv.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import MoonViTConfig
from ..datasets import data_path
from ..gpus import find_gpu
from ..moonvit.flops import tower_flops
from ..parallel.gpu_rates import parallel_gain
from ..planner.replay_cost import LAUNCH_S, PUBLISHED_LAUNCH_S, SUSTAINED, kernels

NO_CHANGE = 0.03  # a smaller gain or loss is not told from none
_SHOWN_METRICS = ("mean", "TTFT", "request throughput")  # one metric a benchmark, the mean before the median
_SEVERAL_REQUESTS = 8  # a step of a busy server encodes the images of one request, or of some


@dataclass(frozen=True)
class PublishedCase:
    """One published comparison.

    Attributes:
        source, url, words: where it stands, and what was run.
        published: how many times as fast the new way was; below 1 it was slower.
        low, high: what is predicted; see the function that made the case.
        verdict: "right" or "miss": the whole predicted range is on the published side of 1 or on the other one;
            "open": the range holds both sides. A published change below 3 % is right where no gain was predicted.
    """

    source: str
    url: str
    words: str
    published: float
    low: float
    high: float
    verdict: str


def published_rows(name: str) -> list[dict[str, str]]:
    """All rows of data/published/<name>.csv, as text; an empty cell was not stated."""
    with data_path("published", f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def graph_rows(kind: str = "case") -> list[dict[str, str]]:
    """One row a benchmark of encoder_graphs.csv, by its mean where there is one.

    Args:
        kind: "case", or "control": an experiment in which small inputs were forced into large graphs.
    """
    return _one_metric(row for row in published_rows("encoder_graphs") if row["kind"] == kind)


def parallel_rows() -> list[dict[str, str]]:
    """One row a benchmark of encoder_parallel.csv, of those that state both values."""
    return _one_metric(row for row in published_rows("encoder_parallel") if row["tensor"] and row["data"])


def graph_cases() -> list[PublishedCase]:
    """The published rows for graphs whose GPU, encoder and patches are stated, against the rule F < K p tau.

    `low` and `high` are K p tau / F, for a launch of 6 us and for one of 21 us, as an engine's was published: above 1 a
    graph can win.
    """
    cases = []
    for row in graph_rows():
        if not _predictable(row):
            continue
        config, gpu, sizes = _config(row), find_gpu(row["gpu"]), _sizes(row)
        flops = sum(tower_flops(config, [(1, size) for size in sizes]).values())
        low, high = (
            kernels(config.num_hidden_layers) * SUSTAINED * gpu.flops_per_s * launch_s / flops
            for launch_s in (LAUNCH_S, PUBLISHED_LAUNCH_S)
        )
        cases.append(_case(row, float(row["eager"]) / float(row["graph"]), low, high))
    return cases


def parallel_cases() -> list[PublishedCase]:
    """The published rows for data parallel whose GPU, encoder and patches are stated, against the cost model.

    `low` and `high` are the predicted encoder time of tensor over data parallel: above 1 data parallel is faster. The
    range is that of `parallel_gain`, for calls with the images of one request and of eight.
    """
    cases = []
    for row in parallel_rows():
        if not _predictable(row):
            continue
        config, gpu, ranks = _config(row), find_gpu(row["gpu"]), int(row["ranks"])
        ranges = [parallel_gain(config, gpu, times * _sizes(row), ranks) for times in (1, _SEVERAL_REQUESTS)]
        gain = float(row["data"]) / float(row["tensor"])
        gain = gain if "throughput" in row["metric"] else 1 / gain
        cases.append(_case(row, gain, min(low for low, _ in ranges), max(high for _, high in ranges)))
    return cases


def not_predictable() -> tuple[int, int]:
    """How many benchmarks for graphs and for data parallel do not state the GPU, the encoder or the patches."""
    graphs, parallel = (sum(not _predictable(row) for row in rows) for rows in (graph_rows(), parallel_rows()))
    return graphs, parallel


def _one_metric(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The first row of each benchmark, those with a preferred metric first."""
    kept: dict[tuple[str, ...], dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: not any(metric in row["metric"] for metric in _SHOWN_METRICS)):
        kept.setdefault((row["source"], row["model"], row["gpu"], row["workload"], row["note"]), row)
    return list(kept.values())


def _predictable(row: dict[str, str]) -> bool:
    return all(row[name] for name in ("gpu", "layers", "images", "patches"))


def _config(row: dict[str, str]) -> MoonViTConfig:
    """An encoder of these sizes. The number of heads changes no FLOPs; 8 divide every width and every world size."""
    return MoonViTConfig(
        num_attention_heads=8,
        num_hidden_layers=int(row["layers"]),
        hidden_size=int(row["width"]),
        intermediate_size=int(row["mlp"]),
    )


def _sizes(row: dict[str, str]) -> list[int]:
    return [int(row["patches"])] * int(row["images"])


def _case(row: dict[str, str], published: float, low: float, high: float) -> PublishedCase:
    if low < 1 < high:
        verdict = "open"
    elif abs(published - 1) < NO_CHANGE:
        verdict = "miss" if low > 1 + NO_CHANGE else "right"
    else:
        verdict = "right" if (published > 1) == (low >= 1) else "miss"
    workload = row["workload"].partition(" a request, ")[0]
    words = ", ".join(filter(None, (row["model"], row["gpu"], workload)))
    return PublishedCase(row["source"], row["url"], words, published, low, high, verdict)
