"""Tokenizers of Hugging Face checkpoint folders: text to token ids and back.

``tokenizer.json`` alone defines how text becomes ids; its post-processor adds the
beginning-of-sequence token, if any. ``tokenizer_config.json`` has the names of special tokens (bos,
eos), some added tokens and the chat template. Its ``add_bos_token`` and ``add_eos_token`` are
ignored, as in transformers 5 with a ``tokenizer.json``: they configured the old slow tokenizers.

There is one deliberate difference. For ``tokenizer_class: LlamaTokenizer`` transformers 5 replaces
the file's normalizer by its own, which drops the dummy space before a text that begins with a space
and (unless ``legacy``) after special tokens. This module uses the file's, as SentencePiece does.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from minillm.api.sampling_params import shown
from minillm.errors import (
    CheckpointError,
    ForeignCode,
    InvalidRequestError,
    ModelNotFoundError,
    reason,
)
from minillm.gguf.container import is_gguf
from minillm.text.chat_messages import Message
from minillm.text.chat_prompt import ControlTokens, chat_prompt
from minillm.text.chat_template import ChatTemplate
from minillm.text.gguf import gguf_tokenizer


def _byte_alphabet() -> Mapping[str, int]:
    """The characters that represent bytes in a byte-level vocabulary (Radford et al., GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF: Mapping[str, int] = _byte_alphabet()

DECODING = ForeignCode(InvalidRequestError, "The tokens cannot be decoded")
LONG_TEXT = 2_000  # characters; tokenising more takes milliseconds


class TokenBytes(dict[int, bytes]):
    """UTF-8 bytes of each token of a byte-level tokenizer, looked up at the first use; empty for
    unknown ids. A text is the concatenation of its tokens' bytes."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        piece = self._tokenizer.piece(token_id)
        try:  # as in the decoder: with any character outside the alphabet, the token is plain text
            value = bytes([BYTE_OF[character] for character in piece])
        except KeyError:
            value = piece.encode()
        self[token_id] = value
        return value


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library with the settings of a checkpoint folder.

    Immutable after construction, so it may be shared by threads.

    Args:
        backend: the loaded ``tokenizer.json``, including all added tokens.
        origin: the checkpoint folder, for error messages.
        special_tokens: ``{"bos_token": "<s>", ...}``.
        chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        origin: str = "this tokenizer",
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()  # a stored truncation would silently shorten prompts
        backend.no_padding()
        self._backend = backend
        self.origin = origin
        self.special_tokens = dict(special_tokens or {})
        self._template = None if chat_template is None else ChatTemplate(
            chat_template, origin, self.special_tokens
        )  # fmt: skip
        self.vocab_size: int = (
            max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        """Largest token id plus one. The logit width of a model is often larger."""
        eos = self.special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else backend.token_to_id(eos)
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        """Ids of special tokens, which ``skip_special_tokens`` leaves out of the text."""
        self.byte_fallback: dict[int, int] = _byte_fallback(backend)
        """The byte of each ``<0xXX>`` token; empty without byte fallback."""
        self.token_bytes: TokenBytes | None = None
        """The bytes of each token if the decoder is ``ByteLevel``, else None."""
        decoder = backend.decoder
        if decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel":
            self.token_bytes = TokenBytes(self)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Load ``tokenizer.json`` and the files beside it, or the tokenizer of a GGUF file.

        Raises:
            ModelNotFoundError: there is no such folder, or no ``tokenizer.json`` in it.
            CheckpointError: a file is damaged.
        """
        folder = Path(path)
        if is_gguf(folder):
            with ForeignCode(CheckpointError, f"The tokenizer of {folder} cannot be used"):
                return cls(*gguf_tokenizer(folder))
        file = folder / "tokenizer.json"
        what = f"The tokenizer folder {shown(str(path))} cannot be looked up"
        with ForeignCode(ModelNotFoundError, what):
            is_folder, is_file = folder.is_dir(), file.is_file()
        if not is_folder:
            raise ModelNotFoundError(f"There is no tokenizer folder {str(path)!r}.")
        if not is_file:
            raise ModelNotFoundError(
                f"{str(path)!r} has no tokenizer.json, so text cannot be used with this model; "
                "token ids still work: pass {'prompt_token_ids': [...]} as the prompt."
            )
        with ForeignCode(CheckpointError, f"{file} cannot be read as a tokenizer"):
            backend = tokenizers.Tokenizer.from_file(str(file))
            config = _read_json(folder / "tokenizer_config.json")
            named, unnamed = _special_tokens(folder, config)
            _add_missing_tokens(backend, folder, config, named, unnamed)
            return cls(backend, str(path), named, _chat_template_source(folder, config))

    def same_tokens(self, other: "Tokenizer") -> bool:
        """Whether both vocabularies are the same."""
        mine, theirs = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        return mine == theirs

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``, by default with the special tokens of the post-processor.

        Raises:
            InvalidRequestError: ``text`` is not a string, has lone surrogates, or the library
                failed.
        """
        return self.encoding(text, add_special_tokens, fast=True).ids

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The ids of a word at the start of a text and after a space: what vLLM's bad_words ban."""
        texts = word.lstrip(), " " + word.lstrip()
        return sorted({tuple(self.encode(text, False)) for text in texts} - {()})

    def encoding(
        self, text: str, add_special_tokens: bool, fast: bool = False
    ) -> tokenizers.Encoding:
        """`encode` with the characters of each token, as the library counts them; without these if
        `fast`."""
        if not isinstance(text, str):
            raise InvalidRequestError(f"A prompt text must be a string, not {type(text).__name__}.")
        backend, special = self._backend, add_special_tokens
        with ForeignCode(InvalidRequestError, "The text cannot be tokenized", partial(_why, text)):
            if fast and len(text) > LONG_TEXT:  # a batch of one, which releases the GIL
                return backend.encode_batch_fast([text], add_special_tokens=special)[0]
            return backend.encode(text, add_special_tokens=special)

    def first_token_bytes(self, text: str) -> int:
        """The number of UTF-8 bytes of `text` in its first token.

        It is 0 for a token that the tokenizer adds (bos, a dummy space). It is exact for a part of
        a character, too, unless a normalizer changes that character.
        """
        encoding = self.encoding(text, add_special_tokens=True)
        if not encoding.ids:
            return 0
        token_id, end = encoding.ids[0], encoding.offsets[0][1]
        piece = self.byte_piece(token_id)
        # Offsets count characters and may leave out spaces, so the token's bytes are tried first.
        # They differ from the text's only by a dummy space at the start, or by a normalizer.
        for own in (piece, piece.removeprefix(b" ")):
            if own and text.encode().startswith(own):
                return len(own)
        covered = len(text[:end].encode())
        if len(encoding) == 1 or encoding.offsets[1][0] >= end:
            return covered
        own = piece or self.token_text(token_id).encode()
        return min(covered, len(own if text.startswith(" ") else own.removeprefix(b" ")))

    def byte_piece(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary or of byte fallback, else empty."""
        if token_id in self.byte_fallback:
            return bytes([self.byte_fallback[token_id]])
        piece = self._backend.id_to_token(token_id) or ""
        if not _has_decoder(self._backend, "ByteLevel") or not BYTE_OF.keys() >= set(piece):
            return b""
        added = token_id in self._backend.get_added_tokens_decoder()  # stored as plain text
        return b"" if added else bytes(BYTE_OF[character] for character in piece)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; unknown ids have no text. InvalidRequestError: it failed."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        with DECODING:
            return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str:
        """A token as it is in the vocabulary; ``""`` for an unknown id."""
        known = 0 <= token_id < self.vocab_size
        return (self._backend.id_to_token(token_id) or "") if known else ""

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether the id is known and not a skipped special token."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a longer text; ``""`` for an unknown id.

        Unlike ``decode([token_id])`` this keeps the leading space that decoders drop at the start
        of a text, so the texts of a prompt's tokens join to it. Part of a character is U+FFFD.
        """
        anchor, prefix = self.anchor
        text = self.decode([*anchor, token_id], skip_special_tokens=False)
        return text[len(prefix) :] if text.startswith(prefix) else self.decode([token_id], False)

    @cached_property
    def anchor(self) -> tuple[list[int], str]:
        """A token with visible ASCII text, after which other tokens are decoded, and its text."""
        for token_id in range(self.vocab_size):
            text = ""
            with suppress(InvalidRequestError):  # the decoder fails on this token
                text = "" if token_id in self.special_ids else self.decode([token_id])
            if text.strip() and text.isascii() and token_id not in self.byte_fallback:
                return [token_id], text
        return [], ""

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; a text of n tokens has at most n times as many."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """The special tokens, as `chat_prompt` needs them."""
        return ControlTokens(self._backend, partial(Tokenizer, origin=self.origin))

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder has a (default) chat template."""
        return self._template is not None

    def with_chat_template(self, source: str) -> "Tokenizer":
        """This tokenizer with another chat template."""
        return Tokenizer(self._backend, self.origin, self.special_tokens, source)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str | list[int]:
        """transformers' name for `chat_prompt`, with its options: a conversation as ids, or as
        text."""
        prompt = chat_prompt(self, messages, add_generation_prompt, **options)
        return prompt.ids() if tokenize else prompt.text

    @property
    def template(self) -> ChatTemplate:
        """The checkpoint's chat template; InvalidRequestError if there is none."""
        if self._template is None:
            raise InvalidRequestError(
                f"{self.origin} has no chat template (it is a base model, or the file is missing); "
                "use generate with a plain prompt instead."
            )
        return self._template

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of `chat_prompt`."""
        return chat_prompt(self, messages, add_generation_prompt).text


def _why(text: str, error: BaseException) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as bad:
        return f"character {bad.start} is a lone surrogate ({text[bad.start]!r}), which is not text"
    return reason(error)


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``, or {} if there is no such file."""
    text = _read_text(file)
    if text is None:
        return {}
    with ForeignCode(CheckpointError, f"{file} is not valid JSON"):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(value).__name__}.")
    return value


def _read_text(file: Path) -> str | None:
    """The text of a file, or None if there is no such file."""
    with ForeignCode(CheckpointError, f"{file} cannot be read"), suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8")
    return None


def _content(token: object) -> str | None:
    """The text of a token given as a string or as ``{"content": string, ...flags}``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _special_tokens(folder: Path, config: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The named special tokens (``bos_token``, ...) and the unnamed ones."""
    # special_tokens_map.json is an older file, used if the newer table is missing.
    older = (
        {} if "added_tokens_decoder" in config else _read_json(folder / "special_tokens_map.json")
    )
    merged = {**config, **older}
    named = {key: text for key, value in merged.items()
             if key.endswith("_token") and (text := _content(value))}  # fmt: skip
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    if isinstance(extra, dict):  # model-specific names, such as {"image_token": "<image>"}
        named.update({key: text for key, value in extra.items() if (text := _content(value))})
        extra = []
    if not isinstance(extra, list):
        raise CheckpointError(f"The extra special tokens of {str(folder)!r} are not a list.")
    return named, [text for value in extra if (text := _content(value))]


def _table_of_added_tokens(
    folder: Path, config: dict[str, Any], special: list[str]
) -> list[tokenizers.AddedToken]:
    """The tokens of ``added_tokens_decoder`` (or of the older file), ordered by id."""
    table = config.get("added_tokens_decoder")
    older = _read_json(folder / "added_tokens.json") if table is None else {}
    with ForeignCode(CheckpointError, f"The added tokens of {str(folder)!r} are damaged"):
        if table is None:
            table = {i: {"content": text, "special": text in special} for text, i in older.items()}
        rows = sorted((int(token_id), dict(row)) for token_id, row in table.items())
        return [tokenizers.AddedToken(row.pop("content"), **row) for _, row in rows]


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: dict[str, Any],
    named: dict[str, str], unnamed: list[str],
) -> None:  # fmt: skip
    """Add the tokens of the other files that ``tokenizer.json`` lacks; they get new ids."""
    table = _table_of_added_tokens(folder, config, [*named.values(), *unnamed])
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in table if repr(token) not in known])
    # Named tokens become special; unnamed tokens that are known already keep their flags.
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    missing = [t for t in named.values() if not added.get(t)] + [
        t for t in unnamed if t not in added
    ]
    backend.add_special_tokens(list(dict.fromkeys(missing)))


def _chat_template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """The default template: from its own file, else from the configuration."""
    if (own := _read_text(folder / "chat_template.jinja")) is not None:
        return own
    given = config.get("chat_template")
    if given is None:
        given = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(given, list):  # [{"name": "default", "template": "..."}, ...]
        given = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
    if isinstance(given, dict):
        given = given.get("default")
    return given if isinstance(given, str) else None


def _byte_fallback(backend: tokenizers.Tokenizer) -> dict[int, int]:
    if not _has_decoder(backend, "ByteFallback"):
        return {}
    ids = ((byte, backend.token_to_id(f"<0x{byte:02X}>")) for byte in range(256))
    return {token_id: byte for byte, token_id in ids if token_id is not None}


def _has_decoder(backend: tokenizers.Tokenizer, name: str) -> bool:
    return backend.decoder is not None and name.encode() in backend.decoder.__getstate__()
