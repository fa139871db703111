"""Chapter 09: prompts that begin alike, the engine's blocks that serve them, and what is found.

`shared`, `chat` and `tree` make up workloads, `serve` runs one through the engine's scheduler and
adds up its prefix reports, and the `draw_` functions are the chapter's charts.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median
from typing import NamedTuple

from minillm import LLM, SamplingParams
from minillm.api.outputs import RequestMetrics
from minillm.cache.prefix import PrefixIndex
from minillm.lab.simulation import Simulation
from minillm_exercises.chapters.common import show_trace as show_trace
from minillm_exercises.plots import bars, bound, figure, note, series, show

Ids = tuple[int, ...]
ENOUGH = 100_000  # tokens of memory, more than any workload here needs
REASONS = ("cached", "new", "partial_block", "last_token", "evicted", "salt")  # PrefixReport's


class Job(NamedTuple):
    """A request: its prompt, and the answer that it will get."""

    prompt: Ids
    answer: Ids


class Author:
    """Writes texts of new tokens: no id is used twice. A seed makes the same lengths."""

    def __init__(self, seed: int = 9):
        self._random, self._next = random.Random(seed), 1

    def __call__(self, low: int, high: int | None = None) -> Ids:
        """A text of `low` tokens, or of some number up to `high`."""
        length = low if high is None else self._random.randint(low, high)
        self._next += length
        return tuple(range(self._next - length, self._next))


def one_chat(turns: int, question: int, answer: int) -> list[Job]:
    """One chat whose questions and whose answers have equal lengths."""
    write, jobs = Author(), [Job((), ())]
    for _ in range(turns):
        jobs.append(Job(sum(jobs[-1], ()) + write(question), write(answer)))
    return jobs[1:]


def shared(users: int = 30, system: int = 500) -> list[Job]:
    """Every user asks once, after one system prompt with its examples."""
    write = Author()
    rules = write(system)
    return [Job(rules + write(20, 60), write(20, 60)) for _ in range(users)]


def chat(chats: int = 6, turns: int = 5) -> list[Job]:
    """Chats of several turns: what was said and answered so far, and a new question."""
    write, jobs = Author(), []
    for _ in range(chats):
        said = write(100, 200)
        for _ in range(turns):
            jobs.append(Job(said + write(10, 60), write(40, 120)))
            said = sum(jobs[-1], ())
    return jobs


def tree(depth: int = 3, branches: int = 3) -> list[Job]:
    """An agent that searches: after each answer it tries several ways to go on, one by one."""
    write, jobs = Author(), []

    def grow(prompt: Ids, depth: int) -> None:
        jobs.append(Job(prompt, write(20, 60)))
        said = sum(jobs[-1], ())
        for _ in range(branches if depth else 0):
            grow(said + write(10, 40), depth - 1)

    grow(write(300), depth)
    return jobs


def documents(popular: bool = False, number: int = 10, rounds: int = 8) -> list[Job]:
    """Questions of 16 tokens about documents of 320: one after the other and then from the first
    again, or at random, the n-th document 1/n as often as the first."""
    write, dice = Author(), random.Random(1)
    texts = [write(320) for _ in range(number)]
    asked = texts * rounds
    if popular:
        weights = [1 / place for place in range(1, number + 1)]
        asked = dice.choices(texts, weights, k=len(asked))
    return [Job(text + write(16), write(4)) for text in asked]


@dataclass(frozen=True)
class Served:
    """What became of the prompt tokens of a workload: `tokens` by the reasons of `REASONS`, and
    how many blocks were copied."""

    tokens: Mapping[str, int]
    copies: int

    @property
    def total(self) -> int:
        """All prompt tokens."""
        return sum(self.tokens.values())

    @property
    def hit_rate(self) -> Fraction:
        """The share of the prompt tokens that was found, token by token."""
        return Fraction(self.tokens["cached"], self.total)


Runs = Mapping[tuple[str, str, int], Served]  # by workload, index, size of a block


def serve(
    jobs: Sequence[Job],
    prefix_cache: str,
    block_size: int = 16,
    num_blocks: int | None = None,
    policy: str = "fcfs",
) -> Served:
    """Serve `jobs` one at a time; all of them are in the queue from the start.

    Without `num_blocks`, the memory is large enough for all of them.
    """
    sim = Simulation(
        num_blocks or ENOUGH // block_size,
        block_size,
        prefix_cache=prefix_cache,
        policy=policy,
        max_num_seqs=1,
        max_num_batched_tokens=4096,
        watermark=0.0,
    )
    for prompt, answer in jobs:
        sim.add(prompt, answer)
    sim.run()
    reports = sim.reports.values()
    found = {reason: sum(getattr(report, reason) for report in reports) for reason in REASONS}
    return Served(found, sim.blocks.num_copies)


def matches(index: PrefixIndex, jobs: Sequence[Job], size: int) -> Iterator[list[int]]:
    """The blocks that the engine's `index` finds for each prompt, when every full block of what was
    computed before is in it. Blocks are numbered as they are filled."""
    filled = 0
    for prompt, answer in jobs:
        yield list(index.match(prompt, len(prompt) - 1, "").blocks)
        computed = (prompt + answer)[:-1]
        place = index.start("")
        for end in range(size, len(computed) + 1, size):
            place = index.insert(place, computed[end - size : end], filled)
            filled += 1


def wait(sim: Simulation, prompt: Ids, salt: str = "") -> float:
    """Seconds to the one new token of a prompt that meets no other."""
    start = sim.now
    sim.add(prompt, 1, cache_salt=salt)
    sim.run()
    return sim.now - start


def percent(share: Fraction) -> str:
    """A share in percent with one digit, rounded exactly."""
    tenths = (2000 * abs(share) + 1) // 2
    return f"{'-' * (share < 0 < tenths)}{tenths // 10}.{tenths % 10}"


def tokens(seed: int, count: int) -> list[int]:
    """Ids that any model of the course has in its vocabulary; no two seeds begin alike."""
    dice = random.Random(seed)
    return [dice.randrange(300, 900) for _ in range(count)]


def first_token(llm: LLM, prompt: Sequence[int], salt: str = "") -> RequestMetrics:
    """What the real engine says about a prompt and one new token: times, and where the prompt's
    tokens came from."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    given = {"prompt_token_ids": list(prompt), "cache_salt": salt}
    return llm.generate([given], params, use_tqdm=False)[0].metrics


