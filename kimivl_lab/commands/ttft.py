"""`kimivl-lab ttft`: time to first token of a running server under a load of requests with images.

A folder holds a run: `run.json` (what was asked for), `requests.jsonl` (one line for each request, written when it
ends) and `summary.json`. A run that is killed keeps the first two, and `--show` summarises them.

Test: tests/test_ttft.py.
"""

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from ..datasets import load_sizes
from ..engines.client import CACHE_HITS, CACHE_QUERIES, SERVER_TTFT, Endpoint, EndpointError, Outcome, run_load
from ..engines.load import Request, draw_requests, message
from ..engines.load_statistics import compare_pairs, summarise
from ..geometry import image_geometry
from ..planner.workload import read_sizes
from .output import CommandError, progress_bar, show, tell

QUESTION = "Describe the image."
_CALIBRATION = (448, 336)  # width x height of the image that shows what a prompt costs beside its images
_SAME = ("requests", "rate", "arrivals", "seed", "images_per_request", "sizes", "max_tokens", "in_token_limit")


@dataclass
class Calibration:
    """Prompt tokens without an image, and those that an image adds beside its own; None where the server tells none."""

    text: int | None = None
    around_an_image: int | None = None

    def expected(self, images: int, image_tokens: int) -> int | None:
        if self.text is None or self.around_an_image is None:
            return None
        return self.text + images * self.around_an_image + image_tokens


def run(arguments: argparse.Namespace) -> int:
    """Measures, shows a run, or compares two."""
    try:
        if arguments.compare:
            return _compare(arguments.compare, arguments.margin)
        if arguments.show:
            settings, outcomes = read_run(arguments.show)
            _print(summary_of(settings, outcomes))
            return 0
        if not arguments.endpoint or not arguments.out:
            raise CommandError("give --endpoint and --out to measure, --show DIR, or --compare A B")
        return asyncio.run(_measure(arguments))
    except KeyboardInterrupt:
        if arguments.out and (arguments.out / "requests.jsonl").exists():
            tell("warning", f"the run has not ended; what was answered so far: kimivl-lab ttft --show {arguments.out}")
        raise
    except (ValueError, OSError, EndpointError) as error:
        raise CommandError(str(error)) from error


