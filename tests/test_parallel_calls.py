"""Ranks at different calls: an error on every rank that names the one elsewhere, before any feature (faults G).

Each case runs in real processes over gloo; the cases of a world size share one set of processes.
"""

import copy
import io
import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

from kimivl_lab import EncoderCudaGraphRunner, KimiVLEncoder
from kimivl_lab.graphs.guards import GraphCaptureError
from kimivl_lab.kimi_vl.encoder import KimiVLMultiModalProjector
from kimivl_lab.parallel import calls
from kimivl_lab.parallel.calls import rank_errors, same_call
from kimivl_lab.parallel.collectives import all_gather, all_reduce
from kimivl_lab.parallel.data_parallel import run_dp_sharded_vision_model
from kimivl_lab.parallel.groups import RankError
from kimivl_lab.parallel.tensor_parallel import tensor_parallel
from tests.conftest import pixels_for, relative_error, tiny_encoder, tiny_tower
from tests.rank_cases import free_links, new_group, on_ranks, results_of

TIMEOUT_S = 2.0
GRIDS = [(4, 6), (2, 2), (8, 4)]
MODES = {2: ("data", "tensor", "auto", "auto, links free", "run_dp"), 3: ("data", "auto", "run_dp")}


@pytest.fixture(scope="module")
def results():
    """results(ranks, case): what each rank returned."""
    return results_of(__name__, TIMEOUT_S)


def encode_by(mode: str, group) -> Callable[..., torch.Tensor]:
    """A function of (pixels, grids), on whole copies of one encoder or tower."""
    if mode == "run_dp":
        return partial(run_dp_sharded_vision_model, tiny_tower(), group=group)
    encoder = tiny_encoder()
    name, _, free = mode.partition(",")
    return encoder.set_encoder_parallel(name, group, free_links(encoder.config.vision_config) if free else None)


def outcome(encode: Callable[[], Any]) -> tuple[str, list[int], str]:
    """("features" or the error's name, its missing ranks, its text)."""
    try:
        encode()
    except Exception as error:
        return type(error).__name__, getattr(error, "missing", []), str(error)
    return "features", [], ""


def by_mode(group, batches: Callable[[bool], list[tuple[int, list]]]) -> dict[str, list[tuple]]:
    """Mode -> outcomes of the batches (seed, grids) that this rank encodes; the last rank is the one that strays."""
    found = {}
    for mode in MODES[group.size()]:
        encode = encode_by(mode, new_group(TIMEOUT_S))
        mine = batches(group.rank() == group.size() - 1)
        found[mode] = [outcome(lambda: encode(pixels_for(grids, seed), grids)) for seed, grids in mine]  # noqa: B023
        dist.barrier()
    return found


# --- at different calls ----------------------------------------------------------------------------------------------


@on_ranks
def skipped_batch(group):
    return by_mode(group, lambda strays: [(seed, GRIDS) for seed in ((1, 2) if strays else (0, 1))])


@on_ranks
def swapped_order(group):
    return by_mode(group, lambda strays: [(seed, GRIDS) for seed in ((1, 0, 2) if strays else (0, 1, 2))])


@on_ranks
def other_grids_of_the_same_size(group):
    return by_mode(group, lambda strays: [(0, [(6, 4), (2, 2), (4, 8)] if strays else GRIDS), (0, GRIDS)])


@on_ranks
def other_number_of_patches(group):
    return by_mode(group, lambda strays: [(0, [(4, 6)] if strays else GRIDS), (0, GRIDS)])


@on_ranks
def no_images_on_one_rank(group):
    return by_mode(group, lambda strays: [(0, [] if strays else GRIDS), (0, GRIDS)])


WRONG = {  # the calls at which ranks are apart, then those at which they are together
    skipped_batch: (2, 0),
    swapped_order: (2, 1),
    other_grids_of_the_same_size: (1, 1),
    other_number_of_patches: (1, 1),
    no_images_on_one_rank: (1, 1),
}


