"""Ids and text are those of transformers' AutoTokenizer for the same folder."""

import errno
import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from minillm.errors import CheckpointError, InvalidRequestError, ModelNotFoundError
from minillm.text.tokenizer import LONG_TEXT, Tokenizer
from tests.text.build import KINDS, TEXTS, byte_level, llama2, metaspace_first, write_folder


def assert_same_as_transformers(folder: Path) -> Tokenizer:
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in TEXTS:
        for add in (True, False):
            ids = ours.encode(text, add)
            assert ids == theirs.encode(text, add_special_tokens=add), (text, add)
            for skip in (True, False):
                decoded = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip) == decoded, (text, skip)
    for every in ([*range(ours.vocab_size)], [*range(ours.vocab_size - 1, -1, -1)]):
        for skip in (True, False):
            assert ours.decode(every, skip) == theirs.decode(every, skip_special_tokens=skip)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    named = {k: v for k, v in ours.special_tokens.items() if k in theirs.special_tokens_map}
    assert named == theirs.special_tokens_map
    return ours


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer(kind: str, tmp_path: Path) -> None:
    eos = "<|im_end|>" if kind.startswith("byte_level") else "</s>"
    assert_same_as_transformers(write_folder(tmp_path, KINDS[kind](), eos_token=eos))


@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("kind", ["llama2", "llama2_no_bos", "byte_level", "byte_level_bos"])
def test_the_first_token_is_decided_by_the_post_processor(kind, flag, tmp_path):
    """add_bos_token and add_eos_token do nothing beside a tokenizer.json."""
    bos, eos = ("<s>", "</s>") if "llama" in kind else ("<|endoftext|>", "<|im_end|>")
    extra = {} if flag is None else {"add_bos_token": flag, "add_eos_token": flag}
    folder = write_folder(tmp_path, KINDS[kind](), bos_token=bos, eos_token=eos, **extra)
    ours = assert_same_as_transformers(folder)
    first = ours.encode("Hello")[0] == ours.encode(bos, add_special_tokens=False)[0]
    assert first == (kind in ("llama2", "byte_level_bos"))


def test_the_llama_class_of_a_metaspace_file(tmp_path: Path) -> None:
    """With the class LlamaTokenizer transformers rebuilds the file's rules; they agree here."""
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": False}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = write_folder(tmp_path, metaspace_first(), **config, **tokens)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert_same_as_transformers(folder)


CONFIGS = {
    "nothing": {},
    "token_objects": {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}},
    "new_tokens": {"pad_token": "<pad>", "extra_special_tokens": ["<a>", "<|im_end|>"]},
    "older_list": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<tool>", "<think>"]},
    "named_by_the_model": {"image_token": "<image>", "eos_token": "<|im_end|>"},
    "named_table": {"extra_special_tokens": {"image_token": "<image>"}},
    "table": {
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            "400": {"content": "<think>", "special": True, "normalized": False},
            "410": {"content": "<new>", "special": False, "normalized": True},
            "9": {"content": "<newer>", "special": True, "lstrip": True},
        },
    },
    "no_such_token": {"bos_token": None, "eos_token": "<absent>"},
    "named_but_not_special": {"eos_token": "<think>", "pad_token": "the"},
    "clean_up": {"clean_up_tokenization_spaces": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_tokenizer_config_adds(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), **CONFIGS[name])
    ours, theirs = assert_same_as_transformers(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.special_ids == {i for i, t in theirs.added_tokens_decoder.items() if t.special}


@pytest.mark.parametrize("table", [{}, {"added_tokens_decoder": {}}])
def test_the_older_files_count_without_a_table(table: dict, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), eos_token="<|endoftext|>", **table)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "pad_token": "<pad>"})
    )
    (folder / "added_tokens.json").write_text('{"<added>": 402, "<pad>": 403}')
    assert_same_as_transformers(folder)


def test_without_tokenizer_config(tmp_path: Path) -> None:
    byte_level(with_bos=True).save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.eos_token_id, ours.has_chat_template) == (None, False)
    assert ours.encode("hi")[0] == 0


def test_a_stored_truncation_shortens_nothing(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    ours = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert ours.decode(ours.encode("a much longer text than four tokens")).endswith("tokens")
    assert len(ours.encode("a")) == 1


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"bpe_suffix"}))  # its last token differs
def test_token_texts_join_to_the_text_they_are_in(kind: str) -> None:
    ours = Tokenizer(KINDS[kind]())
    ids = ours.encode("the dog, and then fib", add_special_tokens=False)
    joined = "".join(ours.token_text(i) for i in ids)
    assert joined.lstrip() == ours.decode(ids).lstrip()
    assert ours.token_text(ours.vocab_size) == ours.token_text(10**12) == ours.token_text(-1) == ""
    for token_id in range(ours.vocab_size):
        ours.token_text(token_id)


def test_token_text_keeps_the_space_and_the_specials() -> None:
    ours = Tokenizer(llama2())
    assert ours.decode(ours.encode(" dog")[1:]) == " dog"  # the decoder stripped the prefix
    assert ours.token_text(ours.encode("the dog")[0]) == "<s>"
    assert " dog" in "".join(ours.token_text(i) for i in ours.encode("the dog"))


