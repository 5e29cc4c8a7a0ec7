"""Host syncs of the tower: none, whatever the backend, depth and batch; planted ones found, historic ones counted."""

import importlib
import inspect

import pytest
import torch

from kimivl_lab import EncoderOptions, KimiVLConfig, KimiVLEncoder, count_host_syncs
from kimivl_lab.lessons.grids_on_device import METADATA_VARIANTS
from kimivl_lab.moonvit.attention import ATTENTION_BACKENDS
from kimivl_lab.moonvit.position_cache import PositionCache
from kimivl_lab.syncs.counter import HostSyncError, on_device
from tests.conftest import MIXED_GRIDS, pixels_for, randomise, relative_error, tiny_tower

NARROW = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16}
DEPTHS = (2, 27)
BATCHES = {1: [(4, 6)], 12: [(2, 2), (4, 2), (2, 6)] * 4}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def narrow_tower(layers=2, position="cached", rope="complex"):
    return tiny_tower(1, EncoderOptions(position=position, rope=rope), num_hidden_layers=layers, **NARROW)


HOST_KERNELS = ("amx", "simd")


@pytest.mark.parametrize("backend", [name for name in ATTENTION_BACKENDS if name not in HOST_KERNELS])
@pytest.mark.parametrize("images", BATCHES)
@pytest.mark.parametrize("layers", DEPTHS)
def test_H1_a_forward_reads_nothing_back(backend, images, layers, monkeypatch):
    grids = BATCHES[images]
    tower, pixels = narrow_tower(layers), pixels_for(grids)
    want = tower(pixels, grids)
    monkeypatch.setattr("kimivl_lab.moonvit.attention.attention_unavailable", lambda *_: None)
    away = on_device(tower, pretended=True)
    away.set_options(attention=backend)
    counter = count_host_syncs(away, pixels, grids, error=True, pretended=True)
    assert (counter.total, counter.staged, counter.unknown, counter.bytes_to_host) == (0, [], [], 0)
    assert counter.value.device.type == "cuda"
    assert relative_error(counter.value.cpu(), want) < 1e-5


@pytest.mark.parametrize(
    ("position", "rope"),
    [
        ("interpolate", "complex"),
        ("gather", "real"),
        ("separable", "in_place"),
        ("adaptive", "complex"),
        ("cached", "auto"),
    ],
)
@torch.inference_mode()
def test_H1_whatever_the_options(position, rope):
    tower, pixels = narrow_tower(position=position, rope=rope), pixels_for(MIXED_GRIDS)
    counter = count_host_syncs(on_device(tower, pretended=True), pixels, MIXED_GRIDS, error=True, pretended=True)
    assert (counter.staged, counter.unknown) == ([], [])
    assert relative_error(counter.value.cpu(), tower(pixels, MIXED_GRIDS)) < 1e-5


def test_the_cache_serves_the_pretended_device_and_stays_bounded():
    away = on_device(narrow_tower(), pretended=True)
    bound = 2 * 24 * 32 * 4  # two grids of 24 patches
    cache = away.patch_embed.pos_emb.cache = PositionCache(max_bytes=bound)
    for grids in ([(4, 6)], [(4, 6), (6, 4)], [(2, 12)], [(4, 6)]):
        count_host_syncs(away, pixels_for(grids), grids, error=True, pretended=True)
        assert cache.stats.bytes <= bound
    assert (cache.stats.hits, cache.stats.misses, cache.stats.evictions) == (1, 4, 2)
    away.patch_embed.pos_emb.weight.mul_(2)
    count_host_syncs(away, pixels_for([(4, 6)]), [(4, 6)], error=True, pretended=True)
    assert cache.stats.invalidations == 1