@pytest.mark.parametrize("ranks", MODES)
@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_S9_ranks_at_different_calls_get_no_features_and_the_stray_is_named(results, case, ranks):
    apart, together = WRONG[case]
    for found in results(ranks, case):
        assert set(found) == set(MODES[ranks])
        for mode, outcomes in found.items():
            for kind, missing, text in outcomes[:apart]:
                assert (kind, missing) == ("RankError", [ranks - 1]), (mode, text)
            assert [kind for kind, *_ in outcomes[apart : apart + together]] == ["features"] * together, mode


@on_ranks
def absent_and_then_late(group):
    """Outcomes and seconds: rank 1 comes to the first batch when the others have given up, and in time to the next."""
    found = []
    for _ in range(2):
        time.sleep(2 * TIMEOUT_S * (group.rank() == 1 and not found))
        start = time.monotonic()
        one = outcome(lambda: run_dp_sharded_vision_model(tiny_tower(), pixels_for(GRIDS), GRIDS, group))
        found.append((*one, time.monotonic() - start))
        dist.barrier()
    return found


@pytest.mark.parametrize("ranks", MODES)
def test_a_rank_that_does_not_come_is_named_in_time_and_cannot_come_late(results, ranks):
    for rank, found in enumerate(results(ranks, absent_and_then_late)):
        kind, missing, text, seconds = found[0]
        assert kind == "RankError", text
        assert missing == ([other for other in range(ranks) if other != 1] if rank == 1 else [1])
        assert seconds < 2 * TIMEOUT_S
        assert found[1][0] == "features"


@on_ranks
def features_after_errors(group):
    """Errors to one process after a rank strayed, one failed, and one was late."""
    tower, found = tiny_tower(), []
    for strays in (True, False, True, False):
        seed = 1 if strays and group.rank() == 1 else 0
        time.sleep(0.1 * group.rank())
        try:
            got = run_dp_sharded_vision_model(tower, pixels_for(GRIDS, seed), GRIDS, group)
            found.append(relative_error(got, tower(pixels_for(GRIDS, seed), GRIDS)))
        except RankError as error:
            found.append(error.missing)
    return found


@pytest.mark.parametrize("ranks", MODES)
def test_the_group_stays_of_use(results, ranks):
    for stray, right, again, last in results(ranks, features_after_errors):
        assert stray == again == [1]
        assert max(right, last) < 1e-5


@on_ranks
def one_rank_fails(group):
    """Outcome and seconds when a rank cannot read its images, then the error of the next batch."""

    def load(mine):
        if group.rank() == 1:
            raise FileNotFoundError("page_7.png")
        images = pixels_for(GRIDS).split([24, 4, 32])
        return torch.cat([images[image] for image in mine])

    tower, start = tiny_tower(), time.monotonic()
    failed = outcome(lambda: run_dp_sharded_vision_model(tower, None, GRIDS, group, load_pixels=load))
    seconds = time.monotonic() - start
    got = run_dp_sharded_vision_model(tower, pixels_for(GRIDS), GRIDS, group)
    return failed, seconds, relative_error(got, tower(pixels_for(GRIDS), GRIDS))


@pytest.mark.parametrize("ranks", MODES)
def test_a_failed_image_reaches_all_ranks_at_once_and_costs_one_batch(results, ranks):
    for rank, ((kind, missing, text), seconds, error) in enumerate(results(ranks, one_rank_fails)):
        assert (kind, missing) == (("FileNotFoundError", []) if rank == 1 else ("RankError", [1]))
        assert "page_7.png" in text
        assert seconds < TIMEOUT_S
        assert error < 1e-5


@on_ranks
def bad_pixels(group):
    """Mode -> outcome when one rank's pixels do not fit its grids, then that of a good batch."""
    found = {}
    for mode in MODES[group.size()]:
        encode, pixels = encode_by(mode, group), pixels_for(GRIDS)
        bad = outcome(lambda: encode(pixels[group.rank() == 1 :], GRIDS))  # noqa: B023
        found[mode] = bad, outcome(lambda: encode(pixels, GRIDS))  # noqa: B023
    return found


