"""Graphs by token budget: whatever was replayed before, however full a budget is, the features are the eager ones."""

import gc
import random
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kimivl_lab import EncoderCudaGraphRunner, EncoderOptions, split_image_features
from kimivl_lab.geometry import token_counts
from kimivl_lab.graphs.inputs import EncoderItemSpec
from kimivl_lab.graphs.weights import StaleGraphError
from kimivl_lab.planner.engines import static_bytes
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, small_tower, tiny_encoder, tiny_tower

BUDGETS = (4, 16, 40)
POISON = ("pool", "padding")


def eager(model, pixels, grids):
    with torch.no_grad():
        return model(pixels, grids)


def fills(budget):
    """Batches of one and of several images, from one token to the whole budget."""
    for tokens in sorted({1, budget // 2 + 1, budget - 1, budget}):
        yield [(2, 2 * tokens)]
        if tokens > 2:
            yield [(2, 2), (2, 2 * (tokens - 2)), (2, 2)]
    yield [(4, budget // 2 * 2)]


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "linear"), [(0, "auto"), (1, "plain"), (2, "auto")])
def test_every_budget_at_every_fill_equals_eager_with_a_poisoned_pool(seed, linear):
    tower = small_tower(seed, options=EncoderOptions(linear=linear))
    runner = EncoderCudaGraphRunner(tower, BUDGETS, max_images=3, max_waste=None, poison=POISON)
    for budget in (*BUDGETS, *BUDGETS[::-1]):
        for grids in fills(budget):
            pixels = pixels_for(grids, seed)
            assert relative_error(runner(pixels, grids), eager(tower, pixels, grids)) < 1e-5, (budget, grids)
    assert runner.stats.misses == 0
    assert all(calls.calls for calls in runner.stats.graphs.values())


def test_a_thousand_random_batches_equal_eager():
    tower, draw = tiny_tower(seed=3, hidden_size=16, num_hidden_layers=1, intermediate_size=16), random.Random(0)
    runner = EncoderCudaGraphRunner(tower, BUDGETS, max_images=3, packing="exact")
    for number in range(1000):
        grids = [(2 * draw.randint(1, 5), 2 * draw.randint(1, 5)) for _ in range(draw.randint(1, 4))]
        pixels = pixels_for(grids, seed=number)
        assert relative_error(runner(pixels, grids), eager(tower, pixels, grids)) < 1e-5, (number, grids)
    total = runner.stats.total
    assert runner.stats.hits > 900 and runner.stats.misses > 0
    assert total.rows > total.tokens and total.images > 2000


@pytest.mark.parametrize("packing", ["next_fit", "next_fit_deferred", "exact"])
def test_results_come_in_the_order_of_the_images_whatever_the_packing(packing):
    tower = small_tower(seed=4)
    runner = EncoderCudaGraphRunner(tower, [4, 9, 30], max_images=2, packing=packing)
    grids = [(8, 8), (2, 2), (6, 6), (2, 4), (10, 12), (2, 2), (4, 2), (20, 20)]
    pixels = pixels_for(grids)
    parts = split_image_features(runner(pixels, grids), grids)
    for part, want in zip(parts, split_image_features(eager(tower, pixels, grids), grids), strict=True):
        assert relative_error(part, want) < 1e-5
    assert runner.stats.eager["too large"].images == 1


def test_a_price_of_replays_merges_them_and_a_cpu_charges_none():
    tower, grids = small_tower(seed=4), [(4, 4), (4, 4), (4, 4)]
    pixels = pixels_for(grids)
    want = eager(tower, pixels, grids)
    replays = {}
    for replay_cost in (None, 0, 3, 4):
        runner = EncoderCudaGraphRunner(tower, [4, 16], max_images=3, replay_cost=replay_cost)
        assert relative_error(runner(pixels, grids), want) < 1e-5
        replays[replay_cost] = {budget: calls.calls for budget, calls in runner.stats.graphs.items() if calls.calls}
    three, one = {4: 3}, {16: 1}
    assert replays == {None: three, 0: three, 3: one, 4: one}, "12 rows and 3 prices, or 16 rows and 1"


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_masked"])
@pytest.mark.parametrize("rope", ["complex", "real", "in_place"])
def test_every_attention_and_rope_that_can_be_recorded(attention, rope):
    tower = small_tower(seed=5, options=EncoderOptions(attention=attention, rope=rope))
    runner = EncoderCudaGraphRunner(tower, [12, 40], max_images=5, poison=POISON if attention == "sdpa" else ["pool"])
    runner(torch.full((160, 3, 14, 14), float("nan")), [(8, 20)])
    pixels = pixels_for(MIXED_GRIDS)
    for _ in range(2):
        assert relative_error(runner(pixels, MIXED_GRIDS), eager(tower, pixels, MIXED_GRIDS)) < 1e-5
    assert runner.stats.hits >= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_precisions(dtype):
    tower = small_tower(seed=6).to(dtype)
    runner = EncoderCudaGraphRunner(tower, [23, 40], max_images=4, poison=["pool"])
    for grids in ([(8, 20)], MIXED_GRIDS, [(10, 10)]):
        pixels = pixels_for(grids)
        got = runner(pixels, grids)
        assert got.dtype == dtype
        assert relative_error(got, eager(tower, pixels, grids)) < (1e-12 if dtype == torch.float64 else 0.01)
    assert runner.stats.hits == 3


def test_published_width_and_blocks_of_rows():
    tower = tiny_tower(seed=7)
    runner = EncoderCudaGraphRunner(tower, [100, 200], max_images=2, poison=POISON)
    for grids in ([(20, 20)], [(26, 28)], [(2, 26), (20, 18)]):
        pixels = pixels_for(grids)
        assert relative_error(runner(pixels, grids), eager(tower, pixels, grids)) < 1e-5
    assert runner.stats.misses == 0


@pytest.mark.gpu
@pytest.mark.parametrize("max_images", [1, 3])
def test_cuda_graphs_equal_eager_with_pool_and_padding_poisoned(max_images):
    tower = tiny_tower(seed=7).to(device="cuda", dtype=torch.bfloat16)
    runner = EncoderCudaGraphRunner(tower, BUDGETS, max_images, max_waste=None, poison=POISON)
    for budget in (*BUDGETS, *BUDGETS[::-1]):
        for grids in fills(budget):
            pixels = pixels_for(grids)
            assert relative_error(runner(pixels, grids), eager(tower, pixels, grids)) < 0.01, (budget, grids)
    assert runner.stats.misses == 0 and runner.backend.name == "cuda"


def test_raw_uint8_patches_and_the_other_kind_eager():
    tower = small_tower(seed=8)
    raw = torch.randint(0, 256, (92, 3, 14, 14), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    runner = EncoderCudaGraphRunner(tower, [23], max_images=4, pixel_dtype=torch.uint8)
    assert relative_error(runner(raw, MIXED_GRIDS), eager(tower, raw, MIXED_GRIDS)) < 1e-5
    pixels = pixels_for(MIXED_GRIDS)
    assert torch.equal(runner(pixels, MIXED_GRIDS), eager(tower, pixels, MIXED_GRIDS))
    assert runner.stats.hits == 1 and runner.stats.eager["pixels"].images == 4


def test_no_images_and_bad_ones():
    tower = small_tower()
    runner = EncoderCudaGraphRunner(tower, [4])
    assert runner(torch.empty(0, 3, 14, 14), []).shape == (0, 4, tower.config.hidden_size)
    with pytest.raises(ValueError, match="hold 3 patches, the grids need 4"):
        runner(torch.zeros(3, 3, 14, 14), [(2, 2)])
    with pytest.raises(ValueError, match="not divisible"):
        runner(torch.zeros(6, 3, 14, 14), [(2, 3)])


def test_under_inference_mode_and_with_gradients_on():
    tower, pixels = small_tower(seed=9), pixels_for(MIXED_GRIDS)
    with torch.inference_mode():
        runner = EncoderCudaGraphRunner(tower, [23], max_images=4)
        first = runner(pixels, MIXED_GRIDS)
    second = runner(pixels, MIXED_GRIDS)
    assert torch.equal(first, second) and not second.requires_grad


# --- weights ---------------------------------------------------------------------------------------------------------


def load(tower, weights):
    tower.load_state_dict(weights)


def through_data(tower, weights):
    for name, parameter in tower.named_parameters():
        parameter.data.copy_(weights[name])


@pytest.mark.parametrize("linear", ["auto", "plain"])
@pytest.mark.parametrize("update", [load, through_data])
def test_weights_changed_in_place_are_the_ones_replayed(update, linear):
    tower, other = (small_tower(seed, options=EncoderOptions(linear=linear)) for seed in (10, 11))
    runner, pixels = EncoderCudaGraphRunner(tower, [23], max_images=4), pixels_for(MIXED_GRIDS)
    before = runner(pixels, MIXED_GRIDS)
    update(tower, other.state_dict())
    after = runner(pixels, MIXED_GRIDS)
    assert relative_error(after, eager(other, pixels, MIXED_GRIDS)) < 1e-5
    assert relative_error(after, before) > 0.1


@pytest.mark.parametrize("weights", ["checked", "announced"])
@pytest.mark.parametrize("linear", ["auto", "plain"])
@pytest.mark.parametrize(
    "name", ["encoder.blocks.1.wqkv.weight", "patch_embed.pos_emb.weight", "encoder.blocks.0.norm1.bias"]
)
def test_a_small_edit_of_data_is_replayed_once_it_is_seen_or_announced(name, linear, weights):
    options = EncoderOptions(linear=linear, weights=weights, position="cached")
    tower, fresh = (small_tower(10, options=options) for _ in range(2))
    runner, pixels = EncoderCudaGraphRunner(tower, [23], max_images=4), pixels_for(MIXED_GRIDS)
    before = runner(pixels, MIXED_GRIDS)
    for model in (tower, fresh):
        part = model.get_parameter(name).data[6:10]
        part += torch.randn(part.shape, generator=torch.Generator().manual_seed(0))
    if weights == "announced":
        tower.weights_changed()
    after = runner(pixels, MIXED_GRIDS)
    assert relative_error(after, eager(fresh, pixels, MIXED_GRIDS)) < 1e-5
    assert relative_error(after, before) > 1e-3


def replace_parameter(tower):
    tower.encoder.blocks[1].wo.weight = torch.nn.Parameter(tower.encoder.blocks[1].wo.weight.detach() * 2)


def replace_module(tower):
    tower.encoder.blocks[1].norm0 = torch.nn.LayerNorm(tower.config.hidden_size)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (replace_parameter, "weight encoder.blocks.1.wo.weight"),
        (replace_module, "module encoder.blocks.1.norm0"),
        (lambda tower: tower.to(torch.bfloat16), "weight patch_embed.proj.weight"),
        (lambda tower: tower.load_state_dict(small_tower(13).state_dict(), assign=True), "weight patch_embed"),
    ],
)
def test_weights_that_moved_are_an_error_until_captured_anew(change, named):
    tower = small_tower(seed=12)
    runner, pixels = EncoderCudaGraphRunner(tower, [23], max_images=4), pixels_for(MIXED_GRIDS)
    runner(pixels, MIXED_GRIDS)
    change(tower)
    with pytest.raises(StaleGraphError, match=f"{named}.*reset"):
        runner(pixels, MIXED_GRIDS)
    runner.reset()
    assert relative_error(runner(pixels, MIXED_GRIDS), eager(tower, pixels, MIXED_GRIDS)) < 0.02
    assert runner.stats.hits == 1


def test_hooks_that_are_new_or_gone_are_an_error_until_captured_anew():
    tower, pixels = small_tower(seed=12), pixels_for(MIXED_GRIDS)
    runner = EncoderCudaGraphRunner(tower, [23], max_images=4)
    plain = runner(pixels, MIXED_GRIDS)
    for part in (tower, tower.encoder.blocks[1].wo):
        hook = part.register_forward_hook(lambda module, args, out: 2 * out)
        with pytest.raises(StaleGraphError, match=f"hooks of module {'encoder.blocks.1.wo' * (part is not tower)}"):
            runner(pixels, MIXED_GRIDS)
        runner.reset()
        assert relative_error(runner(pixels, MIXED_GRIDS), eager(tower, pixels, MIXED_GRIDS)) < 1e-5
        hook.remove()
        with pytest.raises(StaleGraphError, match="hooks of module"):
            runner(pixels, MIXED_GRIDS)
        runner.reset()
        assert relative_error(runner(pixels, MIXED_GRIDS), plain) < 1e-5


@pytest.mark.parametrize("linear", ["auto", "plain"])
@pytest.mark.parametrize("change", [replace_parameter, replace_module, lambda tower: tower.to(torch.bfloat16)])
def test_a_weight_that_the_tower_drops_is_freed_while_graphs_are_kept(change, linear):
    tower = small_tower(seed=12, options=EncoderOptions(linear=linear))
    runner, pixels = EncoderCudaGraphRunner(tower, [23], max_images=4), pixels_for(MIXED_GRIDS)
    runner(pixels, MIXED_GRIDS)
    before = {name: StorageWeakRef(weight.untyped_storage()) for name, weight in tower.named_parameters()}
    change(tower)
    gc.collect()
    now = {StorageWeakRef(weight.untyped_storage()) for weight in tower.parameters()}
    dropped = {name for name, storage in before.items() if storage not in now}
    assert dropped and all(before[name].expired() for name in dropped)
    with pytest.raises(StaleGraphError):
        runner(pixels, MIXED_GRIDS)


def test_arguments_are_checked_before_any_work():
    tower = small_tower()
    bad: list[tuple[dict[str, Any], str]] = [
        ({"packing": "best"}, "unknown packing 'best'"),
        ({"replay_cost": -1}, "replay_cost.*-1"),
        ({"poison": ["all"]}, "'pool' and 'padding' are known, not all"),
        ({"max_images": 0}, "max_images must be a positive integer, got 0"),
    ]
    for arguments, message in bad:
        with pytest.raises(ValueError, match=message):
            EncoderCudaGraphRunner(tower, [4, 8], **arguments)


# --- the engines' protocol -------------------------------------------------------------------------------------------


def test_an_encoder_with_its_projector_speaks_the_engines_protocol():
    encoder, pixels = tiny_encoder(seed=14), pixels_for(MIXED_GRIDS)
    config = encoder.get_encoder_cudagraph_config()
    assert config["out_hidden_size"] == encoder.config.text_config.hidden_size and config["modalities"] == ("image",)
    assert encoder.get_encoder_cudagraph_budget_range(max_images=2) == (1, 2 * 255 * 255)
    inputs = {"pixel_values": pixels, "image_grid_hws": MIXED_GRIDS}
    assert encoder.get_encoder_cudagraph_item_specs(inputs)[:2] == [EncoderItemSpec(24, 6), EncoderItemSpec(4, 1)]
    chosen = encoder.select_encoder_cudagraph_items(inputs, [3, 1])
    assert chosen["image_grid_hws"] == [(2, 12), (2, 2)]
    assert torch.equal(chosen["pixel_values"], torch.cat((pixels[68:], pixels[24:28])))
    neighbours = encoder.select_encoder_cudagraph_items(inputs, [1, 2])["pixel_values"]
    assert neighbours.data_ptr() == pixels[24:].data_ptr(), "a view"
    runner = EncoderCudaGraphRunner(encoder, [8, 23], max_images=4, poison=POISON)
    for _ in range(2):
        want = eager(encoder.get_image_features, pixels, MIXED_GRIDS)
        assert relative_error(runner(pixels, MIXED_GRIDS), want) < 1e-5


def test_static_inputs_are_as_large_as_planned():
    tower = small_tower()
    config = tower.config
    runner = EncoderCudaGraphRunner(tower, BUDGETS, max_images=3)
    runner.capture()
    planned = static_bytes(
        BUDGETS[-1],
        hidden_size=config.hidden_size,
        head_dim=config.head_dim,
        text_hidden_size=0,
        element_size=4,
    )
    assert runner.stats.input_bytes == planned + 4 * (3 + 2)


# --- counters --------------------------------------------------------------------------------------------------------


def test_counters_say_what_was_replayed_and_wasted():
    runner = EncoderCudaGraphRunner(small_tower(), [4, 16], max_images=2, max_waste=2.0)
    for grids in ([(4, 4)], [(2, 2)], [(6, 6)], [(2, 4), (2, 6)], [(10, 10)]):
        runner(pixels_for(grids), grids)
    stats = runner.stats
    counted = {key: vars(calls) for key, calls in (stats.graphs | stats.eager).items()}
    assert {
        key: tuple(calls[name] for name in ("calls", "images", "tokens", "rows")) for key, calls in counted.items()
    } == {
        4: (3, 3, 9, 12),
        16: (1, 1, 9, 16),
        "padding": (1, 1, 1, 1),
        "too large": (1, 1, 25, 25),
    }
    assert (stats.hits, stats.misses) == (4, 2)
    assert stats.total.tokens == sum(token_counts([(4, 4), (2, 2), (6, 6), (2, 4), (2, 6), (10, 10)]))
    assert stats.waste == 54 / 44
    assert all(calls.capture_seconds > 0 for calls in stats.graphs.values())
    lines = str(stats).splitlines()
    assert lines[0].split()[:5] == ["budget", "calls", "images", "tokens", "rows"] and any(
        line.startswith("all ") for line in lines
    )
    assert any(line.startswith("eager: too large") for line in lines)


def test_capture_is_done_once_and_the_pool_is_shared():
    runner = EncoderCudaGraphRunner(small_tower(), BUDGETS, max_images=3)
    captured, grown = runner.capture(), {budget: calls.nbytes for budget, calls in runner.stats.graphs.items()}
    assert runner.capture() is captured
    assert grown[40] > 0 and grown[16] == grown[4] == 0, "smaller graphs find room in the largest one's blocks"
