"""The numbers of notebooks/90_engines_side_by_side.md: what others published beside the records of this project.

    python -m kimivl_lab.report.side_by_side notebooks/90_engines_side_by_side.md

writes the table of `numbers_table` between the two marks of the page; `make notebooks` does it when a record changes.

Test: tests/test_side_by_side.py.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..measure.published import graph_rows, parallel_rows, published_rows
from ..measure.records import read_record
from .ladder import kept_records

MARKS = ("<!-- numbers: written by kimivl_lab.report.side_by_side -->", "<!-- end of numbers -->")
Rows = list[dict[str, Any]]


def numbers_table() -> str:
    """A markdown table, one line a question: published values, and the ratio of our newest record with its device.

    A ratio is how many times as fast the new way is; below 1 it is slower. Published ratios are of whole servers or of
    encoders on GPUs, ours are of the encoder on the device that the record names, so the two do not compare.
    """
    lines = ["| question | published by others | record of this project |", "|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in (_graphs(), _parallel(), _syncs(), _ladder(), _host())]
    return "\n".join(lines)


def with_numbers(page: str) -> str:
    """`page` with a fresh table between the marks. ValueError: the marks do not stand in it once each, in order."""
    start, end = MARKS
    if page.count(start) != 1 or page.count(end) != 1 or page.index(start) > page.index(end):
        raise ValueError(f"the page needs {start!r} and, behind it, {end!r}, once each")
    return f"{page.partition(start)[0]}{start}\n\n{numbers_table()}\n\n{end}{page.partition(end)[2]}"


def _graphs() -> list[str]:
    gains = [float(row["eager"]) / float(row["graph"]) for row in graph_rows()]
    kimi = next(row for row in graph_rows() if row["source"] == "vllm#41992")
    published = f"{len(gains)} benchmarks: {_range(gains)}. Kimi-VL on an {kimi['gpu']}: mean TTFT {kimi['eager']} to "
    published += f"{kimi['graph']} ms ([vLLM 41992]({kimi['url']}))"
    full = "a replay of a full budget against eager"
    ours = _record("graphs", full, lambda rows: _ratios(_full_budgets(rows), "case", "eager", "replay"))
    return ["Are encoder graphs faster than eager?", published, ours]


def _parallel() -> list[str]:
    gains = []
    for row in parallel_rows():
        gain = float(row["data"]) / float(row["tensor"])
        gains.append(1 / gain if row["unit"] in ("s", "ms") else gain)
    (url,) = {row["url"] for row in parallel_rows() if row["source"] == "AMD ROCm blog"}
    published = f"{len(gains)} benchmarks, most of them [on 8 MI300X]({url}): {_range(gains)}"
    sweep = "2 ranks, data against tensor parallel"
    ours = _record("parallel", sweep, lambda rows: _ratios(_phase(rows, "sweep"), "case", "tensor", "data"))
    return ["Is data parallel faster than tensor parallel?", published, ours]


def _syncs() -> list[str]:
    row = next(row for row in published_rows("host_syncs") if row["source"] == "sglang#30878")
    waits = f"{row['waits_before']} reads of the longest image to {row['waits_after']}"
    published = f"{waits}: {row['before']} to {row['after']} ms on an {row['gpu']} ([SGLang 30878]({row['url']}))"
    return ["What do host syncs cost?", published, "counted, not timed: [lesson 60](60_gpu_syncs.ipynb)"]


def _ladder() -> list[str]:
    ours = _record("ladder", "the last rung against the first", _last_rungs)
    return ["What do all optimisations give together?", "none found", ours]


def _host() -> list[str]:
    ours = _record("host", "a runner's call against eager", lambda rows: _ratios(rows, "case", "eager", "runner"))
    return ["How much host time does a call save by a graph?", "none found", ours]


def _record(benchmark: str, what: str, ratios: Callable[[Rows], Iterable[float]]) -> str:
    # not `find_record`, which takes one of the reader's own processor: the page is the same on every machine
    path = max(kept_records().glob(f"{benchmark}__*.csv"), key=lambda path: (path.stem[-8:], path.stem))
    rows, origin = read_record(path)
    return f"{what}: {_range(ratios(rows))} on {origin['device']} ([record](../data/measurements/{path.name}))"


def _ratios(rows: Rows, by: str, before: str, after: str) -> list[float]:
    """Time of the variant `before` over that of `after`, for each value of the column `by` that has both."""
    ms = {(row[by], row["variant"]): row["latency_ms_p50"] for row in rows}
    return [ms[case, before] / ms[case, after] for case, variant in ms if variant == after and (case, before) in ms]


def _last_rungs(rows: Rows) -> list[float]:
    return list({row["case"]: row["speedup_ratio"] for row in rows}.values())


def _full_budgets(rows: Rows) -> Rows:
    return [row for row in _phase(rows, "budget") if row["tokens"] == row["budget_tokens"]]


def _phase(rows: Rows, phase: str) -> Rows:
    return [row for row in rows if row["phase"] == phase]


def _range(ratios: Iterable[float]) -> str:
    ratios = list(ratios)
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{low} times as fast" if low == high else f"{low} to {high} times as fast"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_numbers(target.read_text(encoding="utf-8")), encoding="utf-8")
