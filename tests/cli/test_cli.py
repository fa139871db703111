"""The command line: what it prints, what it refuses, and how it ends.

In-process (`main` with captured streams) wherever the process itself is not the subject.
"""

import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, MinillmError, SamplingParams
from minillm.api.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minillm.cli import generate, main
from minillm.cli.app import COMMANDS
from minillm.cli.options import as_options
from minillm.cli.terminal import Terminal, amount, billions, seconds, size
from minillm.lab.benchmarks.others import Watch
from minillm.lab.ceilings import DISTURBED, MEASURED
from minillm.lab.commands import demo, place, plan
from minillm.lab.commands.bench_options import BENCHMARKS
from minillm.lab.commands.removed import REMOVED
from minillm.lab.hardware import DATASHEET
from minillm.lab.roofline import step_cost
from minillm.models import checkpoint
from minillm.models.decoder import Decoder
from minillm.models.families import parse_config
from minillm.models.presets import PRESETS
from minillm.ops import cpu
from tests.text.build import byte_level, write_folder

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 410,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "dtype": "float32",
    "eos_token_id": None,
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, chat: bool = False, **fields: Any) -> Path:
    """A checkpoint of random weights, large enough that greedy text is not one token repeated."""
    config = CONFIG | fields
    model = Decoder(parse_config(config))
    model.initialize(std=0.4)
    write_folder(folder, byte_level(), **({"chat_template": CHATML} if chat else {}))
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: each.target.clone() for name, each in model.checkpoint_tensors().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("chatty"), chat=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return write_model(tmp_path / "copy")


# ---- help and mistakes -------------------------------------------------------------------


def test_help_fits_a_terminal_and_has_examples_that_parse(cli: Any) -> None:
    pages = {name: cli(*filter(None, [name]), "--help") for name in ("", *COMMANDS)}
    benchmarks = [cli("bench", what, "--help").out for what in BENCHMARKS]
    everything = "".join([*(shown.out for shown in pages.values()), *benchmarks])
    known = set(re.findall(r"^  (--[a-z][\w-]+)", everything, re.MULTILINE))
    for name, shown in pages.items():
        assert shown.code == 0, name
        assert max(map(len, shown.out.splitlines())) <= 80, name
        examples = shown.out.partition("examples:\n")[2].splitlines()
        assert 3 <= len(examples) <= 4, name
        assert all("minillm" in line for line in examples), name
        assert set(re.findall(r"--[a-z][\w-]+", "\n".join(examples))) <= known, name


@pytest.mark.parametrize("name", REMOVED)
def test_what_was_removed_is_refused_with_its_replacement(name: str, cli: Any) -> None:
    *command, last = name.split()[1:]
    argv = [*command, "tiny", last, "x"] if last.startswith("--") else [*command, last]
    assert cli(*argv).err == f"error: {name!r} was removed; {REMOVED[name]}.\n"


