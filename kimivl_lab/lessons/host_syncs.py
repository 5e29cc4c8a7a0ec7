"""The helpers of lesson 60: where waits stand, a model of their times, pinned buffers, and what others saved.

    simulate(12, [4, 8], launch=8, kernel=20, back=25).end    # 314 µs: 248 without waits, and 33 for each wait
    waits_left(function, *inputs, right=values, start=9)      # what is left of the waits that `function` began with

`simulate` plays a forward with assumed times, `slow_motion` runs one on a thread that acts as the device, and `savings`
sets published numbers beside predicted ones.
Test: tests/test_lessons_host_syncs.py. Data: data/published/host_syncs.csv.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..bench.syncs import LAUNCHES, loops, pretended_counts
from ..measure.accuracy import relative_error
from ..measure.published import published_rows
from ..measure.timing import time_interleaved
from ..plots.syncs import BufferStep, Timeline
from ..syncs.counter import HostSyncCounter, count_host_syncs, on_device
from ..syncs.watch import Watcher
from .checks import WrongAnswer

POLICIES = ("one buffer, written again at once", "a fresh buffer for each batch", "one buffer, and a wait for an event")

BATCHES = {"A": [0, 24, 64], "B": [0, 40, 44], "C": [0, 4, 68]}  # cu_seqlens


class WaitOrder(Watcher):
    """Notes after how many launches each wait comes, in `waits`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[int] = []

    def wait(self, kind: str) -> None:
        self.waits.append(self.launches)


def simulate(launches: int, waits: Sequence[int], *, launch: float, kernel: float, back: float) -> Timeline:
    """Plays `launches` equal kernels in order, one event after the other.

    Args:
        waits: after how many launches each wait comes; [4, 8] waits after the fourth and after the eighth.
        launch, kernel: time of the host for one launch, and of the device for one kernel, in any one unit.
        back: time from the end of the last kernel until Python continues.
    """
    host = device = 0.0
    launched, waited, ran = [], [], []
    for done in range(launches + 1):
        for _ in range(list(waits).count(done)):
            waited.append((host, max(host, device) + back))
            host = waited[-1][1]
        if done < launches:
            launched.append((host, host + launch))
            host += launch
            start = max(host, device)  # a kernel starts after its launch and after the kernel in front of it
            device = start + kernel
            ran.append((start, device))
    return Timeline(launched, waited, ran)


def simulated_price(launch: float, kernel: float, back: float) -> float:
    """What one wait adds to a simulated forward of 12 launches, in the unit of the arguments."""
    free, waiting = (simulate(12, waits, launch=launch, kernel=kernel, back=back).end for waits in ([], [4]))
    return waiting - free


def with_waits(function: Callable[..., Any]) -> Callable[..., list[list[float] | int] | None]:
    """`function` on the pretended device: it then returns [values, waits], or None if it returns None or ... .

    Its first argument is given as a list and becomes a tensor on the device.
    """

    def run(numbers: Sequence[float], *args: Any) -> list[list[float] | int] | None:
        with HostSyncCounter(pretended=True) as counter:
            value = function(on_device(torch.tensor(numbers, device="cpu"), pretended=True), *args)
        return None if value is None or value is ... else [value.cpu().tolist(), counter.total]

    return run


def waits_left(function: Callable[..., Tensor], *inputs: Any, right: Tensor, start: int) -> int | None:
    """Waits of `function(*inputs)` on the pretended device, printed by kind; None if there are `start` still.

    Raises:
        WrongAnswer: the values are not `right`, a copy is staged in place of a wait, or an operator is unknown.
    """
    left = count_host_syncs(function, *inputs, pretended=True)
    if not isinstance(left.value, Tensor) or left.value.shape != right.shape:
        raise WrongAnswer(f"the result must be a tensor of shape {tuple(right.shape)}")
    if not relative_error(left.value.cpu(), right) < 1e-5:
        raise WrongAnswer("the values have changed")
    if left.total == start:
        return None
    print(f"{left.total} of {start} waits left: {left.by_kind}")
    if left.staged:
        raise WrongAnswer("a non-blocking copy from pageable memory may wait all the same: use upload or pinned memory")
    if left.unknown:
        names = ", ".join(event.kind for event in left.unknown)
        raise WrongAnswer(f"the waits of this operator are unknown: {names}. Take one that the counter knows")
    return left.total


