"""What the lessons claim of a GPU, decided on the records that a run of `gpu_suite` wrote.

A claim names the lesson that makes it, the benchmark whose record decides it and the column that is looked at. It gives
"held", "did not hold" or, where the record or the column is not there, "not measured", and the numbers that it saw.

Test: tests/test_gpu_suite.py.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..measure.records import FILE_NAME, read_record
from .harness import Row

Numbers = Callable[[Sequence[Row]], Mapping[str, float]]

NOISE = 1.05  # two times whose ratio is below this count as equal


def in_words(number: float) -> str:
    """Three digits: "0.952", "1,052", "3e-07"."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


_SIGNS = {
    "": operator.eq,
    "at most": operator.le,
    "at least": operator.ge,
    "less than": operator.lt,
    "more than": operator.gt,
}


@dataclass(frozen=True)
class Bound:
    """What a number must be: `Bound("at most", 0.05)`; with the sign "" it must be equal."""

    sign: str
    value: float

    def holds(self, number: float) -> bool:
        return _SIGNS[self.sign](number, self.value)

    def __str__(self) -> str:
        return f"{self.sign} {in_words(self.value)}".strip()


@dataclass(frozen=True)
class Claim:
    """One sentence of a lesson, and how a record decides it.

    Attributes:
        lesson: its number, or README.
        benchmark: whose record it is.
        column: of the record, without which nothing is measured.
        numbers: from rows to what is compared, by name, and empty where the record holds none of it.
        bound: of each of these numbers.
        unit: what the numbers are, after the number: "times as fast".
        needs_gpu: a CPU's record of this benchmark cannot show it.
    """

    lesson: str
    text: str
    benchmark: str
    column: str
    numbers: Numbers
    bound: Bound
    unit: str
    needs_gpu: bool = False

    def seen(self, rows: Iterable[Row]) -> Mapping[str, float]:
        """The numbers of these rows, by name."""
        return self.numbers([row for row in rows if row.get(self.column) is not None])

    def judge(self, rows: Iterable[Row]) -> dict[str, str]:
        """The finding on the rows of this benchmark's records."""
        numbers = self.seen(rows)
        against = {name: number for name, number in numbers.items() if not self.bound.holds(number)}
        return {
            "claim": self.text,
            "lesson": self.lesson,
            "finding": "not measured" if not numbers else "did not hold" if against else "held",
            "decided_by": f"{self.benchmark}: {self.column}",
            "numbers": _named(numbers, against),
        }


_SHOWN = 3


def _named(numbers: Mapping[str, float], against: Mapping[str, float]) -> str:
    """ "12 numbers from 1.02 to 3.1", or those that speak against the claim, by name."""
    if not numbers:
        return ""
    if not against:
        return f"{len(numbers)} numbers from {min(numbers.values()):g} to {max(numbers.values()):g}"
    shown = ", ".join(f"{name} {number:g}" for name, number in list(against.items())[:_SHOWN])
    return f"{len(against)} of {len(numbers)} numbers: {shown}{', ...' if len(against) > _SHOWN else ''}"


def column_of(column: str, **wanted: str) -> Numbers:
    """The numbers of a column by case, of the rows that have the wanted values: `column_of("x_ratio", variant="y")`."""

    def numbers(rows: Sequence[Row]) -> dict[str, float]:
        chosen = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
        return {f"{row['case']} {'' if 'variant' in wanted else row['variant']}".strip(): row[column] for row in chosen}

    return numbers


def over_best(column: str, of: str, others: Iterable[str]) -> Numbers:
    """Of each case the number of the variant `of` over the least of the variants `others` that were measured."""

    def numbers(rows: Sequence[Row]) -> dict[str, float]:
        cases: dict[str, dict[str, float]] = {}
        for row in rows:
            cases.setdefault(row["case"], {})[row["variant"]] = row[column]
        return {
            case: variants[of] / min(rest)
            for case, variants in cases.items()
            if of in variants and (rest := [variants[name] for name in others if name in variants])
        }

    return numbers


def over_previous(column: str) -> Numbers:
    """Of each row the number over that of the row before it, within a case."""

    def numbers(rows: Sequence[Row]) -> dict[str, float]:
        pairs = zip(rows, rows[1:], strict=False)
        return {
            f"{row['case']}, {row['variant']}": row[column] / before[column]
            for before, row in pairs
            if before["case"] == row["case"]
        }

    return numbers


def real_over_pretended(rows: Sequence[Row]) -> dict[str, float]:
    """Syncs that a GPU counted less those of the pretended device."""
    return {
        f"{row['case']} {row['variant']}": row["syncs_count"] - row["pretended_syncs_count"]
        for row in rows
        if row.get("pretended_syncs_count") is not None
    }


