"""What a GGUF file does not say means what llama.cpp takes it to mean; what it says wins.

Each row states what llama.cpp v0.4.0 did with the same file. Its library gave the same ids, end
tokens and `add_bos` for 1,500 random vocabularies, and the same logits for each row of `ROPE`.
"""

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minillm.errors import CheckpointError, ModelNotFoundError, UnsupportedFeatureError
from minillm.gguf.container import is_gguf, open_gguf
from minillm.gguf.defaults import end_ids
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from minillm.text.gguf_splits import SPLITS
from minillm.text.tokenizer import Tokenizer
from tests.models.parity import whole
from tests.models.tiny import CASES, prompt
from tests.quantization.gguf.export import copied, export

LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "a", "b", "ab"]


def vocabulary(path, model="gpt2", pre="llama-bpe", tokens=LLAMA3, types=None, **fields):
    """A file with this tokenizer and nothing else; fields are those of `tokenizer.ggml`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [3 if "<" in token else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_token_scores([0.0] * len(tokens))
    for name, value in fields.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(
            f"tokenizer.ggml.{name}", value
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# Whether llama.cpp begins a text with bos where the file has no add_bos_token.
BEGINS = {"llama-bpe": True, "llama3": True, "llama-v3": True, "tekken": True, "gpt-2": False,
          "smollm": False, "qwen2": False, "deepseek-r1-qwen": False, "deepseek-llm": False,
          "deepseek-coder": False, "deepseek-v3": False, "minillm": False}  # fmt: skip


@pytest.mark.parametrize("pre", SPLITS)
def test_bos_by_pre_tokenizer(pre, tmp_path):
    for fields, begins in (
        ({}, BEGINS[pre]), ({"add_bos_token": True}, True), ({"add_bos_token": False}, False)
    ):  # fmt: skip
        path = vocabulary(tmp_path / "m.gguf", pre=pre, bos_token_id=0, eos_token_id=1, **fields)
        assert Tokenizer.from_folder(path).encode("ab") == [0] * begins + [5], fields
    path = vocabulary(tmp_path / "m.gguf", pre=pre, add_bos_token=True)
    with pytest.raises(CheckpointError, match="add_bos_token, but no bos_token_id"):
        Tokenizer.from_folder(path)


SPM = ["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a", "<|im_end|>"]
# fields of a SentencePiece file, ids of "a", name and id of the end token, ids that end
SENTENCEPIECE = [
    ({}, [1, 5], "</s>", [2, 6]),
    ({"add_bos_token": False}, [5], "</s>", [2, 6]),
    ({"add_eos_token": True}, [1, 5, 2], "</s>", [2, 6]),
    ({"add_space_prefix": False}, [1, 4], "</s>", [2, 6]),
    ({"bos_token_id": 3}, [3, 5], "</s>", [2, 6]),
    ({"eos_token_id": 6}, [1, 5], "<|im_end|>", [6, 2]),
    ({"unknown_token_id": 3}, [1, 5], "</s>", [2, 6]),
]


@pytest.mark.parametrize(("fields", "ids", "end", "ends"), SENTENCEPIECE)
def test_sentencepiece(fields, ids, end, ends, tmp_path):
    path = vocabulary(
        tmp_path / "m.gguf", "llama", tokens=SPM, types=[2, 3, 3, 1, 1, 1, 4], **fields
    )
    found = Tokenizer.from_folder(path)
    assert found.encode("a") == ids
    assert found.special_tokens["eos_token"] == end
    unknown = SPM[fields.get("unknown_token_id", 0)]
    assert found.special_tokens["unk_token"] == unknown
    assert end_ids(open_gguf(path).fields) == ends
    assert "<" not in found.decode([4, 6])  # the end of a turn is a control token
    short = vocabulary(tmp_path / "short.gguf", "llama", tokens=SPM[:2])
    assert Tokenizer.from_folder(short).eos_token_id is None  # the default is no token


# tokens, fields, and the ids that end a generation in llama.cpp
ENDS = [
    (LLAMA3, {"eos_token_id": 1}, [1, 2]),
    (LLAMA3, {"eos_token_id": 2}, [2, 1]),
    (LLAMA3, {}, [1, 2]),
    (["a", "b", "ab", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<EOT>"],
     {"eos_token_id": 2}, [2, 3, 4, 5, 6, 7]),
    (["a", "b", "ab", "<end_of_turn>", "<|im_start|>", "<s>", "</s>", "<tool>"], {}, [3, 6]),
    (["a", "b", "ab", "c", "d"], {"eot_token_id": 3, "eom_token_id": 4}, [3, 4]),
    (["a", "b", "ab", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"],
     {"fim_rep_token_id": 0}, [0, 3, 4, 5]),
]  # fmt: skip


@pytest.mark.parametrize("kind", [1, 3, 4, 5])
@pytest.mark.parametrize(("tokens", "fields", "ends"), ENDS)
def test_end_tokens(tokens, fields, ends, kind, tmp_path):
    """Whatever their type, unless unused (5)."""
    types = [kind if "<" in token else 1 for token in tokens]
    path = vocabulary(tmp_path / "m.gguf", tokens=tokens, types=types, **fields)
    stored = [i for i in ends if i in fields.values()]
    assert end_ids(open_gguf(path).fields) == (stored if kind == 5 else ends)


FREQUENCIES = np.linspace(1, 9, 8).astype(np.float32)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
# metadata of RoPE: a file that says less, and one that says what llama.cpp takes it to mean
ROPE = [
    ({"rope.freq_base": None}, {"rope.freq_base": 10000.0}),
    ({"rope.dimension_count": None}, {}),
    ({"rope.dimension_count": None, "attention.key_length": None}, {}),
    ({"attention.value_length": None}, {}),
    ({"vocab_size": None}, {}),
    ({"unheard_of": 7}, {}),
    ({"rope.scaling.factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    ({"rope.scale_linear": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    ({"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, {"rope.scaling.factor": 2.0}),
    ({"rope.scaling.type": "linear"}, {}),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, {}),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    ({"rope.scaling.type": "yarn"}, {}),
    (YARN, YARN | {"rope.scaling.original_context_length": 256}),
    (YARN, YARN | {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    CASES["llama"].write(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    return export(folder / "model", config, folder / "plain.gguf", Type.F32)


def changed(plain, path, changes, factors=None):
    """A copy with other metadata; None leaves a field out."""
    changes = {f"llama.{name}": value for name, value in changes.items()}
    return copied(plain, path, changes, {} if factors is None else {"rope_freqs.weight": factors})


def logits(path):
    return whole(load_model(open_model(path), torch.float32), prompt(60))


@pytest.mark.parametrize(("less", "more"), ROPE)
def test_metadata_that_are_missing(less, more, plain, tmp_path):
    own, full = (
        changed(plain, tmp_path / f"{name}.gguf", changes)
        for name, changes in (("less", less), ("more", more))
    )
    assert torch.equal(logits(own), logits(full))
    assert open_model(own).config.longest_context == open_model(full).config.longest_context
    if any("factor" in key for key in more):  # the fields that are left out change something
        assert not torch.allclose(logits(own), logits(plain), rtol=0.1)


def test_frequency_factors_and_a_linear_factor_both_apply(plain, tmp_path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    both = logits(changed(plain, tmp_path / "a.gguf", linear, FREQUENCIES))
    assert torch.equal(both, logits(changed(plain, tmp_path / "b.gguf", {}, 2 * FREQUENCIES)))
    for changes in (YARN, {"rope.scaling.type": "longrope"}, {"rope.scaling.attn_factor": 2.0}):
        path = changed(plain, tmp_path / "c.gguf", changes, FREQUENCIES)
        with pytest.raises(UnsupportedFeatureError, match=r"rope_freqs.weight|attn_factor"):
            open_model(path)


def test_a_part_of_a_split_model_is_named(plain, tmp_path):
    path = vocabulary(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedFeatureError, match="one of 3 parts of a model; join them"):
        open_model(tmp_path / "part.gguf")
    with pytest.raises(CheckpointError, match=r"token_embd|embedding_length|head_count"):
        open_model(path)


def test_a_file_is_known_by_its_first_bytes(plain, tmp_path):
    """As in Ollama's store, and by a link to it."""
    blob = tmp_path / "sha256-0123"
    shutil.copy(plain, blob)
    (tmp_path / "model:latest").symlink_to(blob)
    for path in (blob, tmp_path / "model:latest"):
        assert torch.equal(logits(path), logits(plain))
        with pytest.raises(ModelNotFoundError, match="has no tokenizer"):
            Tokenizer.from_folder(path)


def test_what_is_no_gguf_file(plain, tmp_path):
    shutil.copytree(plain.parent / "model", tmp_path / "folder.gguf")
    assert open_model(tmp_path / "folder.gguf").config.family == "llama"
    for name, content in (("empty", b""), ("short", b"GG"), ("text", b"hello GGUF")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelNotFoundError, match="does not begin with 'GGUF'"):
            open_model(tmp_path / name)
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name}.gguf cannot be"):
            open_model(tmp_path / f"{name}.gguf")
    assert not is_gguf(tmp_path / "absent")
