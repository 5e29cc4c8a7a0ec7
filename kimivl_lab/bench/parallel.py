"""Data parallel, tensor parallel, the choice between them and one rank alone, on real ranks of one thread each.

    python -m kimivl_lab.bench.parallel [--ranks 2] [--preset lab] [--quick] [--out DIR] [--device cpu]
    torchrun --nproc-per-node 2 -m kimivl_lab.bench.parallel [...]

Started plainly it starts its ranks itself, and first checks worlds of 1, 2 and 4. The phases of the record:

    check        every mode, not timed
    collective   collectives alone, by size; every other size fits latency and bandwidth, the rest are predicted
    calibration  batches that tell the cost model's rates apart; the model is fitted to them
    same_call    an all-gather with and without the comparison of calls before it, for some of those batches
    sweep        other batches, with what the model predicts

Every mode is compared with the float32 reference on every rank before it is timed. A row with a prediction was not
fitted. `collective_ms` is without the wait for later ranks, which is `skew_ms`.
"""

import argparse
import copy
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..geometry import GridLike, patch_counts
from ..measure.accuracy import checked_errors
from ..measure.provenance import device_name
from ..measure.ranks import RankTiming, run_ranks, time_on_ranks
from ..measure.records import Recorder
from ..moonvit.model import MoonVitPretrainedModel
from ..parallel.auto import AutoParallelTower
from ..parallel.calls import describe_images, same_call
from ..parallel.collectives import all_gather, all_reduce, broadcast
from ..parallel.cost_model import CostModel
from ..parallel.data_parallel import run_dp_sharded_vision_model
from ..parallel.groups import init_group
from ..parallel.tensor_parallel import tensor_parallel, tensor_parallel_sizes
from . import harness
from .fit_cost_model import CALIBRATION, collective_points, fit_links, fit_record, predict
from .harness import Row
from .towers import drawn_grids, noise, reference_and_tower

Runs = dict[str, Callable[[], Any]]

CHECK_RANKS = (1, 2, 4)
CHECK_GRIDS: Sequence[GridLike] = [(8, 12), (16, 20), (10, 4), (24, 32), (2, 12)]
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}
KIB = (4, 16, 64, 256, 1024, 4096, 16384)
SMALL_PATCHES, SMALL_KIB = 1024, 1024
_WARM_UP_CALLS = 3
SAME_CALL_CASES = ("batch 1", "batch 2", "batch 6")  # one image of 8x8, one of 16x16, 32 of 8x8
HEADLINE = "16 of coco_val2017"
COLUMNS = harness.columns(
    "phase ranks_count images patches compute_ms skew_ms collective_ms collective_count collective_bytes predicted_ms"
)


def sweep(quick: bool, seed: int) -> dict[str, Sequence[GridLike]]:
    """Batches that the model is not fitted to."""
    few: dict[str, Sequence[GridLike]] = {"1 of 24x24": [(24, 24)], "6 of 12x12": [(12, 12)] * 6}
    if quick:
        return few
    return few | {
        "1 of 36x46": [(36, 46)],
        "1 of 66x66": [(66, 66)],
        "2 of 40x40": [(40, 40)] * 2,
        "3 of 28x28": [(28, 28)] * 3,
        "60x60 and 6 of 12x12": [(60, 60)] + [(12, 12)] * 6,
        HEADLINE: drawn_grids("coco_val2017", 16, seed),
    }


