"""A byte-level BPE for Python source, in the file format that transformers reads."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from minillm.errors import ConfigError
from minillm.lab.training import corpus

END_OF_TEXT = "<|endoftext|>"
# A line break with the following indentation is one piece, so that indentation is one token. A word
# includes one leading character (" x", ".x", "(x", "_x"). A line break is never joined with the
# punctuation before it, so that a prompt may end in ":".
PATTERN = r"\s*\n[ \t]*|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train `vocab_size` entries: end-of-text (id 0), the 256 bytes, then merges (GPT-2's BPE)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A prompt is the start of a file; in training, every file follows an end-of-text token.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Id of the token between two files, which is also the end of a sequence."""
    token_id = tokenizer.token_to_id(END_OF_TEXT)
    if token_id is None:
        raise ConfigError(f"The tokenizer has no {END_OF_TEXT}; train it with this package.")
    return token_id


def sample_texts(manifest: corpus.Manifest, package_bytes: int = 9_000_000) -> list[str]:
    """Training text of the vocabulary: the standard library, and `package_bytes` of packages."""
    texts = [corpus.read(f).decode() for f in manifest.select(held_out=False, stdlib=True)]
    packages = [corpus.read(f).decode() for f in manifest.select(held_out=False, stdlib=False)]
    random.Random(0).shuffle(packages)
    for text in packages:
        texts.append(text)
        package_bytes -= len(text)
        if package_bytes < 0:
            break
    return texts


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json for transformers' AutoTokenizer.

    There is no chat template, because the models are not trained on chats.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
