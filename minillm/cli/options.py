"""Options shared by several commands, and their translation to `LLM` and `SamplingParams`.

Values are checked by `EngineArgs` and `SamplingParams`, whose error messages the user sees.
"""

import json
import random
import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minillm.api.arguments import EngineArgs
from minillm.api.sampling_params import SamplingParams
from minillm.errors import ConfigError

ENGINE = ("model", "tokenizer", "dtype", "device", "load_format", "max_model_len",
          "kv_cache_dtype",
          "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens",
          "deterministic", "speculative_config", "tensor_parallel_size",
          "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel",
          "enable_eplb", "eplb_config",
          "distributed_executor_backend", "master_addr", "master_port")  # fmt: skip
SAMPLING = ("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "max_tokens", "min_tokens", "seed", "stop",
            "ignore_eos", "logprobs", "prompt_logprobs")  # fmt: skip


def add_engine_options(parser: ArgumentParser) -> None:
    """Declare the engine's options, except --model, whose default depends on the command."""
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", metavar="NAME", help="auto, bfloat16, float16 or float32")
    group.add_argument("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--max-model-len", metavar="N", type=int, help="longest context, in tokens")
    group.add_argument("--load-format", metavar="NAME", help="auto, or dummy for random weights")
    group.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (the model's)")
    group.add_argument("--gpu-memory-utilization", metavar="X", type=float,
                       help="fraction of the free memory to use, also on a CPU (0.9)")  # fmt: skip
    group.add_argument("--kv-cache-dtype", metavar="NAME",
                       help="auto, or int8: half the memory of 16 bits for cached keys and "
                            "values")  # fmt: skip
    group.add_argument("--max-num-seqs", metavar="N", type=int,
                       help="maximum number of running sequences (256)")  # fmt: skip
    group.add_argument("--max-num-batched-tokens", metavar="N", type=int,
                       help="maximum number of tokens in one step (2048)")  # fmt: skip
    group.add_argument("--deterministic", action="store_true", default=None,
                       help="batch-invariant: identical results in any batch; slower")  # fmt: skip
    group.add_argument("-tp", "--tensor-parallel-size", metavar="N", type=int,
                       help="tensor parallelism: ranks that split every layer (1)")  # fmt: skip
    group.add_argument("-pp", "--pipeline-parallel-size", metavar="N", type=int,
                       help="pipeline parallelism: number of stages (1)")  # fmt: skip
    group.add_argument("-dp", "--data-parallel-size", metavar="N", type=int,
                       help="data parallelism: copies of the model (1)")  # fmt: skip
    group.add_argument("-ep", "--enable-expert-parallel", action="store_true", default=None,
                       help="expert parallelism, with -tp or -dp: distribute whole "
                            "experts over the ranks")  # fmt: skip
    group.add_argument("--enable-eplb", action="store_true", default=None,
                       help="with -ep: rebalance experts by their measured load")  # fmt: skip
    group.add_argument("--eplb-config", metavar="JSON", type=json_object,
                       help="expert load balancing, such as "
                            '{"step_interval": 3000, "num_redundant_experts": 2}')  # fmt: skip
    group.add_argument("--distributed-executor-backend", metavar="NAME",
                       help="where ranks run: mp (processes), threads (of this process), "
                            "external (started by 'minillm node') or ray (mp)")  # fmt: skip
    group.add_argument("--master-addr", metavar="HOST",
                       help="external: interface where ranks connect (127.0.0.1)")  # fmt: skip
    group.add_argument("--master-port", metavar="PORT", type=int,
                       help="external: port where ranks connect (0: the system "
                            "chooses one)")  # fmt: skip
    group.add_argument("--speculative-config", metavar="JSON", type=json_object,
                       help="speculative decoding, such as "
                            '{"method": "ngram", "num_speculative_tokens": 4} or '
                            '{"model": "tiny-draft", "num_speculative_tokens": "auto"}; '
                            "methods: ngram, suffix, draft_model; "
                            "the output stays the same, except with "
                            "rejection_sample_method standard (vLLM's default)",
                       )  # fmt: skip


def add_model_options(parser: ArgumentParser, help: str) -> None:
    """Declare MODEL, and --model for the same."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=help)
    parser.add_argument("--model", dest="model_option", metavar="MODEL", help=SUPPRESS)


def chosen_model(args: Namespace) -> str | None:
    """The model named by either of `add_model_options`; raises ConfigError if they differ."""
    if args.model and args.model_option and args.model != args.model_option:
        raise ConfigError("MODEL and --model name two models; leave one of them out.")
    return args.model or args.model_option


def json_object(text: str) -> Any:
    """Parse an option whose value is JSON, as on vLLM's command line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentTypeError(
            f"{text[:60]!r} is not JSON ({error.msg} at character {error.pos + 1}); put names in "
            "double quotes and the whole in single quotes: '{\"num_speculative_tokens\": 4}'."
        ) from error


def add_sampling_options(parser: ArgumentParser, **defaults: Any) -> None:
    """Declare the sampling options; `sampling_params` applies the command's `defaults`."""
    parser.set_defaults(sampling=defaults)
    shown = {name: f"{value:g}" for name, value in defaults.items()}
    group = parser.add_argument_group("sampling")
    option = group.add_argument
    option("--max-tokens", metavar="N", type=int,
           help=f"maximum number of output tokens ({shown['max_tokens']})")  # fmt: skip
    option("--temperature", metavar="T", type=float,
           help=f"sampling temperature; 0 is greedy ({shown['temperature']})")  # fmt: skip
    option("--top-p", metavar="P", type=float,
           help="sample from the most probable tokens whose probabilities sum to P "
                f"({shown['top_p']})")  # fmt: skip
    option("--top-k", metavar="K", type=int, help="sample from the K most probable tokens (all)")
    option("--min-p", metavar="P", type=float,
           help="exclude tokens less probable than P times the most probable (0)")  # fmt: skip
    option("--repetition-penalty", metavar="X", type=float,
           help="above 1: penalise tokens of the prompt and the output (1)")  # fmt: skip
    option("--presence-penalty", metavar="X", type=float,
           help="-2 to 2: penalise tokens that are in the output (0)")  # fmt: skip
    option("--frequency-penalty", metavar="X", type=float,
           help="-2 to 2: penalise output tokens by their count (0)")  # fmt: skip
    option("--seed", metavar="N", type=int, help="the same seed gives the same text (random)")
    option("--stop", metavar="TEXT", action="append",
           help="stop before TEXT; may be repeated")  # fmt: skip
    option("--min-tokens", metavar="N", type=int, help="minimum number of output tokens (0)")
    option("--ignore-eos", action="store_true", default=None,
           help="continue after the end-of-text token")  # fmt: skip


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


def sampling_params(
    args: Namespace, recommended: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """Sampling parameters: given options, else the model's recommended values, else the command's
    defaults. Without --seed, each run uses a random seed, which can be shown."""
    seed = {"seed": random.SystemRandom().getrandbits(31)}
    return SamplingParams(**(seed | args.sampling | dict(recommended) | _given(args, SAMPLING)))


def _given(args: Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}
