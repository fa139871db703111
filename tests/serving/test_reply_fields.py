"""What a reply says of its tokens is true of its text: offsets, names, bytes and ids, whole, in a
stream, and after an echoed prompt that ends inside a character."""

import asyncio
import codecs
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

from minillm import AsyncLLMEngine
from minillm.api.arguments import AsyncEngineArgs
from minillm.serving.app import build_app
from minillm.serving.settings import Settings
from minillm.text.detokenizer import prompt_starts
from minillm.text.tokenizer import Tokenizer
from tests.engine.small import write_model
from tests.pairs import one_in, some
from tests.serving.asgi_calls import Reply, call
from tests.serving.http_small import TEMPLATE
from tests.text.build import KINDS

PROMPTS = ["é x", "def fib(n):", "🌶🌶 ab", "中  文\n", "line\u2028end\x85!\u2029", "\ufffd ab", "x"]
STOPS = [None, None, ["\n    x"], ["a"], [" ", "🌶"], ["\ufffd"]]
PARTS = "🌶é中\u2028 ab\n"  # sampled tokens are often parts of these


def fallback_tokenizer() -> tokenizers.Tokenizer:
    """SentencePiece style, 264 tokens: special tokens, the bytes, and five pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "a", "b", "▁a", "ab"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $0", None, [("<s>", 1)])
    return made


class Api:
    """The server of a model, called without a socket, and its vocabulary read anew."""

    def __init__(self, model: str, folder: Path):
        if model == "fallback":
            write_model(folder)
            fallback_tokenizer().save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        # Equal requests are computed alike, so that whole replies and streams have equal floats.
        args = AsyncEngineArgs(folder if model == "fallback" else model, max_model_len=96,
                               enable_prefix_caching=False, dtype="float32")  # fmt: skip
        self.engine = AsyncLLMEngine(args)
        self.app = build_app(self.engine, Settings(names=("m",), chat_template=TEMPLATE))
        self.tokenizer: Tokenizer = self.app.state.server.tokenizer
        self.is_fallback = model == "fallback"

    def post(self, kind: str, body: dict[str, Any]) -> Reply:
        reply = asyncio.run(call(self.app, f"/v1/{kind}", body))
        assert reply.status == 200, reply.text
        return reply

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes, from its entry in the vocabulary."""
        piece = self.tokenizer._backend.id_to_token(token_id)
        if self.is_fallback:
            is_byte = piece.startswith("<0x")
            return bytes([int(piece[3:5], 16)]) if is_byte else piece.replace("▁", " ").encode()
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        return piece.encode() if token_id == 0 else bytes(byte_of[each] for each in piece)


