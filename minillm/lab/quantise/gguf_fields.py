"""The tokenizer of a folder as the metadata of a GGUF file, the inverse of `text/gguf.py`."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from minillm.errors import ModelNotFoundError, UnsupportedFeatureError
from minillm.gguf.defaults import UNUSED
from minillm.text.gguf import CONTROL, NAMES, NORMAL, USER_DEFINED
from minillm.text.gguf_splits import SPLITS, Splits
from minillm.text.tokenizer import Tokenizer


def tokenizer_fields(folder: Path, vocab_size: int) -> dict[str, Any]:
    """The `tokenizer.*` fields of a file for a model with `vocab_size` logits. Without a tokenizer,
    the file says so.

    Raises:
        UnsupportedFeatureError: GGUF has no name for a part of the tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except ModelNotFoundError:
        return {"tokenizer.ggml.model": "none"}
    state = json.loads(tokenizer._backend.to_str())
    if state["model"]["type"] != "BPE" or tokenizer.token_bytes is None:
        raise UnsupportedFeatureError(
            f"The tokenizer of {folder} is not byte-level BPE; this version writes only that kind "
            "into a GGUF file."
        )
    tokens, kinds = vocabulary(tokenizer, vocab_size)
    merges = state["model"]["merges"]
    begins, ends = around(tokenizer)
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": splits_name(folder, state),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.add_bos_token": begins,
        "tokenizer.ggml.add_eos_token": ends,
    }
    for theirs, ours in NAMES.items():
        token = tokenizer.special_tokens.get(f"{ours}_token")
        if token is not None:
            fields[f"tokenizer.ggml.{theirs}_token_id"] = tokenizer._backend.token_to_id(token)
    if tokenizer._template is not None:
        fields["tokenizer.chat_template"] = tokenizer._template.source
    return fields


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[str], list[int]]:
    """Token and type of each id; ids without a token are unused."""
    added: dict[int, AddedToken] = tokenizer._backend.get_added_tokens_decoder()
    for each in added.values():
        normalized = each.normalized and tokenizer._backend.normalizer is not None
        if each.lstrip or each.rstrip or each.single_word or normalized:
            raise UnsupportedFeatureError(
                f"The added token {each.content!r} depends on the text around it or is found after "
                "normalisation, which a GGUF file cannot say."
            )
    by_id = {i: t for t, i in tokenizer._backend.get_vocab(with_added_tokens=True).items()}
    count = max(vocab_size, tokenizer.vocab_size)
    kinds = [NORMAL if i in by_id else UNUSED for i in range(count)]
    for i, each in added.items():
        kinds[i] = CONTROL if each.special else USER_DEFINED
    return [by_id.get(i, f"[PAD{i}]") for i in range(count)], kinds


def splits_name(folder: Path, state: dict[str, Any]) -> str:
    """GGUF's name of the pre-tokenizer and normalizer."""
    wanted = steps(state["pre_tokenizer"]), state["normalizer"], state["model"]["ignore_merges"]
    for name, splits in SPLITS.items():
        if described(splits) == wanted:
            return name
    raise UnsupportedFeatureError(
        f"The pre-tokenizer of {folder} has no name in GGUF; names are {', '.join(SPLITS)}."
    )


def described(splits: Splits) -> tuple[Any, Any, bool]:
    """What `splits_name` compares."""
    normalizer = splits.normalizer() if splits.normalizer else None
    return (
        steps(json.loads(splits.build().__getstate__())),
        None if normalizer is None else json.loads(normalizer.__getstate__()),
        splits.ignore_merges,
    )


def steps(state: Any) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer, without settings that only change offsets."""
    found = state.get("pretokenizers", [state]) if state else []
    return [{key: value for key, value in each.items() if key != "trim_offsets"} for each in found]


def around(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether bos and eos are added to every text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=add) for add in (False, True))
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    found = whole[:at], whole[at + len(plain) :]
    ids = [
        tokenizer._backend.token_to_id(tokenizer.special_tokens.get(name, ""))
        for name in ("bos_token", "eos_token")
    ]
    if any(each not in ([], [due]) for each, due in zip(found, ids, strict=True)):
        raise UnsupportedFeatureError(
            f"The tokenizer of {tokenizer.origin} adds other tokens than bos and eos around a "
            "text, which a GGUF file cannot say."
        )
    return bool(found[0]), bool(found[1])
