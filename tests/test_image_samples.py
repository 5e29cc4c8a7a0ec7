"""Samples of every depth and meaning: the file's facts decide their level, or the file is refused by name."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from kimivl_lab.images.loading import ImageError, load_image
from kimivl_lab.images.opening import is_undecoded
from kimivl_lab.images.processor import KimiVLImageProcessor
from tests.image_files import opened, png, tiff
from tests.image_oracle import assert_same, noise, oracle

processor = KimiVLImageProcessor()
random = np.random.default_rng(0)
GREY = random.integers(0, 65536, (30, 41)).astype(np.uint16)
GREY[0, :6] = 0, 65535, 128, 129, 255, 256
COLOUR = random.integers(0, 65536, (30, 41, 3)).astype(np.uint16)
COLOUR[0, :6] = GREY[0, :6, None]
WITH_ALPHA = np.concatenate((COLOUR, random.integers(0, 65536, (30, 41, 1)).astype(np.uint16)), axis=2)


def level(samples, largest):
    """round(255 * sample / largest): the one rule."""
    return np.rint(samples.astype(np.float64) * 255 / largest).astype(np.uint8)


def assert_file_gives(tmp_path, content: bytes, levels: np.ndarray, **options):
    """The file, as a path and as an image that the caller has opened, twice each, gives these 8-bit levels."""
    path = tmp_path / "file"
    path.write_bytes(content)
    mode = {2: "L", 3: "RGB"}.get(levels.ndim, "RGB")
    wanted = Image.fromarray(levels)
    lazy, from_path = opened(content), Image.open(path)
    for source in (path, lazy, lazy, from_path, from_path):
        for limit in (4096, 4):
            assert_same(processor(source, in_token_limit=limit, **options), *oracle([wanted], limit))
    assert wanted.mode == mode or wanted.mode in ("LA", "RGBA")


def assert_refused(tmp_path, content: bytes, words: str):
    path = tmp_path / "file"
    path.write_bytes(content)
    for source in (path, opened(content)):
        with pytest.raises(ImageError, match=rf"^image 0 .*{words}"):
            processor(source)


# Grey


@pytest.mark.parametrize("deflate", [False, True])
@pytest.mark.parametrize("white_is_zero", [0, 1])
def test_16_bit_tiff_follows_its_photometric_tag(tmp_path, white_is_zero, deflate):
    stored = 65535 - GREY if white_is_zero else GREY
    content = tiff(stored, [(262, [1 - white_is_zero])], deflate=deflate)
    assert_file_gives(tmp_path, content, level(GREY, 65535))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("white_is_zero", [0, 1])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("deflate", [False, True])
def test_shallow_tiff_follows_its_photometric_tag(tmp_path, bits, white_is_zero, order, deflate):
    samples = (GREY >> (16 - bits)).astype(np.uint8)
    stored = 2**bits - 1 - samples if white_is_zero else samples
    content = tiff(stored, [(262, [1 - white_is_zero])], bits=bits, order=order, deflate=deflate)
    assert_file_gives(tmp_path, content, level(samples, 2**bits - 1))


def test_12_bit_tiff_is_scaled_by_12_bits(tmp_path):
    samples = GREY[:, :40] >> 4
    assert_file_gives(tmp_path, tiff(samples, bits=12), level(samples, 4095))


@pytest.mark.parametrize("white_is_zero", [0, 1])
@pytest.mark.parametrize("order", ["<", ">"])
def test_float_tiff_follows_its_photometric_tag(tmp_path, white_is_zero, order):
    unit = (GREY / 65535).astype(np.float32)
    content = tiff(1 - unit if white_is_zero else unit, [(262, [1 - white_is_zero]), (339, [3])], order=order)
    want = level(unit, 1)
    assert_file_gives(tmp_path, content, 255 - level(1 - unit, 1) if white_is_zero else want)
    if white_is_zero:
        assert np.abs((255 - level(1 - unit, 1)).astype(int) - want).max() <= 1


@pytest.mark.parametrize("maximum", [15, 300, 1000, 1023, 4095, 65534])
@pytest.mark.parametrize("plain", [False, True])
def test_pgm_is_scaled_by_its_maximum(tmp_path, maximum, plain):
    samples = GREY % (maximum + 1)
    if plain:
        body = b"P2 41 30 %d\n" % maximum + " ".join(map(str, samples.ravel())).encode()
    else:
        body = b"P5 41 30 %d\n" % maximum + samples.astype(">u2" if maximum > 255 else np.uint8).tobytes()
    assert_file_gives(tmp_path, body, level(samples, maximum))


@pytest.mark.parametrize("maximum", [15, 255, 1023, 65535])
def test_ppm_is_scaled_by_its_maximum(tmp_path, maximum):
    samples = COLOUR % (maximum + 1) if maximum < 65535 else COLOUR
    body = b"P6 41 30 %d\n" % maximum + samples.astype(">u2" if maximum > 255 else np.uint8).tobytes()
    assert_file_gives(tmp_path, body, level(samples, maximum))


def test_pfm_in_0_to_1(tmp_path):
    unit = (GREY / 65535).astype("<f4")
    assert_file_gives(tmp_path, b"Pf 41 30 -1.0\n" + unit[::-1].tobytes(), level(unit, 1))
    assert_refused(tmp_path, b"Pf 41 30 -2.5\n" + unit[::-1].tobytes(), r"scale .* 2\.5")
    assert_refused(tmp_path, b"Pf 41 30 -1.0\n" + (2 * unit).tobytes(), r"0\.\.1")


# Colour


def test_16_bit_colour_is_rounded_as_16_bit_grey_is(tmp_path):
    grey = np.repeat(GREY[..., None], 3, axis=2)
    assert_file_gives(tmp_path, png(GREY, 16, 0), level(GREY, 65535))
    assert_file_gives(tmp_path, png(grey, 16, 2), level(grey, 65535))
    assert np.array_equal(level(grey, 65535)[0, :6, 0], [0, 255, 0, 1, 1, 1])


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("deflate", [False, True])
def test_16_bit_colour_tiff(tmp_path, order, deflate):
    assert_file_gives(tmp_path, tiff(COLOUR, order=order, deflate=deflate), level(COLOUR, 65535))
    with_alpha = tiff(WITH_ALPHA, [(338, [2])], order=order, deflate=deflate)
    assert_file_gives(tmp_path, with_alpha, level(WITH_ALPHA, 65535))
    without = tiff(WITH_ALPHA, [(338, [0])], order=order, deflate=deflate)
    assert_file_gives(tmp_path, without, level(COLOUR, 65535))


def test_16_bit_cmyk_tiff(tmp_path):
    content = tiff(WITH_ALPHA, [(262, [5])])
    twin = Image.frombytes("CMYK", (41, 30), level(WITH_ALPHA, 65535).tobytes()).convert("RGB")
    assert_file_gives(tmp_path, content, np.array(twin))


@pytest.mark.parametrize("alpha", ["drop", (255, 255, 255), (1, 2, 3)])
def test_16_bit_png_with_alpha(tmp_path, alpha):
    for samples, colour in ((WITH_ALPHA, 6), (WITH_ALPHA[..., 2:], 4)):
        content = png(samples, 16, colour)
        twin = Image.fromarray(level(samples, 65535))
        (tmp_path / "file").write_bytes(content)
        for source in (tmp_path / "file", opened(content)):
            for limit in (4096, 4):
                wanted = processor(twin, alpha=alpha, in_token_limit=limit)
                assert torch.equal(
                    processor(source, alpha=alpha, in_token_limit=limit).pixel_values, wanted.pixel_values
                )


def test_a_callers_16_bit_image_is_left_undecoded():
    image = opened(png(COLOUR, 16, 2))
    image.info["comment"] = "kept"
    processor(image)
    assert is_undecoded(image) and image.info == {"comment": "kept"}
    assert np.array_equal(np.array(image), COLOUR >> 8)  # Pillow's own rule, which the caller then sees


@pytest.mark.parametrize("depth", [8, 16])
def test_a_16_bit_png_is_turned_by_its_exif(depth):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(level(COLOUR, 65535)).save(file, "PNG", exif=exif)
    body = file.getvalue()
    start = body.index(b"eXIf") - 4
    exif_chunk = body[start : start + 12 + int.from_bytes(body[start : start + 4], "big")]
    samples = COLOUR if depth == 16 else level(COLOUR, 65535)
    content = png(samples, depth, 2, before=exif_chunk)
    upright = level(COLOUR, 65535)[::-1].swapaxes(0, 1)
    assert np.array_equal(np.array(load_image(opened(content))), upright)


# Transparent colours


@pytest.mark.parametrize("alpha", ["drop", (255, 255, 255), (9, 200, 30)])
@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_grey_png_with_a_transparent_level(tmp_path, depth, which, alpha):
    samples = GREY >> (16 - depth)
    key = {0: 0, 1: 1, -1: 2**depth - 1}[which]
    samples[10:20, 10:30] = key
    assert_twin(tmp_path, png(samples, depth, 0, (key,)), level(samples, 2**depth - 1), samples == key, alpha)


@pytest.mark.parametrize("alpha", ["drop", (255, 255, 255), (9, 200, 30)])
@pytest.mark.parametrize("depth", [8, 16])
def test_colour_png_with_a_transparent_colour(tmp_path, depth, alpha):
    samples = COLOUR >> (16 - depth)
    key = (1000 >> (16 - depth), 30000 >> (16 - depth), 2)
    samples[10:20, 10:30] = key
    samples[10, 10] = (key[0], key[1], 3)  # the same in its high byte, and opaque
    clear = (samples == key).all(axis=2)
    assert clear.sum() == 199
    assert_twin(tmp_path, png(samples, depth, 2, key), level(samples, 2**depth - 1), clear, alpha)


def assert_twin(tmp_path, content, levels, clear, alpha):
    twin = Image.fromarray(levels)
    twin.putalpha(Image.fromarray(np.where(clear, 0, 255).astype(np.uint8)))
    (tmp_path / "file").write_bytes(content)
    lazy = opened(content)
    for source in (tmp_path / "file", lazy, lazy):
        for limit in (4096, 4):
            got, want = (processor(one, alpha=alpha, in_token_limit=limit) for one in (source, twin))
            assert torch.equal(got.pixel_values, want.pixel_values)


def test_what_decoding_lost_is_refused():
    """The caller's decoded image does not tell in which scale its transparent colour stands."""
    for content in (
        png(GREY >> 14, 2, 0, (1,)),
        png(GREY >> 12, 4, 0, (3,)),
        png(COLOUR, 16, 2, (1000, 30000, 2)),
    ):
        image = opened(content)
        image.load()
        with pytest.raises(ImageError, match="give the path"):
            processor(image)
        processor(image.convert("RGB"))
    eight = opened(png(GREY >> 8, 8, 0, (3,)))
    eight.load()
    assert_same(processor(eight), *oracle([opened(png(GREY >> 8, 8, 0, (3,))).convert("RGBA")]))


