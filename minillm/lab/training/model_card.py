"""Writes assets/MODEL_CARD.md; all its figures are measured."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from minillm import LLM, SamplingParams
from minillm.lab.training import corpus, evaluate, prompts
from minillm.llm import Prompt
from minillm.models.checkpoint import open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
CONTEXT = 1024  # context of the bits-per-byte measurement
AIM_BITS, AIM_ACCEPTED = 1.0, 0.6


@dataclass(frozen=True)
class Agreement:
    """Agreement of the greedy choices of a draft model and its target."""

    accepted: int
    drafted: int
    on_continuations: float  # fraction of equal choices on the target's own greedy text
    on_held_out: float  # fraction of equal choices on held-out text


@dataclass(frozen=True)
class Completions:
    """Completions of fixed prompts."""

    ten: tuple[tuple[str, str], ...]  # prompt, greedy completion
    parsed: int  # of `tried` longer completions
    tried: int
    kept: float  # fraction of the generated text that was parsed


def greedy(llm: LLM, texts: Sequence[Prompt]) -> list[tuple[str, list[int]]]:
    """Greedy completions of 64 tokens: text and token ids."""
    outputs = llm.generate(texts, GREEDY)
    return [(o.outputs[0].text, list(o.outputs[0].token_ids)) for o in outputs]


def measure_completions(llm: LLM, manifest: corpus.Manifest) -> Completions:
    """Complete the ten prompts and held-out functions and classes, and count what parses."""
    ten = [text for text, _ in greedy(llm, prompts.TEN_PROMPTS)]
    headers = prompts.held_out_headers(manifest)
    whole = [h + text for h, (text, _) in zip(headers, greedy(llm, headers), strict=True)]
    kept = [evaluate.complete_statements(text) for text in whole]
    return Completions(
        ten=tuple(zip(prompts.TEN_PROMPTS, ten, strict=True)),
        parsed=sum(map(evaluate.parses, kept)),
        tried=len(whole),
        kept=sum(map(len, kept)) / sum(map(len, whole)),
    )


def measure_agreement(
    llm: LLM, target: Decoder, draft: Decoder, manifest: corpus.Manifest, tokenizer: Tokenizer
) -> Agreement:
    """Measure greedy speculation with 4 drafts on 64 held-out prompts, 64 new tokens each."""
    starts = prompts.held_out_prompts(manifest, tokenizer)
    agreed = [
        evaluate.matches(draft, prompt, ids)
        for prompt, (_, ids) in zip(starts, greedy(llm, starts), strict=True)
    ]
    counts = [evaluate.count_accepted(one) for one in agreed]
    flat = [match for one in agreed for match in one]
    equal = [
        (evaluate.logits_of(target, ids).argmax(-1) == evaluate.logits_of(draft, ids).argmax(-1))
        for ids in prompts.held_out_prompts(manifest, tokenizer, count=64, length=512)
    ]
    return Agreement(
        accepted=sum(accepted for accepted, _ in counts),
        drafted=sum(drafted for _, drafted in counts),
        on_continuations=sum(flat) / len(flat),
        on_held_out=float(torch.cat(equal).float().mean()),
    )


def corpus_table(manifest: corpus.Manifest) -> str:
    """One line per source of the corpus."""
    rows = ["| source | version | licence | training files | bytes | held out |", "|" + "---|" * 6]
    for name, licence in manifest.licences.items():
        sizes: dict[bool, list[int]] = {True: [], False: []}
        for file in manifest.files:
            if file.source == name:
                sizes[file.held_out].append(len(corpus.read(file)))
        title = "CPython standard library" if name == "stdlib" else name
        version = manifest.versions.get(name, manifest.python)
        train, held = sizes[False], sizes[True]
        rows.append(
            f"| {title} | {version} | {licence} | {len(train)} | {sum(train):,} | {sum(held):,} |"
        )
    return "\n".join(rows)


def held_out_modules(manifest: corpus.Manifest) -> str:
    """Names of the held-out top-level modules of the standard library."""
    files = manifest.select(held_out=True, stdlib=True)
    return ", ".join(sorted({f"`{file.path.split('/')[0].removesuffix('.py')}`" for file in files}))


def write_model_card(assets: Path) -> Path:
    """Measure the embedded models on this machine and write the card beside them."""
    manifest = corpus.load_manifest()
    tokenizer = Tokenizer.from_folder(assets / "tiny")
    models = {
        name: load_model(open_model(assets / name), torch.float32)
        for name in ("tiny", "tiny-draft")
    }
    scores: dict[str, dict[str, evaluate.BitsPerByte]] = {}
    for name, model in tqdm(models.items(), desc="Scoring", unit="model"):
        scores[name] = {
            "stdlib": evaluate.bits_per_byte(
                model, tokenizer, prompts.held_out_texts(manifest), CONTEXT
            ),
            "package": evaluate.bits_per_byte(
                model, tokenizer, prompts.held_out_texts(manifest, stdlib=False), CONTEXT
            ),
        }
    with LLM(model=assets / "tiny", dtype="float32") as llm:
        completions = measure_completions(llm, manifest)
        agreement = measure_agreement(
            llm, models["tiny"], models["tiny-draft"], manifest, tokenizer
        )
    runs = {name: json.loads((assets / name / "training.json").read_text()) for name in models}
    card = render(manifest, models, scores, completions, agreement, runs)
    path = assets / "MODEL_CARD.md"
    path.write_text(card)
    return path


def render(
    manifest: corpus.Manifest,
    models: dict[str, Decoder],
    scores: dict[str, dict[str, evaluate.BitsPerByte]],
    completions: Completions,
    agreement: Agreement,
    runs: dict[str, dict[str, object]],
) -> str:
    """The text of the card."""
    lines = ["| | tiny | tiny-draft |", "|---|---|---|"]
    for title, key in (("held-out standard library", "stdlib"), ("held-out jinja2", "package")):
        cells = [f"{scores[name][key].bits_per_byte:.3f}" for name in models]
        lines.append(f"| {title}, bits per byte | {' | '.join(cells)} |")
    for title, values in (
        ("parameters", [f"{sum(p.numel() for p in m.parameters()):,}" for m in models.values()]),
        ("trained on, tokens", [f"{runs[name]['tokens']:,}" for name in models]),
        ("optimizer steps", [f"{runs[name]['steps']:,}" for name in models]),
        ("wall time, minutes", [str(runs[name]["minutes"]) for name in models]),
        ("trained with", [str(runs[name]["machine"]) for name in models]),
        ("remarks", [str(runs[name].get("remarks", "none")) for name in models]),
    ):
        lines.append(f"| {title} | {' | '.join(values)} |")
    stdlib = scores["tiny"]["stdlib"]
    fenced = "\n\n".join(
        f"```python\n{prompt}⟨prompt ends⟩{text}\n```" for prompt, text in completions.ten
    )
    return TEMPLATE.format(
        summary="\n".join(lines),
        python=manifest.python,
        aim_bits=AIM_BITS,
        verdict="met" if stdlib.bits_per_byte <= AIM_BITS else "missed",
        num_bytes=stdlib.num_bytes,
        num_tokens=stdlib.num_tokens,
        bytes_per_token=stdlib.num_bytes / stdlib.num_tokens,
        context=CONTEXT,
        modules=held_out_modules(manifest),
        corpus=corpus_table(manifest),
        accepted=agreement.accepted,
        drafted=agreement.drafted,
        rate=agreement.accepted / agreement.drafted,
        aim_accepted=AIM_ACCEPTED,
        accept_verdict="met"
        if agreement.accepted >= AIM_ACCEPTED * agreement.drafted
        else "missed",
        on_continuations=agreement.on_continuations,
        on_held_out=agreement.on_held_out,
        parsed=completions.parsed,
        tried=completions.tried,
        kept=completions.kept,
        completions=fenced,
    )


TEMPLATE = """# The embedded models

