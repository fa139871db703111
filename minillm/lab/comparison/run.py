"""Runs a comparison: the 16-bit model first, then every candidate, as JSON data."""

import platform
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.api.arguments import EngineArgs
from minillm.engine.setup import choose_dtype
from minillm.errors import ConfigError
from minillm.execution.setup import open_tokenizer
from minillm.lab.comparison import sizes
from minillm.lab.comparison.candidates import (
    Candidate,
    Opened,
    as_served,
    facts,
    load_base,
    open_candidate,
)
from minillm.lab.comparison.metrics import Scores, hidden_states, perplexity, quality, score
from minillm.lab.comparison.speed import Speed
from minillm.lab.comparison.windows import LENGTH, WINDOWS, Windows, cut_windows, read_text
from minillm.lab.quantise.calibration_text import calibration_windows
from minillm.lab.quantise.calibration_text import read_text as read_calibration
from minillm.models.checkpoint import ModelSource, open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import DTYPES
from minillm.models.packing import pack_weights
from minillm.text.tokenizer import Tokenizer

BASE = "16 bit"


@dataclass(frozen=True)
class Work:
    """What to compare."""

    model: str
    candidates: tuple[Candidate, ...]
    text: Path | None = None
    windows: int = WINDOWS
    length: int = LENGTH
    calibration: Path | None = None
    samples: int = 64
    calibration_length: int = 512
    seeds: tuple[int, ...] = (0,)
    speed: bool = True
    dtype: str = "auto"  # of the measured speed and of "KL run"
    kv_cache_dtype: str = "auto"  # of the same
    threads: int = 1


@dataclass(frozen=True)
class Reference:
    """The 16-bit model in float32 on the text."""

    windows: Windows
    model: Decoder
    hidden: Tensor
    scores: Scores


@dataclass
class Base:
    """The 16-bit model; parts that are not measured are None."""

    source: ModelSource
    tokenizer: Tokenizer | None = None
    reference: Reference | None = None
    speed: Speed | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> bool:
        """Whether its files hold codes."""
        return bool(self.source.quantization or sizes.stored_bits(self.source))


def compare(work: Work, say: Callable[[str], Any] = lambda what: None) -> dict[str, Any]:
    """Run the comparison. Returns JSON data.

    Raises:
        ConfigError: files, texts or models that do not fit each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(work.threads)
    try:
        base = open_base(work, say)
        results = all_results(work, base, say)
    finally:
        torch.set_num_threads(threads)
    return as_json(work, base, results)


def all_results(work: Work, base: Base, say: Callable[[str], Any]) -> list[dict[str, Any]]:
    """The rows of all models; closes the engine."""
    try:
        calibrations = calibration_texts(work, base)
        results = [base_result(work, base, say)]
        for candidate in work.candidates:
            results.append(candidate_result(work, base, candidate, calibrations, say))
        return results
    finally:
        if base.speed is not None:
            base.speed.close()


def open_base(work: Work, say: Callable[[str], Any]) -> Base:
    """Load the 16-bit model, and score the text with it."""
    base = Base(open_model(work.model))
    if base.source.folder is None:
        base.notes.append(f"{work.model} has random weights: sizes and speed only, no quality.")
    else:
        base.tokenizer = tokenizer_of(base.source)
        windows = text_windows(work, base)
        say(f"{work.model} on the text")
        model = load_base(base.source, torch.float32)
        hidden = hidden_states(model, windows)
        base.reference = Reference(windows, model, hidden, score(model, hidden, windows))
        if base.quantized:
            base.notes.append(
                f"{work.model} is quantised: the row '{BASE}' has the values of its codes in 16 "
                "bits, and what its own rounding cost is not in the table."
            )
        base.notes.append(
            "Bits per byte, KL and top-1 are those of the stored weights in float32 arithmetic. KL "
            "run is the part due to arithmetic: from these weights in float32 to the products that "
            "the engine runs, in its type and with rounded inputs"
            + ("." if work.kv_cache_dtype == "auto" else ", and with its KV cache in 8 bits.")
        )
    if work.speed:
        say("starting the engine")
        base.speed = Speed(base.source, work.dtype, work.threads, work.kv_cache_dtype)
    return base


def tokenizer_of(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model. Raises ConfigError if it has none."""
    found = open_tokenizer(EngineArgs(source.name), source)
    if found is None:
        raise ConfigError(f"{source.name} has no tokenizer, which reading a text needs.")
    return found


def text_windows(work: Work, base: Base) -> Windows:
    """The windows of the text."""
    given = (work.text, work.calibration)
    if len({path.resolve() for path in given if path is not None}) < sum(map(bool, given)):
        raise ConfigError(
            f"--text and --calibration are both {work.text}; methods must not see the text on "
            "which they are compared."
        )
    longest = base.source.config.longest_context
    if not 2 <= work.length <= longest:
        raise ConfigError(f"--length is {work.length}; it must be from 2 to {longest} tokens.")
    if work.windows < 1:
        raise ConfigError(f"--windows is {work.windows}; it must be at least 1.")
    if base.tokenizer is None:
        raise ConfigError(f"{work.model} has no tokenizer.")
    name = "held-out standard library" if work.text is None else work.text.name
    return cut_windows(base.tokenizer, read_text(work.text), name, work.windows, work.length)


def calibration_texts(work: Work, base: Base) -> dict[int, Tensor]:
    """The calibration windows of each seed, if a method needs them."""
    needed = [each.name for each in work.candidates if each.recipe and each.recipe.calibrated]
    if not needed:
        return {}
    if base.tokenizer is None:
        raise ConfigError(
            f"{needed[0]} needs a calibration text, and {work.model} has random weights; choose "
            "methods without calibration, such as int8, int4 or rtn:4:64."
        )
    text, length = read_calibration(work.calibration), work.calibration_length
    length = min(length, base.source.config.longest_context)
    return {
        seed: calibration_windows(base.tokenizer, text, work.samples, length, seed)
        for seed in work.seeds
    }


