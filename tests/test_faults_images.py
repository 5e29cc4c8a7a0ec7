"""Faults that image processors have had in public, one test or more a kind (rows A and B)."""

import io
import json
import struct
import subprocess
import tarfile
import traceback
import warnings
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageSequence
from transformers.image_utils import ChannelDimension

from kimivl_lab.geometry import image_geometry
from kimivl_lab.images.files import image_sizes
from kimivl_lab.images.loading import MAX_IMAGE_PIXELS, ImageError, load_image
from kimivl_lab.images.opening import IMAGE_FORMATS
from kimivl_lab.images.processor import KimiVLImageProcessor
from tests.image_files import chunk, png, tiff
from tests.image_oracle import assert_same, noise, oracle, see_through

processor = KimiVLImageProcessor()
LIMIT = 20  # small pictures are resized at this limit


def grid(image, **options):
    return tuple(processor(image, **options).image_grid_hws[0].tolist())


def encoded(image: Image.Image, file_format: str, **options) -> Image.Image:
    """The picture saved and opened again, as a file of that format."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return Image.open(io.BytesIO(file.getvalue()))


def png_header(width: int, height: int) -> bytes:
    """A PNG that ends after its header: only its size can be read."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = b"IDAT"
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + body
        + struct.pack(">I", zlib.crc32(body))
        + struct.pack(">I", 0)
        + end
        + struct.pack(">I", zlib.crc32(end))
    )


def assert_equal_outputs(left, right, **options):
    """Two pictures give the same, bit for bit, as they are and resized."""
    for limit in (4096, LIMIT):
        first, second = (processor(image, in_token_limit=limit, **options) for image in (left, right))
        assert first.image_grid_hws.tolist() == second.image_grid_hws.tolist()
        assert torch.equal(first.pixel_values, second.pixel_values), f"differ at limit {limit}"


# A. Resize and geometry


def test_A1_padding_follows_the_limit():
    assert grid(Image.new("L", (1000, 1000))) == (66, 66)
    assert processor.get_number_of_image_patches(1000, 1000) == 4356


@pytest.mark.parametrize("size", [(31, 639), (1, 3000), (3000, 1), (639, 31)])
@pytest.mark.parametrize("limit", [1, 2, 4096])
def test_A2_no_side_is_resized_to_nothing(size, limit):
    image = noise(*size)
    assert min(grid(image, in_token_limit=limit)) >= 2
    assert_same(processor(image, in_token_limit=limit), *oracle([image], limit))


@pytest.mark.parametrize(("size", "wanted"), [((1, 1), (2, 2)), ((26, 28), (2, 2)), ((27, 332), (24, 2))])
def test_A3_small_sides_are_padded(size, wanted):
    image = noise(*size)
    assert grid(image) == wanted
    assert_same(processor(image), *oracle([image]))


