"""Faults that graph runners have had in public (rows I): each a kind, and the smallest input that shows it."""

import gc
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from kimivl_lab import EncoderCudaGraphRunner
from kimivl_lab.graphs.guards import GraphCaptureError
from kimivl_lab.graphs.trace import TraceBackend
from kimivl_lab.measure.ranks import run_ranks
from kimivl_lab.moonvit.model import MoonVitPretrainedModel
from kimivl_lab.parallel.data_parallel import run_dp_sharded_vision_model
from kimivl_lab.parallel.groups import init_group
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, small_tower, tiny_tower

POISON = ("pool", "padding")


def eager(tower, pixels, grids):
    with torch.no_grad():
        return tower(pixels, grids)


def check(runner, tower, grids, seed=0):
    pixels = pixels_for(grids, seed)
    got = runner(pixels, grids)
    assert relative_error(got, eager(tower, pixels, grids)) < 1e-5, grids
    return got


def test_I1_a_workspace_regrown_after_capture_leaves_small_graphs_right():
    tower = small_tower()
    runner = EncoderCudaGraphRunner(tower, [4, 64])
    first = check(runner, tower, [(4, 4)])
    check(runner, tower, [(16, 16)])
    check(runner, tower, [(40, 40)])  # eager, larger than any graph
    assert torch.equal(check(runner, tower, [(4, 4)]), first)


def test_I2_equal_totals_are_not_equal_batches():
    tower = small_tower(seed=1)
    runner = EncoderCudaGraphRunner(tower, [4], poison=POISON)
    batches = [[(4, 4)], [(2, 8)], [(2, 4), (2, 4)], [(4, 4)]]
    first, *_, last = [check(runner, tower, grids) for grids in batches]
    assert torch.equal(first, last) and runner.stats.hits == 4


def test_I3_nan_that_others_left_behind_reaches_nobody():
    tower = small_tower(seed=2)
    runner = EncoderCudaGraphRunner(tower, [8, 32], max_images=3, max_waste=None)
    runner(torch.full((128, 3, 14, 14), float("nan")), [(8, 16)])  # a broken picture
    check(runner, tower, [(4, 4)])
    runner.poison = POISON
    for grids in ([(4, 4)], [(2, 2)], [(4, 4), (2, 6)], [(8, 14)], [(2, 2)] * 3, [(8, 16)]):
        check(runner, tower, grids)


def test_I4_what_was_returned_stays_as_it_was():
    tower = small_tower(seed=3)
    runner = EncoderCudaGraphRunner(tower, [4, 16], max_images=1)
    batches = {
        "one replay": [(4, 4)],
        "several": [(4, 4), (2, 6), (8, 8)],
        "eager": [(20, 20)],
        "both": [(20, 20), (4, 4)],
    }
    kept = {name: runner(pixels_for(grids, seed=1), grids) for name, grids in batches.items()}
    copies = {name: features.clone() for name, features in kept.items()}
    for grids in (*batches.values(), [(8, 8)]):
        runner(pixels_for(grids, seed=2), grids)
    assert all(torch.equal(kept[name], copies[name]) for name in kept)
    kept["one replay"].zero_()
    check(runner, tower, [(4, 4)], seed=1)


@pytest.mark.parametrize(
    ("budgets", "max_images", "batches"),
    [
        ((2,), 8, [[(2, 2), (2, 2)], [(2, 2)] * 9, [(2, 4)]]),  # more images than the smallest budget has tokens
        ((100,), 8, [[(2, 2)] * 8, [(2, 24)] * 8, [(20, 20)], [(2, 2)] * 9]),
        ((16, 16 + 1), 2, [[(8, 8)], [(8, 8), (2, 2)], [(2, 34)]]),
        ((9,), 9, [[(2, 2)] * 9, [(6, 6)]]),  # the smallest is the largest
    ],
)
def test_I5_budget_arithmetic(budgets, max_images, batches):
    tower = small_tower(seed=4)
    runner = EncoderCudaGraphRunner(tower, budgets, max_images, max_waste=None, poison=POISON)
    for grids in batches:
        check(runner, tower, grids)
    assert runner.stats.misses == 0


