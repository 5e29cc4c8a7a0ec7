"""Picture files -> one file of features, in batches bounded by their patches; a bad picture costs only itself."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ..geometry import Grid, as_grid_list
from ..images.loading import ImageError, image_size
from ..images.processor import KimiVLImageProcessor
from ..moonvit.merger import split_image_features
from .feature_file import FeatureFile

BATCH_PATCHES = 8192  # about two pictures at the published limit; a picture larger than this is a batch alone


@dataclass(frozen=True)
class EncodedImage:
    """One picture that was encoded. `size` is (width, height) in pixels as the file's header says; `ms` is the time of
    its batch in the encoder, shared in proportion to patches."""

    name: str
    size: tuple[int, int]
    grid: Grid
    patches: int
    tokens: int
    ms: float


@dataclass(frozen=True)
class _Picture:
    name: str
    size: tuple[int, int]
    grid: Grid
    pixel_values: Tensor  # (h * w, 3, 14, 14)

    @property
    def patches(self) -> int:
        return len(self.pixel_values)


def picture_paths(arguments: Iterable[Path]) -> Iterator[Path]:
    """Files as they are; a folder as the pictures directly in it, by name. ValueError for a folder without any."""
    endings = set(Image.registered_extensions())
    for path in arguments:
        if not path.is_dir():
            yield path
            continue
        found = sorted(child for child in path.iterdir() if child.suffix.lower() in endings and child.is_file())
        if not found:
            raise ValueError(f"{path}: no pictures in this folder")
        yield from found


def unique_names(paths: Iterable[Path]) -> dict[str, Path]:
    """File names as keys, in order; one that is taken gets a number: cat.png, cat-2.png."""
    named: dict[str, Path] = {}
    for path in paths:
        name, count = path.name, 1
        while name in named or name == "__metadata__":  # the key that safetensors reserves
            count += 1
            name = f"{path.stem}-{count}{path.suffix}"
        named[name] = path
    return named


def encode_files(
    named: dict[str, Path],
    processor: KimiVLImageProcessor,
    encode: Callable[[Tensor, Sequence[Grid]], Tensor],
    file: FeatureFile,
    *,
    strict: bool = False,
    on_picture: Callable[[], object] = lambda: None,
) -> tuple[list[EncodedImage], list[str]]:
    """Encodes every picture that can be read and adds its features to `file`.

    Args:
        encode: pixel values and grids -> (T, ...) packed features, on any device.
        strict: after the first bad picture nothing more is encoded; the rest are only looked at.
        on_picture: called after each picture is read (progress).

    Returns:
        What was encoded, and for each bad picture one line: its path and the reason.
    """
    encoded: list[EncodedImage] = []
    faults: list[str] = []
    batch: list[_Picture] = []
    for name, path in named.items():
        try:
            inputs = processor.preprocess(path)
            (grid,) = as_grid_list(inputs.image_grid_hws)
            picture = _Picture(name, image_size(path), grid, inputs.pixel_values)
        except ImageError as error:
            faults.append(f"{path}: {str(error).removeprefix(f'image 0 ({path}): ')}")
        else:
            if sum(one.patches for one in (*batch, picture)) > BATCH_PATCHES:
                encoded += _encode_batch(batch, encode, file)
                batch = []
            batch.append(picture)
        if strict and faults:
            batch = []
        on_picture()
    return encoded + _encode_batch(batch, encode, file), faults


def _encode_batch(
    batch: list[_Picture], encode: Callable[[Tensor, Sequence[Grid]], Tensor], file: FeatureFile
) -> list[EncodedImage]:
    if not batch:
        return []
    grids = [picture.grid for picture in batch]
    pixel_values = torch.cat([picture.pixel_values for picture in batch])
    start = time.perf_counter()
    features = encode(pixel_values, grids).cpu()  # waits for a device
    ms_per_patch = (time.perf_counter() - start) * 1e3 / len(pixel_values)
    encoded = []
    for one, rows in zip(batch, split_image_features(features, grids), strict=True):
        file.add(one.name, rows)
        encoded.append(EncodedImage(one.name, one.size, one.grid, one.patches, len(rows), ms_per_patch * one.patches))
    return encoded
