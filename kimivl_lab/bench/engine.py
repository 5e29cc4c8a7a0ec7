"""Time to first token of a real vLLM server with and without this library's parts, under load.

    python -m kimivl_lab.bench.engine [--quick] [--minutes 14] [--engine-python .engine-venv/bin/python] [--out DIR]
    python -m kimivl_lab.bench.engine --simulate RECORD [--out DIR]

The arms are servers of one checkpoint: "vllm" (vLLM's tower and metadata), "metadata" and "tower" (see `engines.vllm`).
All of them use this library's processor, because vLLM has none for Kimi-VL. Servers are started one at a time, each arm
several times, in random order. The phases of the record:

    capacity     requests a second that "vllm" answers when all of them are there at once
    check        answers of an arm that differ from those of "vllm"; in float32 none may, or the arm is not timed
    calibration  requests one at a time: the engine's own clocks of the encoder and of the prefill
    restart      one load on one started server: the same arrivals and pixels for each arm
    load         the restarts of one load together; ratios are to "vllm", with the 99 % interval of `compare_pairs`
                 over `pairs_count` restarts, whose ratios are between `ttft_least_ratio` and `ttft_most_ratio`. One
                 pair does not show how a machine changes, two seldom show a difference, five do. (A record without
                 `pairs_count` has the interval of all requests together.)

and those of `bench.engine_simulation`, which --simulate computes again from the rows of a record, without an engine.
Times to first token are the client's, from the intended arrival. `encoder_ms`, `prefill_ms` (which contains it) and
`queue_ms` are the engine's, as means of a request; `outside_ms` is what the client waits beside both.

Test: tests/test_engine_bench.py. Record: engine__*.csv.
"""

import argparse
import asyncio
import json
import math
import os
import random
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import Any

import httpx
import torch

from ..engines.client import SERVER_TTFT, Endpoint, EndpointError, Outcome, run_load
from ..engines.load import Request, message
from ..engines.load_statistics import compare_pairs
from ..engines.server import ServerError, free_port, log_end, own_group, wait_for_health
from ..kimi_vl.random_checkpoint import write_random_checkpoint
from ..measure.records import Recorder, read_record
from . import harness
from .engine_simulation import SHARES, WORKLOADS, drawn, simulated_rows, ttft_columns
from .harness import Row