def test_I5_budgets_far_apart():
    tower = tiny_tower(seed=5, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    runner = EncoderCudaGraphRunner(tower, [8, 4096], max_waste=2.0)
    for grids in ([(4, 8)], [(96, 96)], [(4, 10)]):
        check(runner, tower, grids)
    assert {budget: calls.images for budget, calls in runner.stats.graphs.items()} == {8: 1, 4096: 1}
    assert runner.stats.eager["padding"].tokens == 10, "10 tokens do not take 4096 rows"


def test_I5_more_images_than_slots_and_one_above_every_budget():
    tower = small_tower(seed=6)
    runner = EncoderCudaGraphRunner(tower, [4, 16], max_images=8)
    check(runner, tower, [(2, 2 * width) for width in (1, 2, 1, 3, 1, 2, 1, 1, 2)])
    assert runner.stats.hits >= 2 and runner.stats.misses == 0
    check(runner, tower, [(2, 2), (10, 10), (4, 4)])
    assert runner.stats.eager["too large"].images == 1


def test_I6_captured_for_small_images_replayed_for_one_large():
    tower = small_tower(seed=7)
    runner = EncoderCudaGraphRunner(tower, [64], max_images=8, max_waste=None)
    check(runner, tower, [(4, 4)] * 8)
    check(runner, tower, [(16, 16)])
    assert runner.stats.hits == 2


def test_I7_padding_lies_in_the_unused_slots_of_which_there_is_always_one():
    runner = EncoderCudaGraphRunner(small_tower(), [10], max_images=4)
    offsets = runner.capture().inputs.buffers["cu_seqlens"]
    runner(pixels_for([(4, 4)] + [(2, 2)] * 3), [(4, 4)] + [(2, 2)] * 3)
    assert offsets.tolist() == [0, 16, 20, 24, 28, 40]
    runner(pixels_for([(4, 4), (2, 4)]), [(4, 4), (2, 4)])
    assert offsets.tolist() == [0, 16, 24, 29, 34, 40]
    assert runner.capture().inputs.buffers["merge_gather_idx"][24:].tolist() == [0] * 16


def test_padding_costs_attention_few_pairs_and_no_values():
    """One image of 84 patches in a graph of 160 with 9 slots."""
    tower, grids = small_tower(), [(6, 14)]
    runner = EncoderCudaGraphRunner(tower, [40], max_images=8, poison=POISON)
    check(runner, tower, grids)
    lengths = runner.capture().inputs.buffers["cu_seqlens"].diff().tolist()
    assert lengths == [84, 9, 10, 9, 10, 9, 10, 9, 10]
    assert sum(length**2 for length in lengths) == 84**2 + 724 < 84**2 + 76**2


def test_I8_the_exact_callable_runs_once_before_it_is_captured():
    traced = []

    def forward(x):
        traced.append(get_proxy_mode() is not None)
        return x + 1

    TraceBackend().capture(forward, {"x": torch.zeros(2)}, dict, allow_collectives=False)
    assert traced == [False, True]


def test_I12_the_runner_keeps_what_a_replay_needs():
    tower, pixels = small_tower(seed=8), pixels_for(MIXED_GRIDS)
    want, alive = eager(tower, pixels, MIXED_GRIDS), weakref.ref(tower)
    runner = EncoderCudaGraphRunner(tower, [23])
    runner.capture()
    del tower
    gc.collect()
    assert relative_error(runner(pixels, MIXED_GRIDS), want) < 1e-5
    del runner
    gc.collect()
    assert alive() is None, "and nothing after it"


class LooksUpInside(MoonVitPretrainedModel):
    """Makes its position embeddings in the forward."""

    def forward(self, *args, **kwargs):
        embeds = self.patch_embed.pos_emb.get_pos_embeds([(4, 4)], implementation=self.options.position)
        return super().forward(*args, **kwargs) + embeds.sum()


@pytest.mark.parametrize("position", ["cached", "adaptive"])
def test_I13_a_position_cache_first_filled_inside_a_capture(position):
    tower = LooksUpInside(small_tower().config).eval()
    tower.set_options(position=position)
    with pytest.raises(GraphCaptureError, match="a position cache was looked into"):
        EncoderCudaGraphRunner(tower, [4]).capture()


def test_I15_padding_past_the_bound_runs_eager_and_is_counted():
    tower = small_tower(seed=9)
    runner = EncoderCudaGraphRunner(tower, [64], max_waste=2.0)
    check(runner, tower, [(2, 2)])
    check(runner, tower, [(8, 16)])
    assert runner.stats.eager["padding"].rows == 1 and runner.stats.graphs[64].rows == 64
    assert runner.stats.waste == 65 / 33
    unbound = EncoderCudaGraphRunner(tower, [64], max_waste=None)
    check(unbound, tower, [(2, 2)])
    assert unbound.stats.hits == 1
    with pytest.raises(ValueError, match="at least 1, got 0.9"):
        EncoderCudaGraphRunner(tower, [64], max_waste=0.9)


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ([65025, 70000], "budget 70000 is never reached: 65025 holds the 65025 tokens"),
        ([4, 8, 4], r"budgets must differ, got \[4, 8, 4\]"),
        ([], "budgets are empty"),
        ([0, 4], "positive integer, got 0"),
        ([4.5], "positive integer, got 4.5"),
    ],
)
def test_I16_no_graph_that_no_input_can_reach(budgets, message):
    with pytest.raises(ValueError, match=message):
        EncoderCudaGraphRunner(small_tower(), budgets, max_images=1)