@dataclass
class RankBench:
    """One rank's towers, of the same weights: the float32 reference, a whole one, and its share if one can be cut."""

    options: argparse.Namespace
    group: dist.ProcessGroup
    exact: MoonVitPretrainedModel
    whole: MoonVitPretrainedModel
    share: MoonVitPretrainedModel | None

    @classmethod
    def join(cls, options: argparse.Namespace) -> "RankBench":
        """Joins the other ranks."""
        group = init_group(options.device)
        exact, whole = reference_and_tower(options)
        can_cut = group.size() in tensor_parallel_sizes(exact.config)
        return cls(options, group, exact, whole, tensor_parallel(copy.deepcopy(whole), group) if can_cut else None)

    def rows(self, phase: str, case: str, grids: Sequence[GridLike], model: CostModel | None = None) -> Iterator[Row]:
        """Checks every mode on one batch and, but for the phase "check", times it."""
        pixels = noise(grids, self.options.seed)
        runs = self._modes(pixels, grids, model)
        errors = self._errors(runs, self.exact(pixels, grids))
        timings = {} if phase == "check" else self._time(runs, few=len(pixels) > SMALL_PATCHES)
        for mode, error in errors.items():
            row: Row = {"case": case, "variant": mode, "phase": phase, "ranks_count": self.group.size()}
            row |= {"images": len(grids), "patches": len(pixels), "relative_error": f"{error:.3g}"}
            if timings:
                ratio = timings["single"].latency.p50_ms / timings[mode].latency.p50_ms
                row |= {**timings[mode].row(), "speedup_ratio": round(ratio, 3)}
                row |= {"skew_ms": 0} if mode == "single" else {}
            if model is not None:
                row["predicted_ms"] = round(1e3 * predict(model, mode, grids, self.group.size()), 4)
            yield row

    def collective_rows(self) -> Iterator[Row]:
        """Checks and times every collective by size; sizes at odd places are predicted from those at even places."""
        rows = {place: list(self._collectives_of(kib)) for place, kib in enumerate(KIB)}
        links = fit_links(collective_points(row for place in rows if place % 2 == 0 for row in rows[place]))
        for place, measured in rows.items():
            for row in measured:
                if place % 2:
                    seconds = links[row["variant"]].seconds(row["variant"], self.group.size(), row["collective_bytes"])
                    row["predicted_ms"] = round(1e3 * seconds, 4)
                yield row

    def same_call_rows(self) -> Iterator[Row]:
        """Times the all-gather of a data-parallel call with and without the comparison of calls before it.

        The all-gather is in both, since either waits for the later rank.
        """
        for case in SAME_CALL_CASES:
            grids = CALIBRATION[case]
            pixels = torch.zeros(sum(patch_counts(grids)), 3, 14, 14, device="cpu")
            gathered = torch.zeros(len(pixels), self.whole.config.hidden_size, device=self.options.device)
            gather = partial(all_gather, gathered, gathered.chunk(self.group.size())[0].clone(), self.group)
            compare = partial(self._compare_and, gather, grids, pixels)
            for _ in range(_WARM_UP_CALLS):
                compare()
            for name, timing in self._time({"all_gather": gather, "same_call": compare}, few=False).items():
                row: Row = {"case": case, "variant": name, "phase": "same_call", "ranks_count": self.group.size()}
                yield row | {"images": len(grids), "patches": len(pixels), **timing.row(), "relative_error": "0"}

    def _compare_and(self, gather: Callable[[], None], grids: Sequence[GridLike], pixels: Tensor) -> None:
        with same_call(self.group) as call:
            call.about = describe_images("data", grids, self.whole.dtype, pixels)
        gather()

    def _collectives_of(self, kib: int) -> Iterator[Row]:
        group, ranks, rank = self.group, self.group.size(), self.group.rank()
        want = torch.linspace(0, 1, kib * 256 // ranks * ranks, device=self.options.device)
        mine, gathered, sent = want / ranks, torch.empty_like(want), want * (rank == 0)
        part = want.chunk(ranks)[rank].clone()
        runs: Runs = {
            "all_reduce": partial(all_reduce, mine, group),
            "all_gather": partial(all_gather, gathered, part, group),
            "broadcast": partial(broadcast, sent, 0, group),
        }
        results = {"all_reduce": mine, "all_gather": gathered, "broadcast": sent}
        errors = self._errors({kind: lambda kind=kind: runs[kind]() or results[kind] for kind in runs}, want)
        for kind, timing in self._time(runs, few=kib > SMALL_KIB).items():
            row: Row = {"case": f"{kib} KiB", "variant": kind, "phase": "collective", "ranks_count": ranks}
            yield row | {**timing.row(), "relative_error": f"{errors[kind]:.3g}"}

    def _modes(self, pixels: Tensor, grids: Sequence[GridLike], model: CostModel | None) -> Runs:
        """ "single" has work on rank 0 only, "auto" needs a model."""
        idle = self.group.rank() > 0
        runs: Runs = {"single": (lambda: None) if idle else partial(self.whole, pixels, grids)}
        runs["data"] = partial(run_dp_sharded_vision_model, self.whole, pixels, grids, self.group)
        if self.share is not None:
            runs["tensor"] = partial(self.share, pixels, grids)
        if model is not None:
            runs["auto"] = partial(AutoParallelTower(self.whole, self.group, model), pixels, grids)
        return runs

    def _errors(self, runs: Runs, want: Tensor) -> dict[str, float]:
        """The worst of the ranks."""
        working = {name: run for name, run in runs.items() if name != "single" or self.group.rank() == 0}
        ranks: list[Any] = [None] * self.group.size()
        mine = checked_errors(working, want, TOLERANCE[self.options.dtype])
        dist.all_gather_object(ranks, mine, group=self.group)
        return {name: max(errors.get(name, 0.0) for errors in ranks) for name in runs}

    def _time(self, runs: Runs, *, few: bool) -> dict[str, RankTiming]:
        """Short runs, which feel every interruption, are repeated four times as often."""
        repeats = self.options.repeats * (1 if few else 4)
        return time_on_ranks(runs, self.group, torch.device(self.options.device), repeats=repeats)


@torch.no_grad()  # weights made in inference mode are cached nowhere on a GPU
def check(options: argparse.Namespace) -> list[Row]:
    """On every rank: the rows of the phase "check"."""
    return list(RankBench.join(options).rows("check", f"{len(CHECK_GRIDS)} mixed", CHECK_GRIDS))


@torch.no_grad()  # weights made in inference mode are cached nowhere on a GPU
def measure(options: argparse.Namespace, checked: list[Row]) -> Row:
    """On every rank: the other phases; rank 0 writes the record. Returns the summary."""
    bench = RankBench.join(options)
    keeps = bench.group.rank() == 0
    settings = harness.settings(options, preset=options.preset, repeats=options.repeats, command=options.command)
    recorder = Recorder(
        "parallel", options.dtype, COLUMNS, directory=options.out, device=options.device, settings=settings
    )
    rows: list[Row] = []
    with recorder if keeps else nullcontext():

        def add(measured: Iterable[Row]) -> None:
            for row in measured:
                rows.append(row)
                if keeps:
                    recorder.add(row)

        add(checked)
        add(bench.collective_rows())
        add(bench.same_call_rows())
        for phase, batches in (("calibration", CALIBRATION), ("sweep", sweep(options.quick, options.seed))):
            model = None
            if phase == "sweep":
                source = f"{device_name(options.device)}, {bench.group.size()} ranks"
                model = fit_record(rows, options.preset, getattr(torch, options.dtype), source)
            for case, grids in batches.items():
                if keeps:
                    harness.progress(f"parallel {options.preset} {options.dtype}, {phase}: {case}")
                add(bench.rows(phase, case, grids, model))
    if keeps:
        harness.progress(f"wrote {recorder.path}")
    return summary(rows)


def summary(rows: list[Row]) -> Row:
    """The record in a few numbers."""

    def of(phase: str, variant: str, column: str = "latency_ms_p50") -> dict[str, float]:
        return {row["case"]: row[column] for row in rows if (row["phase"], row["variant"]) == (phase, variant)}

    def median_error(phase: str) -> float:
        predicted = [row for row in rows if row["phase"] == phase and row.get("predicted_ms") is not None]
        return round(median(abs(row["predicted_ms"] / row["latency_ms_p50"] - 1) for row in predicted), 3)

    auto, data, tensor = (of("sweep", mode) for mode in ("auto", "data", "tensor"))
    best = {case: min(ms, tensor.get(case, ms)) for case, ms in data.items()}
    compared, gather = of("same_call", "same_call"), of("same_call", "all_gather")
    calls = of("calibration", "data")
    return {
        "benchmark": "parallel",
        "ranks": rows[-1]["ranks_count"],
        "speedup_of_data": of("sweep", "data", "speedup_ratio"),
        "auto_over_best": {case: round(ms / best[case], 3) for case, ms in auto.items()},
        "same_call_over_data": {case: round((ms - gather[case]) / calls[case], 4) for case, ms in compared.items()},
        "median_prediction_error": {phase: median_error(phase) for phase in ("collective", "sweep")},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("parallel", __doc__, preset="lab")
    parser.add_argument("--ranks", type=int, help="processes to start; by default the GPUs, or 2 on a CPU")
    parser.add_argument("--dtype", default="float32", choices=tuple(TOLERANCE), help="%(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds (%(default)s)")
    options = parser.parse_args(arguments)
    options.repeats = 2 if options.quick else options.repeats
    words = " ".join(sys.argv[1:] if arguments is None else arguments)
    if dist.is_torchelastic_launched():
        processes = os.environ["LOCAL_WORLD_SIZE"]
        options.command = f"torchrun --nproc-per-node {processes} -m kimivl_lab.bench.parallel {words}"
        result, keeps = measure(options, []), dist.get_rank() == 0
        dist.destroy_process_group()
    else:
        options.command = f"python -m kimivl_lab.bench.parallel {words}"
        gpus = torch.cuda.device_count() if options.device.startswith("cuda") else 0
        counts = [count for count in CHECK_RANKS if not gpus or count <= gpus]
        checked = [row for count in counts for row in run_ranks(check, count, options)[0]]
        result, keeps = run_ranks(measure, options.ranks or gpus or 2, options, checked)[0], True
    if keeps:
        harness.finish(result)


if __name__ == "__main__":
    main()
