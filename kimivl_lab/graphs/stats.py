"""Counts what a graph runner has done: replays, eager calls and why, padding, memory, time.

`print(runner.stats)` shows one line for each graph, one for each reason to run eager, and the sum; below them, what
failed to compile in this process and runs uncompiled (`kernels.dispatch.compile_errors`).

Test: tests/test_graph_runner.py, tests/test_graph_waste.py.
"""

from dataclasses import dataclass, field

from ..kernels.dispatch import compile_errors


@dataclass
class Calls:
    """Calls of one graph, or eager calls for one reason.

    Attributes:
        calls, images: how many.
        tokens: real merged tokens.
        rows: merged tokens computed, padding included.
        image_pairs: attention pairs of patches of one image, the sum of patches squared.
        pairs: attention pairs computed: also those within each segment of padding, or, where the kernel takes a mask
            over all patches, those of all patches with all.
        seconds: host time from the first copy to the last.
    """

    calls: int = 0
    images: int = 0
    tokens: int = 0
    rows: int = 0
    image_pairs: int = 0
    pairs: int = 0
    seconds: float = 0.0

    def add(self, images: int, tokens: int, rows: int, image_pairs: int, pairs: int, seconds: float) -> None:
        self.calls += 1
        self.images += images
        self.tokens += tokens
        self.rows += rows
        self.image_pairs += image_pairs
        self.pairs += pairs
        self.seconds += seconds

    @property
    def waste(self) -> float:
        """Computed rows over real ones; 1 without any."""
        return self.rows / self.tokens if self.tokens else 1.0

    @property
    def pair_waste(self) -> float:
        """Computed attention pairs over those of the images; 1 without any."""
        return self.pairs / self.image_pairs if self.image_pairs else 1.0


@dataclass
class GraphCalls(Calls):
    """Calls of one graph, the seconds of its capture, and the bytes that the pool grew by for it."""

    capture_seconds: float = 0.0
    nbytes: int = 0


@dataclass
class RunnerStats:
    """Attributes:
    graphs: by budget in merged tokens, ascending.
    eager: by reason: "too large", "padding" (above `max_waste`) or "pixels" (floats where uint8 was captured, or the
        other way round). A `KimiVLEncoder` adds "gradient" and "tensor parallel".
    input_bytes: of the static inputs, which all graphs share.
    """

    graphs: dict[int, GraphCalls] = field(default_factory=dict)
    eager: dict[str, Calls] = field(default_factory=dict)
    input_bytes: int = 0

    @property
    def hits(self) -> int:
        """Number of replays."""
        return sum(calls.calls for calls in self.graphs.values())

    @property
    def misses(self) -> int:
        """Number of eager calls."""
        return sum(calls.calls for calls in self.eager.values())

    @property
    def total(self) -> Calls:
        """All calls together."""
        total = Calls()
        for calls in (*self.graphs.values(), *self.eager.values()):
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(calls, name))
        return total

    @property
    def waste(self) -> float:
        """Computed rows over real ones, of all calls."""
        return self.total.waste

    @property
    def nbytes(self) -> int:
        """Bytes of the static inputs and the pool."""
        return self.input_bytes + sum(calls.nbytes for calls in self.graphs.values())

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("budget", "calls", "images", "tokens", "rows", "rows/tokens", "pairs", "pairs/image pairs", "ms a call")
            + ("capture s", "MiB")
        ]
        rows += [_row(str(budget), calls, calls.capture_seconds, calls.nbytes) for budget, calls in self.graphs.items()]
        rows += [_row(f"eager: {reason}", calls) for reason, calls in self.eager.items()]
        rows.append(_row("all", self.total, sum(calls.capture_seconds for calls in self.graphs.values()), self.nbytes))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
        lines += [f"not compiled: {error} ({count} times)" for error, count in compile_errors().items()]
        return "\n".join(lines)


def _row(name: str, calls: Calls, capture_seconds: float | None = None, nbytes: int = 0) -> tuple[str, ...]:
    each = f"{calls.seconds / calls.calls * 1e3:.2f}" if calls.calls else ""
    cost = ("", "") if capture_seconds is None else (f"{capture_seconds:.2f}", f"{nbytes / 2**20:.1f}")
    counts = (calls.calls, calls.images, calls.tokens, calls.rows)
    pairs = str(calls.pairs), f"{calls.pair_waste:.3f}"
    return (name, *map(str, counts), f"{calls.waste:.3f}", *pairs, each, *cost)