@pytest.mark.parametrize(
    ("shape", "last", "first"),
    [
        ((1, 1, 3), (2, 2), (2, 2)),
        ((3, 500, 3), (2, 36), (36, 2)),
        ((3, 3, 3), (2, 2), (2, 2)),
        ((1, 300, 3), (2, 22), (22, 2)),
        ((3, 40, 1), (2, 4), (4, 2)),
    ],
)
@pytest.mark.parametrize("form", [np.asarray, torch.from_numpy])
def test_A4_the_channel_axis_is_stated_or_refused(shape, last, first, form):
    array = form(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    with pytest.raises(ImageError, match=r"image 0 .*input_data_format='channels_last' or 'channels_first'"):
        processor(array)
    assert grid(array, input_data_format="channels_last") == last
    assert grid(array, input_data_format=ChannelDimension.LAST) == last
    assert grid(array, input_data_format="channels_first") == first
    turned = processor(array.swapaxes(0, 2).swapaxes(1, 2), input_data_format="channels_first")  # (C, H, W)
    assert torch.equal(processor(array, input_data_format="channels_last").pixel_values, turned.pixel_values)


def test_A4_two_dimensions_are_grey_and_need_no_layout():
    image = noise(3, 50, "L")
    assert_equal_outputs(np.array(image), image)


def test_A6_tensors_are_resized_as_pictures_are():
    image = noise(200, 150)
    levels = processor(torch.from_numpy(np.array(image)), input_data_format="channels_last", in_token_limit=LIMIT)
    assert_same(levels, *oracle([image], LIMIT))
    edge = Image.fromarray(np.kron([[0, 255] * 30, [255, 0] * 30] * 20, np.ones((3, 3))).astype(np.uint8))
    resized = processor(edge, in_token_limit=LIMIT).pixel_values
    assert resized.min() == -1 and resized.max() == 1  # bicubic overshoot is clamped


@pytest.mark.parametrize("size", [(640, 480), (1000, 1000), (31, 639), (1, 1), (153, 673)])
@pytest.mark.parametrize("options", [{}, {"in_token_limit": 50}, {"merge_kernel_size": [4, 4]}])
def test_A8_the_count_is_what_processing_gives(size, options):
    width, height = size
    batch = processor(Image.new("L", size), **options)
    count = processor.get_number_of_image_patches(height, width, options)
    assert count == len(batch.pixel_values) == int(batch.image_grid_hws.prod())
    assert count == image_geometry(width, height, **options).patches


def test_A10_a_header_is_judged_before_anything_is_decoded(tmp_path, monkeypatch):
    def load(self):
        raise AssertionError("decoded")

    noise(30, 30).save(tmp_path / "fine.png")
    (tmp_path / "huge.png").write_bytes(png_header(12000, 12000))
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    bound = MAX_IMAGE_PIXELS
    refusal = pytest.raises(ImageError, match=rf"^image 1 \({tmp_path}/huge.png\): 12000x12000 .*144000000.* {bound}$")
    with warnings.catch_warnings(action="error"), refusal:  # nor does Pillow's own warning come through
        processor([tmp_path / "fine.png", tmp_path / "huge.png"])
    with pytest.raises(ImageError, match=rf"12000x12000.*{bound}"), pytest.warns(Image.DecompressionBombWarning):
        processor(Image.open(tmp_path / "huge.png"))
    with pytest.raises(ImageError, match=r"fine.png\): 30x30 .*900 pixels, max_image_pixels is 899"):
        processor(tmp_path / "fine.png", max_image_pixels=899)


@pytest.mark.parametrize("size", [(20000, 28), (28, 20000), (7154, 28)])
def test_A10_an_impossible_grid_is_refused_from_the_header(tmp_path, size):
    (tmp_path / "long.png").write_bytes(png_header(*size))
    with pytest.raises(ImageError, match=rf"image 0 \(.*long.png\): image {size[0]}x{size[1]} .*below 512"):
        processor([tmp_path / "long.png"])


def test_A10_beyond_pillows_own_limit_the_file_is_named(tmp_path):
    (tmp_path / "vast.png").write_bytes(png_header(20000, 20000))
    with pytest.raises(ImageError, match=r"^image 0 \(.*vast.png\): .*400000000.*max_image_pixels is 10$"):
        processor(tmp_path / "vast.png", max_image_pixels=10)


def test_A10_a_large_photograph_is_legal_and_pillows_limit_is_left_alone(tmp_path):
    before = Image.MAX_IMAGE_PIXELS
    Image.new("L", (8000, 6000), 100).save(tmp_path / "large.jpg")
    assert grid(tmp_path / "large.jpg") == image_geometry(8000, 6000).grid_hw
    assert before == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, torch.bfloat16])
