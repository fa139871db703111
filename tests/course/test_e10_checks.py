"""e10: programs that strangers wrote, right and wrong ones, and what the checks say of them."""

import pytest
from submissions import Graded, failed, said

EXERCISES = ("e10.1", "e10.2")  # for the fixture `graded`


# As it stands in most articles: a tensor each, and no thought of what is masked or empty.
ARTICLE = """
import torch

class OnlineSoftmax:
    def __init__(self, dim):
        self.m = torch.tensor(BEGIN, dtype=torch.float64)
        self.l = torch.tensor(0.0, dtype=torch.float64)
        self.o = torch.zeros(dim, dtype=torch.float64)

    def update(self, scores, values):
        m = torch.cat((self.m[None], scores)).max()
        self.add(m, self.m, (scores - m).exp().sum(), (scores - m).exp() @ values)

    def merge(self, other):
        m = torch.maximum(self.m, other.m)
        theirs = torch.exp(other.m - m)
        self.add(m, self.m, other.l * theirs, other.o * theirs)

    def add(self, m, old, l, o):
        self.l = self.l * torch.exp(old - m) + l
        self.o = self.o * torch.exp(old - m) + o
        self.m = m

    def result(self):
        return RESULT

    def log_sum_exp(self):
        return self.m + self.l.log()
"""
GUARDED = "self.o / self.l if self.l > 0 else torch.zeros_like(self.o)"
STORED = """
import math
import torch

class OnlineSoftmax:
    def __init__(self, dim):
        self.dim, self.seen = dim, []

    def update(self, scores, values):
        self.seen.extend(zip(scores.tolist(), values.tolist()))

    def merge(self, other):
        self.seen = self.seen + other.seen

    def log_sum_exp(self):
        top = max((score for score, _ in self.seen), default=-math.inf)
        if top == -math.inf:
            return top
        return top + math.log(sum(math.exp(score - top) for score, _ in self.seen))

    def result(self):
        out, lse = torch.zeros(self.dim, dtype=torch.float64), self.log_sum_exp()
        for score, value in self.seen if lse > -math.inf else ():
            out = out + math.exp(score - lse) * torch.tensor(value, dtype=torch.float64)
        return out
"""


def test_a_finite_number_in_the_place_of_minus_infinity_is_right(graded: Graded) -> None:
    source = ARTICLE.replace("BEGIN", "-1e308").replace("RESULT", GUARDED)
    assert graded("e10.1", source=source).status == "pass"


def test_the_article_is_told_what_it_never_thought_of(graded: Graded) -> None:
    source = ARTICLE.replace("BEGIN", "-torch.inf").replace("RESULT", "self.o / self.l")
    verdict = graded("e10.1", source=source)
    assert verdict.mutant == "no_guard"
    assert "update([-inf, -inf]), update([1, 2])" in said(verdict)
    assert not {"test_by_hand", "test_chunks", "test_large", "test_merge"} & set(failed(verdict))


def test_whoever_keeps_everything_has_the_right_numbers_and_is_told(graded: Graded) -> None:
    verdict = graded("e10.1", source=STORED)
    assert failed(verdict) == ["test_state"]
    assert "after 6 positions and 1201 after 300" in said(verdict)
    assert verdict.mutant == "hoards"


def test_what_is_kept_in_slots_is_found_too(graded: Graded) -> None:
    slots = "class OnlineSoftmax:\n    __slots__ = ('dim', 'seen')\n"
    verdict = graded("e10.1", source=STORED.replace("class OnlineSoftmax:\n", slots))
    assert failed(verdict) == ["test_state"]


TILES = """
import torch

def tiled_attention(queries, keys, values, block_q, block_k, window=None):
    T, D = queries.shape
    S, Dv = values.shape
    window = T + S if window is None else window
    out = torch.zeros(T, Dv, dtype=queries.dtype)
    lse = torch.full((T,), -torch.inf, dtype=queries.dtype)
    for i in range(0, T, block_q):
        q = queries[i : i + block_q] / D**0.5
        at = torch.arange(i, i + len(q))[:, None] + S - T
        m = torch.full((len(q), 1), -torch.inf, dtype=q.dtype)
        l, o = torch.zeros_like(m), torch.zeros(len(q), Dv, dtype=q.dtype)
        for j in range(FIRST, S, block_k):
            if SKIP:
                continue
            k, v = keys[j : j + block_k], values[j : j + block_k]
            where = torch.arange(j, j + len(k))
            s = torch.where((where <= at) & (where > at - window), q @ k.T, -torch.inf)
            new = torch.maximum(m, s.amax(1, keepdim=True))
            zero = BASE
            p, c = torch.exp(s - zero), torch.exp(m - zero)
            l, o, m = l * c + p.sum(1, keepdim=True), o * c + p @ v, new
        out[i : i + block_q] = DIVIDED
        lse[i : i + block_q] = (m + l.log())[:, 0]
    return out, lse
"""
RIGHT = {
    "FIRST": "0",
    "SKIP": "j > at[-1] or j + block_k <= at[0] - window + 1",
    "BASE": "torch.where(new == -torch.inf, 0, new)",
    "DIVIDED": "o / l.clamp(min=1e-300)",
}


def tiles(**changes: str) -> str:
    text = TILES
    for name, code in (RIGHT | changes).items():
        text = text.replace(name, code)
    return text


def test_tiles_that_begin_where_they_like_are_right(graded: Graded) -> None:
    assert graded("e10.2", source=tiles()).status == "pass"
    first = "max(0, int(at[0]) - window + 1)"
    assert graded("e10.2", source=tiles(FIRST=first, SKIP="j > at[-1]")).status == "pass"


