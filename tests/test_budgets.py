"""Budget plans: exact where they say so, counted as the engine allocates, and what they promise on real workloads."""

import dataclasses
import itertools
import json
import math
import shlex
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimivl_lab.datasets import WORKLOADS, load_sizes
from kimivl_lab.graphs.packing import PACKERS, Traffic, pack
from kimivl_lab.parallel.balance import get_dp_encoder_lb_assignment
from kimivl_lab.planner.engines import ENGINES, static_bytes
from kimivl_lab.planner.inputs import PlanInputs
from kimivl_lab.planner.plan import REPORTED_CALLS, evaluate_budgets, plan_budgets
from kimivl_lab.planner.search import SEEN_CALLS, search_budgets
from kimivl_lab.planner.staircase import best_steps
from kimivl_lab.planner.vllm import default_max_images, powers_of_two, vllm_flag, vllm_rows
from kimivl_lab.planner.workload import busiest_rank, count_tokens, draw_calls
from tests.conftest import tiny_encoder

# images a call -> workload -> the most rows replayed for one real row, with 8 budgets
PROMISED = {1: {"coco_val2017": 1.02, "receipts": 1.0095, "pew_charts": 1.13}, 8: dict.fromkeys(WORKLOADS, 1.07)}
BY_ITSELF = {"coco_val2017": 1.32, "receipts": 1.84, "pew_charts": 1.47}


def sizes_of(counts):
    """Image sizes of so many merged tokens, in one row each, with their counts."""
    return [(28 * tokens, 28, count) for tokens, count in counts.items()]


@cache
def planned(workload, images, engine="lab"):
    return plan_budgets(load_sizes(workload), (images,), engine=engine)


token_counts = st.dictionaries(st.integers(1, 20), st.integers(1, 9), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7), st.integers(1, 4))
@settings(deadline=None)
def test_steps_are_the_best_of_all(pairs, steps):
    weights, prices = map(list, zip(*pairs, strict=True))

    def cost(positions):
        return sum(weight * prices[min(p for p in positions if p >= at)] for at, weight in enumerate(weights))

    last = len(weights) - 1
    choices = itertools.chain.from_iterable(
        itertools.combinations(range(last), taken) for taken in range(min(steps, last + 1))
    )
    got = best_steps(weights, prices, steps)
    assert got == sorted(set(got)) and got[-1] == last and len(got) <= steps
    assert cost(got) == pytest.approx(min(cost((*positions, last)) for positions in choices))


@given(token_counts, st.integers(1, 3), st.sampled_from(sorted(ENGINES)), st.integers(1, 5))
@settings(deadline=None)
def test_one_image_a_call_is_planned_exactly(counts, graphs, engine, max_images):
    """No other budgets at all, of whatever size, compute fewer rows."""
    plan = plan_budgets(sizes_of(counts), max_graphs=graphs, engine=engine, max_images=max_images)
    rows = ENGINES[engine].rows

    def computed(budgets):
        return sum(
            count * rows(min(budget for budget in budgets if budget >= tokens), max_images)
            for tokens, count in counts.items()
        )

    real = sum(tokens * count for tokens, count in counts.items())
    largest = max(counts)
    tops = range(largest, rows(largest, max_images) + 1)
    lower = [itertools.combinations(range(min(counts), largest), number) for number in range(graphs)]
    others = [(*some, top) for some in itertools.chain(*lower) for top in tops]
    assert plan.exact and len(plan.budgets) <= graphs
    assert plan.waste[1] == pytest.approx(min(map(computed, others)) / real)
    assert plan.waste[1] == pytest.approx(computed(plan.budgets) / real)
    assert plan.rows == plan.budgets, "allocated without overshoot"


@pytest.mark.parametrize(("images", "workload"), [(n, name) for n, named in PROMISED.items() for name in named])
def test_promised_waste_on_real_workloads(images, workload):
    plan = planned(workload, images)
    assert plan.waste[images] <= PROMISED[images][workload]
    assert len(plan.budgets) <= 8 and plan.exact == (images == 1)
    if images == 1 and plan.powers_of_two:
        assert plan.powers_of_two.waste[1] == pytest.approx(BY_ITSELF[workload], abs=0.005)


@pytest.mark.parametrize("workload", ["coco_val2017", "receipts", "pew_charts"])
def test_exact_packing_beats_both_rules_with_the_same_budgets_on_every_call(workload):
    plan = planned(workload, 8)
    calls = draw_calls(count_tokens(load_sizes(workload)), 8, 300, "another").tokens.tolist()
    rows = {
        name: [sum(replay.rows for replay in pack(call, plan.budgets, 8)) for call in calls]
        for name, pack in PACKERS.items()
    }
    for greedy in ("next_fit", "next_fit_deferred"):
        assert all(exact <= other for exact, other in zip(rows["exact"], rows[greedy], strict=True))


