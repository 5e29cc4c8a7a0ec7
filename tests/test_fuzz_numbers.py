"""Random sizes, grids, packings and balances against plain restatements of their rules. Seeded."""

import itertools
import math
import random

import numpy as np
import pytest

from kimivl_lab.geometry import as_grid_list, image_geometry
from kimivl_lab.graphs.packing import PACKERS, Traffic, pack, pack_many
from kimivl_lab.moonvit.metadata import build_merge_gather_idx, grid_arrays_reference, pack_grid_arrays
from kimivl_lab.parallel.balance import (
    QuadraticCost,
    balance_by_cost,
    get_dp_encoder_lb_assignment,
    lower_bound,
    round_robin_assignment,
)

CASES = 2000


@pytest.fixture
def cases():
    """A random generator for each case."""
    return [random.Random(seed) for seed in range(CASES)]


def side(rng: random.Random) -> int:
    return round(math.exp(rng.uniform(0, math.log(30_000))))


def plain_grid(width, height, limit, patch, kernel, pad):
    """(h, w), or None where the image is refused; the published rule, one line after the other."""
    count = (width // patch) * (height // patch)
    if count > limit:
        scale = math.sqrt(limit / count)
        width, height = max(1, int(width * scale)), max(1, int(height * scale))
    if pad:
        w = math.ceil(width / (patch * kernel[1])) * kernel[1]
        h = math.ceil(height / (patch * kernel[0])) * kernel[0]
    else:
        w, h = width // patch, height // patch
    return (h, w) if 0 < h < 512 and 0 < w < 512 else None


def test_sizes(cases):
    for rng in cases:
        size, limit, pad = (side(rng), side(rng)), rng.choice([1, 7, 256, 4096, 16384]), rng.random() < 0.7
        patch, kernel = rng.choice([14, 14, 14, 16, 7, 1]), rng.choice([(2, 2), (2, 2), (1, 2), (4, 1), (3, 2)])
        want = plain_grid(*size, limit, patch, kernel, pad)
        options = {"in_token_limit": limit, "patch_size": patch, "merge_kernel_size": kernel, "pad_input": pad}
        if want is None:
            with pytest.raises(ValueError, match=f"image {size[0]}x{size[1]} "):
                image_geometry(*size, **options)
            continue
        geometry = image_geometry(*size, **options)
        assert geometry.grid_hw == want
        assert geometry.patches == want[0] * want[1]
        if pad:
            assert geometry.tokens == (want[0] // kernel[0]) * (want[1] // kernel[1])


def test_grids(cases):
    for rng in cases:
        kh, kw = rng.choice([(2, 2), (2, 2), (1, 1), (3, 1), (2, 4)])
        grids = [(kh * rng.randint(1, 9), kw * rng.randint(1, 9)) for _ in range(rng.randint(0, 6))]
        slots = len(grids) + rng.randint(0, 3)
        order, positions, offsets = [], [], [0]
        for h, w in grids:
            start = offsets[-1]
            windows = itertools.product(range(0, h, kh), range(0, w, kw), range(kh), range(kw))
            order += [start + (top + y) * w + left + x for top, left, y, x in windows]
            positions += [[x, y] for y in range(h) for x in range(w)]
            offsets.append(start + h * w)
        offsets += offsets[-1:] * (slots - len(grids))
        plain = as_grid_list(np.array(grids).reshape(-1, 2))
        reference = grid_arrays_reference(plain, slots, (kh, kw))
        packed = pack_grid_arrays(plain, slots, (kh, kw)).to("cpu")
        for arrays in (reference, packed):
            assert arrays["merge_gather_idx"].tolist() == order
            assert arrays["positions"].tolist() == positions
            assert arrays["cu_seqlens"].tolist() == offsets
        assert build_merge_gather_idx(grids, (kh, kw)).tolist() == order


def plain_runs(tokens, budgets, most, rule):
    """Runs of ascending tokens, cut greedily by vLLM's rules, or the best of all cuts."""
    ladder = sorted(set(budgets))

    def smallest(total):
        return next(budget for budget in ladder if budget >= total)

    small = sorted(count for count in tokens if count <= ladder[-1])
    if rule == "exact":
        best = None
        for cuts in itertools.product((False, True), repeat=max(len(small) - 1, 0)):
            runs, run = [], small[:1]
            for count, cut in zip(small[1:], cuts, strict=True):
                runs, run = (runs + [run], [count]) if cut else (runs, [*run, count])
            runs += [run] if run else []
            if all(len(run) <= most and sum(run) <= ladder[-1] for run in runs):
                price = (sum(smallest(sum(run)) for run in runs), len(runs))
                best = price if best is None else min(best, price)
        return best
    runs = []
    for count in small:
        fits = runs and len(runs[-1]) < most and sum(runs[-1]) + count <= ladder[-1]
        if fits and rule == "next_fit_deferred":
            apart, alone = smallest(sum(runs[-1])), smallest(count)
            fits = not (apart + alone < smallest(sum(runs[-1]) + count) and alone >= apart)
        if fits:
            runs[-1].append(count)
        else:
            runs.append([count])
    return sum(smallest(sum(run)) for run in runs), len(runs)


def test_packings(cases):
    for rng in cases:
        budgets = [rng.randint(1, 90) for _ in range(rng.randint(1, 5))]
        tokens = [rng.randint(1, 100) for _ in range(rng.randint(0, 8))]
        most, rule = rng.randint(1, 5), rng.choice(list(PACKERS))
        replays = pack(tokens, budgets, most, rule)
        assert sorted(image for replay in replays for image in replay.images) == list(range(len(tokens)))
        for replay in replays:
            held = sum(tokens[image] for image in replay.images)
            assert replay.tokens == held and len(replay.images) <= most
            assert replay.budget == min((budget for budget in budgets if budget >= held), default=None)
        captured = [replay.budget for replay in replays if replay.budget]
        assert (sum(captured), len(captured)) == (plain_runs(tokens, budgets, most, rule) or (0, 0))
        if tokens:
            calls = Traffic(np.sort(np.array([tokens] * 2, dtype=np.int64), axis=1), np.ones(2))
            many = pack_many(calls, sorted(set(budgets)), most, rule)
            steps = [*sorted(set(budgets)), None]
            got = sorted((held, steps[step] or 0) for held, step in zip(many.tokens, many.steps, strict=True))
            assert got == sorted((replay.tokens, replay.budget or 0) for replay in replays * 2)


def test_balances(cases):
    cost = QuadraticCost(per_patch=3.0, per_pair=0.01, per_image=50.0)
    for rng in cases:
        sizes = [rng.choice([4, 16, 100, 1024, rng.randint(1, 4096)]) for _ in range(rng.randint(0, 9))]
        ranks = rng.randint(1, 4)
        costs = [cost(size) for size in sizes]
        engines = get_dp_encoder_lb_assignment(sizes, ranks)
        ours = balance_by_cost(sizes, ranks, cost)
        turns = round_robin_assignment(sizes, ranks)
        for assignment, prices in ((engines, sizes), (ours, costs), (turns, sizes)):
            assert sorted(assignment.order) == list(range(len(sizes))) and len(assignment.counts) == ranks
            for images, load in zip(assignment.by_rank, assignment.loads, strict=True):
                assert load == pytest.approx(sum(prices[image] for image in images))
        loads, placed = [0] * ranks, [[] for _ in range(ranks)]
        for image in sorted(range(len(sizes)), key=lambda image: -sizes[image]):
            rank = loads.index(min(loads))
            loads[rank] += sizes[image]
            placed[rank].append(image)
        assert (engines.by_rank, list(engines.loads)) == (placed, loads)
        slowest = max(ours.loads)
        assert slowest <= max(sum(costs[image] for image in rank) for rank in placed) * (1 + 1e-9)
        assert slowest >= lower_bound(costs, ranks) * (1 - 1e-9)
        if len(sizes) <= 6:
            best = math.inf
            for choice in itertools.product(range(ranks), repeat=len(sizes)):
                totals = [0.0] * ranks
                for rank, price in zip(choice, costs, strict=True):
                    totals[rank] += price
                best = min(best, max(totals))
            assert best * (1 - 1e-9) <= slowest <= best * (4 / 3) + 1e-9
            assert lower_bound(costs, ranks) <= best * (1 + 1e-9)
