"""Kimi-VL's image processor: images -> packed patches and their grids, both on the host.

In order: the sizes (`geometry.image_geometry`), with every image checked from its header before any is decoded;
loading (`loading`: upright, 8 bits, alpha); PIL bicubic resize in the image's mode; RGB; padding right and below with 0
(or a centre crop); patches; (x / 255 - mean) / std. The result equals bit for bit those steps written out one by one in
`bench/preprocess_reference`.

Source: the published KimiVLImageProcessor and preprocessor_config.json of Kimi-VL-A3B-Instruct.

Test: tests/test_image_processor.py, tests/test_faults_images.py, tests/test_fuzz_images.py. Record: preprocess__*.csv.
"""

import difflib
import operator
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature

from ..checks import as_positive, as_positive_pair, require_known_kwargs
from ..geometry import IN_TOKEN_LIMIT, MERGE_KERNEL_SIZE, PATCH_SIZE, ImageGeometry, image_geometry
from .loading import (
    CHANNEL_LAYOUTS,
    MAX_IMAGE_PIXELS,
    Alpha,
    ImageSource,
    checked_size,
    flatten_images,
    load_image,
    naming_image,
)
from .opening import shares_a_file
from .patches import normalising_steps, write_normalised, write_patches


@dataclass(frozen=True)
class ImageSettings:
    """The settings of one call, checked. Integers, numbers and arrays of numpy are taken as Python's.

    The first seven are the published ones, with the published file's values as defaults; the others are options.
    """

    patch_size: int = PATCH_SIZE
    in_token_limit: int = IN_TOKEN_LIMIT
    merge_kernel_size: Sequence[int] = MERGE_KERNEL_SIZE
    num_pooled_tokens: int = 1024  # kept and unused
    pad_input: bool = True
    image_mean: Sequence[float] = (0.5, 0.5, 0.5)
    image_std: Sequence[float] = (0.5, 0.5, 0.5)
    # "drop" (the published behaviour) or a colour (r, g, b) to composite on; `loading` says in which order.
    alpha: Alpha = "drop"
    # Give `pixel_values` as uint8 levels, not normalised (a quarter of the bytes); padding is 0.
    return_uint8: bool = False
    # "channels_last" or "channels_first", the layout of 3-dimensional arrays; never guessed.
    input_data_format: str | None = None
    # An image whose header says more is refused before it is decoded. Pillow's own limit for the whole process is not
    # changed: it refuses files of twice this default whatever is set here.
    max_image_pixels: int = MAX_IMAGE_PIXELS
    # Threads that load and cut images; None takes torch's number.
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("patch_size", "in_token_limit", "num_pooled_tokens", "max_image_pixels", "num_threads"):
            if (value := getattr(self, name)) is not None or name != "num_threads":
                self._set(name, as_positive(name, value))
        self._set("merge_kernel_size", as_positive_pair("merge_kernel_size", self.merge_kernel_size))
        for name in ("pad_input", "return_uint8"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
            self._set(name, bool(getattr(self, name)))
        for name in ("image_mean", "image_std"):
            self._set(name, _three_numbers(name, getattr(self, name)))
        if not all(self.image_std):
            raise ValueError(f"image_std must hold no 0, got {self.image_std}")
        if not (isinstance(self.alpha, str) and self.alpha == "drop"):
            self._set("alpha", _colour(self.alpha))
        if self.input_data_format is not None and self.input_data_format not in CHANNEL_LAYOUTS:
            raise ValueError(f"input_data_format must be one of {CHANNEL_LAYOUTS}, got {self.input_data_format!r}")

    def geometry(self, width: int, height: int) -> ImageGeometry:
        """The sizes of an upright image; ValueError as in `image_geometry`."""
        return image_geometry(
            width,
            height,
            in_token_limit=self.in_token_limit,
            patch_size=self.patch_size,
            merge_kernel_size=self.merge_kernel_size,
            pad_input=self.pad_input,
        )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen


SETTINGS = tuple(field.name for field in fields(ImageSettings))
OPTIONS = {field.name: field.default for field in fields(ImageSettings)[7:]}  # not in the published file

# The names that a call may override, in the form that transformers' processors read; `ImageSettings` checks the values.
KimiVLImagesKwargs = TypedDict("KimiVLImagesKwargs", dict.fromkeys(SETTINGS, Any), total=False)  # ty: ignore


class ImageBatch(BatchFeature):
    """A `BatchFeature` whose `image_grid_hws` stay int64 on the host, wherever the pixels go.

    The encoder reads the grids as plain integers; on a device each read would be a synchronisation.
    """

    def to(self, *args: Any, **kwargs: Any) -> "ImageBatch":
        moving = BatchFeature({key: value for key, value in self.data.items() if key != "image_grid_hws"})
        self.data.update(moving.to(*args, **kwargs).data)
        return self


class KimiVLImageProcessor(BaseImageProcessor):
    """Images in, `pixel_values` (L, 3, 14, 14) float32 and `image_grid_hws` (n, 2) int64 out.

    Its keywords are the fields of `ImageSettings`. They are attributes that may be changed later, and every call checks
    them anew. Any other keyword is kept as an attribute, as configuration files of this ecosystem expect, unless it
    looks like a misspelt setting (TypeError).
    """

    model_input_names = ["pixel_values", "image_grid_hws"]
    valid_kwargs = KimiVLImagesKwargs

    def __init__(self, **kwargs: Any) -> None:
        _refuse_misspelt(kwargs, type(self).__name__)
        super().__init__(**{name: value for name, value in kwargs.items() if name not in SETTINGS})
        given = {name: value for name, value in kwargs.items() if name in SETTINGS and value is not None}
        for name, value in vars(ImageSettings(**given)).items():
            setattr(self, name, list(value) if isinstance(value, tuple) else value)

    @classmethod
    def from_dict(cls, image_processor_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the base class; a misspelt override of a setting is a TypeError instead of being ignored."""
        _refuse_misspelt(kwargs, f"{cls.__name__}.from_dict")
        return super().from_dict(image_processor_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the published keys always, options where they differ from the defaults."""
        settings = super().to_dict()
        return {name: value for name, value in settings.items() if name not in OPTIONS or value != OPTIONS[name]}

    def __call__(self, images: Any, *args: Any, **kwargs: Any) -> ImageBatch:
        return self.preprocess(images, *args, **kwargs)

    def preprocess(self, images: Any, *, return_tensors: str | None = None, **kwargs: Any) -> ImageBatch:
        """Images -> packed patches, in the order given.

        Args:
            images: a PIL image, path, numpy array or torch tensor, a batch array of 4 dimensions, or any nesting of
                lists of them. None of them is changed.
            return_tensors: "pt" (the default) or "np".
            kwargs: any setting of the class, for this call only; None means the processor's own.

        Returns:
            `pixel_values` (L, 3, p, p) float32 (uint8 with `return_uint8`), contiguous; `image_grid_hws` (n, 2) int64
            as (h, w) in patches; L = sum of h * w. No images: (0, 3, p, p) and (0, 2).

        Raises:
            ImageError (a ValueError): an image that cannot be used; one line with its index, name and the reason.
            ValueError: a setting out of range. TypeError: an unknown keyword, or something that is no image.
        """
        if return_tensors not in (None, "pt", "np"):
            raise ValueError(f'return_tensors must be "pt" or "np", got {return_tensors!r}')
        settings = self._settings(kwargs)
        sources = flatten_images(images)
        for index, source in enumerate(sources):
            with naming_image(index, source):
                checked_size(source, settings.geometry, settings.max_image_pixels, settings.input_data_format)

        threads = min(settings.num_threads or torch.get_num_threads(), max(1, len(sources)))
        with ThreadPoolExecutor(threads) as pool:
            run = pool.map if threads > 1 else map
            data = _preprocess(sources, settings, run)
        if return_tensors == "np":
            data = {key: tensor.numpy() for key, tensor in data.items()}
        return ImageBatch(data)

    def fetch_images(self, image_url_or_urls: Any) -> Any:
        """Leaves the sources as they are: nothing is fetched, and `preprocess` judges headers before decoding."""
        return image_url_or_urls

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, Any] | None = None) -> int:
        """Rows of `pixel_values` that an upright image of this size in pixels gives; a quarter as many tokens."""
        return self._settings(images_kwargs or {}).geometry(width, height).patches

    def _settings(self, overrides: dict[str, Any]) -> ImageSettings:
        require_known_kwargs(overrides, (*SETTINGS, "return_tensors"), type(self).__name__)
        given = {name: value for name, value in overrides.items() if value is not None and name != "return_tensors"}
        return ImageSettings(**{name: given.get(name, getattr(self, name)) for name in SETTINGS})