def test_A11_floats_in_0_to_1_are_the_uint8_picture(dtype):
    levels = np.array(noise(40, 35))
    if isinstance(dtype, torch.dtype):
        levels = levels // 2 * 2  # bfloat16 holds 8 bits of each
        levels = np.where(levels > 127, levels // 4 * 4, levels)
        unit = (torch.from_numpy(levels).double() / 255).to(dtype)
        levels = np.rint(unit.float().numpy() * 255).astype(np.uint8)
    else:
        unit = (levels / 255).astype(dtype)
    assert_equal_outputs(unit, Image.fromarray(levels), input_data_format="channels_last")


@pytest.mark.parametrize("low_high", [(0.0, 255.0), (-1.0, 1.0), (0.0, 1.01), (0.0, np.nan), (0.0, np.inf)])
def test_A11_other_floats_are_refused_with_their_range(low_high):
    array = np.linspace(0, 1, 30 * 30 * 3, dtype=np.float32).reshape(30, 30, 3)
    array[0, 0, :2] = low_high
    with pytest.raises(ImageError, match=r"image 0 .*float32 values must lie in 0..1, got .*uint8"):
        processor(array, input_data_format="channels_last")


@pytest.mark.parametrize(("low", "high"), [(-1, 200), (0, 256), (0, 32767)])
@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint64])
def test_A11_wide_integers_must_hold_levels(low, high, dtype):
    low = max(low, np.iinfo(dtype).min)
    high = max(high, 256) if low == 0 else high
    array = np.full((20, 20), 9, dtype=dtype)
    assert_equal_outputs(array, array.astype(np.uint8))
    array[3, 3], array[4, 4] = low, high
    with pytest.raises(ImageError, match=f"0..255, got {low} to {high}"):
        processor(array)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_A13_padding_is_minus_one(mode):
    bright = Image.new("RGBA", (15, 29), (255, 255, 255, 255)).convert(mode)
    batch = processor(bright)
    canvas = batch.pixel_values.view(4, 2, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(3, 56, 28)
    assert (canvas[:, :29, :15] == 1).all()
    assert (canvas[:, 29:] == -1).all() and (canvas[:, :, 15:] == -1).all()
    levels = processor(bright, return_uint8=True).pixel_values
    assert torch.equal(levels == 0, batch.pixel_values == -1)


# B. Image modes


def test_B1_dropping_alpha_is_the_references():
    image = noise(150, 90, "RGBA")
    for limit in (4096, LIMIT):
        assert_same(processor(image, in_token_limit=limit), *oracle([image], limit))


def test_B1_a_colour_is_composited_before_the_resize():
    image = noise(150, 90, "RGBA")
    colour = (255, 240, 10)
    share = np.array(image)[..., 3:] / 255
    mixed = np.array(image)[..., :3] * share + np.array(colour) * (1 - share)
    twin = Image.alpha_composite(Image.new("RGBA", image.size, (*colour, 255)), image).convert("RGB")
    assert np.abs(np.array(twin) - mixed).max() <= 1
    assert_equal_outputs(image, twin, alpha=colour)
    assert not torch.equal(processor(image).pixel_values, processor(image, alpha=colour).pixel_values)


@pytest.mark.parametrize("alpha", ["drop", (255, 255, 255), [0, 128, 255]])
def test_B1_opaque_pictures_are_unchanged_by_the_policy(alpha):
    image = noise(150, 90)
    wanted = {limit: processor(image, in_token_limit=limit) for limit in (4096, LIMIT)}
    for opaque in (image, image.convert("RGBA"), image.convert("RGBa")):
        for limit, batch in wanted.items():
            got = processor(opaque, in_token_limit=limit, alpha=alpha)
            assert torch.equal(got.pixel_values, batch.pixel_values)


def transparent_twins() -> dict[str, Image.Image]:
    """One picture of three flat colours and clear areas, in every way that a file or PIL can hold it."""
    rgba = see_through(120, 90)
    palette = rgba.convert("RGB").quantize(colors=8, dither=Image.Dither.NONE)
    clear = int(np.array(palette)[np.array(rgba)[..., 3] == 0][0])
    with_palette_alpha = palette.convert("PA")
    with_palette_alpha.putalpha(rgba.getchannel("A"))
    return {
        "RGBA file": encoded(rgba, "PNG"),
        "RGBA webp": encoded(rgba, "WEBP", lossless=True, exact=True),
        "PA": with_palette_alpha,
        "P with transparency": encoded(palette, "PNG", transparency=clear),
        "RGB with tRNS": encoded(rgba.convert("RGB"), "PNG", transparency=(7, 77, 177)),
    }


@pytest.mark.parametrize("alpha", ["drop", (255, 255, 255), (1, 2, 3)])
@pytest.mark.parametrize("name", transparent_twins())
def test_B2_every_kind_of_transparency_follows_one_policy(name, alpha):
    twin = transparent_twins()[name]
    assert twin.has_transparency_data
    assert_equal_outputs(twin, see_through(120, 90), alpha=alpha)


@pytest.mark.parametrize("alpha", ["drop", (255, 255, 255), (1, 2, 3)])
def test_B2_grey_transparency_follows_the_same_policy(alpha):
    levels = np.array(see_through(120, 90))[..., [0, 3]]
    grey = Image.fromarray(levels)
    rgba = grey.convert("RGBA")
    tagged = encoded(Image.fromarray(levels[..., 0]), "PNG", transparency=7)
    deep = encoded(Image.fromarray(levels[..., 0].astype(np.uint16) * 257), "PNG", transparency=7 * 257)
    assert (grey.mode, tagged.mode, deep.mode) == ("LA", "L", "I;16")
    for image in (grey, tagged, deep):
        assert_equal_outputs(image, rgba, alpha=alpha)
    half = noise(60, 50, "LA").convert("La")
    assert_equal_outputs(half, half.convert("LA"), alpha=alpha)


def test_B3_16_bit_grey_is_scaled_by_its_range(tmp_path):
    deep = np.random.default_rng(0).integers(0, 65536, (60, 50)).astype(np.uint16)
    deep[0, :4] = 0, 65535, 128, 129  # 129 / 257 rounds up
    levels = np.rint(deep / 257).astype(np.uint8)
    assert levels[0, :4].tolist() == [0, 255, 0, 1]
    wanted = Image.fromarray(levels)
    tiff = Image.fromarray(deep.astype(">u2"))
    pgm = io.BytesIO(b"P5 50 60 65535\n" + deep.astype(">u2").tobytes())
    for image in (Image.fromarray(deep), encoded(Image.fromarray(deep), "PNG"), encoded(tiff, "TIFF"), Image.open(pgm)):
        assert image.mode.startswith("I")
        assert_equal_outputs(image, wanted)
    assert_equal_outputs(deep, wanted)
    assert_equal_outputs(deep.astype(">u2"), wanted)
    assert_equal_outputs(torch.from_numpy(deep), wanted)


def test_B3_32_bit_integers_have_no_known_range():
    for level in (0, 200, 40000, 10**6):
        with pytest.raises(ImageError, match="range of mode I "):
            processor(Image.new("I", (20, 20), level))


def test_B3_float_pictures_are_scaled_or_refused():
    levels = noise(50, 40, "L")
    unit = Image.fromarray(np.array(levels, dtype=np.float32) / 255)
    assert unit.mode == "F"
    assert_equal_outputs(unit, levels)
    with pytest.raises(ImageError, match=r"image 0 .*must lie in 0\.\.1, got .* to 2\d\d"):
        processor(levels.convert("F"))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "TIFF"])
