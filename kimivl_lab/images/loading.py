"""Images as people hold them -> upright 8-bit PIL images of mode L, RGB or RGBA.

Sources: PIL images, paths, numpy arrays and torch tensors. `checked_size` looks at the header first, so that an image
that is too large is refused before it is decoded. `load_image` then does, in this order:

1. decode; of an animation the frame at which the image stands (of a file the first frame);
2. bring the samples to 8 bits by their stated range (`samples`); an unknown range is refused, and nothing is clipped;
3. turn the image upright by its EXIF orientation, once (unreadable EXIF data counts as none);
4. alpha. `alpha=(r, g, b)` composites the image on that colour here, before any resize. `alpha="drop"` is what the
   published processor does: transparency takes part in the resize (PIL weighs colours by it) and is dropped after it.
   Every kind of transparency (RGBA, LA, La, PA, a palette's, a PNG's tRNS) goes through RGBA, so one policy holds;
5. palette, 1-bit, CMYK, YCbCr, LAB and HSV become L or RGB, because PIL resizes palette indices and bits by nearest
   neighbour. L and RGB stay as they are.

Test: tests/test_image_processor.py, tests/test_faults_images.py.
"""

import errno
import io
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError

from .opening import naming_warnings, open_image, require_known_format
from .samples import eight_bit_image, to_uint8

ImageSource: TypeAlias = Image.Image | str | os.PathLike | np.ndarray | torch.Tensor
Alpha: TypeAlias = Literal["drop"] | tuple[int, int, int]

MAX_IMAGE_PIXELS = 2**30 // 4 // 3  # 89 million: where Pillow begins to warn of a decompression bomb
CHANNEL_LAYOUTS = ("channels_last", "channels_first")
_SHOWN_CHARACTERS = 200  # of a name or reason in a message
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(ValueError):
    """An image that cannot be used. The message is one line: which image, and why."""


def flatten_images(images: Any) -> list[ImageSource]:
    """One source, a batch array (n, ...) of 4 dimensions, or any nesting of lists and tuples, as a flat list in order.

    Raises:
        TypeError: something that is no image; the message says where and of which type.
        ImageError: one PIL image given several times while it stands at a later frame, as a list of an
            `ImageSequence.Iterator` does: which frames were meant is lost.
    """
    flat = list(_leaves(images))
    places: dict[int, int] = {}
    for index, source in enumerate(flat):
        if not isinstance(source, Image.Image | str | os.PathLike | np.ndarray | torch.Tensor):
            raise TypeError(
                f"image {index} is a {type(source).__name__}: give PIL images, paths, numpy arrays, torch tensors, "
                f"or lists of them"
            )
        first = places.setdefault(id(source), index)
        if first != index and isinstance(source, Image.Image) and source.tell():
            raise ImageError(
                f"image {index} ({_describe(source)}): the same object as image {first}, which stands at frame "
                f"{source.tell()}: give a copy of each frame, [frame.copy() for frame in ...]"
            )
    return flat


@contextmanager
def naming_image(index: int, source: ImageSource) -> Generator[None]:
    """Turns any failure inside into an `ImageError`, and names warnings, with the index and name of the image."""
    name = f"image {index} ({_describe(source)})"
    try:
        with naming_warnings(name):
            yield
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, zlib.error and more
        raise ImageError(f"{name}: {_reason(error, source)}") from error


def image_size(source: ImageSource, input_data_format: str | None = None) -> tuple[int, int]:
    """(width, height) as the header or the shape says, nothing decoded, EXIF orientation not applied.

    That an image may be turned changes no count: it has as many tokens lying as standing.
    """
    if isinstance(source, Image.Image):
        require_known_format(source)
        return source.size
    if isinstance(source, np.ndarray | torch.Tensor):
        height, width, _ = _height_width_channels(tuple(source.shape), input_data_format)
        return width, height
    with open_image(source) as image:
        return image.size


def checked_size(
    source: ImageSource,
    geometry: Callable[[int, int], object],
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    input_data_format: str | None = None,
) -> tuple[int, int]:
    """`image_size` of an image that may be decoded.

    Raises:
        ValueError: more than `max_image_pixels`; or `geometry(width, height)` refuses it, lying and standing.
    """
    try:
        width, height = image_size(source, input_data_format)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{error} That is Pillow's own limit; max_image_pixels is {max_image_pixels}") from error
    if width * height > max_image_pixels:
        raise ValueError(f"{width}x{height} is {width * height} pixels, max_image_pixels is {max_image_pixels}")
    try:
        geometry(width, height)
    except ValueError as refusal:
        try:
            geometry(height, width)  # an EXIF orientation, known only after decoding, may turn it
        except ValueError:
            raise refusal from None
    return width, height


def load_image(source: ImageSource, input_data_format: str | None = None, alpha: Alpha = "drop") -> Image.Image:
    """The image upright in 8 bits: mode L, RGB, or RGBA where there is transparency and `alpha` is "drop".

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
    if not isinstance(source, Image.Image):
        with open(source, "rb") as file:
            # From memory it decodes faster than from the file, which Pillow reads in small pieces.
            source = open_image(io.BytesIO(file.read()))
    image = eight_bit_image(source)
    turn = _TURNS.get(_orientation(image))
    return _to_plain(image if turn is None else image.transpose(turn), alpha)


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
    if len(name) > _SHOWN_CHARACTERS:
        return f"{_printable(name[:40])}... of {len(name):,} characters"
    return name if name.isprintable() else repr(name)


def _reason(error: Exception, source: ImageSource) -> str:
    if isinstance(error, UnidentifiedImageError):
        empty = isinstance(source, str | os.PathLike) and not os.path.getsize(source)
        return "the file is empty" if empty else "not an image that is read here (JPEG, PNG, WebP, GIF, BMP, TIFF, ...)"
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ENAMETOOLONG:
        return "no such file (only paths are read: nothing comes from the network or from base64 text)"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    text = " ".join(text.split())
    return text if len(text) <= 2 * _SHOWN_CHARACTERS else f"{text[: 2 * _SHOWN_CHARACTERS]}..."


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
    if not 1 <= channels <= 4:
        raise ValueError(f"shape {shape} read as {input_data_format} has {channels} channels, expected 1 to 4")
    return height, width, channels


def _array_image(source: np.ndarray | torch.Tensor, input_data_format: str | None) -> Image.Image:
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu()
        source = (source.float() if source.dtype == torch.bfloat16 else source).numpy()
    _, _, channels = _height_width_channels(source.shape, input_data_format)
    levels = to_uint8(source)
    if levels.ndim == 3 and input_data_format == "channels_first":
        levels = levels.transpose(1, 2, 0)  # (H, W, C)
    if channels == 1:
        levels = levels.reshape(levels.shape[:2])
    return Image.fromarray(np.ascontiguousarray(levels))  # mode L, LA, RGB or RGBA


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # EXIF is parsed as a TIFF, whose reader raises almost anything on bad bytes
        return 1
    return orientation if isinstance(orientation, int) else 1


def _to_plain(image: Image.Image, alpha: Alpha) -> Image.Image:
    if image.has_transparency_data:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        if alpha == "drop":
            return rgba
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (*alpha, 255)), rgba).convert("RGB")
    if image.mode in ("L", "RGB"):
        return image
    return image.convert("L" if image.mode == "1" else "RGB")