def test_help_and_plans_of_presets_do_not_wait_for_torch() -> None:
    code = """
import contextlib, io, sys
from minillm.cli import main
for argv in (["--help"], ["generate", "--help"], ["generate", "--top-p", "0"],
             ["plan", "preset:llama-3.1-70b", "--hardware", "h100"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(argv)
    assert "torch" not in sys.modules, argv
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FULL = "error: The output cannot be written: No space left on device.\n"
MISTAKES = [
    (["genrate"], "Did you mean 'generate'?"),
    (["quantize", "tiny", "--method", "gpt", "--out", "x"], "There is no method 'gpt'"),
    (["generate", "--temprature", "1"], "no option --temprature. Did you mean '--temperature'?"),
    (["generate", "--max-tok", "5"], "no option --max-tok. Did you mean '--max-tokens'?"),
    (["generate", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 is not supported; int8 takes"),
    (["plan", "tiny", "--kv-cache-dtype", "int9"], "--kv-cache-dtype int9 is not supported"),
    (["generate", "two", "words"], "'words' is one argument too many"),
    (["generate", "--max-tokens", "many"], "invalid int value: 'many'"),
    (["generate", "--max-tokens", "0"], "--max-tokens is 0"),
    (["generate", "--top-p", "0"], "--top-p is 0.0"),
    (["generate", "--n", "2"], "greedy completions are identical"),
    (["generate", "--prompt", "a", "b"], "not allowed with argument"),
    (["generate", "--prompt-ids", "1,x"], "it must be whole numbers such as 1,2,3"),
    (["generate", "--prompt-file", "nowhere.txt"], "'nowhere.txt' cannot be read"),
    (["generate", "--model", "nowhere", "x"], "There is no folder 'nowhere'"),
    (["generate", "--model", "{base}"], "There is no prompt"),
    (["generate", "--model", "{base}", "--prompt-ids", "1,9999"], "token id 9999"),
    (["generate", "--model", "{base}", "--max-model-len", "9999", "x"], "--max-model-len is 9999"),
    (["generate", "--model", "{base}", "word " * 200], "maximum context length is 128"),
    (
        ["generate", "--model", "{base}", "--max-model-len", "64", "word " * 200],
        "or raise --max-model-len.",
    ),
    (["generate", "--model", "preset:smollm2-135m", "x"], "add --load-format dummy for"),
    (["chat", "{base}", "--model", "tiny"], "MODEL and --model name two models"),
    (["chat", "--model", "preset:smollm2-135m"], "no chat template"),
    (["plan"], "required: MODEL"),
    (["plan", "preset:qwen3-8b", "--hardware", "h20O"], "Did you mean 'h200'?"),
    (["plan", "preset:qwen3-8b", "--hardware", "apple"], "could be apple-m1 or"),
    (["plan", "preset:qwen3-8b", "--memory", "24 chickens"], "such as 24GiB"),
    (["plan", "preset:qwen3-8b", "--memory", "0.5", "--hardware", "h100"], "such as 24GiB"),
    (["plan", "preset:qwen3-8b", "--memory", "9" * 300 + "GiB"], "such as 24GiB"),
    (["plan", "preset:qwen3-8b", "--memory", "1GB", "--dtype", "bf16"], "dtype is 'bf16'"),
    (
        ["plan", "preset:qwen3-8b", "--memory", "1GB", "--max-model-len", "0"],
        "--max-model-len is 0",
    ),
    (["plan", "preset:qwen3-8b", "--memory", "1GB", "--max-model-len", "99999"], "40960 tokens"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[" ".join(m[0])[:40] for m in MISTAKES])
def test_a_mistake_is_one_sentence_and_exit_code_2(
    argv: list[str], message: str, base: Path, cli: Any
) -> None:
    shown = cli(*(arg.format(base=base) for arg in argv))
    assert shown.refused(message), shown


def test_the_unexpected_is_one_line_too_and_can_be_looked_into(
    cli: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> int:
        raise RuntimeError("the sky\nfell")

    monkeypatch.setattr(plan, "run", fail)
    shown = cli("plan", "preset:qwen3-8b")
    assert shown.code == 1
    assert shown.err.startswith("error: RuntimeError: the sky fell (")
    assert shown.err.count("\n") == 1
    monkeypatch.setenv("MINILLM_DEBUG", "1")
    main(["plan", "preset:qwen3-8b"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("add load_format='dummy' for", "add --load-format dummy for"),
        ("use device='cpu'.", "use --device cpu."),
        ("lower n or max_tokens.", "lower n or --max-tokens."),
        ("max_model_len=4096", "--max-model-len 4096"),
        ("prompt_logprobs=1", "--prompt-logprobs 1"),
        ("set gpu_memory_utilization=0.95.", "set --gpu-memory-utilization 0.95."),
        ("There is no folder 'my_max_tokens/max_tokens.d'", None),
        ("There is no folder 'a/max_tokens and more'", None),
        ("Did you mean 'top_k'?", None),
        ("the model has sampling_params and a stop", None),
    ],
)
def test_advice_is_in_the_words_of_the_command_line(message: str, expected: str | None) -> None:
    assert as_options(message) == (message if expected is None else expected)


def interrupt(*_: Any) -> int:
    raise KeyboardInterrupt


def swallow(_: Any, terminal: Terminal) -> int:
    with suppress(BaseException), terminal.progress("Importing"):
        signal.raise_signal(signal.SIGINT)
    terminal.stream("text")  # it ends here
    raise AssertionError("it went on")


def turn(*_: Any) -> int:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        raise ImportError("half a module") from error
    return 0


@pytest.mark.parametrize("run", [interrupt, swallow, turn])
def test_ctrl_c_is_exit_code_130_whatever_a_library_makes_of_it(
    run: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "run", run)
    assert cli("plan", "preset:qwen3-8b") == (130, "", "\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_the_process_at_once() -> None:
    code = """
import contextlib, signal
from minillm.cli.interrupt import forget, remembered
with remembered():
    for handled in (True, False, False):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        print("swallowed", flush=True)
        if handled:
            forget()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (130, ["swallowed"] * 2), done.stderr


