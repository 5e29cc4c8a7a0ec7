"""Kimi-VL's processor: prompts and images -> token ids, patches and grids.

Each image stands in a prompt as one placeholder, `<|media_pad|>`, which the chat template writes between
`<|media_start|>image<|media_content|>` and `<|media_end|>`. The processor repeats it once for each token of the image,
h * w / 4 (`geometry.token_counts`), and checks afterwards that the ids hold exactly that many.

Source: the published processor code of Kimi-VL-A3B-Instruct.

Test: tests/test_kimi_vl_processor.py.
"""

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from transformers.processing_utils import MultiModalData, ProcessorMixin, TextKwargs

from ..checks import require_known_kwargs
from ..geometry import as_grid_list, token_counts
from ..images.loading import flatten_images
from ..images.processor import SETTINGS, ImageBatch
from .tokenizer import TikTokenTokenizer

IMAGE_TOKEN = "<|media_pad|>"
_TEXT_OPTIONS = frozenset(TextKwargs.__annotations__) - {"return_tensors"}
_GROUPS = ("common_kwargs", "images_kwargs", "text_kwargs")


class KimiVLProcessor(ProcessorMixin):
    """An image processor and a tokenizer, called together.

    Args:
        image_processor: a `KimiVLImageProcessor`.
        tokenizer: one that knows `<|media_pad|>` as a single token.
        chat_template: Jinja text; the tokenizer's where none is given.

    Raises:
        ValueError: the tokenizer cuts `<|media_pad|>` into several tokens.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
    ) -> None:
        chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)
        self.image_token = IMAGE_TOKEN
        ids = tokenizer.encode(IMAGE_TOKEN, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"the tokenizer gives {len(ids)} tokens for {IMAGE_TOKEN!r}; Kimi-VL's gives 1")
        self.image_token_id = ids[0]

    @classmethod
    def _load_tokenizer_from_pretrained(
        cls, sub_processor_type: str, pretrained_model_name_or_path: Any, subfolder: str = "", **kwargs: Any
    ) -> Any:
        kwargs.pop("trust_remote_code", None)  # the class is known: no code of the checkpoint is needed
        return TikTokenTokenizer.from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        videos: None = None,
        audio: None = None,
        *,
        return_tensors: str | None = None,
        **kwargs: Any,
    ) -> ImageBatch:
        """Prompts and their images -> the model's inputs.

        Args:
            images: what `KimiVLImageProcessor` takes, in the order of the placeholders. With several prompts either one
                flat list, or a list for each prompt (empty for a prompt without images).
            text: a prompt, or several. A prompt whose placeholders are expanded already is not expanded again.
            return_tensors: "pt" or "np"; None gives lists of ids. Pixels and grids are tensors in any case but "np".
            kwargs: options of the image processor and of the tokenizer, flat or as `images_kwargs` and `text_kwargs`.

        Returns:
            `input_ids` and `attention_mask` (B, S), `pixel_values` (L, 3, 14, 14) and `image_grid_hws` (n, 2).

        Raises:
            ValueError: other numbers of placeholders than of images or of image tokens, a truncation that cuts
                placeholders away; both numbers are in the message. TypeError: an unknown keyword.
        """
        if videos is not None or audio is not None:
            raise ValueError("Kimi-VL takes text and images, no videos and no audio")
        of_images, of_text, return_tensors = self._options(kwargs, return_tensors)
        if text is None and images is None:
            raise ValueError("give text, images, or both")
        if text is None:
            return self.image_processor(images, return_tensors=return_tensors, **of_images)
        prompts = [text] if isinstance(text, str) else list(text)
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(f"text must be a string or a list of strings, got {text!r:.200}")
        places = _places(prompts, images)

        data: dict[str, Any] = {}
        counts: list[int] = []
        if images is not None:
            data = self.image_processor(images, return_tensors=return_tensors, **of_images).data
            counts = token_counts(as_grid_list(data["image_grid_hws"]), self.image_processor.merge_kernel_size)
        left = iter(counts)
        counts_of = [list(islice(left, len(found))) for found in places]
        expanded = [_expanded(*item) for item in zip(range(len(prompts)), prompts, places, counts_of, strict=True)]
        tokens = self.tokenizer(expanded, return_tensors=return_tensors, **of_text)
        for index, (ids, expected) in enumerate(zip(tokens["input_ids"], counts_of, strict=False)):
            found = (ids if isinstance(ids, list) else ids.tolist()).count(self.image_token_id)
            if found != sum(expected):
                raise ValueError(
                    f"prompt {index}: {found} of {sum(expected)} image tokens are left in {len(ids)} ids: truncation?"
                )
        return ImageBatch({**tokens, **data})

    def _options(
        self, kwargs: dict[str, Any], return_tensors: str | None
    ) -> tuple[dict[str, Any], dict[str, Any], str | None]:
        """Options of the image processor, those of the tokenizer, and the type of the results."""
        groups = {name: dict(kwargs.pop(name, None) or {}) for name in _GROUPS}
        flat = {**groups["common_kwargs"], **kwargs}
        accepted = {*SETTINGS, *_TEXT_OPTIONS, *_GROUPS, "return_tensors"}
        require_known_kwargs(flat, accepted, type(self).__name__)
        return_tensors = flat.pop("return_tensors", None) or return_tensors
        for group in ("images_kwargs", "text_kwargs"):
            return_tensors = groups[group].pop("return_tensors", None) or return_tensors
        if return_tensors not in (None, "pt", "np"):
            raise ValueError(f'return_tensors must be "pt", "np" or None, got {return_tensors!r}')
        of_images = {**{name: value for name, value in flat.items() if name in SETTINGS}, **groups["images_kwargs"]}
        of_text = {**{name: value for name, value in flat.items() if name not in SETTINGS}, **groups["text_kwargs"]}
        require_known_kwargs(of_text, _TEXT_OPTIONS, f"{type(self).__name__}'s text_kwargs")
        return of_images, of_text, return_tensors

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **kwargs: Any) -> MultiModalData:
        """Tokens and patches of images of these (height, width) in pixels, for engines that ask before they process."""
        patches = [self.image_processor.get_number_of_image_patches(*size, kwargs) for size in image_sizes or ()]
        merge_h, merge_w = self.image_processor.merge_kernel_size
        return MultiModalData(num_image_tokens=[n // (merge_h * merge_w) for n in patches], num_image_patches=patches)

    @property
    def model_input_names(self) -> list[str]:
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names]


def _places(prompts: Sequence[str], images: Any) -> list[list[tuple[int, int]]]:
    """Where the images stand in each prompt: (start, end) in characters, one for each image.

    A place is one placeholder. If the prompts hold more placeholders than there are images, but as many runs of
    adjacent placeholders, then they are expanded already and a place is a run.
    """
    singles = [[match.span() for match in re.finditer(re.escape(IMAGE_TOKEN), prompt)] for prompt in prompts]
    runs = [[match.span() for match in re.finditer(f"(?:{re.escape(IMAGE_TOKEN)})+", prompt)] for prompt in prompts]
    if _is_nested(images, len(prompts)):
        given = [len(flatten_images(own)) if own is not None else 0 for own in images]
        places = []
        for index, (single, run, count) in enumerate(zip(singles, runs, given, strict=True)):
            places.append(_chosen(f"prompt {index} holds", single, run, count))
        return places
    count = 0 if images is None else len(flatten_images(images))
    owner = "the prompt holds" if len(prompts) == 1 else f"the {len(prompts)} prompts hold"
    chosen = _chosen(owner, sum(singles, []), sum(runs, []), count)
    return singles if len(chosen) == sum(map(len, singles)) else runs


def _is_nested(images: Any, prompts: int) -> bool:
    lists = isinstance(images, list | tuple) and all(own is None or isinstance(own, list | tuple) for own in images)
    return lists and len(images) == prompts


def _chosen(owner: str, singles: list, runs: list, images: int) -> list:
    for places in (singles, runs):
        if len(places) == images:
            return places
    raise ValueError(f"{owner} {len(singles)} image placeholders {IMAGE_TOKEN!r} for {images} images")


def _expanded(index: int, prompt: str, places: list[tuple[int, int]], counts: list[int]) -> str:
    """The prompt with each image's placeholder repeated `counts` times. ValueError for a run of another length."""
    parts, end = [], 0
    for (start, stop), count in zip(places, counts, strict=True):
        length = (stop - start) // len(IMAGE_TOKEN)
        if length not in (1, count):
            raise ValueError(
                f"prompt {index} holds a run of {length} image placeholders for an image of {count} tokens"
            )
        parts += [prompt[end:start], IMAGE_TOKEN * count]
        end = stop
    return "".join([*parts, prompt[end:]])
