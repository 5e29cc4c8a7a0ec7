"""The cost model: formulas against counting, a fit that finds what made its points, and the choice that follows."""

import statistics

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kimivl_lab import MoonViTConfig
from kimivl_lab.bench.fit_cost_model import (
    CALIBRATION_GRIDS,
    CollectivePoint,
    MeasuredPoint,
    fit_cost_model,
    fit_links,
    fit_nonnegative,
    prediction_errors,
)
from kimivl_lab.geometry import patch_counts
from kimivl_lab.moonvit.flops import tower_flops
from kimivl_lab.parallel.balance import get_dp_encoder_lb_assignment
from kimivl_lab.parallel.cost_model import (
    ASSUMED_RATES,
    CostModel,
    LinkCost,
    MachineRates,
    Prediction,
    assumed_cost_model,
    cost_model_by_formula,
)
from kimivl_lab.parallel.work import COLLECTIVES, TowerWork, steps_and_bytes

PUBLISHED, LAB = MoonViTConfig.preset("kimi-vl-a3b"), MoonViTConfig.preset("lab")
WORK = TowerWork.of(LAB, torch.float32)
LINKS = {
    "all_reduce": LinkCost(2e-4, 1e-9),
    "all_gather": LinkCost(3e-4, 2e-9),
    "broadcast": LinkCost(1e-4, 3e-10),
}
MODEL = CostModel(WORK, 5e-3, 1e-3, 3e-5, 6e-12, 8e-12, 4e-4, LINKS, "made up", (1, 2))
BATCHES = [patch_counts(grids) for grids in CALIBRATION_GRIDS]


def points_of(model, batches=BATCHES, ranks=2, noise=lambda: 1.0):
    """What a machine that obeys `model` would measure; data parallel by patch count."""
    for sizes in batches:
        by_rank = get_dp_encoder_lb_assignment(sizes, ranks).by_rank
        for mode, world, placed in (("single", 1, None), ("data", ranks, by_rank), ("tensor", ranks, None)):
            seconds = model.predict(mode, sizes, world, placed).seconds * noise()
            yield MeasuredPoint(mode, sizes, world, seconds, placed)


def collectives_of(links, noise=lambda: 1.0):
    return [
        CollectivePoint(kind, ranks, size, link.seconds(kind, ranks, size) * noise())
        for kind, link in links.items()
        for ranks in (2, 4)
        for size in (2**10, 2**16, 2**22)
    ]


# --- bytes and FLOPs -------------------------------------------------------------------------------------------------


def test_54_all_reduces_against_one_gather():
    work = TowerWork.of(PUBLISHED, torch.bfloat16)
    assert work.all_reduces == 54
    assert work.activation_bytes(4096) == 4096 * 1152 * 2 == 9_437_184
    assert work.tensor_parallel_bytes([4096]) == 54 * 9_437_184
    assert work.tensor_parallel_bytes([1024, 3072]) == work.tensor_parallel_bytes([4096])
    assert work.data_parallel_bytes([4096], [[0], []]) == 9_437_184, "one image is broadcast"
    assert work.data_parallel_bytes([1024, 3072, 1024], [[1], [0, 2]]) == 2 * 3072 * 1152 * 2, "padded to the longest"
    assert work.data_parallel_bytes([], [[], []]) == 0


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(1, 80)), max_size=9))
def test_flops_are_the_towers(grids):
    counting = CostModel(WORK, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, {}, "FLOPs for seconds")
    flops = tower_flops(LAB, grids)
    assert counting.predict("single", patch_counts(grids), 1).compute == flops["linear"] + flops["attention"]


def test_tensor_parallel_where_heads_do_not_divide_is_refused():
    for ranks in (0, 3, 8):
        with pytest.raises(ValueError, match=f"{ranks} ranks cannot .* legal sizes are 1, 2, 4"):
            MODEL.predict("tensor", [64], ranks)


