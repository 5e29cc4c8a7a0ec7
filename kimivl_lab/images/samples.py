"""Samples of any depth -> 8 bits, by the range that the file or the dtype states.

One rule for grey, colour and arrays: level = round(255 * sample / largest), so 16-bit sample 129 gives level 1. Pillow
alone cuts 16-bit colour to its high byte (129 gives 0), and its mode does not hold every fact that the file states. The
facts are read here: white is zero, 12 bits in 16, a transparent colour in samples of 2, 4 and 16 bits. A file whose
samples mean something else (signed, another range) is refused by that name.

An image that the caller has decoded already is what Pillow made of it: 16-bit colour is then cut.

Sources: TIFF 6.0, sections 3 to 8 and 19; PNG, 11.3.2.1 (tRNS); JPEG 2000 part 1, A.5.1 (SIZ).

Test: tests/test_image_samples.py, tests/test_fuzz_images.py.
"""

import struct
import sys
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from .opening import file_bytes, is_undecoded, reopen_image

_SCALED_TO_16_BITS = ("PNG", "PPM")  # formats that Pillow opens as mode I with the range 0..65535
_OTHER_BYTE = {";16B": ";16L", ";16L": ";16B", ";16N": ";16B" if sys.byteorder == "little" else ";16L"}

# Tags of TIFF, by number
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLES, _PLANAR, _SAMPLE_FORMAT, _BLACK_WHITE = 258, 262, 277, 284, 339, 532
_STATED_RANGE = {280: "MinSampleValue", 281: "MaxSampleValue", 340: "SMinSampleValue", 341: "SMaxSampleValue"}
_UNSIGNED, _FLOAT = 1, 3  # SampleFormat