def test_B4_orientation_is_applied_once(tmp_path, orientation, file_format):
    stored = noise(24, 16)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{file_format.lower()}"
    stored.save(path, exif=exif, lossless=True, exact=True)  # options of WebP; the others ignore them
    levels = np.array(stored)
    upright = {
        1: levels,
        2: levels[:, ::-1],
        3: levels[::-1, ::-1],
        4: levels[::-1],
        5: levels.swapaxes(0, 1),
        6: levels[::-1].swapaxes(0, 1),
        7: levels[::-1, ::-1].swapaxes(0, 1),
        8: levels[:, ::-1].swapaxes(0, 1),
    }[orientation]
    wanted = Image.fromarray(np.ascontiguousarray(upright))
    for _ in range(2):
        assert_same(processor(path), *oracle([wanted]))
    with Image.open(path) as image:
        assert_same(processor([image, image]), *oracle([wanted, wanted]))
        assert image.size == (24, 16) or file_format == "TIFF"  # Pillow itself turns a TIFF as it decodes


def test_B4_a_turned_jpeg_is_sized_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    noise(24, 16).save(tmp_path / "turned.jpg", exif=exif)
    assert load_image(tmp_path / "turned.jpg").size == (16, 24)
    noise(240, 16).save(tmp_path / "turned.jpg", exif=exif)
    assert grid(tmp_path / "turned.jpg") == (18, 2)


