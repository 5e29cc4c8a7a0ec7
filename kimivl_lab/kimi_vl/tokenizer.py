"""Kimi's tokenizer: byte pairs from the checkpoint's `tiktoken.model`, run by the `tokenizers` library.

transformers converts a tiktoken file by itself, but with another pattern for cutting text into pieces, and then gives
other ids without an error. This class hands its converter the published pattern. Kimi's differs in two ways: a run of
Han characters is a piece, and letters carry their English contraction ('s, 'll) with them.

    id 0 .. base - 1         tokens of tiktoken.model, in the order of their merges; base is 163,584 as published
    id base .. base + 255    special tokens; those without a published name are `<|reserved_token_ID|>`

Source: the published tokenizer code of Kimi-VL, Kimi-K2 and Moonlight, which share the vocabulary and the pattern.

Test: tests/test_tokenizer.py.
"""

import base64
import binascii
from pathlib import Path
from typing import Any

from transformers import TokenizersBackend
from transformers.convert_slow_tokenizer import TikTokenConverter

_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]{}[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]{}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        _LETTERS.replace("{}", "*", 1).replace("{}", "+", 1) + _CONTRACTION,
        _LETTERS.replace("{}", "+", 1).replace("{}", "*", 1) + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

SPECIAL_TOKENS = 256
# Places of the named special tokens, counted from the end of the tiktoken file's tokens.
SPECIAL_AT = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|im_system|>": 10,
    "<|im_middle|>": 17,
    "<|media_start|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": 254,
    "[PAD]": 255,
}


def read_tiktoken(path: str | Path) -> dict[bytes, int]:
    """Tokens and their ids, from a file of lines "base64 id".

    Raises:
        ValueError: a line of another form, or ids that are not 0, 1, 2, ... in some order; both are named.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f'{path}, line {number}: expected "base64 id", got {line[:80]!r}') from None
    if set(ranks.values()) != set(range(len(ranks))):
        raise ValueError(f"{path} holds {len(ranks)} different tokens, whose ids are not 0 to {len(ranks) - 1}")
    return ranks


class _Converter(TikTokenConverter):
    """transformers' converter, which reads the file without the tiktoken package."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        return read_tiktoken(tiktoken_url)


class TikTokenTokenizer(TokenizersBackend):
    """The tokenizer of Kimi-VL's checkpoints, under the name that their `tokenizer_config.json` gives it.

    A folder with `tokenizer.json`, which `save_pretrained` writes, is read from that file. Prompts are padded on the
    left by default, since generation goes on at the right.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json", "vocab_file": "tiktoken.model"}
    padding_side = "left"

    @classmethod
    def _convert_from_tiktoken(cls, vocab_file: str, local_kwargs: dict[str, Any]) -> dict[str, Any]:
        base = len(read_tiktoken(vocab_file))
        named = {
            int(place): str(_content(token))
            for place, token in (local_kwargs.get("added_tokens_decoder") or {}).items()
        }
        special = [named.get(place, f"<|reserved_token_{place}|>") for place in range(base, base + SPECIAL_TOKENS)]
        converter = _Converter(vocab_file, pattern=PATTERN, extra_special_tokens=special)
        return {**local_kwargs, "tokenizer_object": converter.converted()}


def _content(token: Any) -> Any:
    return token["content"] if isinstance(token, dict) else token