def _preprocess(
    sources: Sequence[ImageSource], settings: ImageSettings, run: Callable[..., Iterable]
) -> dict[str, torch.Tensor]:
    """Loads and resizes, then cuts each image into its rows of one array. `run` is `map`, or a pool's."""
    # A PIL image is decoded in place, so one that is given twice is loaded once.
    distinct = {id(source): index for index, source in reversed(list(enumerate(sources)))}

    def load(index: int) -> tuple[Image.Image, ImageGeometry]:
        with naming_image(index, sources[index]):
            image = load_image(sources[index], settings.input_data_format, settings.alpha)
            geometry = settings.geometry(*image.size)
        resized_size = (geometry.resized_width, geometry.resized_height)
        if image.size != resized_size:
            image = image.resize(resized_size, Image.Resampling.BICUBIC)
        return image if image.mode == "RGB" else image.convert("RGB"), geometry

    # Images that may share the position of one file are decoded here, one after the other; the rest on the threads.
    loaded = {key: load(index) for key, index in distinct.items() if shares_a_file(sources[index])}
    others = {key: index for key, index in distinct.items() if key not in loaded}
    loaded |= dict(zip(others, run(load, others.values()), strict=True))
    resized = [loaded[id(source)] for source in sources]
    ends = np.cumsum([geometry.patches for _, geometry in resized], dtype=np.int64).tolist()
    rows = (ends[-1] if ends else 0, 3, settings.patch_size, settings.patch_size)
    pixels = np.empty(rows, dtype=np.uint8 if settings.return_uint8 else np.float32)
    steps = [normalising_steps(mean, std) for mean, std in zip(settings.image_mean, settings.image_std, strict=True)]

    def cut(one: tuple[Image.Image, ImageGeometry], end: int) -> None:
        image, geometry = one
        out = pixels[end - geometry.patches : end]
        levels = out if settings.return_uint8 else np.empty(out.shape, dtype=np.uint8)
        write_patches(np.asarray(image), geometry, settings.patch_size, levels)
        if not settings.return_uint8:
            write_normalised(levels, steps, out)

    for _ in run(cut, resized, ends):
        pass
    grids = torch.tensor([geometry.grid_hw for _, geometry in resized], dtype=torch.int64, device="cpu").reshape(-1, 2)
    return {"pixel_values": torch.from_numpy(pixels), "image_grid_hws": grids}


def _refuse_misspelt(names: Iterable[str], owner: str) -> None:
    unknown = [name for name in names if name not in SETTINGS]
    misspelt = [name for name in unknown if difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.8)]
    require_known_kwargs(misspelt, SETTINGS, owner)


def _three_numbers(name: str, values: Any) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values if not isinstance(value, bool | str))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != 3 or not np.isfinite(numbers).all():
        raise ValueError(f"{name} must hold three numbers, one a channel, got {values!r:.200}")
    return numbers


def _colour(alpha: Any) -> tuple[int, ...]:
    try:
        levels = tuple(operator.index(level) for level in alpha if not isinstance(level, bool))
    except TypeError:
        levels = ()
    if len(levels) != 3 or not all(0 <= level <= 255 for level in levels):
        raise ValueError(f'alpha must be "drop" or a colour (r, g, b) of integers 0..255, got {alpha!r:.200}')
    return levels
