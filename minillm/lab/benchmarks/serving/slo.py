"""Service-level objectives: which requests were good enough, and goodput.

A request is good if it succeeded and met every objective. Attainment is good requests over all
requests sent, so failures and rejections count against it. Goodput is good requests per second.
Measures have vLLM's definitions; as there, a request without TPOT (at most one output token)
meets every TPOT objective.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from minillm.errors import ConfigError, did_you_mean
from minillm.lab.benchmarks.serving.measures import succeeded, vllm
from minillm.lab.benchmarks.serving.reply import Reply

NAMES = ("ttft", "tpot", "e2el")
UNITS: Mapping[str, float] = MappingProxyType({"us": 1e-6, "ms": 1e-3, "s": 1.0})
Objectives = Mapping[str, float]  # seconds, by name


def parse_slo(text: str) -> dict[str, float]:
    """Parse ``ttft=500ms,tpot=50ms``; a number without unit is in milliseconds, as in vLLM.

    Raises:
        ConfigError: a name or duration is wrong, or a name is given twice.
    """
    found: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in NAMES:
            raise ConfigError(
                f"--slo has no measure {name[:40]!r}; write objectives such as "
                f"ttft=500ms,tpot=50ms, of {', '.join(NAMES)}.{did_you_mean(name, NAMES)}"
            )
        if name in found:
            raise ConfigError(f"--slo gives {name} twice; leave one of them out.")
        found[name] = duration(name, value)
    return found


def duration(name: str, text: str) -> float:
    """Seconds of ``500ms``, ``0.5s`` or ``500``."""
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * UNITS[unit or "ms"]
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise ConfigError(
            f"--slo: {name} is {text[:40]!r}; it must be a positive time such as 500ms or 0.5s."
        )
    return value


def met(reply: Reply, objectives: Objectives) -> dict[str, bool]:
    """For each objective, whether the request met it; a request that failed met none."""
    if not succeeded(reply):
        return dict.fromkeys(objectives, False)
    values = vllm(reply)
    return {name: (values[name] or 0.0) <= most for name, most in objectives.items()}


def evaluate(replies: Sequence[Reply], objectives: Objectives, wall: float) -> dict[str, Any]:
    """JSON data: good requests, attainment over all requests, of each objective, and goodput."""
    results = [met(reply, objectives) for reply in replies]
    good = sum(
        all(one.values()) and succeeded(reply) for one, reply in zip(results, replies, strict=True)
    )
    sent = len(replies)
    return {
        "objectives": dict(objectives),
        "good": good,
        "attainment": good / sent if sent else 0.0,
        "attainment_of": {
            name: sum(one[name] for one in results) / sent if sent else 0.0 for name in objectives
        },
        "goodput": good / wall if wall > 0 else 0.0,
    }
