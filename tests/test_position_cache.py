"""The position cache: bounded, never stale, never shared with the caller (faults C10, C11, H, I13)."""

import copy
import gc
import pickle
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimivl_lab import EncoderOptions
from kimivl_lab.moonvit.position_cache import PositionCache
from tests import oracle
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_tower
from tests.test_position import table

GRID = (36, 46)


def embed(module, grids=(GRID,)):
    return module.get_pos_embeds(list(grids), implementation="cached")


def is_current(module, grid=GRID):
    return relative_error(embed(module, [grid]), oracle.position(module.weight.double(), *grid)) < 1e-6


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_C10_thousands_of_grids_never_pass_the_bound():
    module = table(dim=4)
    module.cache = PositionCache(max_bytes=3 * 2**20)
    grids = [(2 * h, 2 * w) for h in range(1, 256) for w in range(1, 256) if 4 * h * w <= 16384]
    grids = grids[::3]
    assert len(grids) > 4_000
    for count, grid in enumerate(grids):
        got = embed(module, [grid])
        assert module.cache.stats.bytes <= 3 * 2**20
        if count % 997 == 0:
            assert relative_error(got, oracle.position(module.weight.double(), *grid)) < 1e-6
    stats = module.cache.stats
    assert stats.misses == len(grids) and stats.evictions > len(grids) // 2
    assert stats.bytes == sum(entry.nbytes for entry in module.cache._entries.values())
    assert stats.entries == len(module.cache)


@settings(max_examples=60, deadline=None)
@given(
    accesses=st.lists(st.integers(0, 8), max_size=60),
    bound=st.integers(1, 6),
    policy=st.sampled_from(["lru", "fifo"]),
    by_bytes=st.booleans(),
)
def test_policies_equal_a_plain_model(accesses, bound, policy, by_bytes):
    """Entry `key` has key+1 elements; the model is a list in eviction order."""
    size = lambda key: 4 * (key + 1)  # noqa: E731
    cache = (
        PositionCache(max_bytes=8 * bound, policy=policy)
        if by_bytes
        else PositionCache(max_bytes=None, max_entries=bound, policy=policy)
    )
    model: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in accesses:
        value = cache.get(key, lambda key=key: torch.full((key + 1,), float(key)))
        assert value.tolist() == [float(key)] * (key + 1)
        if key in model:
            hits += 1
            if policy == "lru":
                model.move_to_end(key)
        elif not by_bytes or size(key) <= 8 * bound:
            model[key] = None
            while (sum(map(size, model)) > 8 * bound) if by_bytes else (len(model) > bound):
                model.popitem(last=False)
        assert list(cache._entries) == list(model)
    assert (cache.stats.hits, cache.stats.misses) == (hits, len(accesses) - hits)


