"""Finds image files in folders, names them, and reads their sizes from the headers.

Test: tests/test_plan.py, tests/test_faults_commands.py.
"""

import mimetypes
import os
import warnings
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from PIL import Image

from ..geometry import IN_TOKEN_LIMIT, image_geometry
from .opening import image_suffixes

_SIGNATURES = (  # the first bytes of image files, whether they are opened here or not
    b"\xff\xd8\xff",  # JPEG
    b"\x89PNG\r\n\x1a\n",
    b"GIF8",
    *(b"II*\0", b"MM\0*", b"II+\0"),  # TIFF and most raw formats of cameras, little and big endian, BigTIFF
    b"FUJIFILM",  # raw
    b"\0\0\0\x0cjP  ",  # JPEG 2000
    *(b"\0\0\0\x0cJXL ", b"\xff\x0a"),  # JPEG XL, in a container and bare
    b"8BPS",  # Photoshop
    b"\0\0\1\0",  # icon
    b"qoif",
)
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1", b"avif", b"avis", b"crx ")
# What Python and libraries tell programmers.
_NOT_ABOUT_IMAGES = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
_TYPES = mimetypes.MimeTypes(filenames=())  # Python's own table: the same on every machine


@dataclass
class FoundImages:
    """Image files, and what was left out of their folders.

    Attributes:
        files: each file under its name: in a folder its path from there, else its last part.
        left_out: how many entries of folders are not in `files`, by kind, such as ".heic" or "dead links".
        unread: one line, a path and a reason, for each image that was left out: its link is dead, or its ending is not
            one that is taken while its first bytes are an image's.
    """

    files: list[tuple[str, Path]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    unread: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The kinds that were left out, most frequent first: ".heic (3), dead links (1)"."""
        return ", ".join(f"{kind} ({count})" for kind, count in self.left_out.most_common())


def find_images(paths: Iterable[Path], recursive: bool = False) -> FoundImages:
    """Files as they are, and of each folder the images in it, sorted by path.

    The ending decides what is taken. Counted as left out are dead links, folders that are not entered, files without an
    ending, and files that are images by their ending or first bytes but of no format that is opened. Other files, such
    as notes.txt or the `._*` files that macOS puts beside others, are passed over.

    Args:
        recursive: also enter sub-folders, but no hidden ones and no links to folders.

    Raises:
        ValueError: a folder without images. OSError: a folder that cannot be read.
    """
    found, endings = FoundImages(), image_suffixes()
    for path in paths:
        if not os.path.isdir(path):  # unlike Path.is_dir, False for a name that is too long
            found.files.append((readable_name(path.name or path), path))
            continue
        before = len(found.files)
        for child in sorted(_entries(path, recursive, found.left_out)):
            if child.suffix.lower() in endings and os.path.isfile(child) and not child.name.startswith("._"):
                found.files.append((readable_name(child.relative_to(path).as_posix()), child))
            elif kind := _kind_left_out(child, found.unread):
                found.left_out[kind] += 1
        if len(found.files) == before:
            raise ValueError(f"{path}: no images in this folder" + (f"; left out: {found}" if found.left_out else ""))
    return found


def unique_names(files: Iterable[tuple[str, Path]]) -> dict[str, Path]:
    """Files by name, in order. A name that is taken gets a number: cat.png, cat-2.png."""
    named: dict[str, Path] = {}
    for wanted, path in files:
        name, count, ending = wanted, 1, Path(wanted).suffix
        while name in named or name == "__metadata__":  # the key that safetensors reserves
            count += 1
            name = f"{wanted.removesuffix(ending)}-{count}{ending}"
        named[name] = path
    return named


def readable_name(path: str | Path) -> str:
    r"""A path as text that every reader can decode: bytes that are not UTF-8 are escaped, such as caf\xe9.png."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def image_sizes(
    paths: Iterable[Path], in_token_limit: int = IN_TOKEN_LIMIT
) -> tuple[list[tuple[int, int]], list[str], list[str]]:
    """(width, height) of every image that the processor accepts, by its header alone.

    Returns:
        The sizes; for each image that is not accepted one line, its path and the reason; the warnings about images.
    """
    from .loading import ImageError, checked_size, naming_image  # torch, which finding and naming files does not need

    geometry = partial(image_geometry, in_token_limit=in_token_limit)
    sizes, faults, notes = [], [], []
    for path in paths:
        try:
            with collected_warnings(path, notes), naming_image(0, path):
                sizes.append(checked_size(path, geometry))
        except ImageError as error:
            faults.append(f"{path}: {reason_of(error)}")
    return sizes, faults, notes


@contextmanager
def collected_warnings(path: Path, lines: list[str]) -> Generator[None]:
    """Adds to `lines` what is warned of inside, each warning once with `path` before it, instead of printing it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # else Python shows a warning of one place once: for the first image only
        try:
            yield
        finally:
            about = [one.message for one in caught if not issubclass(one.category, _NOT_ABOUT_IMAGES)]
            lines += dict.fromkeys(f"{path}: {reason_of(message)}" for message in about)


def reason_of(message: object) -> str:
    """What an `ImageError` says after the image's index and name: "image 0 (a.png): the file is empty" says why."""
    return str(message).partition("): ")[2] or str(message)


def _entries(folder: Path, recursive: bool, left_out: Counter[str]) -> Iterator[Path]:
    """Files and dead links in the folder, and with `recursive` below it; folders that are not entered are counted."""
    for child in folder.iterdir():
        if not os.path.isdir(child):
            yield child
        elif not recursive:
            left_out["sub-folders without --recursive"] += 1
        elif child.is_symlink() or child.name.startswith("."):
            left_out["hidden or linked sub-folders"] += 1
        else:
            try:
                yield from _entries(child, recursive, left_out)
            except PermissionError:
                left_out["sub-folders without permission"] += 1


def _kind_left_out(path: Path, unread: list[str]) -> str | None:
    """What an entry that is not taken is counted as; None for a file that is no image."""
    ending = path.suffix.lower()
    if path.name.startswith("._"):
        return None
    if not os.path.exists(path):
        if _is_image_ending(ending):
            unread.append(f"{path}: the link is dead")
        return "dead links"
    if os.path.isfile(path) and _begins_like_an_image(path):
        unread.append(f"{path}: an image by its first bytes, left out for its ending")
    elif path.name.startswith(".") or (ending and not _is_image_ending(ending)):
        return None
    return ending or "files without an ending"


def _is_image_ending(ending: str) -> bool:
    return ending in Image.registered_extensions() or (_TYPES.guess_type(f"a{ending}")[0] or "").startswith("image/")


def _begins_like_an_image(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            begin = file.read(16)
    except OSError:
        return False
    return (
        begin.startswith(_SIGNATURES)
        or (begin[:4] == b"RIFF" and begin[8:12] == b"WEBP")
        or (begin[:2] == b"BM" and begin[6:10] == bytes(4))
        or (begin[4:8] == b"ftyp" and begin[8:12] in _HEIF_BRANDS)
    )
