"""Load balance of experts over ranks, before and after experts are placed by load (`enable_eplb`).

Tokens choose random experts with Zipf-distributed popularity (exponent 0.8). The choices of some
steps are counted, experts are placed by these counts, and the rows of each rank are counted in the
following steps.
"""

from typing import Any

import torch
from torch import Tensor

from minillm.cli.terminal import Terminal
from minillm.parallel.placement import Placement, first_placement, place

EXPERTS, PER_TOKEN, RANKS, EXPONENT = 256, 8, 8, 0.8  # as many experts as DeepSeek-V3
SPARES = (0, 8, 16)
BATCHES = (8, 64, 512)
STEPS = 200  # steps that are counted, and as many that are measured


def measure(num_steps: int = STEPS) -> list[dict[str, Any]]:
    """The balance (mean over largest number of rows of a rank) for each batch and number of
    redundant experts, before and after the placement."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(EXPERTS, generator=generator)
    popularity = -EXPONENT * torch.log(1.0 + order)

    def steps(batch: int) -> Tensor:
        """[steps, batch, k]"""
        noise = -torch.empty(num_steps, batch, EXPERTS).exponential_(generator=generator).log()
        return (popularity + noise).topk(PER_TOKEN).indices

    rows = []
    for batch in BATCHES:
        counted, measured = steps(batch), steps(batch)
        loads = torch.bincount(counted.flatten(), minlength=EXPERTS).tolist()
        for spares in SPARES:
            placements = first_placement(EXPERTS, RANKS), place(loads, RANKS, spares)
            before, after = (balance(each, measured) for each in placements)
            rows.append({"batch": batch, "spares": spares, "before": before, "after": after})
    return rows


def balance(placement: Placement, steps: Tensor) -> float:
    """Mean over steps [steps, batch, k] of the balance: mean over largest number of rows of a
    rank."""
    found = 0.0
    for chosen in steps.tolist():
        rows = [0] * len(placement.slots)
        for row, experts in enumerate(chosen):
            for expert in experts:
                rows[placement.copy_of(expert, row)[0]] += 1
        found += sum(rows) / len(rows) / max(rows)
    return found / len(steps)


def show(rows: list[dict[str, Any]], terminal: Terminal) -> None:
    """Print a row for each batch."""
    terminal.heading("Experts placed by load: mean / largest number of rows of a rank")
    table = []
    for batch in BATCHES:
        mine = [row for row in rows if row["batch"] == batch]
        table.append([str(batch), f"{mine[0]['before']:.2f}", *(f"{r['after']:.2f}" for r in mine)])
    columns = ["tokens", "in index order", *(f"by load, {spares} spares" for spares in SPARES)]
    terminal.table(columns, table)
    terminal.paragraph(
        f"{EXPERTS} experts on {RANKS} ranks, {PER_TOKEN} for each token; popularity follows a "
        f"Zipf distribution with exponent {EXPONENT:g}. Rows were counted in the steps after the "
        "placement. 1 is perfect balance."
    )