@pytest.mark.parametrize("images", [1, 2, 8])
def test_the_plan_for_vllm_wastes_less_than_its_own_budgets(images):
    for workload in ("coco_val2017", "receipts", "pew_charts"):
        plan = planned(workload, images, "vllm")
        assert plan.powers_of_two is not None
        assert plan.waste[images] - 1 < (plan.powers_of_two.waste[images] - 1) / 3
        assert plan.memory < plan.powers_of_two.memory
        assert plan.rows == plan.budgets


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("replay_cost", [0, 1, 5, 50])
def test_several_images_a_call_are_searched_to_the_optimum_of_a_small_workload(engine, replay_cost):
    """Of all pairs of budgets up to the largest call, on the very calls that the search has seen."""
    workload = count_tokens(sizes_of({3: 4, 5: 2, 9: 1}))
    problem = PlanInputs(workload, (2,), ENGINES[engine], 2, math.inf, replay_cost, default_largest=8192, seed=0)
    calls = problem.calls(2, SEEN_CALLS, "seen")

    def time(budgets):
        replays = problem.pack(calls, budgets)
        rows = np.array([*map(problem.rows, budgets), 10**9])[replays.steps]
        return replays.weights @ rows + replay_cost * replays.weights.sum()

    least = min(time(pair) for pair in itertools.combinations(range(1, 19), 2) if pair[-1] >= 9)
    assert time(search_budgets(problem, 2)) <= 1.005 * least


@pytest.mark.parametrize("engine", ENGINES)
def test_eight_small_images_a_call_are_one_replay(engine):
    plan = plan_budgets([(224, 224, 100)], (8,), engine=engine)
    assert plan.replays_a_call == {8: 1.0} and plan.waste == {8: 1.0} and plan.budgets == (512,)
    by_rows = plan_budgets([(224, 224, 100)], (8,), engine=engine, replay_cost=0)
    assert by_rows.replays_a_call == {8: 1.0}, "ties go to fewer replays"


@pytest.mark.parametrize("images", [1, 2, 4, 8])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_plan_for_vllm_takes_more_time_than_its_own_budgets(workload, images):
    plan = planned(workload, images, "vllm")
    assert plan.powers_of_two is not None
    assert plan.time[images] <= plan.powers_of_two.time[images]
    assert len(plan.budgets) <= 8 and plan.eager[images] == 0


@given(token_counts, st.integers(1, 3), st.sampled_from([0, 3, 40]))
@settings(deadline=None, max_examples=40)
def test_small_plans_take_no_more_time_than_powers_of_two(counts, images, replay_cost):
    """Small images: vllm's own budgets, [64, 128], hold every call; with 8 graphs the plan may be those."""
    plan = plan_budgets(
        sizes_of(counts), (images,), engine="vllm", replay_cost=replay_cost, max_batched_tokens=128, max_images=4
    )
    assert plan.powers_of_two is not None and plan.powers_of_two.budgets == (64, 128)
    assert plan.time[images] <= 1.005 * plan.powers_of_two.time[images]


def test_time_is_rows_and_the_price_of_every_replay():
    plan = evaluate_budgets(sizes_of({4: 3, 10: 1}), [2, 5], (1,), replay_cost=6)
    assert plan.time[1] == pytest.approx((3 * (5 + 6) + (10 + 12)) / 22), "an eager call costs twice the price"
    assert plan.waste[1] == pytest.approx((3 * 5 + 10) / 22) and plan.replays_a_call[1] == 1
    assert plan.powers_of_two is not None and plan.powers_of_two.time[1] == pytest.approx(4 * (64 + 6) / 22)


def test_a_plan_that_leaves_images_without_a_graph_does_not_look_better():
    seen = load_sizes("cameras")
    nothing, some = evaluate_budgets(seen, [1, 2, 3]), evaluate_budgets(seen, [64, 414, 1036])
    plan = plan_budgets(seen)
    assert nothing.eager[1] > 0.95 and 0 < some.eager[1] < 1 and plan.eager[1] == 0
    assert nothing.time[1] > some.time[1] > plan.time[1], "though it computes the fewest rows"
    assert nothing.waste[1] < plan.waste[1]
    in_fours = evaluate_budgets(seen, [1, 2, 3], (4,))
    assert in_fours.eager[4] > 0.95 and in_fours.replays_a_call[4] == pytest.approx(4, abs=0.2)


