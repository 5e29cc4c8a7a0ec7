"""The results table: what the lessons claim, what was predicted, and what which record shows.

    python -m kimivl_lab.report.results     # the table as markdown

Every number is read from a record of data/measurements or from a table of data/published when the table is made. A
claim has one line for each record that decides it. A claim that a CPU cannot show says so, until there is a
GPU's record.

Test: tests/test_results.py.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from ..bench import attention, position, rope
from ..bench.gpu_claims import CLAIMS, NOISE, Bound, Claim, Numbers, column_of, in_words, on_several_ranks
from ..bench.harness import Row
from ..datasets import data_path
from ..geometry import IN_TOKEN_LIMIT, GridLike, patch_counts
from ..lessons.host_syncs import savings
from ..lessons.image_patches import largest_grid
from ..lessons.resampling import operator_work
from ..lessons.rope_2d import bytes_moved
from ..measure.published import PublishedCase, graph_cases, not_predictable, parallel_cases
from ..measure.records import FILE_NAME, read_record

NEEDS_GPU = "needs a GPU"
_MIB = 2**20


@dataclass(frozen=True)
class Result:
    """One line of the table, as words.

    `lesson` is the number of the lesson, or README. `record` is the name of a file below data/. Where nothing is
    measured yet, `record` is "needs a GPU", and `measured`, `machine` and `date` are empty. A published number has the
    machine that its authors name; they give no date of the run.
    """

    lesson: str
    claim: str
    predicted: str
    measured: str
    record: str
    machine: str
    date: str


def results(folder: Path | None = None) -> list[Result]:
    """The whole table, in the order of the lessons.

    Args:
        folder: of the records; None for data/measurements.
    """
    records = list(_newest(folder or data_path("measurements")))
    found = [line for claim in (*CLAIMS, *_MORE) for line in _lines(claim, records)]
    return sorted([*found, *_published()], key=lambda line: line.lesson)


def markdown(lines: Iterable[Result]) -> str:
    """The table as markdown."""
    titles = Result.__dataclass_fields__
    rows = [titles, ["---"] * len(titles), *map(astuple, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


# --- claims that records decide, beside those of a run on a GPU ------------------------------------------------------


def _mask_over_images(rows: Sequence[Row]) -> dict[str, float]:
    """By case the time of sdpa with one mask over that of sdpa for each image; batches of one image have no mask."""
    ms = {(row["case"], row["variant"]): row["latency_ms_p50"] for row in rows}
    cases = [case for case, variant in ms if variant == "sdpa_masked" and " of " in case]
    return {case: ms[case, "sdpa_masked"] / ms[case, "sdpa"] for case in cases if (case, "sdpa") in ms}


def _whole_ladder(rows: Sequence[Row]) -> dict[str, float]:
    """By case the speedup of the last rung."""
    return {row["case"]: row["speedup_ratio"] for row in rows}


def _measured_over_predicted(rows: Sequence[Row]) -> dict[str, float]:
    return {f"{row['case']} {row['variant']}": row["latency_ms_p50"] / row["predicted_ms"] for row in rows}


def _held_by_entries(rows: Sequence[Row]) -> dict[str, float]:
    return {f"{row['case']} {row['variant']}": row["largest_mib"] for row in rows if row["bound_entries"] == 256}


def _in_vllm(column: str, phase: str) -> Numbers:
    """A column of the benchmark "engine" in one phase, by case, arm and restart."""

    def numbers(rows: Sequence[Row]) -> dict[str, float]:
        chosen = [row for row in rows if row["phase"] == phase]
        return {
            " ".join(str(row[name]) for name in ("case", "variant", "policy", "restart_count")): row[column]
            for row in chosen
        }

    return numbers


_ANY = Bound("at least", 0.0)  # where the prediction is a number for each case, or none is made
_LADDER = "all rungs of the ladder together"
_MASK = "one mask over all images takes longer, as it computes more scores"
_MODEL = "the cost model predicts the time of batches that it was not fitted to"
_ENGINE = "the model of a serving engine predicts its mean time to first token under load"
_PARTS = "time to first token in vLLM with this library's metadata or tower, over vLLM's own"
_ENCODER = "time of the encoder in vLLM with this library's metadata or tower, over vLLM's own"
_MORE = (
    Claim("README", _LADDER, "ladder", "speedup_ratio", _whole_ladder, _ANY, "times as fast"),
    Claim(
        "00",
        "a forward reaches at most the speed of a large matrix product",
        "encoder",
        "peak_share",
        column_of("peak_share", variant="kimivl_lab", phase="forward"),
        Bound("at most", NOISE),
        "of that speed",
    ),
    Claim(
        "25",
        "256 entries of a position cache are no bound of memory (limit of 4,096 patches)",
        "position_cache",
        "bound_entries",
        _held_by_entries,
        Bound("at most", 256 * largest_grid(IN_TOKEN_LIMIT).patches * 1152 * 2 / _MIB),
        "MiB",
    ),
    Claim(
        "40",
        _MASK,
        "attention",
        "latency_ms_p50",
        _mask_over_images,
        _ANY,
        "times the time of each image alone",
    ),
    Claim(
        "50",
        _MODEL,
        "parallel",
        "predicted_ms",
        on_several_ranks(_measured_over_predicted),
        _ANY,
        "of the predicted time",
    ),
    Claim(
        "80",
        "vLLM with this library's metadata or tower gives vLLM's own answers",
        "engine",
        "relative_error",
        _in_vllm("relative_error", "check"),
        Bound("", 0),
        "of the answers differ",
    ),
    Claim("80", _ENGINE, "engine", "error_ratio", _in_vllm("error_ratio", "simulation"), _ANY, "of the measured mean"),
    Claim("80", _PARTS, "engine", "ttft_ratio", _in_vllm("ttft_ratio", "load"), _ANY, "of its time"),
    Claim("80", _ENCODER, "engine", "encoder_ratio", _in_vllm("encoder_ratio", "load"), _ANY, "of its time"),
    Claim(
        "95",
        "attention on the matrix unit is faster than torch's",
        "attention",
        "speedup_ratio",
        column_of("speedup_ratio", variant="amx"),
        Bound("more than", 1),
        "times as fast",
    ),
)


# --- predictions with a number for each case; elsewhere the claim's bound is the prediction --------------------------

Grids = Sequence[GridLike]
Predict = Callable[[Grids, int], float]  # (grids of a batch, bytes of a number)


def _by_flops(grids: Grids, itemsize: int) -> float:
    work = [operator_work(grid) for grid in grids]
    return sum(one["interpolate"].flops for one in work) / sum(one["separable"].flops for one in work)


def _by_bytes(grids: Grids, itemsize: int) -> float:
    return bytes_moved("complex", 1, itemsize) / bytes_moved("in_place", 1, itemsize)


def _by_scores(grids: Grids, itemsize: int) -> float:
    lengths = patch_counts(grids)
    return sum(lengths) ** 2 / sum(length**2 for length in lengths)


_CASES = {"position": position.cases, "rope": rope.cases, "attention": attention.cases}
_PREDICTIONS: Mapping[str, tuple[str, Predict | None]] = {
    "two small products are faster than torch's interpolation": ("by FLOPs", _by_flops),
    "a fused rotation is faster than complex numbers": ("by bytes", _by_bytes),
    _MASK: ("by scores", _by_scores),
    _MODEL: ("1", None),
    _LADDER: ("none made", None),
    _ENGINE: ("1", None),
    _PARTS: ("none made", None),
    _ENCODER: ("none made", None),
}


# --- lines -----------------------------------------------------------------------------------------------------------


def _newest(folder: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """The newest record of each benchmark, device and dtype, with the parts of its name."""
    newest = {}
    for path in sorted(folder.glob("*.csv")):
        if match := FILE_NAME.fullmatch(path.name):
            newest[match["benchmark"], match["device"], match["dtype"]] = path, match.groupdict()
    yield from newest.values()


def _lines(claim: Claim, records: Iterable[tuple[Path, Mapping[str, str]]]) -> list[Result]:
    """One line for each record that decides the claim."""
    found = []
    for path, name in records:
        on_cpu = name["device"].startswith("cpu-")
        if name["benchmark"] != claim.benchmark or (claim.needs_gpu and on_cpu):
            continue
        rows, origin = read_record(path)
        if numbers := claim.seen(rows):
            words, predicted = _predicted(claim, numbers, origin, 4 if name["dtype"] == "float32" else 2)
            line = Result(claim.lesson, claim.text, words, "", path.stem, origin["device"], origin["date"][:10])
            found.append(replace(line, measured=_measured(claim, numbers, predicted)))
    if not found and claim.needs_gpu:
        found.append(Result(claim.lesson, claim.text, f"{claim.bound} {claim.unit}", "", NEEDS_GPU, "", ""))
    return found


def _predicted(
    claim: Claim, numbers: Mapping[str, float], origin: Mapping[str, Any], itemsize: int
) -> tuple[str, bool]:
    """The words of the prediction, and whether it is the claim's bound."""
    words, predict = _PREDICTIONS.get(claim.text, ("", None))
    if not words:
        return f"{claim.bound} {claim.unit}", True
    if predict is None:
        return words, False
    grids = _CASES[claim.benchmark](False, origin["seed"])
    values = [predict(grids[case], itemsize) for case in numbers if case in grids]
    return f"{words} {_span(values)} {claim.unit}" if values else "none made", False


