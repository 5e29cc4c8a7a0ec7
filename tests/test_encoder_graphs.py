"""One encoder with graphs, ranks and projector together: the features of one process without any of them."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kimivl_lab import EncoderCudaGraphRunner, KimiVLConfig, KimiVLEncoder, KimiVLForConditionalGeneration
from kimivl_lab.geometry import token_counts
from kimivl_lab.graphs.weights import StaleGraphError
from kimivl_lab.parallel.groups import RankError
from kimivl_lab.parallel.tensor_parallel import CutTower
from tests.conftest import pixels_for, relative_error, tiny_encoder, tiny_tower
from tests.rank_cases import GRIDS, encoder_of, free_links, on_ranks, results_of

PIXELS = pixels_for(GRIDS)
BUDGETS = [4, 16, 40]
COUNTS = (0, 1, 2, 5, 9)


def encoder_with_graphs(budgets=BUDGETS, **options) -> KimiVLEncoder:
    return encoder_of().set_graphs(budgets, **{"max_waste": None, **options})


@torch.no_grad()
def encode(encoder: Any, grids=GRIDS, pixels=None) -> torch.Tensor:
    return encoder.get_image_features(pixels_for(grids) if pixels is None else pixels, grids)


def stats_of(encoder: Any):
    return encoder.graph_runner.stats


@pytest.fixture
def alone():
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_images", [1, 4])
def test_graphs_give_the_features_of_the_encoder_without_them(max_images):
    encoder = encoder_with_graphs(max_images=max_images)
    for count in COUNTS:
        grids = GRIDS[:count]
        got, want = encode(encoder, grids), encode(encoder_of(), grids)
        assert got.shape == want.shape and (not count or relative_error(got, want) < 1e-5)
    stats = stats_of(encoder)
    assert stats.misses == 0 and stats.total.images == sum(COUNTS)
    assert encoder.set_graphs(None).graph_runner is None
    assert torch.equal(encode(encoder), encode(encoder_of()))


def test_what_no_graph_serves_is_eager_and_counted():
    encoder = encoder_with_graphs([4], max_waste=2.0)
    assert relative_error(encode(encoder), encode(encoder_of())) < 1e-5
    large = [tokens for tokens in token_counts(GRIDS, (2, 2)) if tokens > 4]
    assert stats_of(encoder).eager["too large"].images == len(large) > 0 < stats_of(encoder).hits
    assert stats_of(encoder).total.images == len(GRIDS)


def test_a_gradient_to_the_tower_is_never_lost_and_the_projector_trains_behind_replays():
    encoder, plain = encoder_with_graphs(), encoder_of()
    for one in (encoder, plain):
        one.get_image_features(PIXELS, GRIDS).square().sum().backward()
    for (name, got), want in zip(encoder.named_parameters(), plain.parameters(), strict=True):
        assert got.grad is not None and relative_error(got.grad, want.grad) < 1e-4, name
    assert stats_of(encoder).eager["gradient"].images == len(GRIDS) and stats_of(encoder).hits == 0

    encoder.vision_tower.requires_grad_(False)
    wanted = encoder.multi_modal_projector.linear_1.weight.grad.clone()
    encoder.zero_grad()
    encoder.get_image_features(PIXELS, GRIDS).square().sum().backward()
    assert stats_of(encoder).hits > 0
    assert relative_error(encoder.multi_modal_projector.linear_1.weight.grad, wanted) < 1e-4
    encoder.get_image_features(PIXELS.clone().requires_grad_(), GRIDS)
    assert stats_of(encoder).eager["gradient"].calls == 2


def test_the_projector_may_be_replaced_and_hooked_at_any_time():
    encoder, plain, seen = encoder_with_graphs(), encoder_of(), []
    encode(encoder)
    for one in (encoder, plain):
        one.multi_modal_projector = copy.deepcopy(tiny_encoder(seed=7).multi_modal_projector)
    encoder.multi_modal_projector.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert relative_error(encode(encoder), encode(plain)) < 1e-5
    assert len(seen) == 1


def test_hooks_of_the_tower_are_in_the_graphs_or_refused():
    encoder, plain = encoder_with_graphs(), encoder_of()
    for one in (encoder, plain):
        one.vision_tower.register_forward_hook(lambda module, inputs, output: 1.5 * output)
        one.vision_tower.encoder.blocks[0].register_forward_pre_hook(
            lambda module, inputs: (0.5 * inputs[0], *inputs[1:])
        )
    assert relative_error(encode(encoder), encode(plain)) < 1e-5
    for one in (encoder, plain):
        one.vision_tower.encoder.blocks[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(StaleGraphError, match="hooks of module encoder.blocks.1"):
        encode(encoder)
    encoder.graph_runner.reset()
    assert relative_error(encode(encoder), encode(plain)) < 1e-5


def test_the_whole_model_encodes_by_graphs():
    torch.manual_seed(0)
    model: Any = KimiVLForConditionalGeneration(KimiVLConfig.preset("tiny")).eval()
    grids, placeholder = GRIDS[:2], model.config.media_placeholder_token_id
    pixels = pixels_for(grids)
    ids = torch.tensor([[1, *[placeholder] * sum(token_counts(grids, (2, 2))), 2]])
    want, rows = model(ids, pixels, grids).logits.detach(), encode(model, grids)
    assert relative_error(EncoderCudaGraphRunner(model, [16], max_waste=None)(pixels, grids), rows) < 1e-5
    model.set_graphs(BUDGETS, max_waste=None)
    with torch.no_grad():
        assert relative_error(model(ids, pixels, grids).logits, want) < 1e-5
    assert stats_of(model).total.images == 2 and stats_of(model).misses == 0


def test_another_tower_gets_graphs_of_its_own():
    encoder, plain = encoder_with_graphs(), encoder_of()
    encode(encoder)
    for one in (encoder, plain):
        one.vision_tower = tiny_tower(seed=5)
    assert relative_error(encode(encoder), encode(plain)) < 1e-5
    assert stats_of(encoder).total.images == len(GRIDS)


@pytest.mark.parametrize(
    ("changes", "drops"),
    [
        ({"attention": "sdpa_masked"}, True),
        ({"rope": "complex"}, True),
        ({"linear": "plain"}, True),
        ({"attention": "auto"}, False),  # no change
        ({"position": "separable"}, False),
        ({"weights": "announced"}, False),
        ({"position_cache_bytes": 0}, False),
    ],
    ids=str,
)
def test_options_drop_the_graphs_that_hold_them(changes, drops):
    encoder = encoder_with_graphs([40])
    encode(encoder)
    before = encoder.graph_runner
    assert relative_error(encode(encoder.set_options(**changes)), encode(encoder_of())) < 1e-5
    assert (encoder.graph_runner is not before) == drops
    assert stats_of(encoder).hits > 0 and all(getattr(encoder.vision_tower.options, k) == v for k, v in changes.items())


def test_the_bytes_of_the_position_cache_are_an_option():
    encoder = encoder_of()
    encode(encoder)
    cache = encoder.vision_tower.patch_embed.pos_emb.cache
    assert cache.stats.entries == len(set(GRIDS))
    half = cache.stats.bytes // 2
    encoder.set_options(position_cache_bytes=half)
    assert 0 < cache.stats.bytes <= half and cache.stats.evictions > 0 and len(cache) == cache.stats.entries
    encode(encoder)
    assert cache.stats.bytes <= half
    for wrong in (-1, 1.5, "big"):
        with pytest.raises(ValueError, match=f"got {wrong!r}"):
            encoder.set_options(position_cache_bytes=wrong, attention="eager")
    assert (cache.max_bytes, encoder.vision_tower.options.attention) == (half, "auto")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_keep_the_settings_and_hold_no_graphs(copied):
    encoder = encoder_with_graphs()
    want = encode(encoder)
    twin = copied(encoder)
    assert stats_of(twin).hits == 0 and not stats_of(twin).graphs
    assert torch.equal(encode(twin), want) and stats_of(twin).hits == stats_of(encoder).hits
    with torch.no_grad():
        twin.vision_tower.patch_embed.proj.weight.mul_(2)
    assert torch.equal(encode(encoder), want) and not torch.equal(encode(twin), want)


def test_an_encoder_with_graphs_is_saved_and_cast(tmp_path):
    encoder = encoder_with_graphs()
    want = encode(encoder)
    encoder.save_pretrained(tmp_path)
    loaded = KimiVLEncoder.from_pretrained(tmp_path).eval()
    assert loaded.graph_runner is None
    assert relative_error(encode(loaded), want) < 1e-5
    before = encoder.graph_runner
    assert encoder.to(torch.float32).graph_runner is before, "no change"
    got = encode(encoder.double(), pixels=PIXELS.double())
    assert stats_of(encoder).hits > 0
    assert relative_error(got, encode(encoder_of().double(), pixels=PIXELS.double())) < 1e-12


def test_bad_settings_are_refused_and_leave_the_encoder_as_it_was(alone):
    encoder = encoder_with_graphs()
    runner = encoder.graph_runner
    for arguments in ({"budgets": [4, 4]}, {"budgets": [0]}, {"budgets": [4], "backend": "cuda"}):
        with pytest.raises(ValueError, match=r"differ, got \[4, 4\]|got 0|needs a GPU"):
            encoder.set_graphs(**arguments)
    with pytest.raises(ValueError, match="with graphs takes image_grid_hws, not encoder_metadata"):
        encoder(PIXELS, encoder_metadata=encoder.vision_tower.prepare_encoder_metadata(GRIDS))
    with pytest.raises(ValueError, match="gloo cannot be captured"):
        encoder.set_encoder_parallel("tensor", alone)
    assert encoder.encoder_parallel == "none" and not isinstance(encoder.vision_tower, CutTower)
    assert encoder.graph_runner is runner
    cut = encoder_of().set_encoder_parallel("tensor", alone)
    with pytest.raises(ValueError, match="gloo cannot be captured"):
        cut.set_graphs(BUDGETS)
    assert cut.graph_runner is None and relative_error(encode(cut), encode(encoder)) < 1e-5


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results():
    """results(ranks, case): what each rank returned."""
    return results_of(__name__, 15.0)


@on_ranks
def equality(group):
    """(mode, images) -> relative error to one process, the features' bytes, images that this rank replayed."""
    found = {}
    for mode in ("data", "auto"):
        # other budgets on each rank; the last rank captures before the first call, the others within it
        budgets = [[40, 80], [4, 16, 40]][group.rank() % 2]
        encoder = encoder_with_graphs(budgets).set_encoder_parallel(mode, group)
        if group.rank() == group.size() - 1:
            stats_of(encoder)
            encoder.graph_runner.capture()
        for count in COUNTS:
            grids = GRIDS[:count]
            before = stats_of(encoder).total.images
            got = encode(encoder, grids)
            error = relative_error(got, encode(encoder_of(), grids)) if count else 0.0
            found[mode, count] = error, got.numpy().tobytes(), stats_of(encoder).total.images - before
        found[mode, "eager"] = {reason: calls.images for reason, calls in stats_of(encoder).eager.items()}
    return found