def to_uint8(values: np.ndarray, largest: int = 65535) -> np.ndarray:
    """Any accepted dtype -> uint8 by its known range, rounded to nearest; ValueError outside of it.

    Args:
        largest: the sample of uint16 `values` that is white.
    """
    kind = values.dtype.kind
    if values.dtype == np.uint8:
        return values
    if kind == "b":
        return values * np.uint8(255)
    if values.dtype.newbyteorder("=") == np.uint16:
        return ((values.astype(np.uint32) * 510 + largest) // (2 * largest)).astype(np.uint8)
    if kind not in "iuf":
        raise ValueError(f"dtype {values.dtype} is not an image's: give uint8, uint16, bool, or float in 0..1")
    low, high = values.min(), values.max()
    limit = 1 if kind == "f" else 255
    if not (low >= 0 and high <= limit):  # a NaN fails too
        raise ValueError(
            f"{values.dtype} values must lie in 0..{limit}, got {low} to {high}: "
            f"scale them, or give uint8 (0..255) or uint16 (0..65535)"
        )
    if kind == "f":
        values = np.rint(values.astype(np.promote_types(values.dtype, np.float32)) * 255)
    return values.astype(np.uint8)


def eight_bit_image(image: Image.Image) -> Image.Image:
    """The decoded image with 8-bit samples, not turned; its `info` holds what `image.info` holds.

    `image` is decoded in place where Pillow's own result is right; else a copy of its file is decoded.

    Raises:
        ValueError: samples whose meaning is not known; the message names it. OSError and others: a broken file.
    """
    _require_plain_samples(image)
    rawmode = _rawmode(image)
    if rawmode.endswith(tuple(_OTHER_BYTE)) and image.mode in ("RGB", "RGBA", "CMYK"):
        return _deep_colour_to_8_bit(image, rawmode)
    if image.format == "PNG" and image.info.get("transparency") is not None:
        image = _with_scaled_key(image, rawmode)
    _load(image)
    if image.mode == "F" or image.mode.startswith("I"):
        return _deep_grey_to_8_bit(image)
    return image


def _rawmode(image: Any) -> str:
    """How the file holds the samples, in Pillow's words: "RGB;16B". Empty for a decoded image."""
    args = image.tile[0].args if getattr(image, "tile", None) else ""
    return args if isinstance(args, str) else str(args[0]) if isinstance(args, tuple) and args else ""


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except ValueError:  # a text chunk behind the pixels that is too large
        if image.format != "PNG" or is_undecoded(image):
            raise


def _require_plain_samples(image: Any) -> None:
    """ValueError for a file whose samples have another range or sign than Pillow's mode shows."""
    if image.format == "TIFF" and hasattr(image, "tag_v2"):
        _require_plain_tiff(image)
    elif image.format == "PPM" and image.mode == "F" and image.info.get("scale", 1) != 1:
        raise ValueError(f"the scale of this PFM file is {image.info['scale']}, and only 1 has a known range")
    elif image.format == "JPEG2000" and is_undecoded(image):
        _require_plain_jpeg2000(file_bytes(image))


def _require_plain_jpeg2000(content: bytes) -> None:
    start = content.find(b"\xff\x4f\xff\x51")  # the marker of the image's size, in a codestream and inside a JP2
    if start < 0 or len(content) < start + 42:
        return  # broken; the decoder says so
    (channels,) = struct.unpack_from(">H", content, start + 40)
    samples = set(content[start + 42 : start + 42 + 3 * channels : 3])  # bits - 1, and 128 for a sign
    if not (samples <= {7} or (channels == 1 and samples == {15})):
        kinds = sorted(f"{(one & 127) + 1} bits{', signed' if one > 127 else ''}" for one in samples)
        raise ValueError(f"JPEG 2000 with samples of {kinds}: 8 bits and 16-bit grey, unsigned, are supported")


def _require_plain_tiff(image: Any) -> None:
    tags, bits = image.tag_v2, _bits_per_sample(image.tag_v2)
    signs = set(_numbers(tags.get(_SAMPLE_FORMAT, _UNSIGNED)))
    if not signs <= ({_FLOAT} if image.mode == "F" else {_UNSIGNED}):
        raise ValueError(f"TIFF with SampleFormat {sorted(signs)}: only unsigned samples and floats are supported")
    largest = 1 if image.mode == "F" else 2 ** max(bits) - 1
    for tag, name in _STATED_RANGE.items():
        wanted = largest if name.endswith("MaxSampleValue") else 0
        if tag in tags and (stated := set(_numbers(tags[tag]))) != {wanted}:
            shown = " and ".join(f"{number:g}" for number in sorted(stated))
            raise ValueError(f"TIFF with {name} {shown}, expected {wanted:g}: scale the samples to their full range")
    if _BLACK_WHITE in tags:
        black, white = set(_numbers(tags[_BLACK_WHITE])[::2]), set(_numbers(tags[_BLACK_WHITE])[1::2])
        if not (black <= {0, (largest + 1) // 2} and white == {largest}):
            raise ValueError(f"TIFF with ReferenceBlackWhite {tags[_BLACK_WHITE]}: only the full range is supported")
    if 16 in bits and tags.get(_SAMPLES, 1) > 1 and tags.get(_PLANAR, 1) != 1:
        raise ValueError("TIFF with 16-bit colour in separate planes: only interleaved samples are supported")


def _bits_per_sample(tags: Any) -> set[float]:
    return set(_numbers(tags.get(_BITS_PER_SAMPLE, 1))[: tags.get(_SAMPLES, 1)])  # more are ignored, as Pillow does


def _numbers(tag: Any) -> tuple[float, ...]:
    return tuple(float(number) for number in (tag if isinstance(tag, tuple) else (tag,)))


def _with_scaled_key(image: Any, rawmode: str) -> Image.Image:
    """The image with its transparent colour in the samples' scale: Pillow scales 2-bit and 4-bit samples only."""
    key = image.info["transparency"]
    if image.mode == "RGB" and rawmode == "" and max(key) > 255:
        raise ValueError("16-bit colour with a transparent colour was cut to 8 bits: give the path, or an RGBA image")
    if image.mode != "L":
        return image
    steps = {"L;2": 85, "L;4": 17}  # from one level to the next
    if step := steps.get(rawmode):
        image = reopen_image(image)
        image.info["transparency"] = (key & (255 // step)) * step
    elif not rawmode and key and any(key * step <= 255 and not (np.asarray(image) % step).any() for step in (85, 17)):
        raise ValueError("2-bit, 4-bit or 8-bit grey with a transparent level: give the path, or an LA image")
    return image


def _deep_colour_to_8_bit(image: Any, rawmode: str) -> Image.Image:
    """Decodes twice, once for the high bytes of the samples and once for the low bytes."""
    if image.format == "PNG" and image.tell():
        raise ValueError("16-bit colour in a later frame of an animation is not supported")
    if rawmode.startswith("RGBa"):
        raise ValueError("16-bit colour with premultiplied alpha is not supported")
    first = reopen_image(image)
    if rawmode == "LA;16B":
        _set_rawmode(first, "RGBA")  # high and low byte of grey, then of alpha
        mode, values = "LA", np.asarray(first).view(">u2")
    else:
        second = reopen_image(image)
        _set_rawmode(second, rawmode[:-4] + _OTHER_BYTE[rawmode[-4:]])
        mode, values = first.mode, np.asarray(first).astype(np.uint16) * 256 + np.asarray(second)
    levels = Image.frombytes(mode, first.size, to_uint8(values).tobytes())
    if (key := first.info.pop("transparency", None)) is not None:
        levels.putalpha(Image.fromarray((values != key).any(axis=-1) * np.uint8(255)))
    levels.info = first.info
    return levels


def _set_rawmode(image: ImageFile.ImageFile, rawmode: str) -> None:
    image.tile = [
        tile._replace(args=rawmode if isinstance(tile.args, str) else (rawmode, *tile.args[1:]))  # ty: ignore
        for tile in image.tile
    ]


def _deep_grey_to_8_bit(image: Any) -> Image.Image:
    values, largest, white_is_zero = np.asarray(image), 65535, False
    if image.format == "TIFF" and hasattr(image, "tag_v2"):
        white_is_zero = image.tag_v2.get(_PHOTOMETRIC) == 0
        if _bits_per_sample(image.tag_v2) == {12}:
            largest = 4095
    if image.mode == "I":
        if image.format not in _SCALED_TO_16_BITS:
            raise ValueError("the range of mode I (32-bit integers) is not known: convert it to I;16 or L first")
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"16-bit grey must lie in 0..65535, got {values.min()} to {values.max()}")
        values = values.astype(np.uint16)
    levels = to_uint8(values, largest)
    grey = Image.fromarray(255 - levels if white_is_zero else levels)
    if isinstance(transparent := image.info.get("transparency"), int):
        grey.putalpha(Image.fromarray((values != transparent) * np.uint8(255)))
    grey.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return grey
