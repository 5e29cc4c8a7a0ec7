"""Packing, metadata and counts of the tower (faults D, E, F and the invariants behind them)."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimivl_lab import (
    EncoderOptions,
    KimiVLConfig,
    KimiVLEncoder,
    build_merge_gather_idx,
    patch_merger,
    split_image_features,
)
from kimivl_lab.geometry import as_grid_list, patch_counts
from kimivl_lab.moonvit.layers import SWITCHES
from kimivl_lab.moonvit.merger import patch_merger_packed
from tests.conftest import MIXED_GRIDS, pixels_for, relative_error, tiny_encoder, tiny_tower

EVEN_GRIDS = st.lists(
    st.tuples(st.integers(1, 8).map(lambda n: 2 * n), st.integers(1, 8).map(lambda n: 2 * n)), min_size=1, max_size=5
)


@pytest.fixture(scope="module")
def tower():
    return tiny_tower(seed=1)


def encode(tower, pixels, grids):
    with torch.no_grad():
        return tower(pixels, grids)


@pytest.mark.parametrize("switch", SWITCHES)
def test_an_option_that_no_device_knows_is_refused_before_any_forward(tower, switch):
    names = list(chain(*SWITCHES[switch]))
    for known in names:
        assert getattr(tiny_tower(options=EncoderOptions(**{switch: known})).options, switch) == known
    with pytest.raises(ValueError, match=f"unknown {switch} 'fastest': one of .*{names[-1]}"):
        tiny_tower(options=EncoderOptions(**{switch: "fastest"}))
    before = tower.options
    with pytest.raises(ValueError, match="'fastest'"):
        tower.set_options(**{switch: "fastest"})
    assert tower.options is before


# --- output and independence of images -------------------------------------------------------------------------------


def test_output_is_one_packed_tensor_in_order(tower):
    pixels = pixels_for(MIXED_GRIDS)
    packed = encode(tower, pixels, MIXED_GRIDS)
    assert packed.shape == (sum(patch_counts(MIXED_GRIDS)) // 4, 4, tower.config.hidden_size)
    for part, image, grid in zip(
        split_image_features(packed, MIXED_GRIDS), pixels.split(patch_counts(MIXED_GRIDS)), MIXED_GRIDS, strict=True
    ):
        assert relative_error(part, encode(tower, image, [grid])) < 1e-6


@pytest.mark.parametrize("backend", ["sdpa", "sdpa_masked", "eager"])
def test_E2_changing_image_b_leaves_image_a_bit_equal(tower, backend):
    grids = [(4, 6), (8, 8), (2, 12)]
    first, second, third = pixels_for(grids).split(patch_counts(grids))
    tower.set_options(attention=backend)
    a = split_image_features(encode(tower, torch.cat([first, second, third]), grids), grids)
    b = split_image_features(encode(tower, torch.cat([first, second * -3 + 1, third]), grids), grids)
    tower.set_options(attention="auto")
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[2], b[2])
    assert not torch.allclose(a[1], b[1])


@settings(max_examples=15, deadline=None)
@given(grids=EVEN_GRIDS, data=st.data())
def test_order_and_composition_do_not_matter(tower, grids, data):
    order = data.draw(st.permutations(range(len(grids))))
    images = pixels_for(grids).split(patch_counts(grids))
    shuffled = [grids[i] for i in order]
    want = split_image_features(encode(tower, torch.cat(images), grids), grids)
    got = split_image_features(encode(tower, torch.cat([images[i] for i in order]), shuffled), shuffled)
    for position, index in enumerate(order):
        assert relative_error(got[position], want[index]) < 1e-5


def test_no_image_gives_no_rows(tower):
    features = encode(tower, torch.empty(0, 3, 14, 14), [])
    assert features.shape == (0, 4, tower.config.hidden_size)
    assert features.dtype == tower.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_C6_D5_low_precision_in_is_low_precision_out_and_close(dtype):
    precise, low = tiny_tower(seed=2), tiny_tower(seed=2).to(dtype)
    pixels = pixels_for(MIXED_GRIDS)
    got = encode(low, pixels, MIXED_GRIDS)
    assert got.dtype == dtype
    assert relative_error(got, encode(precise, pixels, MIXED_GRIDS)) < 0.03


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_D3_angles_survive_casts_exactly(dtype):
    grids = [(2, 510), (64, 48)]
    before = tiny_tower().prepare_encoder_metadata(grids)
    after = tiny_tower().to(dtype).prepare_encoder_metadata(grids)
    assert after.rope_cos_sin.dtype == torch.float32
    assert torch.equal(before.rope_cos_sin, after.rope_cos_sin)
    assert after.pos_embeds.dtype == dtype


def test_uint8_patches_equal_normalised_floats():
    grids = [(4, 6), (2, 12)]
    raw = torch.randint(0, 256, (48, 3, 14, 14), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    normalised = (raw.float() / 255 - 0.5) / 0.5
    for dtype, bound in [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]:
        tower = tiny_tower(seed=3).to(dtype)
        want = encode(tower, ((raw.double() / 255 - 0.5) / 0.5).to(dtype), grids)
        assert relative_error(encode(tower, raw, grids), want) < bound, dtype
    exact = encode(tiny_tower(seed=3), normalised, grids)
    low = tiny_tower(seed=3).bfloat16()
    from_uint8, from_float = encode(low, raw, grids), encode(low, normalised, grids)
    assert relative_error(from_uint8, exact) < 1.5 * relative_error(from_float, exact)


# --- patch embedding and merge ---------------------------------------------------------------------------------------


def test_H7_J7_patch_embed_equals_the_convolution(tower):
    pixels = pixels_for([(4, 6)])
    with torch.no_grad():
        assert relative_error(tower.patch_embed.project(pixels), tower.patch_embed.proj(pixels).flatten(1)) < 1e-6


def test_F1_merge_order():
    assert build_merge_gather_idx([(4, 6)])[:4].tolist() == [0, 1, 6, 7]
    assert build_merge_gather_idx([(4, 4)]).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert build_merge_gather_idx([(2, 2), (2, 4)]).tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11]
    assert build_merge_gather_idx([]).tolist() == []


@given(grids=EVEN_GRIDS)
def test_packed_merge_equals_the_reference(grids):
    x = torch.arange(sum(patch_counts(grids)) * 3).view(-1, 3)
    packed = patch_merger_packed(x, build_merge_gather_idx(grids))
    assert torch.equal(packed, torch.cat(patch_merger(x, grids)))
    assert sorted(packed.flatten().tolist()) == list(range(x.numel()))


@pytest.mark.parametrize("merge", [patch_merger, lambda x, grids: build_merge_gather_idx(grids)])
def test_F3_a_grid_the_kernel_does_not_divide_is_named(merge):
    with pytest.raises(ValueError, match="grid 4x5 .* kernel 2x2"):
        merge(torch.zeros(24, 1), [(2, 2), (4, 5)])


def test_F6_split_says_both_numbers():
    with pytest.raises(ValueError, match="hold 5 tokens, the grids need 6"):
        split_image_features(torch.zeros(5, 4, 8), [(4, 6)])


# --- metadata --------------------------------------------------------------------------------------------------------


def test_E5_offsets_are_int32_and_end_in_the_total(tower):
    metadata = tower.prepare_encoder_metadata(MIXED_GRIDS)
    assert metadata.cu_seqlens.dtype == torch.int32
    assert metadata.cu_seqlens.tolist() == [0, 24, 28, 68, 92]
    assert metadata.max_seqlen == 40
    assert metadata.merge_gather_idx.dtype == torch.int64


def test_I7_unused_slots_repeat_the_total(tower):
    metadata = tower.prepare_encoder_metadata([(4, 6), (2, 2)], max_images=5)
    assert metadata.cu_seqlens.tolist() == [0, 24, 28, 28, 28, 28]
    pixels = pixels_for([(4, 6), (2, 2)])
    for backend in ("sdpa", "sdpa_masked", "eager"):
        tower.set_options(attention=backend)
        with torch.no_grad():
            padded = tower(pixels, encoder_metadata=metadata)
        assert torch.equal(padded, encode(tower, pixels, [(4, 6), (2, 2)])), backend
    tower.set_options(attention="auto")
    with pytest.raises(ValueError, match="2 images do not fit max_images=1"):
        tower.prepare_encoder_metadata([(4, 6), (2, 2)], max_images=1)


def test_metadata_once_gives_the_same_features(tower):
    pixels = pixels_for(MIXED_GRIDS)
    metadata = tower.prepare_encoder_metadata(torch.tensor(MIXED_GRIDS))
    with torch.no_grad():
        assert torch.equal(tower(pixels, encoder_metadata=metadata), tower(pixels, MIXED_GRIDS))


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([(3, 4)], "grid 3x4 .* not divisible"),
        ([(0, 4)], "grid 0x4 .* 1 to 511"),
        ([(2, 512)], "grid 2x512 .* 1 to 511"),
        ([(2.0, 4)], r"\(n, 2\) integers"),
        ([(2, 4, 6)], r"\(n, 2\) integers"),
        (torch.tensor([[2.0, 4.0]]), r"\(n, 2\) integers"),
        (torch.empty(1, 2, device="meta", dtype=torch.int64), "host .* meta"),
    ],
)
def test_bad_grids_are_refused(tower, grids, message):
    with pytest.raises(ValueError, match=message):
        tower.prepare_encoder_metadata(grids)


def test_grids_in_any_host_form():
    want = [(2, 4), (6, 8)]
    tensor = torch.tensor(want)
    assert as_grid_list(tensor) == as_grid_list(tensor.numpy()) == as_grid_list([list(g) for g in want]) == want


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (torch.zeros(23, 3, 14, 14), "hold 23 patches, the grids need 24"),
        (torch.zeros(24, 14, 14, 3), r"\(L, 3, 14, 14\), got \(24, 14, 14, 3\)"),
        (torch.zeros(24, 3, 14, 14, dtype=torch.int64), "int64"),
    ],
)
def test_bad_pixels_are_refused(tower, pixels, message):
    with pytest.raises(ValueError, match=message):
        tower(pixels, [(4, 6)])


def test_grids_and_metadata_exclude_each_other(tower):
    pixels = pixels_for([(4, 6)])
    for arguments in ({}, {"image_grid_hws": [(4, 6)], "encoder_metadata": tower.prepare_encoder_metadata([(4, 6)])}):
        with pytest.raises(ValueError, match="exactly one"):
            tower(pixels, **arguments)


# --- the whole vision half -------------------------------------------------------------------------------------------


def test_image_features_are_rows_of_the_language_model():
    encoder = tiny_encoder()
    pixels = pixels_for(MIXED_GRIDS)
    with torch.no_grad():
        rows = encoder.get_image_features(pixels, MIXED_GRIDS)
    assert rows.shape == (23, encoder.config.text_config.hidden_size)


def test_published_sizes():
    with torch.device("meta"):
        encoder = KimiVLEncoder(KimiVLConfig.preset("kimi-vl-a3b"))
    count = lambda module: sum(parameter.numel() for parameter in module.parameters())  # noqa: E731
    assert count(encoder.vision_tower) == 416_866_032
    assert count(encoder.vision_tower.encoder.blocks[0]) == 15_239_504
    assert count(encoder.multi_modal_projector) == 30_679_808
    assert len(encoder.vision_tower.state_dict()) == 329
    assert len(encoder.multi_modal_projector.state_dict()) == 6