def draw_missed(runs: Runs, size: int) -> None:
    """Draw the prompt tokens that were computed with blocks of `size`: those that no cache can
    find, which are computed with blocks of 1 too, and those that were known and not found."""
    fig, ax = figure("computed prompt tokens (%)", "workload, index", size=(6, 2.7))
    rows = [(name, kind, each) for (name, kind, its), each in runs.items() if its == size]
    least = [100 * float(1 - runs[name, "hash", 1].hit_rate) for name, _, _ in rows]
    computed = [100 * float(1 - each.hit_rate) for *_, each in rows]
    lost = [most - few for most, few in zip(computed, least, strict=True)]
    ax.barh(range(len(rows)), least, 0.7, label="new, or last: always computed", **bars(0))
    ax.barh(range(len(rows)), lost, 0.7, least, label="computed before, not found", **bars(1))
    for place, (_, _, each) in enumerate(rows):
        words = f"{percent(each.hit_rate)} % found"
        ax.text(computed[place] + 0.2, place, words, va="center")
    ax.set_yticks(range(len(rows)), [f"{name}, {kind}" for name, kind, _ in rows])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.3 * max(computed))
    ax.grid(visible=False, axis="y")
    fig.legend(loc="outside upper center", ncols=2)
    show(
        fig,
        "Prompt tokens that were computed, in percent of all. The hatched part had been computed "
        f"before: it is at most {max(lost):.1f} percent with either index, so both find nearly all "
        "that repeats.",
    )


def as_published(
    inserted: Mapping[tuple[int, ...], int], tokens: Sequence[int]
) -> tuple[int, int | None]:
    """What a trie answers that has a node for each token, and a block at the end of each text.

    Args:
        inserted: the block of every text that was inserted.
        tokens: the text to look up.

    Returns:
        How many of its first tokens are known, and the last block on the way, or None.
    """
    asked = tuple(tokens)
    known = max(overlap_of(text, asked) for text in inserted)
    passed = [text for text in inserted if text == asked[: len(text)]]
    return known, inserted[max(passed, key=len)] if passed else None