def bytes_of(piece: str) -> bytes:
    """What a piece of a byte-level vocabulary stands for, by transformers' own table."""
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(byte_of[character] for character in piece)


def gpt2(prefix_space: bool = False) -> Backend:
    """Without a normalizer and with offsets that leave out spaces, as GPT-2 has it."""
    backend = byte_level()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


def metaspace_no_bos() -> Backend:
    """Metaspace and byte fallback."""
    backend = llama2(with_bos=False)
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


GPT2 = gpt2()
TOKENIZERS = {
    "gpt2": Tokenizer(GPT2), "byte_level": Tokenizer(byte_level()),
    "llama2_no_bos": Tokenizer(llama2(with_bos=False)), "metaspace": Tokenizer(metaspace_no_bos()),
    "gpt2_with_space": Tokenizer(gpt2(prefix_space=True)),
}  # fmt: skip


@given(text=st.text(min_size=1))
@example("é")
@example("漢字")
@example("  \n x")
def test_the_bytes_of_the_first_token_are_exact_on_byte_level(text: str) -> None:
    first = GPT2.encode(text).tokens[0]
    size = len("é漢".encode()) if first == "é漢" else len(bytes_of(first))
    size = len(first) if first.startswith("<|") else size
    assert TOKENIZERS["gpt2"].first_token_bytes(text) == size


@pytest.mark.parametrize("kind", ["byte_level", "llama2_no_bos", "metaspace", "gpt2_with_space"])
@given(text=st.text(min_size=1))
@example("日本")
@example("e\u0301")
def test_the_first_token_covers_something_and_not_more_than_the_text(kind: str, text: str) -> None:
    ours = TOKENIZERS[kind]
    covered = ours.first_token_bytes(text)
    assert 0 <= covered <= len(text.encode())
    if covered == 0:  # a dummy space
        assert ours.token_text(ours.encode(text)[0]) == " "
        assert not text.startswith(" ")


@pytest.mark.parametrize(("kind", "text", "size"), [
    ("byte_level", "", 0), ("byte_level", "the dog", 1), ("byte_level", " the dog", 4),
    ("byte_level", "<|im_end|>x", 10), ("byte_level_bos", "é", 0), ("llama2", "é", 0),
    ("llama2_no_bos", "the dog", 3), ("llama2_no_bos", "</s> x", 4), ("unigram", "the dog", 3),
    ("llama2_no_bos", "é", 0),
])  # fmt: skip
def test_the_bytes_of_a_known_first_token(kind: str, text: str, size: int) -> None:
    assert Tokenizer(KINDS[kind]()).first_token_bytes(text) == size


def test_a_byte_token_at_the_start_is_one_byte() -> None:
    backend = llama2(with_bos=False)
    backend.normalizer = None  # no dummy space
    for text in ("é", "日本", "\nx"):
        assert Tokenizer(backend).first_token_bytes(text) == 1


def test_ids_without_an_entry_have_no_text() -> None:
    ours = Tokenizer(byte_level())
    ids = ours.encode("text")
    assert ours.decode([*ids, ours.vocab_size, 2**40, -1, *ids]) == "texttext"


@pytest.mark.parametrize("text", [None, 3, ["a"], b"a"])
def test_a_text_that_is_no_string_is_refused(text: object) -> None:
    with pytest.raises(InvalidRequestError, match="must be a string"):
        Tokenizer(byte_level()).encode(text)  # type: ignore[arg-type]


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="character 2 is a lone surrogate"):
        Tokenizer(byte_level()).encode("ab\ud800")


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_ids_of_any_text(kind: str, add: bool, tmp_path: Path) -> None:
    """It is encoded in another way, which lets other Python threads run."""
    ours = Tokenizer.from_folder(write_folder(tmp_path, KINDS[kind]()))
    text = " ".join(TEXTS) * (LONG_TEXT // 100)
    assert len(text) > LONG_TEXT
    assert ours.encode(text, add) == ours.encoding(text, add).ids


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no tokenizer folder"):
        Tokenizer.from_folder(tmp_path / "absent")
    with pytest.raises(ModelNotFoundError, match="token ids still work"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(("file", "content"), [
    ("tokenizer.json", b'{"model": '), ("tokenizer.json", b""), ("tokenizer.json", b"\xff\xfe"),
    ("tokenizer.json", b'{"version": "1.0"}'), ("tokenizer_config.json", b"{,}"),
    ("tokenizer_config.json", b"[1]"), ("tokenizer_config.json", b'{"eos_token": "\xff"}'),
    ("tokenizer_config.json", b"[" * 100_000),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {}}}'),
    ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": {"contents": "a"}}}'),
    ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}'),
    ("tokenizer_config.json", b'{"extra_special_tokens": 7}'), ("special_tokens_map.json", b"nope"),
    ("added_tokens.json", b'{"a": {}}'), ("chat_template.jinja", b"\xff"),
    ("chat_template.json", b"{"),
])  # fmt: skip
def test_a_damaged_file_is_named(file: str, content: bytes, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(folder)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_may_not_be_read(name, tmp_path, monkeypatch):
    folder, read = write_folder(tmp_path, byte_level()), Path.read_text

    def deny(path: Path, encoding: str) -> str:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, encoding)

    monkeypatch.setattr(Path, "read_text", deny)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: Permission denied\\.$"):
        Tokenizer.from_folder(folder)
