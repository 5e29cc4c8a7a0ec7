"""What notebook 80 uses: a small Kimi-VL that answers one request at a time, queues, and the records of engines.

    server = SmallServer()
    server.answer(image)                        # stage -> milliseconds, up to the first token
    run = open_loop(serve, arrivals)            # when each request was to arrive, was sent and was answered
    first_tokens([0, 2, 3], [4, 4, 4])          # [4, 8, 12]: one request at a time, in order of arrival
    mean_ttft(rate=8, services=[0.1])           # 0.3 s: 0.1 of service and 0.2 of waiting

Times of queues are in seconds unless a name ends in `_ms`.
Test: tests/test_lessons_ttft.py.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from transformers.utils import logging

from ..config import KimiVLConfig, MoonViTConfig
from ..datasets import data_path
from ..engines.load_statistics import STATISTICS
from ..engines.simulation import CallCost, Job, Stages, simulate
from ..geometry import image_geometry
from ..kimi_vl.model import KimiVLForConditionalGeneration
from ..kimi_vl.processor import KimiVLProcessor
from ..kimi_vl.random_checkpoint import write_random_checkpoint
from ..measure.published import published_rows
from ..measure.records import find_record, read_record
from ..measure.timing import Timing
from .stages import stage_work

PART_CHOICES = ("none", "metadata", "tower", "both")
Row: TypeAlias = Mapping[str, Any]
STAGES = ("preprocess", "encode", "prefill", "first token")
# A narrow and shallow language model: a prompt takes a CPU a fraction of a second, and the encoder, as in the published
# model, has about half of the FLOPs.
_TEXT = {
    **{"hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 2816, "moe_intermediate_size": 704},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "n_shared_experts": 2,
}
_VOCABULARY = 4096


# --- one request -----------------------------------------------------------------------------------------------------


class Flops(NamedTuple):
    """FLOPs until the first token of one prompt."""

    encode: int
    prefill: int

    @property
    def encode_share(self) -> float:
        return self.encode / (self.encode + self.prefill)


def weights_of_a_token(text: Any) -> int:
    """The weights of all layers that one token is multiplied with: of the routed experts, those that it is sent to.

    Embedding and output layer are left out. The published language model holds 15.3 billion of these weights, and a
    token visits 2.2 billion.
    """
    width, heads, latent = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
    query = width * heads * (text.qk_nope_head_dim + text.qk_rope_head_dim)
    key_value = width * (latent + text.qk_rope_head_dim) + latent * heads * (text.qk_nope_head_dim + text.v_head_dim)
    attention = query + key_value + heads * text.v_head_dim * width
    dense = 3 * width * text.intermediate_size
    visited = text.num_experts_per_tok + text.n_shared_experts
    sparse = width * text.n_routed_experts + 3 * width * text.moe_intermediate_size * visited
    first = text.first_k_dense_replace
    return text.num_hidden_layers * attention + first * dense + (text.num_hidden_layers - first) * sparse


def request_flops(config: KimiVLConfig, patches: Sequence[int], text_tokens: int) -> Flops:
    """FLOPs of the encoder and of the prefill, for images of so many patches each and a prompt with this much text.

    The prefill multiplies each token with its weights, compares each token with all of the prompt (half of these pairs
    are masked, and computed all the same), and computes the output layer for the last token alone.
    """
    text: Any = config.text_config
    tokens = sum(patches) // 4 + text_tokens
    head = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    pairs = 2 * text.num_hidden_layers * text.num_attention_heads * head * tokens**2
    prefill = 2 * weights_of_a_token(text) * tokens + pairs + 2 * text.hidden_size * text.vocab_size
    encode = sum(work.flops for work in stage_work(config, patches, 4).values())
    return Flops(encode, prefill)


class SmallServer:
    """Kimi-VL with random weights, small enough for a CPU, which answers one request at a time with one token."""

    def __init__(self) -> None:
        vision = MoonViTConfig.preset("lab")
        sizes = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows keeps files that are mapped
                write_random_checkpoint(
                    folder,
                    dtype=torch.float32,
                    vocab_size=_VOCABULARY,
                    vision={name: getattr(vision, name) for name in sizes},
                    text=_TEXT,
                )
                self.processor = KimiVLProcessor.from_pretrained(folder)
                self.model = KimiVLForConditionalGeneration.from_pretrained(folder).eval()
        finally:
            if shown:
                logging.enable_progress_bar()

    def prompt(self, image: Path | Image.Image) -> Any:
        """The processor's output for a question about `image`: ids, patches and grid."""
        key = "image" if isinstance(image, Image.Image) else "path"
        content = [{"type": "image", key: image}, {"type": "text", "text": "What is this?"}]
        conversation: Any = [{"role": "user", "content": content}]
        return self.processor.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )

    @torch.no_grad()
    def answer(self, image: Path | Image.Image) -> dict[str, float]:
        """Answers a question about `image` up to the first token; stage -> milliseconds, in the order of `STAGES`."""
        clock = [time.perf_counter()]
        inputs = self.prompt(image)
        clock.append(time.perf_counter())
        features = self.model.get_image_features(inputs["pixel_values"], inputs["image_grid_hws"])
        clock.append(time.perf_counter())
        logits = self.model(inputs["input_ids"], image_embeds=features, use_cache=True, logits_to_keep=1).logits
        clock.append(time.perf_counter())
        self.processor.decode(logits[0, -1].argmax())
        clock.append(time.perf_counter())
        return dict(zip(STAGES, (1e3 * np.diff(clock)).tolist(), strict=True))

    def time_stages(self, image: Path | Image.Image, repeats: int = 7) -> dict[str, Timing]:
        """Each stage's time over `repeats` requests, after two uncounted ones."""
        answers = [self.answer(image) for _ in range(2 + repeats)][2:]
        return {stage: Timing.of([answer[stage] for answer in answers]) for stage in STAGES}

    def flops(self, size: tuple[int, int]) -> Flops:
        """FLOPs of a request with one image of (width, height) pixels."""
        text_tokens = self.prompt(Image.new("RGB", (28, 28)))["input_ids"].numel() - 1  # that image is one token
        return request_flops(self.model.config, [image_geometry(*size).patches], text_tokens)


