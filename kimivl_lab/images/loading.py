"""Pictures as people hold them -> upright 8-bit PIL images of mode L, RGB or RGBA.

Sources: PIL images, paths, numpy arrays and torch tensors. Each is first looked at from its header (`image_size`), so
that a picture too large is refused before it is decoded, and only then loaded (`load_image`), in one order:

1. decode; of an animation, the frame the picture stands at (the first one of a file);
2. turn upright by the EXIF orientation, once (unreadable EXIF data counts as none);
3. bring to 8 bits by the known range: 16-bit integers / 65535, floats 0..1; anything else is refused, never clipped;
4. alpha. `alpha=(r, g, b)` composites the picture on that colour here, before any resize. `alpha="drop"` is the
   published processor's: transparency takes part in the resize (PIL weighs colours by it) and is dropped after it.
   Every kind of transparency (RGBA, LA, La, PA, a palette's, a PNG's tRNS) goes through RGBA, hence one policy.
5. palette, 1-bit, CMYK, YCbCr, LAB and HSV become L or RGB here, because PIL resizes palette indices and bits by
   nearest neighbour; L and RGB stay as they are.
"""

import io
import os
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

ImageSource: TypeAlias = Image.Image | str | os.PathLike | np.ndarray | torch.Tensor
Alpha: TypeAlias = Literal["drop"] | tuple[int, int, int]

CHANNEL_LAYOUTS = ("channels_last", "channels_first")
_MODE_OF_CHANNELS = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_SCALED_TO_16_BITS = ("PNG", "PPM")  # formats that Pillow opens as mode I with the range 0..65535


class ImageError(ValueError):
    """A picture that cannot be used. The message is one line: which picture, and why."""


def flatten_images(images: Any) -> list[ImageSource]:
    """One source, a batch array (n, ...) of 4 dimensions, or any nesting of lists and tuples, as a flat list in order.

    Raises:
        TypeError: something that is no picture; the message says where and of which type.
    """
    flat = list(_leaves(images))
    for index, source in enumerate(flat):
        if not isinstance(source, Image.Image | str | os.PathLike | np.ndarray | torch.Tensor):
            raise TypeError(
                f"image {index} is a {type(source).__name__}: give PIL images, paths, numpy arrays, torch tensors, "
                f"or lists of them"
            )
    return flat


@contextmanager
def naming_image(index: int, source: ImageSource) -> Generator[None]:
    """Turns any failure inside into an `ImageError` whose message begins with the index and name of the picture."""
    try:
        yield
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, zlib.error and more
        raise ImageError(f"image {index} ({_describe(source)}): {_reason(error, source)}") from error


def image_size(source: ImageSource, input_data_format: str | None = None) -> tuple[int, int]:
    """(width, height) as the header or the shape says, nothing decoded, EXIF orientation not applied."""
    if isinstance(source, Image.Image):
        return source.size
    if isinstance(source, np.ndarray | torch.Tensor):
        height, width, _ = _height_width_channels(tuple(source.shape), input_data_format)
        return width, height
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the caller has its own bound
        with Image.open(source) as image:
            return image.size


def load_image(source: ImageSource, input_data_format: str | None = None, alpha: Alpha = "drop") -> Image.Image:
    """The picture upright in 8 bits: mode L, RGB, or RGBA where there is transparency and `alpha` is "drop".

    Args:
        source: see the module. Arrays are (H, W) grey or 3-dimensional with 1, 2 (grey and alpha), 3 or 4 channels;
            dtype uint8, another integer type holding 0..255, uint16 (0..65535), bool, or float in 0..1.
        input_data_format: "channels_last" or "channels_first"; required for 3-dimensional arrays, never guessed.
        alpha: see the module.

    Raises:
        ValueError, OSError and whatever a decoder raises: wrap the call in `naming_image`.
    """
    if isinstance(source, np.ndarray | torch.Tensor):
        return _to_plain(_array_image(source, input_data_format), alpha)
    if isinstance(source, Image.Image):
        return _to_plain(_upright_8_bit(source), alpha)
    with open(source, "rb") as file:
        encoded = file.read()  # decoding from memory is faster than from the file, which Pillow reads piece by piece
    return _to_plain(_upright_8_bit(Image.open(io.BytesIO(encoded))), alpha)


def _leaves(images: Any) -> Iterator[Any]:
    if isinstance(images, list | tuple) or (isinstance(images, np.ndarray | torch.Tensor) and images.ndim == 4):
        for item in images:
            yield from _leaves(item)
    else:
        yield images