def test_a_limit_of_memory_shows_what_it_costs():
    sizes = load_sizes("pew_charts")
    limited, free = plan_budgets(sizes, memory_limit=static_bytes(600)), planned("pew_charts", 1)
    assert limited.eager[1] > 0 and limited.time[1] > free.time[1]


def test_no_budget_for_vllm_is_larger_than_what_its_scheduler_gives():
    for most in (2048, 8192):
        plan = plan_budgets(load_sizes("receipts"), (8,), engine="vllm", max_batched_tokens=most)
        assert plan.powers_of_two is not None and plan.powers_of_two.budgets[-1] == most
        assert plan.budgets[-1] <= most
    one = plan_budgets(load_sizes("receipts"), engine="vllm", max_batched_tokens=512)
    assert one.budgets[-1] > 1024, "unless one image is larger"


@pytest.mark.parametrize("images", [(1,), (4,), (1, 4)])
def test_one_graph_more_never_costs_time_and_the_plan_lies_on_its_curve(images):
    plan = plan_budgets(load_sizes("coco_val2017"), images, 4)
    numbers, times = zip(*plan.by_graphs.items(), strict=True)
    assert numbers == tuple(range(1, len(plan.budgets) + 5))
    assert list(times) == sorted(times, reverse=True) and times[0] > times[-1]
    if images == (1,):
        assert plan.by_graphs[len(plan.budgets)] == pytest.approx(plan.time[1])
        two = plan_budgets(load_sizes("coco_val2017"), images, 2)
        assert plan.by_graphs[2] == pytest.approx(two.time[1]), "exact"


def test_a_search_is_not_worse_than_the_plan_for_single_images():
    for workload in ("pew_charts", "clipart"):
        single = evaluate_budgets(load_sizes(workload), planned(workload, 1).budgets, (8,))
        assert planned(workload, 8).time[8] < single.time[8] - 0.01


def test_what_is_reported_is_what_the_packers_do():
    sizes = load_sizes("clipart")
    for engine in ENGINES:
        plan = plan_budgets(sizes, (1, 3), max_graphs=4, engine=engine, seed=7)
        calls = draw_calls(count_tokens(sizes), 3, REPORTED_CALLS, "reported 3 7").tokens.tolist()
        rule = ENGINES[engine].packing
        replays = [
            replay for call in calls for replay in pack(call, plan.budgets, plan.max_images, rule, plan.replay_cost)
        ]
        computed = sum(vllm_rows(r.rows, plan.max_images) if engine == "vllm" else r.rows for r in replays)
        assert plan.waste[3] == pytest.approx(computed / sum(map(sum, calls)))
        assert plan.time[3] - plan.waste[3] == pytest.approx(plan.replay_cost * len(replays) / sum(map(sum, calls)))
        assert plan.replays_a_call[3] == pytest.approx(len(replays) / REPORTED_CALLS)
        for budget, share in zip(plan.budgets, plan.replays[3], strict=True):
            assert share == pytest.approx(sum(replay.budget == budget for replay in replays) / len(replays))
        assert sum(plan.replays[1]) == pytest.approx(1)


@pytest.mark.parametrize("images", [(1,), (8,), (1, 4)])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_budget_is_reached(images, engine):
    plan = plan_budgets(load_sizes("device_screens"), images, 16, engine=engine)
    for budget, *shares in zip(plan.budgets, *plan.replays.values(), strict=True):
        assert any(shares), f"no call is replayed in {budget}"


def test_the_same_arguments_give_the_same_plan():
    sizes = load_sizes("device_screens")
    assert plan_budgets(sizes, (1, 4)) == plan_budgets(sizes, (4, 1, 4))
    as_pairs = [size[:2] for size in sizes for _ in range(size[2])]
    assert plan_budgets(as_pairs, (8,)) == planned("device_screens", 8)


def test_numpys_integers_count_as_integers():
    """As sizes, calls, limits and budgets; and the plan holds plain integers, which json can write."""
    sizes = sizes_of({3: 5, 7: 5, 20: 1})
    limit = static_bytes(10)
    given: dict[str, Any] = {
        "sizes": np.array(sizes, dtype=np.int32),
        "images_per_call": np.array([1, 2]),
        "max_graphs": np.uint8(2),
        "memory_limit": np.int64(limit),
        "in_token_limit": np.int64(4096),
        "max_images": np.int16(2),
        "seed": np.int64(0),
    }
    plan = plan_budgets(**given)
    assert plan == plan_budgets(sizes, (1, 2), 2, limit, max_images=2)
    assert json.loads(json.dumps(dataclasses.asdict(plan)))["budgets"] == list(plan.budgets)
    budgets: Any = np.array([7, 3, 20])
    assert evaluate_budgets(sizes, budgets, engine="vllm") == evaluate_budgets(sizes, [3, 7, 20], engine="vllm")
    with pytest.raises(ValueError, match="budget.*True"):
        evaluate_budgets(sizes, [True, 20])


