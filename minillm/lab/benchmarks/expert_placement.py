"""How evenly tokens lie on ranks before and after experts are placed by load (`enable_eplb`).

Tokens choose at random and prefer some experts, by Zipf's law of exponent 0.8. Choices of some
steps are counted, experts are placed by them, and the rows of each rank are counted in the steps
that follow.
"""

from typing import Any

import torch
from torch import Tensor

from minillm.cli.terminal import Terminal
from minillm.parallel.placement import Placement, first_placement, place

EXPERTS, PER_TOKEN, RANKS, EXPONENT = 256, 8, 8, 0.8  # as many experts as DeepSeek-V3
SPARES = (0, 8, 16)
BATCHES = (8, 64, 512)
STEPS = 200  # that are counted, and as many that are measured


def measure(num_steps: int = STEPS) -> list[dict[str, Any]]:
    """Mean over largest number of rows of a rank in a step: for each batch and number of redundant
    experts, before and after the placement."""
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
    """The mean over steps [steps, batch, k] of mean over largest number of rows of a rank."""
    found = 0.0
    for chosen in steps.tolist():
        rows = [0] * len(placement.slots)
        for row, experts in enumerate(chosen):
            for expert in experts:
                rows[placement.copy_of(expert, row)[0]] += 1
        found += sum(rows) / len(rows) / max(rows)
    return found / len(steps)


def show(rows: list[dict[str, Any]], terminal: Terminal) -> None:
    """A line for each batch."""
    terminal.heading("Experts placed by load: mean over largest number of rows of a rank")
    table = []
    for batch in BATCHES:
        mine = [row for row in rows if row["batch"] == batch]
        table.append([str(batch), f"{mine[0]['before']:.2f}", *(f"{r['after']:.2f}" for r in mine)])
    columns = ["tokens", "in their order", *(f"by load, {spares} spares" for spares in SPARES)]
    terminal.table(columns, table)
    terminal.paragraph(
        f"{EXPERTS} experts on {RANKS} ranks, {PER_TOKEN} for each token, popular by Zipf's law of "
        f"exponent {EXPONENT:g}. Rows were counted in the steps that follow a placement."
    )
