"""Text for the training of draft heads: prompts with the target's own continuations.

Heads are right where they predict what the target will say, so they learn from what it says, at
temperatures 0, 0.7 and 1. Prompts are pieces of a text; the last tenth of it is held out, or for
the default text that of the embedded models.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from minillm.api.sampling_params import SamplingParams
from minillm.errors import ConfigError
from minillm.lab.comparison.windows import read_text as held_out_text
from minillm.lab.quantise.calibration_text import read_text
from minillm.llm import LLM

TEMPERATURES = (0.0, 0.7, 1.0)
PROMPT, NEW, PART = 32, 160, 192  # tokens of a prompt and of its continuation; rows of a part
HELD_OUT = "held_out"


def own_text(model: str, folder: Path, num_rows: int, text: Path | None = None) -> list[Tensor]:
    """Rows [num_rows, PROMPT + NEW] of training text, and held-out rows, PART of them. Row i has
    temperature i % 3. Parts that `folder` has from an earlier run are not generated again."""
    folder.mkdir(exist_ok=True)
    names = [*(f"text-{i}" for i in range(-(-num_rows // PART))), HELD_OUT]
    missing = [name for name in names if not (folder / f"{name}.safetensors").is_file()]
    if missing:
        with LLM(model, max_num_seqs=PART, max_model_len=PROMPT + NEW,
                 enable_prefix_caching=False, disable_log_stats=True) as llm:  # fmt: skip
            pieces = pieces_of(llm, text)
            for name in tqdm(missing, desc="Generating", unit="part"):
                held_out, number = name == HELD_OUT, names.index(name)
                rows = generate(llm, pieces[held_out], number, num_rows)
                unfinished = folder / "unfinished.safetensors"
                save_file({"rows": rows}, unfinished)
                unfinished.replace(folder / f"{name}.safetensors")
    *parts, last = (load_file(folder / f"{name}.safetensors")["rows"] for name in names)
    return [torch.cat(parts)[:num_rows].long(), last.long()]


def pieces_of(llm: LLM, text: Path | None) -> list[Tensor]:
    """Prompts [N, PROMPT] for training, and held-out ones."""
    if llm.engine.tokenizer is None:
        raise ConfigError(f"{llm.engine.args.model} has no tokenizer, which prompts need.")
    encode = llm.engine.tokenizer.encode
    ids, held_out = encode(read_text(text), False), encode(held_out_text(), False)
    if text is not None:
        cut = len(ids) * 9 // 10
        ids, held_out = ids[:cut], ids[cut:]
    if len(held_out) < 8 * PROMPT:
        raise ConfigError(f"--text has {len(ids):,} tokens; prompts need at least {80 * PROMPT:,}.")
    both = ids, held_out
    return [torch.tensor(part[: len(part) // PROMPT * PROMPT]).view(-1, PROMPT) for part in both]


def generate(llm: LLM, pieces: Tensor, number: int, num_rows: int) -> Tensor:
    """The rows [PART, PROMPT + NEW] of a part. Prompts recur once all were used, with other
    temperatures and seeds."""
    first = number * PART
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    count = min(PART, max(num_rows, len(TEMPERATURES)))
    prompts = [pieces[order[(first + i) % len(order)]].tolist() for i in range(count)]
    params = [
        SamplingParams(
            temperature=TEMPERATURES[i % 3], seed=first + i, max_tokens=NEW, ignore_eos=True
        )
        for i in range(count)
    ]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    rows = [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    return torch.tensor(rows, dtype=torch.int32)
