"""The same call on all ranks: compared before its first collective, and a failure names the rank behind it.

A collective pairs the n-th call of one rank with the n-th call of another, whatever batch each of them holds. A rank
that skipped a batch would mix its numbers with those of other images: wrong features, or an abort where sizes differ.
`same_call` compares a short text of each rank, once a call:

    rank 0    call 7: data, 2 images 4x6 2x2, torch.float32, sample 1f3a9b22
    rank 1    call 7: data, 2 images 4x6 2x2, torch.float32, sample 80c41d07     RankError on both, naming rank 1

The texts go through the store that connected the ranks, over TCP and in host memory. With a collective of the group,
every call on NCCL would wait for the device; a second group over gloo would have to be created on all ranks. A rank
writes its text without waiting, then reads the texts of all peers in one request: a rank that is right must learn of
one that is wrong. The store sends ranks^2 short texts a call, which suits the 2 to 16 ranks of one encoder.

`sample` is a checksum of some numbers of the pixels: batches of equal grids differ in nothing else. It is taken of
pixels on the host only. Reading pixels of a device would wait for it, and with `load_pixels` each rank reads other
images. In these two cases the number, the grids and the caller's `batch_id` are compared.

Test: tests/test_parallel_calls.py. Measured by bench/parallel.py (phase "same_call").
"""

import re
import time
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..geometry import GridLike
from ..kernels.dispatch import is_of_the_device
from .groups import RankError, group_timeout_s

_GRACE_S: float = 2.0  # ranks time out one after another, not at once
_POLL_S = (5e-5, 1e-3)  # the first and the longest pause between two looks at the store
_LEFT = "left with "
_SAMPLED_PATCHES = 64
_NAMED_GRIDS = 4
# gloo raises plain RuntimeErrors: these are its lost, silent and closed connections
_LOST = re.compile(
    r"/gloo/|pair closure|Timed out waiting|Connection (closed|reset|refused)|Broken pipe", re.IGNORECASE
)
# NCCL reports them as a lost connection's kind of error, and no peer caused them
_OWN = re.compile(r"ncclUnhandledCudaError|ncclInvalid(Argument|Usage)")


@dataclass
class _Progress:
    """How far this rank is in one group.

    Attributes:
        call: number of the current call; every rank counts its own.
        roll_calls: held since that call began. Part of a roll call's keys, so that no answer counts twice.
        seen: keys of the store that were there once. Asking for a key that is not there would block.
    """

    call: int = -1
    roll_calls: int = 0
    seen: set[str] = field(default_factory=set)


# torch keeps a group's object until the group is destroyed, and a new group starts from nothing on every rank
_PROGRESS: WeakKeyDictionary[dist.ProcessGroup, _Progress] = WeakKeyDictionary()


class Call:
    """One call on a group, as this rank makes it.

    Attributes:
        about: what all ranks must agree on, in words; the caller of `same_call` sets it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.progress = _PROGRESS.setdefault(group, _Progress())
        self.progress.call, self.progress.roll_calls = self.progress.call + 1, 0
        self.number = self.progress.call
        self.about = ""

    def publish(self, about: str) -> None:
        """Writes this rank's text for its peers; does not wait."""
        self.group.get_group_store().set(self._key(dist.get_rank()), f"{self.number}: {about}")

    def compare(self) -> None:
        """Waits for all ranks; RankError if one does not come, has failed or is at another call."""
        me, arrived, pause, late = dist.get_rank(), time.monotonic(), _POLL_S[0], set()
        texts, waiting = {me: f"{self.number}: {self.about}"}, set(dist.get_process_group_ranks(self.group)) - {me}
        try:
            self.publish(self.about)
            while waiting:
                texts |= self._read(waiting)
                waiting -= texts.keys()
                if any(map(_failed, texts.values())):
                    break
                if waiting and time.monotonic() > arrived + group_timeout_s(self.group):
                    late = waiting
                    break
                if waiting:
                    time.sleep(pause)
                    pause = min(1.5 * pause, _POLL_S[1])
        except dist.DistError:
            late = _keeper_of_the_store(waiting)
        reasons = _late(late) | _elsewhere(texts)
        if not reasons:
            return
        error = RankError(f"{self.group.size()} ranks: {'; '.join(reasons.values())}", sorted(reasons))
        if late:
            with suppress(dist.DistError):
                self.publish(f"{_LEFT}RankError: {error}")  # for a rank that comes after this one has given up
        raise error

    def _read(self, ranks: Iterable[int]) -> dict[int, str]:
        """Texts of this call, or of a later one, by rank."""
        store, seen = self.group.get_group_store(), self.progress.seen
        keys = {rank: self._key(rank) for rank in ranks}
        keys = {rank: key for rank, key in keys.items() if key in seen or store.check([key])}
        if not keys:
            return {}
        seen.update(keys.values())
        wanted = list(keys.values())
        at_once = store.has_extended_api()  # ty: ignore[missing-attribute]  # torch's stub lacks it
        values = store.multi_get(wanted) if at_once else [store.get(key) for key in wanted]
        texts = {rank: value.decode() for rank, value in zip(keys, values, strict=True)}
        return {rank: text for rank, text in texts.items() if int(text.partition(":")[0]) >= self.number}

    def _key(self, rank: int) -> str:
        """Two keys a rank, used in turn, so that the store does not grow.

        A peer that is one call ahead (NCCL returns before it has finished) writes its other key. It cannot be two calls
        ahead: it waits for this rank in the call between.
        """
        return f"kimivl_lab/call/{self.number % 2}/{rank}"


