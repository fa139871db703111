"""A tokenizer library that panics: one error for its own request, whoever called it.

`Panic` is no Exception, as PyO3's PanicException. A planted library raises it at a chosen call of
encode, decode or load, below minillm's wrapper.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from minillm import LLM, InvalidRequestError, MinillmError, SamplingParams
from minillm.errors import CheckpointError, ForeignCode
from minillm.text import chat_prompt, tokenizer
from minillm.text.tokenizer import Tokenizer
from tests.engine.small import make, tokens
from tests.pairs import some
from tests.serving.http_small import Reply, Served, frames_of, served, write_chat_model

DEADLINE = 10  # seconds; a panic is answered in milliseconds
CALLS = {
    "encode": ("encode", "encode_batch_fast"),
    "decode": ("decode",),
    "load": ("from_file", "add_tokens"),
}
MESSAGES = [{"role": "user", "content": "what is x"}]
SHORT, LONG = "def f", "x" * 2_100  # a long text is tokenised in another thread
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Panic(BaseException):
    """As PyO3's PanicException."""


@dataclass
class Plan:
    """Which call raises: call `left` of those in `names`, counted from now."""

    names: tuple[str, ...] = ()
    left: int = -1
    fired: int = 0

    def arm(self, kind: str, call: int = 0) -> None:
        self.names, self.left, self.fired = CALLS[kind], call, 0

    def run(self, name: str, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if name in self.names:
            self.left -= 1
            if self.left == -1:
                self.fired += 1
                raise Panic("planted")
        return function(*args, **more)


@dataclass
class Planted:
    """An object, class or module of the library."""

    inner: Any
    plan: Plan
    watched: frozenset[str] = field(default=frozenset(sum(CALLS.values(), ())))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name == "Tokenizer":
            return Planted(found, self.plan)
        if name not in self.watched:
            return found

        def call(*args: Any, **more: Any) -> Any:
            made = self.plan.run(name, found, *args, **more)
            return Planted(made, self.plan) if isinstance(made, tokenizers.Tokenizer) else made

        return call


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    made = Plan()
    for module in (tokenizer, chat_prompt):
        monkeypatch.setattr(module, "tokenizers", Planted(tokenizers, made))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text is decoded by the library: its decoder is not ByteLevel."""
    path = write_chat_model(tmp_path_factory.mktemp("foreign"))
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_tokens(["z" * 40])  # so that a long text is not refused before it is tokenised
    backend.decoder = decoders.Sequence([decoders.Replace("Ġ", " "), decoders.Fuse()])
    backend.save(str(path / "tokenizer.json"))
    return path


def quickly(function: Callable[[], Any]) -> Any:
    """The result of a function, or its error, which must come before the deadline."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function).result(DEADLINE)
    except MinillmError as error:
        return error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# ---- LLM: alone, with drafts, with ranks -------------------------------------------------------

USES: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate([SHORT, "a b"], PARAMS, use_tqdm=False),
    "stream": lambda llm: list(llm.stream(SHORT, PARAMS))[-1:],
    "chat": lambda llm: llm.chat(MESSAGES, PARAMS, use_tqdm=False),
    "bad words": lambda llm: llm.generate(
        SHORT, SamplingParams(bad_words=["x"], temperature=0, max_tokens=2), use_tqdm=False
    ),
}


def ended(outputs: Any) -> list[tuple[Any, str]]:
    return [(tokens(each), each.outputs[0].text) for each in outputs]


@pytest.mark.parametrize(
    "way", some(("alone", "ngram", "draft"), [*["alone", "ngram", "draft", "ranks"]])
)
def test_llm(plan: Plan, folder: Path, way: str) -> None:
    more: dict[str, Any] = {
        "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "draft": {"speculative_config": {"model": str(folder), "num_speculative_tokens": 2}},
        "ranks": {"tensor_parallel_size": 2},
    }.get(way, {})
    for call in range(2 if way == "draft" else 1):
        plan.arm("load", call)
        got = quickly(lambda: make(folder, **more))
        assert (type(got), plan.fired) == (CheckpointError, 1), got
        assert str(got).endswith(" cannot be read as a tokenizer: planted.")
    with closing(make(folder, **more)) as llm:
        right = {name: ended(use(llm)) for name, use in USES.items()}
        for name, use in USES.items():
            plan.arm("encode")
            got = quickly(lambda use=use: use(llm))
            assert (type(got), plan.fired) == (InvalidRequestError, 1), (name, got)
            assert str(got).endswith("The text cannot be tokenized: planted.")
            plan.arm("decode")
            failed = quickly(lambda use=use: use(llm))
            assert [each.outputs[0].error_owner for each in failed][:1] == ["model"], (name, failed)
            assert ended(failed)[1:] == right[name][1:], "another request fails, too"
            assert ended(use(llm)) == right[name]
        plan.arm("encode")
        assert isinstance(quickly(lambda: llm.score("some text")), InvalidRequestError)