def fill_buffers(policy: str) -> tuple[list[BufferStep], dict[str, bool]]:
    """Writes each of `BATCHES` to a buffer and queues its copy to the device, under one of `POLICIES`.

    The device copies when the host waits for it, or after the last write: the host is ahead.

    Returns:
        the steps in order, and for each batch whether the device has received its offsets.
    """
    batches = {name: torch.tensor(offsets, device="cpu") for name, offsets in BATCHES.items()}
    blank = torch.zeros_like(batches["A"])
    buffers, queue = [blank.clone()], []
    steps: list[BufferStep] = []
    arrived: dict[str, Tensor] = {}

    def copy_next() -> None:
        wanted, number = queue.pop(0)
        arrived[wanted] = buffers[number].clone()
        held = next(name for name, batch in batches.items() if torch.equal(batch, buffers[number]))
        steps.append(BufferStep("device", wanted, number, held))

    for name, batch in batches.items():
        if queue and "event" in policy:
            copy_next()
        if queue and "fresh" in policy:
            buffers.append(blank.clone())
        buffers[-1].copy_(batch)
        queue.append((name, len(buffers) - 1))
        steps.append(BufferStep("host", name, len(buffers) - 1, name))
    while queue:
        copy_next()
    return steps, {name: torch.equal(arrived[name], batch) for name, batch in batches.items()}


class SlowMotion(NamedTuple):
    """Runs of `slow_motion` in ms: by number of waits the timelines, shortest first, and the three times."""

    runs: dict[int, list[Timeline]]
    launch: float
    kernel: float
    back: float

    def __str__(self) -> str:
        lines = [f"launch {self.launch:.2f} ms, kernel {self.kernel:.2f} ms, way back {self.back:.2f} ms"]
        shorter, longer = sorted((self.launch, self.kernel))
        for count, group in self.runs.items():
            launches, ends = len(group[0].launches), [one.end for one in group]
            predicted = shorter + launches * longer + count * (self.back + shorter)
            middle, spread = median(ends), f"({ends[len(ends) // 5]:.1f} to {ends[-1 - len(ends) // 5]:.1f})"
            measured = f"measured {middle:.1f} {spread}, ratio {middle / predicted:.2f}"
            lines.append(f"{count} waits: predicted {predicted:.1f} ms, {measured}")
        return "\n".join(lines)


