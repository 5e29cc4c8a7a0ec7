"""Sizes of picture files from their headers: nothing is decoded, whatever a picture holds."""

import warnings
from collections.abc import Iterable
from pathlib import Path

from PIL import ExifTags, Image

from ..geometry import IN_TOKEN_LIMIT, image_geometry
from .loading import ImageError, naming_image
from .settings import MAX_IMAGE_PIXELS


def upright_size(path: str | Path) -> tuple[int, int]:
    """(width, height) of a picture as the processor turns it, by the EXIF orientation in its header.

    A PNG may carry its EXIF data behind the pixels, where only decoding finds them; it counts as not turned. That
    changes no plan: a picture has as many tokens lying as standing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # nothing is decoded here
        with Image.open(path) as image:
            width, height = image.size
            if image.format == "TIFF":  # Pillow has turned its size already
                return width, height
            try:
                orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)  # a PNG's own would decode it
            except Exception:  # unreadable EXIF data counts as none, as in `load_image`
                orientation = None
    return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def picture_sizes(
    paths: Iterable[Path], in_token_limit: int = IN_TOKEN_LIMIT
) -> tuple[list[tuple[int, int]], list[str]]:
    """(width, height) of every picture that the processor takes, and for each other one line: its path and why."""
    sizes, faults = [], []
    for path in paths:
        try:
            with naming_image(0, path):
                width, height = upright_size(path)
                if width * height > MAX_IMAGE_PIXELS:
                    raise ValueError(f"{width}x{height} is {width * height} pixels, more than {MAX_IMAGE_PIXELS}")
                image_geometry(width, height, in_token_limit=in_token_limit)
            sizes.append((width, height))
        except ImageError as error:
            faults.append(f"{path}: {str(error).removeprefix(f'image 0 ({path}): ')}")
    return sizes, faults