# --- collectives -----------------------------------------------------------------------------------------------------


def ring_all_reduce(values):
    """(sums, steps, numbers that each rank sends) of a ring of lists, one chunk of 1/R a step."""
    ranks, chunk, sent, steps = len(values), len(values[0]) // len(values), 0, 0
    held = [[row[i * chunk : (i + 1) * chunk] for i in range(ranks)] for row in values]
    for step in range(2 * (ranks - 1)):
        moving = [held[rank][(rank - step) % ranks] for rank in range(ranks)]
        for rank in range(ranks):
            index, arriving = (rank - 1 - step) % ranks, moving[rank - 1]
            mine = held[rank][index]
            held[rank][index] = [a + b for a, b in zip(mine, arriving, strict=True)] if step < ranks - 1 else arriving
        steps, sent = steps + 1, sent + chunk
    return [sum(row, []) for row in held], steps, sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_an_all_reduce_is_a_ring(ranks):
    values = [[10**rank + column for column in range(24)] for rank in range(ranks)]
    summed, steps, sent = ring_all_reduce(values)
    assert summed == [[sum(column) for column in zip(*values, strict=True)]] * ranks
    assert steps_and_bytes("all_reduce", ranks, 24) == (steps, sent)


@pytest.mark.parametrize(("ranks", "levels"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (64, 6)])
def test_gathers_pass_on_and_broadcasts_double(ranks, levels):
    assert steps_and_bytes("all_gather", ranks, 100 * ranks) == (ranks - 1, 100 * (ranks - 1))
    assert steps_and_bytes("broadcast", ranks, 100) == (levels, 100 * levels)
    assert LinkCost(2.0, 0.5).seconds("broadcast", ranks, 100) == 52 * levels


def test_latency_and_bandwidth_are_found():
    found = fit_links(collectives_of(LINKS))
    assert found.keys() == set(COLLECTIVES)
    for kind, link in LINKS.items():
        assert (found[kind].alpha, found[kind].beta) == pytest.approx((link.alpha, link.beta))


def test_unknown_collectives_are_refused():
    with pytest.raises(ValueError, match="unknown collective 'reduce': one of all_reduce, all_gather, broadcast"):
        steps_and_bytes("reduce", 2, 4)
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        steps_and_bytes("broadcast", 0, 4)
    with pytest.raises(ValueError, match="knows no all_gather, only broadcast: measure it"):
        CostModel(WORK, 0, 0, 0, 1, 1, 0, {"broadcast": LinkCost(1, 1)}, "half").predict("data", [4, 4], 2)


# --- least squares ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=3, max_size=3), st.integers(0, 2**16))
def test_coefficients_are_recovered_and_never_negative(wanted, seed):
    assume(sum(wanted) > 1e-3)
    rows = np.random.default_rng(seed).uniform(0.1, 1, (12, 3)) * [1, 1e-6, 1e9]
    got = fit_nonnegative(rows.tolist(), (rows @ wanted).tolist())
    assert min(got) >= 0
    assert rows @ got == pytest.approx(rows @ wanted, rel=1e-6)


def test_a_negative_slope_becomes_zero_and_an_unseen_column_stays_zero():
    rows = [[1, x, 0] for x in (1.0, 2.0, 3.0)]
    constant, slope, unseen = fit_nonnegative(rows, [3.0, 2.0, 1.0])
    assert slope == unseen == 0 and 1 < constant < 3
    assert fit_nonnegative(rows, [3.0, 4.0, 5.0], known=[1.0, 2.0, 3.0]) == pytest.approx([2, 0, 0])


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, -1.0], [float("nan")]])
def test_values_must_be_measured_times(values):
    with pytest.raises(ValueError, match="all positive"):
        fit_nonnegative([[1.0]] * len(values), values)


# --- predictions -----------------------------------------------------------------------------------------------------


