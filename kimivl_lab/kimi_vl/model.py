"""The whole of Kimi-VL: our vision tower and projector in front of transformers' own DeepSeek-V3 language model.

The submodules carry the published checkpoint's names, so that loading renames nothing. Only the experts have another
form in memory: transformers stacks the matrices of a layer's experts on load and cuts them apart on save.

    vision_tower, multi_modal_projector    ours, inherited from `KimiVLEncoder` with all its switches
    language_model                         transformers' `DeepseekV3ForCausalLM`, unchanged

Test: tests/test_kimi_vl_model.py, tests/test_kimi_vl_checkpoint.py.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.deepseek_v3 import DeepseekV3ForCausalLM
from transformers.utils import GENERATION_CONFIG_NAME

from ..config import EncoderOptions, KimiVLConfig
from ..geometry import Grid, as_grid_list, token_counts
from ..moonvit.checkpoint import DTYPES, refuse
from .encoder import KimiVLEncoder
from .published import open_published, published_shapes, stored_shapes

# transformers' names of attention, as options of the encoder. With any other name the encoder keeps "auto".
ATTENTION_OF = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash_attn"}
_IMAGE_INPUTS = ("pixel_values", "image_grid_hws", "image_embeds")


class KimiVLForConditionalGeneration(KimiVLEncoder, GenerationMixin):
    """Kimi-VL: token ids and images in, logits out.

    Args:
        config: what to compute.
        options: how the vision tower computes it; see `EncoderOptions`. `set_encoder_parallel` and the other switches
            of `KimiVLEncoder` are there too.

    `attn_implementation` is transformers' for the language model. "eager", "sdpa" and "flash_attention_2" also choose
    the encoder's attention, unless `options` are given; a dictionary, `{"text_config": "sdpa"}`, chooses for one part.

    Ranks that share the encoder's work (`set_encoder_parallel`) each hold the whole language model. All of them make
    each call with the same prompts and images.
    """

    main_input_name = "input_ids"
    input_modalities = ["image", "text"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _takes_attn_implementation = True
    _checkpoint_renames = {
        **KimiVLEncoder._checkpoint_renames,
        r"^model\.language_model\.": "language_model.model.",
        r"^lm_head\.": "language_model.lm_head.",
    }
    _checkpoint_ignores = r".*\.rotary_emb\.inv_freq$"

    def __init__(self, config: KimiVLConfig, options: EncoderOptions | None = None) -> None:
        super().__init__(config, options)
        self.language_model = DeepseekV3ForCausalLM(config.text_config)
        if options is None:
            self._follow_attn_implementation()
        self._kept_in_float32: dict[str, torch.dtype] = {}  # the stored dtype of what was widened on load
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers' `from_pretrained`, from the published layout, in safetensors, and strictly.

        No code of the folder is run. The memory that it takes stays near the size of the weights.

        Raises:
            ValueError: missing, unused, doubled or misshapen tensors; tensors outside the file that the index names; a
                file that is damaged or not there. The message names tensors and files.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        vars(model).pop("_weight_conversions", None)  # a model is saved in the published layout, however it was stored
        return (model, info) if output_loading_info else model

    @classmethod
    def _check_tensors(cls, where: str, files: Iterable[Path], config: KimiVLConfig) -> None:
        try:
            with torch.device("meta"):
                wanted = published_shapes(cls(copy.deepcopy(config)))
            for folder in {path.parent for path in files if (path.parent / GENERATION_CONFIG_NAME).exists()}:
                GenerationConfig.from_pretrained(folder)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: config.json or {GENERATION_CONFIG_NAME}: {error}") from error
        stored = {cls._renamed(name): shape for path in files for name, shape in stored_shapes(path).items()}
        stored = {name: shape for name, shape in stored.items() if not re.match(cls._checkpoint_ignores, name)}
        other = [name for name in wanted.keys() & stored.keys() if stored[name] != wanted[name]]
        faults = {
            "missing": wanted.keys() - stored.keys(),
            "unused": stored.keys() - wanted.keys(),
            "of another shape": [f"{name} {stored[name]}, not {wanted[name]}" for name in other],
        }
        refuse(where, faults)

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers, with tensors that are read into their places; see `kimivl_lab.kimi_vl.published`."""
        with ExitStack() as opened:
            if state_dict is None and checkpoint_files is not None:
                state_dict = open_published(checkpoint_files, type(model)._renamed, opened)
            load: Any = PreTrainedModel._load_pretrained_model
            result = load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
            for name, value in model.state_dict().items():
                stored = DTYPES.get(state_dict[name].get_dtype()) if name in (state_dict or ()) else None
                if stored == load_config.dtype != value.dtype:
                    model._kept_in_float32[name] = stored
        return result

    def save_pretrained(self, *args: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        """As transformers' `save_pretrained`, in the published layout.

        The language model computes with its routers in float32 whatever the dtype. Those that were stored in another
        one are saved in it again, unless training has given them values that it cannot hold.
        """
        if self._kept_in_float32:
            state_dict = dict(self.state_dict() if state_dict is None else state_dict)
            for name in self._kept_in_float32.keys() & state_dict.keys():
                narrow = state_dict[name].to(self._kept_in_float32[name])
                if not narrow.is_meta and torch.equal(narrow.to(state_dict[name].dtype), state_dict[name]):
                    state_dict[name] = narrow
        super().save_pretrained(*args, state_dict=state_dict, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.language_model.set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; the vocabulary's size is changed in both configurations."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.vocab_size = self.config.text_config.vocab_size
        return embeddings

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers; the encoder's attention follows, see the class."""
        PreTrainedModel.set_attn_implementation(self, attn_implementation, *args, **kwargs)
        self._follow_attn_implementation()

    def _follow_attn_implementation(self) -> None:
        asked = self.config.vision_config._attn_implementation
        if asked in ATTENTION_OF:
            self.set_options(attention=ATTENTION_OF[asked])

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_hws: Sequence[Grid] | Tensor | None = None,
        image_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Logits of each position, and the loss where labels are given.

        Args:
            input_ids: (B, S); each image stands there as one placeholder id for each of its tokens.
            pixel_values: (L, 3, 14, 14) patches of all images, in the order of their placeholders, with
            image_grid_hws: (n, 2) host integers (h, w) in patches.
            image_embeds: (T, text hidden size), what `get_image_features` gave before, instead of pixels and grids.
            attention_mask: (B, S), 0 at padding, on either side.
            inputs_embeds: (B, S, text hidden size) instead of `input_ids`. It holds image features already.
            labels: (B, S); `config.ignore_index` is left out of the loss.
            cache: of earlier calls, as transformers gives and takes it; its name there was `past_key_values`.
            logits_to_keep: only the last so many positions (0: all), or those indices.
            kwargs: what else `DeepseekV3ForCausalLM` takes.

        Raises:
            ValueError: another number of placeholders than of image features, with both numbers, or a prompt that ends
                within an image, before anything is computed; pixels without grids, or together with `image_embeds` or
                `inputs_embeds`.
        """
        caches = {"cache": cache, "past_key_values": past_key_values}  # the language model knows one of the names
        caches = {name: value for name, value in caches.items() if value is not None}
        if inputs_embeds is None:
            images = pixel_values, image_grid_hws, image_embeds
            # Behind a cache a placeholder may be a sampled id. A single id is: no cache need be read from the device.
            sampled = caches and input_ids is not None and (input_ids.shape[1] == 1 or _cached_length(caches) > 0)
            if not sampled or any(value is not None for value in images):
                self._check_placeholders(input_ids, *images)
            inputs_embeds = self._embed(input_ids, *images)
        elif input_ids is not None or pixel_values is not None or image_embeds is not None:
            raise ValueError("inputs_embeds hold the image features already: give no input_ids and no images with them")
        logits_to_keep = kwargs.pop("num_logits_to_keep", logits_to_keep)  # its name in older code
        outputs = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            logits_to_keep=logits_to_keep,
            **{**kwargs, **caches, "return_dict": True},
        )
        if labels is not None:
            of_loss = {"ignore_index": self.config.ignore_index, **kwargs}
            loss = self.loss_function(outputs.logits, labels, self.config.text_config.vocab_size, **of_loss)
            outputs = MoeCausalLMOutputWithPast(**{"loss": loss, **outputs})
        return outputs if kwargs.get("return_dict", True) else outputs.to_tuple()

    def _check_placeholders(
        self,
        input_ids: Tensor | None,
        pixel_values: Tensor | None,
        image_grid_hws: Sequence[Grid] | Tensor | None,
        image_embeds: Tensor | None,
    ) -> None:
        """ValueError unless the ids have a placeholder for each image feature."""
        if input_ids is None or input_ids.ndim != 2:
            raise ValueError(f"give input_ids (B, S) or inputs_embeds, got {getattr(input_ids, 'shape', None)}")
        if (pixel_values is None) != (image_grid_hws is None):
            raise ValueError("give pixel_values and image_grid_hws together")
        if pixel_values is not None and image_embeds is not None:
            raise ValueError("give pixel_values or image_embeds, not both")
        hidden = self.config.text_config.hidden_size
        if image_embeds is not None and (image_embeds.ndim != 2 or image_embeds.shape[1] != hidden):
            raise ValueError(f"image_embeds must be (T, {hidden}), got {tuple(image_embeds.shape)}")
        tokens: list[int] = []
        if image_grid_hws is not None:
            tokens = token_counts(as_grid_list(image_grid_hws), self.config.vision_config.merge_kernel_size)
        features = sum(tokens) if image_embeds is None else image_embeds.shape[0]
        placeholders = (input_ids == self.config.media_placeholder_token_id).sum(-1).tolist()
        if sum(placeholders) != features:
            raise ValueError(f"input_ids hold {sum(placeholders)} image placeholders for {features} image features")
        ends = {0, *accumulate(tokens)}
        for prompt, end in enumerate(accumulate(placeholders)):
            if image_embeds is None and end not in ends:
                raise ValueError(
                    f"the {placeholders[prompt]} image placeholders of prompt {prompt} are no whole images: the images "
                    f"have {tokens} features"
                )

    def _embed(
        self,
        input_ids: Any,
        pixel_values: Tensor | None,
        image_grid_hws: Sequence[Grid] | Tensor | None,
        image_embeds: Tensor | None,
    ) -> Tensor:
        """(B, S, hidden): the ids' embeddings, with the images' features in the placeholders' places, in order."""
        if pixel_values is not None:
            image_embeds = self.get_image_features(pixel_values, image_grid_hws)
        if image_embeds is None:
            return self.get_input_embeddings()(input_ids)
        is_image = input_ids == self.config.media_placeholder_token_id
        embeds = self.get_input_embeddings()(input_ids.masked_fill(is_image, 0))  # the id may lie past the vocabulary
        is_image = is_image.unsqueeze(-1).to(embeds.device)
        return embeds.masked_scatter(is_image, image_embeds.to(embeds.device, embeds.dtype))

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers; images enter with the prompt only, not with each new token."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )
        if kwargs.get("use_cache", True) and not is_first_iteration:
            inputs = {name: value for name, value in inputs.items() if name not in _IMAGE_INPUTS}
        return inputs

    def _expand_inputs_for_generation(  # ty: ignore[incompatible-method-override]
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Repeats each prompt for beams and returned sequences, with its images, which are encoded here, once.

        The patches of all images are packed in one tensor: transformers would repeat each patch.
        """
        pixels, grids, embeds = (kwargs.pop(name, None) for name in _IMAGE_INPUTS)
        if input_ids is not None and any(value is not None for value in (pixels, grids, embeds)):
            new_ids = input_ids[:, _cached_length(kwargs) :]  # of a conversation the images of earlier calls are cached
            self._check_placeholders(new_ids, pixels, grids, embeds)
            if embeds is None:
                embeds = self.get_image_features(pixels, grids)
            if expand_size > 1:
                counts = (new_ids == self.config.media_placeholder_token_id).sum(-1).tolist()
                embeds = torch.cat([part.repeat(expand_size, 1) for part in embeds.split(counts)])
        parent: Any = super()
        input_ids, kwargs = parent._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **kwargs)
        return input_ids, kwargs if embeds is None else {**kwargs, "image_embeds": embeds}


def _cached_length(kwargs: Mapping[str, Any]) -> int:
    """Positions that the cache among `kwargs` holds."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return 0 if cache is None else int(cache.get_seq_length())