async def _measure(arguments: argparse.Namespace) -> int:
    name, sizes = _sizes(arguments)
    requests = draw_requests(
        arguments.requests, arguments.rate, sizes, arguments.images_per_request, arguments.arrivals, arguments.seed
    )
    out: Path = arguments.out
    if out.exists() and any(out.iterdir()):
        raise CommandError(f"{out} holds something already: a run gets a folder that is new or empty")
    out.mkdir(parents=True, exist_ok=True)
    salt = int(datetime.now(UTC).timestamp() * 1000)
    limit = arguments.in_token_limit
    async with Endpoint(arguments.endpoint, arguments.model, arguments.timeout, arguments.api_key) as endpoint:
        with progress_bar() as progress:
            task = progress.add_task("making images", total=len(requests))
            bodies = []
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow works outside Python's lock
                for made in pool.map(lambda request: message(request, QUESTION, salt), requests):
                    bodies.append(endpoint.body(made, arguments.max_tokens))
                    progress.advance(task)
            progress.update(task, description="warming up", total=arguments.warmup + 2, completed=0)
            calibration = await _calibrate(endpoint, salt, limit)
            for number in range(arguments.warmup):
                warm = Request(number, 0.0, requests[number % len(requests)].sizes, number)
                await _ask(endpoint, warm, salt + 1, arguments.max_tokens)
                progress.advance(task)
        settings = {
            **{
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "endpoint": endpoint.name,
                "model": endpoint.model,
            },
            **{"requests": arguments.requests, "rate": arguments.rate, "arrivals": arguments.arrivals},
            **{"seed": arguments.seed, "images_per_request": list(arguments.images_per_request), "sizes": name},
            **{"max_tokens": arguments.max_tokens, "in_token_limit": limit, "timeout_s": arguments.timeout},
            **{"warmup": arguments.warmup, "calibration": asdict(calibration)},
        }
        (out / "run.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        before = await endpoint.metrics()
        outcomes = [Outcome(one.index, one.arrival, len(one.sizes), one.image_tokens(limit)) for one in requests]
        with (out / "requests.jsonl").open("w", encoding="utf-8") as file, progress_bar() as progress:
            task = progress.add_task("requests answered", total=len(requests))

            def on_end(outcome: Outcome) -> None:
                file.write(outcome.as_json() + "\n")
                file.flush()  # what ended stays, whatever comes after
                progress.advance(task)

            seconds = await run_load(endpoint, requests, bodies, outcomes, on_end, arguments.time_limit)
        after = await endpoint.metrics()
    settings |= {"seconds": round(seconds, 3), "server": _server_side(before, after)}
    (out / "run.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    summary = summary_of(settings, outcomes)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _print(summary)
    return 2 if summary["failures"] else 0


def _sizes(arguments: argparse.Namespace) -> tuple[str, Sequence[tuple[int, int, int]]]:
    if arguments.sizes is None:
        return arguments.workload, load_sizes(arguments.workload)
    sizes, faults = read_sizes(arguments.sizes, arguments.in_token_limit)
    tell("warning", *faults[:20])
    return arguments.sizes.name, sizes


async def _ask(endpoint: Endpoint, request: Request, salt: int, max_tokens: int) -> Outcome:
    body = endpoint.body(message(request, QUESTION, salt), max_tokens)
    return await endpoint.send(body, Outcome(request.index, 0.0, len(request.sizes), 0), time.perf_counter())


async def _calibrate(endpoint: Endpoint, salt: int, limit: int) -> Calibration:
    """Two requests, with and without an image. CommandError where the server answers neither."""
    text = await _ask(endpoint, Request(0, 0.0, (), 0), salt, 1)
    if text.failure not in ("", "no text"):
        raise CommandError(f"{endpoint.name} does not answer: {text.failure} ({text.detail})")
    image = await _ask(endpoint, Request(0, 0.0, (_CALIBRATION,), 0), salt, 1)
    if image.failure not in ("", "no text"):
        raise CommandError(f"{endpoint.name} does not answer a request with an image: {image.failure} ({image.detail})")
    if text.prompt_tokens is None or image.prompt_tokens is None:
        return Calibration()
    own = image_geometry(*_CALIBRATION, in_token_limit=limit).tokens
    return Calibration(text.prompt_tokens, image.prompt_tokens - text.prompt_tokens - own)


def _server_side(before: dict[str, float], after: dict[str, float]) -> dict[str, float | bool | None]:
    """What moved in the server's counters during the test; None where it has no such counter.

    "read" is false for a server that had counters before the test and gave none after it.
    """

    def moved(names: Sequence[str]) -> float | None:
        known = next((name for name in names if name in after), None)
        return None if known is None else after[known] - before.get(known, 0.0)

    answered, total = moved([f"{SERVER_TTFT}_count"]), moved([f"{SERVER_TTFT}_sum"])
    return {
        "read": bool(after) or not before,
        "cache_hits": moved(CACHE_HITS),
        "cache_queries": moved(CACHE_QUERIES),
        "ttft_ms_mean": 1000 * total / answered if answered and total is not None else None,
    }


def read_run(folder: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """Settings and outcomes of a run, in the order of the requests; a last line that is cut off is left out."""
    settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    needed = ("endpoint", "model", "calibration", *_SAME)
    if not isinstance(settings, dict) or (missing := [name for name in needed if name not in settings]):
        lacks = ", ".join(missing) if isinstance(settings, dict) else "settings"
        raise ValueError(f"{folder / 'run.json'} is not of a run of this command: it lacks {lacks}")
    outcomes = []
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            outcomes.append(Outcome(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number < len(lines):
                raise ValueError(f"{folder / 'requests.jsonl'}, line {number}: {error}") from error
    return settings, sorted(outcomes, key=lambda outcome: outcome.index)


def summary_of(settings: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The run in numbers; also of a run that did not end."""
    answered = [one for one in outcomes if not one.failure]
    failures = Counter(one.failure for one in outcomes if one.failure)
    if missing := settings["requests"] - len(outcomes):
        failures["not recorded"] = missing
    calibration = Calibration(**settings["calibration"])
    told = [one for one in answered if one.prompt_tokens is not None]
    wrong = [one for one in told if one.prompt_tokens != calibration.expected(one.images, one.image_tokens)]
    seconds = settings.get("seconds") or max((one.arrival_s + (one.end_ms or 0) / 1000 for one in outcomes), default=0)
    times = [one.ttft_ms for one in answered if one.ttft_ms is not None]
    counted = calibration.text is not None and bool(told)
    return {
        **{name: settings[name] for name in ("endpoint", "model", "sizes", "rate", "arrivals", "images_per_request")},
        "requests": settings["requests"],
        "answered": len(answered),
        "failures": dict(failures),
        "ttft_ms": {name: asdict(one) for name, one in summarise(times).items()} if times else {},
        "answered_per_s": len(answered) / seconds if seconds else 0.0,
        "new_tokens_per_s": sum(one.new_tokens or 0 for one in answered) / seconds if seconds else 0.0,
        "image_tokens_per_s": sum(one.image_tokens for one in answered) / seconds if seconds else 0.0,
        "sent_late_ms": max((one.late_ms for one in outcomes if one.late_ms is not None), default=None),
        "prompt_tokens_checked": len(told) if counted else 0,
        "prompt_tokens_wrong": [
            {
                "index": one.index,
                "got": one.prompt_tokens,
                "expected": calibration.expected(one.images, one.image_tokens),
            }
            for one in wrong
        ]
        if counted
        else [],
        "server": settings.get("server"),
    }


def _print(summary: dict[str, Any]) -> None:
    table = Table(title=f"{summary['model']} at {summary['endpoint']}", title_justify="left")
    table.add_column("time to first token")
    table.add_column("ms", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, one in summary["ttft_ms"].items():
        table.add_row(name, f"{one['value']:,.1f}", f"{one['low']:,.1f} to {one['high']:,.1f}")
    failures = dict(summary["failures"])
    missing = failures.pop("not recorded", 0)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items()))
    lines = [
        f"{summary['answered']} of {summary['requests']} requests answered"
        + (f"; {sum(failures.values())} failed: {kinds}" if failures else "")
        + (f"; {missing} not recorded, because the run did not end" if missing else ""),
        f"{summary['answered_per_s']:.2f} requests a second were answered, {summary['rate']:g} were to arrive; "
        f"{summary['new_tokens_per_s']:.1f} new tokens and {summary['image_tokens_per_s']:.0f} image tokens a second",
        _about_the_prompt(summary),
        _about_the_server(summary["server"] or {"read": False}),
    ]
    late = summary["sent_late_ms"]
    if late is not None and late > 50:
        lines.append(
            f"this client sent up to {late:.0f} ms late; the times contain that wait, so run it on a quieter machine"
        )
    show(table, *lines) if summary["ttft_ms"] else show(*lines)


def _about_the_prompt(summary: dict[str, Any]) -> str:
    if not summary["prompt_tokens_checked"]:
        return "prompt tokens: not checked, the server does not tell them"
    wrong = summary["prompt_tokens_wrong"]
    if not wrong:
        return f"prompt tokens: as predicted from the images' sizes in all {summary['prompt_tokens_checked']} answers"
    one = wrong[0]
    return (
        f"prompt tokens: other than predicted in {len(wrong)} of {summary['prompt_tokens_checked']} answers, "
        f"such as request {one['index']}: {one['got']} for {one['expected']} (is --in-token-limit the server's?)"
    )


def _about_the_server(server: dict[str, Any]) -> str:
    hits, queries, mean = server.get("cache_hits"), server.get("cache_queries"), server.get("ttft_ms_mean")
    told = "" if mean is None else f"; its own mean time to first token: {mean:,.1f} ms"
    if not server.get("read", True):
        return "the server's cache of images: not known, its counters could not be read at the end"
    if hits is None:
        return f"the server's cache of images: it has no counter, so a skipped encoder would not show{told}"
    of = "" if queries is None else f" in {queries:.0f} queries"
    skipped = (
        ": these requests skipped the encoder, so the times are not its" if hits else ", so the encoder ran each time"
    )
    return f"the server's cache of images: {hits:.0f} hits{of}{skipped}{told}"


def _compare(folders: Sequence[Path], margin: float | None) -> int:
    """`folders` are A and B in turn.

    One pair does not tell how runs of one server differ, so its margin is wide. In ten pairs of one vLLM server on two
    cores that did other work too, nine ratios of the means were between 0.89 and 1.17, one was 1.29.
    """
    if len(folders) % 2:
        raise CommandError(f"--compare takes pairs of runs, A B A B ..., got {len(folders)} folders")
    pairs, times, left_out = [], ([], []), 0
    for first, second in zip(folders[::2], folders[1::2], strict=True):
        (settings_a, outcomes_a), (settings_b, outcomes_b) = read_run(first), read_run(second)
        if other := [name for name in _SAME if settings_a[name] != settings_b[name]]:
            named = "; ".join(f"{name}: {settings_a[name]} and {settings_b[name]}" for name in other)
            raise CommandError(f"{first} and {second} are not of the same load, {named}")
        a, b = _times(outcomes_a), _times(outcomes_b)
        both = sorted(a.keys() & b.keys())
        pairs.append(([a[index] for index in both], [b[index] for index in both]))
        left_out += settings_a["requests"] - len(both)
        for of_all, of_run in zip(times, (a, b), strict=True):
            of_all.extend(of_run.values())
    found = compare_pairs(pairs, margin or (0.03 if len(pairs) > 1 else 0.15))
    named = [", ".join(str(folder) for folder in folders[of::2]) for of in (0, 1)]
    table = Table(title=f"A = {named[0]}\nB = {named[1]}", title_justify="left")
    for name in ("time to first token", "A ms", "B ms", "B / A", "99 % interval", ""):
        table.add_column(name, justify="left" if name in ("time to first token", "") else "right")
    a, b = (summarise(of_all) for of_all in times)
    for name, one in found.items():
        interval = f"{one.ratio.low:.3f} to {one.ratio.high:.3f}"
        row = (f"{a[name].value:,.1f}", f"{b[name].value:,.1f}", f"{one.ratio.value:.3f}", interval, one.verdict)
        table.add_row(name, *row)
    verdict, answered = found["mean"].verdict, sum(len(a) for a, _ in pairs)
    lines = [f"{verdict} (by the mean of {answered} requests that both answered, {left_out} left out)"]
    if len(pairs) > 1:
        each = ", ".join(f"{sum(b) / sum(a):.3f}" for a, b in pairs)
        lines.append(f"B / A of the means of each pair: {each}")
    elif verdict != "no difference shown":
        lines[0] = f"in these two runs, {lines[0]}"
        lines.append(
            "Another run of one server may differ as much, because the machine may have changed in between. "
            "To compare servers, measure them in turn five times and give all pairs: see --help"
        )
    show(table, *lines)
    return 0


def _times(outcomes: Sequence[Outcome]) -> dict[int, float]:
    return {one.index: one.ttft_ms for one in outcomes if not one.failure and one.ttft_ms is not None}
