"""e18.2: copies for popular experts. The task is in README.md."""


def copies(loads: list[int], spares: int) -> list[int]:
    """Return the number of copies of each expert: one, and its spares."""
    raise NotImplementedError("TODO e18.2: each spare to the largest load per copy")


def pack(loads: list[int], counts: list[int], gpus: int) -> list[list[int]]:
    """Return for each GPU the experts whose copies it holds, equally many on each."""
    raise NotImplementedError(
        "TODO e18.2: the largest copy first, to the GPU with the smallest load"
    )


def send(chosen: list[int], placement: list[list[int]]) -> list[int]:
    """Return the GPU of each row: the rows of an expert go to its copies in turn."""
    raise NotImplementedError("TODO e18.2: count the rows of each expert")


def balance(rows: list[int], gpus: int) -> float:
    """Return the mean number of rows per GPU divided by the largest."""
    raise NotImplementedError("TODO e18.2: mean divided by largest")
