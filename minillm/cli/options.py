"""Options that several commands share, and the arguments of `LLM` and `SamplingParams` they mean.

Values are not judged here: `EngineArgs` and `SamplingParams` check each of them once, for every
way in, and their sentences are what the user reads.
"""

import json
import random
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minillm.api.engine_args import EngineArgs
from minillm.api.sampling_params import SamplingParams

ENGINE = ("model", "tokenizer", "dtype", "device", "load_format", "max_model_len",
          "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens",
          "deterministic", "speculative_config", "tensor_parallel_size",
          "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel",
          "enable_eplb", "eplb_config",
          "distributed_executor_backend", "master_addr", "master_port")  # fmt: skip
SAMPLING = ("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "max_tokens", "min_tokens", "seed", "stop",
            "ignore_eos", "logprobs", "prompt_logprobs")  # fmt: skip


def add_engine_options(parser: ArgumentParser) -> None:
    """Options of the engine, but for --model, whose default differs between commands."""
    group = parser.add_argument_group("engine")
    group.add_argument("--dtype", metavar="NAME", help="auto, bfloat16, float16 or float32")
    group.add_argument("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--max-model-len", metavar="N", type=int, help="longest context, in tokens")
    group.add_argument("--load-format", metavar="NAME", help="auto, or dummy for random weights")
    group.add_argument("--tokenizer", metavar="DIR", help="take the tokenizer from another folder")
    group.add_argument("--gpu-memory-utilization", metavar="X", type=float,
                       help="share of the free memory to use, on a CPU too (0.9)")  # fmt: skip
    group.add_argument("--max-num-seqs", metavar="N", type=int,
                       help="completions computed at once, at most (256)")  # fmt: skip
    group.add_argument("--max-num-batched-tokens", metavar="N", type=int,
                       help="tokens computed in one step, at most (2048)")  # fmt: skip
    group.add_argument("--deterministic", action="store_true", default=None,
                       help="the same bits alone and in any batch; slower")  # fmt: skip
    group.add_argument("-tp", "--tensor-parallel-size", metavar="N", type=int,
                       help="processes that share every layer (1)")  # fmt: skip
    group.add_argument("-pp", "--pipeline-parallel-size", metavar="N", type=int,
                       help="stages of layers, each of so many processes (1)")  # fmt: skip
    group.add_argument("-dp", "--data-parallel-size", metavar="N", type=int,
                       help="copies of the model that step together (1)")  # fmt: skip
    group.add_argument("-ep", "--enable-expert-parallel", action="store_true", default=None,
                       help="with -tp or -dp: whole experts for each process")  # fmt: skip
    group.add_argument("--enable-eplb", action="store_true", default=None,
                       help="with -ep: place experts anew by how often they are used")  # fmt: skip
    group.add_argument("--eplb-config", metavar="JSON", type=json_object,
                       help='{"step_interval": 3000, "num_redundant_experts": 2}')  # fmt: skip
    group.add_argument("--distributed-executor-backend", metavar="NAME",
                       help="mp: processes; threads: of this process; external: ranks"
                            " that `minillm node` starts; ray (mp)")  # fmt: skip
    group.add_argument("--master-addr", metavar="HOST",
                       help="interface where such ranks connect (127.0.0.1)")  # fmt: skip
    group.add_argument("--master-port", metavar="PORT", type=int,
                       help="port there (0: chosen by the system, and shown)")  # fmt: skip
    group.add_argument("--speculative-config", metavar="JSON", type=json_object,
                       help="draft tokens that one step verifies; changes no token (vLLM's default,"
                            " rejection_sample_method standard, changes them): "
                            '{"method": "ngram", "num_speculative_tokens": 4} or '
                            '{"model": "tiny-draft", "num_speculative_tokens": "auto"}',
                       )  # fmt: skip


def json_object(text: str) -> Any:
    """An option that is written as JSON, as on vLLM's command line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentTypeError(
            f"{text[:60]!r} is not JSON ({error.msg} at character {error.pos + 1}); write names in "
            "double quotes and all in single ones, as in '{\"num_speculative_tokens\": 4}'."
        ) from error


def add_sampling_options(parser: ArgumentParser, **defaults: Any) -> None:
    """Options of one answer; `defaults` are the command's, which `sampling_params` fills in."""
    parser.set_defaults(sampling=defaults)
    shown = {name: f"{value:g}" for name, value in defaults.items()}
    group = parser.add_argument_group("sampling")
    option = group.add_argument
    option("--max-tokens", metavar="N", type=int,
           help=f"stop after this many new tokens ({shown['max_tokens']})")  # fmt: skip
    option("--temperature", metavar="T", type=float,
           help=f"0 always takes the most probable token ({shown['temperature']})")  # fmt: skip
    option("--top-p", metavar="P", type=float,
           help=f"choose among the most probable of this total ({shown['top_p']})")  # fmt: skip
    option("--top-k", metavar="K", type=int, help="choose among the K most probable tokens (all)")
    option("--min-p", metavar="P", type=float, help="drop tokens below P times the best (0)")
    option("--repetition-penalty", metavar="X", type=float, help="above 1: repeat less (1)")
    option("--presence-penalty", metavar="X", type=float, help="-2 to 2, once per used token (0)")
    option("--frequency-penalty", metavar="X", type=float, help="-2 to 2, for each use (0)")
    option("--seed", metavar="N", type=int, help="the same seed gives the same text")
    option("--stop", metavar="TEXT", action="append", help="end before TEXT; may be repeated")
    option("--min-tokens", metavar="N", type=int, help="do not end before N tokens (0)")
    option("--ignore-eos", action="store_true", default=None, help="do not end at the end token")


def as_options(message: str) -> str:
    """An error of the library in this command line's words: ``load_format='dummy'`` is
    ``--load-format dummy`` here. Names without an underscore are also English, or of a file."""
    for name in (*ENGINE, *SAMPLING, "kv_cache_dtype"):
        option = f"--{name.replace('_', '-')}"
        message = re.sub(rf"(?<![\w./'\"-]){name}=(['\"]?)([\w.]*\w)\1", rf"{option} \2", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w./'\"-]){name}(?![\w/'\"]|\.\w)", option, message)
    return message


def engine_arguments(args: Namespace) -> dict[str, Any]:
    """Arguments for `LLM`, already checked, so that a typing error costs no loading."""
    given = _given(args, ENGINE)
    EngineArgs(**given)
    return given


def sampling_params(
    args: Namespace, recommended: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """What the options ask of the sampler, else what the model's authors recommend, else the
    command's defaults. Without --seed every run draws anew, from a seed that can be shown."""
    seed = {"seed": random.SystemRandom().getrandbits(31)}
    return SamplingParams(**(seed | args.sampling | dict(recommended) | _given(args, SAMPLING)))


def _given(args: Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}
