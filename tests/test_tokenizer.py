"""Kimi's tokenizer against tiktoken itself, on a small vocabulary in the published format."""

import base64
import json
import random
import unicodedata

import pytest
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kimivl_lab.config import published_config
from kimivl_lab.kimi_vl.tokenizer import PATTERN, SPECIAL_AT, SPECIAL_TOKENS, TikTokenTokenizer, read_tiktoken

# As the published tokenizer code writes it.
PUBLISHED_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
PUBLISHED_IDS = {
    **{"[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588},
    **{"<|im_system|>": 163594, "<|im_middle|>": 163601, "<|media_start|>": 163602, "<|media_content|>": 163603},
    **{"<|media_end|>": 163604, "<|media_pad|>": 163605, "[UNK]": 163838, "[PAD]": 163839},
}
SENTENCES = [
    "Kimi-VL reads images at their own resolution; it'll cost h*w/4 tokens.\n\n\tdef f(x): return x**2  # 12345",
    "中文English混合，北京市 Pascal；模型的视觉编码器很快。「你好」世界！１２３",
    "日本語の文章はひらがなとカタカナと漢字です。ＡＢＣ ｱｲｳ",
    "Съешь ещё этих мягких французских булок; ЁЖ'll DON'T don't I'VE",
    "שלום עליכם — السلام عليكم — नमस्ते दुनिया — สวัสดีชาวโลก — 안녕하세요 세계",
    "Ünïcödé ǅ ǆ ʰ ﬁ Ⅷ ½ ² 🇩🇪 👩‍👩‍👧 🤖\r\n \r \u00a0\u2003\u3000 e\u0301 \u0928\u093f",
]


def _ranks() -> dict[bytes, int]:
    """A vocabulary with real merges, learnt from the sentences."""
    cut = [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 5, trainer)
    as_byte = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return {bytes(as_byte[letter] for letter in token): rank for token, rank in tokenizer.get_vocab().items()}


def _named(base: int) -> dict[str, int]:
    return {name: base + place for name, place in SPECIAL_AT.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    ranks = _ranks()
    lines = sorted(ranks.items(), key=lambda item: item[1])
    (folder / "tiktoken.model").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in lines))
    added = {str(place): {"content": name, "special": True} for name, place in _named(len(ranks)).items()}
    settings: dict = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "pad_token": "[PAD]"}
    settings |= {"auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}, "bos_token": "[BOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(published_config()))
    (folder / "tokenization_moonshot.py").write_text("open('executed', 'w'); raise SystemExit('this must not run')")
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    """tiktoken with the published pattern, special tokens at the published places behind the vocabulary."""
    ranks = read_tiktoken(folder / "tiktoken.model")
    special = _named(len(ranks))
    rest = set(range(len(ranks), len(ranks) + SPECIAL_TOKENS)) - set(special.values())
    special |= {f"<|reserved_token_{place}|>": place for place in rest}
    return tiktoken.Encoding("kimi", pat_str=PUBLISHED_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def _strings(count: int) -> list[str]:
    """Pieces of the sentences beside letters of every script, spaces, signs and special tokens."""
    letters = [chr(code) for code in range(32, 0x2FFFF, 13) if unicodedata.category(chr(code))[0] not in "C"]
    letters += list(" \t\r\n  '’") * 300 + ["'s", "'LL", "'Re", "12", "３４", "中", "文"] * 100
    letters += ["<|media_pad|>", "<|im_end|>", "[BOS]", "<|media_", "|>"] * 20
    chance = random.Random(0)
    made = []
    for _ in range(count):
        start = chance.randrange(40)
        piece = chance.choice(SENTENCES)[start : start + chance.randrange(40)]
        made.append(piece + "".join(chance.choices(letters, k=chance.randrange(50))))
    return made


def test_ids_are_tiktokens_on_strings_of_many_scripts(folder, reference):
    tokenizer = TikTokenTokenizer.from_pretrained(folder)
    for text in [*SENTENCES, *_strings(2000), "", " ", "a" * 3000]:
        ids = tokenizer(text)["input_ids"]
        assert ids == reference.encode(text, allowed_special="all"), text
        assert tokenizer.decode(ids) == text


def test_a_run_of_han_is_a_piece_and_letters_beside_it_are_others(folder):
    cut = TikTokenTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer
    for text, pieces in {
        "中文English混合": ["中文", "English", "混合"],
        "北京市 Pascal": ["北京市", " Pascal"],
        "they'll": ["they'll"],
        "1234567": ["123", "456", "7"],
    }.items():
        spans = [span for _, span in cut.pre_tokenize_str(text)]
        assert [text[start:end] for start, end in spans] == pieces


def test_transformers_own_reading_of_the_file_cuts_otherwise(folder, reference):
    """The control: without the published pattern the comparison above fails."""
    from transformers import TokenizersBackend

    plain = TokenizersBackend.from_pretrained(folder)
    assert any(plain(text)["input_ids"] != reference.encode(text) for text in SENTENCES)


def test_special_tokens_stand_at_their_published_ids(tmp_path):
    """As published: 163,584 tokens in the file, the placeholder is 163605, padding 163839."""
    from kimivl_lab.kimi_vl.random_checkpoint import _tiktoken_file, _tokenizer_config

    (tmp_path / "tiktoken.model").write_bytes(_tiktoken_file(163584))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(_named(163584))))
    tokenizer = TikTokenTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 163840
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in PUBLISHED_IDS} == PUBLISHED_IDS
    published = published_config()
    assert PUBLISHED_IDS["<|media_pad|>"] == published["media_placeholder_token_id"]
    assert tokenizer.pad_token_id == published["pad_token_id"]
    assert tokenizer.bos_token_id == published["text_config"]["bos_token_id"]
    assert tokenizer.eos_token_id == published["text_config"]["eos_token_id"]
    assert tokenizer.decode([163606]) == "<|reserved_token_163606|>"


def test_auto_tokenizer_finds_the_class_and_runs_nothing_of_the_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert type(AutoTokenizer.from_pretrained(folder)) is TikTokenTokenizer
    assert not (tmp_path / "executed").exists()


def test_a_saved_tokenizer_gives_the_same_ids(folder, tmp_path, reference):
    TikTokenTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    again = TikTokenTokenizer.from_pretrained(tmp_path)
    assert again.padding_side == "left" and again.pad_token == "[PAD]"
    for text in [*SENTENCES, *_strings(50)]:
        assert again(text)["input_ids"] == reference.encode(text, allowed_special="all")


@pytest.mark.parametrize("line", [b"YQ==", b"YQ== x", b"Y?== 3", b"YQ== 1 2"])
def test_a_damaged_vocabulary_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"YQ== 0\n" + line + b"\n")
    with pytest.raises(ValueError, match="line 2"):
        read_tiktoken(path)


def test_ids_with_a_gap_are_refused(tmp_path):
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"YQ== 0\nYg== 2\n")
    with pytest.raises(ValueError, match="2 different tokens"):
        read_tiktoken(path)
