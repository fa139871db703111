"""Suffix proposer: drafts are what followed the longest earlier match, while that is probable.

    text      ... a b c d e ... b c f ... a b c     its end occurs earlier: "a b c", followed by d
    draft     d   p = 1 x .9                        share of the occurrences that it follows, times
              e   p = 1 x .9 x .95                  how often such drafts were right so far

Matches are looked up in the sequence itself and in outputs of earlier requests with the same
`cache_salt`; the better of both drafts is taken. A draft ends where the probability that all of it
is accepted falls below a bound, so it is long where text repeats, and short or empty elsewhere
(Oliaro et al., SuffixDecoding, 2024). They look matches up in a suffix tree. Here they are found
from tables of n-grams, which take a fifth of the code and forget the oldest output exactly.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from minillm.scheduling.plan import NewSequence
from minillm.speculative.proposer import DraftRow

LENGTHS = (8, 3, 1)  # of the n-grams in the tables
MAX_OCCURRENCES = 16  # of an n-gram that are compared, the latest first
MAX_PAST_TOKENS = 1 << 16  # of earlier outputs, all salts together; 31 MB with their tables
END = -1  # follows each output of an earlier request
NUM_RATES = 16  # longer contexts share the last rate
RATE_WEIGHT, KEEP = 8.0, 0.99  # drafts; weight of a rate's initial value, and decay of its counts


class Guess(NamedTuple):
    """A token that may come next.

    Attributes:
        context: number of matching tokens before it, guesses included, at most `NUM_RATES`.
        share: share of the occurrences of this match that it follows.
        probability: estimate that it and all guesses before it are right.
    """

    token: int
    context: int
    share: float
    probability: float


class Rates:
    """How often guesses are right, relative to their share: `of[n]` after n matching tokens."""

    def __init__(self) -> None:
        self.of = [0.0, *[1 - 0.5 / n for n in range(1, NUM_RATES + 1)]]
        self._hits = [RATE_WEIGHT * rate for rate in self.of]
        self._expected = [RATE_WEIGHT] * len(self.of)

    def learn(self, guesses: Sequence[Guess], truth: Sequence[int]) -> None:
        """Compare guesses with the tokens that came, up to the first wrong one."""
        for (guess, n, share, _), token in zip(guesses, truth, strict=False):
            self._hits[n] = KEEP * self._hits[n] + (guess == token)
            self._expected[n] = KEEP * self._expected[n] + share
            self.of[n] = min(self._hits[n] / self._expected[n], 1.0)
            if guess != token:
                return


class Text:
    """A list of tokens that grows at its end, and the n-grams in it that a token follows.

    Positions count from the first token ever, because tokens are also removed at the start.
    """

    def __init__(self, tokens: list[int]):
        self.tokens = tokens
        self._start = self._known = 0  # position of tokens[0]; n-grams that end before are known
        # For each length: the latest end of each n-gram, and the previous end before each end.
        self._tables: list[tuple[int, dict[tuple[int, ...], int], dict[int, int]]] = [
            (length, {}, {}) for length in LENGTHS
        ]

    def update(self) -> None:
        """Add the n-grams of appended tokens."""
        tokens, start = self.tokens, self._start
        size = start + len(tokens)
        for length, latest, previous in self._tables:
            for end in range(max(self._known, start + length), size):
                ngram = tuple(tokens[end - start - length : end - start])
                if (before := latest.get(ngram)) is not None:
                    previous[end] = before
                latest[ngram] = end
        self._known = size

    def cut(self, count: int) -> None:
        """Remove the first `count` tokens, and the n-grams that begin there."""
        tokens, start = self.tokens, self._start
        for length, latest, previous in self._tables:
            for end in range(start + length, min(start + count + length, self._known)):
                ngram = tuple(tokens[end - start - length : end - start])
                previous.pop(end, None)
                if latest[ngram] == end:
                    del latest[ngram]
        del tokens[:count]
        self._start += count

    def match(self, tail: list[int]) -> tuple[int, list[int]]:
        """The longest end of `tail` that occurs: its length, and the index behind each occurrence,
        the latest first. The occurrences are among the latest of the longest n-gram."""
        tokens, start, size = self.tokens, self._start, len(tail)
        ends: list[int] = []
        for length, latest, previous in self._tables:  # noqa: B007
            if (last := latest.get(tuple(tail[-length:]))) is not None:
                break
        else:
            return 0, ends
        while last is not None and last >= start + length and len(ends) < MAX_OCCURRENCES:
            ends.append(last - start)
            last = previous.get(last)
        if whole := [end for end in ends if end >= size and tokens[end - size : end] == tail]:
            return size, whole
        longer = ends
        while longer:  # ends, because not all of `tail` occurs
            ends, length = longer, length + 1
            next_one = tail[-length]
            longer = [end for end in ends if end >= length and tokens[end - length] == next_one]
        return length - 1, ends

    def guess(self, tail: list[int], count: int, least: float, rates: Rates) -> list[Guess]:
        """Up to `count` tokens that may follow `tail`. None follows one below `least`."""
        guesses, probability = list[Guess](), 1.0
        context, ends = self.match(tail)
        runs = [run for end in ends if (run := self.tokens[end : end + count])]
        while runs and probability >= least:
            place = len(guesses)
            candidates = [run[place] for run in runs]
            token, share = candidates[0], 1.0
            if candidates.count(token) < len(candidates):
                token = max(candidates, key=candidates.count)  # of equally frequent ones the latest
                share = candidates.count(token) / len(candidates)
                runs = [run for run in runs if run[place] == token]
            if token == END:
                break
            context = min(context, NUM_RATES)
            probability *= share * rates.of[context]
            guesses.append(Guess(token, context, share, probability))
            runs = [run for run in runs if len(run) > place + 1]
            context += 1
        return guesses


class State:
    """A sequence, the source of its last draft, and guesses that await the next tokens."""

    def __init__(self, new: NewSequence, tokens: list[int]):
        self.new, self.text = new, Text(tokens)
        self.num_seen = 0  # tokens known at the last guesses
        self.guesses: list[tuple[Rates, list[Guess]]] = []


class Suffixes:
    """The proposer.

    Args:
        least: a draft ends where the probability that all of it is accepted falls below this.
        depth: maximum length of a match.
        max_past: number of earlier outputs kept, the latest; 0 keeps none.
    """

    def __init__(self, least: float, depth: int, max_past: int):
        self.least, self.depth, self.max_past = least, depth, max_past
        self.own_rates, self.past_rates = Rates(), Rates()
        self._states: dict[int, State] = {}
        self._past: dict[str, Text] = {}  # earlier outputs by salt
        self._outputs: deque[tuple[int, str, int]] = deque()  # (seq_id, salt, number of tokens)
        self._num_kept: dict[int, int] = {}  # output tokens in `_past` by seq_id
        self._num_past = 0  # tokens in `_past`

    def begin(self, new: NewSequence, token_ids: list[int]) -> None:
        """Add a sequence; `token_ids` will grow."""
        self._states[new.seq_id] = State(new, token_ids)

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Drafts of each row; none if nothing probable is found."""
        return [self._propose(self._states[row.new.seq_id], row.num_drafts) for row in rows]

    def _propose(self, state: State, count: int) -> list[int]:
        tokens = state.text.tokens
        for rates, guesses in state.guesses:
            rates.learn(guesses, tokens[state.num_seen :])
        state.text.update()
        state.num_seen, state.guesses = len(tokens), []
        sources = [(state.text, self.own_rates)]
        if (past := self._past.get(state.new.cache_salt)) is not None:
            sources.append((past, self.past_rates))
        for text, rates in sources:
            guesses = text.guess(tokens[-self.depth :], count, self.least, rates)
            state.guesses.append((rates, guesses))
        best = max((guess for _, guess in state.guesses), key=expected_accepted)
        return [guess.token for guess in best if guess.probability >= self.least]

    def forget(self, seq_id: int) -> None:
        """Remove a sequence and keep its output; of one that was preempted only what is new."""
        state = self._states.pop(seq_id, None)
        if state is None or not self.max_past:
            return
        output, salt = state.text.tokens[state.new.num_prompt_tokens :], state.new.cache_salt
        new = output[self._num_kept.get(seq_id, 0) :]
        if not new:
            return
        text = self._past.setdefault(salt, Text([]))
        text.tokens += [*new, END]
        text.update()
        self._outputs.append((seq_id, salt, len(new) + 1))
        self._num_kept[seq_id], self._num_past = len(output), self._num_past + len(new) + 1
        while len(self._outputs) > self.max_past or self._num_past > MAX_PAST_TOKENS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        seq_id, salt, size = self._outputs.popleft()
        self._num_kept.pop(seq_id, None)
        self._num_past -= size
        self._past[salt].cut(size)
        if not self._past[salt].tokens:
            del self._past[salt]


def expected_accepted(guesses: Sequence[Guess]) -> float:
    """Expected number of guesses that are right."""
    return sum([guess.probability for guess in guesses])
