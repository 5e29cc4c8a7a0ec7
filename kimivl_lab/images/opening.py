"""Opening image files: one list of formats, the size from the header, warnings with the name of the image.

`encode`, `plan` and the processor open files here and nowhere else, so they accept the same ones. The formats are those
that have a signature and a decoder inside Pillow. EPS, PDF, WMF and the stub formats start external programs or have no
decoder, and are not in the list.

Test: tests/test_faults_images.py, tests/test_fuzz_images.py.
"""

import io
import os
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from PIL import Image, ImageFile

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_OPENED_AS = (*IMAGE_FORMATS, "MPO")  # Pillow opens a JPEG with several images as MPO
_LONGEST_PATH = 4096  # characters; Linux accepts no longer path

_lock = threading.RLock()  # `warnings` keeps its state in the whole process
_named = threading.local()
_blocks = 0  # how many `naming_warnings` are open, over all threads
_show_before: Any = warnings.showwarning


def image_suffixes() -> set[str]:
    """Endings of file names in the formats that are opened, in lower case: {".jpg", ".png", ...}."""
    return {ending for ending, name in Image.registered_extensions().items() if name in _OPENED_AS}


def open_image(file: str | os.PathLike | io.BytesIO) -> ImageFile.ImageFile:
    """Opens an image file and reads its header; the pixels are not decoded.

    Raises:
        ValueError: text that is no path, such as a data URI.
        OSError: no such file, or no format of `IMAGE_FORMATS`. Whatever a broken header makes Pillow raise.
    """
    if not isinstance(file, io.BytesIO):
        path = os.fspath(file)
        if len(path) > _LONGEST_PATH or (isinstance(path, str) and path.startswith("data:")):
            raise ValueError("only paths are read: decode base64 text and open its bytes with PIL.Image.open")
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the caller has a bound and reports it
        return Image.open(file, formats=IMAGE_FORMATS)


def reopen_image(image: ImageFile.ImageFile) -> ImageFile.ImageFile:
    """A second image over a copy of the same file, at the same frame, undecoded; `image` is left as it was."""
    copy = open_image(io.BytesIO(file_bytes(image)))
    copy.seek(image.tell())
    return copy


def file_bytes(image: ImageFile.ImageFile) -> bytes:
    """The file of an undecoded image. The position of the file is left as it was."""
    file: Any = image.fp
    position = file.tell()
    file.seek(0)
    content = file.read()
    file.seek(position)
    return content


def is_undecoded(image: Image.Image) -> bool:
    """Whether the pixels are still in the file."""
    return isinstance(image, ImageFile.ImageFile) and (bool(image.tile) or getattr(image, "_im", None) is None)


def require_known_format(image: Image.Image) -> None:
    """ValueError for an undecoded image of a format that is not opened here: to decode it may start a program."""
    if is_undecoded(image) and image.format not in _OPENED_AS:
        raise ValueError(
            f"format {image.format} is not opened here: call the image's load() first, or give PNG or JPEG"
        )


def shares_a_file(image: object) -> bool:
    """Whether decoding reads a file object that other images or the caller may also read.

    Images from one tar file share its position, so that two threads would read each other's bytes.
    """
    return isinstance(image, Image.Image) and is_undecoded(image) and not getattr(image, "_exclusive_fp", False)


@contextmanager
def naming_warnings(name: str) -> Generator[None]:
    """Puts `name` before each warning that this thread raises inside: Pillow's do not say which file they are about."""
    global _blocks, _show_before
    with _lock:
        if not _blocks and warnings.showwarning is not _show_named:
            _show_before = warnings.showwarning
            warnings.showwarning = _show_named  # ty: ignore
        _blocks += 1
    _named.name = name
    try:
        yield
    finally:
        _named.name = None
        with _lock:
            _blocks -= 1
            if not _blocks and warnings.showwarning is _show_named:
                warnings.showwarning = _show_before


def _show_named(message: Any, category: Any, *where: Any, **more: Any) -> None:
    name = getattr(_named, "name", None)
    _show_before(category(f"{name}: {message}") if name else message, category, *where, **more)