def slow_motion(counts: Sequence[int] = (0, 2, 5), *, launches: int = 12, repeats: int = 7) -> SlowMotion:
    """Runs 12 kernels of 1 ms with launches of 0.4 ms, a thread being the device, in a random order of the variants.

    Args:
        counts: how many waits each variant has, 0 among them: launch and kernel are timed in the runs without waits.
    """
    runs: dict[int, list[Timeline]] = {count: [] for count in counts}
    with ThreadPoolExecutor(max_workers=1) as device:
        trips = []
        for _ in range(50):
            start = time.perf_counter()
            device.submit(time.sleep, 0).result()
            trips.append(1e3 * (time.perf_counter() - start))

        def run(count: int) -> None:
            runs[count].append(_on_thread(device, launches, launches // (count + 1) if count else 0))

        time_interleaved({f"{count} waits": partial(run, count) for count in counts}, warmup=1, repeats=repeats)
    shortest_first = {count: sorted(group[1:], key=lambda one: one.end) for count, group in runs.items()}
    middle = shortest_first[0][repeats // 2]
    launch, kernel = (median(end - start for start, end in spans) for spans in (middle.launches, middle.kernels))
    return SlowMotion(shortest_first, launch, kernel, median(trips))


def _on_thread(device: ThreadPoolExecutor, launches: int, wait_every: int) -> Timeline:
    zero, launched, waited = time.perf_counter(), [], []
    queued: list[Future[tuple[float, float]]] = []

    def now() -> float:
        return 1e3 * (time.perf_counter() - zero)

    def kernel() -> tuple[float, float]:
        start = now()
        time.sleep(1e-3)
        return start, now()

    for done in range(1, launches + 1):
        began = now()
        time.sleep(0.4e-3)  # the host prepares a launch
        queued.append(device.submit(kernel))
        launched.append((began, now()))
        if wait_every and done % wait_every == 0 and done < launches:
            queued[-1].result()
            waited.append((launched[-1][1], now()))
    return Timeline(launched, waited, [one.result() for one in queued])


def time_one_read(device: str) -> float:
    """µs that one `.item()` adds to a loop of short kernels on `device`."""
    runs = loops(torch.device(device), quick=True)["short kernel"]
    timings = time_interleaved({str(reads): run for reads, run in runs.items()}, device=device, repeats=21)
    return 1e3 * (timings[str(LAUNCHES)].p50_ms - timings["0"].p50_ms) / LAUNCHES


class Saving(NamedTuple):
    """A published change that removed waits: its row, the waits removed, ms predicted (low to high) and published."""

    row: Mapping[str, str]
    words: str
    waits: int
    low: float
    high: float
    published: float


def read_alone_us() -> tuple[float, float]:
    """Least and most time of one read on an idle GPU, in µs, of those that were measured and published."""
    times = [float(row["before"]) for row in published_rows("host_syncs") if row["metric"] == "one read alone"]
    return min(times), max(times)


def savings() -> list[Saving]:
    """The published rows that removed waits and state times; predicted are the waits removed times one read alone."""
    low, high = read_alone_us()
    found = []
    for row in published_rows("host_syncs"):
        if row["unit"] == "ms":
            waits = int(row["waits_before"]) - int(row["waits_after"])
            words = f"{row['source']}, {row['metric']}, {row['gpu']}: {waits} {'waits' if waits > 1 else 'wait'}"
            published = float(row["before"]) - float(row["after"])
            found.append(Saving(row, words, waits, waits * low / 1e3, waits * high / 1e3, published))
    return found


def counts_by_depth(depths: Sequence[int], images: Sequence[int]) -> dict[str, dict[int, list[int]]]:
    """Waits of one forward: words for each way to handle the grids -> images in the batch -> waits at each depth."""
    words = {
        "per_layer": "grids read back,\nlongest image in every block: N + 3",
        "per_forward": "longest image once a forward: 4",
        "host": "host integers: 0",
    }
    counted = {(depth, count): pretended_counts(depth, count) for depth in depths for count in images}
    return {
        words[way]: {count: [counted[depth, count][way].total for depth in depths] for count in images} for way in words
    }


Curves = tuple[np.ndarray, dict[str, Any], dict[str, Any], dict[str, tuple[float, float]]]


def price_curves(launches: int) -> Curves:
    """What `plots.syncs.price_of_waits` draws for a forward of `launches` launches.

    Kernel times in µs; the price of a wait for launches of 10, 5 and 2 µs, at the middle of the published times of one
    read; what 26 and 4 waits add to a forward with launches of 5 µs, at the least and the most of them; and the tower
    whose time was published with 26 waits fewer.
    """
    back, kernel = np.array(read_alone_us()), np.geomspace(1, 300, 100)
    free = 5 + kernel + (launches - 1) * np.maximum(5, kernel)
    prices = {f"{one} µs": back.mean() + np.minimum(one, kernel) for one in (10, 5, 2)}
    slower = {f"{waits} waits": [waits * (one + np.minimum(5, kernel)) / free for one in back] for waits in (26, 4)}
    tower = next(one for one in savings() if one.row["metric"] == "tower median")
    before, after = float(tower.row["before"]), float(tower.row["after"])
    point = (1e3 * after / launches, before / after - 1)
    return kernel, prices, slower, {f"published: {tower.waits} waits, {tower.row['gpu']}": point}


def buffers_needed(events: str) -> int:
    """The smallest ring of buffers in which no write comes before the copy of what the buffer holds.

    Args:
        events: in order, "w" for a write of the host and "c" for a copy of the device; "wwcwcc" needs 2.
    """
    for size in range(1, events.count("w") + 1):
        writes = copies = 0
        for event in events:
            writes, copies = writes + (event == "w"), copies + (event == "c")
            if writes - copies > size:  # this write went over a batch that is not copied yet
                break
        else:
            return size
    raise ValueError(f"no write among the events {events!r}")
