"""A serving engine as a discrete-event model: from arrivals and the times of its stages to times to first token.

Use it to ask what a server would do at another rate, with more ranks or with another budget. Nothing in it is random:
the same arrivals and times give the same result. The model is vLLM's scheduler in small:

    prepare     a request's images become patches; one worker on the host does this, in order of arrival
    queue       a prepared request waits; requests join the engine between its steps only
    step        first the images that the step needs are encoded in one call, then one call of the language model
                computes the chunks of all requests in the step, a prompt's or one token of an answer
    first token at the end of the step that computes the last chunk of the prompt

A step takes at most `batched_tokens` tokens and encodes at most `encoder_tokens` image tokens. Requests that have begun
come before those that wait, and both stay in order. With `ranks`, the images of a step are shared among that many
encoders and the step waits for the slowest; the language model stays one.

Not modelled: memory for the cache of keys and values, preemption, cached images and prefixes, a host that is slower
while a step runs, and the attention of a chunk to the chunks before it. A request's images come before its text. All
times are in seconds, all sizes but pixels in merged tokens.

Batching has a known anomaly: one more request can make another one faster, when it delays a step so that the other one
still joins it. With `requests=1` there is none.

Source: vLLM 0.32, vllm/v1/core/sched/scheduler.py (`schedule`, `_try_schedule_encoder_inputs`).
Test: tests/test_simulation.py. Record: engine__*.csv.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations

import numpy as np

from ..checks import as_positive
from ..parallel.balance import get_dp_encoder_lb_assignment

Seconds = Callable[[Sequence[int]], float]  # of a call over items of so many tokens each


@dataclass(frozen=True)
class CallCost:
    """Seconds of a call over items of n tokens: fixed_s + per_token_s * sum(n) + per_pair_s * sum(n^2).

    A call over no items takes no time. Example: 1 ms and 10 us a token give 3 ms for items of 150 and 50 tokens.
    """

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    per_pair_s: float = 0.0

    def __call__(self, items: Sequence[int]) -> float:
        if not items:
            return 0.0
        return self.fixed_s + self.per_token_s * sum(items) + self.per_pair_s * sum(n * n for n in items)

    @classmethod
    def fit(cls, calls: Sequence[Sequence[int]], seconds: Sequence[float]) -> "CallCost":
        """The cost closest to measured calls, by least relative squares, without a negative coefficient.

        Args:
            calls: the tokens of the items of each call; no call is empty.
            seconds: of each call.

        Raises:
            ValueError: not one positive time for each call, no call, or an empty call.
        """
        if len(calls) != len(seconds) or not calls or not all(calls):
            raise ValueError(
                f"a fit needs one time for each call that is not empty, got {len(calls)} and {len(seconds)}"
            )
        if not all(0 < one < math.inf for one in seconds):
            raise ValueError(f"times must be positive, got {min(seconds)} to {max(seconds)} s")
        terms = np.array([[1, sum(call), sum(n * n for n in call)] for call in calls], dtype=float)
        terms /= np.asarray(seconds, dtype=float)[:, None]
        best, least = (0.0, 0.0, 0.0), math.inf
        for used in (used for count in (1, 2, 3) for used in combinations(range(3), count)):
            scale = np.linalg.norm(terms[:, used], axis=0)
            found = np.linalg.lstsq(terms[:, used] / scale, np.ones(len(calls)), rcond=None)[0] / scale
            error = float(((terms[:, used] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                values = dict(zip(used, found.tolist(), strict=True))
                best, least = (values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)), error
        return cls(*best)


@dataclass(frozen=True)
class Stages:
    """How long an engine's stages take, as functions of token counts; a `CallCost` or any other.

    Attributes:
        encode: of a call of one encoder, from its images' tokens.
        language: of a call of the language model, from the tokens of each request in it (an answer's next token is 1).
        prepare: on the host, from the pixels of a request's images before they are resized (tokens where a job has no
            pixels).
        deliver_s: from the end of a step until the client holds the token.
    """

    encode: Seconds
    language: Seconds
    prepare: Seconds = CallCost()
    deliver_s: float = 0.0


@dataclass(frozen=True)
class Job:
    """A request.

    Attributes:
        arrival: in seconds.
        images: tokens of each image.
        text: the prompt's other tokens.
        new_tokens: of the answer.
        pixels: of each image before it is resized.
    """

    arrival: float
    images: tuple[int, ...] = ()
    text: int = 1
    new_tokens: int = 1
    pixels: tuple[int, ...] = ()

    @property
    def prompt(self) -> int:
        return sum(self.images) + self.text


@dataclass(frozen=True)
class Limits:
    """The engine's settings.

    Attributes:
        batched_tokens: vLLM's --max-num-batched-tokens.
        encoder_tokens: image tokens that a step may encode; None: as `batched_tokens`. As in vLLM, never below the
            largest image.
        requests: vLLM's --max-num-seqs.
        chunked: whether a prompt may be split over steps. Where not, a prompt that does not fit waits.
    """

    batched_tokens: int = 8192
    encoder_tokens: int | None = None
    requests: int = 256
    chunked: bool = True


@dataclass(frozen=True)
class Served:
    """What became of a request. `encode_end` is the end of the encoding of its last image; of none, `start`.

    Attributes:
        ready: when its images were prepared.
        start: of its first step.
        first_token, end: when the client holds the first and the last token.
    """

    arrival: float
    ready: float
    start: float
    encode_end: float
    first_token: float
    end: float

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival


@dataclass(frozen=True)
class Step:
    """A step of the engine: from `start` to `encode_end` the encoder works, then to `end` the language model."""

    start: float
    encode_end: float
    end: float
    images: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """Requests in the order that they were given in, prepare's intervals (start, end), and steps in order."""

    requests: list[Served]
    prepares: list[tuple[float, float]]
    steps: list[Step]

    @property
    def ttft(self) -> list[float]:
        return [one.ttft for one in self.requests]

    @property
    def busy_share(self) -> float:
        """The share of the time from the first arrival to the last step in which the engine worked."""
        last = self.steps[-1].end - min(one.arrival for one in self.requests)
        return sum(step.end - step.start for step in self.steps) / last if last else 1.0


