"""What is sent and when: conversations with lengths from stated distributions, and arrivals.

A prompt is a row of segments. Segments with the same key have the same tokens, which is how
requests share prefixes.

Gamma arrivals are those of ``vllm bench serve``: the gaps have shape b (the burstiness) and mean
1 / rate, so their coefficient of variation is 1 / sqrt(b). b = 1 is a Poisson process, smaller
values give bursts, and infinity gives constant gaps. Unlike vLLM, times are not rescaled to end at
exactly count / rate, because the process would not be a Poisson process any more.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from minillm.errors import ConfigError, did_you_mean

LEAST, MOST = 1, 1_000_000  # tokens of a drawn length


@dataclass(frozen=True)
class Segment:
    """A run of tokens; those of equal keys are equal, up to the shorter length."""

    key: str
    length: int


@dataclass(frozen=True)
class Turn:
    """One request: what it adds to the conversation, how many tokens it asks for, and the seconds
    that its user waits after the previous reply."""

    segments: tuple[Segment, ...]
    max_tokens: int
    think: float = 0.0

    @property
    def length(self) -> int:
        """Tokens that the turn adds to the prompt."""
        return sum(segment.length for segment in self.segments)


Conversation = tuple[Turn, ...]
Parameters = Mapping[str, float]
Draw = Callable[[int, np.random.Generator, Parameters], list[Conversation]]


def lognormal(median: float, sigma: float, rng: np.random.Generator) -> int:
    """One length."""
    return int(np.clip(round(median * float(rng.lognormal(0.0, sigma))), LEAST, MOST))


def single(index: int, length: int, max_tokens: int, *shared: Segment) -> Conversation:
    """A conversation of one request: the shared segments, then its own tokens."""
    return (Turn((*shared, Segment(f"own {index}", length)), max_tokens),)


def draw_fixed(count: int, rng: np.random.Generator, p: Parameters) -> list[Conversation]:
    """Equal lengths."""
    return [single(index, int(p["input"]), int(p["output"])) for index in range(count)]


def draw_lognormal(count: int, rng: np.random.Generator, p: Parameters) -> list[Conversation]:
    """Log-normal lengths."""
    return [
        single(
            index,
            lognormal(p["input"], p["input_sigma"], rng),
            lognormal(p["output"], p["output_sigma"], rng),
        )
        for index in range(count)
    ]


def draw_shared_prefix(count: int, rng: np.random.Generator, p: Parameters) -> list[Conversation]:
    """A tree of prefixes: each request has one of the roots, one of its branches, and own
    tokens."""
    conversations = []
    for index in range(count):
        root, branch = int(rng.integers(int(p["roots"]))), int(rng.integers(int(p["branches"])))
        shared = (
            Segment(f"root {root}", int(p["prefix"])),
            Segment(f"branch {root} {branch}", int(p["prefix"])),
        )
        conversations.append(single(index, int(p["input"]), int(p["output"]), *shared))
    return conversations


def draw_chat(count: int, rng: np.random.Generator, p: Parameters) -> list[Conversation]:
    """Conversations of several turns after one system prompt. Each request repeats the conversation
    so far, and follows the previous reply after an exponentially distributed time."""
    system = Segment("system", int(p["system"]))
    conversations = []
    for index in range(count):
        turns = []
        for number in range(int(p["turns"])):
            own = Segment(f"own {index} {number}", lognormal(p["input"], p["input_sigma"], rng))
            think = float(rng.exponential(p["think"])) if number else 0.0
            segments = (own,) if number else (system, own)
            output = lognormal(p["output"], p["output_sigma"], rng)
            turns.append(Turn(segments, output, think))
        conversations.append(tuple(turns))
    return conversations


def draw_long_short(count: int, rng: np.random.Generator, p: Parameters) -> list[Conversation]:
    """Short prompts, and a share of long ones."""
    return [
        single(
            index, int(p["long" if rng.random() < p["long_share"] else "short"]), int(p["output"])
        )
        for index in range(count)
    ]


DRAWS: Mapping[str, tuple[Draw, Parameters]] = MappingProxyType(
    {
        "lognormal": (draw_lognormal, MappingProxyType(
            {"input": 160, "input_sigma": 0.8, "output": 96, "output_sigma": 0.7})),
        "fixed": (draw_fixed, MappingProxyType({"input": 128, "output": 64})),
        "shared-prefix": (draw_shared_prefix, MappingProxyType(
            {"roots": 2, "branches": 4, "prefix": 128, "input": 64, "output": 64})),
        "chat": (draw_chat, MappingProxyType(
            {"turns": 4, "system": 64, "input": 40, "input_sigma": 0.6, "output": 64,
             "output_sigma": 0.6, "think": 1.0})),
        "long-short": (draw_long_short, MappingProxyType(
            {"short": 64, "long": 1024, "long_share": 0.05, "output": 64})),
    }
)  # fmt: skip
MAY_BE_ZERO = ("_sigma", "think", "long_share")


@dataclass(frozen=True)
class Workload:
    """A named distribution of conversations, with all its parameters."""

    name: str
    parameters: Parameters

    def draw(self, count: int, seed: int) -> list[Conversation]:
        """The conversations of one run; the same seed draws the same ones."""
        rng = np.random.default_rng([seed, 1])
        return DRAWS[self.name][0](count, rng, self.parameters)

    def describe(self) -> str:
        """The name and all parameters, as --workload takes them."""
        given = ",".join(f"{key}={value:g}" for key, value in self.parameters.items())
        return f"{self.name}:{given}"


def parse_workload(text: str) -> Workload:
    """Parse ``NAME`` or ``NAME:key=value,...``.

    Raises:
        ConfigError: there is no such workload or parameter, or a value is out of range.
    """
    name, _, rest = text.partition(":")
    if name not in DRAWS:
        raise ConfigError(
            f"--workload has no {name[:40]!r}; the workloads are {', '.join(DRAWS)}."
            f"{did_you_mean(name, DRAWS)}"
        )
    parameters = dict(DRAWS[name][1])
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in parameters:
            raise ConfigError(
                f"--workload {name} has no parameter {key[:40]!r}; it has {', '.join(parameters)}."
                f"{did_you_mean(key, parameters)}"
            )
        parameters[key] = parameter(name, key, value)
    return Workload(name, MappingProxyType(parameters))


def parameter(name: str, key: str, text: str) -> float:
    """The value of one parameter."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    least = 0.0 if key.endswith(MAY_BE_ZERO) else 1.0
    most = 1.0 if key == "long_share" else 3.0 if key.endswith("_sigma") else float(MOST)
    if not least <= value <= most:
        raise ConfigError(
            f"--workload {name}: {key} is {text[:40]!r}; it must be a number from {least:g} to "
            f"{most:g}."
        )
    return value


