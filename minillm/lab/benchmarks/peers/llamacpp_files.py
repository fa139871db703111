"""Has llama.cpp quantise a GGUF file, once."""

import ctypes
import os
from pathlib import Path


def gguf_file(plain: Path, kind: str | None) -> tuple[Path, bool]:
    """The file, quantised as `kind` or as it is, and whether this call made it."""
    wanted = plain if kind is None else plain.with_suffix(f".{kind}.gguf")
    if wanted.exists():
        return wanted, False
    part = wanted.with_suffix(f".{os.getpid()}")
    quantise(plain, part, str(kind))
    part.rename(wanted)
    return wanted, True


def quantise(source: Path, target: Path, kind: str) -> None:
    """Quantise a file with llama.cpp's own mixture of types."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    paths = str(source).encode(), str(target).encode()
    if code := llama_cpp.llama_model_quantize(*paths, ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp could not quantise {source} to {kind} (code {code}).")
