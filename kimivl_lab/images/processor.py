"""Kimi-VL's image processor: pictures -> packed patches and their grids, both on the host.

In order: the sizes (`geometry.image_geometry`), every picture checked from its header before any is decoded; loading
(`image_loading`: upright, 8 bits, alpha); PIL bicubic resize in the picture's own mode; RGB; padding right and below
with 0 (or a centre crop); patches; (x / 255 - mean) / std. Equal bit for bit to those steps written out one by one in
`image_reference`.

Source: the published KimiVLImageProcessor and preprocessor_config.json of Kimi-VL-A3B-Instruct.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature

from ..checks import require_known_kwargs
from ..geometry import ImageGeometry
from .loading import ImageSource, flatten_images, image_size, load_image, naming_image
from .patches import normalising_steps, write_normalised, write_patches
from .settings import OPTIONS, SETTINGS, ImageSettings, KimiVLImagesKwargs


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

    Args:
        patch_size, in_token_limit, merge_kernel_size, num_pooled_tokens, pad_input, image_mean, image_std:
            the published settings; the defaults are the published file's. `num_pooled_tokens` is kept and unused.
        alpha: "drop" (the published behaviour) or a colour (r, g, b) to composite on; the order is in `image_loading`.
        return_uint8: give `pixel_values` as uint8 levels, not normalised (a quarter of the bytes); padding is 0.
        input_data_format: "channels_last" or "channels_first", the layout of 3-dimensional arrays; never guessed.
        max_image_pixels: a picture whose header says more is refused before it is decoded. Pillow's own, global limit
            is left as it is: it refuses files of twice this default whatever is set here.
        num_threads: threads that load and cut pictures; None takes torch's number.

    Attributes of the same names may be changed later; every call validates them anew. Any other keyword is kept as an
    attribute, as configuration files of this ecosystem expect, unless it looks like a misspelt setting (TypeError).
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
        """Pictures -> packed patches, in the order given.

        Args:
            images: a PIL image, path, numpy array or torch tensor, a batch array of 4 dimensions, or any nesting of
                lists of them. None of them is changed.
            return_tensors: "pt" (the default) or "np".
            kwargs: any setting of the class, for this call only; None means the processor's own.

        Returns:
            `pixel_values` (L, 3, p, p) float32 (uint8 with `return_uint8`), contiguous; `image_grid_hws` (n, 2) int64
            as (h, w) in patches; L = sum of h * w. No pictures: (0, 3, p, p) and (0, 2).

        Raises:
            ImageError (a ValueError): a picture that cannot be used; one line with its index, name and the reason.
            ValueError: a setting out of range. TypeError: an unknown keyword, or something that is no picture.
        """
        if return_tensors not in (None, "pt", "np"):
            raise ValueError(f'return_tensors must be "pt" or "np", got {return_tensors!r}')
        settings = self._settings(kwargs)
        sources = flatten_images(images)
        for index, source in enumerate(sources):
            with naming_image(index, source):
                _check_header(source, settings)

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
        """Rows of `pixel_values` that an upright picture of this size in pixels gives; a quarter as many tokens."""
        return self._settings(images_kwargs or {}).geometry(width, height).patches

    def _settings(self, overrides: dict[str, Any]) -> ImageSettings:
        require_known_kwargs(overrides, (*SETTINGS, "return_tensors"), type(self).__name__)
        given = {name: value for name, value in overrides.items() if value is not None and name != "return_tensors"}
        return ImageSettings(**{name: given.get(name, getattr(self, name)) for name in SETTINGS})


def _check_header(source: ImageSource, settings: ImageSettings) -> None:
    bound = settings.max_image_pixels
    try:
        width, height = image_size(source, settings.input_data_format)
    except Image.DecompressionBombError as error:
        raise ValueError(f"{error} That is Pillow's own limit; max_image_pixels is {bound}") from error
    if width * height > bound:
        raise ValueError(f"{width}x{height} is {width * height} pixels, max_image_pixels is {bound}")
    try:
        settings.geometry(width, height)
    except ValueError as refusal:
        try:
            settings.geometry(height, width)  # an EXIF orientation, known only after decoding, may turn it
        except ValueError:
            raise refusal from None


def _preprocess(
    sources: Sequence[ImageSource], settings: ImageSettings, run: Callable[..., Iterable]
) -> dict[str, torch.Tensor]:
    """Loads and resizes, then cuts each picture into its own rows of one array. `run` is `map`, or a pool's."""
    distinct = {id(source): index for index, source in reversed(list(enumerate(sources)))}  # PIL images load in place

    def load(index: int) -> tuple[Image.Image, ImageGeometry]:
        with naming_image(index, sources[index]):
            image = load_image(sources[index], settings.input_data_format, settings.alpha)
            geometry = settings.geometry(*image.size)
        resized_size = (geometry.resized_width, geometry.resized_height)
        if image.size != resized_size:
            image = image.resize(resized_size, Image.Resampling.BICUBIC)
        return image if image.mode == "RGB" else image.convert("RGB"), geometry

    loaded = dict(zip(distinct, run(load, distinct.values()), strict=True))
    pictures = [loaded[id(source)] for source in sources]
    ends = np.cumsum([geometry.patches for _, geometry in pictures], dtype=np.int64).tolist()
    rows = (ends[-1] if ends else 0, 3, settings.patch_size, settings.patch_size)
    pixels = np.empty(rows, dtype=np.uint8 if settings.return_uint8 else np.float32)
    steps = [normalising_steps(mean, std) for mean, std in zip(settings.image_mean, settings.image_std, strict=True)]

    def cut(picture: tuple[Image.Image, ImageGeometry], end: int) -> None:
        image, geometry = picture
        out = pixels[end - geometry.patches : end]
        levels = out if settings.return_uint8 else np.empty(out.shape, dtype=np.uint8)
        write_patches(np.asarray(image), geometry, settings.patch_size, levels)
        if not settings.return_uint8:
            write_normalised(levels, steps, out)

    for _ in run(cut, pictures, ends):
        pass
    grids = torch.tensor([geometry.grid_hw for _, geometry in pictures], dtype=torch.int64).reshape(-1, 2)
    return {"pixel_values": torch.from_numpy(pixels), "image_grid_hws": grids}


def _refuse_misspelt(names: Iterable[str], owner: str) -> None:
    unknown = [name for name in names if name not in SETTINGS]
    misspelt = [name for name in unknown if difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.8)]
    require_known_kwargs(misspelt, SETTINGS, owner)
