"""Rates of a GPU that were measured, for `--rates`: records that replace the data sheet's rates and assumed latencies.

    bench.encoder    p, the FLOP/s of the fastest forward
    bench.graphs     tau, the host's seconds to start one kernel: the slope of eager calls over their launches; and the
                     price of a replay
    bench.parallel   a cost model of the ranks, fitted to the record, with links and latencies

A record counts only if it is of the encoder that a server runs: the full tower in bfloat16. Records of several devices,
or of another device than `--gpu` names, are refused: a mixture of two GPUs describes none.

Test: tests/test_rates.py. Record: encoder__*.csv, graphs__*.csv, parallel__*.csv.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..bench.fit_cost_model import fit_record
from ..gpus import find_gpu
from ..measure.records import FILE_NAME, read_record
from ..parallel.cost_model import CostModel
from ..planner.replay_cost import measured_replay_cost

_PRESET, _DTYPE = "kimi-vl-a3b", "bfloat16"
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class MeasuredRates:
    """What records say about one device; None where none of them says it.

    Attributes:
        device: as the records name it.
        flops_per_s: p, of the fastest forward.
        launch_s: tau, of the host for one kernel, in this library's tower.
        replay_cost: the price of a replay, in rows.
        ranks: the fitted cost model of ranks.
        ranks_error: of its predictions that were not fitted, the share that four of five stay below.
        sources: by kind of record: its file, device and date, in words.
    """

    device: str
    flops_per_s: float | None = None
    launch_s: float | None = None
    replay_cost: int | None = None
    ranks: CostModel | None = None
    ranks_error: float = 0.0
    sources: dict[str, str] = field(default_factory=dict)


def read_rates(paths: Sequence[Path], gpu: str | None) -> MeasuredRates:
    """The rates in these records.

    Args:
        gpu: what `--gpu` names; None takes the device of the records.

    Raises:
        ValueError: a record of another kind, preset, dtype or device, two of one kind, or one without the rows that are
            needed. OSError: of a file.
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    device = ""
    for path in paths:
        kind, rows, origin = _checked(path)
        name = str(origin.get("device"))
        if gpu is not None and not _is_called(gpu, name):
            raise ValueError(f"{path.name} was measured on {name}, --gpu names {gpu[:80]!r}: give records of that GPU")
        if device and name != device:
            raise ValueError(f"the records are of two devices, {device} and {name}: give records of one")
        if kind in sources:
            raise ValueError(f"two records of {kind}: {sources[kind]} and {path.name}; give one")
        device = name
        sources[kind] = f"{path.name} ({name}, {str(origin.get('date'))[:10]})"
        try:
            found |= _KINDS[kind](rows, sources[kind])
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{path.name} says no rate: {error}") from error
    return MeasuredRates(device, sources=sources, **found)


def _checked(path: Path) -> tuple[str, Rows, dict[str, Any]]:
    name = FILE_NAME.fullmatch(path.name)
    kinds = ", ".join(_KINDS)
    if name is None or name["benchmark"] not in _KINDS:
        raise ValueError(
            f"{path.name}: --rates takes records of {kinds}, named <benchmark>__<device>__<dtype>__<date>.csv"
        )
    rows, origin = read_record(path)
    if (origin.get("preset"), name["dtype"]) != (_PRESET, _DTYPE):
        raise ValueError(
            f"{path.name} is of preset {origin.get('preset')!r} in {name['dtype']}, a server's encoder is {_PRESET} in "
            f"{_DTYPE}: run `python -m kimivl_lab.bench.{name['benchmark']} --preset {_PRESET} --dtype {_DTYPE}`"
        )
    return name["benchmark"], rows, origin


def _is_called(said: str, device: str) -> bool:
    """Whether `said` names this device: the same GPU of the table, or else words that all stand in its name."""
    names = []
    for name in (said, device):
        try:
            names.append(find_gpu(name).name)
        except ValueError:
            continue
    if names:
        return len(names) == 2 and names[0] == names[1]
    words, known = (set(re.findall(r"[a-z0-9]+", name.lower())) for name in (said, device))
    return bool(words) and words <= known


def _of_encoder(rows: Rows, source: str) -> dict[str, Any]:
    speeds = [row["speed_tflops"] for row in rows if row["phase"] == "forward"]
    if not speeds or not all(isinstance(speed, float) and speed > 0 for speed in speeds):
        raise ValueError(f"it needs forwards with a positive speed_tflops, got {speeds!r:.100}")
    return {"flops_per_s": 1e12 * max(speeds)}


def _of_graphs(rows: Rows, source: str) -> dict[str, Any]:
    calls = [row for row in rows if (row["phase"], row["variant"]) == ("host", "eager") and "narrow" in row["case"]]
    launches, times = ([row[name] for row in calls] for name in ("launches_count", "latency_ms_p50"))
    if len(set(launches)) < 2:
        raise ValueError(f"it needs eager calls of the phase 'host' with two numbers of launches, got {launches}")
    slope = float(np.polyfit(launches, times, 1)[0])
    if slope <= 0:
        raise ValueError(f"times do not grow with launches: {dict(zip(launches, times, strict=True))}")
    return {"launch_s": slope / 1e3, "replay_cost": measured_replay_cost(rows)}


def _of_parallel(rows: Rows, source: str) -> dict[str, Any]:
    model = fit_record(rows, _PRESET, getattr(torch, _DTYPE), source)
    sweep = [row for row in rows if row["phase"] == "sweep" and row["predicted_ms"]]
    if not sweep:
        raise ValueError("it holds no predictions of the phase 'sweep', which say how far the fit can be trusted")
    errors = [abs(row["predicted_ms"] / row["latency_ms_p50"] - 1) for row in sweep]
    return {"ranks": model, "ranks_error": float(np.quantile(errors, 0.8))}


_KINDS: dict[str, Callable[[Rows, str], dict[str, Any]]] = {
    "encoder": _of_encoder,
    "graphs": _of_graphs,
    "parallel": _of_parallel,
}
