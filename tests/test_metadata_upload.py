"""What goes to the device, the grids' arrays and the pixels, each by one copy that does not wait (fault H5)."""

import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimivl_lab import EncoderCudaGraphRunner
from kimivl_lab.graphs.trace import TraceBackend
from kimivl_lab.kernels.memory import ALIGNMENT, PackedArrays, reserve_pinned, upload
from kimivl_lab.moonvit.metadata import build_merge_gather_idx, grid_arrays_reference, pack_grid_arrays
from kimivl_lab.moonvit.rope import Rope2DPosEmb
from kimivl_lab.syncs.counter import HostSyncCounter, on_device
from tests.conftest import MIXED_GRIDS, pixels_for, tiny_tower

KERNELS = st.sampled_from([(2, 2), (1, 1), (2, 3), (4, 2)])


@st.composite
def batches(draw):
    """(grids, slots, kernel): grids of up to 8 windows a side, every one divisible."""
    kh, kw = draw(KERNELS)
    windows = draw(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), max_size=6))
    grids = [(h * kh, w * kw) for h, w in windows]
    return grids, len(grids) + draw(st.integers(0, 3)), (kh, kw)


class Copies(HostSyncCounter):
    """Also keeps what was copied between host and device."""

    def __init__(self):
        super().__init__(error=True, pretended=True)
        self.sources = []

    def transfer(self, target, source, **how):
        super().transfer(target, source, **how)
        self.sources.append(source)


@given(batch=batches())
def test_packed_equals_plain_bit_for_bit(batch):
    want = grid_arrays_reference(*batch)
    got = pack_grid_arrays(*batch).to("cpu")
    assert set(got) == set(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype and torch.equal(got[name], array), name


@given(batch=batches(), double=st.booleans())
def test_gathered_angles_equal_the_references_bit_for_bit(batch, double):
    grids, dtype = batch[0], torch.float64 if double else torch.float32
    positions = pack_grid_arrays(*batch).to("cpu")["positions"]
    rope = Rope2DPosEmb(72)
    assert torch.equal(rope.gather_cos_sin(positions, grids, dtype), rope.get_cos_sin(grids, dtype=dtype))


def test_the_arrays_of_two_images():
    arrays = pack_grid_arrays([(2, 4), (2, 2)], 3, (2, 2)).to("cpu")
    assert arrays["cu_seqlens"].tolist() == [0, 8, 12, 12]
    assert arrays["merge_gather_idx"].tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10, 11]
    assert arrays["positions"][:6].tolist() == [[0, 0], [1, 0], [2, 0], [3, 0], [0, 1], [1, 1]]  # (column, row)
    assert torch.equal(arrays["merge_gather_idx"], build_merge_gather_idx([(2, 4), (2, 2)]))


@given(batch=batches())
def test_every_array_is_aligned_and_together_they_are_small(batch):
    views = pack_grid_arrays(*batch).to("cpu").values()
    assert {view.storage_offset() * view.element_size() % ALIGNMENT for view in views} == {0}
    ((_, nbytes),) = {(view.untyped_storage().data_ptr(), view.untyped_storage().nbytes()) for view in views}
    assert nbytes <= 16 * sum(h * w for h, w in batch[0]) + 4 * (batch[1] + 1) + 2 * ALIGNMENT


def test_metadata_goes_up_in_one_copy_and_is_the_hosts():
    tower = tiny_tower()
    away = on_device(tower, pretended=True)
    want = tower.prepare_encoder_metadata(MIXED_GRIDS, max_images=6)
    with Copies() as counter:
        got = away.prepare_encoder_metadata(MIXED_GRIDS, max_images=6)
    assert counter.staged == []
    assert [source.nbytes for source in counter.sources] == [counter.bytes_to_device]
    packed = pack_grid_arrays(MIXED_GRIDS, 6, (2, 2)).to("cpu")
    assert counter.bytes_to_device == packed["cu_seqlens"].untyped_storage().nbytes()
    for name in ("pos_embeds", "rope_cos_sin", "cu_seqlens", "merge_gather_idx"):
        ours, theirs = getattr(got, name), getattr(want, name)
        assert ours.device.type == "cuda"
        assert torch.equal(ours.cpu(), theirs) and ours.dtype == theirs.dtype and ours.is_contiguous(), name
    assert (got.grid_hws, got.max_seqlen) == (want.grid_hws, want.max_seqlen)