def test_B4_a_turned_picture_is_sized_upright_for_an_oblong_merge_kernel(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.jpg"
    Image.new("L", (7153, 14)).save(path, exif=exif)  # 511 patches wide as stored; 512 after padding to an even number
    with pytest.raises(ValueError, match="512"):
        image_geometry(7153, 14, merge_kernel_size=(1, 2))
    assert grid(path, merge_kernel_size=(1, 2)) == (511, 2)


def test_B4_unreadable_exif_counts_as_none(tmp_path):
    path = tmp_path / "broken.png"
    image = noise(24, 16)
    image.save(path, exif=b"Exif\x00\x00nonsense")
    assert_same(processor(path), *oracle([image]))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "LAB", "RGBX", "P", "1", "L"])
def test_B8_every_mode_equals_its_rgb_twin(mode):
    image = noise(150, 90)
    if mode == "P":
        image = image.quantize(colors=200)
    elif mode == "1":
        image = image.convert("1")
    else:
        image = image.convert(mode)
    assert image.mode == mode
    assert_equal_outputs(image, image.convert("RGB"))


def test_B8_files_of_other_modes_equal_their_rgb_twins(tmp_path):
    flat = noise(6, 5).resize((150, 90), Image.Resampling.NEAREST)
    for name, image in {"a.gif": flat.quantize(200), "b.png": flat.convert("1"), "c.jpg": flat.convert("CMYK")}.items():
        image.save(tmp_path / name)
        with Image.open(tmp_path / name) as opened:
            assert opened.mode in ("P", "1", "CMYK")
            assert_equal_outputs(tmp_path / name, opened.convert("RGB"))


def test_B8_booleans_are_a_1_bit_picture():
    image = noise(60, 50, "L").convert("1")
    assert_equal_outputs(np.array(image), image)
    assert set(processor(image).pixel_values.unique().tolist()) == {-1.0, 1.0}


# Files: which are opened, and what is said about them


@pytest.mark.parametrize("file_format", ["BMP", "PNG", "TIFF"])
def test_members_of_a_tar_file_are_read_one_after_the_other(tmp_path, file_format):
    """They share the position of one file."""
    images = [noise(60 + index, 50, seed=index) for index in range(24)]
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for index, image in enumerate(images):
            file = io.BytesIO()
            image.save(file, file_format)
            member = tarfile.TarInfo(f"{index}.{file_format.lower()}")
            member.size = len(file.getvalue())
            tar.addfile(member, io.BytesIO(file.getvalue()))
    for _ in range(3):
        with tarfile.open(tmp_path / "images.tar") as tar:
            files = [tar.extractfile(member) for member in tar]
            batch = processor([Image.open(file) for file in files if file], num_threads=4)
        assert_same(batch, *oracle(images))


def test_members_of_a_zip_file_beside_paths_and_arrays(tmp_path):
    images = [noise(60 + index, 50, seed=index) for index in range(12)]
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for index, image in enumerate(images):
            image.save(tmp_path / f"{index}.bmp")
            archive.write(tmp_path / f"{index}.bmp", f"{index}.bmp")
    archive = zipfile.ZipFile(tmp_path / "images.zip")
    sources = [
        (Image.open(archive.open(f"{index}.bmp")), tmp_path / f"{index}.bmp", np.array(image))[index % 3]
        for index, image in enumerate(images)
    ]
    batch = processor(sources, num_threads=4, input_data_format="channels_last")
    assert_same(batch, *oracle(images))


