"""Chat with a model in its own chat format. Ctrl-C stops an answer, /exit quits."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from minillm.api.outputs import RequestOutput
from minillm.api.sampling_params import SamplingParams
from minillm.cli.engine_import import import_engine
from minillm.cli.generate import summary
from minillm.cli.interrupt import forget
from minillm.cli.options import (
    add_engine_options,
    add_model_options,
    add_sampling_options,
    as_options,
    chosen_model,
    engine_arguments,
    sampling_params,
)
from minillm.cli.terminal import Terminal
from minillm.errors import InvalidRequestError, did_you_mean

if TYPE_CHECKING:
    from minillm.llm import LLM
    from minillm.models.checkpoint import ModelSource

USAGE = "[MODEL] [options]"
MODEL = "smollm2"
EXAMPLES = """\
examples:
  minillm chat                          SmolLM2-135M-Instruct, downloaded once
  minillm chat PATH_TO_A_HF_FOLDER -tp 2
  minillm chat ORG/NAME --system "Be brief." --temperature 0
  printf 'What is 2+2?\\n' | minillm chat smollm2
"""
WORDS: Mapping[str, str] = {
    "/reset": "start a new conversation",
    "/exit": "quit (also Ctrl-D)",
    "/help": "show this list",
}


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add_model_options(parser, "model with a chat template: name, folder or hub id (smollm2)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_sampling_options(parser, temperature=0.7, top_p=0.95, max_tokens=1024)
    add_engine_options(parser)


def run(args: Namespace, terminal: Terminal) -> int:
    """Chat until the end of the input, and return the exit code."""
    args.model = chosen_model(args) or MODEL
    arguments, _ = engine_arguments(args), sampling_params(args)
    with terminal.progress("Starting"):
        engine = import_engine()
    params = sampling_params(args, require_template(args).sampling_defaults)
    with suppress(ImportError):  # not on Windows
        import readline  # noqa: F401  (gives input() a history and arrow keys)
    with engine(**arguments) as llm:
        if sys.stdin.isatty():
            terminal.remark(f"{args.model}, {llm.engine.max_model_len:,} tokens of context. "
                            "/help lists the commands.")  # fmt: skip
        Conversation(llm, params, terminal, args.system).run()
    return 0


def require_template(args: Namespace) -> "ModelSource":
    """Open the model's description; reject a model without a chat template before loading it."""
    from minillm.models.checkpoint import open_model
    from minillm.text.tokenizer import Tokenizer

    source = open_model(args.model)
    folder = args.tokenizer or source.folder
    if folder is None:
        raise InvalidRequestError(
            f"{args.model} has no tokenizer and so no chat template; give a model's folder."
        )
    tokenizer = Tokenizer.from_folder(folder)
    if not tokenizer.has_chat_template:
        tokenizer.render_chat([{"role": "user", "content": ""}])  # raises the error to show
    return source


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(
        self, llm: "LLM", params: SamplingParams, terminal: Terminal, system: str | None
    ) -> None:
        self.llm, self.params, self.terminal = llm, params, terminal
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)

    def run(self) -> None:
        """Read and answer until /exit or the end of the input. Ctrl-C at the prompt propagates."""
        while (text := self.read()) is not None:
            word = text.strip()
            if word in ("/exit", "/quit"):
                return
            if word.startswith("/"):
                self.command(word)
            elif word:
                self.turn(text)

    def read(self) -> str | None:
        """One line of input, or None at the end of the input."""
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                self.terminal.line()
            return None
        except UnicodeDecodeError as error:
            raise InvalidRequestError("The input is not UTF-8 text; convert it first.") from error

    def command(self, word: str) -> None:
        """Run a slash command; an unknown one is answered with the nearest."""
        if word == "/reset":
            self.messages = list(self.opening)
            self.terminal.remark("The conversation was reset.")
        elif word == "/help":
            self.terminal.rows(list(WORDS.items()))
        else:
            self.terminal.remark(f"There is no command {word}.{did_you_mean(word, WORDS)}")

    def turn(self, text: str) -> None:
        """Answer one message. A message without an answer is removed from the conversation."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            answer = self.answer()
        except InvalidRequestError as error:
            self.terminal.remark(f"error: {as_options(str(error))}")
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()

    def answer(self) -> str:
        """Stream the model's answer and return its text; Ctrl-C ends it early."""
        prompt = self.llm.chat_prompt(self.messages)
        used, most = len(prompt["prompt_token_ids"]), self.llm.engine.max_model_len
        if used >= most:
            raise InvalidRequestError(
                f"The conversation has {used:,} tokens and the model's context is {most:,}; "
                "type /reset to start a new one."
            )
        text, output = "", None
        try:
            for output in self.llm.stream(prompt, self.params):
                new = output.outputs[0].text
                self.terminal.stream(new[len(text) :])
                text = new
        except KeyboardInterrupt:
            forget()
            self.terminal.line()
            self.terminal.remark("Stopped.")
            return text
        self.terminal.line()
        if output is not None:
            self.remark(output, used, most)
        return text

    def remark(self, output: RequestOutput, used: int, most: int) -> None:
        """Show the speed of the answer and how much of the context is used."""
        completion = output.outputs[0]
        used += len(completion.token_ids)
        room = "" if used < most else "; /reset starts a new conversation"
        if completion.error:
            self.terminal.remark(f"error: {as_options(completion.error)}")
        self.terminal.remark(f"{summary(output, self.params)} | context {used:,} of {most:,}{room}")