@pytest.mark.parametrize("ranks", MODES)
def test_pixels_that_one_rank_refuses_reach_all_ranks_in_every_mode(results, ranks):
    for rank, found in enumerate(results(ranks, bad_pixels)):
        for bad, good in found.values():
            assert bad[:2] == (("ValueError", []) if rank == 1 else ("RankError", [1]))
            assert good[0] == "features"


@on_ranks
def batch_ids(group):
    """Outcomes of pixels that are loaded by each rank, of equal grids: with no name, the same name, another name."""
    load = lambda mine: torch.zeros(sum((24, 4, 32)[image] for image in mine), 3, 14, 14)  # noqa: E731
    encode = partial(run_dp_sharded_vision_model, tiny_tower(), None, GRIDS, group, load_pixels=load)
    return [outcome(partial(encode, batch_id=one)) for one in (None, "request 7", f"request {group.rank()}")]


@pytest.mark.parametrize("ranks", MODES)
def test_a_name_tells_batches_apart_whose_pixels_are_not_compared(results, ranks):
    for found in results(ranks, batch_ids):
        assert [kind for kind, *_ in found] == ["features", "features", "RankError"]
        assert found[2][1] == list(range(1, ranks))


@on_ranks
def graphs_apart(group):
    """Outcomes of replays, of other pixels on the last rank and then of the same; the graphs hold no collective."""
    runner = EncoderCudaGraphRunner(tiny_tower(), budgets=[16], max_images=3, backend="trace")
    runner.capture()
    runner.tensor_parallel_group = group
    strays = group.rank() == group.size() - 1
    return [outcome(lambda: runner(pixels_for(GRIDS, seed), GRIDS)) for seed in (int(strays), 2)]  # noqa: B023


@pytest.mark.parametrize("ranks", MODES)
def test_replays_of_a_tensor_parallel_tower_are_compared(results, ranks):
    for apart, together in results(ranks, graphs_apart):
        assert apart[:2] == ("RankError", [ranks - 1])
        assert together[0] == "features"


@on_ranks
def modes_apart(group):
    mode = "auto" if group.rank() == 1 else "data"
    return outcome(lambda: tiny_encoder().set_encoder_parallel(mode, group))


@pytest.mark.parametrize("ranks", MODES)
def test_ranks_choose_one_mode(results, ranks):
    for kind, missing, text in results(ranks, modes_apart):
        assert (kind, missing) == ("RankError", [1])
        assert "'data'" in text and "'auto'" in text


@on_ranks
def store_keys(group):
    """Keys of the store that 3 and 30 calls leave."""
    counts = []
    for _ in range(2):
        for _ in range(3 if not counts else 27):
            with same_call(group) as call:
                call.about = "nothing"
        dist.barrier()
        counts.append(group.get_group_store().num_keys())
        dist.barrier()
    return counts


def test_the_store_does_not_grow(results):
    for few, many in results(2, store_keys):
        assert few == many


# --- roll calls ------------------------------------------------------------------------------------------------------


@on_ranks
def two_failures(group):
    """Missing ranks of two failed collectives: to the first the last rank comes late, to the second it does not."""
    last, found = group.rank() == group.size() - 1, []
    calls._GRACE_S = TIMEOUT_S / 2
    time.sleep(1.2 * TIMEOUT_S * last)
    for _ in range(1 if last else 2):
        try:
            all_reduce(torch.ones(3), group)
        except RankError as error:
            found.append(error.missing)
    dist.barrier()
    return found


@pytest.mark.parametrize("ranks", MODES)
def test_an_answer_to_one_roll_call_is_none_to_the_next(results, ranks):
    *others, last = results(ranks, two_failures)
    assert last == [[]]
    assert all(found == [[], [ranks - 1]] for found in others)