@dataclass
class _Progress:
    job: Job
    place: int
    ready: float
    computed: int = 0  # of the prompt
    encoded: int = 0  # images
    new: int = 0  # tokens of the answer
    start: float = math.nan
    encode_end: float = math.nan
    first_token: float = math.nan
    offsets: list[int] = field(default_factory=list)  # of the images in the prompt, and their end

    def left(self) -> int:
        return self.job.prompt - self.computed or 1  # after the prompt one token a step

    def fitting(self, tokens: int, encoder: int) -> tuple[int, list[int]]:
        """How many of the next `tokens` can be computed, and the images to encode for that."""
        end, images = self.computed + tokens, []
        for place in range(self.encoded, len(self.job.images)):
            if self.offsets[place] >= end:
                break
            if self.job.images[place] > encoder:
                end = self.offsets[place]
                break
            images.append(self.job.images[place])
            encoder -= images[-1]
        return max(0, end - self.computed), images


def simulate(jobs: Sequence[Job], stages: Stages, limits: Limits = Limits(), ranks: int = 1) -> Timeline:
    """Runs the engine until every request is answered.

    Args:
        jobs: in any order.
        ranks: encoders that share the images of a step, by the engines' balance.

    Raises:
        ValueError: no requests; a size, limit or number of ranks that is not positive; an arrival that is not a number;
            without chunks a prompt that no step holds; a stage whose time is negative or not a number.
    """
    _check(jobs, limits, ranks)
    order = sorted(range(len(jobs)), key=lambda place: jobs[place].arrival)
    prepares, coming = [], deque()
    free = -math.inf
    for place in order:
        start = max(free, jobs[place].arrival)
        free = _later(start, stages.prepare(jobs[place].pixels or jobs[place].images))
        prepares.append((start, free))
        offsets = list(accumulate(jobs[place].images, initial=0))
        coming.append(_Progress(jobs[place], place, free, offsets=offsets))
    largest = max((image for job in jobs for image in job.images), default=1)
    encoder_tokens = max(limits.encoder_tokens or limits.batched_tokens, largest)

    done: list[Served | None] = [None] * len(jobs)
    steps: list[Step] = []
    running: list[_Progress] = []
    waiting: deque[_Progress] = deque()
    now = -math.inf
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].ready)
        while coming and coming[0].ready <= now:
            waiting.append(coming.popleft())
        chunks = _plan(running, waiting, limits, encoder_tokens)
        images = [image for _, _, own in chunks for image in own]
        encode_end = _later(now, _encode(images, stages, ranks))
        end = _later(encode_end, stages.language([tokens for _, tokens, _ in chunks]))
        steps.append(Step(now, encode_end, end, tuple(images), tuple(tokens for _, tokens, _ in chunks)))
        for one, tokens, own in chunks:
            if not one.computed and not one.encoded:
                one.start = one.encode_end = now
            if own:
                one.encoded, one.encode_end = one.encoded + len(own), encode_end
            one.computed = min(one.computed + tokens, one.job.prompt)
            if one.computed < one.job.prompt:
                continue
            one.new += 1
            token = end + stages.deliver_s
            if one.new == 1:
                one.first_token = token
            if one.new == one.job.new_tokens:
                done[one.place] = Served(one.job.arrival, one.ready, one.start, one.encode_end, one.first_token, token)
        running = [one for one in running if done[one.place] is None]
        now = end
    return Timeline([one for one in done if one], prepares, steps)


