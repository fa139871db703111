"""Every start that fits, and a maximum that begins with the first number."""


def window_sums(numbers: list[int], size: int) -> list[int]:
    """Sum every `size` neighbours."""
    starts = range(len(numbers) - size + 1)
    return [sum(numbers[start : start + size]) for start in starts]


class Meter:
    """Remembers the largest number it was shown."""

    def __init__(self) -> None:
        self.largest: int | None = None

    def show(self, number: int) -> int:
        """Return the largest number so far."""
        if self.largest is None or number > self.largest:
            self.largest = number
        return self.largest