def on_several_ranks(numbers: Numbers) -> Numbers:
    """Those numbers, of batches that no cost model was fitted to and more than one rank."""
    return lambda rows: numbers([row for row in rows if row["phase"] == "sweep" and row["ranks_count"] > 1])


_COMPUTED = ("interpolate", "gather", "separable", "adaptive")
_PACKED = ("flash_attn", "torch_varlen", "sdpa", "amx")

CLAIMS = (
    Claim(
        "60",
        "a warm forward with host grids waits for nothing",
        "syncs",
        "syncs_count",
        column_of("syncs_count", variant="host"),
        Bound("", 0),
        "waits",
        needs_gpu=True,
    ),
    Claim(
        "60",
        "the pretended device counts the syncs of a GPU",
        "syncs",
        "syncs_count",
        real_over_pretended,
        Bound("", 0),
        "waits more than on the pretended device",
        needs_gpu=True,
    ),
    Claim(
        "70",
        "graphs give the eager values: relative error of replays",
        "graphs",
        "relative_error",
        column_of("relative_error", variant="replay"),
        Bound("at most", 0.05),
        "relative error",
    ),
    Claim(
        "70",
        "a replay frees the host sooner than an eager forward",
        "graphs",
        "speedup_ratio",
        column_of("speedup_ratio", variant="replay", phase="host"),
        Bound("more than", 1),
        "times as fast",
        needs_gpu=True,
    ),
    Claim(
        "70",
        "a replay is not slower than eager, at any budget and fill",
        "graphs",
        "speedup_ratio",
        column_of("speedup_ratio", variant="replay", phase="budget"),
        Bound("at least", 1 / NOISE),
        "times as fast",
        needs_gpu=True,
    ),
    Claim(
        "25",
        "a cached position embedding is faster than computing it",
        "position",
        "latency_ms_p50",
        over_best("latency_ms_p50", "cache_hit", _COMPUTED),
        Bound("less than", 1),
        "of the time",
    ),
    Claim(
        "20",
        "two small products are faster than torch's interpolation",
        "position",
        "speedup_ratio",
        column_of("speedup_ratio", variant="separable"),
        Bound("more than", 1),
        "times as fast",
    ),
    Claim(
        "30",
        "a fused rotation is faster than complex numbers",
        "rope",
        "latency_ms_p50",
        over_best("latency_ms_p50", "complex", ("compiled", "in_place", "amx")),
        Bound("more than", 1),
        "times as fast",
    ),
    Claim(
        "40",
        "packed attention is not slower than one mask over all images",
        "attention",
        "latency_ms_p50",
        over_best("latency_ms_p50", "sdpa_masked", _PACKED),
        Bound("at least", 1 / NOISE),
        "times as fast",
    ),
    Claim(
        "README",
        "every rung of the ladder gives the reference's values",
        "ladder",
        "relative_error",
        column_of("relative_error"),
        Bound("at most", 0.05),
        "relative error",
    ),
    Claim(
        "README",
        "no rung of the ladder is slower than the one below it",
        "ladder",
        "latency_ms_p50",
        over_previous("latency_ms_p50"),
        Bound("at most", NOISE),
        "of the time",
    ),
    Claim(
        "README",
        "the tower is not slower than transformers'",
        "encoder",
        "speedup_ratio",
        column_of("speedup_ratio", variant="kimivl_lab", phase="forward"),
        Bound("at least", 1 / NOISE),
        "times as fast",
    ),
    Claim(
        "50",
        "the choice between data and tensor parallel is within a tenth of the better one",
        "parallel",
        "latency_ms_p50",
        on_several_ranks(over_best("latency_ms_p50", "auto", ("data", "tensor"))),
        Bound("at most", 1.1),
        "of the better time",
    ),
    Claim(
        "10",
        "uint8 patches reach the embedding sooner than float32 ones",
        "upload",
        "speedup_ratio",
        column_of("speedup_ratio", variant="uint8"),
        Bound("more than", 1),
        "times as fast",
        needs_gpu=True,
    ),
)


def judge(records: Iterable[Path]) -> list[dict[str, str]]:
    """The finding on every claim, from these records alone. What a killed step left unreadable is not measured."""
    rows: dict[str, list[Row]] = {}
    for path in records:
        with suppress(OSError, ValueError):
            if match := FILE_NAME.fullmatch(path.name):
                kept = [row | {"case": f"{row['case']} {match['dtype']}"} for row in read_record(path)[0]]
                rows.setdefault(match["benchmark"], []).extend(kept)
    return [claim.judge(rows.get(claim.benchmark, ())) for claim in CLAIMS]
