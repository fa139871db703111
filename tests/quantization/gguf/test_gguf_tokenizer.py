"""The embedded model as a GGUF file: the same ids, and the same text as the folder's model."""

import json

import gguf
import pytest
import tokenizers
from gguf import GGMLQuantizationType as Type

from minillm import LLM, SamplingParams
from minillm.errors import UnsupportedFeatureError
from minillm.models.checkpoint import ASSETS
from minillm.text import gguf as text_gguf
from minillm.text.gguf_splits import SPLITS
from minillm.text.tokenizer import Tokenizer
from tests.quantization.gguf.export import export

TEXTS = [
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass",
    " leading and  double  spaces ", "12345 6.78e-9 it's WE'LL", "Grüße, 你好 мир 🙂 e\u0301",
    "<|endoftext|>a<|endoftext|>", "", "\n\n \n", "'''quoted''' (a[b]{c})!= --> x",
]  # fmt: skip


def with_vocabulary(writer, folder=ASSETS / "tiny", pre="minillm"):
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, control = data["model"]["vocab"], {t["content"] for t in data["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    merges = data["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0].content }}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder, path = ASSETS / "tiny", tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    config = json.loads((folder / "config.json").read_text())
    return export(folder, config, path, Type.Q8_0, with_vocabulary)


def test_ids_are_those_of_the_folder(tiny):
    own, theirs = Tokenizer.from_folder(tiny), Tokenizer.from_folder(ASSETS / "tiny")
    assert [own.encode(each) for each in TEXTS] == [theirs.encode(each) for each in TEXTS]
    for ids in map(theirs.encode, TEXTS):
        assert own.decode(ids) == theirs.decode(ids)
    assert own.special_tokens == theirs.special_tokens
    assert own.eos_token_id == theirs.eos_token_id
    assert own.has_chat_template


def test_an_unknown_pre_tokenizer_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    with_vocabulary(writer, pre="unheard-of")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedFeatureError, match="unheard-of"):
        Tokenizer.from_folder(path)


def test_another_pre_tokenizer_is_found(tiny, monkeypatch):
    monkeypatch.setattr(text_gguf, "splits_of", lambda vocabulary: SPLITS["gpt-2"])
    with pytest.raises(AssertionError):
        test_ids_are_those_of_the_folder(tiny)


@pytest.mark.parametrize("name", SPLITS)
def test_every_expression_compiles(name):
    pieces = [piece for piece, _ in SPLITS[name].build().pre_tokenize_str("it's 1234 Grüße 你好\n")]
    assert len(pieces) > 4


def test_sentencepiece_ids(tmp_path):
    """Merges rebuilt from scores, beside a `tokenizers` model with the merges written out."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words = ["\u2581", "a", "b", "c", "ab", "bc", "abc", "\u2581a", "\u2581ab"]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + words)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    own = Tokenizer.from_folder(tmp_path / "m.gguf")
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"), ("\u2581", "a"),
              ("\u2581", "ab"), ("\u2581a", "b")]  # fmt: skip
    vocabulary = {piece: i for i, piece in enumerate(pieces + words)}
    model = tokenizers.models.BPE(
        vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    for text in ("abc", "ab abc", "a é b", "abcabc  ba"):
        expected = tokenizers.Tokenizer(model).encode("\u2581" + text.replace(" ", "\u2581")).ids
        assert own.encode(text) == [1, *expected]
        assert own.decode(own.encode(text)) == text


def test_llm_with_one_file(tiny):
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = ["def main():\n", "import os"]
    with LLM(str(tiny), dtype="float32") as own, LLM("tiny", dtype="float32") as theirs:
        found = [each.outputs[0].text for each in own.generate(prompts, params)]
        expected = [each.outputs[0].text for each in theirs.generate(prompts, params)]
    assert found == expected  # Q8_0 moves logits too little to change these tokens
