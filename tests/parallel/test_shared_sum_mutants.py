"""Deliberate mistakes in `shared_sum.c`, each of which a test of communicators must find.

None of them reads or writes outside the group's memory.
"""

import random
import re
import time
from collections.abc import Callable
from threading import Timer
from typing import NamedTuple

import pytest
import torch

from minillm.ops import c_library
from minillm.parallel import shared_memory
from minillm.parallel.executor import guarded
from tests.ops.test_c_mutants import QUICKLY
from tests.parallel import test_communicators as communicators
from tests.parallel.rank_groups import on_all, ordered_sum, parts_of, ranks, same_bits

PATIENCE = 10.0  # of calls in which all ranks come
F32, BF16 = torch.float32, torch.bfloat16


# ---- tests -------------------------------------------------------------------------------------


def sums(sizes: tuple[int, ...] = (3,)) -> None:
    """Of all dtypes and numbers of pieces, in both buffers."""
    for size in sizes:
        communicators.test_sums_are_ordered_and_rounded_once("shared", size)


def pairs() -> None:
    sums((4, 8))


def gathers() -> None:
    communicators.test_gathers_are_in_rank_order("shared", (3, 1025))


def often(rounds: int = 400) -> None:
    """Ranks that are now early and now late, in calls that follow each other at once."""
    size, group = 3, ranks("shared", 3, PATIENCE)
    parts = [parts_of(size, (1024,), F32, seed) for seed in range(5)]
    sums = [ordered_sum(each) for each in parts]

    def run(rank):
        chance = random.Random(rank)
        for i in range(rounds):
            if chance.random() < 0.05:
                time.sleep(0.0005)
            assert same_bits(group[rank].sum(parts[i % 5][rank].clone()), sums[i % 5]), i

    for error in on_all([lambda c=c: guarded(c, lambda: run(c.rank)) for c in group]):
        if error is not None:
            raise AssertionError("a rank got another sum") from error


def missing() -> None:
    """One rank alone."""
    group = ranks("shared", 3, 0.2)
    late = Timer(3.0, group[0].abort)  # ends a call that does not end
    late.start()
    (error,) = on_all([lambda: group[1].sum(torch.zeros(3))])
    late.cancel()
    assert str(error) == "Rank 1 of 3 waited 0.2 s for rank 0 and rank 2."


def aborted() -> None:
    """A rank that waits, and one that comes afterwards."""
    group = ranks("shared", 3, 1.0)

    def abort():
        time.sleep(0.2)
        group[2].abort()

    errors = on_all([lambda: group[0].gather(torch.zeros(3)), abort])
    errors += on_all([lambda: group[1].gather(torch.zeros(3))])
    assert ["stopped" in str(each) for each in errors] == [True, False, True]
    assert errors[1] is None
    (alone,) = ranks("shared", 1)
    alone.abort()
    assert "stopped" in str(on_all([lambda: alone.gather(torch.zeros(3))])[0])


# ---- mistakes ----------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """A pattern that the source has once, what takes its place, and who should notice."""

    pattern: str
    mistake: str
    found_by: Callable[[], None]
    element: c_library.Element = "F32"


