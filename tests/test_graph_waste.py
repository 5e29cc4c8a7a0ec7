"""What padding costs: rows, attention pairs and replays are counted, and predicted time decides what runs eager."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimivl_lab import EncoderCudaGraphRunner, EncoderOptions, MoonViTConfig
from kimivl_lab.graphs.inputs import _evenly, padding_pairs
from kimivl_lab.moonvit.attention import attends_all_pairs, resolve_attention
from kimivl_lab.moonvit.flops import pair_rows, tower_flops
from tests.conftest import pixels_for, relative_error, small_tower


def check(runner, tower, grids):
    pixels = pixels_for(grids)
    with torch.no_grad():
        assert relative_error(runner(pixels, grids), tower(pixels, grids)) < 1e-5, grids


def test_padding_is_bounded_by_predicted_time_and_not_by_rows():
    tower = small_tower()
    runner = EncoderCudaGraphRunner(tower, [4, 64], max_images=3, max_waste=2.0)
    check(runner, tower, [(2, 2)])
    assert runner.stats.eager["padding"].calls == 1, "4 rows for 1, and no price"
    priced = EncoderCudaGraphRunner(tower, [4, 64], max_images=3, max_waste=1.0, replay_cost=100)
    check(priced, tower, [(2, 2)])
    assert priced.stats.graphs[4].calls == 1, "4 + 100 is less than 1 + 200"
    check(priced, tower, [(8, 16)])
    assert priced.stats.graphs[64].calls == 1, "64 + 100 and the pairs of the padding: less than 32 + 200"


def test_many_pairs_in_the_padding_run_eager_though_rows_would_allow_a_replay():
    """A padding of 1,440 patches in one segment against 40 images of 16: 2.2 M pairs of padding, 10,240 of images."""
    tower, grids = small_tower(), [(4, 4)] * 40
    runner = EncoderCudaGraphRunner(tower, [520], max_images=40, max_waste=3.5)
    check(runner, tower, grids)
    (calls,) = runner.stats.eager.values()
    assert (calls.tokens, calls.image_pairs, calls.pairs) == (160, 10_240, 10_240)
    unbound = EncoderCudaGraphRunner(tower, [520], max_images=40, max_waste=None)
    check(unbound, tower, grids)
    assert (unbound.stats.total.pairs, unbound.stats.total.image_pairs) == (10_240 + 1440**2, 10_240)
    assert unbound.stats.waste == 3.25, "rows alone would be under the bound"
    assert unbound.stats.total.pair_waste == 1 + 1440**2 / 10_240


@pytest.mark.parametrize("dense", [False, True])
def test_pairs_are_those_of_the_kernel(dense):
    """One mask over a whole graph computes its patches squared, in eager calls those of the call."""
    tower = small_tower(options=EncoderOptions(attention="sdpa_masked" if dense else "sdpa"))
    runner = EncoderCudaGraphRunner(tower, [16], max_images=2, max_waste=None)
    check(runner, tower, [(4, 4), (2, 6)])
    check(runner, tower, [(10, 10)])
    graph, eager = runner.stats.graphs[16], runner.stats.eager["too large"]
    assert graph.image_pairs == 16**2 + 12**2 and eager.pairs == eager.image_pairs == 100**2
    assert graph.pairs == (64**2 if dense else graph.image_pairs + 36**2)
    check(runner, tower, [(10, 10), (10, 12)])
    assert eager.calls == 3, "one image each"


def test_a_float32_graph_on_a_gpu_counts_a_mask_over_all_its_patches():
    """There "sdpa" has no lengths on the host, so it takes the mask; eager calls have them."""
    gpu, attend = torch.device("cuda"), resolve_attention("auto", "cuda", torch.float32)
    assert attends_all_pairs(attend, gpu, lengths_on_host=False)
    assert not attends_all_pairs(attend, gpu, lengths_on_host=True)
    assert not attends_all_pairs(attend, torch.device("cpu"), lengths_on_host=False)


@given(patches=st.integers(0, 300), segments=st.integers(1, 12))
def test_pairs_of_padding_are_those_of_the_segments_that_are_written(patches, segments):
    offsets = _evenly(40, 40 + patches, segments)
    assert padding_pairs(patches, segments) == int((offsets.diff() ** 2).sum())


def test_a_pair_costs_its_share_of_a_rows_operations():
    config = MoonViTConfig.preset("kimi-vl-a3b")
    flops = tower_flops(config, [(64, 64)])
    row = (flops["patch_embed"] + flops["linear"]) / 1024
    assert pair_rows(config) * 4096**2 == pytest.approx(flops["attention"] / row)
    assert 1 / pair_rows(config) == pytest.approx(26_600, rel=0.01)