def test_the_whole_vision_half_from_raw_levels():
    config = KimiVLConfig.preset("tiny")
    encoder = randomise(KimiVLEncoder(config, EncoderOptions(rope="complex")), 0).eval()
    raw = torch.randint(0, 256, (24, 3, 14, 14), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    away = on_device(encoder, pretended=True)
    counter = count_host_syncs(away.get_image_features, raw, [(4, 6)], error=True, pretended=True)
    assert (counter.staged, counter.unknown) == ([], [])
    assert raw.nbytes < counter.bytes_to_device < raw.nbytes + 24 * 16 + 64
    assert relative_error(counter.value.cpu(), encoder.get_image_features(raw, [(4, 6)])) < 1e-5


def planted(original):
    def run(*args, **kwargs):
        out = original(*args, **kwargs)
        out.sum().item()  # the plant
        return out

    return run


PLANT = inspect.getsourcelines(planted)[1] + 3
PLACES = {
    "patch_embed": lambda tower: (tower.patch_embed, "forward"),
    "pos_emb": lambda tower: (tower.patch_embed.pos_emb, "get_pos_embeds"),
    "rope": lambda tower: (tower.rope_2d, "gather_cos_sin"),
    "block": lambda tower: (tower.encoder.blocks[1], "forward"),
    "norm": lambda tower: (tower.encoder.blocks[0].norm0, "forward"),
    "mlp": lambda tower: (tower.encoder.blocks[1].mlp, "forward"),
    "fc1": lambda tower: (tower.encoder.blocks[0].mlp.fc1, "forward"),
    "final norm": lambda tower: (tower.encoder.final_layernorm, "forward"),
    "merger": lambda tower: ("kimivl_lab.moonvit.model", "patch_merger_packed"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_read_is_found_with_its_line(place, monkeypatch):
    away = on_device(narrow_tower(), pretended=True)
    owner, name = PLACES[place](away)
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    monkeypatch.setattr(owner, name, planted(getattr(owner, name)))
    counter = count_host_syncs(away, pixels_for([(4, 6)]), [(4, 6)], pretended=True)
    assert [(event.kind, event.file, event.line) for event in counter.events] == [("item", __file__, PLANT)]
    with pytest.raises(HostSyncError, match=f"test_tower_syncs.py:{PLANT}"):
        count_host_syncs(away, pixels_for([(4, 6)]), [(4, 6)], error=True, pretended=True)


# --- historic forwards -----------------------------------------------------------------------------------------------


def variant_grids(name, grids, pretended):
    return torch.tensor(grids) if name == "host" else on_device(torch.tensor(grids), pretended=pretended)


@pytest.mark.parametrize("images", BATCHES)
@pytest.mark.parametrize("layers", DEPTHS)
def test_the_historic_forwards_read_what_they_read(images, layers):
    grids = BATCHES[images]
    tower, pixels = narrow_tower(layers), pixels_for(grids)
    away, want, counted = on_device(tower, pretended=True), tower(pixels, grids), {}
    for name, encode in METADATA_VARIANTS.items():
        counter = count_host_syncs(encode, away, pixels, variant_grids(name, grids, True), pretended=True)
        assert relative_error(counter.value.cpu(), want) < 1e-5, name
        assert (counter.staged, counter.unknown) == ([], [])
        counted[name] = counter.by_kind
    assert counted == {
        "per_layer": {"int": layers, "tolist": 3},
        "per_forward": {"tolist": 3, "int": 1},
        "host": {},
    }


def test_the_historic_forwards_run_on_the_host_too():
    tower, pixels = narrow_tower(), pixels_for(MIXED_GRIDS)
    for name, encode in METADATA_VARIANTS.items():
        assert torch.equal(encode(tower, pixels, torch.tensor(MIXED_GRIDS)), tower(pixels, MIXED_GRIDS)), name


def test_the_historic_reads_have_their_lines():
    away = on_device(narrow_tower(3), pretended=True)
    held = variant_grids("per_layer", [(4, 6)], True)
    counter = count_host_syncs(METADATA_VARIANTS["per_layer"], away, pixels_for([(4, 6)]), held, pretended=True)
    assert {event.file.rpartition("/")[2] for event in counter.events} == {"grids_on_device.py"}
    assert len({event.line for event in counter.events}) == 4  # position, rope, merger; the bound, in every layer
    assert str(counter.events[0]).startswith("tolist at grids_on_device.py:")


@pytest.mark.gpu
@pytest.mark.parametrize("images", BATCHES)
def test_the_gpu_counts_the_same_for_every_variant(images):
    grids = BATCHES[images]
    tower, pixels = narrow_tower(27), pixels_for(grids)
    for name, encode in METADATA_VARIANTS.items():
        counts = {}
        for pretended in (True, False):
            away, held = on_device(tower, pretended=pretended), variant_grids(name, grids, pretended)
            for _ in range(2):  # what is made once is made by the first
                counter = count_host_syncs(encode, away, pixels, held, pretended=pretended)
            counts[pretended] = (counter.by_kind, len(counter.staged), counter.bytes_to_device, counter.bytes_to_host)
            assert counter.launches > 27 * 5
        assert counts[True] == counts[False], name