def test_one_file_object_behind_several_images():
    file = io.BytesIO()
    noise(90, 80).save(file, "PPM")
    lazy = [Image.open(file) for _ in range(8)]
    assert_same(processor(lazy, num_threads=4), *oracle([noise(90, 80)] * 8))


def gif_of(folder, count=3):
    frames = [noise(30, 30, seed=seed).quantize(64).convert("RGB") for seed in range(count)]
    frames[0].save(folder / "frames.gif", save_all=True, append_images=frames[1:])
    return folder / "frames.gif"


def test_one_object_for_several_frames_is_refused(tmp_path):
    path = gif_of(tmp_path)
    with Image.open(path) as gif, pytest.raises(ImageError, match=r"image 1 .*frame 2.*frame\.copy\(\)"):
        processor(list(ImageSequence.Iterator(gif)))
    with Image.open(path) as gif:
        copies = [frame.copy() for frame in ImageSequence.Iterator(gif)]
    assert_same(processor(copies), *oracle([copy.convert("RGB") for copy in copies]))
    for number, copy in enumerate(copies):
        with Image.open(path) as gif:
            gif.seek(number)
            assert_same(processor([gif]), *oracle([copy.convert("RGB")]))
    with Image.open(path) as gif:  # at the first frame nothing else can be meant
        assert_same(processor([gif, gif]), *oracle([copies[0].convert("RGB")] * 2))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 50 50\n%%EndComments\nshowpage\n"
WMF = b"\xd7\xcd\xc6\x9a\0\0" + struct.pack("<4hH", 0, 0, 50, 50, 72) + bytes(6) + b"\x01\x00\x09\x00"
GRIB = b"GRIB" + bytes(3) + b"\x01" + bytes(40)


@pytest.mark.parametrize("content", [EPS, WMF, GRIB, b"%PDF-1.4\n", b"SIMPLE  =  T" + b" " * 80])
def test_no_format_is_opened_that_starts_a_program(tmp_path, monkeypatch, content):
    """By any name, in every way in."""
    for start in ("Popen", "run", "call", "check_call", "check_output"):
        monkeypatch.setattr(subprocess, start, lambda *arguments, **options: pytest.fail(f"started {arguments}"))
    (tmp_path / "photo.jpg").write_bytes(content)
    with pytest.raises(ImageError, match="not an image"):
        processor(tmp_path / "photo.jpg")
    assert image_sizes([tmp_path / "photo.jpg"])[0] == []
    try:
        lazy = Image.open(tmp_path / "photo.jpg")
    except OSError:
        return
    with pytest.raises(ImageError, match=f"format {lazy.format} is not opened here"):
        processor(lazy)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"])
def test_every_format_of_the_list_is_opened(tmp_path, file_format):
    assert file_format in IMAGE_FORMATS and len(IMAGE_FORMATS) == 9
    noise(60, 40).save(tmp_path / "image", file_format)
    with Image.open(tmp_path / "image") as image:
        wanted = oracle([image.convert("RGB")])
    assert_same(processor(tmp_path / "image"), *wanted)
    assert image_sizes([tmp_path / "image"]) == ([(60, 40)], [], [])


@pytest.mark.parametrize(
    "text",
    ["data:image/png;base64," + "A" * 2_000_000, "iVBORw0KGgo" * 200_000, "A" * 300, "data:image/gif;base64,R0lGOD"],
    ids=len,
)
def test_base64_text_is_not_repeated(text):
    with pytest.raises(ImageError, match="only paths are read") as caught:
        processor([noise(9, 9), text])
    assert str(caught.value).startswith("image 1 (") and len(str(caught.value)) < 250
    assert len("".join(traceback.format_exception(caught.value))) < 10_000


