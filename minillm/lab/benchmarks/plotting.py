"""What the plots of all commands share: formats, colours (Okabe and Ito), markers and a check."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.lab.drawings.figure import need

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vP*X"
STYLE: Mapping[str, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "svg.hashsalt": "minillm",
}  # fmt: skip


def check_plot(name: str | None) -> None:
    """Reject a file name or a missing matplotlib before the benchmark starts."""
    if name is None:
        return
    if Path(name).suffix not in FORMATS:
        raise ConfigError(f"--plot is {name!r}; its name must end in {', '.join(FORMATS)}.")
    need("matplotlib.pyplot", "--plot needs matplotlib")
