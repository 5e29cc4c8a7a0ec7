"""Several ranks, real processes over gloo: the same features as one process, on every rank, in order (faults G)."""

from functools import cache

import pytest
import torch

from kimivl_lab import KimiVLConfig
from kimivl_lab.geometry import patch_counts
from kimivl_lab.measure.ranks import run_ranks
from tests.conftest import tiny_encoder
from tests.parallel_worker import COUNTS, GRIDS, encode_on_gpus, run_cases

WORLD_SIZES = (1, 2, 3, 4)
CUTTING = (1, 2, 4)  # the tiny tower's 4 heads


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(ranks, case): what each rank returned."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_encoder(seed=1).save_pretrained(folder)
    run = cache(lambda ranks: run_ranks(run_cases, ranks, str(folder)))

    def of(ranks, case):
        found = [result[case] for result in run(ranks)]
        for rank, one in enumerate(found):
            assert not (isinstance(one, str) and one.startswith("Traceback")), f"rank {rank}: {one}"
        return found

    return of


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(ranks, mode) for ranks in WORLD_SIZES for mode in ("data", "auto", "auto, links free")]
    + [(ranks, "tensor") for ranks in CUTTING],
)
def test_G1_G4_G6_G12_every_mode_equals_one_process(results, ranks, mode, count):
    found = [result[mode, count] for result in results(ranks, "equality")]
    error, shape, kinds, digest = found[0]
    assert shape == (sum(patch_counts(GRIDS[:count])) // 4, KimiVLConfig.preset("tiny").text_config.hidden_size)
    assert all(result[0] < 1e-5 for result in found)
    assert {result[3] for result in found} == {digest}
    assert all(result[2] == kinds for result in found)


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_G3_G5_every_rank_joins_the_same_collectives(results, ranks):
    found = results(ranks, "equality")[0]
    gathers = {0: [], 1: ["broadcast"], **dict.fromkeys((3, 5, 9), ["all_gather"])} if ranks > 1 else {}
    reduces = ["all_reduce"] * 4 * (ranks > 1)
    for count in COUNTS:
        assert found["data", count][2] == gathers.get(count, [])
        if ranks in CUTTING:
            assert found["tensor", count][2] == reduces
    if ranks in (2, 4):  # one image goes to all ranks; with free links so do many
        assert found["auto, links free", 1][2] == found["auto, links free", 9][2] == reduces


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_low_precision_is_as_near_as_on_one_rank(results, ranks):
    found = results(ranks, "bfloat16")
    for mode, (error, one_rank, dtype, digest) in found[0].items():
        assert error < 1.5 * one_rank < 0.03, mode
        assert dtype == torch.bfloat16
        assert all(result[mode][3] == digest for result in found)


@pytest.mark.parametrize("ranks", CUTTING)
def test_the_published_checkpoint_is_loaded_whole_and_cut(results, ranks):
    assert max(results(ranks, "published_checkpoint")) < 1e-5


# --- data parallel ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_G15_no_rank_copies_pixels_that_it_does_not_own(results, ranks):
    by_rank = results(ranks, "own_pixels")
    for case in zip(*by_rank, strict=True):
        for copied, given, owned, _, calls, right in case:
            assert copied <= owned == given
            assert calls == (owned > 0)
            assert right
        assert sum(owned for _, _, owned, _, _, _ in case) == case[0][3]


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_reads_only_its_own_images(results, ranks):
    found = results(ranks, "loaded_pixels")
    assert sorted(image for asked, _ in found for image in asked) == list(range(len(GRIDS)))
    assert all(right for _, right in found)


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_ranks_may_replay_graphs(results, ranks):
    assert max(results(ranks, "graph_runner")) < 1e-5


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_any_balance_gives_the_same_and_bad_input_is_refused(results, ranks):
    for errors, refused in results(ranks, "balances"):
        assert max(errors.values()) < 1e-5
        said = ["unknown balance 'fast'", "place each of 9 images", "hold 219 patches, the grids need 220"]
        said += ["exactly one", "exactly one", "got None", "2x3"]
        for message, words in zip(refused, said if ranks > 1 else said[:1] + said[2:], strict=True):
            assert words in message


def test_G7_two_groups_of_two_of_which_one_has_images(results):
    found = results(4, "two_groups")
    assert all(error < 1e-5 for errors in found for error in errors)


# --- tensor parallel -------------------------------------------------------------------------------------------------


def test_G10_qkv_is_cut_by_heads(results):
    first = results(2, "cut_weights")[0]
    for view in (False, True):
        assert first[view]["qkv rows"] == [*range(0, 4), *range(8, 12), *range(16, 20)]


@pytest.mark.parametrize("ranks", CUTTING)
@pytest.mark.parametrize("view", [False, True])
def test_ranks_hold_all_of_the_weights_once(results, ranks, view):
    parts = [result[view] for result in results(ranks, "cut_weights")]
    assert sorted(row for part in parts for row in part["qkv rows"]) == list(range(24))
    assert sum((part["column rows"] for part in parts), []) == list(range(24))
    assert sum((part["row columns"] for part in parts), []) == list(range(4))
    for part in parts:
        assert part["qkv bias"] == part["qkv rows"]
        assert part["shares memory"] == [view] * 3
        assert view or part["contiguous"] == [True] * 3


@pytest.mark.parametrize("ranks", CUTTING)
def test_G11_bias_and_residual_count_once(results, ranks):
    for errors in results(ranks, "one_layer_pair"):
        assert max(errors) < 1e-6


@pytest.mark.parametrize("ranks", CUTTING)
def test_an_unsharded_state_dict_replaces_the_weights(results, ranks):
    for errors in results(ranks, "new_weights"):
        assert max(errors) < 1e-5


@pytest.mark.parametrize("ranks", CUTTING)
def test_a_cut_tower_holds_its_share_and_auto_holds_one_copy(results, ranks):
    for ratio, foreign, same_names in results(ranks, "memory"):
        assert ratio == 1 / ranks
        assert foreign == 0
        assert same_names


def test_G8_sixteen_heads_on_three_ranks_name_the_legal_sizes(results):
    for message in results(3, "illegal_size"):
        assert message.endswith("divide by 3 ranks: legal sizes are 1, 2, 4, 8, 16")
    for ranks in (1, 2, 4):
        assert results(ranks, "illegal_size") == [None] * ranks


def test_torch_plan_gives_the_same_block(results):
    for error, same_weights in results(2, "torch_plan"):
        assert error < 1e-5
        assert same_weights == [True, True]


@pytest.mark.gpu
def test_nccl_on_the_gpus_there_are():
    ranks = max(ranks for ranks in CUTTING if ranks <= torch.cuda.device_count())
    for errors in run_ranks(encode_on_gpus, ranks):
        assert set(errors) == {"data", "auto", "tensor"}
        assert max(errors.values()) < 1e-4