def test_what_libraries_say_becomes_a_note(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def speak(*_: Any) -> int:
        import logging

        logging.getLogger("some.library").warning("first\tthing")
        warnings.warn("second\nthing", stacklevel=1)
        return 0

    monkeypatch.setattr(plan, "run", speak)
    shown = cli("plan", "preset:qwen3-8b")
    assert shown.err.splitlines() == ["note: first\tthing", "note: second thing"]


# ---- generate ----------------------------------------------------------------------------


def greedy(folder: Path, prompt: Any, **params: Any) -> Any:
    """What `LLM` says to the same request."""
    with LLM(folder, dtype="float32") as llm:
        params = {"temperature": 0.0, "max_tokens": 12} | params
        return llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0]


def arguments(folder: Path, *more: Any) -> list[Any]:
    return ["generate", "--model", folder, "--dtype", "float32", "--max-tokens", 12, *more]


def test_generate_streams_the_text_and_reports_beside_it(base: Path, cli: Any) -> None:
    expected = greedy(base, "def fib(n)")
    shown = cli(*arguments(base, "def fib(n)"))
    assert shown.code == 0
    assert shown.out == expected.outputs[0].text + "\n"
    assert re.fullmatch(
        r"12 tokens, reached max_tokens 12 \| TTFT [\d.]+ [mu]?s \| TPOT [\d.]+ [mu]?s \| "
        r"[\d.,]+ tokens/s",
        shown.err.splitlines()[-1],
    )


def test_json_is_one_object_with_everything(base: Path, cli: Any) -> None:
    expected = greedy(base, "def fib(n)", logprobs=1)
    shown = cli(*arguments(base, "def fib(n)", "--json", "--logprobs", 1))
    data = json.loads(shown.out)
    (output,) = data["outputs"]
    assert output["text"] == expected.outputs[0].text
    assert output["token_ids"] == list(expected.outputs[0].token_ids)
    assert output["finish_reason"] == "length"
    assert data["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert data["metrics"]["ttft"] > 0
    for token_id, entries in zip(output["token_ids"], output["logprobs"], strict=True):
        assert entries[str(token_id)]["rank"] == 1


def test_json_has_null_where_it_has_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [{5: Logprob(math.nan, 1)}]
    completion = CompletionOutput(0, "", [5], cumulative_logprob=-math.inf, logprobs=entries)
    engine = SimpleNamespace(source=SimpleNamespace(name="m"), dtype="float32")
    llm: Any = SimpleNamespace(engine=engine)
    generate.write_json(RequestOutput("0", "é", [1], [completion], True), llm, Terminal())
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    (output,) = data["outputs"]
    assert (output["cumulative_logprob"], data["prompt"]) == (None, "é")
    assert output["logprobs"] == [{"5": {"logprob": None, "rank": 1, "decoded_token": None}}]


def test_a_prompt_comes_from_anywhere(base: Path, cli: Any, tmp_path: Path) -> None:
    text = "naïve café\n\tbreak"
    expected = greedy(base, text).outputs[0].text + "\n"
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode() + b"\n")
    ids = ",".join(map(str, greedy(base, text).prompt_token_ids))
    assert cli(*arguments(base, "--prompt", text)).out == expected
    assert cli(*arguments(base), stdin=text + "\n").out == expected
    assert cli(*arguments(base, "-"), stdin=text).out == expected
    assert cli(*arguments(base, "--prompt-file", file)).out == expected
    assert cli(*arguments(base, "--prompt-ids", ids)).out == expected
    file.write_bytes(b"ab\xff")
    assert cli(*arguments(base, "--prompt-file", file)).refused("is not UTF-8 text (byte 2)")


def test_several_completions_are_shown_under_numbers(base: Path, cli: Any) -> None:
    """That every sampling option arrives is in tests/api/test_sampling_params.py."""
    expected = greedy(base, "def", n=2, temperature=0.9, seed=7)
    first, second = (output.text for output in expected.outputs)
    assert first != second
    shown = cli(*arguments(base, "def", "--n", 2, "--temperature", 0.9, "--seed", 7)).out
    assert shown == f"[1 of 2]\n{first}\n[2 of 2]\n{second}\n"


def test_tokens_per_second_are_those_after_the_first_pass() -> None:
    outputs = [CompletionOutput(index=i, text="", token_ids=[5] * 9) for i in range(3)]
    metrics = RequestMetrics(ttft=0.5, tpot=0.125, e2e=2.5)
    output = RequestOutput("0", "x", [1], outputs, finished=True, metrics=metrics)
    assert "| 12 tokens/s" in generate.summary(output, SamplingParams(temperature=1.0, n=3))