def test_one_image_on_more_ranks_only_waits_for_its_broadcast():
    alone = MODEL.predict("single", [1024], 1)
    assert alone == Prediction(5e-3 + MODEL.image_cost(1024), 0.0)
    shared = MODEL.predict("data", [1024], 8)
    assert shared.compute == alone.compute
    assert shared.collectives == 4e-4 + LINKS["broadcast"].seconds("broadcast", 8, WORK.activation_bytes(1024))


def test_data_parallel_waits_for_the_slowest_rank_and_pads_to_the_longest():
    """One large image is slowest, many small ones are longest: different ranks decide the two parts."""
    sizes = [4096] + [64] * 80
    quick = CostModel(WORK, 5e-3, 0.0, 0.0, 1e-13, 8e-12, 0.0, LINKS, "attention is what counts")
    placed = get_dp_encoder_lb_assignment(sizes, 2)._replace(order=list(range(81)), counts=[1, 80])
    got = quick.predict("data", sizes, 2, placed.by_rank)
    assert got.compute == pytest.approx(5e-3 + quick.image_cost(4096))
    assert got.collectives == LINKS["all_gather"].seconds("all_gather", 2, 2 * WORK.activation_bytes(80 * 64))
    assert quick.predict("data", sizes, 2).compute <= quick.predict("data", sizes, 2, placed.by_rank).compute


def test_tensor_parallel_divides_products_and_nothing_else():
    sizes = [1024, 576]
    free = CostModel(
        WORK, 5e-3, 1e-3, 3e-5, 6e-12, 8e-12, 0.0, {kind: LinkCost(0, 0) for kind in COLLECTIVES}, "free links"
    )
    products = 6e-12 * WORK.linear_flops * 1600 + 8e-12 * WORK.attention_flops * (1024**2 + 576**2)
    rest = 5e-3 + 2 * 1e-3 + 1600 * 3e-5
    for ranks in (1, 2, 4):
        assert free.predict("tensor", sizes, ranks).seconds == pytest.approx(rest + products / ranks)
    one = LINKS["all_reduce"].seconds("all_reduce", 2, 1600 * 288 * 4)
    assert MODEL.predict("tensor", sizes, 2).collectives == pytest.approx(12 * (4e-4 + one))


@given(st.lists(st.integers(1, 4096), max_size=6))
def test_one_rank_is_one_rank_in_every_mode(sizes):
    alone = MODEL.predict("single", sizes, 1)
    assert MODEL.predict("tensor", sizes, 1) == alone
    assert MODEL.predict("data", sizes, 1).seconds == pytest.approx(alone.seconds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipeline", [4], 2), "mode must be 'single' on 1 rank, 'data' or 'tensor', got 'pipeline' on 2"),
        (("single", [4], 2), "got 'single' on 2"),
        (("data", [4, 4], 2, [[0, 1]]), "by_rank places images on 1 ranks, not on 2"),
        (("data", [4], 0), "num_ranks must be at least 1"),
    ],
)
def test_what_cannot_be_predicted_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MODEL.predict(*arguments)


# --- fit -------------------------------------------------------------------------------------------------------------


rates = st.tuples(
    *(st.floats(0, most) for most in (1e-2, 1e-3, 1e-4)), *[st.floats(1e-13, 1e-11)] * 2, st.floats(0, 1e-3)
)


@settings(max_examples=40, deadline=None)
@given(rates)
def test_the_fit_finds_the_machine_that_made_its_points(wanted):
    truth = CostModel(WORK, *wanted, links=LINKS, source="truth")
    found = fit_cost_model(LAB, torch.float32, list(points_of(truth)), collectives_of(LINKS), source="fitted")
    assert found.measured_ranks == (1, 2) and found.source == "fitted"
    others = points_of(truth, [[576, 576, 100], [3000], [64] * 5 + [2048] * 3], ranks=4)
    assert max(map(abs, prediction_errors(found, list(others)))) < 1e-3