# --- a queue ---------------------------------------------------------------------------------------------------------


def poisson(rate: float, requests: int, seed: int = 0) -> np.ndarray:
    """Arrivals in seconds, `rate` a second on average, the first at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, requests)
    return np.cumsum(gaps) - gaps[0]


def first_tokens(arrivals: Sequence[float], services: Sequence[float]) -> list[float]:
    """When each request has its first token, if the server works on one at a time, in order of arrival.

    Arrivals 0, 2, 3, 20 and services of 4 give 4, 8, 12, 24: the server is idle from 12 to 20.
    """
    free, done = 0.0, []
    for arrival, service in zip(arrivals, services, strict=True):
        free = max(free, arrival) + service
        done.append(free)
    return done


def ttfts(arrivals: np.ndarray, service: float) -> np.ndarray:
    """Time to first token of each request as in `first_tokens`, for services of one length and many requests.

    Request i ends i - j + 1 services behind the arrival of request j, where j began the busy time that i is in: the
    latest such end of all j up to i.
    """
    number = np.arange(len(arrivals))
    return np.maximum.accumulate(arrivals - number * service) + (number + 1) * service - arrivals


def mean_wait(rate: float, services: Sequence[float]) -> float:
    """The mean time that a request waits for the server; Poisson arrivals, formula of Pollaczek and Khinchine.

    Args:
        rate: requests a second.
        services: seconds of service, each as frequent as the others.

    Raises:
        ValueError: the server is busy all the time, so that the queue grows without end.
    """
    times = np.asarray(services, dtype=float)
    busy = rate * times.mean()
    if not 0 <= busy < 1:
        raise ValueError(f"the utilisation must be below 1, got {busy:g}")
    return rate * (times**2).mean() / (2 * (1 - busy))


def mean_ttft(rate: float, services: Sequence[float]) -> float:
    """Service and wait together, in seconds."""
    return float(np.mean(services)) + mean_wait(rate, services)


def curves(utilisations: Sequence[float], requests: int = 500_000, seed: int = 0) -> dict[str, list[float]]:
    """Statistic -> TTFT at each utilisation, in services: simulated Poisson arrivals at one server."""
    found: dict[str, list[float]] = {name: [] for name in ("mean", "median", "P99")}
    for utilisation in utilisations:
        times = ttfts(poisson(utilisation, requests, seed), 1.0)
        for name, values in found.items():
            values.append(float(STATISTICS[name](times)))
    return found


@dataclass(frozen=True)
class Run:
    """Seconds from the start of a load test, one entry for each request: it was to arrive, was sent, was answered."""

    intended: np.ndarray
    sent: np.ndarray
    answered: np.ndarray

    @property
    def latency(self) -> np.ndarray:
        return self.answered - self.intended


def open_loop(serve: Callable[[int], object], arrivals: Sequence[float] | np.ndarray) -> Run:
    """Serves each request at its arrival or, if the server is busy then, as soon as it is free.

    Args:
        serve: answers request number i and returns when its first token is there.
        arrivals: in seconds, fixed before the test.
    """
    sent, answered = [], []
    start = time.perf_counter()
    for number, arrival in enumerate(arrivals):
        time.sleep(max(0.0, start + arrival - time.perf_counter()))
        sent.append(time.perf_counter() - start)
        serve(number)
        answered.append(time.perf_counter() - start)
    return Run(np.asarray(arrivals), np.array(sent), np.array(answered))


def statistics_ms(seconds: np.ndarray) -> dict[str, float]:
    """Mean, median and P99 in milliseconds."""
    return {name: 1e3 * float(STATISTICS[name](seconds)) for name in ("mean", "median", "P99")}


# --- luck, and a faster encoder --------------------------------------------------------------------------------------


def ratios(
    rate: float, before: float, after: float, requests: int, runs: int, same_arrivals: bool
) -> dict[str, np.ndarray]:
    """Statistic -> its value with the service `after` over that with `before`, for each of `runs` tests.

    Args:
        same_arrivals: whether both servers of a test see the same arrivals, or each its own.
    """
    found: dict[str, list[float]] = {name: [] for name in ("mean", "median", "P99")}
    for run in range(runs):
        first = poisson(rate, requests, seed=2 * run)
        second = first if same_arrivals else poisson(rate, requests, seed=2 * run + 1)
        a, b = ttfts(first, before), ttfts(second, after)
        for name, values in found.items():
            values.append(float(STATISTICS[name](b) / STATISTICS[name](a)))
    return {name: np.array(values) for name, values in found.items()}


def p99_of_tests(rate: float, service: float, requests: int = 200, tests: int = 400) -> tuple[float, float]:
    """The P99, in seconds, that 5 % and 95 % of many tests stay below; each test draws its own arrivals."""
    found = [STATISTICS["P99"](ttfts(poisson(rate, requests, seed), service)) for seed in range(tests)]
    low, high = np.quantile(found, (0.05, 0.95))
    return float(low), float(high)


def median_of_tests(rate: float, service: float, requests: int = 200, tests: int = 400) -> float:
    """The mean over many tests of their median TTFT, in seconds."""
    return float(np.mean([np.median(ttfts(poisson(rate, requests, seed), service)) for seed in range(tests)]))


def highest_rate(service: float, ttft: float) -> float:
    """The rate at which the mean TTFT of one server is `ttft`, both in seconds."""
    waits = 2 * (ttft - service) / service
    return waits / (1 + waits) / service


def service_of(rate: float, ttft: float) -> float:
    """The service, in seconds, with which one server has this mean TTFT at this rate."""
    # mean_ttft's formula solved for the service s: rate * s^2 - 2 * (1 + rate * ttft) * s + 2 * ttft = 0
    return (1 + rate * ttft - (1 + (rate * ttft) ** 2) ** 0.5) / rate


def ttft_with(rate: float, stages: Mapping[str, float], stage: str, factor: float) -> float:
    """The mean TTFT of one server, in ms, when one of its stages (in ms) is `factor` times as fast."""
    service = sum(ms / factor if name == stage else ms for name, ms in stages.items())
    return float(1e3 * mean_ttft(rate, [service / 1e3]))


def batched(arrivals: Sequence[float], fixed: float, each: float) -> list[float]:
    """TTFT of each request at a server whose step takes all that wait, by the simulator; the step takes
    `fixed + each * requests` seconds."""
    stages = Stages(encode=CallCost(), language=CallCost(fixed_s=fixed, per_token_s=each))
    return simulate([Job(arrival) for arrival in arrivals], stages).ttft


# --- what others measured --------------------------------------------------------------------------------------------


def published(source: str = "vllm#41992") -> dict[str, tuple[float, float]]:
    """Statistic -> TTFT in milliseconds, eager and with graphs, as published for Kimi-VL on an RTX 4090."""
    rows = [
        row for row in published_rows("encoder_graphs") if row["source"] == source and row["metric"].startswith("TTFT")
    ]
    return {row["metric"].removeprefix("TTFT "): (float(row["eager"]), float(row["graph"])) for row in rows}


def published_table(rows: Sequence[Row]) -> str:
    """The published TTFTs beside two models of them: one queue, and the simulator of an engine.

    Args:
        rows: of the engine's record, whose phase "published" holds the simulator's, for several sizes of images and
            times of a launch.
    """
    stated = published()
    services = [service_of(8, mean / 1e3) for mean in stated["mean"]]
    queue = {"mean": ["as published"] * 2, "median": [_range([1e3 * median_of_tests(8, one)]) for one in services]}
    queue["P99"] = [_range(1e3 * np.array(p99_of_tests(8, one))) for one in services]
    columns = {"mean": "ttft_ms", "median": "ttft_ms_p50", "P99": "ttft_ms_p99"}
    lines = [f"{'TTFT, ms':10s}{'published':>18s}{'ratio':>8s}{'one queue':>28s}{'simulator':>28s}"]
    lines += [f"{'':10s}{'eager  graphs':>18s}{'':8s}{'eager        graphs':>28s}{'eager        graphs':>28s}"]
    for name, (eager, graphs) in stated.items():
        cells = [
            _range([row[columns[name]] for row in rows if row["variant"] == f"simulated {side}"])
            for side in ("eager", "graph")
        ]
        pairs = [f"{left:>15s}{right:>13s}" for left, right in (queue[name], cells)]
        lines.append(f"{name:10s}{eager:10.0f}{graphs:8.0f}{graphs / eager:8.2f}{''.join(pairs)}")
    return "\n".join(lines)


def _range(values: Sequence[float] | np.ndarray) -> str:
    low, high = (f"{value:.0f}" for value in (min(values), max(values))) if len(values) else ("-", "-")
    return low if low == high else f"{low} to {high}"


# --- vLLM's record ---------------------------------------------------------------------------------------------------


def engine_record() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and origin of the kept record of vLLM, unmodified and with this library's parts."""
    return read_record(find_record("engine", data_path("measurements")))


