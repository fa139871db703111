"""Compiling, limits, refusals; the masks of rows with drafts, after preemptions and for forks."""

import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from msgspec import msgpack

from minillm import LLM, SamplingParams, StructuredOutputsParams
from minillm.errors import InvalidRequestError, MinillmError, UnsupportedFeatureError
from minillm.execution.wire import to_bytes
from minillm.structured import grammars as module
from minillm.structured.grammars import Grammars
from minillm.structured.vocabulary import Vocabulary
from tests.matrix.cells import folder_of
from tests.structured.conftest import allowed, constraint_of, masks
from tests.structured.schemas import SCHEMAS

DEEP: dict = {}
for _ in range(40):
    DEEP = {"items": DEEP}
LARGE = {"enum": ["x" * 70_000]}
CLASH = {"type": "integer", "minimum": 5, "maximum": 3}
# What is given, and what the error says; within a schema it names the JSON path.
REFUSED: dict[str, tuple[dict, str]] = {
    "nothing": ({}, "sets no constraint; set exactly one of json"),
    "two": ({"regex": "a", "choice": ["b"]}, "sets regex and choice"),
    "a misspelt name": ({"jsn": {}}, "no key 'jsn'; .*Did you mean 'json'"),
    "no JSON": ({"json": "{"}, "must be a JSON schema"),
    "no schema": ({"json": "[1]"}, "a JSON schema, which is an object"),
    "no number of JSON": ({"json": {"minimum": float("nan")}}, "must be a JSON schema"),
    "above 64 KiB": ({"json": LARGE}, "has 70,014 bytes; at most 65,536"),
    "deeper than 32": ({"json": DEEP}, r"deeper than 32 levels at \$\.items\.items"),
    "deep text": ({"json": "[" * 30_000}, "deeper than 32 levels"),
    "remote $ref": ({"json": {"properties": {"a": {"$ref": "http://x/y"}}}},
                    r"\$ref 'http://x/y' at \$\.properties\.a; only references within"),
    "a $ref to nothing": ({"json": {"items": {"$ref": "#/$defs/z"}}}, r"at \$\.items: Pointer"),
    "a large enum": ({"json": {"items": {"enum": list(range(10_001))}}},
                     r"10,001 entries at \$\.items\.enum"),
    "contradiction": ({"json": {"type": "object", "properties": {"a": CLASH}, "required": ["a"]}},
                      r"at \$\.properties\.a: Unsatisfiable schema: minimum \(5\)"),
    "unknown type": ({"json": {"items": {"type": "nothing"}}}, r"at \$\.items: Invalid type"),
    "pattern": ({"json": {"items": {"anyOf": [{"type": "null"}, {"pattern": "("}]}}},
                r"at \$\.items\.anyOf\[1\]: regex parse error"),
    "keyword": ({"json": {"$defs": {"z": {"not": {}}}, "$ref": "#/$defs/z"}},
                r"at \$\.\$defs\.z: Unimplemented keys"),
    "lookahead": ({"regex": "(?=a)b"}, "look-around"),
    "groups in groups": ({"regex": "(" * 30_000 + ")" * 30_000}, "cannot be used"),
    "nothing matches": ({"regex": r"[^\s\S]"}, "cannot be used|allows no output"),
    "an empty text": ({"choice": ["a", ""]}, "non-empty text"),
    "too many choices": ({"choice": ["a"] * 10_001}, "a list of 1 to 10,000 texts"),
    "choices above 64 KiB": ({"choice": ["a" * 9_000] * 8}, "has 72,000 bytes"),
    "lone surrogate": ({"choice": ["\ud800"]}, "lone surrogates"),
    "grammar": ({"grammar": "root ::= ("}, "cannot be used"),
    "unknown rule": ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    "options": ({"grammar": '%llguidance {}\nstart: "ab"'}, "sets options with %llguidance"),
    "blanks elsewhere": ({"regex": "a", "whitespace_pattern": " "}, "is for json and json_object"),
    "object as a number": ({"json_object": 7}, "must be true or false"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_sentence(grammars: Grammars, name: str) -> None:
    pytest.importorskip("llguidance")
    given, words = REFUSED[name]
    with pytest.raises(MinillmError, match=words) as caught:
        grammars.prepare(SamplingParams(structured_outputs=given), [0])
    text = str(caught.value)
    assert len(text) < 600
    assert text.endswith((".", "?"))
    assert "\n" not in text


def test_chains_of_references_do_not_end_the_process() -> None:
    """llama.cpp#25283, SGLang#7639: recursion. llguidance 1.9 needs 20 MB of stack for this one."""
    pytest.importorskip("llguidance")
    code = """if True:
        from minillm import SamplingParams
        from minillm.structured.grammars import Grammars
        from minillm.text.tokenizer import Tokenizer
        chain = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1100)}
        schema = {"$defs": chain | {"d1100": {}}, "$ref": "#/$defs/d0"}
        tokenizer = Tokenizer.from_folder("minillm/assets/tiny")
        grammars = Grammars(tokenizer, 4096)
        grammars.prepare(SamplingParams(structured_outputs={"json": schema}), [0])
        print("alive")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "alive\n", done.stderr[-500:]


def test_a_constraint_is_compiled_once_and_the_oldest_is_forgotten(tokenizer, monkeypatch) -> None:
    made, compiled = Grammars(tokenizer, 4096), []
    compile = Grammars._compile
    monkeypatch.setattr(module, "MAX_COMPILED", 3)
    monkeypatch.setattr(
        Grammars, "_compile", lambda self, x: compiled.append(x) or compile(self, x)
    )

    def ask(size: int) -> SamplingParams:
        params = SamplingParams(structured_outputs={"regex": "a" * size})
        made.prepare(params, [0])
        assert made.is_compiled(params)
        return params

    assert not made.is_compiled(SamplingParams(structured_outputs={"regex": "a"}))
    kept, *_ = [ask(size) for size in (2, 1, 3, 1, 4, 2, 5, 6)]  # 2 is forgotten for 4
    assert [len(each.regex) for each in compiled] == [2, 1, 3, 4, 2, 5, 6]
    assert made.is_compiled(SamplingParams())
    ask(7)  # 2 is forgotten again, but not by its request
    assert made.matcher(kept.structured_outputs).accept(made.encode(b"a")[0])
    assert len(compiled) == 8


def test_a_library_that_fails_in_a_step_fails_the_row_alone(either: Grammars, tokenizer) -> None:
    row = constraint_of(either, {"regex": "ab"}, [])
    row.masks(0, (), np.zeros((1, 520), dtype=np.uint8))

    class Panic(BaseException):
        """As pyo3 raises for a panic in Rust."""

    def fail(*_: object) -> None:
        raise Panic

    row._matcher.fill = fail
    assert not masks(row, 0, [5], either.width).any()
    assert row.drafts([5], 3, forces=True) == []


def test_what_takes_too_long_is_refused_and_others_are_not(tokenizer, monkeypatch) -> None:
    """vLLM#45172. When it is compiled at last, it can be used."""
    made, go_on, compile = Grammars(tokenizer, 4096), threading.Event(), Grammars._compile
    slow, fast = ({"regex": each} for each in ("slow", "fast"))

    def waiting(self, given):
        assert given.regex == "fast" or go_on.wait(60)
        return compile(self, given)

    monkeypatch.setattr(Grammars, "_compile", waiting)
    monkeypatch.setattr(module, "SECONDS", 0.05)
    with pytest.raises(InvalidRequestError, match=r"more than 0.05 s to compile; make it simpler"):
        made.prepare(SamplingParams(structured_outputs=slow), [0])
    monkeypatch.setattr(module, "SECONDS", 60)
    made.prepare(SamplingParams(structured_outputs=fast), [0])
    go_on.set()
    made.prepare(SamplingParams(structured_outputs=slow), [0])


def test_the_same_error_again_is_another_exception(grammars: Grammars) -> None:
    """A kept exception would keep the stack of everybody who got it."""
    found = []
    for _ in range(2):
        with pytest.raises(MinillmError) as caught:
            grammars.prepare(SamplingParams(structured_outputs={"regex": "("}), [0])
        found.append(caught.value)
    assert str(found[0]) == str(found[1])
    assert found[0] is not found[1]


def test_without_llguidance_patterns_work_and_the_rest_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    made = Grammars(tokenizer, 4096)
    for given in ({"regex": "[ab]+"}, {"choice": ["a+", "b"]}):
        matcher = made.matcher(StructuredOutputsParams(**given))
        assert matcher.accept(tokenizer.encode("a", False)[0])
    assert not matcher.is_accepting  # a choice is no pattern
    with pytest.raises(
        UnsupportedFeatureError, match=r"pip install 'minillm-course\[structured\]'"
    ):
        made.prepare(SamplingParams(structured_outputs={"json_object": True}), [0])


def test_a_tokenizer_is_opened_once(tokenizer) -> None:
    opened: list[int] = []
    grammars = Grammars(lambda: opened.append(1) or tokenizer, 1000)
    assert grammars.encode(b"a b") == grammars.encode(b"a b") != []
    assert opened == [1]


def test_a_model_without_an_end_or_a_tokenizer() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(InvalidRequestError, match="needs a token that ends the output"):
        Grammars(None, 9).prepare(params, [])
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        Grammars(None, 9).prepare(params, [0])
    with pytest.raises(InvalidRequestError, match="ignore_eos is True and structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


def test_parameters_survive_the_way_to_a_rank() -> None:
    for given in ({"json": {"b": 1, "a": [None]}}, {"choice": ["x", "y"]}, {"json_object": True}):
        params = SamplingParams(structured_outputs=given)
        assert msgpack.decode(to_bytes(params), type=SamplingParams) == params


KINDS = {
    "schema": {"json": {"type": "array", "items": {"enum": ["ion", "é", 12]}, "maxItems": 6}},
    "pattern": {"regex": r"(ion|[0-9é]{1,3}x?)+\."},
    "grammar": {"grammar": 'start: "(" start ")" | /[a-d]+/'},
}


@pytest.fixture(params=["llguidance", "dfa"])
def either(request, tokenizer, grammars, monkeypatch) -> Grammars:
    """Constraints with and without the library."""
    if request.param == "dfa":
        monkeypatch.setattr(module, "find_spec", lambda name: None)
        return Grammars(tokenizer, grammars.width)
    pytest.importorskip("llguidance")
    return grammars


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_depends_on_the_tokens_alone(either: Grammars, kind: str) -> None:
    """With drafts, right and wrong; after a preemption; for forks: always as one by one."""
    if either.guidance is None and kind != "pattern":
        pytest.skip("this needs the library")
    given, width, dice = KINDS[kind], either.width, random.Random(kind)
    for _ in range(6):
        tokens, prompt = [5, 6, 7], 3
        row = constraint_of(either, given, tokens, prompt)
        while len(tokens) < 24:
            ahead = list(tokens)  # a text that goes on from here, and its masks one by one
            plain = constraint_of(either, given, ahead, prompt)
            right, expected = [], []
            for _ in range(dice.randrange(1, 5)):
                mask = masks(plain, len(ahead), [], width)[0]
                expected.append(mask)
                ids = [each for each in np.flatnonzero(mask) if each]
                if not ids:
                    break
                ahead.append(int(dice.choice(ids)))
                right.append(ahead[-1])
            drafts = right[: len(expected) - 1]
            found = masks(row, len(tokens), drafts, width)
            assert (found == np.array(expected)).all()
            if drafts:  # a wrong one: up to it nothing changes, and nothing is remembered
                place = dice.randrange(len(drafts))
                wrong = [*drafts[:place], int(np.flatnonzero(~expected[place])[5]), *drafts[place:]]
                found = masks(row, len(tokens), wrong, width)
                assert (found[: place + 1] == np.array(expected[: place + 1])).all()
                assert found[place + 1 :].all()
            if dice.random() < 0.3:  # preempted, moved or forked: another row with the same tokens
                tokens = list(tokens)
                row = constraint_of(either, given, tokens, prompt)
            if not right:
                break
            tokens += right[: dice.randrange(1, len(right) + 1)]


def test_drafts_end_before_what_may_not_come(either: Grammars, tokenizer) -> None:
    tokens = tokenizer.encode("ab", False)
    row = constraint_of(either, {"regex": "abc?d?x*"}, tokens, 0)
    c, d, x = (tokenizer.encode(each, False)[0] for each in "cdx")
    for proposed, kept in (([c, d, x], 3), ([d, c, x], 1), ([5, c], 0), ([c, 0, x], 2), ([], 0)):
        assert row.drafts(proposed, 4, forces=True) == proposed[:kept]  # 0 ends the output
    before = masks(row, len(tokens), [], either.width)
    assert (
        before == masks(constraint_of(either, {"regex": "abc?d?x*"}, tokens), 2, [], 4133)
    ).all()


def test_text_that_must_come_is_drafted(either: Grammars, tokenizer) -> None:
    text = "def function(self):"
    row = constraint_of(
        either, {"regex": r"(def function\(self\):|)x?"}, tokenizer.encode("d", False)
    )
    ids = tokenizer.encode(text[1:], False)
    assert len(ids) > 4
    assert row.drafts([], 3, forces=True) == ids[:3]
    assert row.drafts([], 30, forces=True) == ids[:-1]
    assert row.drafts([ids[0], 7], 3, forces=False) == ids[:1]  # as a draft model needs


def test_drafts_of_forced_text_change_no_token_and_save_steps() -> None:
    pytest.importorskip("llguidance")
    config = {"method": "ngram", "num_speculative_tokens": 4}
    plain = LLM(folder_of("bytes"))
    drafted = LLM(folder_of("bytes"), speculative_config=config)
    steps = num_tokens = 0
    for seed, name in enumerate(["person", "tool call"]):
        given = {"json": SCHEMAS[name]}
        params = SamplingParams(seed=seed, max_tokens=60, structured_outputs=given)
        (expected,) = plain.generate("def fib(n):", params, use_tqdm=False)
        before = drafted.engine.scheduler.counters.num_steps
        (found,) = drafted.generate("def fib(n):", params, use_tqdm=False)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        steps += drafted.engine.scheduler.counters.num_steps - before
        num_tokens += len(found.outputs[0].token_ids)
    assert num_tokens / steps > 1.15


def test_ends_follow_a_complete_text_only(either: Grammars, tokenizer) -> None:
    """The model's end (0), a padding id and no token with text, which the pattern decides."""
    x, padded = tokenizer.encode("x", False)[0], either.width - 1
    more = {"stop_token_ids": (x, padded)}
    ends, tokens = (0, x, padded), []
    row = constraint_of(either, {"regex": "a+x?"}, tokens, 0, ends, **more)
    at_start = masks(row, 0, [], either.width)[0]
    assert not at_start[[0, padded, x]].any()
    tokens += tokenizer.encode("a", False)
    after = masks(row, 1, [], either.width)[0]
    assert after[[0, padded, x]].all()
    tokens.append(x)
    complete = masks(row, 2, [], either.width)[0]
    assert np.flatnonzero(complete).tolist() == [0, padded]
    # A draft that ends the text: what is behind it is not used, and the matcher is not advanced.
    assert masks(row, 2, [0, 5], either.width)[1:].all()
    assert (masks(row, 2, [], either.width)[0] == complete).all()


def test_ids_beyond_the_tokenizer_do_not_poison_a_matcher(either: Grammars, tokenizer) -> None:
    """mistral.rs#2212: drafts and prompts may have them."""
    row = constraint_of(either, {"regex": "ab"}, [either.width - 1], 1)
    before = masks(row, 1, [], either.width)[0]
    for draft in (either.width - 1, 0, 4095):
        assert masks(row, 1, [draft], either.width)[1].all()
    assert (masks(row, 1, [], either.width)[0] == before).all()
    assert np.flatnonzero(before).tolist() == sorted(
        i for i, each in enumerate(either.vocabulary.tokens) if each in (b"a", b"ab")
    )


def test_names_of_special_tokens_are_text_like_any_other() -> None:
    """lattice#1722: the text of a special token is not that token."""
    texts = [b"", *(bytes([each]) for each in range(256)), b"<|end|>"[:3]]
    for pattern in (r"<\|end\|>", r"<\|0\|>"):
        made = Grammars(None, len(texts))
        made.__dict__["vocabulary"] = Vocabulary(texts)
        matcher = made.matcher(StructuredOutputsParams(regex=pattern))
        assert not allowed(matcher, len(texts))[0]
        assert not matcher.accept(0)
        assert all(matcher.accept(1 + byte) for byte in pattern.replace("\\", "").encode())


def test_long_bounds_are_quick_enough_to_fill(grammars: Grammars) -> None:
    """xgrammar#852, mlx-serve#380. No clock: the library's fuel would end, and no token be left."""
    pytest.importorskip("llguidance")
    given = StructuredOutputsParams(json={"type": "string", "maxLength": 100_000})
    matcher, begin = grammars.matcher(given), time.process_time()
    for token in grammars._tokenizer.encode('"' + "ion x" * 400, False):
        assert matcher.accept(token)
        assert allowed(matcher, grammars.width).sum() > 3000
    assert time.process_time() - begin < 20