def test_a_huge_number_of_graphs_costs_nothing():
    sizes = sizes_of({3: 5, 7: 5})
    assert plan_budgets(sizes, max_graphs=10**9, engine="vllm", memory_limit=static_bytes(9)).budgets == (7,)
    assert plan_budgets(sizes, (2,), 10**9).budgets == plan_budgets(sizes, (2,), 40).budgets


def test_images_above_every_budget_run_eager_and_are_counted_as_they_are():
    plan = evaluate_budgets(sizes_of({4: 3, 10: 1}), [5, 5, 2], (1,))
    assert plan.budgets == (2, 5)
    assert plan.replays[1] == (0, 0.75) and plan.eager[1] == 0.25
    assert plan.waste[1] == pytest.approx((3 * 5 + 10) / 22)


def test_a_memory_limit_is_kept():
    for images, engine in itertools.product((1, 4), ENGINES):
        limit = planned("cameras", images, engine).memory // 3
        held = plan_budgets(load_sizes("cameras"), (images,), memory_limit=limit, engine=engine)
        assert held.budgets and held.memory <= limit
    sizes = load_sizes("pew_charts")
    assert plan_budgets(sizes, memory_limit=static_bytes(600)).eager[1] > 0
    assert plan_budgets(sizes, memory_limit=static_bytes(600)).exact
    with pytest.raises(ValueError, match="no budget.*48 merged tokens.*47"):
        plan_budgets(sizes, memory_limit=static_bytes(47))


@given(st.integers(1, 20000), st.integers(1, 64))
@settings(deadline=None)
def test_vllm_lays_out_grids_that_hold_the_budget(budget, max_images):
    rows = vllm_rows(budget, max_images)
    each = math.ceil(budget / max_images)
    width = min(each, 256)
    height = math.ceil(each / width)
    assert rows == max_images * height * width >= budget
    assert vllm_rows(rows, max_images) == rows


def test_rows_of_vllm_as_read():
    assert vllm_rows(1089, 1) == 1280
    assert [vllm_rows(budget, 64) for budget in powers_of_two()] == powers_of_two()
    assert vllm_rows(100, 8) == 104, "the ceiling of 12.5, not its floor"


def test_powers_of_two_are_vllms():
    assert powers_of_two() == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert powers_of_two(64, 800) == [64, 128, 256, 512, 800]
    assert powers_of_two(64, 64) == [64]
    assert default_max_images(powers_of_two()) == 64 and default_max_images([8, 4096]) == 8
    with pytest.raises(ValueError, match="least 64 and most 32"):
        powers_of_two(64, 32)


def test_the_flag_is_one_shell_word_of_json():
    plan = planned("receipts", 8, "vllm")
    option, value = shlex.split(vllm_flag(plan.budgets, plan.max_images))
    assert option == "--compilation-config"
    assert json.loads(value) == {
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": list(plan.budgets),
        "encoder_cudagraph_max_vision_items_per_batch": 8,
    }


@pytest.mark.parametrize(
    ("budgets", "images", "message"), [([8, 8], 1, "differ"), ([4, 64], 8, "1 to the smallest budget, 4, got 8")]
)
def test_a_flag_that_vllm_would_refuse_is_refused(budgets, images, message):
    with pytest.raises(ValueError, match=message):
        vllm_flag(budgets, images)


@given(token_counts, st.lists(st.integers(1, 12), min_size=1, max_size=3))
@settings(deadline=None, max_examples=25)
def test_a_plan_for_vllm_always_gives_a_flag(counts, images):
    plan = plan_budgets(sizes_of(counts), images, engine="vllm")
    vllm_flag(plan.budgets, plan.max_images)
    assert plan.max_images >= max(images)
    assert not any(plan.eager.values())


