"""The models in the package: what transformers makes of them, and what they promise."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from minillm.lab.training import corpus, evaluate, prompts
from minillm.models.checkpoint import ASSETS, open_model
from minillm.models.loader import load_model
from minillm.text.tokenizer import Tokenizer

NAMES = ("tiny", "tiny-draft")
SOURCE = (
    'import os\n\n\nclass A:\n    """Größe 日本 🎉."""\n\n    def f(self, x=0x1F):\r\n\treturn x'
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(ASSETS / "tiny")


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(SOURCE * 3)
    reference = AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32)
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0]
    logits = evaluate.logits_of(load_model(open_model(name), torch.float32), ids)
    assert float((logits - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert reference.generation_config.eos_token_id == tokenizer.eos_token_id == 0


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer_is_the_same_everywhere(name: str, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(ASSETS / name)
    assert theirs(SOURCE).input_ids == tokenizer.encode(SOURCE)
    assert len(theirs) == 4096
    assert theirs.bos_token == theirs.eos_token == "<|endoftext|>"
    assert theirs(SOURCE).input_ids[0] == 0  # a prompt is the start of a file
    assert theirs.chat_template is None
    file = "tokenizer.json"
    assert (ASSETS / name / file).read_bytes() == (ASSETS / "tiny" / file).read_bytes()


@pytest.mark.slow
@given(st.text())
def test_every_text_survives(text: str) -> None:
    tokenizer = Tokenizer.from_folder(ASSETS / "tiny")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sizes() -> None:
    limits = {"tiny": (6_000_000, 8_000_000, 16_000_000), "tiny-draft": (0, 1_000_000, 2_000_000)}
    for name, (least, most, size) in limits.items():
        model = load_model(open_model(name), torch.bfloat16)
        assert least <= sum(p.numel() for p in model.parameters()) <= most
        assert (ASSETS / name / "model.safetensors").stat().st_size <= size
        config = json.loads((ASSETS / name / "config.json").read_text())
        assert config["num_key_value_heads"] < config["num_attention_heads"]  # GQA


def test_they_predict_held_out_python(tokenizer: Tokenizer) -> None:
    """A quarter of one held-out module; the model card has the figures of all of them."""
    text = (corpus.install_root("stdlib") / "webbrowser.py").read_text()[:6000]
    limits = {"tiny": 1.0, "tiny-draft": 1.3}
    for name, limit in limits.items():
        model = load_model(open_model(name), torch.float32)
        assert evaluate.bits_per_byte(model, tokenizer, [text]).bits_per_byte < limit


def test_draft_agrees_with_tiny(tokenizer: Tokenizer) -> None:
    """Argmax agreement on fixed text, far above what two unrelated models would reach."""
    ids = tokenizer.encode("".join(prompts.TEN_PROMPTS))
    target, draft = (
        evaluate.logits_of(load_model(open_model(name), torch.float32), ids).argmax(-1)
        for name in NAMES
    )
    assert float((target == draft).float().mean()) > 0.4


def test_model_card_names_what_it_must() -> None:
    card = (ASSETS / "MODEL_CARD.md").read_text()
    for words in ("PSF-2.0", "Apache-2.0", "bits per byte", "python -m minillm.lab.training tiny"):
        assert words in card
    for prompt in prompts.TEN_PROMPTS:
        assert prompt in card
