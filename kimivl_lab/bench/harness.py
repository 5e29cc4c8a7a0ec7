"""What every benchmark's program shares: its options, its record, progress on stderr, one JSON document as last line.

A benchmark gives `run_benchmark` a function that yields rows and a function that sums them up:

    parser = harness.parser("rope", __doc__, dtypes=("float32", "bfloat16"), rounds=(3, 31, 7))
    harness.run_benchmark(parser, COLUMNS, rows, summary, arguments, yardsticks=harness.copy_rate)

writes one record for each dtype and prints {"benchmark": "rope", "copy_gbps": ..., "results": {"float32": ...}}.

Test: tests/test_benchmarks.py.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..config import PRESETS
from ..measure.records import DEFAULT_DIRECTORY, Recorder
from ..measure.roofline import copy_gbps
from ..measure.timing import TIMERS

Row: TypeAlias = dict[str, Any]

TIMES = ("latency_ms_p50", "latency_ms_p20", "latency_ms_p80", "repeats")  # the columns of `Timing.row`


def columns(more: str) -> tuple[str, ...]:
    """The columns of a record of times: those of `compare.variant_rows`, and the names in `more`, one space apart."""
    return ("case", "variant", *more.split(), *TIMES, "speedup_ratio", "relative_error")


def parser(
    benchmark: str,
    doc: str | None,
    *,
    dtypes: Iterable[str] = (),
    default: Sequence[str] | None = None,
    preset: str | None = None,
    rounds: tuple[int, int, int] | None = None,
    on_host: bool = False,
) -> argparse.ArgumentParser:
    """The options of a benchmark; it may add more.

    Args:
        benchmark: the module's name.
        doc: the module's docstring; its first line is the help.
        dtypes: those that can be measured, each in its own record; one alone needs no option.
        default: the dtypes that are measured when --dtype is not given; None: all.
        preset: of the tower, when --preset is not given; None: there is no such option.
        rounds: uncounted runs of each variant, counted rounds, and counted rounds with --quick.
        on_host: the work never runs on a device, so there is no option for it.
    """
    summary = (doc or "").splitlines()[0]
    options = argparse.ArgumentParser(prog=f"python -m kimivl_lab.bench.{benchmark}", description=summary)
    options.set_defaults(benchmark=benchmark)
    options.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    options.add_argument("--out", type=Path, default=DEFAULT_DIRECTORY, help="folder of the records (%(default)s)")
    options.add_argument("--seed", type=int, default=0, help="of drawn sizes, contents and orders (%(default)s)")
    if on_host:
        options.set_defaults(device="cpu")
    else:
        here = "cuda" if torch.cuda.is_available() else "cpu"
        options.add_argument("--device", default=here, help="%(default)s here")
    chosen = list(default or dtypes)
    options.set_defaults(dtype=chosen)
    if len(every := list(dtypes)) > 1:
        options.add_argument("--dtype", nargs="+", default=chosen, choices=every, help=" ".join(chosen))
    if preset is not None:
        options.add_argument("--preset", default=preset, choices=PRESETS, help="%(default)s")
    if rounds is not None:
        warmup, repeats, quick = rounds
        options.set_defaults(warmup=warmup, repeats_by_default=(repeats, quick))
        options.add_argument("--repeats", type=int, help=f"counted rounds ({repeats}, with --quick {quick})")
    return options


def copy_rate(options: argparse.Namespace) -> dict[str, float]:
    """The yardstick of everything that moves bytes: this machine's copy bandwidth."""
    return {"copy_gbps": round(copy_gbps(options.device), 2)}


def run_benchmark(
    parser: argparse.ArgumentParser,
    columns: Sequence[str],
    rows: Callable[[argparse.Namespace], Iterable[Row]],
    summary: Callable[[list[Row]], Mapping[str, Any]],
    arguments: Sequence[str] | None = None,
    *,
    yardsticks: Callable[[argparse.Namespace], Mapping[str, float]] | None = None,
) -> None:
    """Runs a benchmark once for each dtype: a record with provenance each, and one line of JSON at the end.

    Args:
        rows: from the options, with one `dtype` and resolved `repeats`, to the rows of a record. Each row is written
            before the next one is measured.
        summary: of one record's rows.
        arguments: of the command line; None: the program's own.
        yardsticks: numbers to measure first, that rows are held against; `rows` finds them in its options, and the
            record in its provenance.
    """
    given = parser.parse_args(arguments)
    if given.repeats is None:
        given.repeats = given.repeats_by_default[given.quick]
    measured = dict(yardsticks(given)) if yardsticks else {}
    results = {}
    for dtype in given.dtype:
        options = argparse.Namespace(**vars(given) | measured | {"dtype": dtype})
        kept = {name: getattr(options, name) for name in ("preset", "warmup", "repeats") if name in options}
        provenance = settings(options, **kept, **measured)
        record = Recorder(
            options.benchmark, dtype, columns, directory=options.out, device=options.device, settings=provenance
        )
        with record:
            for row in rows(options):
                record.add(row)
        progress(f"wrote {record.path}")
        results[dtype] = summary(record.rows)
    finish({"benchmark": given.benchmark, **measured, "results": results})


def settings(options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Provenance of a run: its seed, its timer, the order of its variants, and what the benchmark adds."""
    timer = TIMERS[torch.device(options.device).type]
    return {"seed": options.seed, "timer": timer, "order": "random in each round, from the seed", **more}


def progress(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def rounds(options: argparse.Namespace) -> Callable[[int], None]:
    """For `time_interleaved`: a line after each round of a benchmark whose rounds take seconds."""
    return lambda done: progress(f"  round {done} of {options.repeats}")


def finish(summary: Mapping[str, Any]) -> None:
    """Prints the benchmark's result as one JSON line."""
    print(json.dumps(summary))
