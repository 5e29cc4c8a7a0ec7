"""What the model of an engine predicts from the stage times of a record of `bench.engine`, beside what was measured.

    simulation  the measured loads, with the same arrivals; `error_ratio` is the simulated over the measured mean
    prediction  loads that were not measured: other rates, ranks and budgets
    published   vLLM's change for Kimi-VL on an RTX 4090, from data-sheet rates and one unknown time, see `published`

Test: tests/test_engine_bench.py. Record: engine__*.csv.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from statistics import mean
from typing import Any

from ..config import MoonViTConfig
from ..datasets import load_sizes
from ..engines.load import Request, draw_requests
from ..engines.load_statistics import summarise
from ..engines.simulation import CallCost, Job, Limits, Stages, simulate
from ..geometry import image_geometry
from ..gpus import find_gpu
from ..measure.published import published_rows
from ..moonvit.flops import tower_flops
from ..planner.replay_cost import KERNEL_FLOOR_S, LAUNCH_S, PUBLISHED_LAUNCH_S, SUSTAINED, kernels
from .harness import Row

# (width, height, count) of the images, and how many a request has. "published" is the shape of vLLM's own comparisons,
# 2 images a request; 448x448 pixels have the 1,024 patches that vllm#41759 states.
WORKLOADS: dict[str, tuple[Sequence[tuple[int, int, int]], tuple[int, ...]]] = {
    "published": ([(448, 448, 1)], (2,)),
    "receipts": (load_sizes("receipts"), (1,)),
}
SHARES = {"light": 0.2, "half": 0.5, "high": 0.8}  # of the measured capacity
_PREDICTED = 400  # requests of a load that was not measured
_PREDICTED_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_PUBLISHED = ("vllm#41992", 200, 8.0)  # source, prompts, requests a second
_QUESTION, _ANSWER = 64, 128  # text and new tokens of a published request: not stated, 128 is the benchmark's default
_ACTIVE_BYTES = 2 * 2.8e9  # a step reads at least the active weights: 2.8 billion of 2 bytes


def drawn(
    settings: Mapping[str, Any], workload: str, share: str, restart: int, count: int, rate: float
) -> list[Request]:
    """The requests of one load: the same for each arm."""
    sizes, images = WORKLOADS[workload]
    place = 10 * list(WORKLOADS).index(workload) + list(SHARES).index(share)
    return draw_requests(count, rate, sizes, images, seed=settings["seed"] + 100 * restart + place)


def ttft_columns(times_s: Sequence[float]) -> Row:
    """Mean, percentiles and 95 % intervals, in ms."""
    found = summarise([1e3 * one for one in times_s])
    row = {"ttft_ms": found["mean"].value, "ttft_low_ms": found["mean"].low, "ttft_high_ms": found["mean"].high}
    row |= {"ttft_ms_p50": found["median"].value, "ttft_ms_p90": found["P90"].value, "ttft_ms_p99": found["P99"].value}
    row |= {"ttft_p99_low_ms": found["P99"].low, "ttft_p99_high_ms": found["P99"].high}
    return {name: round(value, 3) for name, value in row.items()}


def stages_of(rows: Sequence[Mapping[str, Any]], arm: str) -> Stages:
    """The stage times of an arm, fitted to its calibration. ValueError without rows, or without the engine's clock."""
    own = [row for row in rows if row["phase"] == "calibration" and row["variant"] == arm]
    if not own or not all(row.get("encoder_ms") for row in own):
        raise ValueError(f"no calibration of {arm!r} with the engine's clock of the encoder")
    images = [[round(row["tokens"] / row["images"])] * round(row["images"]) for row in own]  # all of one size
    pixels = [[prod(map(int, row["case"].split()[-1].split("x")))] * round(row["images"]) for row in own]
    encode = [row["encoder_ms"] / 1e3 for row in own]
    prompts: list[Sequence[int]] = [[round(row["prompt_tokens"])] for row in own]
    language = [max(row["prefill_ms"] - row["encoder_ms"], 1e-3) / 1e3 for row in own]
    decode = [max(row["decode_ms"], 1e-3) / 1e3 for row in own]
    return Stages(
        encode=CallCost.fit(images, encode),
        language=CallCost.fit([*prompts, *([1] for _ in own)], [*language, *decode]),
        prepare=CallCost.fit(pixels, [max(row["outside_ms"], 1e-3) / 1e3 for row in own]),
    )


def jobs_of(rows: Sequence[Mapping[str, Any]], requests: Sequence[Request], settings: Mapping[str, Any]) -> list[Job]:
    """The requests as the model sees them. Their text is what the calibration's prompts hold beside image tokens."""
    beside = {
        round(row["images"]): row["prompt_tokens"] - row["tokens"] for row in rows if row["phase"] == "calibration"
    }
    (few, less), (many, more) = min(beside.items()), max(beside.items())
    around = (more - less) / (many - few) if many > few else 0
    made = []
    for one in requests:
        images = tuple(image_geometry(*size, in_token_limit=settings["in_token_limit"]).tokens for size in one.sizes)
        text = round(less + around * (len(images) - few))
        pixels = tuple(width * height for width, height in one.sizes)
        made.append(Job(one.arrival, images, text, settings["new_tokens"], pixels))
    return made


def limits_of(settings: Mapping[str, Any]) -> Limits:
    return Limits(settings["batched_tokens"], None, settings["max_requests"], settings["chunked"])


