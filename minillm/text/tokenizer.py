"""Text to token ids and back, by the files of a Hugging Face folder.

``tokenizer.json`` is the whole truth about how text becomes ids, the first token included: its
post-processor says whether a beginning-of-sequence token is added. ``tokenizer_config.json`` adds
names (which token is bos, which is eos), a few added tokens and the chat template. Its
``add_bos_token`` and ``add_eos_token`` are ignored, as transformers 5 ignores them whenever there
is a ``tokenizer.json``: they configured the slow tokenizers that no longer exist.

One difference is deliberate. For ``tokenizer_class: LlamaTokenizer`` transformers 5 replaces the
normalizer of the file by its own, which drops the dummy space before a text that begins with a
space, and (unless ``legacy``) after special tokens. The file as published is SentencePiece's rule.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from minillm.api.sampling_params import shown
from minillm.errors import CheckpointError, InvalidRequestError, ModelNotFoundError
from minillm.text.chat_template import ChatTemplate, Message


def _byte_alphabet() -> Mapping[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary (Radford et al., GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF: Mapping[str, int] = _byte_alphabet()

LONG_TEXT = 2_000  # characters, which take milliseconds


class TokenBytes(dict[int, bytes]):
    """UTF-8 bytes of each token of a byte-level tokenizer, looked up when first needed; none for
    an id without an entry. A text is its tokens' bytes, one after another."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        piece = self._tokenizer.piece(token_id)
        try:  # as the decoder does: one character beyond the alphabet, and all stay as they are
            found = bytes([BYTE_OF[character] for character in piece])
        except KeyError:
            found = piece.encode()
        self[token_id] = found
        return found


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library with the rules of one checkpoint folder.

    Immutable after construction, so one object may serve many threads.

    Args:
        backend: the loaded ``tokenizer.json``, with every added token already added.
        origin: the folder, for error messages.
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
        self._template = (
            None if chat_template is None
            else ChatTemplate(chat_template, origin, self.special_tokens)
        )  # fmt: skip
        self.vocab_size: int = (
            max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        """Largest token id plus one. The logit width of a model is often larger."""
        self.eos_token_id: int | None = self._named_id("eos_token")
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        """Ids that ``skip_special_tokens`` leaves out of the text."""
        self.byte_fallback: dict[int, int] = _byte_fallback(backend)
        """Ids of the ``<0xXX>`` tokens, each with its byte; empty without a byte fallback."""
        self.token_bytes: TokenBytes | None = None
        """What ``decode`` joins, where that is bytes: a decoder that is ``ByteLevel`` alone."""
        if backend.decoder is not None and _state(backend.decoder).get("type") == "ByteLevel":
            self.token_bytes = TokenBytes(self)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Load ``tokenizer.json`` and its neighbours from a local folder.

        Raises:
            ModelNotFoundError: no such folder, or no ``tokenizer.json`` in it.
            CheckpointError: a file is there but damaged.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        try:
            is_folder, is_file = folder.is_dir(), file.is_file()
        except OSError as error:
            raise ModelNotFoundError(
                f"The tokenizer folder {shown(str(path))} cannot be looked up: {_line(error)}."
            ) from error
        if not is_folder:
            raise ModelNotFoundError(f"There is no tokenizer folder {str(path)!r}.")
        if not is_file:
            raise ModelNotFoundError(
                f"{str(path)!r} has no tokenizer.json, so text cannot be used with this model; "
                "token ids still work: pass {'prompt_token_ids': [...]} as the prompt."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for every bad file
            raise CheckpointError(
                f"{file} cannot be read as a tokenizer: {_line(error)}."
            ) from error
        config = _read_json(folder / "tokenizer_config.json")
        named, unnamed = _special_tokens(folder, config)
        _add_missing_tokens(backend, folder, config, named, unnamed)
        return cls(backend, str(path), named, _chat_template_source(folder, config))

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def same_tokens(self, other: "Tokenizer") -> bool:
        """Whether each id is the same token in both."""
        mine, theirs = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        return mine == theirs

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; the post-processor's own tokens only if asked for.

        Raises:
            InvalidRequestError: not a string, or one with lone surrogates (not text).
        """
        if isinstance(text, str) and len(text) > LONG_TEXT:
            return self._encode_long(text, add_special_tokens)
        return self._encoding(text, add_special_tokens).ids

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        """The same as a batch of one, during which other Python threads can run."""
        try:
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except Exception as error:
            raise InvalidRequestError(
                f"The text cannot be tokenized: {_why(text, error)}."
            ) from error
        return batch[0].ids

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if not isinstance(text, str):
            raise InvalidRequestError(f"A prompt text must be a string, not {type(text).__name__}.")
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # TypeError for surrogates, plain Exception inside the library
            raise InvalidRequestError(
                f"The text cannot be tokenized: {_why(text, error)}."
            ) from error

    def first_token_bytes(self, text: str) -> int:
        """Return how many UTF-8 bytes of `text` its first token covers.

        0 for a token the tokenizer put before it (bos, a dummy space). Exact also inside a
        character, unless a normalizer rewrites that very character.
        """
        encoding = self._encoding(text, add_special_tokens=True)
        if not encoding.ids:
            return 0
        token_id, end = encoding.ids[0], encoding.offsets[0][1]
        piece = self._byte_piece(token_id)
        # Offsets count characters and may leave out spaces, so the bytes themselves come first;
        # they differ from the text's only by a dummy space before it, or by a normalizer.
        for own in (piece, piece.removeprefix(b" ")):
            if own and text.encode().startswith(own):
                return len(own)
        covered = len(text[:end].encode())
        if len(encoding) == 1 or encoding.offsets[1][0] >= end:
            return covered
        own = piece or self.token_text(token_id).encode()
        return min(covered, len(own if text.startswith(" ") else own.removeprefix(b" ")))

    def _byte_piece(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary or byte fallback, else nothing."""
        if token_id in self.byte_fallback:
            return bytes([self.byte_fallback[token_id]])
        piece = self._backend.id_to_token(token_id) or ""
        if not _has_decoder(self._backend, "ByteLevel") or not BYTE_OF.keys() >= set(piece):
            return b""
        added = token_id in self._backend.get_added_tokens_decoder()  # written as they are
        return b"" if added else bytes(BYTE_OF[character] for character in piece)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; an id without an entry in the tokenizer has no text."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str:
        """A token as the vocabulary writes it, ``""`` for an id without an entry."""
        known = 0 <= token_id < self.vocab_size
        return (self._backend.id_to_token(token_id) or "") if known else ""

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether ``decode`` sees this id at all: known, and not a skipped special token."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """Return what one token adds to a running text, ``""`` for an id without an entry.

        Unlike ``decode([token_id])`` this keeps the leading space that decoders drop at the start
        of a text, so that the pieces of a prompt join to the prompt. Part of a character is U+FFFD.
        """
        anchor, prefix = self.anchor
        text = self.decode([*anchor, token_id], skip_special_tokens=False)
        return text[len(prefix) :] if text.startswith(prefix) else self.decode([token_id], False)

    @cached_property
    def anchor(self) -> tuple[list[int], str]:
        """An ordinary token with visible text to decode others behind, and that text."""
        for token_id in range(self.vocab_size):
            text = "" if token_id in self.special_ids else self.decode([token_id])
            if text.strip() and text.isascii() and token_id not in self.byte_fallback:
                return [token_id], text
        return [], ""

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder has a (default) chat template."""
        return self._template is not None

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the conversation as the checkpoint's chat template writes it.

        Raises:
            InvalidRequestError: no template, malformed messages, or the template refused them.
        """
        if self._template is None:
            raise InvalidRequestError(
                f"{self.origin} has no chat template (it is a base model, or the file is missing); "
                "use generate with a plain prompt instead."
            )
        return self._template.render(messages, add_generation_prompt)


def _line(error: Exception) -> str:
    text = (isinstance(error, OSError) and error.strerror) or str(error)  # no number, no path
    return " ".join(text.split())[:200].rstrip(".")


def _why(text: str, error: Exception) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as bad:
        return f"character {bad.start} is a lone surrogate ({text[bad.start]!r}), which is not text"
    return _line(error)


def _read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``, or {} if there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {_line(error)}.") from error
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are both ValueError
        raise CheckpointError(f"{file} is not valid JSON: {_line(error)}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(value).__name__}.")
    return value


def _content(token: object) -> str | None:
    """A token is written as a string or as ``{"content": string, ...flags}``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _special_tokens(folder: Path, config: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the named special tokens (``bos_token``, ...) and the unnamed ones."""
    # special_tokens_map.json is the older file; it counts where the newer table is missing.
    older = (
        {} if "added_tokens_decoder" in config else _read_json(folder / "special_tokens_map.json")
    )
    merged = {**config, **older}
    named = {key: text for key, value in merged.items()
             if key.endswith("_token") and (text := _content(value))}  # fmt: skip
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    if isinstance(extra, dict):  # {"image_token": "<image>"}: names of the model's own
        named.update({key: text for key, value in extra.items() if (text := _content(value))})
        extra = []
    if not isinstance(extra, list):
        raise CheckpointError(f"The extra special tokens of {str(folder)!r} are not a list.")
    return named, [text for value in extra if (text := _content(value))]


def _table_of_added_tokens(
    folder: Path, config: dict[str, Any], special: list[str]
) -> list[tokenizers.AddedToken]:
    """Return the tokens of ``added_tokens_decoder`` (or of the older file) in the order of ids."""
    table = config.get("added_tokens_decoder")
    older = _read_json(folder / "added_tokens.json") if table is None else {}
    try:
        if table is None:
            table = {i: {"content": text, "special": text in special} for text, i in older.items()}
        rows = sorted((int(token_id), dict(row)) for token_id, row in table.items())
        return [tokenizers.AddedToken(row.pop("content"), **row) for _, row in rows]
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise CheckpointError(
            f"The added tokens of {str(folder)!r} are damaged: {_line(error)}."
        ) from error


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, folder: Path, config: dict[str, Any],
    named: dict[str, str], unnamed: list[str],
) -> None:  # fmt: skip
    """Add what the neighbouring files name and ``tokenizer.json`` lacks (their ids are new)."""
    table = _table_of_added_tokens(folder, config, [*named.values(), *unnamed])
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in table if repr(token) not in known])
    # A token with a name becomes special; another one that is there already keeps its flags.
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    missing = [t for t in named.values() if not added.get(t)] + [
        t for t in unnamed if t not in added
    ]
    backend.add_special_tokens(list(dict.fromkeys(missing)))


def _chat_template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the default template: its own file first, then the configuration."""
    file = folder / "chat_template.jinja"
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {_line(error)}.") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not UTF-8 text: {_line(error)}.") from error
    found = config.get("chat_template")
    if found is None:
        found = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(
        found, list
    ):  # [{"name": "default", "template": "..."}, {"name": "tool_use", ...}]
        found = {
            entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)
        }
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else None


def _byte_fallback(backend: tokenizers.Tokenizer) -> dict[int, int]:
    if not _has_decoder(backend, "ByteFallback"):
        return {}
    ids = ((byte, backend.token_to_id(f"<0x{byte:02X}>")) for byte in range(256))
    return {token_id: byte for byte, token_id in ids if token_id is not None}


def _has_decoder(backend: tokenizers.Tokenizer, name: str) -> bool:
    return backend.decoder is not None and name.encode() in backend.decoder.__getstate__()


def _state(decoder: tokenizers.decoders.Decoder) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state
