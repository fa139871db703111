"""e20.1: a schedule that keeps the stages busy. The task is in README.md."""

Plan = dict[str, int]  # tokens of each request


def bubble(stages: int, chunks: int) -> float:
    """Return the share of the time in which the stages wait, for chunks of equal cost."""
    raise NotImplementedError("TODO e20.1: the last stage begins when the first chunk arrives")


def ends(stages: int, costs: list[int]) -> list[int]:
    """Return the time at which each plan leaves the last stage."""
    raise NotImplementedError(
        "TODO e20.1: a plan waits for its previous stage and for the previous plan"
    )


def next_plan(
    requests: list[tuple[str, int]], in_flight: list[Plan], stages: int, budget: int
) -> Plan:
    """Return one more plan.

    `requests` are names and how many tokens of each prompt are in no plan yet (0: decoding).
    """
    raise NotImplementedError("TODO e20.1: decoding requests first, then chunks")
