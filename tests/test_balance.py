"""Which rank encodes which image: the engines' rule to the letter, and a balance by cost that is never worse (G13)."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimivl_lab import MoonViTConfig, image_geometry
from kimivl_lab.datasets import draw_sizes
from kimivl_lab.parallel.balance import (
    QuadraticCost,
    balance_by_cost,
    get_dp_encoder_lb_assignment,
    lower_bound,
    round_robin_assignment,
)

FLOPS = QuadraticCost.of_flops(MoonViTConfig.preset("kimi-vl-a3b"))

sizes_lists = st.lists(st.integers(1, 5352), max_size=40)
costs = st.builds(QuadraticCost, st.floats(1e-6, 1e3), st.floats(0, 1), st.floats(0, 1e4))


def assert_places_every_image_once(assignment, sizes, ranks):
    assert sorted(assignment.order) == list(range(len(sizes)))
    assert len(assignment.counts) == len(assignment.loads) == ranks
    assert [len(images) for images in assignment.by_rank] == assignment.counts
    assert sum(assignment.by_rank, []) == assignment.order


def slowest(assignment, sizes, cost):
    return max(sum(cost(sizes[image]) for image in images) for images in assignment.by_rank)


def optimum(weights, ranks):
    """The least slowest load over every assignment there is."""
    return min(
        max(sum(w for w, rank in zip(weights, placed, strict=True) if rank == one) for one in range(ranks))
        for placed in product(range(ranks), repeat=len(weights))
    )


# --- the engines' rule -----------------------------------------------------------------------------------------------


def test_the_engines_published_example():
    assert get_dp_encoder_lb_assignment([1000, 100, 200, 50], 2) == ([0, 2, 1, 3], [1, 3], [1000, 350])


def engines_rule(sizes, ranks):
    """SGLang's loop, written out."""
    placed, loads = [[] for _ in range(ranks)], [0] * ranks
    for image in sorted(range(len(sizes)), key=lambda image: sizes[image], reverse=True):
        rank = min(range(ranks), key=lambda rank: loads[rank])
        placed[rank].append(image)
        loads[rank] += sizes[image]
    return sum(placed, []), [len(images) for images in placed], loads


@given(sizes=sizes_lists, ranks=st.integers(1, 9))
def test_the_engines_rule_for_any_sizes(sizes, ranks):
    got = get_dp_encoder_lb_assignment(sizes, ranks)
    assert got == engines_rule(sizes, ranks)
    assert all(type(load) is int for load in got.loads), "patches are whole"


def test_ties_go_to_the_lowest_rank_and_the_first_image():
    assert get_dp_encoder_lb_assignment([7] * 5, 3) == ([0, 3, 1, 4, 2], [2, 2, 1], [14, 14, 7])


def test_round_robin_deals_in_turn():
    assert round_robin_assignment([9, 1, 8, 2, 7], 2) == ([0, 2, 4, 1, 3], [3, 2], [24, 3])


@pytest.mark.parametrize("images", [0, 1, 3])
def test_G1_G3_G5_fewer_images_than_ranks(images):
    sizes = [100 * (image + 1) for image in range(images)]
    for assignment in (
        get_dp_encoder_lb_assignment(sizes, 4),
        balance_by_cost(sizes, 4, FLOPS),
        round_robin_assignment(sizes, 4),
    ):
        assert_places_every_image_once(assignment, sizes, 4)
        assert sorted(assignment.counts) == [0] * (4 - images) + [1] * images
        assert assignment.loads.count(0) == 4 - images


# --- by cost ---------------------------------------------------------------------------------------------------------


def test_G13_patch_counts_leave_a_straggler():
    """One rank waits for the other's attention, though both have the same number of patches."""
    sizes = [16384] + [1024] * 32
    attention = QuadraticCost(per_patch=0, per_pair=1)
    engines = get_dp_encoder_lb_assignment(sizes, 2)
    assert engines.loads == [24576, 24576] and engines.counts == [9, 24]
    work = [sum(attention(sizes[image]) for image in images) for images in engines.by_rank]
    assert work[0] / work[1] > 10
    ours = balance_by_cost(sizes, 2, FLOPS)
    assert ours.counts == [1, 32] and max(ours.loads) == FLOPS(16384), "the large image alone, which is the bound"
    assert slowest(engines, sizes, FLOPS) > 1.15 * max(ours.loads)