@pytest.mark.parametrize(
    ("changes", "mutant", "where"),
    [
        ({"BASE": "new", "DIVIDED": "o / l"}, "no_guard", "test_window"),
        ({"BASE": "new"}, "masked_is_nan", "test_window"),
        ({"DIVIDED": "o / l"}, "nothing_is_divided", "test_blind"),
        ({"SKIP": "j + block_k <= at[0] - window + 1"}, "all_tiles", "test_tiles"),
        ({"SKIP": "j > at[-1]"}, "behind_the_window", "test_tiles"),
        ({"SKIP": "j > at[0] or j + block_k <= at[0] - window + 1"}, "diagonal_left_out", ""),
    ],
)
def test_what_a_program_of_tiles_forgot_is_named(
    graded: Graded, changes: dict[str, str], mutant: str, where: str
) -> None:
    verdict = graded("e10.2", source=tiles(**changes))
    assert verdict.mutant == mutant
    assert not where or where in failed(verdict)


ROW_BY_ROW = """
import torch

def tiled_attention(queries, keys, values, block_q, block_k, window=None):
    T, S = len(queries), len(keys)
    out = torch.zeros(T, values.shape[1], dtype=queries.dtype)
    lse = torch.full((T,), -torch.inf, dtype=queries.dtype)
    for row in range(max(0, T - S), T):
        last = S - T + row
        seen = slice(0 if window is None else max(0, last - window + 1), last + 1)
        scores = keys[seen] @ queries[row] / keys.shape[1] ** 0.5
        weights = (scores - scores.max()).exp()
        out[row] = weights @ values[seen] / weights.sum()
        lse[row] = scores.max() + weights.sum().log()
    return out, lse
"""
WHOLE = """
import torch

def tiled_attention(queries, keys, values, block_q, block_k, window=None):
    T, S = len(queries), len(keys)
    distance = torch.arange(T)[:, None] + S - T - torch.arange(S)
    seen = (distance >= 0) & (distance < (window or T + S))
    scores = (queries @ keys.T / keys.shape[1] ** 0.5).masked_fill(~seen, -torch.inf)
    top = scores.amax(1, keepdim=True).clamp(min=-1e300)
    weights = (scores - top).exp()
    total = weights.sum(1, keepdim=True)
    return weights @ values / total.clamp(min=1e-300), (top + total.log())[:, 0]
"""


def test_a_row_at_a_time_is_no_tile(graded: Graded) -> None:
    verdict = graded("e10.2", source=ROW_BY_ROW)
    assert failed(verdict) == ["test_elements"]
    assert "the largest tensor you make has 96 elements" in said(verdict)


def test_the_whole_matrix_is_right_and_neither_small_nor_short(graded: Graded) -> None:
    verdict = graded("e10.2", source=WHOLE)
    assert failed(verdict) == ["test_elements", "test_tiles"]
    assert "has 3,072 elements" in said(verdict)


OTHER_WORDS = [
    ("e10.1", ("self.total *= fade", "self.total = self.total + 0.0"), "sum_not_rescaled"),
    ("e10.1", ("self.mixed = self.mixed * fade", "fade = 1.0"), "values_not_rescaled"),
    ("e10.1", ("theirs = math.exp(other.top - base)", "theirs = math.exp(0)"),
     "merge_keeps_theirs"),
    ("e10.1", ("self.top = -math.inf", "self.top = 0.0"), "maximum_from_zero"),
    ("e10.1", ("self.top + math.log(self.total)", "math.log(self.total)"), "lse_without_maximum"),
    ("e10.2", ("/ keys.shape[1] ** 0.5", "/ values.shape[-1] ** 0.5"), "scale_of_values"),
    ("e10.2", ("(key <= position - window)", "(position - key > window)"), "window_one_more"),
    ("e10.2", ("total = total * fade", "total = total * 1.0"), "sum_not_rescaled"),
    ("e10.2", ("offset = len(keys), len(keys) - len(queries)", "offset = len(keys), 0"),
     "upper_left"),
    ("e10.2", ("(top + total.log())", "total.log()"), "lse_of_the_sum"),
]  # fmt: skip


@pytest.mark.parametrize(("exercise_id", "swap", "mutant"), OTHER_WORDS)
def test_a_mistake_in_other_words_is_named(
    graded: Graded, exercise_id: str, swap: tuple[str, ...], mutant: str
) -> None:
    assert graded(exercise_id, *swap).mutant == mutant


def test_ready_made_functions_are_refused_by_line(graded: Graded) -> None:
    whole = "return outputs, sums"
    for call in ("queries.softmax(1)", "torch.logsumexp(queries, 1)"):
        verdict = graded("e10.2", whole, f"outputs = outputs + 0 * {call}.sum()\n    {whole}")
        assert verdict.status == "refused"
        assert "does what e10.2 asks for: the exercise is to build it yourself" in verdict.message


YES = "class Yes(torch.Tensor):\n    pass\n\n\n"


@pytest.mark.parametrize(
    ("exercise_id", "old", "new", "place"),
    [
        ("e10.1", "else self.mixed / self.total",
         "else (self.mixed / self.total).as_subclass(Yes)", "class OnlineSoftmax"),
        ("e10.2", "return outputs, sums", "return outputs.as_subclass(Yes), sums",
         "def tiled_attention"),
    ],
)  # fmt: skip
def test_a_tensor_of_ones_own_kind_is_refused(
    graded: Graded, exercise_id: str, old: str, new: str, place: str
) -> None:
    verdict = graded(exercise_id, old, new, place, f"{YES}{place}")
    assert "which is a kind of Tensor of your own; return a plain Tensor" in said(verdict)
    assert verdict.status == "fail"