def test_stop_strings_may_be_several(base: Path, cli: Any) -> None:
    text = greedy(base, "def").outputs[0].text
    cut = text[3:5]
    shown = cli(*arguments(base, "def", "--stop", "never in there", "--stop", cut))
    assert shown.out == text[: text.index(cut)] + "\n"
    assert f"stopped at {cut!r}" in shown.err


def test_without_a_seed_each_run_draws_anew_and_says_how_to_repeat_it(base: Path, cli: Any) -> None:
    first, second = (cli(*arguments(base, "def", "--temperature", 2)) for _ in range(2))
    assert first.out != second.out
    seed = re.search(r"seed (\d+)", first.err)
    assert seed
    again = cli(*arguments(base, "def", "--temperature", 2, "--seed", seed[1]))
    assert again.out == first.out


def test_a_model_without_tokenizer_speaks_in_token_ids(copy: Path, cli: Any) -> None:
    (copy / "tokenizer.json").unlink()
    shown = cli(*arguments(copy, "--prompt-ids", "1, 2"))
    expected = greedy(copy, [1, 2]).outputs[0].token_ids
    assert [int(word) for word in shown.out.split()] == list(expected)
    refused = cli(*arguments(copy, "text"))
    assert refused.code == 2
    assert "--prompt-ids 1,2,3" in refused.err


def test_without_a_prompt_the_embedded_model_gets_one(
    base: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "ASSETS", base.parent)
    shown = cli(*arguments(Path(base.name)))
    assert shown.code == 0
    assert "no prompt given; using the default prompt: def fib(n):" in shown.err
    assert shown.out == greedy(base, "def fib(n):").outputs[0].text + "\n"


# ---- chat --------------------------------------------------------------------------------


def chat(folder: Path, *more: Any) -> list[Any]:
    options = ["--dtype", "float32", "--temperature", 0, "--max-tokens", 8]
    return ["chat", "--model", folder, *options, *more]


