"""What a GGUF file leaves unsaid about its tokens, completed as llama.cpp's reader does
(src/llama-vocab.cpp). A field of the file wins over its default here.

Not followed: llama.cpp takes token 11, which is Falcon's, for a missing bos or eos of any
byte-level vocabulary; here such a file has none.
"""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

UNUSED = 5  # a token_type
SENTENCEPIECE: Mapping[str, int] = {"unknown": 0, "bos": 1, "eos": 2}
BEGINS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})  # pre-tokenizers that add bos
END_TOKENS = ("eos", "eot", "eom")  # of a text, a turn, a message
FILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")  # code: padding, the next repository, the next file
# Tokens that end a generation whatever their type. Left out are those of architectures that are
# not read (gpt-oss, gemma4, minimax), where some of these do not end one.
END_TEXTS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>",
    "<｜end▁of▁sentence｜>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip


def token_id(fields: Mapping[str, Any], name: str) -> Any:
    """The id of a special token such as "bos", as stored or by default; None if there is none."""
    default = SENTENCEPIECE.get(name) if fields.get("tokenizer.ggml.model") == "llama" else None
    if default is not None and default >= len(items(fields, "tokens")):
        default = None
    return fields.get(f"tokenizer.ggml.{name}_token_id", default)


def begins(fields: Mapping[str, Any]) -> bool:
    """Whether bos is added to every text."""
    kind, pre = (fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    return bool(fields.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in BEGINS))


def end_ids(fields: Mapping[str, Any]) -> list[Any]:
    """The ids of all tokens that end a generation: the stored ones first, then those by text."""
    stored = [token_id(fields, name) for name in END_TOKENS + FILL_ENDS]
    pairs = zip_longest(items(fields, "tokens"), items(fields, "token_type"))
    by_text = [i for i, (t, kind) in enumerate(pairs) if t in END_TEXTS and kind != UNUSED]
    return list(dict.fromkeys([*(i for i in stored if i is not None), *by_text]))


def items(fields: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """An array of the tokenizer; empty if the file has none (`text/gguf.py` says so)."""
    value = fields.get(f"tokenizer.ggml.{name}")
    return value if isinstance(value, tuple) else ()
