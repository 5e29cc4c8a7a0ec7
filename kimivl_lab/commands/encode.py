"""`kimivl-lab encode`: image files become a file of features, in batches of bounded size.

An image that cannot be read costs only itself: the others are written, and the exit status is 2.

Test: tests/test_cli.py, tests/test_faults_commands.py.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..config import KimiVLConfig, MoonViTConfig
from ..geometry import Grid, as_grid_list
from ..images.files import collected_warnings, find_images, readable_name, reason_of, unique_names
from ..images.loading import ImageError, image_size
from ..images.processor import KimiVLImageProcessor
from ..kimi_vl.encoder import KimiVLEncoder
from ..measure.provenance import versions
from ..moonvit.merger import split_image_features
from ..moonvit.model import MoonVitPretrainedModel
from .checkpoints import device_of, loading
from .feature_file import FeatureFile
from .output import CommandError, on_one_line, progress_bar, show, tell

BATCH_PATCHES = 8192  # about two images at the published limit; an image larger than this is a batch alone


@dataclass(frozen=True)
class EncodedImage:
    """One image that was encoded.

    Attributes:
        size: (width, height) in pixels, as the header says.
        ms: the time of its batch in the encoder, shared in proportion to patches.
    """

    name: str
    size: tuple[int, int]
    grid: Grid
    ms: float


@dataclass
class Outcome:
    """What became of the images: the encoded ones, and lines for stderr, each with the path of an image."""

    encoded: list[EncodedImage] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Image:
    name: str
    path: Path
    size: tuple[int, int]
    grid: Grid
    pixel_values: Tensor  # (h * w, 3, 14, 14)


def run(arguments: argparse.Namespace) -> int:
    """Encodes the images, writes their features, prints one line for each image."""
    device = device_of(arguments.device)
    try:
        found = find_images(arguments.images, arguments.recursive)
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    if found.left_out:
        tell("note", f"left out: {found}")
    not_strict = CommandError(f"{arguments.out} is not written: --strict, and not every image could be read")
    if arguments.strict and found.unread:
        tell("error", *found.unread)
        raise not_strict
    named = unique_names(found.files)
    with FeatureFile(arguments.out, _metadata(arguments), arguments.max_shard_mib * 2**20) as file:
        processor, model = _load(arguments)
        model = model.to(device).eval()
        with torch.inference_mode(), progress_bar() as progress:
            task = progress.add_task("images", total=len(named))
            outcome = encode_files(
                named, processor, model, file, strict=arguments.strict, on_image=lambda: progress.advance(task)
            )
        tell("warning", *outcome.warnings)
        tell("error", *outcome.faults)
        if outcome.faults and arguments.strict:
            raise not_strict
    if not outcome.encoded:
        raise CommandError(f"{arguments.out} is not written: no image could be read")
    tower = model.vision_tower if arguments.projected else model
    with torch.inference_mode():
        computed = tower.resolve_options().names(tower.dtype)
    _show(arguments, outcome.encoded, f"Computed in {computed}.")
    return 2 if outcome.faults else 0


def encode_files(
    named: dict[str, Path],
    processor: KimiVLImageProcessor,
    encode: Callable[[Tensor, Sequence[Grid]], Tensor],
    file: FeatureFile,
    *,
    strict: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> Outcome:
    """Encodes every image that can be read and adds its features to `file`.

    Args:
        encode: pixel values and grids -> (T, ...) packed features, on any device.
        strict: after the first bad image nothing more is encoded; the others are only read, to report all bad ones.
        on_image: called after each image is read (progress).
    """
    outcome = Outcome()
    batch: list[_Image] = []
    for name, path in named.items():
        image = _read(name, path, processor, outcome)
        if strict and outcome.faults:
            batch = []
        elif image is not None:
            if sum(one.grid.patches for one in (*batch, image)) > BATCH_PATCHES:
                _encode_batch(batch, encode, file, outcome)
                batch = []
            batch.append(image)
        on_image()
    _encode_batch(batch, encode, file, outcome)
    return outcome


def _read(name: str, path: Path, processor: KimiVLImageProcessor, outcome: Outcome) -> _Image | None:
    """The image as patches; None where it cannot be read, with the reason in `outcome`."""
    with collected_warnings(path, outcome.warnings):
        try:
            inputs = processor.preprocess(path)
            (grid,) = as_grid_list(inputs.image_grid_hws)
            return _Image(name, path, image_size(path), grid, inputs.pixel_values)
        except ImageError as error:
            outcome.faults.append(f"{path}: {reason_of(error)}")
            return None


def _encode_batch(
    batch: list[_Image], encode: Callable[[Tensor, Sequence[Grid]], Tensor], file: FeatureFile, outcome: Outcome
) -> None:
    if not batch:
        return
    grids = [image.grid for image in batch]
    pixel_values = torch.cat([image.pixel_values for image in batch])
    start = time.perf_counter()
    try:
        features = encode(pixel_values, grids).cpu()  # waits for a device
        ms_per_patch = (time.perf_counter() - start) * 1e3 / len(pixel_values)
        per_image = split_image_features(features, grids)
    except (RuntimeError, ValueError) as error:  # such as too little memory: the other batches are not lost
        reason = str(error).partition("\n")[0]
        outcome.faults += [f"{image.path}: not encoded: {reason}" for image in batch]
        return
    for image, vectors in zip(batch, per_image, strict=True):
        file.add(image.name, vectors, image.grid)
        outcome.encoded.append(EncodedImage(image.name, image.size, image.grid, ms_per_patch * image.grid.patches))


def _load(arguments: argparse.Namespace) -> tuple[KimiVLImageProcessor, Any]:
    """The image processor and the model, which is called with pixel values and grids."""
    model_class: Any = KimiVLEncoder if arguments.projected else MoonVitPretrainedModel
    dtype = getattr(torch, arguments.dtype)
    settings = {"in_token_limit": arguments.in_token_limit} if arguments.in_token_limit else {}
    if arguments.checkpoint is not None:
        return _load_checkpoint(arguments.checkpoint, model_class, dtype, settings)
    try:
        config = (KimiVLConfig if arguments.projected else MoonViTConfig).preset(arguments.preset)
    except ValueError as error:
        raise CommandError(f"--preset: {error}") from error
    torch.manual_seed(arguments.seed)
    return KimiVLImageProcessor(**settings), model_class(config).to(dtype)


def _load_checkpoint(
    folder: Path, model_class: Any, dtype: torch.dtype, settings: dict[str, Any]
) -> tuple[KimiVLImageProcessor, Any]:
    with loading(folder):
        model = model_class.from_pretrained(folder, dtype=dtype)
        if (folder / "preprocessor_config.json").is_file():
            return KimiVLImageProcessor.from_pretrained(folder, **settings), model
        return KimiVLImageProcessor(**settings), model


def _metadata(arguments: argparse.Namespace) -> dict[str, str]:
    return {
        "weights": readable_name(arguments.checkpoint or f"random, preset {arguments.preset}, seed {arguments.seed}"),
        "preset": "" if arguments.checkpoint else arguments.preset,
        "seed": str(arguments.seed),
        "rows": "language model, (t, hidden)" if arguments.projected else "tower, (t, 4, hidden)",
        "versions": json.dumps(versions()),
    }


def _show(arguments: argparse.Namespace, encoded: list[EncodedImage], computed: str) -> None:
    table = Table(caption="ms: the encoder's time for the image's batch, shared by patches; the first batch warms up")
    table.add_column("image", overflow="fold")
    for heading in ("size, px", "grid h x w", "patches", "tokens", "ms"):
        table.add_column(heading, justify="right")
    for image in encoded:
        (width, height), (h, w) = image.size, image.grid
        counts = (f"{image.grid.patches:,}", f"{image.grid.tokens():,}", f"{image.ms:.1f}")
        table.add_row(on_one_line(image.name), f"{width} x {height}", f"{h} x {w}", *counts)
    random = "The weights are RANDOM: shapes and times are real, the features mean nothing."
    notes = [random] if arguments.checkpoint is None else []
    show(table, *notes, computed, f"{len(encoded)} images in {on_one_line(str(arguments.out))}")
