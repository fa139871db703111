"""e05.1: a rectangle of prompts with pads. The task is in README.md."""


class Batch:
    """Texts of different lengths in rows of equal length, with pads on the left.

    ``mask[b][q][k]`` says whether slot q of row b sees slot k.
    """

    ids: list[list[int]]  # [B][S]
    positions: list[list[int]]  # [B][S]
    mask: list[list[list[bool]]]  # [B][S][S]

    def __init__(self, prompts: list[list[int]], pad: int) -> None:
        """Make one row per prompt, as long as the longest prompt."""
        raise NotImplementedError("TODO e05.1: pads on the left, positions of the text, the mask")

    def append(self, tokens: list[int | None]) -> None:
        """Add one slot: the next token of each row, or a pad if the row has ended (None)."""
        raise NotImplementedError("TODO e05.1: add one slot to every row of all three tables")

    def wasted(self) -> tuple[int, int]:
        """Return the number of slots that hold a pad, and the number of all slots."""
        raise NotImplementedError("TODO e05.1: count the slots that hold no text")
