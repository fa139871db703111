"""e04: programs that strangers wrote, right and wrong ones, and what the checks say of them."""

import pytest
from submissions import Graded, failed, said

EXERCISES = ("e04.1", "e04.2")  # for the fixture `graded`


BY_HEAD = """
import torch

def grouped_attention(queries, keys, values):
    T, H, D = queries.shape
    S, K, Dv = values.shape
    out = torch.empty(T, H, Dv, dtype=queries.dtype)
    for t in range(T):
        seen = slice(0, S - T + t + 1)
        for h in range(H):
            shared = HEAD
            weights = torch.softmax(keys[seen, shared] @ queries[t, h] / D**0.5, 0)
            out[t, h] = weights @ values[seen, shared]
    return out
"""
REPEATED = """
import torch

def grouped_attention(queries, keys, values):
    T, H, D = queries.shape
    S, K, Dv = values.shape
    keys, values = COPIES
    scores = torch.einsum("thd,shd->hts", queries, keys) / D**0.5
    scores = scores.masked_fill(torch.ones(T, S).tril(S - T) == 0, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values)
"""
COPIES = {
    "repeat": "(x.repeat_interleave(H // K, dim=1) for x in (keys, values))",
    "index": "(x[:, torch.arange(H) // (H // K)] for x in (keys, values))",
    "reshape": "(x[:, :, None].expand(S, K, H // K, -1).reshape(S, H, -1) for x in (keys, values))",
    "stack": "(torch.stack([x[:, h // (H // K)] for h in range(H)], 1) for x in (keys, values))",
}
BROADCAST = """
import torch

def grouped_attention(queries, keys, values):
    T, H, D = queries.shape
    S, K, Dv = values.shape
    rows = queries.view(T, K, H // K, D).permute(1, 2, 0, 3)
    scores = rows @ keys.permute(1, 2, 0).unsqueeze(1) / D**0.5
    scores = scores.masked_fill(torch.ones(T, S).triu(S - T + 1) > 0, -torch.inf)
    out = scores.softmax(-1) @ values.transpose(0, 1).unsqueeze(1)
    return out.permute(2, 0, 1, 3).reshape(T, H, Dv)
"""


def test_one_head_and_one_query_at_a_time_is_right(graded: Graded) -> None:
    assert graded("e04.1", source=BY_HEAD.replace("HEAD", "h // (H // K)")).status == "pass"


def test_the_heads_of_a_loop_dealt_out_in_turn_are_told(graded: Graded) -> None:
    verdict = graded("e04.1", source=BY_HEAD.replace("HEAD", "h % K"))
    assert verdict.mutant == "heads_dealt_out"
    assert "expected 2 at [0, 1, 0], got 20" in said(verdict)
    assert not {"test_no_groups", "test_one_head"} & set(failed(verdict))


@pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)
def test_a_copy_for_every_query_head_is_seen_however_it_is_made(
    graded: Graded, copies: str
) -> None:
    verdict = graded("e04.1", source=REPEATED.replace("COPIES", copies))
    assert failed(verdict) == ["test_copies"]
    assert "has 16,384 elements; the keys have 4,096" in said(verdict)
    assert "every key-value head 4 times over" in said(verdict)
    assert verdict.mutant == "repeats_heads"


def test_a_product_that_broadcasts_is_told_that_torch_copies_for_it(graded: Graded) -> None:
    verdict = graded("e04.1", source=BROADCAST)
    assert failed(verdict) == ["test_copies"]
    assert "a matrix product did it" in said(verdict)
    assert verdict.mutant == "broadcasts"


def test_a_float32_result_is_told_where_it_may_come_from(graded: Graded) -> None:
    source = BY_HEAD.replace("HEAD", "h // (H // K)").replace(", dtype=queries.dtype", "")
    assert "is torch.float32 unless you say dtype=queries.dtype" in said(
        graded("e04.1", source=source)
    )


ATTEND = """
import torch

def absorb(w_q, w_uk, w_uv, w_o):
    heads, width, _ = w_uv.shape
    columns = [w_o[:, h * width : (h + 1) * width] for h in range(heads)]
    return w_uk.mT @ w_q, torch.stack([c @ uv for c, uv in zip(columns, w_uv)])

def attend(hidden, rotated, to_latent, from_latent, latents, shared, nope_dim):
    out = torch.zeros_like(hidden)
    for t in range(len(hidden)):
        seen = slice(0, len(latents) - len(hidden) + t + 1)
        for h in range(len(to_latent)):
            query, turned = to_latent[h] @ hidden[t], rotated[t, h]
            scores = SCORES
            weights = torch.softmax(scores / (nope_dim + shared.shape[1]) ** 0.5, 0)
            out[t] += OUTPUT
    return out
"""
SCORES = "latents[seen] @ query + shared[seen] @ turned"
OUTPUT = "from_latent[h] @ (weights @ latents[seen])"


