"""What notebook 50 runs on several ranks returns what the notebook says it does."""

import pytest

from kimivl_lab import KimiVLConfig
from kimivl_lab.lessons.tp_versus_dp import (
    Waited,
    encode_in_halves,
    encode_in_modes,
    time_collectives,
    time_modes,
)
from kimivl_lab.measure.ranks import run_ranks

CONFIG = KimiVLConfig.preset("tiny")
GRIDS = [(4, 6), (2, 2), (8, 4)]


def test_patches_and_collectives_are_counted_on_every_rank():
    ranks = run_ranks(encode_in_modes, 2, CONFIG, GRIDS, ["data", "tensor"])
    assert all(one.error < 1e-5 for rank in ranks for one in rank.values())
    assert [rank["data"].patches for rank in ranks] == [32, 28]
    assert [rank["tensor"].patches for rank in ranks] == [60, 60]
    width = CONFIG.vision_config.hidden_size
    for rank in ranks:
        assert [(one.kind, one.bytes) for one in rank["data"].collectives] == [("all_gather", 2 * 32 * width * 4)]
        assert [(one.kind, one.bytes) for one in rank["tensor"].collectives] == 4 * [("all_reduce", 60 * width * 4)]


@pytest.mark.parametrize("busy", [(True, False), (True, True)])
def test_sums_over_the_half_are_right(busy):
    outcomes = run_ranks(encode_in_halves, 4, CONFIG, GRIDS, busy, False, 20.0)
    for half, at_work in zip((outcomes[:2], outcomes[2:]), busy, strict=True):
        if at_work:
            assert all(isinstance(error, float) and error < 1e-5 for error in half)
        else:
            assert half == [None, None]


def test_sums_over_all_mix_two_requests():
    outcomes = run_ranks(encode_in_halves, 4, CONFIG, GRIDS, (True, True), True, 20.0)
    assert all(isinstance(error, float) and error > 0.01 for error in outcomes)


def test_sums_over_all_wait_in_vain_and_name_the_other_half():
    outcomes = run_ranks(encode_in_halves, 4, CONFIG, GRIDS, (False, True), True, 0.5)
    waited = Waited([0, 1], "all_reduce on 4 ranks: rank 0 did not come; rank 1 did not come")
    assert outcomes == [None, None, waited, waited]


def test_points_say_what_was_measured():
    modes = ["single", "tensor", "data", "data, by patches", "data, round robin"]
    (batch,) = run_ranks(time_modes, 2, CONFIG.vision_config, [GRIDS], modes, 1)[0]
    assert list(batch) == modes
    found = {name: (point.mode, point.ranks, point.by_rank) for name, (point, _) in batch.items()}
    assert found == {
        "single": ("single", 1, None),
        "tensor": ("tensor", 2, None),
        "data": ("data", 2, [[2], [0, 1]]),
        "data, by patches": ("data", 2, [[2], [0, 1]]),
        "data, round robin": ("data", 2, [[0, 2], [1]]),
    }
    for point, timing in batch.values():
        assert point.sizes == [24, 4, 32]
        assert point.seconds == timing.p50_ms / 1e3 > 0
    points = run_ranks(time_collectives, 2, [256, 1024], 1)[0]
    assert [(one.kind, one.ranks, one.bytes) for one in points] == [
        (kind, 2, size) for size in (256, 1024) for kind in ("all_reduce", "all_gather", "broadcast")
    ]
