"""The trained models are what transformers makes of them; their corpus keeps its splits apart."""

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minillm import LLM
from minillm.cache.spec import cache_spec
from minillm.lab.training import corpus, prompts
from minillm.lab.training.trainer import logits_of
from minillm.lab.training.variants import VARIANTS
from minillm.models.checkpoint import ASSETS, open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.text.tokenizer import Tokenizer

CHAPTER_04 = Path(__file__).parents[3] / "notebooks" / "variants"
FOLDERS = {"tiny": ASSETS / "tiny", "tiny-draft": ASSETS / "tiny-draft"}
FOLDERS |= {name: CHAPTER_04 / name for name in VARIANTS}
MANIFEST = corpus.load_manifest()
SOURCE = (
    'import os\n\n\nclass A:\n    """Größe 日本 🎉."""\n\n    def f(self, x=0x1F):\r\n\treturn x'
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(ASSETS / "tiny")


@pytest.mark.parametrize("name", FOLDERS)
def test_models_and_tokenizer_equal_transformers(name, tokenizer):
    ids, folder = tokenizer.encode(SOURCE * 3), FOLDERS[name]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0]
    logits = logits_of(load_model(open_model(str(folder)), torch.float32), ids)
    assert float((logits - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert reference.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(SOURCE * 3).input_ids == ids
    assert ids[0] == 0  # a prompt is the start of a file
    assert (len(theirs), theirs.bos_token, theirs.eos_token) == (4096, *["<|endoftext|>"] * 2)
    assert theirs.chat_template is None
    file = "tokenizer.json"
    assert (folder / file).read_bytes() == (ASSETS / "tiny" / file).read_bytes()


def test_variants_are_of_one_size_and_differ_in_their_cache() -> None:
    models = {name: Decoder(config, device="meta") for name, config in VARIANTS.items()}
    sizes = [sum(each.numel() for each in model.parameters()) for model in models.values()]
    assert 2_000_000 <= min(sizes) <= max(sizes) <= 3_000_000
    assert max(sizes) / min(sizes) < 1.02
    cached = {name: cache_spec(config).block_values(1) for name, config in VARIANTS.items()}
    assert cached == {"mha": 512, "gqa": 128, "mqa": 64, "mla": 128}


@pytest.mark.parametrize(("name", "limit"), [("tiny", 1.0), ("tiny-draft", 1.3)])
def test_they_predict_held_out_python(name: str, limit: float) -> None:
    """A quarter of one held-out module; the model card has the figures of all of them."""
    text = (corpus.install_root("stdlib") / "webbrowser.py").read_text()[:6000]
    with LLM(name, dtype="float32") as llm:
        [score] = llm.score(text)
    assert score.num_bytes == len(text.encode())
    assert score.bits_per_byte < limit


def test_the_manifest_keeps_the_splits_apart_and_the_card_names_them() -> None:
    train, held_out = MANIFEST.select(held_out=False), MANIFEST.select(held_out=True)
    assert not {file.sha256 for file in train} & {file.sha256 for file in held_out}
    modules = {file.path.split("/")[0] for file in held_out if file.source == "stdlib"}
    assert {"pathlib.py", "inspect.py", "doctest.py", "wsgiref"} <= modules
    assert not [f for f in train if f.source == "stdlib" and f.path.split("/")[0] in modules]
    assert "jinja2" not in {file.source for file in train}
    assert not [f.path for f in MANIFEST.files if f.path.startswith(("/", ".."))]
    card = (ASSETS / "MODEL_CARD.md").read_text()
    for words in ("PSF-2.0", "bits per byte", "lab.training tiny\n", *prompts.TEN_PROMPTS):
        assert words in card
    for name in {file.source for file in MANIFEST.files} - {"stdlib"}:
        assert f"| {name} |" in card


@pytest.mark.skipif(
    platform.python_version() != MANIFEST.python,
    reason="the manifest is for another version of Python",
)
def test_the_manifest_fits_this_standard_library() -> None:
    files = [file for file in MANIFEST.files if file.source == "stdlib"]
    assert corpus.verify(replace(MANIFEST, files=tuple(files))) > 9_000_000