ARMS = {"vllm": ["processor"], "metadata": ["processor", "metadata"], "tower": ["processor", "tower"]}
# A checkpoint that two cores can serve: heads as published, layers and widths so that the encoder has about the half of
# a prompt's time, as the published model's FLOPs have (3.4 GFLOP a token in the encoder, 5.6 in the language model).
VISION = {"hidden_size": 144, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 538}
TEXT = {
    **{"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1408, "moe_intermediate_size": 176},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2},
}
REQUESTS = {"light": 12, "half": 30, "high": 60}  # of a load on one started server
QUICK_REQUESTS = {"light": 4, "half": 8, "high": 20}
# Images of one size each: by tokens for the encoder, and two large ones whose preparation costs more than their tokens.
CALIBRATION = (
    *(((224, 224),), ((448, 448),), ((448, 448),) * 2, ((448, 448),) * 4),
    *(((600, 1400),), ((2480, 3508),)),
)
QUESTION = "Describe the image."
NEW_TOKENS = 4
_ASKED = 12  # new tokens of a checked answer
_PAIRS = 20  # requests that a comparison needs
_SUMS = {
    "queue_ms": "vllm:request_queue_time_seconds_sum",
    "prefill_ms": "vllm:request_prefill_time_seconds_sum",
    "decode_ms": "vllm:request_decode_time_seconds_sum",
    "server_ttft_ms": f"{SERVER_TTFT}_sum",
}
_COUNT = "vllm:request_decode_time_seconds_count"
COLUMNS = (
    *("case", "variant", "phase", "workload", "policy", "load_share", "arrivals_per_s", "restart_count"),
    *("requests_count", "failed_count", "images", "tokens", "prompt_tokens", "answered_per_s"),
    *("ttft_ms", "ttft_low_ms", "ttft_high_ms", "ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99"),
    *("ttft_p99_low_ms", "ttft_p99_high_ms", "encoder_ms", "encoder_share", "outside_ms", *_SUMS),
    *("ttft_ratio", "ttft_low_ratio", "ttft_high_ratio", "ttft_p99_ratio", "ttft_least_ratio", "ttft_most_ratio"),
    *("encoder_ratio", "encoder_low_ratio", "encoder_high_ratio"),
    *("ranks_count", "batched_tokens", "error_ratio", "relative_error", "note", "pairs_count"),
)


@dataclass
class Measured:
    """Requests with what became of them, and the seconds that the engine's clocks moved meanwhile, by column."""

    outcomes: list[Outcome] = field(default_factory=list)
    clocks: dict[str, float] = field(default_factory=dict)
    encoder: list[float] = field(default_factory=list)  # seconds of each request, in the order of encoding
    seconds: float = 0.0

    @property
    def answered(self) -> list[Outcome]:
        return [one for one in self.outcomes if not one.failure]

    @classmethod
    def of(cls, parts: Iterable["Measured"]) -> "Measured":
        """All parts one after another, with the clocks that each of them has."""
        parts = list(parts)
        names = [name for name in parts[0].clocks if all(name in part.clocks for part in parts)]
        return cls(
            [one for part in parts for one in part.outcomes],
            {name: sum(part.clocks[name] for part in parts) for name in names},
            [one for part in parts for one in part.encoder],
            sum(part.seconds for part in parts),
        )

    def row(self) -> Row:
        """Columns of the client's and the engine's times; those of the engine are means of an answered request."""
        answered = self.answered
        row: Row = {"requests_count": len(self.outcomes), "failed_count": len(self.outcomes) - len(answered)}
        if not answered:
            return row
        row |= {"images": round(sum(one.images for one in answered) / len(answered), 1)}
        row |= {"tokens": round(sum(one.image_tokens for one in answered) / len(answered), 1)}
        row |= {"answered_per_s": round(len(answered) / self.seconds, 4)}
        row |= {name: round(1e3 * seconds / len(answered), 3) for name, seconds in self.clocks.items()}
        row |= ttft_columns([one.ttft_ms / 1e3 for one in answered if one.ttft_ms is not None])
        if "encoder_ms" in row:
            row["encoder_share"] = round(min(1.0, row["encoder_ms"] / row["ttft_ms"]), 4)
        return row


class EngineBench:
    """One run: starts the servers, checks and times them, and records each row when it is known."""

    def __init__(self, options: argparse.Namespace, recorder: Recorder, folder: Path, settings: Mapping[str, Any]):
        """`folder` is for a checkpoint, where the options name none, for logs and for what vLLM caches."""
        self.options, self.recorder, self.folder, self.settings = options, recorder, folder, settings
        self.checkpoint = options.checkpoint or folder / "model"
        self.started = time.monotonic()
        self.answers: list[Any] | None = None  # of "vllm"
        self.rates: dict[str, float] = {}  # of each workload: the capacity
        self.requests = dict(QUICK_REQUESTS if options.quick else REQUESTS)
        self.different: dict[str, float] = {}  # of each arm: the share of checked answers that are not those of "vllm"
        self.loads: dict[tuple[str, str, str], dict[int, Measured]] = {}  # by arm, workload and share; then by restart
        self.bodies: dict[tuple[int, str, str], list[bytes]] = {}  # of the restart's loads, the same for each arm
        self.versions: set[str] = set()

    def run(self) -> None:
        """Every restart of every arm. ServerError, EndpointError: a server did not come up, or answered nothing."""
        chance = random.Random(self.options.seed)
        orders = [chance.sample(list(ARMS), len(ARMS)) for _ in range(self.options.restarts)]
        if self.options.quick:  # the first server also gives the capacity
            orders = [["vllm", *(arm for arm in order if arm != "vllm")] for order in orders]
        else:
            self._session("vllm", None)
        for restart, order in enumerate(orders, start=1):
            for arm in order:
                begun = time.monotonic()
                self._session(arm, restart)
                takes, left = time.monotonic() - begun, 60 * self.options.minutes - (time.monotonic() - self.started)
                if restart > 1 and takes > 1.2 * left and (restart, arm) != (len(orders), order[-1]):
                    harness.progress(f"engine: {left:.0f} s left, too few for another server")
                    return

    def _session(self, arm: str, restart: int | None) -> None:
        begun = time.monotonic()
        with self._served(arm) as (url, process, log):
            harness.progress(f"engine {arm}, restart {restart or 0}: up after {time.monotonic() - begun:.0f} s")
            try:
                asyncio.run(self._measure(arm, restart, url, begun))
            except (EndpointError, ServerError, httpx.HTTPError) as error:
                end = f": {log_end(log)[-1000:]}" if process.poll() is not None else ""
                reason = str(error) or type(error).__name__
                raise ServerError(f"server {arm!r}, restart {restart or 0}: {reason}{end}") from error

    @contextmanager
    def _served(self, arm: str) -> Generator[tuple[str, Popen[bytes], Path]]:
        port = free_port()
        log = self.folder / f"{arm}.log"
        overrides = {"architectures": ["KimiVLLabForConditionalGeneration"], "kimivl_lab_parts": ARMS[arm]}
        root = Path(__file__).resolve().parents[2]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},  # vLLM sets its own
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
            **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"},
            "VLLM_CACHE_ROOT": str(self.folder / "cache"),
        }
        tokens, program = str(self.options.batched_tokens), "kimivl_lab.engines.vllm.timed_server"
        command = [
            *(self.options.engine_python, "-m", program, "--model", str(self.checkpoint)),
            *("--served-model-name", "kimi-vl", "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", self.options.dtype, "--max-model-len", tokens, "--max-num-batched-tokens", tokens),
            *("--max-num-seqs", str(self.options.requests)),
            *("--mm-processor-kwargs", json.dumps({"in_token_limit": self.options.in_token_limit})),
            *("--limit-mm-per-prompt", json.dumps({"image": 8}), "--hf-overrides", json.dumps(overrides)),
            *shlex.split(self.options.server_options),
        ]
        if self.options.device == "cpu":
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
            command.append("--enforce-eager")
        with own_group(command, log, environment) as process:
            url = f"http://127.0.0.1:{port}"
            wait_for_health(url, process, log, self.options.start_limit)
            yield url, process, log

    async def _measure(self, arm: str, restart: int | None, url: str, begun: float) -> None:
        async with Endpoint(url, "kimi-vl", timeout=self.options.timeout) as endpoint:
            with_version = await endpoint.client.get(f"{url}/version")
            self.versions.add(with_version.json()["version"] if with_version.status_code == 200 else "not told")
            if not await self._same_answers(arm, restart, endpoint):
                return
            await self._calibrate(arm, restart, endpoint)
            if not self.rates:
                without_loads = time.monotonic() - begun
                await self._capacity(endpoint)
                self._fit_the_time(without_loads)
            if restart is None:
                return
            loads = [(workload, share) for workload in WORKLOADS for share in SHARES]
            random.Random(f"{self.options.seed} {restart}").shuffle(loads)
            for workload, share in loads:
                await self._load(arm, restart, workload, share, endpoint)

    async def _same_answers(self, arm: str, restart: int | None, endpoint: Endpoint) -> bool:
        asked = [Request(0, 0.0, (), 0)]
        asked += [drawn(self.settings, workload, "light", 0, 1, 1.0)[0] for workload in WORKLOADS]
        answers = [await self._answer(endpoint, request) for request in asked]
        if self.answers is None:
            self.answers = answers
        different = sum(one != other for one, other in zip(answers, self.answers, strict=True)) / len(answers)
        self.different[arm] = round(different, 4)
        row = {"case": "answers", "variant": arm, "phase": "check", "requests_count": len(asked)}
        self.recorder.add(row | {"restart_count": restart or 0, "relative_error": self.different[arm]})
        if different and self.options.dtype == "float32":
            harness.progress(f"engine {arm}: {different:.0%} of the answers differ from vllm's, so it is not timed")
            return False
        return True

    async def _answer(self, endpoint: Endpoint, request: Request) -> Any:
        body = {"model": "kimi-vl", "messages": [message(request, QUESTION)], "max_tokens": _ASKED, "temperature": 0}
        response = await endpoint.client.post(
            f"{endpoint.root}/v1/chat/completions", json=body | {"return_token_ids": True}
        )
        if response.status_code != 200:
            raise ServerError(f"HTTP {response.status_code} to a checked request: {response.text[:300]}")
        choice = response.json()["choices"][0]
        return choice.get("token_ids") or choice["message"]["content"]

    async def _calibrate(self, arm: str, restart: int | None, endpoint: Endpoint) -> None:
        """Each size alone, some times in turn; the first of each is not counted. Medians."""
        found: dict[tuple[tuple[int, int], ...], list[Measured]] = {sizes: [] for sizes in CALIBRATION}
        for repeat in range(3 if self.options.quick else 6):
            for place, sizes in enumerate(CALIBRATION):
                request = Request(0, 0.0, sizes, seed=1000 * repeat + place)
                one = await self._timed(endpoint, [request], bodies_of(endpoint, [request], 1 + (restart or 0)))
                if repeat and one.answered:
                    found[sizes].append(one)
        for sizes, singles in found.items():
            if not singles:
                raise ServerError(f"a single request with {len(sizes)} images was not answered")
            answer = singles[0].answered[0]
            row: Row = {"case": f"{len(sizes)} of {sizes[0][0]}x{sizes[0][1]}", "variant": arm, "phase": "calibration"}
            row |= {"restart_count": restart or 0, "requests_count": len(singles), "images": len(sizes)}
            row |= {"tokens": answer.image_tokens, "prompt_tokens": answer.prompt_tokens}
            waits = [one.answered[0].ttft_ms or 0.0 for one in singles]
            row["ttft_ms"] = round(median(waits), 3)
            for name in singles[0].clocks:
                row[name] = round(1e3 * median(one.clocks[name] for one in singles), 3)
            if "prefill_ms" in row:
                row["decode_ms"] = round(row["decode_ms"] / max(1, (answer.new_tokens or 1) - 1), 3)  # of one step
                inside = [1e3 * (one.clocks["queue_ms"] + one.clocks["prefill_ms"]) for one in singles]
                outside = median(wait - engine for wait, engine in zip(waits, inside, strict=True))
                row["outside_ms"] = round(max(0.0, outside), 3)
            self.recorder.add(row)

    async def _capacity(self, endpoint: Endpoint) -> None:
        for workload in WORKLOADS:
            count = 10 if self.options.quick else 24
            requests = drawn(self.settings, workload, "high", 0, count, 1e6)
            found = await self._timed(endpoint, requests, bodies_of(endpoint, requests, 0))
            if len(found.answered) < count:
                raise ServerError(f"{count - len(found.answered)} of {count} requests at once failed")
            self.rates[workload] = count / found.seconds
            row = {"case": workload, "variant": "vllm", "phase": "capacity", "workload": workload}
            self.recorder.add(row | {"arrivals_per_s": self.rates[workload], **found.row(), "note": "all at once"})

    def _fit_the_time(self, first: float) -> None:
        """Fewer requests where the planned ones would not end in the given minutes; enough to compare in any case."""
        servers = len(ARMS) * self.options.restarts - (1 if self.options.quick else 0)
        left = 60 * self.options.minutes - (time.monotonic() - self.started) - servers * first
        needed = sum(self.requests[name] / (SHARES[name] * rate) for name in SHARES for rate in self.rates.values())
        scale = left / (1.1 * needed * len(ARMS) * self.options.restarts)
        if scale < 1 and not self.options.quick:
            least = -(-_PAIRS // self.options.restarts)
            self.requests = {name: max(least, int(scale * count)) for name, count in self.requests.items()}
        told = ", ".join(f"{rate:.2f}/s {name}" for name, rate in self.rates.items())
        harness.progress(f"engine: capacity {told}; requests of a load {self.requests}")

    async def _load(self, arm: str, restart: int, workload: str, share: str, endpoint: Endpoint) -> None:
        rate, count = SHARES[share] * self.rates[workload], self.requests[share]
        requests = drawn(self.settings, workload, share, restart, count, rate)
        self.bodies = {key: bodies for key, bodies in self.bodies.items() if key[0] == restart}
        key = (restart, workload, share)
        if key not in self.bodies:
            self.bodies[key] = await asyncio.to_thread(bodies_of, endpoint, requests, 10 + restart)
        found = await self._timed(endpoint, requests, self.bodies[key])
        row: Row = {"case": f"{workload} {share}", "variant": arm, "phase": "restart", "workload": workload}
        row |= {"load_share": SHARES[share], "arrivals_per_s": rate, "restart_count": restart}
        note = failures(found)
        if found.encoder and (skipped := len(found.answered) - len(found.encoder)) > 0:
            note += f"; the encoder skipped {skipped}"  # images that a cache holds
        self.recorder.add(row | found.row() | {"relative_error": self.different[arm], "note": note})
        if not found.answered:
            raise ServerError(f"none of {count} requests was answered: {failures(found)}")
        self.loads.setdefault((arm, workload, share), {})[restart] = found

    async def _timed(self, endpoint: Endpoint, requests: Sequence[Request], bodies: Sequence[bytes]) -> Measured:
        """Sends requests at their arrivals, between two looks at the engine's clocks."""
        limit = self.settings["in_token_limit"]
        outcomes = [Outcome(one.index, one.arrival, len(one.sizes), one.image_tokens(limit)) for one in requests]
        await self._encoder_seconds(endpoint)  # forgets earlier requests
        before = await endpoint.metrics()
        last = requests[-1].arrival + 60 + 2 * self.options.timeout
        seconds = await run_load(endpoint, requests, bodies, outcomes, lambda _: None, time_limit=last)
        answered = sum(not one.failure for one in outcomes)
        for _ in range(20):  # the server counts a request after it has sent its last byte
            after = await endpoint.metrics()
            if _COUNT not in after or after[_COUNT] - before.get(_COUNT, 0) >= answered:
                break
            await asyncio.sleep(0.05)
        clocks = {name: after[key] - before.get(key, 0.0) for name, key in _SUMS.items() if key in after}
        encoder = await self._encoder_seconds(endpoint)
        if encoder:
            clocks["encoder_ms"] = sum(encoder)
        return Measured(outcomes, clocks, encoder, seconds)

    async def _encoder_seconds(self, endpoint: Endpoint) -> list[float]:
        """The engine's own clock of its encoder, for each request since the last call; empty where it has none.

        Requests that are encoded in one call share its time evenly. Of several ranks the slowest counts.
        """
        body = {"method": "get_encoder_timing_stats"}
        try:
            response = await endpoint.client.post(f"{endpoint.root}/collective_rpc", json=body)
        except httpx.HTTPError:
            return []
        if response.status_code != 200:
            return []
        ranks = [[one["encoder_forward_secs"] for one in rank.values()] for rank in response.json()["results"] if rank]
        return max(ranks, key=sum, default=[])

    def pooled_rows(self) -> Iterator[Row]:
        """The restarts of each load together, with ratios to "vllm" of the requests that both answered."""
        keys = [(arm, workload, share) for workload in WORKLOADS for share in SHARES for arm in ARMS]
        for arm, workload, share in (key for key in keys if key in self.loads):
            parts = self.loads[arm, workload, share]
            row: Row = {"case": f"{workload} {share}", "variant": arm, "phase": "load", "workload": workload}
            row |= {"load_share": SHARES[share], "arrivals_per_s": SHARES[share] * self.rates[workload]}
            row |= {"restart_count": len(parts), "relative_error": self.different[arm]}
            row |= Measured.of(parts.values()).row()
            others = self.loads.get(("vllm", workload, share), {})
            both = [restart for restart in parts if restart in others]
            if arm == "vllm" or not both:
                yield row
                continue
            pairs = [answered_by_both(others[restart], parts[restart]) for restart in both]
            pairs = [pair for pair in pairs if pair[0]]
            if sum(len(base) for base, _ in pairs) >= _PAIRS:
                told = compare_pairs(pairs)
                ratio = told["mean"].ratio
                row |= {"ttft_ratio": round(ratio.value, 4), "ttft_low_ratio": round(ratio.low, 4)}
                row |= {"ttft_high_ratio": round(ratio.high, 4)}
                row["ttft_p99_ratio"] = round(told["P99"].ratio.value, 4)
                row |= {"note": told["mean"].verdict.replace("B", arm), "pairs_count": len(pairs)}
                restarts = [sum(own) / sum(base) for base, own in pairs]
                row |= {"ttft_least_ratio": round(min(restarts), 4), "ttft_most_ratio": round(max(restarts), 4)}
            encoders = [(others[restart].encoder, parts[restart].encoder) for restart in both]
            encoders = [(base, own) for base, own in encoders if base and len(base) == len(own)]
            if sum(len(base) for base, _ in encoders) >= _PAIRS:
                ratio = compare_pairs(encoders)["mean"].ratio
                row |= {"encoder_ratio": round(ratio.value, 4), "encoder_low_ratio": round(ratio.low, 4)}
                row["encoder_high_ratio"] = round(ratio.high, 4)
            yield row


def bodies_of(endpoint: Endpoint, requests: Sequence[Request], salt: int) -> list[bytes]:
    return [endpoint.body(message(request, QUESTION, salt), NEW_TOKENS) for request in requests]


def answered_by_both(first: Measured, second: Measured) -> tuple[list[float], list[float]]:
    """Times to first token of the requests that both answered, in ms."""
    times = [
        (one.ttft_ms, other.ttft_ms)
        for one, other in zip(first.outcomes, second.outcomes, strict=True)
        if one.ttft_ms is not None and other.ttft_ms is not None and not one.failure and not other.failure
    ]
    return [one for one, _ in times], [other for _, other in times]


def failures(found: Measured) -> str:
    """How many requests failed, by kind; "" for none."""
    kinds = [one.failure for one in found.outcomes if one.failure]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The record in a few numbers."""
    loads = [row for row in rows if row["phase"] == "load"]
    ratios = {f"{row['variant']}, {row['case']}": row for row in loads if row.get("ttft_ratio")}
    errors = [abs(row["error_ratio"] - 1) for row in rows if row["phase"] == "simulation"]
    return {
        "ttft_ms": {f"{row['variant']}, {row['case']}": row["ttft_ms"] for row in loads},
        "ttft_ratio": {
            name: [row["ttft_ratio"], row["ttft_low_ratio"], row["ttft_high_ratio"], row["note"]]
            for name, row in ratios.items()
        },
        "encoder_ratio": {name: row.get("encoder_ratio") for name, row in ratios.items()},
        "encoder_share": {row["case"]: row.get("encoder_share") for row in loads if row["variant"] == "vllm"},
        "median_simulation_error": round(median(errors), 4) if errors else None,
    }


@contextmanager
def _ends_on_signals() -> Generator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl-C does: the servers have groups of their own and get neither."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def measure(options: argparse.Namespace) -> int:
    """Runs the benchmark; 1 if it was stopped by a server or a signal, or if an arm's answers differ."""
    settings = harness.settings(options, **settings_of(options))
    stopped, recorder = "", partial(Recorder, directory=options.out, device=options.device, settings=settings)
    with tempfile.TemporaryDirectory() as folder, _ends_on_signals():
        if options.checkpoint is None:
            dtype = getattr(torch, options.dtype)
            write_random_checkpoint(Path(folder) / "model", vocab_size=2048, dtype=dtype, vision=VISION, text=TEXT)
        try:
            with recorder("engine", options.dtype, COLUMNS) as record:
                bench = EngineBench(options, record, Path(folder), settings)
                try:
                    bench.run()
                except (ServerError, KeyboardInterrupt) as error:
                    stopped = str(error) or "interrupted"
                    harness.progress(f"engine: stopped. {stopped}")
                record.describe(engine=sorted(bench.versions), stopped=stopped)
                for row in bench.pooled_rows():
                    record.add(row)
                try:
                    for row in simulated_rows(record.rows, settings):
                        record.add(row)
                except ValueError as error:
                    harness.progress(f"engine: nothing simulated, {error}")
                if stopped:
                    raise ServerError(stopped)
        except ServerError:
            pass
    harness.progress(f"wrote {record.path}")
    untimed = [row["variant"] for row in record.rows if row["phase"] == "check" and row["relative_error"]]
    harness.finish(
        {"benchmark": "engine", "stopped": stopped, "other_answers": sorted(set(untimed)), **summary(record.rows)}
    )
    return 1 if stopped or (untimed and options.dtype == "float32") else 0


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the simulation needs to know, beside the rows, and what a reader does."""
    return {
        "timer": "the client's clock, from the intended arrival",
        "restarts": options.restarts,
        "batched_tokens": options.batched_tokens,
        "max_requests": options.requests,
        "in_token_limit": options.in_token_limit,
        "new_tokens": NEW_TOKENS,
        "chunked": options.device != "cpu",  # vLLM's attention for Kimi-VL cannot on a CPU
        "arms": ARMS,
        "checkpoint": options.checkpoint.name if options.checkpoint else {"vision": VISION, "text": TEXT},
        "server_options": options.server_options,
    }


def simulate_record(path: Path, out: Path) -> None:
    """The simulated phases of a record again, as a record of its own in `out`."""
    rows, origin = read_record(path)
    measured = [row for row in rows if row["phase"] in ("capacity", "calibration", "restart", "load")]
    parts = path.stem.split("__")
    with Recorder("engine_simulation", parts[2], COLUMNS, directory=out, settings={"source": path.name}) as record:
        for row in simulated_rows(measured, origin):
            record.add(row)
    harness.progress(f"wrote {record.path}")
    harness.finish({"benchmark": "engine", **summary(record.rows)})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser("engine", __doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="%(default)s")
    parser.add_argument(
        "--engine-python", default=".engine-venv/bin/python", help="of vLLM's environment (%(default)s)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="folder of a Kimi-VL model; a small random one is made otherwise"
    )
    parser.add_argument("--minutes", type=float, default=14, help="of the whole run, about (%(default)s)")
    parser.add_argument("--restarts", type=int, help="of each arm's server (3, with --quick 1)")
    parser.add_argument("--batched-tokens", type=int, default=4096, help="--max-num-batched-tokens (%(default)s)")
    parser.add_argument("--requests", type=int, default=16, help="--max-num-seqs (%(default)s)")
    parser.add_argument("--in-token-limit", type=int, help="patches of an image at most (1024 on a CPU, else 4096)")
    parser.add_argument("--server-options", default="", help="further options of every server, as one text")
    parser.add_argument("--timeout", type=float, default=60, help="seconds of a request (%(default)s)")
    parser.add_argument("--start-limit", type=float, default=240, help="seconds of a server's start (%(default)s)")
    parser.add_argument("--simulate", type=Path, metavar="RECORD", help="only simulate, from the rows of a record")
    options = parser.parse_args(arguments)
    for name in ("minutes", "restarts", "batched_tokens", "requests", "in_token_limit", "timeout", "start_limit"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be a number above 0, got {value}")
    if options.checkpoint is not None and not options.checkpoint.is_dir():
        parser.error(f"--checkpoint {options.checkpoint} is not a folder")
    if options.simulate:
        if not options.simulate.is_file():
            parser.error(f"--simulate {options.simulate} is not a file")
        return simulate_record(options.simulate, options.out)
    if not Path(options.engine_python).exists():
        parser.error(
            f"{options.engine_python} does not exist: `make engine-venv` makes .engine-venv, or name another one"
        )
    options.restarts = options.restarts or (1 if options.quick else 3)
    options.in_token_limit = options.in_token_limit or (1024 if options.device == "cpu" else 4096)
    sys.exit(measure(options))


if __name__ == "__main__":
    main()
