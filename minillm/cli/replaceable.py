"""Which existing files a command may write over."""

from pathlib import Path

from minillm.errors import TraceFileError

TRACE_START = b'{"minillm_trace":'


def check_replaceable(path: Path, start: bytes, what: str) -> None:
    """Reject a path whose existing file does not begin with `start`: it is another file."""
    try:
        if not path.parent.is_dir():
            raise TraceFileError(f"{str(path)!r} cannot be written: there is no such folder.")
        if path.is_dir():
            raise TraceFileError(f"{str(path)!r} is a folder; give the name of a file.")
        if path.exists():
            with path.open("rb") as file:
                if file.read(len(start)) not in (start, b""):
                    raise TraceFileError(
                        f"{str(path)!r} exists and is {what}; give another name, or delete it."
                    )
    except OSError as error:
        raise TraceFileError(f"{str(path)!r} cannot be used: {error.strerror}.") from error