def answers(folder: Path, *messages: str, system: str | None = None) -> list[str]:
    """The answers to `messages`, each with all before it, as `LLM.chat` gives them."""
    turns = [] if system is None else [{"role": "system", "content": system}]
    texts = []
    with LLM(folder, dtype="float32") as llm:
        for message in messages:
            turns.append({"role": "user", "content": message})
            output = llm.chat(turns, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
            texts.append(output[0].outputs[0].text)
            turns.append({"role": "assistant", "content": texts[-1]})
    return texts


def test_chat_remembers_until_reset(chatty: Path, cli: Any) -> None:
    shown = cli(*chat(chatty), stdin="hello\nand then?\n\n/reset\nhello\n/exit\nnever read\n")
    first, second = answers(chatty, "hello", "and then?")
    assert first != second
    assert shown.code == 0
    assert shown.out == f"{first}\n{second}\n{first}\n"
    assert "The conversation was reset." in shown.err
    assert "context " in shown.err


def test_chat_puts_the_system_message_first(chatty: Path, cli: Any) -> None:
    (expected,) = answers(chatty, "hello", system="Be brief")
    assert [expected] != answers(chatty, "hello")
    shown = cli(*chat(chatty, "--system", "Be brief"), stdin="/reset\nhello")
    assert shown.out == f"{expected}\n"


def test_chat_samples_as_the_authors_recommend_unless_told_otherwise(
    tmp_path: Path, cli: Any
) -> None:
    folder = write_model(tmp_path / "own", chat=True)
    (folder / "generation_config.json").write_text('{"temperature": 1e-6}')
    shown = cli("chat", "--model", folder, "--dtype", "float32", "--max-tokens", 8, stdin="hello")
    assert shown.out == f"{answers(folder, 'hello')[0]}\n"  # so cold is greedy
    options = ["--temperature", 5, "--top-k", 0, "--top-p", 1]
    shown = cli(*chat(folder), *options, "--seed", 5, stdin="hello")
    assert shown.out != f"{answers(folder, 'hello')[0]}\n"


def test_chat_explains_its_words(chatty: Path, cli: Any) -> None:
    shown = cli(*chat(chatty), stdin="/rest\n/help\n")
    assert "Did you mean '/reset'?" in shown.err
    assert "/exit" in shown.out


def test_a_full_context_says_what_to_do_and_forgets_what_did_not_fit(
    chatty: Path, cli: Any
) -> None:
    shown = cli(*chat(chatty), stdin="word " * 100 + "\nhello\n")
    assert "the model's context is 128; type /reset" in shown.err
    assert shown.out == f"{answers(chatty, 'hello')[0]}\n"


def test_ctrl_c_stops_an_answer_and_not_the_session(
    chatty: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LLM.stream

    def interrupted(self: LLM, prompt: Any, params: SamplingParams) -> Iterator[Any]:
        monkeypatch.setattr(LLM, "stream", whole)
        for count, output in enumerate(whole(self, prompt, params)):
            if count == 4:
                signal.raise_signal(signal.SIGINT)
            yield output

    monkeypatch.setattr(LLM, "stream", interrupted)
    shown = cli(*chat(chatty), stdin="hello\n/reset\nhello\n")
    (expected,) = answers(chatty, "hello")
    stopped, second = shown.out.removesuffix("\n").split(f"\n{expected}")
    assert second == ""
    assert expected.startswith(stopped)
    assert 0 < len(stopped) < len(expected)
    assert "Stopped." in shown.err
    assert shown.code == 0


def test_ctrl_c_at_the_prompt_ends_the_chat(
    chatty: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", interrupt)
    assert cli(*chat(chatty)).code == 130


def test_a_model_that_cannot_chat_is_refused_before_its_weights_are_read(
    copy: Path, cli: Any
) -> None:
    (copy / "model.safetensors").unlink()
    assert cli(*chat(copy)).refused("has no chat template")


# ---- info --------------------------------------------------------------------------------


def row(text: str, label: str) -> str:
    """The value beside a label, its continuation lines joined."""
    found = re.search(rf"^  {re.escape(label)}  +(.*(?:\n {{8,}}.*)*)", text, re.MULTILINE)
    assert found, text
    return " ".join(found[1].split())


def test_info_counts_what_the_file_holds(base: Path, cli: Any) -> None:
    shown = cli("info", base)
    tensors = load_file(base / "model.safetensors")
    assert f"({sum(t.numel() for t in tensors.values()):,})" in row(shown.out, "parameters")
    stored = sum(t.nbytes for t in tensors.values())
    assert row(shown.out, "files") == f"1 safetensors file: {size(stored)} in float32"
    assert row(shown.out, "attention") == "grouped (GQA), 4 heads of 8 share 2 KV heads"
    assert row(shown.out, "tokenizer").startswith("402 tokens (the model has 410 logits)")
    # keys and values of 2 heads of 8 in 2 layers, 2 bytes each
    assert row(shown.out, "KV cache").startswith(f"{2 * 2 * 8 * 2 * 2} B per token in bfloat16")
    assert max(map(len, shown.out.splitlines()[:-1])) <= 80  # the last is the folder's path


def norm(made: Any) -> Any:
    """Put `made` of the last norm in its place; None: leave it out."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] = made(tensors["model.norm.weight"])
        kept = {name: each for name, each in tensors.items() if each is not None}
        save_file(kept, folder / "model.safetensors")

    return damage


@pytest.mark.parametrize(
    "damage",
    [lambda folder: (folder / "config.json").write_text(
        json.dumps(CONFIG | {"model_type": "gpt9"})),
     norm(lambda old: torch.ones(7)), norm(lambda old: old.to(torch.int8)), norm(lambda old: None),
     lambda folder: os.truncate(file := folder / "model.safetensors", file.stat().st_size - 100),
     lambda folder: (folder / "model.safetensors").unlink()],
    ids=["family", "shape", "dtype", "missing", "cut", "no file"],
)  # fmt: skip
def test_info_refuses_what_loading_refuses_in_the_same_words(
    damage: Any, copy: Path, cli: Any
) -> None:
    damage(copy)
    with pytest.raises(MinillmError) as refused:
        LLM(copy)
    shown = cli("info", copy)
    assert (shown.code, shown.err) == (2, f"error: {refused.value}\n")


def test_info_of_everything(
    base: Path, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minillm.lab.commands import info

    (tmp_path / base.name).symlink_to(base)  # alone: its parent has other tests' folders
    monkeypatch.setattr(info, "measure", lambda device: DATASHEET["laptop-ddr5"])
    monkeypatch.setattr(checkpoint, "ASSETS", tmp_path)
    shown = cli("info")
    assert {base.name, *(f"preset:{name}" for name in PRESETS)} <= set(shown.out.split())
    assert row(shown.out, "bandwidth").startswith("89.6 GB/s")


# ---- plan --------------------------------------------------------------------------------


def test_a_plan_adds_up(cli: Any) -> None:
    shown = cli("plan", "preset:llama-3.1-70b", "--hardware", "h200", "--json")
    data = json.loads(shown.out)
    weights = 70_553_706_496 * 2  # parameters as published, bf16
    assert data["plan"]["weight_bytes"] == weights
    assert data["plan"]["kv_bytes_per_token"] == 80 * 2 * 8 * 128 * 2
    parts = ("reserve_bytes", "weight_bytes", "activation_bytes", "kv_cache_bytes")
    assert sum(data["plan"][part] for part in parts) == 141e9
    assert not data["fits"]  # 141 GB less a tenth
    decode = data["predictions"]["decode"]
    assert decode["bound"] == "memory"
    # all weights but the input embedding, whose rows are gathered, and 1,024 tokens of cache
    read = weights - 2 * 128256 * 8192 + 1024 * data["plan"]["kv_bytes_per_token"]
    assert decode["memory_seconds"] == pytest.approx(read / 4.8e12, rel=1e-4)
    assert data["predictions"]["prefill"]["bound"] == "compute"


def test_each_hint_of_a_plan_that_does_not_fit_makes_it_fit(cli: Any) -> None:
    argv = ["plan", "preset:qwen3-8b", "--memory", "24GB", "--dtype", "float32"]
    for length in ([], ["--max-model-len", "8192"]):
        shown = cli(*argv, *length)
        hints = shown.out.partition("any one of:\n")[2].splitlines()
        assert hints
        for hint in hints:
            again = json.loads(cli(*argv, *length, *hint.split(), "--json").out)
            assert again["fits"], hint


def test_a_plan_that_fits_shows_what_fits(cli: Any) -> None:
    shown = cli("plan", "preset:llama-3.1-8b", "--hardware", "H100", "--max-num-seqs", "32")
    data = json.loads(cli("plan", "preset:llama-3.1-8b", "--hardware", "h100", "--json").out)
    for fit in data["plan"]["combinations"]:
        assert re.search(rf"^  {fit['context']:,} +{fit['batch']:,}$", shown.out, re.MULTILINE)
    assert "At most 32 of them run at once" in shown.out
    assert "bound by memory: it reads 15.1 GB" in " ".join(shown.out.split())
    assert row(shown.out, "memory") == "74.5 GiB = 80 GB"
    assert max(map(len, shown.out.splitlines())) <= 80


def test_a_plan_counts_a_draft_model_in(cli: Any) -> None:
    argv = ["plan", "preset:qwen3-0.6b", "--memory", "24GiB", "--max-model-len", "4096"]
    given = {"model": "preset:smollm2-135m", "num_speculative_tokens": 4}
    refused = cli(*argv, "--speculative-config", json.dumps(given))
    assert "choose a draft model with the same vocabulary" in " ".join(refused.err.split())
    given["model"] = "preset:qwen3-0.6b"
    option = ("--speculative-config", json.dumps(given))
    alone, both = (json.loads(cli(*argv, *more, "--json").out)["plan"] for more in ((), option))
    for part in ("weight_bytes", "block_bytes", "kv_bytes_per_token"):
        assert both[part] == 2 * alone[part]
    assert both["draft_weight_bytes"] == alone["weight_bytes"]
    shown = cli(*argv, *option).out
    assert row(shown, "draft model") == "1.11 GiB of weights, and 112 KiB of each cached token"
    assert row(shown, "weights") == row(cli(*argv).out, "weights") == "1.11 GiB in bfloat16"
    assert max(map(len, shown.splitlines())) <= 80


def test_a_plan_counts_draft_heads_in(cli: Any) -> None:
    given = {"method": "medusa", "model": "tiny-medusa", "num_speculative_tokens": 4}
    option = ("--memory", "1GiB", "--dtype", "bfloat16", "--speculative-config", json.dumps(given))
    shown = cli("plan", "tiny", *option)
    assert row(shown.out, "draft heads") == "1.5 MiB of weights, and 512 B of each cached token"
    assert cli("plan", "preset:qwen3-0.6b", *option).refused("for the weights of 'tiny' with hash")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GiB", 24 * 2**30), ("24GB", 24_000_000_000), ("24g", 24_000_000_000),
     ("1.5 TiB", 1.5 * 2**40), ("512MiB", 2**29), ("64KiB", 2**16), ("1000", 1000)],
)  # fmt: skip
def test_sizes_are_read_in_both_kinds_of_units(text: str, expected: int) -> None:
    assert place.parse_size(text) == expected


# ---- the demonstration -------------------------------------------------------------------


@pytest.fixture
def small_demo(base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demonstration with a model of a millisecond and a machine of round numbers."""
    (tmp_path / "tiny").symlink_to(base)
    monkeypatch.setattr(checkpoint, "ASSETS", tmp_path)
    config = replace(parse_config(CONFIG), max_position_embeddings=demo.CONTEXT)
    monkeypatch.setattr(checkpoint, "PRESETS", {demo.BIG: config})
    monkeypatch.setattr(checkpoint, "preset", lambda name: config)
    machine = replace(DATASHEET["laptop-ddr5"], bandwidth=1e9, name="Round CPU")
    monkeypatch.setattr(demo, "measure", lambda refresh, device: machine)

    @contextmanager
    def watching(groups: object) -> Iterator[Watch]:
        yield Watch(0.31)

    monkeypatch.setattr(demo, "watching", watching)
    clock = SimpleNamespace(perf_counter=itertools.count(0, 0.001).__next__)
    monkeypatch.setattr(demo, "time", clock)
    monkeypatch.setattr(demo, "BUDGET", 0.0505)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5), raising=False)


@pytest.mark.usefixtures("small_demo")
def test_the_demonstration_writes_and_says_how_fast(base: Path, cli: Any) -> None:
    shown = cli()
    assert shown.code == 0
    with LLM(base) as llm:
        output = llm.generate([demo.PROMPT], demo.WRITING)[0]
    assert f"{demo.PROMPT}{output.outputs[0].text}\n" in shown.out
    assert re.search(r"TTFT .* TPOT .* tokens/s", shown.out)
    assert "1 GB/s, measured just now (Round CPU" in row(shown.out, "memory bandwidth")
    share = re.search(r"([█░]{40}|[#-]{40}) (\d+)% of the bound", shown.out)
    assert share
    bound, ran = (float(row(shown.out, label).split()[0].replace(",", ""))
                  for label in ("upper bound", "measured"))  # fmt: skip
    assert int(share[2]) == pytest.approx(100 * ran / bound, abs=1.5)
    assert row(shown.out, "batch 16").endswith("16 times batch 1")  # by that clock
    with LLM(f"preset:{demo.BIG}", load_format="dummy") as llm:
        assert row(shown.out, "operations") == cpu.describe(getattr(torch, llm.engine.dtype))
    assert "Other programs used up to 31% of the processors meanwhile" in shown.out
    named = re.findall(r"\n  \S*minillm (\w+) ", shown.out)
    assert named == ["generate", "serve", "info", "plan", "trace", "bench"]
    assert "make lab" in shown.out
    assert max(map(len, shown.out.partition("How fast")[2].splitlines())) <= 80


@pytest.mark.usefixtures("small_demo")
@pytest.mark.parametrize("batch", [16, 1])
def test_the_demonstration_is_never_faster_than_its_bound(
    batch: int, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bandwidth measurement of a busy machine is below what decoding then reaches."""
    busy = replace(DATASHEET["laptop-ddr5"], bandwidth=1e3)
    monkeypatch.setattr(demo, "measure", lambda refresh, device: busy)
    if batch == 1:  # slow steps of 16 sequences
        whole, slow = demo.decode, demo.DecodeRun(16, 1.0, 1, 1.0)
        monkeypatch.setattr(
            demo, "decode", lambda llm, n, budget: whole(llm, n, budget) if n == 1 else slow
        )
    shown = cli().out
    said = row(shown, "memory bandwidth")
    assert f"reached at batch {batch}; 1 kB/s measured" in said
    (percent,) = re.findall(r"(\d+)% of the bound", shown)
    assert int(percent) == 100 if batch == 1 else 0 < int(percent) < 100
    assert said.startswith(row(shown, "measured").split(" = ")[1]) == (batch == 1)


@pytest.mark.parametrize("installed", [True, False])
def test_the_demonstration_says_if_serving_needs_packages(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: name if installed else None)
    assert demo.serving_needs() == ("" if installed else "; it says what to install first")


@pytest.mark.usefixtures("small_demo")
def test_the_demonstration_is_timed_after_a_warm_up(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    monkeypatch.setattr(demo, "write_text", lambda llm, terminal: steps.append(len(llm.trace)))
    assert cli().code == 0
    assert steps == [demo.WARM_UP]


@pytest.mark.parametrize(
    ("source", "others", "reported", "start"),
    [
        (MEASURED, 0.05, True, ""),  # the load is an average, which may be of before
        (MEASURED, 0.48, True, "Other programs used up to 48% of the processors meanwhile, so the"),
        (DISTURBED, 0.0, True, "Other programs ran during the bandwidth measurement, so the"),
        (MEASURED, 0.0, False, "Other programs are running (load 99 on "),
    ],
)
def test_a_disturbed_demonstration_says_so_first_and_blames_nobody_else(
    source: str, others: float, reported: bool, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0), raising=False)
    monkeypatch.setattr(demo, "reported", lambda: reported)
    machine = replace(DATASHEET["laptop-ddr5"], source=source)
    cost = step_cost(PRESETS[demo.BIG], [1], [512], dtype="float32")
    text = demo.explanation(cost, machine, 0.003, others)
    disturbed = bool(start)
    assert text.startswith(start or "Each token needs")
    assert ("so the bound and these figures are too low" in text) == disturbed
    assert ("read more slowly than the memory" in text) != disturbed
    assert "memory-bound; in a batch" in text
    assert demo.share(0.003) == "0.3%"


# ---- the terminal ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(1023), "0.999 KiB"), (size(512), "512 B"), (size(1536), "1.5 KiB"),
        (size(24 * 2**30), "24 GiB"), (size(2**30 * 1.2345), "1.23 GiB"),
        (amount(269e6, "B"), "269 MB"), (amount(999.9e9, "B/s"), "1 TB/s"),
        (amount(0, "B"), "0 B"), (billions(70_553_706_496), "70.6 B"), (billions(999), "999"),
        (seconds(0.00085), "850 us"), (seconds(0.00813), "8.13 ms"), (seconds(2.44), "2.44 s"),
        (seconds(0.9996), "1 s"), (seconds(135.0), "135 s"),
    ],
)  # fmt: skip
def test_quantities_have_three_digits_and_a_unit(shown: str, expected: str) -> None:
    assert shown == expected


class Screen(io.TextIOWrapper):
    """A stream that claims to be a terminal."""

    def __init__(self, encoding: str):
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
def test_a_terminal_gets_what_it_can_show(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Screen(encoding))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    terminal.line(terminal.bar(0.5, width=4))
    terminal.stream("é漢\x1b[2J\n")
    terminal.heading("bold")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal.heading("plain")
    sys.stdout.flush()
    shown = sys.stdout.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert ("██░░\n" if encoding == "utf-8" else "##--\n") in shown
    assert "\\x1b[2J" in shown
    assert "\x1b[1mbold\x1b[0m\nplain\n" in shown


# ---- the process -------------------------------------------------------------------------


def start(*command: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C to a whole console")
def test_ctrl_c_ends_a_running_process_cleanly(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "endless", max_position_embeddings=100_000)
    length = ("--max-tokens", 99_000, "--max-model-len", 99_999)  # much longer than any test
    process = start("-m", "minillm", "generate", "--model", folder, *length, "x")
    assert process.stdout
    process.stdout.read(1)  # it writes
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode in (130, -signal.SIGINT)  # a shell shows both as 130
    assert b"Traceback" not in error
    assert error.endswith(b"\n")


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
@pytest.mark.parametrize(
    ("command", "code", "out", "error"),
    [
        ("info preset:qwen3-8b >&-", 0, "", ""),
        ("generate --top-p 0 >&- 2>&-", 2, "", ""),
        ("info preset:qwen3-8b 2>&- | tail -n 1 | wc -l", 0, "1", ""),
        ("chat a --model b <&-", 2, "", "error: MODEL and --model name two models"),
        ("generate --top-p 0 2>/dev/full", 2, "", ""),
        ("info preset:qwen3-8b >/dev/full", 1, "", FULL),
        ("--help >/dev/full", 1, "", FULL),
    ],
)
def test_closed_and_full_streams_are_no_surprise(
    command: str, code: int, out: str, error: str
) -> None:
    if "/dev/full" in command and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        f'"{sys.executable}" -m minillm {command}',
        shell=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (code, out)
    lines = done.stderr.splitlines(keepends=True)
    said = "".join(line for line in lines if not line.startswith("Starting took"))  # a busy machine
    assert said.startswith(error)
    assert said.count("\n") == bool(error)


ENDLESS = """
import sys
from minillm.cli import main
from minillm.lab.commands import plan

def run(args, terminal):
    while True:
        terminal.stream("text")

plan.run = run
sys.exit(main(["plan", "preset:qwen3-8b"]))
"""


def test_a_reader_that_leaves_ends_it_silently() -> None:
    process = start("-c", ENDLESS)
    assert process.stdout
    assert process.stderr
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read()
    process.wait(timeout=300)
    process.stderr.close()
    assert (process.returncode, error) == (141, b"")


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given, expected, cli, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    cli("--version")
    assert os.environ.get("GOMP_SPINCOUNT") == expected
