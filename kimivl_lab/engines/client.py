"""A streaming client of OpenAI-compatible servers that measures time to first token.

A request's latency counts from the time when it should have been sent, not from the time when the client came to send
it: else a client that is held up by a slow server would leave out the very waits that its users have.

Test: tests/test_ttft.py.
"""

import asyncio
import json
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from .load import Request

# Counters of /metrics that move when an image's features, or the image itself, come from a cache.
CACHE_HITS = ("vllm:mm_cache_hits_total", "vllm:mm_cache_hits")
CACHE_QUERIES = ("vllm:mm_cache_queries_total", "vllm:mm_cache_queries")
SERVER_TTFT = "vllm:time_to_first_token_seconds"
GONE = 20  # refused connections in a row after which the server counts as gone


class EndpointError(RuntimeError):
    """The endpoint cannot be measured; the message says why."""


@dataclass
class Outcome:
    """What became of one request. Times are in milliseconds from its intended arrival.

    Attributes:
        failure: "" or its kind: "connection refused", "connection lost", "timeout", "HTTP 400", "bad stream",
            "no text", "not sent".
        late_ms: how much later than intended the client sent it.
        ttft_ms: until the first piece of text.
        end_ms: until the last byte.
    """

    index: int
    arrival_s: float
    images: int
    image_tokens: int
    failure: str = ""
    detail: str = ""
    late_ms: float | None = None
    ttft_ms: float | None = None
    end_ms: float | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None

    def as_json(self) -> str:
        return json.dumps(
            {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(self).items()}
        )