MUTANTS = {
    "no parity": Mutant(r"\(\(call & 1\) \* g->size \+ rank\)", "rank", often),
    "no barrier": Mutant(r"found = wait_for\([^;]*;", "found = DONE;", often),
    "one call behind": Mutant(r">= call\) return DONE", ">= call - 1) return DONE", often),
    "published before it is written": Mutant(
        r"(memcpy\(part_of\(g, call, rank\), piece, bytes\);)(.*?)(found = DONE, unequal = 0;)",
        r"\2\3 nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL); \1",
        often,
    ),
    "the last rank is not waited for": Mutant(
        r"r < g->size && found == DONE", "r < g->size - 1 && found == DONE", often
    ),
    "own part first": Mutant(
        r"part_of\(g, call, r\) \+ begin", "part_of(g, call, (r + own) % g->size) + begin", sums
    ),
    "the last part is left out": Mutant(
        r"r < g->size; r\+\+\) \{\n( *)const", r"r < g->size - 1; r++) {\n\1const", sums
    ),
    "from zero": Mutant(r"\[i\] = load", "[i] = 0.f + load", sums),
    "from left to right": Mutant(
        r"\(r & 1\) && \(ranks & 2\)", "top > 0", pairs
    ),
    "subtrees are joined in the end": Mutant(r"\(r & 1\) && \(ranks & 2\)", "0", pairs),
    "the last subtree is left out": Mutant(r"last \? top > 0", "last ? 0", sums),
    "rounded after each part": Mutant(
        r"sums\[top\]\[i\] \+= load\(part\[i\]\)",
        "sums[top][i] = rounded(sums[top][i] + load(part[i]))",
        sums,
        "BF16",
    ),
    "float64": Mutant(r"float sums\[", "double sums[", sums),
    "a block is left out": Mutant(r"begin \+= BLOCK", "begin += 2 * BLOCK", sums),
    "the last piece is dropped": Mutant(r"while \(done < count\)", "while (done + most < count)",
                                        sums),
    "pieces in one place": Mutant(r"add_up\(g, call, part \+ done", "add_up(g, call, part", sums),
    "the last piece of a gather": Mutant(
        r"while \(done < bytes\)", "while (done + g->room < bytes)", gathers
    ),
    "gathered in another order": Mutant(r"r \* bytes \+ done", "(g->size - 1 - r) * bytes + done",
                                        gathers),
    "no deadline": Mutant(r"waited > patience", "0", missing),
    "who is late": Mutant(r"->calls\) < call;", "->calls) >= call;", missing),
    "abort is not seen": Mutant(
        r"if \(atomic_load\(&g->aborted\)\) return ABORTED;\n        double",
        "double", aborted
    ),
    "abort is seen only by those who wait": Mutant(
        r"if \(atomic_load\(&g->aborted\)\) return ABORTED;\n    memcpy",
        "memcpy", aborted
    ),
    "sizes are not compared": Mutant(
        r"return unequal \? UNEQUAL : found", "return found",
        communicators.test_parts_of_unequal_size_are_refused,
    ),
    "kinds are not compared": Mutant(
        r"\* 4 \+ GATHER", "* 4 + SUM", communicators.test_a_sum_does_not_meet_a_gather
    ),
}  # fmt: skip


def with_mistake(mutant, place):
    """The functions of a library of this one file, with the mistake."""
    text = (c_library.SOURCES / "shared_sum.c").read_text()
    text, count = re.subn(mutant.pattern, mutant.mistake, text, flags=re.DOTALL)
    assert count == 1, f"{mutant.pattern} is there {count} times"
    if "own)" in mutant.mistake:  # add_up is not told whose it is
        text = re.sub(r"void add_up\(group \*g,", "void add_up(group *g, int64_t own,", text)
        text = re.sub(r"add_up\(g, call, part", "add_up(g, rank, call, part", text)
    source = place / "shared_sum.c"
    source.write_text(text)
    element = f"-DELEMENT_{mutant.element}"
    command = [str(c_library.find_compiler()), *c_library.FLAGS, f"-I{c_library.SOURCES}"]
    c_library.build([*command, QUICKLY, element], [source], place / "mutant.so")
    return c_library.load(place / "mutant.so")


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, tmp_path, monkeypatch):
    mutant, right = MUTANTS[name], shared_memory.functions
    mutant.found_by()
    wrong = with_mistake(mutant, tmp_path)
    dtype = {"F32": F32, "BF16": BF16}[mutant.element]
    monkeypatch.setattr(
        shared_memory, "functions", lambda each=F32: wrong if each == dtype else right(each)
    )
    with pytest.raises(AssertionError):
        mutant.found_by()
