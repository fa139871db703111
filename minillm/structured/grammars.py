"""Compiled constraints: threads that compile, a cache, limits, and masks for the rows of a step.

make_request --prepare--> [ cache ] --miss--> thread pool: schema, pattern --> matcher
                              |                     refused: InvalidRequestError, status 400
row of a step --Constraint--> a copy of it, advanced to the row's tokens --> masks
"""

import json
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from functools import cached_property
from importlib.util import find_spec
from threading import Lock, stack_size
from weakref import WeakKeyDictionary

import numpy as np

from minillm.api.sampling_params import SamplingParams
from minillm.api.structured_outputs import StructuredOutputsParams, nodes
from minillm.errors import ForeignCode, InvalidRequestError, MinillmError, UnsupportedFeatureError
from minillm.structured.dfa import Dfa
from minillm.structured.lark import NAMED, pattern_of, schema_of
from minillm.structured.matcher import DfaMatcher, Guidance, GuidanceMatcher, Matcher
from minillm.structured.vocabulary import Vocabulary, pack
from minillm.text.tokenizer import Tokenizer

MAX_COMPILED = 64  # constraints that are kept
SECONDS = 5.0  # that one may take
NUM_COMPILERS = 2
# Bytes for each of these threads. llguidance recurses once per $ref, and without room for that the
# process would end; MAX_BYTES of a schema bound the depth. Memory is allocated when it is used.
STACK = 2**28
MAX_TRIES = 200  # parts of a schema that are compiled alone to find the one that is refused
FAILING = ForeignCode(InvalidRequestError, "structured_outputs failed")