def test_a_hit_moves_an_entry_in_lru_and_not_in_fifo():
    kept = {}
    for policy in ("lru", "fifo"):
        cache = PositionCache(max_bytes=None, max_entries=2, policy=policy)
        for key in "abac":
            cache.get(key, lambda: torch.zeros(1))
        kept[policy] = list(cache._entries)
    assert kept == {"lru": ["a", "c"], "fifo": ["b", "c"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "random"}, "'random': one of lru, fifo"),
        ({"max_bytes": None}, "needs a bound"),
        ({"max_bytes": -1}, "max_bytes must not be negative, got -1"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PositionCache(**arguments)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_transposed_grids_and_dtypes_are_different_entries():
    module = table()
    first, second = embed(module, [(2, 6)]), embed(module, [(6, 2)])
    assert not torch.equal(first, second)
    module.get_pos_embeds([(2, 6)], torch.bfloat16, "cached")
    assert module.cache.stats.misses == 3
    assert is_current(module, (2, 6)) and is_current(module, (6, 2))
    assert module.cache.stats.hits == 2


def test_entries_are_contiguous_and_never_handed_out():
    module = table()
    first = embed(module)
    ((entry, *_),) = module.cache._entries.values()
    assert entry.is_contiguous()
    assert first.untyped_storage().data_ptr() != entry.untyped_storage().data_ptr()
    first.fill_(9)
    assert is_current(module)


# --- never stale -----------------------------------------------------------------------------------------------------


def in_place(module):
    module.weight.mul_(-2)


def load(module):
    module.load_state_dict({"weight": torch.flip(module.weight, [0])})


def assign(module):
    module.load_state_dict({"weight": torch.flip(module.weight, [1])}, assign=True)
    module.requires_grad_(False)


def cast(module):
    module.to(torch.bfloat16)


def swap_data(module):
    module.weight.data = module.weight.data * 3


def update_data(module):
    module.weight.data.mul_(3)


def new_parameter(module):
    module.weight = torch.nn.Parameter(module.weight * 0.5, requires_grad=False)


def optimiser(module):
    module.weight.requires_grad_()
    module.weight.grad = torch.ones_like(module.weight)
    torch.optim.SGD([module.weight], lr=0.5).step()
    module.weight.requires_grad_(False)
    module.weight.grad = None


@pytest.mark.parametrize(
    "change", [in_place, load, assign, cast, swap_data, update_data, new_parameter, optimiser], ids=lambda f: f.__name__
)
def test_C10_a_weight_change_is_never_served_stale(change):
    module = table()
    before = embed(module)
    assert module.cache.stats.entries == 1
    change(module)
    after = embed(module)
    assert module.cache.stats.invalidations == 1
    want = oracle.position(module.weight.double(), *GRID)
    assert relative_error(after, want) < (1e-6 if after.dtype == torch.float32 else 4e-3)
    if change is not cast:
        assert relative_error(after, before) > 0.1


def test_a_value_made_while_the_weights_change_is_not_kept():
    cache = PositionCache()

    def make():
        cache.clear()
        return torch.zeros(1)

    cache.get("grid", make)
    assert len(cache) == 0


def test_not_filled_in_training_nor_while_a_gradient_is_wanted():
    module = table()
    module.train()
    embed(module)
    module.eval().requires_grad_()
    embed(module)
    assert module.cache.stats.misses == 0
    with torch.no_grad():
        embed(module)
    assert module.cache.stats.entries == 1


def test_entries_made_in_inference_mode_serve_later_calls():
    module = table().requires_grad_()
    with torch.inference_mode():
        embed(module)
    with torch.no_grad():
        assert is_current(module)
    assert module.cache.stats.hits == 1
    (embed(module) ** 2).sum().backward()
    assert module.weight.grad is not None


# --- lifetime and threads --------------------------------------------------------------------------------------------


def test_C10_a_deleted_tower_dies_and_frees_its_entries():
    tower = tiny_tower(options=EncoderOptions(position="cached"))
    with torch.no_grad():
        tower(pixels_for(MIXED_GRIDS), MIXED_GRIDS)
    cache = tower.patch_embed.pos_emb.cache
    assert cache.stats.entries == len(MIXED_GRIDS)
    alive = weakref.ref(tower)
    del tower
    gc.collect()
    assert alive() is None
    assert cache._watched is not None and cache._watched.weight() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_entries_are_never_copied_or_serialised(copied):
    module = table()
    module.cache = PositionCache(max_bytes=2**20, max_entries=5, policy="fifo")
    embed(module)
    twin = copied(module)
    assert (twin.cache.max_bytes, twin.cache.max_entries, twin.cache.policy) == (2**20, 5, "fifo")
    assert len(twin.cache) == 0 and len(module.cache) == 1
    assert "cache" not in "".join(module.state_dict())
    assert is_current(twin)


def test_many_threads_share_a_cache():
    module = table(dim=4)
    module.cache = PositionCache(max_bytes=60_000)
    grids = [(2 * h, 2 * w) for h in range(1, 6) for w in range(1, 6)]
    want = {grid: module.get_pos_embeds([grid], implementation="adaptive") for grid in grids}
    wrong = []

    def work(seed):
        for index in torch.randperm(200, generator=torch.Generator().manual_seed(seed)).tolist():
            grid = grids[index % len(grids)]
            if not torch.equal(embed(module, [grid]), want[grid]):
                wrong.append(grid)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    stats = module.cache.stats
    assert stats.hits + stats.misses == 6 * 200
    assert stats.bytes == sum(entry.nbytes for entry in module.cache._entries.values()) <= 60_000


def test_the_whole_tower_follows_a_weight_change():
    tower = tiny_tower(seed=1)
    pixels = pixels_for(MIXED_GRIDS)
    with torch.no_grad():
        tower(pixels, MIXED_GRIDS)
        tower.patch_embed.pos_emb.weight.add_(1.5)
        cached = tower(pixels, MIXED_GRIDS)
        tower.set_options(position="interpolate")
        assert relative_error(cached, tower(pixels, MIXED_GRIDS)) < 1e-5


def test_announced_weights_are_not_compared_and_an_announcement_empties_the_cache():
    tower = tiny_tower(options=EncoderOptions(weights="announced"))
    cache = tower.patch_embed.pos_emb.cache

    def embedding():
        return tower.prepare_encoder_metadata([(6, 4)]).pos_embeds

    with torch.no_grad():
        before = embedding()
        tower.patch_embed.pos_emb.weight.data.mul_(2)  # torch does not count a write to .data
        assert torch.equal(embedding(), before)
        tower.weights_changed()
        torch.testing.assert_close(embedding(), 2 * before)
        tower.patch_embed.pos_emb.weight.mul_(2)  # counted
        torch.testing.assert_close(embedding(), 4 * before)
        tower.set_options(weights="checked")
        tower.patch_embed.pos_emb.weight.data.mul_(2)
        torch.testing.assert_close(embedding(), 8 * before)
        tower.patch_embed.pos_emb.weight.data.mul_(2)
        torch.testing.assert_close(embedding(), 16 * before)
    assert cache.stats.hits >= 1