def overlap_of(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts share at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def draw_sizes(runs: Runs) -> None:
    """Draw the hit rate against the size of a block, a panel for each workload."""
    names, kinds, sizes = (list(dict.fromkeys(part)) for part in zip(*runs, strict=True))
    fig, axes = figure(
        "block (tokens, logarithmic)", "hit rate (%)", cols=len(names), size=(7.2, 2.5)
    )
    lost = {}
    for ax, name in zip(axes, names, strict=True):
        for number, kind in enumerate(kinds):
            values = [100 * float(runs[name, kind, size].hit_rate) for size in sizes]
            ax.plot(sizes, values, label=kind, **series(number))
            lost[name, kind] = values[0] - values[-1]
        most = 100 * float(runs[name, kinds[0], 1].hit_rate)
        bound(ax, sizes, [most] * len(sizes), "all that repeats", side="above", at=0.0)
        ax.set_xscale("log", base=4)
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.set(title=name, ylim=(0, 110))
        ax.legend(loc="lower left")
    even = [name for name in names if abs(lost[name, kinds[0]] - lost[name, kinds[1]]) < 0.5]
    told = f"; on {' and '.join(even)} both lose the same" if even else ""
    worst = max(names, key=lambda name: lost[name, kinds[0]] - lost[name, kinds[1]])
    show(
        fig,
        f"Blocks of {sizes[-1]} cost the {kinds[0]} index most on {worst}, "
        f"{lost[worst, kinds[0]]:.0f} percentage points, where the {kinds[1]} index loses "
        f"{lost[worst, kinds[1]]:.0f}{told}.",
    )


def draw_pool(curves: Mapping[str, Sequence[Served]], pools: Sequence[int], needed: int) -> None:
    """Draw the hit rate against the memory there is; `needed` blocks would hold all documents."""
    fig, ax = figure("blocks in the pool", "hit rate (%)", size=(6.6, 3.2))
    for number, (name, served) in enumerate(curves.items()):
        values = [100 * float(each.hit_rate) for each in served]
        ax.plot(pools, values, **series(number))
        note(ax, name, (pools[0], values[0]), (-7, 0), ha="right", va="center")
    ceiling = [100 * float(served[-1].hit_rate)] * len(pools)
    bound(ax, pools, ceiling, "everything that was seen before", side="above", at=0.0)
    ax.axvline(needed, color="grey", linestyle=":", linewidth=1.2)
    ax.annotate("holds all documents", (needed + 3, 4), rotation=90, fontsize=9)
    ax.set(xlim=(pools[0] - 130, None), ylim=(-3, 100), xticks=[pools[0], *range(80, needed, 40)])
    at = max(place for place, pool in enumerate(pools) if pool < needed - 20)
    rates = {name: served[at].hit_rate for name, served in curves.items()}
    low, high = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    show(
        fig,
        f"With {pools[at]} blocks, too few for all documents, '{low}' finds {percent(rates[low])} "
        f"percent of the tokens, and '{high}' finds {percent(rates[high])}.",
    )


def draw_speedup(shares: Sequence[float], measured: Sequence[float], model: str) -> None:
    """Draw how many times sooner the first token comes, against the share of the prompt found."""
    fig, ax = figure("share of the prompt found, f", "first token, times as soon", size=(5.5, 3))
    ax.plot(shares, measured, label=f"measured, {model}", **{**series(0), "linestyle": ""})
    fine = [number / 100 for number in range(round(100 * max(shares)) + 1)]
    dist = [1 / (1 - share) for share in fine]
    bound(ax, fine, dist, "if time followed the tokens: 1 / (1 \u2212 f)", side="above", at=0.9)
    ax.legend(loc="upper left", frameon=True, framealpha=1, edgecolor="black")
    told = f"{measured[-1]:.1f} times as soon with {100 * shares[-1]:.0f} % of the prompt found"
    show(
        fig,
        f"What a hit is worth, measured: the first token came {told}.",
    )


def draw_guesses(times: Mapping[str, Sequence[float]], sent: int) -> None:
    """Draw the time to the first token of each guess; `sent` is the one another user had sent."""
    fig, ax = figure("guess", "time to first token (ms)", size=(6, 3))
    width = 0.8 / len(times)
    for number, (name, values) in enumerate(times.items()):
        places = [guess + number * width for guess in range(len(values))]
        ax.bar(places, [1e3 * value for value in values], width, label=name, **bars(number))
    letters = "ABCDEFGH"[: len(values)]
    names = [letter + ", sent before" * (guess == sent) for guess, letter in enumerate(letters)]
    ax.set_xticks([guess + width / 2 for guess in range(len(names))], names)
    fig.legend(loc="outside upper center", ncols=len(times))
    name, values = list(times.items())[-1]
    told = f"{1e3 * values[sent]:.0f} ms {name}; the median guess takes "
    told += f"{median(values) / values[sent]:.3g} times as long"
    guess = f"Guess {letters[sent]} is what another user sent"
    show(fig, f"{guess}. Its first token, measured, takes {told}.")