def test_the_fit_withstands_noise():
    generator = np.random.default_rng(0)
    noise = lambda: float(generator.uniform(0.9, 1.1))  # noqa: E731
    points = list(points_of(MODEL, noise=noise))
    found = fit_cost_model(LAB, torch.float32, points, collectives_of(LINKS, noise), source="noisy")
    fresh = list(points_of(MODEL, [[3000], [100, 900, 1600], [400] * 6]))
    assert statistics.median(map(abs, prediction_errors(found, fresh))) < 0.05
    assert max(map(abs, prediction_errors(found, points))) < 0.2


def test_points_without_collectives_or_without_points_are_refused():
    with pytest.raises(ValueError, match="knows no"):
        fit_cost_model(LAB, torch.float32, list(points_of(MODEL)), source="no collectives")
    with pytest.raises(ValueError, match="needs measured points, got none"):
        fit_cost_model(LAB, torch.float32, [], source="nothing")


def test_single_points_alone_are_enough_for_a_balance():
    alone = [point for point in points_of(MODEL) if point.mode == "single"]
    found = fit_cost_model(LAB, torch.float32, alone, source="one rank")
    assert max(map(abs, prediction_errors(found, alone))) < 1e-6
    assert found.image_cost(1000) == pytest.approx(MODEL.image_cost(1000))


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [MODEL, assumed_cost_model(PUBLISHED, torch.bfloat16, "cuda")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_huge_image_is_split_and_many_are_dealt(model, ranks):
    assert model.choose([16384], ranks) == "tensor"
    assert model.choose([1024] * 8 * ranks, ranks) == "data"
    assert model.choose([], ranks) == "data"


@given(st.lists(st.integers(1, 5352), max_size=12), st.sampled_from([1, 2, 3, 4, 16]))
def test_the_choice_is_the_faster_of_what_can_run(sizes, ranks):
    chosen = MODEL.choose(sizes, ranks)
    if ranks in (1, 3, 16):
        assert chosen == "data"
    else:
        tensor, data = MODEL.predict("tensor", sizes, ranks).seconds, MODEL.predict("data", sizes, ranks).seconds
        assert chosen == ("tensor" if tensor < data else "data")


def test_crossover_is_the_ratio_of_the_two():
    ratios = MODEL.crossover([64, 4096], [1, 2, 8], 2)
    assert ratios.shape == (3, 2)
    assert ratios[1, 1] == MODEL.predict("tensor", [4096] * 2, 2).seconds / MODEL.predict("data", [4096] * 2, 2).seconds
    assert ratios[0, 1] < 1 < ratios[2].min()
    assert ratios[0, 0] > 1, "a small image is not worth its all-reduces"


# --- formula, simulation ---------------------------------------------------------------------------------------------


def test_by_formula_nothing_is_faster_than_the_rates():
    rates = MachineRates(flops_per_s=1e12, bytes_per_s=1e11, launch_s=0.0, link_s=0.0, link_bytes_per_s=1e10)
    model = cost_model_by_formula(PUBLISHED, torch.bfloat16, rates, "spec sheet")
    flops = sum(tower_flops(PUBLISHED, [(64, 64)]).values())
    norms_and_residuals = 27 * 10 * 4096 * 1152 * 2
    weights = 27 * (4 * 1152**2 + 2 * 1152 * 4304) * 2
    assert model.predict("single", [4096], 1).seconds == pytest.approx(
        flops / 1e12 + (norms_and_residuals + weights) / 1e11
    )
    assert model.source == "spec sheet" and model.measured_ranks == ()


def test_assumed_rates_say_so():
    for device in ASSUMED_RATES:
        model = assumed_cost_model(LAB, torch.float32, device)
        assert "assumed" in model.source and "not measured" in model.source
    with pytest.raises(ValueError, match="no assumed rates of device 'mps': one of cpu, cuda"):
        assumed_cost_model(LAB, torch.float32, "mps")
