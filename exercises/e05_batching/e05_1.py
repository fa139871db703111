"""e05.1: prompts of different lengths in one rectangle. The task is in README.md."""


class Batch:
    """Texts of different lengths in rows of equal length, filled up with pads on the left.

    ``mask[b][q][k]``: the token in slot q of row b may see the one in slot k.
    """

    ids: list[list[int]]  # [B][S]
    positions: list[list[int]]  # [B][S]
    mask: list[list[list[bool]]]  # [B][S][S]

    def __init__(self, prompts: list[list[int]], pad: int) -> None:
        """One row per prompt, as long as the longest of them."""
        raise NotImplementedError("TODO e05.1: pads on the left, positions of the text, the mask")

    def append(self, tokens: list[int | None]) -> None:
        """One more slot: each row's next token, or a pad where the row has ended (None)."""
        raise NotImplementedError("TODO e05.1: one more slot in every row of all three tables")

    def wasted(self) -> tuple[int, int]:
        """How many slots hold a pad, and how many slots there are."""
        raise NotImplementedError("TODO e05.1: count the slots that hold no text")