@pytest.fixture(scope="module", params=["tiny", "fallback"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    made = Api(request.param, tmp_path_factory.mktemp("replies"))
    yield made
    made.engine.shutdown()


def request_of(api: Api, draw: random.Random) -> dict[str, Any]:
    """A random request, whose prompt and whose tokens may be parts of characters."""
    parts = api.tokenizer.encode(PARTS, add_special_tokens=False)
    ids = [draw.choice([*parts, draw.randrange(260), 0]) for _ in range(draw.randint(1, 6))]
    chili = api.tokenizer.encode("🌶", add_special_tokens=False)
    cut = draw.randint(1, len(chili))
    body = {
        "prompt": draw.choice([draw.choice(PROMPTS), ids, chili[:cut]]),
        "max_tokens": draw.randint(1, 12), "logprobs": draw.randint(0, 3),
        "seed": draw.randrange(1000), "n": draw.choice([1, 2]), "stop": draw.choice(STOPS),
        "include_stop_str_in_output": draw.random() < 0.3,
        "skip_special_tokens": draw.random() < 0.7, "ignore_eos": draw.random() < 0.7,
        "return_token_ids": True,
    }  # fmt: skip
    if draw.random() < 0.7:
        body["allowed_token_ids"] = sorted({*parts, *draw.sample(range(260), 4)})
        body["logit_bias"] = {str(each): 9.0 for each in chili[cut:]}
    return body


def offsets_of(pieces: Sequence[bytes]) -> list[int]:
    """Where each piece begins in the text of them all: it has the character of its first byte."""
    offsets, raw = [], b""
    for own in pieces:
        complete = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
        offsets.append(len((raw + own[:1]).decode(errors="replace")) - 1 if own else len(complete))
        raw += own
    return offsets


def begins(rest: str, own: bytes, is_cut: bool) -> bool:
    """Whether a text begins with a token, or with the character that it is a part of."""
    try:
        text = own.decode()
    except UnicodeDecodeError:
        return not rest or rest[0] == "\ufffd" or own[:1] in rest[0].encode()
    # Before the first visible token, SentencePiece drops a space.
    return rest.startswith((text, text.lstrip(" "))) or (is_cut and text.startswith(rest))


def joined(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, each as in a whole reply."""
    whole: dict[int, dict[str, Any]] = {}
    for event in events:
        for new in event["choices"]:
            old = whole.setdefault(new["index"], new)
            if old is new:
                assert "prompt_token_ids" in new, "not in the first event"
                continue
            assert "prompt_token_ids" not in new
            old["text"] += new["text"]
            old["token_ids"] += new["token_ids"]
            old["finish_reason"], old["stop_reason"] = new["finish_reason"], new["stop_reason"]
            for name, values in (new["logprobs"] or {}).items():
                old["logprobs"][name] += values
    return whole


@pytest.mark.parametrize("seed", one_in(4, range(40)))
def test_a_completion(api: Api, seed: int) -> None:
    body = request_of(api, random.Random(seed))
    whole = api.post("completions", body).json()["choices"]
    events = api.post("completions", body | {"stream": True}).events()
    assert joined(events) == dict(enumerate(whole))
    echoed = api.post("completions", body | {"echo": True}).json()["choices"]
    stream = api.post("completions", body | {"echo": True, "logprobs": None, "stream": True})
    assert {line[:6] for line in stream.text.splitlines()} == {"data: ", ""}
    texts = {i: choice["text"] for i, choice in joined(stream.events()).items()}
    assert texts == {i: choice["text"] for i, choice in enumerate(echoed)}
    for plain, echo in zip(whole, echoed, strict=True):
        check_echo(api, body, plain, echo)


def check_echo(api: Api, body: dict[str, Any], plain: Any, echo: Any) -> None:
    """An echoed completion by itself, and against the same one without its prompt."""
    text, prompt, ids = echo["text"], echo["prompt_token_ids"], echo["token_ids"]
    assert plain["token_ids"] == ids
    assert text.endswith(plain["text"])
    before = len(text) - len(plain["text"])
    for name, values in echo["logprobs"].items():
        own = values[len(prompt) :]
        if name == "text_offset":
            own = [each - before for each in own]
        if name in ("text_offset", "tokens"):
            assert own == plain["logprobs"][name]
    special = api.tokenizer.special_ids
    pieces = [api.bytes_of(each) for each in prompt]
    if isinstance(body["prompt"], str):
        pieces[0] = b""  # the beginning of a sequence was added
    skips = body["skip_special_tokens"]
    stopped = plain["finish_reason"] == "stop"
    ended = stopped and not body["include_stop_str_in_output"] and not plain["stop_reason"]
    for place, each in enumerate(ids):
        is_hidden = (skips and each in special) or (ended and place == len(ids) - 1)
        pieces.append(b"" if is_hidden else api.bytes_of(each))
    offsets, is_cut = echo["logprobs"]["text_offset"], bool(stopped and plain["stop_reason"])
    right = offsets_of(pieces)
    for place, (offset, own) in enumerate(zip(offsets, pieces, strict=True)):
        # What stays a part of a character of the prompt has no character in the completion.
        is_lost = place >= len(prompt) and right[place] < before
        # A run of byte tokens that is not valid is U+FFFD, also where a byte is ASCII.
        is_invalid = api.is_fallback and text[offset : offset + 1] == "\ufffd"
        assert is_lost or is_invalid or begins(text[offset:], own, is_cut), (offset, own)
        # With byte fallback the text is not always that of the bytes.
        assert api.is_fallback or offset == (before if is_lost else right[place])
    if not api.is_fallback:
        all_text = b"".join(pieces).decode(errors="replace")
        assert all_text.startswith(text) if is_cut else all_text == text
    names = echo["logprobs"]["tokens"]
    for name, each in zip(names, [*prompt, *ids], strict=True):
        is_part = len(api.bytes_of(each).decode(errors="ignore").encode()) < len(api.bytes_of(each))
        assert name.startswith("bytes:") == is_part
    for top in echo["logprobs"]["top_logprobs"][1:]:
        assert len(top) >= max(body["logprobs"], 1), "two tokens share a key"


@pytest.mark.parametrize("seed", some(range(6), range(10)))
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_chat(api: Api, seed: int, as_ids: bool) -> None:
    body = request_of(api, random.Random(seed))
    body |= {"messages": [{"role": "user", "content": "🌶"}], "top_logprobs": body["logprobs"],
             "logprobs": True, "return_tokens_as_token_ids": as_ids, "n": 1}  # fmt: skip
    del body["prompt"]
    whole = api.post("chat/completions", body).json()
    events = api.post("chat/completions", body | {"stream": True}).events()
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in each for each in events[1:])
    [choice] = whole["choices"]
    parts = [each["choices"][0] for each in events]
    content = choice["logprobs"]["content"]
    assert [one for each in parts if each["logprobs"] for one in each["logprobs"]["content"]] == (
        content
    )
    assert (
        "".join(each["delta"].get("content", "") for each in parts) == choice["message"]["content"]
    )
    for one, token_id in zip(content, choice["token_ids"], strict=True):
        assert bytes(one["bytes"]) == api.bytes_of(token_id)
        for each in [one, *one["top_logprobs"]] if as_ids else ():
            number = int(each["token"].removeprefix("token_id:"))
            assert bytes(each["bytes"]) == api.bytes_of(number)
    if not api.is_fallback and choice["finish_reason"] == "length":
        special = api.tokenizer.special_ids if body["skip_special_tokens"] else ()
        pairs = zip(content, choice["token_ids"], strict=True)
        raw = b"".join(bytes(one["bytes"]) for one, each in pairs if each not in special)
        assert raw.decode(errors="replace") == choice["message"]["content"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["e\u0301 x  A\u030a b", "  two  spaces", "naïve 中文 x", "a</s> b"]
)
def test_offsets_of_a_prompt_that_a_normalizer_changes(kind: str, text: str) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    ids = tokenizer.encode(text)
    starts = prompt_starts(tokenizer, ids, text)
    right = [start for start, _ in tokenizer._backend.encode(text).offsets]
    assert starts == sorted(starts)
    for token_id, start, other in zip(ids, starts, right, strict=True):
        own = tokenizer.token_text(token_id)
        assert start == other or text[start:].startswith(own), (own, start, other)


def test_offsets_of_a_prompt_whose_tokenizer_leaves_spaces_out_of_its_own() -> None:
    """As that of Llama 3 does."""
    backend = KINDS["byte_level"]()
    template = processors.TemplateProcessing("<|im_start|> $0", None, [("<|im_start|>", 1)])
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), template]
    )
    tokenizer, text = Tokenizer(backend), "the  quick 中 dog"
    first, *ids = tokenizer.encode(text)
    starts = prompt_starts(tokenizer, [first, *ids], text)
    assert starts == [0, *offsets_of([tokenizer.token_bytes[each] for each in ids])]
    assert starts != [start for start, _ in tokenizer.encoding(text, True).offsets]
