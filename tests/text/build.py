"""Tokenizers of every kind, trained in milliseconds on a few sentences written for these tests."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps.",
    "It's a test: don't panic!  Two  spaces, and 3.14 numbers.",
    "naïve café, garçon, Straße, e\u0301 combining, Ångström",
    "日本語のテキスト。中文文本，标点。",
    "한국어 텍스트도 있습니다.",
    "emoji 😀 😀 👩‍👩‍👧 and flags 🇫🇷",
] * 3
"""Small, but with every script the tests decode."""

TEXTS = [
    "", " ", "Hello world", "  leading and trailing  ", "line\n\n\tbreak",
    "def fib(n):\n    return n", "日本語と中文, 한국어! 漢字", "emoji: 😀👩‍👩‍👧🇫🇷 done",
    "e\u0301 A\u030a cafe\u0301", "before<|im_end|>after </s> x<s>",
    "zero\x00byte and \ufffd itself", "a<think>b",
]  # fmt: skip
"""Inputs compared with transformers."""


def train(tokenizer: Tokenizer, kind: Any, special: list[str], **options: Any) -> Tokenizer:
    trainer = kind(special_tokens=special, show_progress=False, **options)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level(with_bos: bool = False) -> Tokenizer:
    """GPT-2, Qwen and Llama 3: byte-level BPE, one added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}|[^\s\p{L}\p{N}]+|\s?\p{L}+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(tokenizer, trainers.BpeTrainer, special, vocab_size=400, initial_alphabet=alphabet)
    tokenizer.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("é漢", special=False)]
    )
    if with_bos:
        tokenizer.post_processor = _bos_template("<|endoftext|>", tokenizer)
    return tokenizer


def _bos_template(bos: str, tokenizer: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )  # fmt: skip


def _sentencepiece_bpe() -> models.BPE:
    """A BPE model over ``▁`` pieces whose first 259 ids are those of Llama 2: specials, bytes."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False)
    # Neither CJK nor newlines: those go through byte tokens, as in Llama 2.
    draft.train_from_iterator(" ".join(CORPUS[:3]).split("\n"), trainer)
    trained = json.loads(draft.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += [p for p in trained["vocab"] if p not in pieces]
    return models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in trained["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )


def llama2(with_bos: bool = True) -> Tokenizer:
    """Llama 2 and Mistral files: a Prepend normalizer, byte fallback, one space stripped."""
    tokenizer = Tokenizer(_sentencepiece_bpe())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if with_bos:
        tokenizer.post_processor = _bos_template("<s>", tokenizer)
    return tokenizer


def metaspace_first() -> Tokenizer:
    """Newer Llama files: Metaspace that prefixes the first piece only."""
    tokenizer = llama2()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def unigram() -> Tokenizer:
    """T5-like: Unigram with a Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    return train(tokenizer, trainers.UnigramTrainer, special, vocab_size=220, unk_token="<unk>")


def wordlevel() -> Tokenizer:
    """Whole words, no decoder: tokens are joined with spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return train(tokenizer, trainers.WordLevelTrainer, ["<unk>", "</s>"])


def wordpiece() -> Tokenizer:
    """BERT-like: ``##`` continuations, a decoder that tidies spaces before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return train(tokenizer, trainers.WordPieceTrainer, ["[UNK]", "</s>"], vocab_size=250)


def bpe_suffix() -> Tokenizer:
    """The first GPT: words end in ``</w>``, which is a space except in the last token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    options = {"vocab_size": 250, "end_of_word_suffix": "</w>"}
    return train(tokenizer, trainers.BpeTrainer, ["<unk>", "</s>"], **options)


KINDS = {
    "byte_level": byte_level, "byte_level_bos": lambda: byte_level(with_bos=True), "llama2": llama2,
    "llama2_no_bos": lambda: llama2(with_bos=False), "metaspace_first": metaspace_first,
    "unigram": unigram, "wordlevel": wordlevel, "wordpiece": wordpiece, "bpe_suffix": bpe_suffix,
}  # fmt: skip


def write_folder(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """Write ``tokenizer.json`` and a ``tokenizer_config.json`` with the given keys."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