def base_result(work: Work, base: Base, say: Callable[[str], Any]) -> dict[str, Any]:
    """The row of the 16-bit model."""
    source, known = base.source, base.reference
    model = load_base(source, torch.bfloat16) if known is None else known.model
    opened = Opened(Candidate(BASE), model, source)
    data = row(opened, "measured" if source.folder and not base.quantized else "computed")
    if known is not None:
        run, _ = as_run(work, base, model)
        if base.speed is not None and base.quantized:
            base.speed.base = run  # in place of the file as the engine loads it
        measured = quality_json(known.scores, known, None)
        data["quality"] = [measured | run_divergence(work, known.windows, run, model, known.hidden)]
    if base.speed is not None:
        data["speed"] = base.speed.measure(None, say)
    return data


def candidate_result(
    work: Work,
    base: Base,
    candidate: Candidate,
    calibrations: dict[int, Tensor],
    say: Callable[[str], Any],
) -> dict[str, Any]:
    """The row of a candidate; a calibrated method once for every seed."""
    seeds = work.seeds if candidate.recipe and candidate.recipe.calibrated else work.seeds[:1]
    known = base.reference
    dtype = torch.bfloat16 if known is None else torch.float32
    data: dict[str, Any] = {}
    for seed in seeds:
        say(f"{candidate.name}" + f", calibration {seed}" * (len(seeds) > 1))
        opened = open_candidate(candidate, base.source, dtype, calibrations.get(seed))
        check_same_shape(base, opened)
        data = data or row(opened, "computed" if candidate.is_method else "measured")
        run, data["packing"] = as_run(work, base, opened.model)
        if known is not None:
            hidden = hidden_states(opened.model, known.windows)
            scores = score(opened.model, hidden, known.windows, (known.model, known.hidden))
            measured = quality_json(scores, known, seed)
            measured |= run_divergence(work, known.windows, run, opened.model, hidden)
            data.setdefault("quality", []).append(measured)
    if base.speed is not None:
        data["speed"] = base.speed.measure(run, say)
    return data


def as_run(work: Work, base: Base, model: Decoder) -> tuple[Decoder, str]:
    """A loaded model as a CPU's engine runs it, and its packing in words. A copy, if the model is
    still needed for the text."""
    run = model if base.reference is None else deepcopy(model)
    dtype = choose_dtype(work.dtype, run.config, torch.device("cpu"))
    as_served(run, DTYPES[dtype])
    return run, pack_weights(run)


def run_divergence(
    work: Work, windows: Windows, run: Decoder, model: Decoder, hidden: Tensor
) -> dict[str, Any]:
    """The divergence from a model in float32, whose hidden states are given, to the same weights as
    the engine runs them, with its KV cache: the part that is due to arithmetic."""
    ran = hidden_states(run, windows, work.kv_cache_dtype)
    scores = score(run, ran, windows, (model, hidden))
    return {"kl_run": asdict(quality(scores, scores, windows)["kl"])}


def check_same_shape(base: Base, opened: Opened) -> None:
    """Check that a file has the tokenizer of the model, and for speed its KV cache."""
    if opened.candidate.is_method:
        return
    name, mine = opened.source.name, base.source
    if base.tokenizer is not None and not base.tokenizer.same_tokens(tokenizer_of(opened.source)):
        raise ConfigError(
            f"{name} and {mine.name} have different tokenizers; only models that read the same "
            "tokens can be compared."
        )
    ours, theirs = mine.config, opened.source.config
    same = [
        getattr(ours, field) == getattr(theirs, field)
        for field in ("num_layers", "num_kv_heads", "head_dim", "vocab_size", "hidden_size")
    ]
    if not all(same):
        raise ConfigError(
            f"{name} has another shape than {mine.name}; compare versions of the same model."
        )


def row(opened: Opened, disk: str) -> dict[str, Any]:
    """Facts and sizes of a loaded model, before it is packed."""
    measured = disk == "measured"
    on_disk = sizes.disk_sizes(opened.source) if measured else sizes.packed_sizes(opened)
    bits = sizes.stored_bits(opened.source) if measured else []
    return {
        "name": opened.candidate.name,
        **facts(opened),
        **({"weight_bits": bits} if bits else {}),
        "bits_per_weight": sizes.bits_per_weight(on_disk, opened.model),
        "disk": {"how": disk, **on_disk.as_json()},
        "memory": sizes.memory_sizes(opened.model).as_json(),
        "quantise_seconds": opened.seconds,
        "quantise_cpu_seconds": opened.cpu_seconds,
    }


def quality_json(scores: Scores, known: Reference, seed: int | None) -> dict[str, Any]:
    """The metrics of a model with one calibration."""
    data = quality(scores, known.scores, known.windows)
    metrics = {name: asdict(metric) for name, metric in data.items()}
    return {"seed": seed, "perplexity": perplexity(scores, known.windows), **metrics}


def as_json(work: Work, base: Base, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The comparison as JSON data."""
    text = None
    if base.reference is not None:
        windows = base.reference.windows
        text = {
            "name": windows.name,
            "windows": len(windows.ids),
            "length": windows.ids.shape[1],
            "scored_tokens": windows.num_scored * len(windows.ids),
            "scored_bytes": int(windows.num_bytes.sum()),
        }
    return {
        "benchmark": "compare",
        "model": base.source.name,
        "arithmetic": "float32",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "text": text,
        "seeds": list(work.seeds),
        "results": list(results),
        "notes": base.notes,
    }
