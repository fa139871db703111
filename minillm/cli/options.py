"""Options shared by several commands, and their translation to `LLM` and `SamplingParams`.

Values are checked by `EngineArgs` and `SamplingParams`, whose error messages the user sees.
"""

import json
import random
import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minillm.api.arguments import EngineArgs
from minillm.api.sampling_params import SamplingParams
from minillm.errors import ConfigError

Option = tuple[str, str, type | Callable[[str], Any], str]  # name, metavar, type, help


def json_object(text: str) -> Any:
    """Parse an option whose value is JSON, as on vLLM's command line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentTypeError(
            f"{text[:60]!r} is not JSON ({error.msg} at character {error.pos + 1}); put names in "
            "double quotes and the whole in single quotes: '{\"num_speculative_tokens\": 4}'."
        ) from error


# All but --model, whose default depends on the command.
ENGINE_OPTIONS: tuple[Option, ...] = (
    ("dtype", "NAME", str, "auto, bfloat16, float16 or float32"),
    ("device", "NAME", str, "auto, cpu, cuda or cuda:N"),
    ("max_model_len", "N", int, "longest context, in tokens"),
    ("load_format", "NAME", str, "auto, or dummy for random weights"),
    ("tokenizer", "DIR", str, "folder of the tokenizer (the model's)"),
    ("gpu_memory_utilization", "X", float,
     "fraction of the free memory to use, also on a CPU (0.9)"),
    ("kv_cache_dtype", "NAME", str,
     "auto, or int8: half the memory of 16 bits for cached keys and values"),
    ("max_num_seqs", "N", int, "maximum number of running sequences (256)"),
    ("max_num_batched_tokens", "N", int, "maximum number of tokens in one step (2048)"),
    ("deterministic", "", bool, "batch-invariant: identical results in any batch; slower"),
    ("tensor_parallel_size", "N", int, "tensor parallelism: ranks that split every layer (1)"),
    ("pipeline_parallel_size", "N", int, "pipeline parallelism: number of stages (1)"),
    ("data_parallel_size", "N", int, "data parallelism: copies of the model (1)"),
    ("enable_expert_parallel", "", bool,
     "expert parallelism, with -tp or -dp: distribute whole experts over the ranks"),
    ("enable_eplb", "", bool, "with -ep: rebalance experts by their measured load"),
    ("eplb_config", "JSON", json_object,
     'expert load balancing, such as {"step_interval": 3000, "num_redundant_experts": 2}'),
    ("distributed_executor_backend", "NAME", str,
     "where ranks run: mp (processes), threads (of this process), external (started by torchrun, "
     "its default) or ray (mp)"),
    ("master_addr", "HOST", str, "ray: address of this machine where ranks connect (127.0.0.1)"),
    ("master_port", "PORT", int, "ray: port where ranks connect (0: the system chooses one)"),
    ("speculative_config", "JSON", json_object,
     'speculative decoding, such as {"method": "ngram", "num_speculative_tokens": 4} or {"model": '
     '"tiny-draft", "num_speculative_tokens": "auto"}; methods: ngram, suffix, draft_model, '
     "medusa, eagle, mtp; the output stays the same, except with rejection_sample_method standard "
     "(vLLM's default) or typical"),
)  # fmt: skip
SHORT: Mapping[str, str] = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
}
SAMPLING_OPTIONS: tuple[Option, ...] = (
    ("max_tokens", "N", int, "maximum number of output tokens ({max_tokens:g})"),
    ("temperature", "T", float, "sampling temperature; 0 is greedy ({temperature:g})"),
    ("top_p", "P", float,
     "sample from the most probable tokens whose probabilities sum to P ({top_p:g})"),
    ("top_k", "K", int, "sample from the K most probable tokens (all)"),
    ("min_p", "P", float, "exclude tokens less probable than P times the most probable (0)"),
    ("repetition_penalty", "X", float,
     "above 1: penalise tokens of the prompt and the output (1)"),
    ("presence_penalty", "X", float, "-2 to 2: penalise tokens that are in the output (0)"),
    ("frequency_penalty", "X", float, "-2 to 2: penalise output tokens by their count (0)"),
    ("seed", "N", int, "the same seed gives the same text (random)"),
    ("stop", "TEXT", list, "stop before TEXT; may be repeated"),
    ("min_tokens", "N", int, "minimum number of output tokens (0)"),
    ("ignore_eos", "", bool, "continue after the end-of-text token"),
)  # fmt: skip
ENGINE = ("model", *(name for name, *_ in ENGINE_OPTIONS))
SAMPLING = (*(name for name, *_ in SAMPLING_OPTIONS), "n", "logprobs", "prompt_logprobs")


def add_engine_options(parser: ArgumentParser) -> None:
    """Declare the engine's options, except --model."""
    _declare(parser, "engine", ENGINE_OPTIONS)


def _declare(parser: ArgumentParser, title: str, options: Iterable[Option]) -> None:
    add = parser.add_argument_group(title).add_argument
    for name, metavar, kind, text in options:
        flags = [*filter(None, [SHORT.get(name)]), f"--{name.replace('_', '-')}"]
        if kind is bool:
            add(*flags, action="store_true", default=None, help=text)
        elif kind is list:
            add(*flags, metavar=metavar, action="append", help=text)
        else:
            add(*flags, metavar=metavar, type=kind, help=text)


def add_model_options(parser: ArgumentParser, help: str) -> None:
    """Declare MODEL, and --model for the same."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=help)
    parser.add_argument("--model", dest="model_option", metavar="MODEL", help=SUPPRESS)


def chosen_model(args: Namespace) -> str | None:
    """The model named by either of `add_model_options`; raises ConfigError if they differ."""
    if args.model and args.model_option and args.model != args.model_option:
        raise ConfigError("MODEL and --model name two models; leave one of them out.")
    return args.model or args.model_option


def add_sampling_options(parser: ArgumentParser, **defaults: Any) -> None:
    """Declare the sampling options; `sampling_params` applies the command's `defaults`."""
    parser.set_defaults(sampling=defaults)
    shown = [(*option[:3], option[3].format(**defaults)) for option in SAMPLING_OPTIONS]
    _declare(parser, "sampling", shown)


def as_options(message: str) -> str:
    """Rewrite parameter names in an error message as options: ``load_format='dummy'`` becomes
    ``--load-format dummy``. A name without an underscore is rewritten only before ``=``, because
    it may also be an English word or part of a file name."""
    for name in (*ENGINE, *SAMPLING):
        option = f"--{name.replace('_', '-')}"
        message = re.sub(rf"(?<![\w./'\"-]){name}=(['\"]?)([\w.]*\w)\1", rf"{option} \2", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w./'\"-]){name}(?![\w/'\"]|\.\w)", option, message)
    return message


def engine_arguments(args: Namespace) -> dict[str, Any]:
    """The arguments for `LLM`, checked before the model is loaded."""
    given = _given(args, ENGINE)
    EngineArgs(**given)
    return given


def sampling_params(args: Namespace, recommended: Mapping[str, Any] = {}) -> SamplingParams:
    """Sampling parameters: given options, else the model's recommended values, else the command's
    defaults. Without --seed, each run uses a random seed, which can be shown."""
    seed = {"seed": random.SystemRandom().getrandbits(31)}
    return SamplingParams(**(seed | args.sampling | dict(recommended) | _given(args, SAMPLING)))


def _given(args: Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}