def test_I17_one_metadata_builder_for_eager_and_replay(monkeypatch):
    calls = []
    build = MoonVitPretrainedModel.prepare_encoder_metadata

    def counting(self, grid_hws, *args, **kwargs):
        calls.append(list(grid_hws))
        return build(self, grid_hws, *args, **kwargs)

    monkeypatch.setattr(MoonVitPretrainedModel, "prepare_encoder_metadata", counting)
    tower = small_tower(seed=10)
    runner = EncoderCudaGraphRunner(tower, [12], max_images=2)
    runner.capture()
    assert calls == [], "a capture knows no grid"
    runner(pixels_for(MIXED_GRIDS), MIXED_GRIDS)
    assert sorted(grid for grids in calls for grid in grids) == sorted(MIXED_GRIDS)
    grids = [(4, 6), (2, 2)]
    runner(pixels_for(grids), grids)
    metadata = build(tower, grids)
    for name in ("pos_embeds", "rope_cos_sin", "merge_gather_idx"):
        assert torch.equal(runner.capture().inputs.buffers[name][:28], getattr(metadata, name)), name


# --- data parallel ---------------------------------------------------------------------------------------------------

BATCHES = [[(4, 4), (2, 6), (6, 6)], [(2, 2)], MIXED_GRIDS, [], [(4, 4)] * 5, [(12, 12), (2, 2)]]


def encode_in_parallel(budgets_by_rank):
    """Errors of each batch, and the replays of this rank."""
    group = init_group()
    tower = small_tower(seed=11)
    runner = EncoderCudaGraphRunner(tower, budgets_by_rank[group.rank()], max_images=2)
    errors = []
    for grids in BATCHES:
        pixels = pixels_for(grids)
        got, want = run_dp_sharded_vision_model(runner, pixels, grids, group), eager(tower, pixels, grids)
        errors.append(relative_error(got, want) if grids else float(got.shape != want.shape))
    return errors, runner.stats.hits


def test_data_parallel_with_graphs_equals_a_single_process_with_different_budgets_too():
    for errors, hits in run_ranks(encode_in_parallel, 2, [[4, 16, 32], [10, 30]]):
        assert max(errors) < 1e-5 and hits >= len(BATCHES) - 2
