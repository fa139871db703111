"""Whether `quantization_config` and the tensors of the files agree.

The tensors decide how a matrix is read. Settings that contradict them are a sign of a wrong
config.json or of mixed folders: settings for files without any codes are refused, a tensor that no
matrix reads is refused with the reason, and lists of unquantised modules that are wrong are logged.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from minillm.errors import CheckpointError
from minillm.layers.linear import Embedding
from minillm.layers.linear_methods import PLAIN, Matrix
from minillm.layers.moe import Router
from minillm.quantization.formats import Format, Headers, setting

logger = logging.getLogger(__name__)

LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
SUFFIX = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|SCB|weight_(format|scale|scale_inv|packed|shape|zero_point|"
    r"g_idx|global_scale)|weight\.(absmax|quant_map|nested_\w+|quant_state\.\w+))$"
)
OUTPUT = "lm_head"


def check_settings(format: Format, matrices: Iterable[Matrix]) -> None:
    """Compare the settings with all matrices of a model.

    Raises:
        CheckpointError: the settings promise codes, and all matrices are plain.
    """
    plain: dict[str, bool] = {}  # of the matrices inside layers, and of a quantised output matrix
    optional = set()  # matrices that quantisers leave out without saying so
    for matrix in matrices:
        for part in matrix.parts:
            plain[part.name] = format.is_plain(part)
            if isinstance(matrix, Router | Embedding) or part.name == OUTPUT:
                optional.add(part.name)
    if all(plain.values()) and format.promises_codes:
        raise CheckpointError(
            f"quantization_config says {format.describe()}, but no matrix of the files is "
            "quantised; remove quantization_config from config.json, or fetch the quantised files."
        )
    listed = unquantised_modules(format.settings)
    report(
        [name for name, each in plain.items() if not each and is_listed(name, listed)],
        "quantised in the files, but quantization_config lists them as not quantised",
    )
    if listed and not format.settings.get("modules_in_block_to_quantize"):
        report(
            [n for n, each in plain.items() if each and n not in optional | loosely(n, listed)],
            "not quantised in the files, but quantization_config does not list them so",
        )


def check_unquantised(names: Iterable[str]) -> None:
    """Check that a checkpoint without `quantization_config` has no codes or scales.

    Raises:
        CheckpointError: it has one.
    """
    for name in names:
        if SUFFIX.search(name):
            raise CheckpointError(
                f"The files have the quantised tensor {name}, but config.json has no "
                "quantization_config; fetch the config.json of the quantised model."
            )


def report(names: list[str], contradiction: str) -> None:
    """Log a contradiction, if there is one."""
    if names:
        more = f" and {len(names) - 1} more" * (len(names) > 1)
        logger.warning("%s%s: %s; the files decide.", names[0], more, contradiction)


def unquantised_modules(settings: Mapping[str, Any]) -> list[str]:
    """The modules that the settings list as not quantised: names, parts of names, or expressions
    that begin with "re:"."""
    entries = [str(entry) for name in LISTS for entry in setting(settings, name, list, [])]
    rules = setting(settings, "dynamic", dict, {})
    return entries + [f"re:{rule[2:]}" for rule in rules if rule.startswith("-:")]


def is_listed(name: str, listed: Iterable[str]) -> bool:
    """Whether an entry is the name of a module, some of its whole components, or an expression
    for it."""
    return any(
        matches(entry[3:], name) if entry.startswith("re:") else f".{entry}." in f".{name}."
        for entry in listed
    )


def loosely(name: str, listed: Iterable[str]) -> set[str]:
    """The name if an entry is any part of it, as some writers compare: "gate" and "gate_proj"."""
    return {name} if is_listed(name, listed) or any(entry in name for entry in listed) else set()


def matches(expression: str, name: str) -> bool:
    """Whether an expression matches the beginning of a name. Raises CheckpointError if it is not
    valid."""
    try:
        return re.match(expression, name) is not None
    except re.error as error:
        raise CheckpointError(
            f"quantization_config lists {expression!r}, which is no regular expression: {error}."
        ) from error


def leftover(name: str, format: Format | None, headers: Headers, tied: bool) -> str | None:
    """Why no matrix reads a tensor of a quantised checkpoint; None if the model decides that."""
    form = SUFFIX.search(name)
    if format is not None and tied and name.startswith(f"{OUTPUT}."):
        return (
            "config.json ties the output matrix to the embedding; set tie_word_embeddings to false"
        )
    if form is None or format is None:
        return None
    stem = name[: form.start()]
    weight = headers.get(f"{stem}.weight")
    if weight is not None and weight.dtype in PLAIN:
        return f"{stem}.weight is not quantised, so one of the two is left from another file"
    return f"{format.describe()} does not use it"