def engine_table(rows: Sequence[Row]) -> str:
    """One line for each measured load and variant: TTFT, the engine's own clock of its encoder, and the ratios."""
    errors = {(row["case"], row["policy"]): row["error_ratio"] for row in rows if row["phase"] == "simulation"}
    lines = ["times in ms      variant       mean      P99  encoder    mean / vllm, 99 % interval   simulated"]
    for row in _measured(rows):
        case, variant = row["case"], row["variant"]
        times = f"{row['ttft_ms']:8.0f} {row['ttft_ms_p99']:8.0f} {row['encoder_ms']:8.0f}"
        ratio = ""
        if row["ttft_ratio"]:
            ratio = f"{row['ttft_ratio']:.3f} ({row['ttft_low_ratio']:.3f} to {row['ttft_high_ratio']:.3f})"
        error = f"{errors[case, variant]:.2f}" if (case, variant) in errors else ""
        lines.append(f"{case:16s} {variant:9s} {times}    {ratio:26s} {error:>11s}")
    return "\n".join(lines)


def faster_parts(rows: Sequence[Row], case: str = "published high") -> str:
    """Which of our parts is faster than unmodified vLLM, by the record's own verdict; one of `PART_CHOICES`."""
    notes = {row["variant"]: row["note"] for row in _measured(rows) if row["case"] == case}
    faster = [name for name in ("metadata", "tower") if (notes.get(name) or "").startswith(f"{name} is faster")]
    return "both" if len(faster) == 2 else (faster or ["none"])[0]