def test_four_images_of_a_quarter_are_a_quarter_of_the_attention():
    engines = get_dp_encoder_lb_assignment([16384] + [4096] * 4, 2)
    assert engines.loads == [16384, 16384]
    assert QuadraticCost(0, 1)(16384) == 4 * 4 * QuadraticCost(0, 1)(4096)


@settings(max_examples=300, deadline=None)
@given(sizes=sizes_lists, ranks=st.integers(1, 17), cost=costs)
def test_never_worse_than_the_engines_and_never_below_the_bound(sizes, ranks, cost):
    got = balance_by_cost(sizes, ranks, cost)
    assert_places_every_image_once(got, sizes, ranks)
    weights = [cost(size) for size in sizes]
    assert got.loads == pytest.approx([sum(weights[image] for image in images) for images in got.by_rank])
    engines = slowest(get_dp_encoder_lb_assignment(sizes, ranks), sizes, cost)
    assert max(got.loads) <= engines * (1 + 1e-12)
    assert max(got.loads) >= lower_bound(weights, ranks) * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=7), ranks=st.integers(1, 3), cost=costs)
def test_near_the_optimum_of_every_assignment_there_is(sizes, ranks, cost):
    weights = [cost(size) for size in sizes]
    best = optimum(weights, ranks)
    assert lower_bound(weights, ranks) <= best * (1 + 1e-12)
    assert max(balance_by_cost(sizes, ranks, cost).loads) <= best * (4 / 3) * (1 + 1e-12), "largest first's guarantee"


def test_swaps_reach_what_largest_first_misses():
    sizes, patches = [3, 3, 2, 2, 2], QuadraticCost(1, 0)
    assert max(get_dp_encoder_lb_assignment(sizes, 2).loads) == 7
    assert balance_by_cost(sizes, 2, patches).loads == [6, 6]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("preset", ["lab", "kimi-vl-a3b"])
@pytest.mark.parametrize("workload", ["coco_val2017", "pew_charts", "receipts"])
def test_within_2_percent_of_the_bound_on_real_sizes(workload, preset, ranks):
    """Of every draw; of `max(mean, largest)` too where the images can be divided that well at all."""
    cost = QuadraticCost.of_flops(MoonViTConfig.preset(preset))
    over_simple_bound = []
    for seed in range(8):
        sizes = [image_geometry(*size).patches for size in draw_sizes(workload, 8 * ranks, seed)]
        weights = [cost(size) for size in sizes]
        load = max(balance_by_cost(sizes, ranks, cost).loads)
        assert load <= 1.02 * lower_bound(weights, ranks)
        over_simple_bound.append(load / max(sum(weights) / ranks, *weights))
    assert sorted(over_simple_bound)[len(over_simple_bound) // 2] <= 1.02
    assert max(over_simple_bound) <= 1.03


def test_the_bound_counts_what_has_to_share_a_rank():
    assert lower_bound([], 3) == 0
    assert lower_bound([5, 1, 1], 2) == 5, "the largest"
    assert lower_bound([2, 2, 1, 1], 2) == 3, "the mean"
    assert lower_bound([4, 4, 4, 0.5], 2) == 8, "two of the three large ones"


def test_images_come_largest_first_and_equal_ones_side_by_side():
    sizes = [256, 1024, 256, 1024, 64, 256, 1024, 64, 256, 1024]
    for images in balance_by_cost(sizes, 2, FLOPS).by_rank:
        assert [sizes[image] for image in images] == sorted((sizes[image] for image in images), reverse=True)
        assert images == sorted(images, key=lambda image: (-sizes[image], image))


def test_a_cost_is_asked_once_for_each_size():
    asked = []

    def cost(patches):
        asked.append(patches)
        return float(patches)

    balance_by_cost([4, 9, 4, 9, 9], 2, cost)
    assert sorted(asked) == [4, 9]


def test_flops_are_the_towers():
    assert FLOPS(4096) == 2 * 588 * 1152 * 4096 + 27 * 4096 * (2 * (4 * 1152**2 + 2 * 1152 * 4304) + 4 * 1152 * 4096)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "assign",
    [get_dp_encoder_lb_assignment, round_robin_assignment, lambda sizes, ranks: balance_by_cost(sizes, ranks, FLOPS)],
)
def test_what_cannot_be_placed_is_refused(assign):
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        assign([4], 0)
    with pytest.raises(ValueError, match="each at least 1, got 0"):
        assign([4, 0], 2)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="image of 4 patches must be positive and finite, got"):
        balance_by_cost([4], 2, lambda patches: value)