class Endpoint:
    """One server.

    Args:
        url: of the server; a path of its API at the end, such as /v1 or /v1/chat/completions, is left out. An https
            server whose certificate no public authority signed needs SSL_CERT_FILE in the environment.
        model: the served name; None takes the only one that the server lists.
        timeout: seconds after which a request has failed.
        api_key: sent as a bearer token.
    """

    def __init__(self, url: str, model: str | None = None, timeout: float = 120, api_key: str | None = None) -> None:
        self.root = re.sub(r"/*(/v1(/models|(/chat)?/completions)?)?/*$", "", url)
        self.name = re.sub(r"//[^/@]*@", "//", self.root)  # without a password, for records and messages
        try:
            port = httpx.URL(self.root).port
            if port is not None and port > 65535:
                raise httpx.InvalidURL(f"a port is at most 65535, got {port}")
        except httpx.InvalidURL as error:
            raise EndpointError(f"{self.name!r} is not an address: {error}") from error
        self.model, self.timeout = model, timeout
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        authorities = os.environ.get("SSL_CERT_FILE")
        if authorities and not os.path.isfile(authorities):
            raise EndpointError(f"SSL_CERT_FILE names {authorities}, which is no file")
        self.client = httpx.AsyncClient(
            headers=headers,
            limits=limits,
            timeout=httpx.Timeout(timeout),
            trust_env=False,  # a proxy between client and server would be measured too
            verify=ssl.create_default_context(cafile=authorities) if authorities else True,
        )

    async def __aenter__(self) -> "Endpoint":
        try:
            if self.model is None:
                self.model = await self._only_model()
        except EndpointError:
            await self.client.aclose()
            raise
        return self

    async def _only_model(self) -> str:
        """The one model that the server lists. EndpointError where it lists none or several, or does not answer."""
        url, wait = f"{self.root}/v1/models", min(self.timeout, 30)
        try:
            response = await self.client.get(url, timeout=wait)
        except httpx.TimeoutException as error:
            raise EndpointError(f"{self.name} did not answer in {wait:g} s") from error
        except httpx.HTTPError as error:
            raise EndpointError(f"no server answers at {self.name}: {str(error) or type(error).__name__}") from error
        code, name_it = response.status_code, "name the served model with --model"
        if code in (401, 403):
            raise EndpointError(f"{self.name} refuses the request, HTTP {code}: give its key with --api-key")
        try:
            names = [str(entry["id"]) for entry in response.raise_for_status().json()["data"]]
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            why = f"HTTP {code}" if code != 200 else "not a list in JSON"
            raise EndpointError(
                f"{self.name}/v1/models lists no model ({why}): is this the server's address? If it is, {name_it}"
            ) from error
        if len(names) != 1:
            raise EndpointError(f"{self.name} lists {', '.join(names) or 'no models'}: {name_it}")
        return names[0]

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    def body(self, message: dict, max_tokens: int) -> bytes:
        """The request's JSON, made before its arrival so that making it delays nothing."""
        return json.dumps(
            {
                **{"model": self.model, "messages": [message], "max_tokens": max_tokens, "temperature": 0},
                **{"stream": True, "stream_options": {"include_usage": True}},
            }
        ).encode()

    async def send(self, body: bytes, outcome: Outcome, intended: float) -> Outcome:
        """Sends one request and reads its answer; `intended` is a time of `time.perf_counter`. Never raises."""
        outcome.late_ms = 1000 * (time.perf_counter() - intended)
        try:
            async with asyncio.timeout(self.timeout):
                await self._read(body, outcome, intended)
        except TimeoutError:
            outcome.failure, outcome.detail = "timeout", f"after {self.timeout:g} s"
        except httpx.ConnectError as error:
            outcome.failure, outcome.detail = "connection refused", str(error)
        except httpx.TimeoutException as error:
            outcome.failure, outcome.detail = "timeout", type(error).__name__
        except httpx.HTTPError as error:
            outcome.failure, outcome.detail = "connection lost", str(error) or type(error).__name__
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            outcome.failure, outcome.detail = "bad stream", f"{type(error).__name__}: {error}"[:300]
        outcome.end_ms = 1000 * (time.perf_counter() - intended)
        return outcome

    async def _read(self, body: bytes, outcome: Outcome, intended: float) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        url = f"{self.root}/v1/chat/completions"
        pieces = 0
        async with self.client.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code != 200:
                reason = (await response.aread()).decode(errors="replace")
                outcome.failure, outcome.detail = f"HTTP {response.status_code}", reason[:300]
                return
            async for event in _events(response):
                if "error" in event:
                    outcome.failure, outcome.detail = "bad stream", json.dumps(event["error"])[:300]
                    return
                if usage := event.get("usage"):
                    outcome.prompt_tokens, outcome.new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                        pieces += 1
                        if outcome.ttft_ms is None:
                            outcome.ttft_ms = 1000 * (time.perf_counter() - intended)
        if outcome.ttft_ms is None:
            outcome.failure, outcome.detail = "no text", "the stream ended without a piece of text"
        if outcome.new_tokens is None and pieces:
            outcome.new_tokens = pieces  # a server without usage: pieces of text, about one a token

    async def metrics(self) -> dict[str, float]:
        """Counters of the server's /metrics, each name summed over its labels; empty where there are none."""
        try:
            response = await self.client.get(f"{self.root}/metrics")
        except httpx.HTTPError:
            return {}
        found: dict[str, float] = {}
        if response.status_code == 200:
            for name, value in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? ([-+.\deE]+)", response.text, re.MULTILINE):
                found[name] = found.get(name, 0.0) + float(value)
        return found


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, up to [DONE]."""
    async for line in response.aiter_lines():
        name, _, data = line.partition(":")
        if name != "data":
            continue
        if (data := data.strip()) == "[DONE]":
            return
        yield json.loads(data)


async def run_load(
    endpoint: Endpoint,
    requests: Sequence[Request],
    bodies: Sequence[bytes],
    outcomes: Sequence[Outcome],
    on_end: Callable[[Outcome], None],
    time_limit: float | None = None,
) -> float:
    """Sends every request at its arrival and calls `on_end` as each one ends. Returns the seconds of the whole test.

    After `GONE` refused connections in a row, and after `time_limit` seconds, the rest is not sent and counted so.
    """
    refused = 0
    stop = asyncio.Event()

    def ended(outcome: Outcome) -> None:
        nonlocal refused
        refused = refused + 1 if outcome.failure == "connection refused" else 0
        if refused >= GONE:
            stop.set()
        on_end(outcome)

    async def one(request: Request, body: bytes, outcome: Outcome) -> None:
        intended = start + request.arrival
        if await _until(intended, stop):
            outcome.failure = "not sent"
            on_end(outcome)
            return
        ended(await endpoint.send(body, outcome, intended))

    start = time.perf_counter() + 0.05
    tasks: list[Awaitable] = [
        asyncio.ensure_future(one(*item)) for item in zip(requests, bodies, outcomes, strict=True)
    ]
    if time_limit is not None:
        asyncio.get_running_loop().call_later(time_limit, stop.set)
    await asyncio.gather(*tasks)
    return time.perf_counter() - start


async def _until(moment: float, stop: asyncio.Event) -> bool:
    """Sleeps until a time of `time.perf_counter`; True if `stop` came first."""
    while (left := moment - time.perf_counter()) > 0 and not stop.is_set():
        try:
            async with asyncio.timeout(left):
                await stop.wait()
        except TimeoutError:
            pass
    return stop.is_set()