class EngineKnee(NamedTuple):
    """Columns of one workload and variant over its loads: what the simulator predicts, and what was measured.

    Attributes:
        predicted: `load_share` and `ttft_ms`.
        measured: the same, and the ends of a 95 % interval, `ttft_low_ms` and `ttft_high_ms`.
    """

    predicted: dict[str, list[float]]
    measured: dict[str, list[float]]


def engine_knees(rows: Sequence[Row]) -> dict[str, dict[str, EngineKnee]]:
    """Workload -> variant -> what the simulator predicts for it at many loads, and what was measured at some."""
    found: dict[str, dict[str, EngineKnee]] = {}
    for row in _measured(rows):
        workload, variant = row["workload"], row["variant"]
        if variant in found.setdefault(workload, {}):
            continue
        own = [one for one in _measured(rows) if (one["workload"], one["variant"]) == (workload, variant)]
        predicted = [
            one
            for one in rows
            if (one["phase"], one["workload"], one["policy"]) == ("prediction", workload, variant)
            and "of capacity" in one["case"]
        ]
        found[workload][variant] = EngineKnee(
            {name: [one[name] for one in predicted] for name in ("load_share", "ttft_ms")},
            {name: [one[name] for one in own] for name in ("load_share", "ttft_ms", "ttft_low_ms", "ttft_high_ms")},
        )
    return found


def _measured(rows: Sequence[Row]) -> list[Row]:
    """The loads by workload and rate, and the variants of each "vllm" first."""
    found = [row for row in rows if row["phase"] == "load" and row["ttft_ms"] is not None]
    order = ("vllm", *PART_CHOICES[1:3])
    return sorted(found, key=lambda row: (row["workload"], row["load_share"], order.index(row["variant"])))