class Gathers(nn.Module):
    """A tower with a collective of the library in it."""

    def __init__(self, tower, group):
        super().__init__()
        self.tower, self.group = tower, group

    def forward(self, *args, **kwargs):
        features = self.tower(*args, **kwargs)
        gathered = torch.empty_like(features)
        all_gather(gathered, features, self.group)
        return gathered


@pytest.fixture(scope="module")
def alone():
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_refused_capture_stays_one(alone, monkeypatch):
    tower: Any = tiny_tower()
    runner = EncoderCudaGraphRunner(tower, budgets=[16], max_images=2, backend="trace")
    monkeypatch.setattr(runner.model, "get_image_features", Gathers(tower, alone))
    with pytest.raises(GraphCaptureError, match="allgather|all_gather"):
        runner.capture()


NCCL = "NCCL error in: NCCLUtils.cpp:94, {}, NCCL version 2.27.5"
OWN_ERRORS = [
    torch.OutOfMemoryError("12 GiB"),
    GraphCaptureError("x"),
    RuntimeError("shapes"),
    dist.DistBackendError(NCCL.format("ncclUnhandledCudaError: Call to CUDA failed. Cuda failure 2 'out of memory'")),
    dist.DistBackendError(NCCL.format("ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1")),
]


@pytest.mark.parametrize("error", OWN_ERRORS, ids=lambda error: f"{error!s:.60}"[-20:])
def test_errors_that_no_rank_caused_pass_unchanged(alone, error, monkeypatch):
    monkeypatch.setattr(calls, "_roll_call", lambda *args: pytest.fail("a roll call"))
    with pytest.raises(type(error)) as raised, rank_errors(alone, "all_reduce"):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("error", [dist.DistBackendError("NCCL"), RuntimeError("[x/gloo/pair.cc:553] gone")])
def test_a_roll_call_that_fails_hides_nothing(alone, error, monkeypatch):
    monkeypatch.setattr(calls, "_roll_call", lambda *args: getattr(dist, "renamed_by_torch"))  # noqa: B009
    with pytest.raises(RankError, match=f"{error!s:.4}".replace("[", r"\[")) as raised, rank_errors(alone, "gather"):
        raise error
    assert raised.value.__cause__ is error


# --- replaced parts and copies ---------------------------------------------------------------------------------------


def same_features(encoder, other=None) -> float:
    """Relative error of `encoder`'s features to those of a whole encoder of the same weights."""
    whole = tiny_encoder()
    whole.load_state_dict((other or encoder).state_dict())
    return relative_error(encoder(pixels_for(GRIDS), GRIDS), whole(pixels_for(GRIDS), GRIDS))


@on_ranks
def replaced_parts(group):
    """(mode, part) -> relative error after that part of an encoder in use was replaced."""
    errors = {}
    for mode in ("data", "auto", "auto, links free"):
        encoder: Any = encode_by(mode, group)
        errors[mode, "none"] = same_features(encoder)
        encoder.vision_tower = tiny_tower(seed=5)
        errors[mode, "tower"] = same_features(encoder)
        block: Any = encoder.vision_tower.encoder.blocks[1]
        first: Any = encoder.vision_tower.encoder.blocks[0]
        block.mlp.fc0 = copy.deepcopy(first.mlp.fc0)
        errors[mode, "layer"] = same_features(encoder)
        block.norm0 = nn.LayerNorm(block.norm0.normalized_shape)
        nn.init.normal_(block.norm0.weight)
        errors[mode, "norm"] = same_features(encoder)
        encoder.vision_tower.encoder.blocks[0] = copy.deepcopy(block)
        errors[mode, "block"] = same_features(encoder)
        torch.manual_seed(6)
        encoder.multi_modal_projector = KimiVLMultiModalProjector(encoder.config)
        errors[mode, "projector"] = same_features(encoder)
        encoder.vision_tower.config = copy.deepcopy(encoder.vision_tower.config)
        errors[mode, "config"] = same_features(encoder)
    return errors