def _measured(claim: Claim, numbers: Mapping[str, float], bounded: bool) -> str:
    against = sum(not claim.bound.holds(number) for number in numbers.values())
    miss = f"; did not hold for {against} of {len(numbers)}" if against else ""
    return f"{_span(numbers.values())} {claim.unit}{miss}"


def _span(numbers: Iterable[float]) -> str:
    """ "1.2 to 3.4", or one number."""
    kept = list(numbers)
    low, high = in_words(min(kept)), in_words(max(kept))
    return low if low == high else f"{low} to {high}"


def _published() -> Iterator[Result]:
    for one in savings():
        yield Result(
            "60",
            f"{one.waits} {'wait' if one.waits == 1 else 'waits'} less save this time ({one.row['metric']})",
            f"{_span((one.low, one.high))} ms",
            f"{one.published:.3g} ms",
            "published/host_syncs.csv",
            f"{one.row['gpu']}, published in {one.row['source']}",
            "",
        )
    graphs, parallel = not_predictable()
    both = (
        ("70", "CUDA graphs are faster than eager where K p tau > F", graph_cases(), graphs, "encoder_graphs"),
        ("50", "data parallel is faster where the cost model says so", parallel_cases(), parallel, "encoder_parallel"),
    )
    for lesson, text, cases, unknown, name in both:
        gpus = f"servers of others, {_span([case.published for case in cases])} times as fast"
        predicted = f"a direction for {len(cases)} published cases; {unknown} do not state enough"
        yield Result(lesson, text, predicted, _verdicts(cases), f"published/{name}.csv", gpus, "")


def _verdicts(cases: Sequence[PublishedCase]) -> str:
    counts = {word: sum(case.verdict == word for case in cases) for word in ("right", "miss", "open")}
    return f"right {counts['right']}, wrong {counts['miss']}, the prediction allows both {counts['open']}"


if __name__ == "__main__":
    sys.stdout.write(markdown(results()))