Two language models of Python source, small enough to ship with the package. They continue code;
they follow no instructions and have no chat template. Written by
`python -m minillm.lab.training card`, which measures every number below.

{summary}

Bits per byte: the negative log-likelihood of whole held-out files, divided by ln 2 and by their
UTF-8 bytes. Each file follows an end-of-text token; every token is predicted once, from at least
{context} / 2 and at most {context} tokens before it where the file has them; bf16 weights, float32
arithmetic. Held-out standard library: {num_bytes:,} bytes, {num_tokens:,} tokens
({bytes_per_token:.2f} bytes per token). The aim for `tiny` was at most {aim_bits} on it: {verdict}.

## Making them again

```
python -m minillm.lab.training verify        # the corpus of CPython {python} and constraints.txt
python -m minillm.lab.training tiny
python -m minillm.lab.training tiny-draft
python -m minillm.lab.training card
```

`tiny` has Qwen3's architecture (7 layers, 256 wide, 4 query and 2 key/value heads of 64, tied
embeddings). `tiny-draft` (3 layers, 128 wide) is distilled from it: it learns the distribution that
`tiny` gives over standard-library text and over its own greedy continuations of such text. The
vocabulary, a byte-level BPE of 4,096 entries, was learnt from training files only. Recipes:
`minillm/lab/training/recipes.py`.

## Corpus

Installed Python source; nothing is downloaded. `corpus.json.gz` lists every file with its sha256.

{corpus}

Held out, never trained on: the standard-library modules {modules}
(those whose file or folder name has a sha256 divisible by 14), and the package jinja2. A training
file is left out when more than a tenth of its longer lines occur in held-out files, and so are
tests, tables and near-copies of other files.

`calibration.txt.gz` holds whole training files of the standard library (PSF-2.0, copyright Python
Software Foundation), drawn at random: the default calibration text of `minillm quantize`.
`held_out.txt.gz` holds the held-out files of the standard library (PSF-2.0), joined: the default
text of `minillm compare`.

## The draft model

Speculation with 4 drafted tokens, greedy, 64 held-out prompts of 128 tokens, 64 new tokens each:
{accepted:,} accepted of {drafted:,} drafted, **{rate:.3f}** (the aim was at least {aim_accepted}:
{accept_verdict}). Greedy text repeats itself, which inflates that number. Teacher-forced, both
models make the same greedy choice for {on_continuations:.1%} of the tokens of those continuations
and for {on_held_out:.1%} of the tokens of held-out text.

## Completions

{parsed} of {tried} greedy completions of held-out top-level functions and classes (64 tokens each)
are accepted by `ast.parse` when cut at the last complete statement; {kept:.0%} of their text
remains after the cut.

Ten fixed prompts, greedy, 64 tokens:

{completions}
"""