def saturated_rate(jobs: Sequence[Job], stages: Stages, limits: Limits = Limits(), ranks: int = 1) -> float:
    """Requests a second that the engine answers when all of them are there at once: its capacity."""
    timeline = simulate([Job(0.0, job.images, job.text, job.new_tokens) for job in jobs], stages, limits, ranks)
    return len(jobs) / timeline.steps[-1].end


def _plan(
    running: list[_Progress], waiting: deque[_Progress], limits: Limits, encoder: int
) -> list[tuple[_Progress, int, list[int]]]:
    """The chunks of a step: request, tokens, images to encode. Requests that begin move from `waiting` to `running`."""
    budget, chunks = limits.batched_tokens, []

    def take(one: _Progress) -> bool:
        nonlocal budget, encoder
        tokens, images = one.fitting(min(one.left(), budget), encoder)
        if tokens:
            chunks.append((one, tokens, images))
            budget, encoder = budget - tokens, encoder - sum(images)
        return tokens > 0

    for one in running:
        if budget:
            take(one)
    while waiting and budget and len(running) < limits.requests:
        if not limits.chunked and waiting[0].job.prompt > budget:
            break
        if not take(waiting[0]):
            break
        running.append(waiting.popleft())
    return chunks


def _later(moment: float, seconds: float) -> float:
    if not 0 <= seconds < math.inf:  # a clock that is not a number would never reach the next arrival
        raise ValueError(f"a stage must take 0 s or more, got {seconds}")
    return moment + seconds


def _encode(images: list[int], stages: Stages, ranks: int) -> float:
    if ranks == 1 or not images:
        return stages.encode(images) if images else 0.0
    shares = get_dp_encoder_lb_assignment(images, ranks).by_rank
    return max(stages.encode([images[place] for place in share]) for share in shares if share)


def _check(jobs: Sequence[Job], limits: Limits, ranks: int) -> None:
    if not jobs:
        raise ValueError("no requests to simulate")
    as_positive("ranks", ranks)
    as_positive("batched_tokens", limits.batched_tokens)
    as_positive("requests", limits.requests)
    if limits.encoder_tokens is not None:
        as_positive("encoder_tokens", limits.encoder_tokens)
    for job in jobs:
        if not math.isfinite(job.arrival):
            raise ValueError(f"an arrival must be a number of seconds, got {job.arrival}")
        for image in job.images:
            as_positive("tokens of an image", image)
        as_positive("new_tokens", job.new_tokens)
        as_positive("tokens of a prompt", job.prompt)
        if not limits.chunked and job.prompt > limits.batched_tokens:
            raise ValueError(
                f"a prompt of {job.prompt} tokens fits no step of {limits.batched_tokens}, and is not chunked"
            )