@contextmanager
def same_call(group: dist.ProcessGroup) -> Generator[Call]:
    """Around what a rank does by itself before the first collective of a call; afterwards all ranks are at this call.

    An error inside reaches the other ranks as a `RankError` at once, and no rank enters the collective. Nothing is
    compared in a group of one.

    Raises:
        RankError: a rank did not come within the group's timeout, failed, or is about to share something else.

    Example:
        with same_call(group) as call:
            call.about = describe_images("data", grids, tower.dtype, pixel_values)
            features = tower(own_pixels, own_grids)
        all_gather(gathered, features, group)
    """
    call = Call(group)
    try:
        yield call
    except Exception as error:
        if group.size() > 1:
            with suppress(dist.DistError):
                call.publish(f"{_LEFT}{type(error).__name__}: {error!s:.500}")
        raise
    if group.size() > 1:
        call.compare()


def describe_images(
    mode: str, grids: Sequence[GridLike], dtype: torch.dtype, pixel_values: Tensor | None, batch_id: object = None
) -> str:
    """A short text that differs where ranks hold different batches, for `Call.about`.

    "data, 2 images 4x6 2x2, torch.float32, sample 1f3a9b22". The grids past the fourth are a checksum.
    """
    names = ["x".join(map(str, grid)) for grid in grids]  # (4, 6) -> "4x6"
    parts = [f"{mode}, {len(grids)} images", *names[:_NAMED_GRIDS]]
    if len(grids) > _NAMED_GRIDS:
        parts.append(f"and others {zlib.crc32(' '.join(names).encode()):08x}")
    text = f"{' '.join(parts)}, {dtype}"
    if pixel_values is not None and pixel_values.device.type == "cpu" and pixel_values.ndim == 4:
        text += f", sample {_sample(pixel_values):08x}"
    return text if batch_id is None else f"{text}, batch {batch_id!s:.60}"


@contextmanager
def rank_errors(group: dist.ProcessGroup, what: str) -> Generator[None]:
    """Turns a lost or silent connection in a collective into a `RankError` that names the ranks that did not come.

    gloo names a lost rank by its address and a silent one not at all. So the ranks that are left answer each other in
    the store, until the group's timeout and a little more have passed since this rank's arrival.

    NCCL starts a collective and returns, so a lost rank is no error here: NCCL's watchdog ends the process after the
    group's timeout, its message names the collective, and torchrun names the rank that failed first. What NCCL raises
    at once is treated as gloo's, except an error of this rank's own GPU or arguments. Ranks that are at different calls
    are named on NCCL as on gloo, because `same_call` compares them before the collective. Other errors pass unchanged.
    """
    arrived = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not _lost_a_rank(error):
            raise
        try:
            reasons = _late(_roll_call(group, arrived + group_timeout_s(group) + _GRACE_S))
            blame = "; ".join(reasons.values()) or "all ranks are there, the link between them failed"
        except Exception as problem:  # whatever happens here, the user must see what failed first
            reasons, blame = {}, f"the ranks could not be counted: {problem}"
        raise RankError(f"{what} on {group.size()} ranks: {blame} ({error})", sorted(reasons)) from error


def _lost_a_rank(error: RuntimeError) -> bool:
    if is_of_the_device(error) or _OWN.search(str(error)):
        return False
    return isinstance(error, dist.DistError) or type(error) is RuntimeError and bool(_LOST.search(str(error)))


def _roll_call(group: dist.ProcessGroup, deadline: float) -> set[int]:
    """Ranks without an answer at the deadline."""
    me, waiting = dist.get_rank(), set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    progress = _PROGRESS.setdefault(group, _Progress())
    prefix = f"kimivl_lab/roll_call/{progress.call}.{progress.roll_calls}"
    progress.roll_calls += 1
    try:
        store = group.get_group_store()
        store.set(f"{prefix}/{me}", "here")
        while waiting:
            waiting -= {rank for rank in waiting if store.check([f"{prefix}/{rank}"])}
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    except dist.DistError:
        waiting = _keeper_of_the_store(waiting)
    return waiting


def _keeper_of_the_store(waiting: set[int]) -> set[int]:
    """Who is missing when the store is gone: the process that kept it, which is torchrun's, or else rank 0."""
    return waiting & {0} or waiting


def _late(ranks: Iterable[int]) -> dict[int, str]:
    return {rank: f"rank {rank} did not come" for rank in sorted(ranks)}


def _elsewhere(texts: Mapping[int, str]) -> dict[int, str]:
    """Ranks that failed, and those not at the most common call; of two as common, that of the lowest rank counts."""
    failed = {rank: f"rank {rank} {text.partition(': ')[2]}" for rank, text in sorted(texts.items()) if _failed(text)}
    present = {rank: text for rank, text in sorted(texts.items()) if rank not in failed}
    counts = Counter(present.values())
    common = max(present.values(), key=counts.__getitem__, default="")
    others = {
        rank: f"rank {rank} is at call {text} and not at call {common}"
        for rank, text in present.items()
        if text != common
    }
    return failed | others


def _failed(text: str) -> bool:
    return text.partition(": ")[2].startswith(_LEFT)


def _sample(pixel_values: Tensor) -> int:
    """A checksum of 12 numbers of each of about 64 patches; the same on hosts that round the last bit differently."""
    step = max(1, len(pixel_values) // _SAMPLED_PATCHES)
    few = pixel_values.detach()[::step, :, 3::7, 3::7].float()
    # pixels normalised by mean 0.5 and deviation 0.5 fall on whole numbers
    return zlib.crc32(few.mul(127.5).add_(127.5).round_().to(torch.int32).contiguous().numpy().tobytes())