def with_corrupt_tag() -> bytes:
    """A TIFF whose copyright is longer than the file, which Pillow warns of."""
    content = tiff(np.array(noise(30, 30)), [(33432, [1] * 5)])
    entry = struct.pack("<HHI", 33432, 3, 5)
    assert content.count(entry) == 1
    return content.replace(entry, struct.pack("<HHI", 33432, 3, 5_000_000))


@pytest.mark.parametrize("threads", [1, 3])
def test_warnings_name_the_image(tmp_path, threads):
    for name in ("a.tif", "b.tif"):
        (tmp_path / name).write_bytes(with_corrupt_tag())
    show = warnings.showwarning
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        processor([noise(9, 9), tmp_path / "a.tif", tmp_path / "b.tif"], num_threads=threads)
        warnings.warn("ours", stacklevel=1)
    messages = [str(warning.message) for warning in caught]
    assert messages.pop() == "ours"
    assert {message.partition("): ")[0] for message in messages} == {
        f"image 1 ({tmp_path / 'a.tif'}",
        f"image 2 ({tmp_path / 'b.tif'}",
    }
    assert warnings.showwarning is show
    with warnings.catch_warnings(action="error"), pytest.raises(ImageError, match=r"^image 0 .*a\.tif\): "):
        processor(tmp_path / "a.tif")


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_header_and_decoder_agree_about_too_much_text(tmp_path, kind, where):
    text = zlib.compress(b"x" * (2 << 20))
    body = b"Comment\0\0" + text if kind == b"zTXt" else b"Comment\0\1\0\0\0" + text
    image = noise(30, 30)
    before, after = (chunk(kind, body), b"") if where == "before" else (b"", chunk(kind, body))
    content = png(np.array(image), 8, 2, before=before, after=after)
    (tmp_path / "text.png").write_bytes(content)
    sizes, faults, _ = image_sizes([tmp_path / "text.png"])
    try:
        assert_same(processor(tmp_path / "text.png"), *oracle([image]))
    except ImageError as error:
        assert "too large" in str(error) and not sizes and "too large" in faults[0]
    else:
        assert sizes == [(30, 30)] and not faults


@pytest.mark.parametrize("count", [np.int64, np.uint8, np.array, torch.tensor])
def test_numpy_numbers_are_settings_sizes_and_limits(count):
    image = noise(90, 80, "RGBA")
    given = {
        "in_token_limit": count(9),
        "patch_size": count(14),
        "num_threads": count(2),
        "max_image_pixels": np.int64(90_000),
        "merge_kernel_size": np.array([2, 2]),
        "image_mean": np.array([0.25, 0.5, 0.5], dtype=np.float32),
        "image_std": np.array([0.5, 0.5, 2]),
        "alpha": np.array([9, 8, 7], dtype=np.uint8),
        "pad_input": np.True_,
    }
    plain = {"in_token_limit": 9, "image_mean": (0.25, 0.5, 0.5), "image_std": (0.5, 0.5, 2.0), "alpha": (9, 8, 7)}
    wanted = processor(image, **plain)
    assert torch.equal(processor(image, **given).pixel_values, wanted.pixel_values)
    kept = KimiVLImageProcessor(**given)
    assert torch.equal(kept(image).pixel_values, wanted.pixel_values)
    assert KimiVLImageProcessor.from_dict(json.loads(kept.to_json_string())).to_dict() == kept.to_dict()
    width, height = np.array([640, 480])
    assert image_geometry(width, height, in_token_limit=count(99)) == image_geometry(640, 480, in_token_limit=99)
    assert processor.get_number_of_image_patches(height, width) == 36 * 46


@pytest.mark.parametrize(
    "name", ["in_token_limit", "num_threads", "merge_kernel_size", "image_mean", "image_std", "alpha", "patch_size"]
)
def test_a_bool_is_no_number(name):
    value = {"merge_kernel_size": (2, True), "alpha": (True, 0, 0)}.get(name, (0.5, True, 0.5))
    with pytest.raises(ValueError, match=name):
        processor(noise(9, 9), **{name: True if name in ("in_token_limit", "num_threads", "patch_size") else value})