def first_tokens(segments: Sequence[Segment], length: int) -> tuple[Segment, ...]:
    """The segments, cut after `length` tokens."""
    kept, left = [], length
    for segment in segments:
        if left > 0:
            kept.append(replace(segment, length=min(segment.length, left)))
            left -= segment.length
    return tuple(kept)


def fit(conversations: Sequence[Conversation], longest: int) -> tuple[list[Conversation], int]:
    """Shorten conversations to `longest` tokens of prompt and output; also the number of those
    that were shortened. The output keeps at least half of the room left if it wants it; turns
    without room are left out."""
    fitted = [fit_one(conversation, longest) for conversation in conversations]
    changed = sum(one != other for one, other in zip(conversations, fitted, strict=True))
    return fitted, changed


def fit_one(conversation: Conversation, longest: int) -> Conversation:
    """One conversation of at most `longest` tokens."""
    kept: list[Turn] = []
    room = longest
    for turn in conversation:
        if room < 2:
            break
        if turn.length + turn.max_tokens > room:
            output = min(turn.max_tokens, max(1, room // 2))
            segments = first_tokens(turn.segments, room - output)
            turn = replace(turn, segments=segments, max_tokens=output)
        kept.append(turn)
        room -= turn.length + turn.max_tokens
    return tuple(kept)


# ---- arrivals ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrivals:
    """A process of arrivals.

    Attributes:
        rate: requests per second; infinity sends all of them at once.
        burstiness: shape of the gamma distribution of the gaps.
    """

    rate: float
    burstiness: float = 1.0

    def times(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Seconds from the start at which `count` requests are sent, the first of them at 0."""
        if math.isinf(self.rate):
            return np.zeros(count)
        # Arrivals at rate 1, which are then stretched.
        units = np.cumsum(unit_gaps(count, self.burstiness, rng))
        units -= units[:1]
        return units / self.rate

    def describe(self) -> str:
        """The process in words, without its rate."""
        if math.isinf(self.rate):
            return "all requests at once"
        if math.isinf(self.burstiness):
            return "constant gaps"
        if self.burstiness == 1:
            return "Poisson arrivals"
        return f"gamma arrivals of burstiness {self.burstiness:g}"


def unit_gaps(count: int, burstiness: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Gaps with mean 1 and coefficient of variation 1 / sqrt(burstiness)."""
    if math.isinf(burstiness):
        return np.ones(count)
    return rng.gamma(shape=burstiness, scale=1.0 / burstiness, size=count)