# Refused by name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (tiff((GREY >> 8).astype(np.uint8), [(339, [2])]), "SampleFormat.*2"),
        (tiff(GREY, [(339, [2])]), "SampleFormat.*2"),
        (tiff(GREY.astype(np.uint32)), "range of mode I"),
        (tiff(GREY >> 4, [(281, [4095])]), "MaxSampleValue.* 4095, expected 65535"),
        (tiff(GREY, [(280, [200])]), "MinSampleValue.* 200, expected 0"),
        (tiff((GREY >> 8).astype(np.uint8), [(281, [200])]), "MaxSampleValue.* 200, expected 255"),
        (tiff((GREY / 65535).astype(np.float32), [(339, [3]), (341, [0.5])]), "SMaxSampleValue.*expected 1"),
        (tiff((COLOUR >> 8).astype(np.uint8), [(532, [16.0, 235.0] * 3)]), "ReferenceBlackWhite"),
        (tiff(COLOUR.transpose(2, 0, 1).reshape(30, 41, 3), [(284, [2])]), "separate planes|not an image|truncated"),
        (tiff(WITH_ALPHA, [(338, [1])]), "premultiplied"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tiff_of_another_range_or_sign_is_refused(tmp_path, content, words):
    assert_refused(tmp_path, content, words)


def test_tags_that_state_the_full_range_are_accepted(tmp_path):
    tags = [(280, [0]), (281, [65535]), (339, [1])]
    assert_file_gives(tmp_path, tiff(GREY, tags), level(GREY, 65535))
    eight = (COLOUR >> 8).astype(np.uint8)
    tags = [(280, [0] * 3), (281, [255] * 3), (339, [1] * 3), (532, [0.0, 255.0] * 3)]
    assert_file_gives(tmp_path, tiff(eight, tags), eight)


def jpeg2000(mode: str, bits: int | None = None, signed: bool = False) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(GREY) if mode == "I;16" else noise(41, 30, mode)
    image.save(file, "JPEG2000", no_jp2=bits is not None)
    content = bytearray(file.getvalue())
    if bits is not None:
        start = content.index(b"\xff\x4f\xff\x51") + 42
        for channel in range({"I;16": 1, "L": 1, "RGB": 3}[mode]):
            content[start + 3 * channel] = bits - 1 + 128 * signed
    return bytes(content)


def test_jpeg2000_of_8_bits_and_of_16_bit_grey(tmp_path):
    assert_file_gives(tmp_path, jpeg2000("I;16"), level(GREY, 65535))
    for mode in ("L", "RGB"):
        assert_file_gives(tmp_path, jpeg2000(mode), np.array(noise(41, 30, mode)))


@pytest.mark.parametrize(
    ("mode", "bits", "signed"),
    [("L", 4, False), ("I;16", 12, False), ("RGB", 10, False), ("RGB", 16, False), ("L", 8, True)],
)
def test_jpeg2000_of_other_depths_is_refused_by_name(tmp_path, mode, bits, signed):
    assert_refused(tmp_path, jpeg2000(mode, bits, signed), f"JPEG 2000.*{bits} bits{', signed' if signed else ''}")