def simulated_rows(rows: Sequence[Row], settings: Mapping[str, Any]) -> Iterator[Row]:
    """The phases "simulation", "prediction" and "published" of a run whose other rows are given."""
    arms = list(dict.fromkeys(row["variant"] for row in rows if row["phase"] == "load"))
    stages = {arm: stages_of(rows, arm) for arm in arms}
    for row in (row for row in rows if row["phase"] == "load"):
        times: list[float] = []
        for part in (part for part in rows if part["phase"] == "restart"):
            if (part["case"], part["variant"]) == (row["case"], row["variant"]):
                count, rate, restart = part["requests_count"], part["arrivals_per_s"], part["restart_count"]
                share = row["case"].split()[-1]
                requests = drawn(settings, row["workload"], share, round(restart), round(count), rate)
                times += simulate(jobs_of(rows, requests, settings), stages[row["variant"]], limits_of(settings)).ttft
        copied = {name: row[name] for name in ("case", "workload", "load_share", "arrivals_per_s", "requests_count")}
        found = {**copied, "phase": "simulation", "variant": "simulated", "policy": row["variant"]}
        found |= ttft_columns(times)
        yield found | {"error_ratio": round(found["ttft_ms"] / row["ttft_ms"], 4)}
    for arm in arms:
        yield from _predicted_rows(rows, settings, arm, stages[arm])
    yield from published()


def _predicted_rows(rows: Sequence[Row], settings: Mapping[str, Any], arm: str, stages: Stages) -> Iterator[Row]:
    limits = limits_of(settings)
    changes = [
        *((f"at {share:g} of capacity", share, limits, 1) for share in _PREDICTED_SHARES),
        *((f"with {ranks} encoders", SHARES["high"], limits, ranks) for ranks in (2, 4)),
        *((f"with a budget of {n}", SHARES["high"], replace(limits, batched_tokens=n), 1) for n in (1024, 2048, 8192)),
    ]
    for capacity in (row for row in rows if row["phase"] == "capacity"):
        workload = capacity["workload"]
        for case, share, changed, ranks in changes:
            rate = share * capacity["arrivals_per_s"]
            jobs = jobs_of(rows, drawn(settings, workload, "light", 0, _PREDICTED, rate), settings)
            found: Row = {"case": f"{workload} {case}", "phase": "prediction", "variant": "simulated", "policy": arm}
            found |= {"workload": workload, "load_share": share, "arrivals_per_s": rate, "requests_count": _PREDICTED}
            found |= {"ranks_count": ranks, "batched_tokens": changed.batched_tokens}
            yield found | ttft_columns(simulate(jobs, stages, changed, ranks).ttft)


def published() -> Iterator[Row]:
    """The published row of vLLM's graphs for Kimi-VL, simulated as far as stage times are known.

    Known: the encoder's FLOPs, its kernels, the GPU's data sheet. Eager the host starts each kernel, and because it
    reads values back, the device waits for it: kernels * launch + FLOPs / p. A graph has kernels * floor + FLOPs / p.
    Not stated: the images' size, the answers' length, the time of the language model. So there are rows for some sizes
    and for both launch times of the planner, and the language model's time for a token is the one with which the eager
    mean is the published one. The eager percentiles and all of the graph are predictions; `error_ratio` is the
    simulated over the published mean.
    """
    stated = {row["metric"]: row for row in published_rows("encoder_graphs") if row["source"] == _PUBLISHED[0]}
    gpu, config = find_gpu(stated["TTFT mean"]["gpu"]), MoonViTConfig.preset("kimi-vl-a3b")
    for side in (224, 336, 448):
        tokens = image_geometry(side, side).tokens
        per_image = sum(tower_flops(config, [(2, 2 * tokens)]).values()) / (SUSTAINED * gpu.flops_per_s)
        for launch in (LAUNCH_S, PUBLISHED_LAUNCH_S):
            run = partial(_published_times, tokens, per_image, _ACTIVE_BYTES / gpu.bytes_per_s)
            eager, low, high = kernels() * launch, 0.0, 1e-3
            for _ in range(12):  # mean times grow with the time of a token
                middle = (low + high) / 2
                slower = 1e3 * mean(run(eager, middle)) > float(stated["TTFT mean"]["eager"])
                low, high = (low, middle) if slower else (middle, high)
            for side_of_it, fixed in (("eager", eager), ("graph", kernels() * KERNEL_FLOOR_S)):
                found = ttft_columns(run(fixed, low))
                row: Row = {"case": f"{side}x{side}, {1e6 * launch:g} us a launch", "phase": "published"}
                row |= {"variant": f"simulated {side_of_it}", "policy": _PUBLISHED[0], "workload": "published"}
                row |= {"images": 2, "tokens": 2 * tokens, "requests_count": _PUBLISHED[1]}
                told = "; ".join(f"{name.removeprefix('TTFT ')} {one[side_of_it]} ms" for name, one in stated.items())
                row["note"] = f"published: {told}; language model {1e6 * low:.1f} us a token"
                error = found["ttft_ms"] / float(stated["TTFT mean"][side_of_it])
                yield row | {"arrivals_per_s": _PUBLISHED[2], **found, "error_ratio": round(error, 4)}


def _published_times(tokens: int, per_image: float, weights_s: float, fixed: float, per_token: float) -> list[float]:
    requests = draw_requests(_PUBLISHED[1], _PUBLISHED[2], [(1, 1, 1)], (2,), seed=0)
    jobs = [Job(one.arrival, (tokens,) * 2, _QUESTION, _ANSWER) for one in requests]
    encode = CallCost(fixed, per_image / tokens)
    return simulate(jobs, Stages(encode=encode, language=CallCost(weights_s, per_token))).ttft
