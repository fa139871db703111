"""e20.1: a schedule that keeps the stages busy. The task is in README.md."""

Plan = dict[str, int]  # tokens of each request


def bubble(stages: int, chunks: int) -> float:
    """The share of the time in which stages wait, for equal chunks through empty stages."""
    raise NotImplementedError("TODO e20.1: the last stage begins when the first chunk arrives")


def ends(stages: int, costs: list[int]) -> list[int]:
    """When each plan has left the last stage."""
    raise NotImplementedError("TODO e20.1: a plan waits for itself and for the plan before it")


def next_plan(
    requests: list[tuple[str, int]], in_flight: list[Plan], stages: int, budget: int
) -> Plan:
    """One more plan.

    `requests` are names and how much of each prompt is in no plan yet, 0 for those that decode.
    """
    raise NotImplementedError("TODO e20.1: first those that decode, then chunks")