def test_ranks_replay_graphs_of_their_own_and_agree_with_one_process(results):
    found = results(2, equality)
    for mode in ("data", "auto"):
        for count in COUNTS:
            errors, features, images = zip(*(result[mode, count] for result in found), strict=True)
            assert max(errors) < 1e-5 and len(set(features)) == 1
            in_tensor = sum(result[mode, "eager"].get("tensor parallel", 0) for result in found)
            assert sum(images) == count or in_tensor, "each image on one rank, a rank without images counts none"
        if mode == "data":
            assert not any(result[mode, "eager"] for result in found)


@on_ranks
def auto_in_tensor(group):
    """Error and counters of a batch that auto gives to tensor parallel."""
    encoder = encoder_with_graphs()
    encoder.set_encoder_parallel("auto", group, free_links(encoder.config.vision_config))
    error = relative_error(encode(encoder), encode(encoder_of()))
    return error, stats_of(encoder).hits, stats_of(encoder).eager["tensor parallel"].images


@on_ranks
def stale_on_one_rank(group):
    """What a rank raises when another layer stands in the graphs of the last rank, and the error after a reset."""
    encoder = encoder_with_graphs().set_encoder_parallel("data", group)
    encode(encoder)
    strays = group.rank() == group.size() - 1
    if strays:
        block: Any = encoder.vision_tower.encoder.blocks[0]
        block.mlp.fc0 = copy.deepcopy(block.mlp.fc0)
    try:
        encode(encoder)
    except (StaleGraphError, RankError) as error:
        raised = type(error).__name__
    else:
        raised = "nothing"
    if strays:
        encoder.graph_runner.reset()
    return raised, relative_error(encode(encoder), encode(encoder_of()))


@on_ranks
def copied_on_ranks(group):
    """The mode and graphs of a deep copy and of a pickle, and their errors."""
    encoder = encoder_with_graphs().set_encoder_parallel("data", group)
    want, found = encode(encoder), []
    for twin in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        error = relative_error(encode(twin), want)
        found.append((twin.encoder_parallel, stats_of(twin).total.images, error))
    return found


def test_what_auto_gives_to_tensor_parallel_is_eager_and_counted(results):
    for error, hits, eager in results(2, auto_in_tensor):
        assert error < 1e-5 and (hits, eager) == (0, len(GRIDS))


def test_a_stale_graph_of_one_rank_reaches_all_and_the_group_stays_usable(results):
    found = results(2, stale_on_one_rank)
    assert [raised for raised, _ in found] == ["RankError", "StaleGraphError"]
    assert max(error for _, error in found) < 1e-5


def test_a_copy_shares_the_ranks_and_a_pickle_encodes_alone(results):
    for (mode, shared, error), (alone, images, other) in results(2, copied_on_ranks):
        assert (mode, alone, images) == ("data", "none", len(GRIDS)) and 0 < shared < len(GRIDS)
        assert max(error, other) < 1e-5
