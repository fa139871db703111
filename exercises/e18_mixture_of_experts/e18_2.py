"""e18.2: copies for popular experts. The task is in README.md."""


def copies(loads: list[int], spares: int) -> list[int]:
    """How many copies each expert has: one, and the spares where they help most."""
    raise NotImplementedError("TODO e18.2: each spare to the largest load per copy")


def pack(loads: list[int], counts: list[int], gpus: int) -> list[list[int]]:
    """For each GPU the experts whose copies it holds, equally many on each."""
    raise NotImplementedError("TODO e18.2: the largest first, to the GPU with the least")


def send(chosen: list[int], placement: list[list[int]]) -> list[int]:
    """The GPU of each row: an expert's rows take its copies in turn."""
    raise NotImplementedError("TODO e18.2: count the rows of each expert")


def balance(rows: list[int], gpus: int) -> float:
    """Mean over largest number of rows of a GPU."""
    raise NotImplementedError("TODO e18.2: mean divided by largest")
