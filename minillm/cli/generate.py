"""Generate text from a prompt. Text streams to stdout, statistics go to stderr."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from minillm.api.outputs import CompletionOutput, RequestOutput
from minillm.api.sampling_params import SamplingParams
from minillm.cli.engine_import import import_engine
from minillm.cli.options import (
    add_engine_options,
    add_sampling_options,
    as_options,
    engine_arguments,
    sampling_params,
)
from minillm.cli.replaceable import TRACE_START, check_replaceable
from minillm.cli.terminal import Terminal, digits, plural, seconds
from minillm.errors import InvalidRequestError, TraceFileError

if TYPE_CHECKING:
    from minillm.llm import LLM

USAGE = "[PROMPT] [options]"
EXAMPLES = """\
examples:
  minillm generate "def fib(n):"
  minillm generate --model PATH_TO_A_HF_FOLDER -tp 2 "Once upon a time"
  minillm generate --temperature 0.8 --n 3 --seed 1 "import os"
  git diff | minillm generate --json | jq -r '.outputs[0].text'
"""
DEFAULT_PROMPT = "def fib(n):"
SHOWN_PROMPT = 2000  # characters; a longer prompt is not repeated on the screen


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("text", metavar="PROMPT", nargs="?",
                        help="the prompt; - or nothing reads stdin")  # fmt: skip
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt, as an option")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    prompt.add_argument("--prompt-ids", metavar="1,2,3",
                        help="token ids, for a model without a tokenizer")  # fmt: skip
    parser.add_argument("--model", metavar="MODEL", default="tiny",
                        help="embedded name, folder, hub id or preset:NAME (tiny)")  # fmt: skip
    parser.add_argument("--json", action="store_true",
                        help="print one JSON object instead of streaming text")  # fmt: skip
    parser.add_argument("--trace", metavar="FILE",
                        help="save a trace, for 'minillm trace view FILE'")  # fmt: skip
    add_sampling_options(parser, temperature=0.0, top_p=1.0, max_tokens=128)
    more = parser.add_argument_group("several completions, and log-probabilities (with --json)")
    more.add_argument("--n", metavar="N", type=int, help="number of completions (1)")
    more.add_argument("--logprobs", metavar="K", type=int,
                      help="return the log-probability of each output token and of the K "
                           "most probable ones")  # fmt: skip
    more.add_argument("--prompt-logprobs", metavar="K", type=int,
                      help="the same for prompt tokens")  # fmt: skip
    add_engine_options(parser)


def run(args: Namespace, terminal: Terminal) -> int:
    """Generate, and return the exit code."""
    arguments, params = engine_arguments(args), sampling_params(args)
    if args.trace is not None:  # report a bad file name before generating
        check_replaceable(Path(args.trace), TRACE_START, "no trace")
    prompt = read_prompt(args, terminal)
    with terminal.progress("Starting"):
        engine = import_engine()
    with engine(**arguments) as llm:
        if isinstance(prompt, str) and llm.tokenizer is None:
            raise InvalidRequestError(
                f"{args.model} has no tokenizer.json, so the prompt must be token ids: "
                "--prompt-ids 1,2,3."
            )
        with saved_trace(llm, args.trace, terminal):
            if args.json or params.n > 1:
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                write = write_json if args.json else write_completions
                write(output, llm, terminal)
            else:
                output = stream(llm, prompt, params, terminal, echo=terminal.interactive)
            terminal.remark(summary(output, params))
    failed = [completion.error for completion in output.outputs if completion.error]
    for message in failed:
        terminal.remark(f"error: {as_options(message)}")
    return 1 if failed else 0


@contextmanager
def saved_trace(llm: "LLM", name: str | None, terminal: Terminal) -> Iterator[None]:
    """Save the trace at the end, also if the run fails or is interrupted."""
    try:
        yield
    finally:
        if name is not None:
            try:
                llm.trace.save(name)
            except OSError as error:
                raise TraceFileError(f"{name!r} cannot be written: {error.strerror}.") from error
            terminal.remark(f"trace of {plural(len(llm.trace), 'step')} in {name}")


def read_prompt(args: Namespace, terminal: Terminal) -> Any:
    """The prompt from the arguments, a file or stdin: a text, or a list of token ids."""
    if args.prompt_ids is not None:
        return parse_ids(args.prompt_ids)
    if args.prompt_file is not None:
        return read_file(args.prompt_file)
    text = args.text if args.prompt is None else args.prompt
    if text == "-":
        return read_stdin()
    if text is None and sys.stdin and not sys.stdin.isatty():
        text = read_stdin() or None
    return default_prompt(args.model, terminal) if text is None else text


def default_prompt(model: str, terminal: Terminal) -> str:
    """The prompt to use if none is given; only embedded models have one."""
    from minillm.models.checkpoint import embedded_models

    if model not in embedded_models():
        raise InvalidRequestError(
            f'There is no prompt; add one: minillm generate --model {model} "Once upon a time".'
        )
    terminal.remark(f"no prompt given; using the default prompt: {DEFAULT_PROMPT}")
    return DEFAULT_PROMPT


def read_stdin() -> str:
    """All of standard input."""
    return decode(sys.stdin.buffer.read(), "stdin")


def parse_ids(text: str) -> list[int]:
    """Parse ``1,2,3`` into token ids."""
    try:
        return [int(item) for item in text.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidRequestError(
            f"--prompt-ids is {text[:80]!r}; it must be whole numbers such as 1,2,3."
        ) from error


def read_file(name: str) -> str:
    """The text of a file."""
    try:
        return decode(Path(name).read_bytes(), name)
    except OSError as error:
        raise InvalidRequestError(
            f"The prompt file {name!r} cannot be read: {error.strerror}."
        ) from error


def decode(data: bytes, origin: str) -> str:
    """Decode UTF-8 text and remove the final newline that editors and `echo` add."""
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{origin} is not UTF-8 text (byte {error.start}); convert it first."
        ) from error


def stream(
    llm: "LLM", prompt: Any, params: SamplingParams, terminal: Terminal, echo: bool
) -> RequestOutput:
    """Show one completion while it is generated; with `echo`, show the prompt before it."""
    shown = 0
    if echo and isinstance(prompt, str) and len(prompt) <= SHOWN_PROMPT:
        terminal.stream_prompt(prompt)
    for output in llm.stream(prompt, params):
        text = shown_text(output.outputs[0], llm)
        terminal.stream(text[shown:])
        shown = len(text)
    terminal.line()
    return output


def shown_text(completion: CompletionOutput, llm: "LLM") -> str:
    """The text of a completion, or its token ids if the model has no tokenizer."""
    if llm.tokenizer is None:
        return " ".join(map(str, completion.token_ids))
    return completion.text


def write_completions(output: RequestOutput, llm: "LLM", terminal: Terminal) -> None:
    """Show several completions, each under a numbered heading."""
    for completion in output.outputs:
        terminal.heading(f"[{completion.index + 1} of {len(output.outputs)}]")
        terminal.stream(shown_text(completion, llm) + "\n")


def write_json(output: RequestOutput, llm: "LLM", terminal: Terminal) -> None:
    """Print the request's output and the model's name and dtype as one JSON object, with null for
    infinities and NaN, which JSON does not have."""
    about = {"model": llm.engine.source.name, "dtype": llm.engine.dtype}
    finite = msgspec.json.decode(msgspec.json.encode(about | asdict(output)))
    terminal.line(json.dumps(finite, ensure_ascii=False))


def summary(output: RequestOutput, params: SamplingParams) -> str:
    """One line: number of tokens, finish reason, TTFT, TPOT, throughput and seed."""
    metrics = output.metrics
    total = sum(len(completion.token_ids) for completion in output.outputs)
    parts = [plural(total, "token")]
    if len(output.outputs) == 1:
        parts[0] += f", {ending(output.outputs[0], params)}"
    if metrics.ttft is not None:
        parts.append(f"TTFT {seconds(metrics.ttft)}")
    if metrics.tpot is not None:
        parts.append(f"TPOT {seconds(metrics.tpot)}")
        # The first token of each completion comes from the prefill, which TTFT covers.
        decoded, took = total - len(output.outputs), metrics.e2e - (metrics.ttft or 0.0)
        if took > 0:
            parts.append(f"{digits(decoded / took)} tokens/s")
    if not params.greedy:
        parts.append(f"seed {params.seed}")
    if metrics.acceptance is not None:
        parts.append(f"{metrics.acceptance} acceptance: not the model's distribution")
    return " | ".join(parts)


def ending(completion: CompletionOutput, params: SamplingParams) -> str:
    """The finish reason in words."""
    if completion.finish_reason == "length":
        full = len(completion.token_ids) != params.max_tokens
        return "the context is full" if full else f"reached max_tokens {params.max_tokens}"
    if completion.finish_reason == "stop":
        reason = completion.stop_reason
        return "end of text" if reason is None else f"stopped at {reason!r}"
    return str(completion.finish_reason)
