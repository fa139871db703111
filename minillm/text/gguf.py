"""Builds the tokenizer of a GGUF file from its metadata.

`tokenizer.ggml.model` is "gpt2" (byte-level BPE with stored merges), "llama" (SentencePiece BPE,
whose scores order the merges) or "none". `tokenizer.ggml.pre` names the regular expression that
divides a text before BPE; an unknown name is an error, because any other expression would give
other tokens without notice.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from minillm.errors import CheckpointError, ModelNotFoundError, UnsupportedFeatureError
from minillm.gguf.container import open_gguf
from minillm.gguf.defaults import END_TEXTS, UNUSED, begins, token_id
from minillm.text.gguf_splits import SPLITS, Splits

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # token_type
SPACE = "\u2581"  # SentencePiece's space
MAX_TOKEN = 1024  # characters; finding the merges of a token takes quadratic time
NAMES: Mapping[str, str] = {
    "bos": "bos",
    "eos": "eos",
    "unknown": "unk",
    "padding": "pad",
    "seperator": "sep",
}


class Vocabulary:
    """The `tokenizer.ggml` fields of a file.

    Raises:
        CheckpointError: a field is missing or damaged.
    """

    def __init__(self, path: Path, fields: Mapping[str, Any]):
        self.path, self.fields = path, fields
        self.model = str(self.get("model", "none"))
        self.tokens: tuple[str, ...] = self.array("tokens", str)
        types = self.array("token_type", int, (NORMAL,) * len(self.tokens))
        if len(types) != len(self.tokens):
            raise self.error(f"{len(types)} token types for {len(self.tokens)} tokens")
        # Some files say that the end of a turn is ordinary text.
        self.types: tuple[int, ...] = tuple(
            CONTROL if token in END_TEXTS and kind != UNUSED else kind
            for token, kind in zip(self.tokens, types, strict=True)
        )
        self.ids = {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind != UNUSED
        }
        used = sum(kind != UNUSED for kind in self.types)
        if len(self.ids) != used:
            raise self.error(f"{used - len(self.ids)} tokens twice")
        if any(not 0 < len(token) <= MAX_TOKEN for token in self.tokens):
            raise self.error(f"tokens without characters or with more than {MAX_TOKEN:,}")

    def error(self, what: str) -> CheckpointError:
        """An error that names the file."""
        return CheckpointError(f"The tokenizer of {self.path} has {what}.")

    def get(self, name: str, default: Any = None) -> Any:
        """A field, such as "pre"."""
        return self.fields.get(f"tokenizer.ggml.{name}", default)

    def array(self, name: str, kind: type, default: Any = None) -> Any:
        """A field that is an array of one type."""
        values = self.get(name, default)
        if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
            raise self.error(f"no array of {kind.__name__} named {name}")
        return values

    def special(self, name: str) -> int | None:
        """The id of a special token, such as "bos"; None if the file has none."""
        value = token_id(self.fields, name)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.error(f"the {name} token {value!r} for {len(self.tokens)} tokens")
        return value

    def of_type(self, *kinds: int) -> list[str]:
        """The tokens of some types."""
        return [t for t, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]

    def named(self) -> dict[str, str]:
        """The special tokens as a tokenizer_config.json names them."""
        ids = {ours: self.special(theirs) for theirs, ours in NAMES.items()}
        return {f"{name}_token": self.tokens[i] for name, i in ids.items() if i is not None}


def gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, str, dict[str, str], str | None]:
    """The arguments of `Tokenizer`: a file's tokenizer, the file, the named special tokens and the
    chat template.

    Raises:
        ModelNotFoundError: the file has no tokenizer.
        CheckpointError: its tokenizer is damaged.
        UnsupportedFeatureError: its kind of tokenizer is not supported.
    """
    fields = open_gguf(path).fields
    kind = fields.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        raise ModelNotFoundError(
            f"{path} has no tokenizer, so text cannot be used with this model; token ids still "
            "work: pass {'prompt_token_ids': [...]} as the prompt."
        )
    if kind not in ("gpt2", "llama"):
        raise UnsupportedFeatureError(
            f"{path} has a tokenizer of the kind {kind!r}; this version reads gpt2 and llama."
        )
    vocabulary = Vocabulary(path, fields)
    backend = byte_level(vocabulary) if kind == "gpt2" else sentencepiece(vocabulary)
    add_tokens(backend, vocabulary)
    backend.post_processor = around(vocabulary)
    template = fields.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return backend, str(path), vocabulary.named(), template


def byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """BPE over bytes, as in GPT-2."""
    splits = splits_of(vocabulary)
    pairs = [tuple(merge.split(" ")) for merge in vocabulary.array("merges", str)]
    model = bpe(vocabulary, pairs, ignore_merges=splits.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if splits.normalizer is not None:
        backend.normalizer = splits.normalizer()
    backend.pre_tokenizer = splits.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def splits_of(vocabulary: Vocabulary) -> Splits:
    """The pre-tokenizer that the file names."""
    name = vocabulary.get("pre")
    if name not in SPLITS:
        raise UnsupportedFeatureError(
            f"{vocabulary.path} has the pre-tokenizer {name!r}; this version has "
            f"{', '.join(SPLITS)}."
        )
    return SPLITS[name]


def sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: always merge the neighbours whose union has the best score."""
    scores = vocabulary.array("scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.error(f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
    unknown = vocabulary.special("unknown")
    model = bpe(
        vocabulary,
        merges_by_score(vocabulary, scores),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = vocabulary.get("add_space_prefix", True)
    steps = [normalizers.Prepend(SPACE)] * bool(prefix) + [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence(steps)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *[decoders.Strip(" ", 1, 0)] * bool(prefix)])
    return backend


def merges_by_score(vocabulary: Vocabulary, scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """All pairs of tokens whose union is a token, best score first; equal ones by the ids of the
    pair. Only normal tokens are merged: the text of a special token is no part of BPE."""
    ids = {t: i for t, i in vocabulary.ids.items() if vocabulary.types[i] in (NORMAL, USER_DEFINED)}
    merges = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[i], left, right))
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, left, right in sorted(merges)]


def bpe(vocabulary: Vocabulary, merges: list[Any], **options: Any) -> models.BPE:
    """The BPE model. The library raises plain Exception, for example for a merge of an unknown
    token."""
    try:
        return models.BPE(vocabulary.ids, merges, **options)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise vocabulary.error(f"merges that do not fit its tokens ({text})") from error


def add_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Tokens that are found in a text before BPE: control tokens, and those of users."""
    unknown = vocabulary.of_type(UNKNOWN) if vocabulary.model == "llama" else []
    control = [*unknown, *vocabulary.of_type(CONTROL)]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    own = vocabulary.of_type(USER_DEFINED)
    backend.add_tokens([AddedToken(t, normalized=False) for t in own])


def around(vocabulary: Vocabulary) -> Any:
    """The post-processor that adds bos and eos."""
    bos = vocabulary.special("bos") if begins(vocabulary.fields) else None
    eos = vocabulary.special("eos") if vocabulary.get("add_eos_token", False) else None
    for name, number in (("bos", bos), ("eos", eos)):
        if number is None and vocabulary.get(f"add_{name}_token"):
            raise vocabulary.error(f"add_{name}_token, but no {name}_token_id")
    before, after = ([] if i is None else [(vocabulary.tokens[i], i)] for i in (bos, eos))
    if not before and not after:
        return processors.ByteLevel(trim_offsets=False)
    single = [*(token for token, _ in before), "$A", *(token for token, _ in after)]
    return processors.TemplateProcessing(
        single=single, pair=[*single, "$B"], special_tokens=[*before, *after]
    )
