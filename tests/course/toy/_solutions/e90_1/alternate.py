"""A sum that slides, and a list of everything seen."""


def window_sums(numbers, size):
    sums = [sum(numbers[:size])]
    for new, old in zip(numbers[size:], numbers, strict=False):
        sums.append(sums[-1] + new - old)
    return sums


class Meter:
    def __init__(self):
        self.seen = []

    def show(self, number):
        self.seen.append(number)
        return max(self.seen)
