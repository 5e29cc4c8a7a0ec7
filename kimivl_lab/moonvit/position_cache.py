"""A bounded, thread-safe cache of tensors that depend on a grid, and the policies worth comparing.

Keys are host integers with a dtype and a device, never an address. The cache watches the weight that its entries were
made from: a change of the weight empties it. Entries are read-only by contract: callers copy what they return.
Threads and CUDA streams may share a cache: a stream that finds an entry of another stream waits until it is written,
and the memory of an entry that goes is not used again before every stream that found it has read it.

    PositionCache()                                     bounded in bytes, least recently used first out: the default
    PositionCache(max_bytes=None, max_entries=256)      bounded in entries, least recently used first out
    PositionCache(max_bytes=None, max_entries=256, policy="fifo")      first in, first out: as SGLang (0.5.23) does

A number of entries bounds no memory: 256 grids of 16384 patches at 2304 B a patch are 9 GiB.

Test: tests/test_position_cache.py. Record: position_cache__*.csv.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar, cast

from torch import Tensor

from ..checks import as_not_negative
from ..config import EncoderOptions
from ..kernels.streams import StreamOrder, is_capturing
from ..kernels.weight_state import WeightState
from ..private_api import in_fake_mode

DEFAULT_MAX_BYTES = EncoderOptions.position_cache_bytes
POLICIES = ("lru", "fifo")

Value = TypeVar("Value", bound=Tensor | tuple[Tensor, ...])


class _Entry(NamedTuple):
    value: Tensor | tuple[Tensor, ...]
    nbytes: int
    written: StreamOrder


def _tensors(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass
class CacheStats:
    """Counters since the cache was made; `entries` and `bytes` are what it holds now."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    invalidations: int = 0
    entries: int = 0
    bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over lookups, 0 without lookups."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


class PositionCache:
    """Args:
    max_bytes: most bytes of all entries together (None: no such bound); a larger entry is made but not kept.
    max_entries: most entries (None: no such bound).
    policy: what goes first when a bound is reached: "lru", the least recently used, or "fifo", the oldest.
    """

    def __init__(
        self, *, max_bytes: int | None = DEFAULT_MAX_BYTES, max_entries: int | None = None, policy: str = "lru"
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown cache policy {policy!r}: one of {', '.join(POLICIES)}")
        if max_bytes is None and max_entries is None:
            raise ValueError("a cache needs a bound: give max_bytes, max_entries or both")
        for name, bound in (("max_bytes", max_bytes), ("max_entries", max_entries)):
            if bound is not None and bound < 0:
                raise ValueError(f"{name} must not be negative, got {bound}")
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self.policy = policy
        self.stats = CacheStats()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._generation = 0
        self._watched: WeightState | None = None
        self._checked = True

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The entry of `key`, made by `make()` if it is missing. Read-only: copy it before you return it.

        The value is made and not kept, and no entry is read, while a CUDA graph is captured (the graph would compute an
        entry at its first replay only, and could read one that has been dropped since) and in torch's FakeTensorMode.
        """
        if is_capturing() or in_fake_mode():
            return make()
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self.stats.hits += 1
                if self.policy == "lru":
                    self._entries.move_to_end(key)
            else:
                self.stats.misses += 1
            generation = self._generation
        if found is not None:
            found.written.wait(*_tensors(found.value))
            return cast(Value, found.value)
        value = make()
        written = StreamOrder(_tensors(value)[0].device)
        written.mark()
        with self._lock:
            if generation == self._generation and key not in self._entries:
                self._keep(key, value, written)
        return value

    def watch(self, weight: Tensor) -> None:
        """Empties the cache if `weight` changed since the last call. Call it before `get`.

        On a CPU every change is seen; on a GPU, or after `set_checked(False)`, those that torch counts, see
        `kimivl_lab.kernels.weight_state`.
        """
        with self._lock:
            if self._watched is None or not self._watched.still_holds(weight):
                if self._watched is not None:
                    self.stats.invalidations += 1
                self._watched = WeightState(weight, self._checked)
                self._empty()

    @property
    def checked(self) -> bool:
        """Whether the values of the weight are compared; see `set_checked`."""
        return self._checked

    def set_checked(self, checked: bool) -> None:
        """Says whether `watch` compares the values of a weight on a CPU: the rule of `EncoderOptions.weights`."""
        if checked != self._checked:
            self._checked = checked
            self.clear()

    def set_max_bytes(self, max_bytes: int) -> None:
        """Changes the bound; what is over it goes by the policy."""
        max_bytes = as_not_negative("max_bytes", max_bytes)
        with self._lock:
            self.max_bytes = max_bytes
            self._evict()

    def drop_entries(self) -> None:
        """Drops every entry. The next lookups miss, as they would for new grids: the weight's state is kept."""
        with self._lock:
            self._empty()

    def clear(self) -> None:
        """Drops every entry and what is known of the weight; counters stay."""
        with self._lock:
            self._watched = None
            self._empty()

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Callable[[], "PositionCache"], tuple[()]]:
        """Copies and pickles are empty caches of the same policy: entries are never serialised."""
        bounds = {"max_bytes": self.max_bytes, "max_entries": self.max_entries}
        return partial(PositionCache, **bounds, policy=self.policy), ()

    def _keep(self, key: Hashable, value: Tensor | tuple[Tensor, ...], written: StreamOrder) -> None:
        size = sum(tensor.nbytes for tensor in _tensors(value))
        if (self.max_bytes is not None and size > self.max_bytes) or self.max_entries == 0:
            return
        self._entries[key] = _Entry(value, size, written)
        self.stats.bytes += size
        self._evict()

    def _evict(self) -> None:
        while self._over():
            _, evicted = self._entries.popitem(last=False)
            self.stats.bytes -= evicted.nbytes
            self.stats.evictions += 1
        self.stats.entries = len(self._entries)

    def _over(self) -> bool:
        too_large = self.max_bytes is not None and self.stats.bytes > self.max_bytes
        return too_large or (self.max_entries is not None and len(self._entries) > self.max_entries)

    def _empty(self) -> None:
        self._generation += 1
        self._entries.clear()
        self.stats.entries = self.stats.bytes = 0