@torch.no_grad()
def test_launches_of_the_metadata_do_not_grow_with_the_images():
    away = on_device(tiny_tower(), pretended=True)
    counts = []
    for images in (1, 12):
        for _ in range(2):  # the first fills the position cache
            with HostSyncCounter(error=True, pretended=True) as counter:
                away.prepare_encoder_metadata([(4, 6)] * images)
        counts.append(counter.launches)
    assert counts[0] == counts[1] < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_pixels_go_up_once_from_fresh_pinned_memory(dtype):
    pixels = (pixels_for([(4, 6)]) * 50 + 100).to(dtype)
    with Copies() as counter:
        first = upload(pixels, "cuda")
        kept = pixels.clone()
        pixels.zero_()  # the caller's own again as soon as upload returns
        second = upload(pixels, "cuda")
    assert counter.staged == [] and counter.bytes_to_device == 2 * pixels.nbytes
    one, other = counter.sources
    assert len({tensor.untyped_storage().data_ptr() for tensor in (pixels, one, other)}) == 3
    assert torch.equal(first.cpu(), kept) and not second.any()


class PinnedStore:
    """torch's store of pinned memory: blocks of powers of two, and the driver where none is free."""

    def __init__(self):
        self.free, self.from_the_driver, self.live = Counter(), [], []

    def empty(self, size, *, pin_memory=False, **more):
        assert pin_memory and more["device"] == "cpu"
        rounded = 1 << max(size - 1, 0).bit_length()
        if self.free[rounded]:
            self.free[rounded] -= 1
        else:
            self.from_the_driver.append(rounded)
        block = torch.zeros(size, dtype=more["dtype"])
        weakref.finalize(block, self.free.update, [rounded])
        return block


@pytest.mark.parametrize("nbytes", [1, 5, 4096, 5000])
def test_reserved_pinned_memory_serves_every_smaller_upload_without_the_driver(nbytes, monkeypatch):
    store = PinnedStore()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", store.empty)
        sizes = reserve_pinned(nbytes, copies=2)
        assert sum(sizes) <= 8 * nbytes and sizes == sorted(store.from_the_driver)
        del store.from_the_driver[:]
        for size in {1, max(1, nbytes // 2), nbytes - nbytes // 3, nbytes}:
            two = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
            assert len(two) == 2 and store.from_the_driver == [], size
            del two
    monkeypatch.undo()
    assert reserve_pinned(nbytes) == [], "nothing without a GPU"


def test_a_runner_on_a_gpu_reserves_for_its_largest_batch_after_its_captures(monkeypatch):
    """After them, because torch empties its store of pinned memory at each capture."""
    order = []
    monkeypatch.setattr("kimivl_lab.graphs.runner.reserve_pinned", lambda nbytes: order.append(nbytes))
    capture = TraceBackend.capture
    monkeypatch.setattr(
        TraceBackend, "capture", lambda *args, **more: order.append("capture") or capture(*args, **more)
    )
    for dtype, largest in ((torch.bfloat16, 16 * 588 * 4), (torch.float32, 16 * 588 * 4)):
        EncoderCudaGraphRunner(tiny_tower().to(dtype), [1, 4]).capture()
        assert order == ["capture", "capture", largest]
        del order[:]


def test_what_need_not_be_copied_is_not():
    host = torch.arange(6.0)
    assert upload(host, "cpu") is host
    with Copies() as counter:
        pinned = host.pin_memory()
        there = upload(pinned, "cuda")
        assert upload(there, "cuda") is there
    assert counter.sources[0].data_ptr() == pinned.data_ptr() and len(counter.sources) == 1


def test_an_empty_batch_has_its_arrays():
    metadata = tiny_tower().prepare_encoder_metadata([], max_images=2)
    assert metadata.cu_seqlens.tolist() == [0, 0, 0] and metadata.merge_gather_idx.shape == (0,)
    assert metadata.rope_cos_sin.shape == (0, 36, 2)
    assert PackedArrays({}).to("cpu") == {}


@pytest.mark.gpu
def test_a_pinned_buffer_is_not_handed_out_before_its_copy_has_run():
    """The device is kept busy, so that copies queue; every buffer is filled anew meanwhile."""
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = busy @ busy / busy.norm()
    there = [upload(torch.full((1 << 18,), float(value)), "cuda") for value in range(64)]
    assert [float(tensor.min()) for tensor in there] == [float(tensor.max()) for tensor in there] == list(range(64))