def test_each_decode_ends_one_request(plan: Plan, folder: Path) -> None:
    """With log-probabilities and stop strings: wherever it panics, the other two go on."""
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1, stop="ZZ"
    )
    prompts, fired = ["a", "b c", "d"], 0
    with closing(make(folder)) as llm:
        right = ended(llm.generate(prompts, params, use_tqdm=False))
        for call in range(0, 200, 3):
            plan.arm("decode", call)
            outputs = quickly(lambda: llm.generate(prompts, params, use_tqdm=False))
            failed = [each.outputs[0].finish_reason == "error" for each in outputs]
            assert sum(failed) == plan.fired, call
            fired += plan.fired
            assert all(bad or mine == its for bad, mine, its in
                       zip(failed, ended(outputs), right, strict=True))  # fmt: skip
            if not plan.fired:
                break
    assert fired > 10


# ---- the server --------------------------------------------------------------------------------

LIMITS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
ENCODES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": SHORT, **LIMITS}),
    "a long prompt": ("/v1/completions", {"prompt": LONG, **LIMITS}),
    "several prompts": ("/v1/completions", {"prompt": [SHORT, LONG], **LIMITS}),
    "a stream": ("/v1/completions", {"prompt": SHORT, "stream": True, **LIMITS}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, **LIMITS}),
    "a chat stream": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, **LIMITS}),
    "tokenize": ("/tokenize", {"prompt": SHORT}),
    "tokenize messages": ("/tokenize", {"messages": MESSAGES}),
}
DECODES = {name: ENCODES[name] for name in ("completions", "a stream", "chat", "a chat stream")}


def timed(server: Served, path: str, body: dict[str, Any]) -> Reply:
    begin = time.monotonic()
    reply = server.send(path, body)
    assert time.monotonic() - begin < DEADLINE
    assert server.send("/health").status == 200
    return reply


def test_server(plan: Plan, folder: Path) -> None:
    with served(folder, max_model_len=128) as server:
        server.complete("x")
        right = server.complete(SHORT, **LIMITS)["choices"]
        for name, (path, body) in ENCODES.items():
            plan.arm("encode")
            reply = timed(server, path, body)
            assert (reply.status, plan.fired) == (400, 1), (name, reply.body)
            assert reply.message == "The text cannot be tokenized: planted.", name
            assert server.complete(SHORT, **LIMITS)["choices"] == right
        for name, (path, body) in DECODES.items():
            for call in (0, 3):
                plan.arm("decode", call)
                reply = timed(server, path, body)
                assert plan.fired == 1
                error = reply.data if reply.status != 200 else frames_of(reply.body)[-1]
                assert error["error"]["code"] == 500, (name, reply.body)
                assert "The text of this completion failed: " in error["error"]["message"]
                assert b'"finish_reason":"error"' not in reply.body
                assert server.complete(SHORT, **LIMITS)["choices"] == right
        plan.arm("decode")
        reply = timed(server, "/detokenize", {"tokens": [5]})
        assert (reply.status, reply.message) == (400, "The tokens cannot be decoded: planted.")


# ---- real panics -------------------------------------------------------------------------------


def backend(**parts: Any) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE({"x": 0, "y": 1, " ": 2}, []))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


STRIP = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)])
PANICS: dict[str, Callable[[], Any]] = {
    "a regex that gives up": lambda: Tokenizer(backend(
        pre_tokenizer=pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated"))).encode("x" * 40),
    "a decoder that strips twice": lambda: Tokenizer(backend(decoder=STRIP)).decode([2]),
    "pieces of length 0": lambda: Tokenizer(backend(
        pre_tokenizer=pre_tokenizers.FixedLength(0))).encode("xy"),
}  # fmt: skip


@pytest.mark.parametrize("name", PANICS)
def test_real_panics(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r" cannot be (tokenized|decoded): .+\.$") as got:
        PANICS[name]()
    assert not isinstance(got.value.__cause__, Exception), "the library has repaired this one"


def test_a_token_that_cannot_be_decoded_does_not_spoil_the_others() -> None:
    made = tokenizers.Tokenizer(models.BPE({" ": 0, "x": 1}, []))
    made.decoder = STRIP
    assert Tokenizer(made).anchor == ([1], "x")
    assert Tokenizer(made).token_text(1) == "x"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), InvalidRequestError("own")])
def test_what_is_not_foreign_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as got, ForeignCode(CheckpointError, "what"):
        raise error
    assert got.value is error