def test_static_bytes_are_those_of_the_buffers():
    encoder = tiny_encoder().to(torch.bfloat16)
    meta = encoder.vision_tower.prepare_encoder_metadata([(4, 6), (2, 8)])
    pixels = torch.zeros(40, 3, 14, 14, dtype=torch.bfloat16)
    rows = torch.zeros(10, encoder.config.text_config.hidden_size, dtype=torch.bfloat16)
    tensors = (pixels, meta.pos_embeds, meta.rope_cos_sin, meta.merge_gather_idx, rows)
    vision = encoder.config.vision_config
    assert static_bytes(
        10,
        hidden_size=vision.hidden_size,
        head_dim=vision.head_dim,
        text_hidden_size=encoder.config.text_config.hidden_size,
    ) == sum(tensor.nbytes for tensor in tensors)


def test_memory_as_read_for_vllms_own_budgets():
    assert static_bytes(1) == 4 * 3776 + 2 * 2048
    assert round(ENGINES["vllm"].memory(powers_of_two(), 64) / 2**20) == 299
    assert ENGINES["lab"].memory(powers_of_two(), 64) == static_bytes(8192)


def test_progress_ends_at_the_end():
    shares = []
    plan_budgets(load_sizes("cameras"), (4,), on_progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": []}, "no image sizes"),
        ({"sizes": [(3,)]}, r"\(width, height\)"),
        ({"sizes": [(3, 4, 0)]}, "count.*positive"),
        ({"sizes": [(0, 4)]}, "width.*0"),
        ({"sizes": [(20000, 28)]}, "512"),
        ({"images_per_call": ()}, "images_per_call is empty"),
        ({"images_per_call": (0,)}, "images_per_call.*0"),
        ({"max_graphs": 0}, "max_graphs.*0"),
        ({"max_images": -1}, "max_images.*-1"),
        ({"replay_cost": -1}, "replay_cost.*-1"),
        ({"replay_cost": 0.5}, "replay_cost.*0.5"),
        ({"max_batched_tokens": 0}, "max_batched_tokens.*0"),
        ({"engine": "vllm", "max_batched_tokens": 63}, "most 63"),
        ({"memory_limit": 0}, "memory_limit.*0"),
        ({"in_token_limit": 0}, "in_token_limit.*0"),
        ({"sizes": [(True, 4)]}, "width.*True"),
        ({"sizes": [(28, 28, 1.5)]}, "count.*1.5"),
        ({"images_per_call": 8}, "images_per_call.*8"),
        ({"images_per_call": (True,)}, "images_per_call.*True"),
        ({"max_graphs": True}, "max_graphs.*True"),
        ({"max_graphs": np.float32(2)}, "max_graphs.*2"),
        ({"engine": "sglang"}, "unknown engine 'sglang'.*lab, vllm"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_budgets(**({"sizes": [(28, 28)]} | arguments))


def test_calls_are_drawn_by_frequency():
    workload = count_tokens(sizes_of({2: 1, 6: 3}))
    calls = draw_calls(workload, 5, 400, "seed")
    assert calls.tokens.shape == (400, 5) and (np.diff(calls.tokens) >= 0).all()
    assert np.mean(calls.tokens == 6) == pytest.approx(0.75, abs=0.03)
    assert (draw_calls(workload, 5, 400, "seed").tokens == calls.tokens).all()
    assert (draw_calls(workload, 5, 400, "other").tokens != calls.tokens).any()


def test_ranks_are_counted_by_the_engines_balance_and_not_by_equal_numbers():
    call = Traffic(np.array([[300, 400, 400, 1000]]), np.ones(1))
    busiest, most = busiest_rank(call, 2)
    assert busiest.tokens.tolist() == [[300, 400, 400]] and most == 3, "half of four images would be two"
    uneven = Traffic(np.array([[300, 400, 400, 1000], [100, 100, 100, 1000]]), np.ones(2))
    assert busiest_rank(uneven, 2)[0].tokens.tolist() == [[300, 400, 400], [0, 0, 1000]]
    assert busiest_rank(uneven, 1) == (uneven, 4)


def test_a_plan_for_ranks_is_made_for_what_the_busiest_rank_encodes():
    sizes, budgets = sizes_of({1: 99, 200: 1}), [1, 8, 200]
    plan = evaluate_budgets(sizes, budgets, (8,), ranks=2, max_images=8, replay_cost=0)
    computed = real = 0
    for call in draw_calls(count_tokens(sizes), 8, REPORTED_CALLS, "reported 8 0").tokens.tolist():
        placed = get_dp_encoder_lb_assignment(call, 2)
        rank = placed.loads.index(max(placed.loads))
        held = [call[image] for image in placed.by_rank[rank]]
        computed += sum(replay.rows for replay in pack(held, budgets, 8))
        real += sum(held)
    assert plan.waste[8] == pytest.approx(computed / real)
    assert plan_budgets(sizes, (8,), ranks=2).max_images == 7, "the rank without the large image gets all others"
