"""`minillm quantize MODEL --type TYPE`: blocks as the `gguf` package makes them, and models that
this engine and the `gguf` package read; `test_gguf_llama_cpp.py` has llama.cpp."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minillm.cli import main
from minillm.errors import CheckpointError, ConfigError, UnsupportedFeatureError
from minillm.lab.quantise import gguf_encode
from minillm.lab.quantise.gguf_export import write_model
from minillm.models.checkpoint import ASSETS, open_model
from minillm.models.loader import load_model
from minillm.text.gguf_splits import SPLITS
from minillm.text.tokenizer import Tokenizer
from tests.models.parity import whole
from tests.models.tiny import CASES, ROPES, Tiny, prompt
from tests.quantization.gguf.test_gguf_tokenizer import TEXTS
from tests.text.build import byte_level, write_folder

CASES = {
    **{name: CASES[name] for name in (
        "llama", "llama, tied", "llama, biases", "llama, multi-query", "mistral",
        "mistral, tied, no window", "qwen2", "qwen3", "mixtral", "mixtral, tied, window")},
    "qwen3_moe": Tiny("qwen3_moe", {"mlp_only_layers": []}, shard_size="40KB"),
    "llama3": ROPES["llama3"].tiny("llama"),
    "linear": ROPES["linear"].tiny("qwen3"),
    "yarn": ROPES["yarn"].tiny("llama"),
}  # fmt: skip


def values(rows=64):
    """Random rows, with blocks of zeros, of ties, of one sign, and of few bits."""
    x = np.random.default_rng(0).standard_normal((rows, 96)).astype(np.float32)
    x[0] = 0
    x[1, :32], x[1, 32:64] = 1.5, -0.25
    x[2] = np.abs(x[2])
    x[3] = -np.abs(x[3])
    x[4] = np.round(x[4] * 4) / 4  # halves and ties
    x[5] *= 1e-7  # float16 subnormals
    x[6] = np.linspace(-127, 127, 96)
    return x


@pytest.mark.parametrize("kind", gguf_encode.ENCODERS)
def test_blocks_are_those_of_the_gguf_package(kind):
    x = values()
    expected = gguf.quants.quantize(x, Type[kind]).tobytes()
    assert gguf_encode.encoded("x", torch.from_numpy(x), kind) == expected


def test_numbers_that_no_block_can_hold_are_refused():
    for bad in (torch.inf, torch.nan, 1e9):
        with pytest.raises(UnsupportedFeatureError, match="choose BF16"):
            gguf_encode.encoded("x", torch.full((1, 32), bad), "Q4_0")
    assert gguf_encode.encoded("x", torch.full((1, 32), 1e9), "BF16")
    with pytest.raises(UnsupportedFeatureError, match="too large for F16"):
        gguf_encode.encoded("x", torch.full((1, 32), 1e9), "F16")


@pytest.mark.parametrize("name", CASES)
def test_what_was_written_is_read_back(name, tmp_path):
    CASES[name].write(tmp_path / "folder")
    source, path = open_model(tmp_path / "folder"), tmp_path / "m.gguf"
    write_model(source, path, "F32")
    found = open_model(path)
    same = {"family": found.config.family}  # mistral without a window is llama
    if name == "llama3":  # its factors are in the file
        same["rope"] = found.config.rope
    if source.config.moe:
        same["moe_layers"] = found.config.moe_layers
    assert found.config == replace(source.config, **same)
    assert (found.eos_token_ids, found.ignored_layers) == (source.eos_token_ids, 0)
    own, theirs = load_model(found, torch.float32), load_model(source, torch.float32)
    expected = dict(theirs.named_parameters())
    assert [k for k, v in own.named_parameters() if not torch.equal(v, expected[k])] == []
    ids = prompt(40)
    logits = whole(theirs, ids)
    assert (whole(own, ids) - logits).abs().max() <= 1e-6 * logits.abs().max()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    for kind in ("Q8_0", "Q4_0", "BF16"):
        assert main(["quantize", "tiny", "--type", kind, "--out", f"{folder}/{kind}.gguf"]) == 0
    return folder


def test_tiny_has_the_same_tokens_and_settings(tiny):
    source, found = open_model("tiny"), open_model(tiny / "Q4_0.gguf")
    assert found.config == source.config
    assert found.eos_token_ids == source.eos_token_ids
    own, theirs = Tokenizer.from_folder(tiny / "Q4_0.gguf"), Tokenizer.from_folder(ASSETS / "tiny")
    assert [own.encode(each) for each in TEXTS] == [theirs.encode(each) for each in TEXTS]
    assert own.special_tokens == theirs.special_tokens


def test_the_gguf_package_reads_the_file(tiny):
    reader = gguf.GGUFReader(tiny / "Q4_0.gguf")
    types = {each.name: each.tensor_type for each in reader.tensors}
    assert types["token_embd.weight"] == Type.Q8_0  # tied, so it is the output matrix
    assert types["blk.0.attn_q.weight"] == Type.Q4_0
    assert types["blk.0.attn_norm.weight"] == Type.F32
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    model = load_model(open_model("tiny"), torch.float32)
    query = model.layers[3].attention.qkv_proj.values()[:256]
    found = next(each for each in reader.tensors if each.name == "blk.3.attn_q.weight")
    assert found.data.tobytes() == gguf.quants.quantize(query.numpy(), Type.Q4_0).tobytes()
    reader = gguf.GGUFReader(tiny / "BF16.gguf")
    found = next(each for each in reader.tensors if each.name == "blk.3.attn_q.weight")
    assert found.data.tobytes() == query.bfloat16().view(torch.uint8).numpy().tobytes()


def test_a_chat_template_and_end_tokens_are_kept(tmp_path):
    folder = tmp_path / "folder"
    CASES["llama"].write(folder)
    backend = byte_level()
    write_folder(folder, backend, chat_template="{{ messages[0].content }}!")
    for message in ("'é漢' depends on", "pre-tokenizer of .* has no name"):
        with pytest.raises(UnsupportedFeatureError, match=message):
            write_model(open_model(folder), tmp_path / "m.gguf", "F16")
        backend.normalizer = None
        write_folder(folder, backend, chat_template="{{ messages[0].content }}!")
    backend.pre_tokenizer = SPLITS["smollm"].build()
    write_folder(folder, backend, chat_template="{{ messages[0].content }}!")
    source = open_model(folder)
    source = replace(source, eos_token_ids=(2, 5), sampling_defaults={"temperature": 0.5})
    write_model(source, tmp_path / "m.gguf", "F16")
    found = open_model(tmp_path / "m.gguf")
    assert found.eos_token_ids == (2, 5, 0)  # 0: by its text
    assert found.sampling_defaults == {"temperature": 0.5}
    own = Tokenizer.from_folder(tmp_path / "m.gguf")
    assert own.has_chat_template
    theirs = Tokenizer.from_folder(folder)
    for text in ("Grüße 12+1", "<think>é漢", "<|im_start|>user<|im_end|>"):
        assert own.encode(text) == theirs.encode(text)
    assert own.special_ids == theirs.special_ids


def test_rows_that_are_no_multiple_of_a_block_are_f16(tmp_path):
    Tiny("qwen3", {"intermediate_size": 72}).write(tmp_path / "folder")
    report = write_model(open_model(tmp_path / "folder"), tmp_path / "m.gguf", "Q5_1")
    assert set(report.types) == {"F16", "F32", "Q5_1", "Q8_0"}
    types = {t.name: t.tensor_type for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == Type.F16
    assert types["blk.0.ffn_up.weight"] == Type.Q5_1
    assert types["output.weight"] == Type.Q8_0
    assert types["token_embd.weight"] == Type.Q5_1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--type", "Q4_K", "--out", "m.gguf"], "There is no type 'Q4_K' to write; choose F32"),
        (["--type", "Q8_0", "--out", "m"], "the name of a GGUF file ends with .gguf"),
        (["--type", "Q8_0", "--method", "gptq", "--out", "m.gguf"], "rounded to nearest (rtn)"),
        (["--type", "Q8_0", "--format", "awq", "--out", "m.gguf"], "rounded to nearest (rtn)"),
        (["--type", "Q8_0", "--bits", "8", "--out", "m.gguf"], "--bits has no effect with --type"),
        (["--format", "gguf", "--method", "rtn", "--out", "m.gguf"], "needs --type"),
        (["--out", "m"], "Give --method: rtn"),
    ],
)  # fmt: skip
def test_nonsense_is_one_sentence(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", "tiny", *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_models_that_a_file_cannot_describe_are_refused(tiny, tmp_path):
    out = tmp_path / "m.gguf"
    source = open_model("tiny")
    with pytest.raises(CheckpointError, match="exists"):
        write_model(source, tiny / "Q8_0.gguf", "Q8_0")
    with pytest.raises(ConfigError, match="a GGUF file already"):
        write_model(open_model(tiny / "Q8_0.gguf"), out, "Q4_0")
    with pytest.raises(ConfigError, match="without weights"):
        write_model(open_model("preset:llama-2-7b"), out, "Q4_0")
    dynamic = replace(source.config.rope, rope_type="dynamic", factor=2.0)
    for config, reason in (
        (replace(source.config, family="deepseek_v3"), "its family is deepseek_v3"),
        (replace(source.config, sliding_windows=(20,) * 7), "it has a sliding window"),
        (replace(source.config, rope=dynamic), "its RoPE is dynamic"),
    ):
        with pytest.raises(UnsupportedFeatureError, match=reason):
            write_model(replace(source, config=config), out, "Q8_0")
    assert not out.exists()