@pytest.mark.parametrize("ranks", MODES)
def test_each_call_takes_the_parts_that_the_encoder_has(results, ranks):
    for errors in results(ranks, replaced_parts):
        assert len(errors) == 21
        assert max(errors.values()) < 1e-5, errors


def _hooked(layer):
    layer.register_forward_hook(lambda module, inputs, output: 1.5 * output)


def _pruned(layer):
    prune.l1_unstructured(layer, "weight", amount=0.5)


def _called_otherwise(layer):
    layer.forward = lambda x: 2 * x


@on_ranks
def touched_after_the_cut(group):
    """Outcomes of a tensor-parallel call of "auto" after a layer of a tower in use was touched, and of one before."""
    found = []
    for touch in (_hooked, _pruned, _called_otherwise):
        encoder: Any = encode_by("auto, links free", group)
        found.append(outcome(partial(encoder, pixels_for(GRIDS), GRIDS)))
        touch(encoder.vision_tower.encoder.blocks[0].wqkv)
        found.append(outcome(partial(encoder, pixels_for(GRIDS), GRIDS)))
    return found


def test_a_layer_that_is_touched_after_the_cut_is_refused_and_not_skipped(results):
    for found in results(2, touched_after_the_cut):
        assert [kind for kind, *_ in found] == ["features", "ValueError"] * 3, found


@on_ranks
def copies(group):
    """(mode, copy) -> relative error of a deep copy and of a pickle, and their modes."""
    found = {}
    for mode in MODES[group.size()][:-1]:
        encoder: Any = encode_by(mode, group)
        encoder(pixels_for(GRIDS), GRIDS)
        twin = copy.deepcopy(encoder)
        found[mode, "deepcopy"] = relative_error(twin(pixels_for(GRIDS), GRIDS), encoder(pixels_for(GRIDS), GRIDS))
        assert twin.encoder_parallel == encoder.encoder_parallel
        if mode == "tensor":
            continue
        file = io.BytesIO()
        torch.save(encoder, file)
        file.seek(0)
        for one in (pickle.loads(pickle.dumps(encoder)), torch.load(file, weights_only=False)):
            assert one.encoder_parallel == "none"
            want = encoder(pixels_for(GRIDS), GRIDS)
            found[mode, "alone"] = relative_error(one(pixels_for(GRIDS), GRIDS), want)
            again = one.set_encoder_parallel("data", group)
            found[mode, "again"] = relative_error(again(pixels_for(GRIDS), GRIDS), want)
    return found


@pytest.mark.parametrize("ranks", MODES)
def test_copies_and_pickles_work(results, ranks):
    for errors in results(ranks, copies):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("save", ["save_pretrained", "pickle", "torch.save"])
@pytest.mark.parametrize("part", ["encoder", "tower", "twin"])
def test_a_cut_tower_is_not_saved(alone, save, part, tmp_path):
    encoder: Any = tiny_encoder()
    if part == "twin":
        module: Any = tensor_parallel(encoder.vision_tower, alone, view=True)
    else:
        encoder.set_encoder_parallel("tensor", alone)
        module = encoder if part == "encoder" else encoder.vision_tower
    with pytest.raises(ValueError, match="cut over ranks .* save it before"):
        if save == "save_pretrained":
            module.save_pretrained(tmp_path / "out")
        elif save == "pickle":
            pickle.dumps(module)
        else:
            torch.save(module, tmp_path / "out")
    assert not (tmp_path / "out").is_dir()
    if part == "twin":  # the whole tower is still one
        encoder.vision_tower.save_pretrained(tmp_path / "whole")


def test_a_whole_encoder_in_data_mode_is_saved(alone, tmp_path):
    encoder = tiny_encoder().set_encoder_parallel("data", alone)
    encoder.save_pretrained(tmp_path)
    again = KimiVLEncoder.from_pretrained(tmp_path).eval()
    assert again.encoder_parallel == "none"
    with torch.no_grad():
        assert relative_error(again(pixels_for(GRIDS), GRIDS), encoder(pixels_for(GRIDS), GRIDS)) < 1e-6