class Grammars:
    """The compiled constraints of a model. Any thread may use it.

    Args:
        tokenizer: the model's, or None; or a function that opens it when it is first needed.
        width: logits of the model.
    """

    def __init__(self, tokenizer: Tokenizer | Callable[[], Tokenizer | None] | None, width: int):
        self._tokenizer, self.width = tokenizer, width
        self._compiled: OrderedDict[StructuredOutputsParams, Future[Matcher]] = OrderedDict()
        self._lock, self._setting_up = Lock(), Lock()

    def prepare(self, params: SamplingParams, stop_ids: Sequence[int]) -> None:
        """Compile the constraint of a request, if it has one and it is not compiled yet.

        Raises:
            InvalidRequestError: it cannot be compiled, takes too long, or could never end.
            UnsupportedFeatureError: it needs llguidance, which is not installed.
        """
        if not isinstance(given := params.structured_outputs, StructuredOutputsParams):
            return
        if not stop_ids:
            raise InvalidRequestError(
                "structured_outputs needs a token that ends the output, which this model does not "
                "have; give one in stop_token_ids."
            )
        self.matcher(given, SECONDS)

    def is_compiled(self, params: SamplingParams) -> bool:
        """Whether `prepare` has nothing to wait for."""
        if not isinstance(given := params.structured_outputs, StructuredOutputsParams):
            return True
        with self._lock:
            future = self._compiled.get(given)
        return future is not None and future.done()

    def matcher(self, given: StructuredOutputsParams, seconds: float | None = None) -> Matcher:
        """A matcher at the start of a text. With `seconds`, InvalidRequestError if compiling takes
        longer."""
        own = given.__dict__.setdefault("compiled", WeakKeyDictionary())
        with self._setting_up:  # takes longer than to compile, but only once
            self.guidance  # noqa: B018
        with self._lock:
            future = own.get(self) or self._compiled.get(given)
            if future is None:
                before = stack_size(STACK)
                future = self._threads.submit(self._compile, given)
                stack_size(before)
            own[self] = future  # a request keeps what it needs, whatever is forgotten here
            self._compiled[given] = future
            self._compiled.move_to_end(given)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        try:
            return future.result(seconds).copy()
        except TooLate:
            raise InvalidRequestError(
                f"structured_outputs[{given.kind!r}] takes more than {seconds:g} s to compile; "
                "make it simpler."
            ) from None
        except (InvalidRequestError, UnsupportedFeatureError) as error:
            raise type(error)(str(error)) from None  # the kept one would collect tracebacks

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        threads = ThreadPoolExecutor(NUM_COMPILERS, "minillm-grammar")
        weakref.finalize(self, threads.shutdown, wait=False, cancel_futures=True)
        return threads

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's."""
        return self._tokenizer() if callable(self._tokenizer) else self._tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The byte strings of the model's tokens."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "structured_outputs needs a tokenizer, which this model does not have."
            )
        return Vocabulary.of(self.tokenizer, self.width)

    @cached_property
    def guidance(self) -> Guidance | None:
        """llguidance, if it is installed."""
        vocabulary = self.vocabulary
        return Guidance(vocabulary) if find_spec("llguidance") is not None else None

    def encode(self, text: bytes) -> list[int]:
        """Tokens of a text; a character that is cut at its end is left out."""
        whole = text.decode(errors="ignore")
        return [] if self.tokenizer is None else self.tokenizer.encode(whole, False)

    # ---- compiling, in a thread of the pool ------------------------------------------------

    def _compile(self, given: StructuredOutputsParams) -> Matcher:
        vocabulary, guidance = self.vocabulary, self.guidance
        made: Matcher | str
        name = f"structured_outputs[{given.kind!r}]"
        if given.kind in ("regex", "choice"):
            pattern = pattern_of(given)
            made = guidance.pattern(pattern) if guidance else DfaMatcher(Dfa(pattern), vocabulary)
        elif guidance is None:
            raise UnsupportedFeatureError(
                f"{name} needs llguidance 1.9, which is not installed; "
                "run pip install 'minillm-course[structured]' (glibc 2.31 or newer), or use regex "
                "or choice."
            )
        elif given.kind == "grammar":
            grammar = str(given.grammar)
            options = "it sets options with %llguidance; leave them out"
            made = options if "%llguidance" in grammar else guidance.compile(grammar)
            for schema, its_name in NAMED.findall(grammar) if isinstance(made, str) else ():
                if isinstance(alone := self._of_schema(guidance, json.loads(schema)), str):
                    made, name = alone, its_name
                    break
        else:
            made = self._of_schema(guidance, schema_of(given))
        if isinstance(made, str):
            raise InvalidRequestError(f"{name} cannot be used: {made}.")
        self._check_start(made, given)
        return made

    def _of_schema(self, guidance: Guidance, schema: dict) -> GuidanceMatcher | str:
        blanks = schema.pop("x-guidance")

        def compile(part: dict) -> GuidanceMatcher | str:
            return guidance.compile("start: %json " + json.dumps(part | {"x-guidance": blanks}))

        made = compile(schema)
        if not isinstance(made, str):
            return made
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parts = [(path, part) for path, _, part in nodes(schema) if isinstance(part, dict)]
        tried = ((path, compile(shared | part)) for path, part in parts[:MAX_TRIES])
        failing = [(path, why) for path, why in tried if isinstance(why, str)]
        # The innermost part with this error; if it is the whole, the innermost with any.
        same = [(path, why) for path, why in failing if why == made and path != "$"]
        path, why = (same or failing)[-1]
        return f"at {path}: {why}"

    def _check_start(self, matcher: Matcher, given: StructuredOutputsParams) -> None:
        bits = np.zeros(-(-self.width // 8), dtype=np.uint8)
        matcher.copy().fill(bits)
        if not bits.any() and not matcher.is_accepting:
            raise InvalidRequestError(
                f"structured_outputs[{given.kind!r}] allows no output that this model's tokens "
                "can write."
            )


class Constraint:
    """The constraint of one row of the batch. Its matcher is made at the first mask.

    Args:
        tokens: the row's tokens, a list that grows as tokens become known to the host.
        first: position of the first output token.
        stop_ids: tokens that end the output. Those of the model, and those without text, may
            follow a complete text only.
    """

    def __init__(
        self,
        grammars: Grammars,
        params: SamplingParams,
        tokens: Sequence[int],
        first: int,
        stop_ids: Sequence[int],
    ):
        self._grammars, self._params = grammars, params
        self._tokens, self._first, self._stop_ids = tokens, first, stop_ids
        self._matcher: Matcher | None = None
        self._ends = np.zeros(0, dtype=np.uint8)  # a mask
        self._accepted = 0  # tokens of the output

    def _begin(self) -> Matcher:
        texts, own = self._grammars.vocabulary.length, self._params.stop_token_ids
        ends = np.zeros(self._grammars.width, dtype=bool)
        ends[[each for each in self._stop_ids if each not in own or not texts[each]]] = True
        self._ends = pack(ends)
        given = self._params.structured_outputs
        if not isinstance(given, StructuredOutputsParams):
            raise InvalidRequestError("This request has no structured_outputs.")
        return self._grammars.matcher(given)

    def masks(self, position: int, drafts: Sequence[int], out: np.ndarray) -> None:
        """Write the masks of `position` and of those behind each draft, uint8 [n, ceil(V / 8)].

        Behind a draft that may not come, or that ends the output, anything is allowed: those
        positions are not used. If the library fails, no token is left.
        """
        try:
            with FAILING:
                self._fill(position, drafts, out)
        except MinillmError:
            out[:] = 0

    def _fill(self, position: int, drafts: Sequence[int], out: np.ndarray) -> None:
        matcher, count = self._advanced(position), position - self._first
        if matcher is None:
            out[:] = 0
            return
        out[1:] = 255
        for place, bits in enumerate(out):
            matcher.fill(bits)
            bits &= ~self._ends
            if matcher.is_accepting:
                bits |= self._ends
            if place == len(out) - 1 or not matcher.accept(drafts[place]):
                break
            self._accepted += 1
        self._back(count)

    def _advanced(self, position: int) -> Matcher | None:
        """The matcher behind the tokens before `position`; None if it does not come there, because
        the library has reached a limit."""
        if self._matcher is None:
            self._matcher = self._begin()
        self._back(position - self._first)
        for token in self._tokens[self._first + self._accepted : position]:
            if not self._matcher.accept(token):
                return None
            self._accepted += 1
        return self._matcher

    def drafts(self, proposed: Sequence[int], most: int, forces: bool) -> list[int]:
        """Drafts for the next positions: with `forces` the tokens of the text that must come next,
        if there is any; else the `proposed` ones. They end before one that may not come."""
        try:
            with FAILING:
                return self._drafts(proposed, most, forces)
        except MinillmError:
            return []

    def _drafts(self, proposed: Sequence[int], most: int, forces: bool) -> list[int]:
        matcher = self._advanced(len(self._tokens))
        if matcher is None:
            return []
        count, drafts = self._accepted, list(proposed)
        if forces and (forced := self._grammars.encode(self._forced(matcher, 8 * most))[:-1]):
            drafts = forced[:most]  # without the last, which may be longer than the text
        for place, token in enumerate(drafts):
            if not matcher.accept(token):
                drafts = drafts[: place + 1 if self._is_end(token) else place]
                break
            self._accepted += 1
        self._back(count)
        return drafts

    def _is_end(self, token: int) -> bool:
        return bool(self._ends[token // 8] >> token % 8 & 1)

    def _forced(self, matcher: Matcher, most: int) -> bytes:
        """The bytes that must come next: all tokens that may come begin with the same one."""
        vocabulary, text, bits = self._grammars.vocabulary, b"", np.empty_like(self._ends)
        while len(text) < most and not matcher.is_accepting:
            matcher.fill(bits)
            ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            firsts = vocabulary.first[ids]
            single = vocabulary.of_byte.get(int(firsts[0])) if len(ids) else None
            if single is None or (firsts != firsts[0]).any() or not matcher.accept(single):
                break
            text += vocabulary.tokens[single]
        matcher.rollback(len(text))
        return text

    def _back(self, count: int) -> None:
        """Roll back to `count` tokens of the output, if more are accepted."""
        if self._matcher is not None and self._accepted > count:
            self._matcher.rollback(self._accepted - count)
            self._accepted = count