def _describe(source: ImageSource) -> str:
    if isinstance(source, np.ndarray | torch.Tensor):
        return f"array of shape {tuple(source.shape)}, {source.dtype}"
    if isinstance(source, Image.Image):
        name = getattr(source, "filename", "") or "PIL image"
        return f"{_printable(name)}, {source.mode} {source.width}x{source.height}"
    return _printable(source)


def _printable(path: str | os.PathLike) -> str:
    name = os.fsdecode(path)
    return name if name.isprintable() else repr(name)


def _reason(error: Exception, source: ImageSource) -> str:
    if isinstance(error, UnidentifiedImageError):
        empty = isinstance(source, str | os.PathLike) and not os.path.getsize(source)
        return "the file is empty" if empty else "not a picture that Pillow can read"
    if isinstance(error, FileNotFoundError):
        return "no such file (paths only: nothing is fetched from the network)"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())


def _height_width_channels(shape: tuple[int, ...], input_data_format: str | None) -> tuple[int, int, int]:
    if len(shape) == 2:
        return (*shape, 1)
    if len(shape) != 3:
        raise ValueError(f"an image array has 2 or 3 dimensions, or 4 as a batch, got {len(shape)}")
    if input_data_format is None:
        raise ValueError(
            f"which axis of shape {shape} holds the channels is not guessed: "
            f"pass input_data_format={' or '.join(map(repr, CHANNEL_LAYOUTS))}"
        )
    channels, height, width = shape if input_data_format == "channels_first" else (shape[2], shape[0], shape[1])
    if channels not in _MODE_OF_CHANNELS:
        raise ValueError(f"shape {shape} read as {input_data_format} has {channels} channels, expected 1 to 4")
    return height, width, channels


def _array_image(source: np.ndarray | torch.Tensor, input_data_format: str | None) -> Image.Image:
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu()
        source = (source.float() if source.dtype == torch.bfloat16 else source).numpy()
    _, _, channels = _height_width_channels(source.shape, input_data_format)
    levels = _to_uint8(source)
    if levels.ndim == 3 and input_data_format == "channels_first":
        levels = levels.transpose(1, 2, 0)  # (H, W, C)
    if channels == 1:
        levels = levels.reshape(levels.shape[:2])
    image = Image.fromarray(np.ascontiguousarray(levels))
    assert image.mode == _MODE_OF_CHANNELS[channels]
    return image


def _to_uint8(values: np.ndarray) -> np.ndarray:
    """Any accepted dtype -> uint8 by its known range, rounded to nearest; ValueError outside of it."""
    kind = values.dtype.kind
    if values.dtype == np.uint8:
        return values
    if kind == "b":
        return values * np.uint8(255)
    if values.dtype.newbyteorder("=") == np.uint16:
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 = 255 * 257
    if kind not in "iuf":
        raise ValueError(f"dtype {values.dtype} is not a picture's: give uint8, uint16, bool, or float in 0..1")
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


def _upright_8_bit(image: Image.Image) -> Image.Image:
    image.load()
    file_format = image.format
    if 2 <= _orientation(image) <= 8:
        image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        return _deep_grey_to_8_bit(image, file_format)
    return image


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # EXIF is parsed as a TIFF, whose reader raises almost anything on bad bytes
        return 1
    return orientation if isinstance(orientation, int) else 1


def _deep_grey_to_8_bit(image: Image.Image, file_format: str | None) -> Image.Image:
    values = np.asarray(image)
    if image.mode == "I":
        if file_format not in _SCALED_TO_16_BITS:
            raise ValueError("the range of mode I (32-bit integers) is not known: convert it to I;16 or L first")
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"16-bit grey must lie in 0..65535, got {values.min()} to {values.max()}")
        values = values.astype(np.uint16)
    grey = Image.fromarray(_to_uint8(values))
    if isinstance(transparent := image.info.get("transparency"), int):
        grey.putalpha(Image.fromarray((values != transparent) * np.uint8(255)))
    return grey


def _to_plain(image: Image.Image, alpha: Alpha) -> Image.Image:
    if image.has_transparency_data:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        if alpha == "drop":
            return rgba
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (*alpha, 255)), rgba).convert("RGB")
    if image.mode in ("L", "RGB"):
        return image
    return image.convert("L" if image.mode == "1" else "RGB")
