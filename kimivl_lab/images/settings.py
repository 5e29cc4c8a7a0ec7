"""The image processor's settings, published ones and options, validated together at every call."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from ..geometry import IN_TOKEN_LIMIT, MERGE_KERNEL_SIZE, PATCH_SIZE, ImageGeometry, image_geometry
from .loading import CHANNEL_LAYOUTS, Alpha

MAX_IMAGE_PIXELS = 2**30 // 4 // 3  # 89 million: where Pillow begins to warn of a decompression bomb


class KimiVLImagesKwargs(TypedDict, total=False):
    """What a call may override, in the form that transformers' processors read; None means the processor's own."""

    patch_size: int | None
    in_token_limit: int | None
    merge_kernel_size: Sequence[int] | None
    num_pooled_tokens: int | None
    pad_input: bool | None
    image_mean: Sequence[float] | None
    image_std: Sequence[float] | None
    alpha: Alpha | list[int] | None
    return_uint8: bool | None
    input_data_format: str | None
    max_image_pixels: int | None
    num_threads: int | None


@dataclass(frozen=True)
class ImageSettings:
    """The settings of one call, validated. The first seven are the published ones."""

    patch_size: int = PATCH_SIZE
    in_token_limit: int = IN_TOKEN_LIMIT
    merge_kernel_size: Sequence[int] = MERGE_KERNEL_SIZE
    num_pooled_tokens: int = 1024
    pad_input: bool = True
    image_mean: Sequence[float] = (0.5, 0.5, 0.5)
    image_std: Sequence[float] = (0.5, 0.5, 0.5)
    alpha: Alpha = "drop"
    return_uint8: bool = False
    input_data_format: str | None = None
    max_image_pixels: int = MAX_IMAGE_PIXELS
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("patch_size", "in_token_limit", "num_pooled_tokens", "max_image_pixels", "num_threads"):
            value = getattr(self, name)
            if not _is_count(value) and not (name == "num_threads" and value is None):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("pad_input", "return_uint8"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not _is_sequence(self.merge_kernel_size, 2) or not all(map(_is_count, self.merge_kernel_size)):
            raise ValueError(f"merge_kernel_size must be two positive integers (h, w), got {self.merge_kernel_size!r}")
        if not (_is_sequence(self.image_mean, 3) and _is_sequence(self.image_std, 3) and all(self.image_std)):
            raise ValueError(
                f"image_mean and image_std must hold three numbers, one a channel, std without 0, "
                f"got {self.image_mean!r} and {self.image_std!r}"
            )
        if self.alpha != "drop" and not _is_colour(self.alpha):
            raise ValueError(f'alpha must be "drop" or a colour (r, g, b) of integers 0..255, got {self.alpha!r}')
        if self.input_data_format is not None and self.input_data_format not in CHANNEL_LAYOUTS:
            raise ValueError(f"input_data_format must be one of {CHANNEL_LAYOUTS}, got {self.input_data_format!r}")

    def geometry(self, width: int, height: int) -> ImageGeometry:
        """The sizes of an upright picture; ValueError as in `image_geometry`."""
        return image_geometry(
            width,
            height,
            in_token_limit=self.in_token_limit,
            patch_size=self.patch_size,
            merge_kernel_size=self.merge_kernel_size,
            pad_input=self.pad_input,
        )


SETTINGS = tuple(field.name for field in fields(ImageSettings))
OPTIONS = {field.name: field.default for field in fields(ImageSettings)[7:]}  # not in the published file


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_sequence(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _is_colour(value: Any) -> bool:
    return _is_sequence(value, 3) and all(type(level) is int and 0 <= level <= 255 for level in value)