def attending(scores: str = SCORES, output: str = OUTPUT) -> str:
    return ATTEND.replace("SCORES", scores).replace("OUTPUT", output)


def test_one_head_and_one_query_over_latents_is_right(graded: Graded) -> None:
    assert graded("e04.2", source=attending()).status == "pass"


@pytest.mark.parametrize(
    "program",
    [
        attending("(latents[seen] @ to_latent[h]) @ hidden[t] + shared[seen] @ turned"),
        attending(output="weights @ (latents[seen] @ from_latent[h].T)"),
    ],
    ids=["keys", "values"],
)
def test_a_latent_that_is_multiplied_is_counted_also_one_head_at_a_time(
    graded: Graded, program: str
) -> None:
    verdict = graded("e04.2", source=program)
    assert failed(verdict) == ["test_lean"]
    assert "and 31,744 are needed. What is multiplied by a matrix once for each" in said(verdict)


def test_work_that_no_product_does_is_not_taken_for_saved(graded: Graded) -> None:
    by_hand = "(latents[seen] * query).sum(1) + (shared[seen] * turned).sum(1)"
    verdict = graded("e04.2", source=attending(by_hand))
    assert failed(verdict) == ["test_lean"]
    assert "Write products as matrix products" in said(verdict)


def test_a_width_that_absorb_kept_is_that_of_another_layer(graded: Graded) -> None:
    swap = ("to_latent, torch.einsum(", "to_latent, KEPT.append(w_uk) or torch.einsum(")
    use = ("scores = scores / (nope_dim + rope_dim) ** 0.5",
           "scores = scores / (KEPT[-1].shape[1] + rope_dim) ** 0.5")  # fmt: skip
    start = ("def absorb", "KEPT = []\n\n\ndef absorb")
    assert "test_width" in failed(graded("e04.2", *swap, *use, *start))


OTHER_WORDS = [
    ("e04.1", ("key_dim**0.5", "values.shape[-1] ** 0.5"), "scale_of_values"),
    ("e04.1", ("torch.arange(length - tokens, length)", "torch.arange(0, tokens)"), "upper_left"),
    ("e04.1", ("torch.arange(length) >", "torch.arange(1, length + 1) >"), "not_itself"),
    ("e04.1", ("/ key_dim**0.5", "* key_dim**-1"), "scale_by_dim"),
    ("e04.2", ("(nope_dim + rope_dim) ** 0.5", "to_latent.shape[1] ** 0.5"), None),
    ("e04.2", ("(nope_dim + rope_dim)", "(from_latent.shape[2] + shared.shape[1])"),
     "latent_width"),
    ("e04.2", ("(nope_dim + rope_dim)", "nope_dim"), "nope_width"),
    ("e04.2", ('"thp,sp->ths", rotated,', '"htp,sp->ths", rotated.view(-1, tokens, rope_dim),'),
     "rope_heads_mixed"),
    ("e04.2", ('"hdr,hde->hre", w_uk, w_q', '"hdr,hde->hre", w_uv, w_q'), "swapped"),
    ("e04.2", ("scores + torch.einsum(\"thp,sp->ths\", rotated, shared)", "1 * scores"), "no_rope"),
]  # fmt: skip


@pytest.mark.parametrize(("exercise_id", "swap", "mutant"), OTHER_WORDS)
def test_a_mistake_in_other_words_is_named(
    graded: Graded, exercise_id: str, swap: tuple[str, ...], mutant: str | None
) -> None:
    verdict = graded(exercise_id, *swap)
    assert verdict.status == "fail"
    assert verdict.mutant == (mutant or "")


YES = "class Yes(torch.Tensor):\n    pass\n\n\ndef "


@pytest.mark.parametrize(
    ("exercise_id", "old", "new"),
    [
        ("e04.1", "return out.reshape(tokens, heads, dim)",
         "return out.reshape(tokens, heads, dim).as_subclass(Yes)"),
        ("e04.2", "return torch.einsum(\"thr,her->te\", mixed, from_latent)",
         "return torch.einsum(\"thr,her->te\", mixed, from_latent).as_subclass(Yes)"),
    ],
)  # fmt: skip
def test_a_tensor_of_ones_own_kind_is_refused(
    graded: Graded, exercise_id: str, old: str, new: str
) -> None:
    name = "grouped_attention" if exercise_id == "e04.1" else "attend"
    verdict = graded(exercise_id, old, new, f"def {name}", f"{YES}{name}")
    assert "which is a kind of Tensor of your own; return a plain Tensor" in said(verdict)
    assert verdict.status == "fail"
