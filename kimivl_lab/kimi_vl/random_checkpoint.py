"""A small Kimi-VL checkpoint with random weights, in the published layout: for tests, for engines, for a first try.

The folder holds what the published one holds, code excepted: `config.json`, shards with an index, the image
processor's file, the tokenizer as a tiktoken file, the chat template. Heads have the published sizes (vision 72, text
512 + 64), so that engines whose kernels know no others can serve it. Below the special tokens the vocabulary has the
256 bytes and then words of the form " w300": an answer of random weights is readable, and each id is another word.

Test: tests/test_random_checkpoint.py.
"""

import base64
import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from ..config import KimiVLConfig, published_config
from .model import KimiVLForConditionalGeneration
from .tokenizer import SPECIAL_AT, SPECIAL_TOKENS

_VISION = {"hidden_size": 144, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
_TEXT = {
    **{"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128, "moe_intermediate_size": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_shared_experts": 1, "max_position_embeddings": 8192},
}
# The published template, with line breaks: each image is one placeholder between its three marks.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
  {%- if loop.first and message['role'] != 'system' -%}
    {{- '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' -}}
  {%- endif -%}
  {{- '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- else -%}
    {%- for content in message['content'] -%}
      {%- if content['type'] == 'image' or 'image' in content or 'image_url' in content -%}
        {{- '<|media_start|>image<|media_content|><|media_pad|><|media_end|>' -}}
      {%- else -%}
        {{- content['text'] -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_assistant|>assistant<|im_middle|>' -}}
{%- endif -%}
"""


def write_random_checkpoint(
    folder: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    vocab_size: int = 163840,
    shards: int = 2,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Path:
    """Writes the checkpoint into `folder`, which is made if needed, and gives the folder.

    Args:
        folder: where; files of the same names are overwritten.
        seed: of the weights.
        dtype: of the weights.
        vocab_size: ids, the last 256 of them special; 163840 puts these at their published places.
        shards: files that hold the weights, about equally large.
        vision, text: sizes that replace the small ones, by the names of `config.json`.

    Raises:
        ValueError: fewer than 512 ids, fewer than one shard, or sizes that do not fit each other.
    """
    if vocab_size < 256 + SPECIAL_TOKENS:
        raise ValueError(
            f"vocab_size must be at least {256 + SPECIAL_TOKENS}, bytes and special tokens, got {vocab_size}"
        )
    if shards < 1:
        raise ValueError(f"shards must be 1 or more, got {shards}")
    folder = Path(folder)
    base = vocab_size - SPECIAL_TOKENS
    at = {name: base + place for name, place in SPECIAL_AT.items()}
    special = {"bos_token_id": at["[BOS]"], "eos_token_id": at["[EOS]"], "pad_token_id": at["[PAD]"]}

    published = published_config()
    published |= {"media_placeholder_token_id": at["<|media_pad|>"], "pad_token_id": at["[PAD]"]}
    published |= {"vocab_size": vocab_size, "torch_dtype": _name(dtype), "random_weights": True}
    published["vision_config"] |= {**_VISION, **(vision or {}), "torch_dtype": _name(dtype)}
    published["text_config"] |= {
        **_TEXT,
        "vocab_size": vocab_size,
        **special,
        **(text or {}),
        "torch_dtype": _name(dtype),
    }
    experts, taken = (published["text_config"][name] for name in ("n_routed_experts", "num_experts_per_tok"))
    if experts < taken:
        raise ValueError(f"n_routed_experts must be at least num_experts_per_tok, {taken}, got {experts}")
    model = KimiVLForConditionalGeneration(KimiVLConfig(**published)).to(dtype)
    _fill(model, torch.Generator().manual_seed(seed))
    with torch.no_grad():  # so answers are words: no single bytes, and no special token but the end
        head = model.get_output_embeddings().weight
        end = head[at["<|im_end|>"]].clone()
        head[:256], head[base:] = 0, 0
        head[at["<|im_end|>"]] = end
    model.generation_config = GenerationConfig(**{**special, "eos_token_id": at["<|im_end|>"]})
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=-(-nbytes // shards) + max(t.nbytes for t in model.parameters()) // 2)

    (folder / "config.json").write_text(
        json.dumps(published, indent=2), encoding="utf-8"
    )  # the published keys, not transformers' all
    processor = published_config("preprocessor_config.json")
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "tiktoken.model").write_bytes(_tiktoken_file(base))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(at), indent=2), encoding="utf-8")
    return folder


@torch.no_grad()
def _fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights that keep the size of what flows through: transformers' own start values let all answers be one word."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        inputs = weight[0].numel() if weight.dim() == 4 else weight.shape[-1]
        deviation = 1.0 if "embed_tokens" in name or "pos_emb" in name else inputs**-0.5
        weight.copy_(torch.randn(weight.shape, generator=generator, device="cpu") * deviation)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tiktoken_file(base: int) -> bytes:
    tokens = [bytes([value]) for value in range(256)] + [b" w%d" % number for number in range(256, base)]
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def _tokenizer_config(at: dict[str, int]) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {str(place): {"content": name, **plain} for name, place in at.items()},
        **{"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"},
        **{"clean_up_tokenization_spaces": False, "model_max_length": 8192, "tokenizer_class": "TikTokenTokenizer"},
    }
