"""Deliberate mistakes in `sample.c`, each of which a test in `test_c_sampling` must find.

None of them reads or writes far outside: that would end this process, not fail a test.
"""

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch

from minillm.ops import c_library
from tests.ops import test_c_sampling as sampling
from tests.ops.c_variants import built
from tests.ops.test_c_mutants import build_with

same_tokens = partial(sampling.test_the_tokens_are_torch_s, dtype=torch.float32, size=1003)
bf16 = partial(sampling.test_the_best_is_argmax_and_amax, dtype=torch.bfloat16, size=129)
far_below = partial(sampling.test_no_bound_is_too_low, by=1e-4)
shards = partial(sampling.test_shards_choose_what_the_whole_row_chooses, size=200)
logprobs = partial(
    sampling.test_logprobs_are_those_of_float64, dtype=torch.float32, size=1003, top=5
)
broken = partial(
    sampling.test_what_is_not_finite_fails_its_row_only,
    dtype=torch.float32, value=sampling.NAN, place=64,
)  # fmt: skip
masked = partial(sampling.test_minus_infinity_is_never_chosen_where_another_is_finite, size=65)


def edited(c):
    for size in (2, 1003):
        sampling.test_masks_need_no_copies_of_logits(c, torch.bfloat16, size)


WORDS = sampling.test_the_words_are_philox
TIES = sampling.test_ties_at_the_edge
TRUNCATION = sampling.test_random_truncation_is_torch_s
WIDE = sampling.test_a_nucleus_of_thousands_of_tokens_is_torch_s
EXACT = sampling.test_masses_that_end_exactly_at_the_goal
BITS = sampling.test_the_noise_has_torch_s_bits
EQUALS = sampling.test_of_equal_sums_the_lowest_id

MUTANTS = {  # a pattern that the source has once, what takes its place, who should notice
    "one round less": (r"round < 10", "round < 9", WORDS),
    "a wrong multiplier": (r"0xCD9E8D57u", "0xCD9E8D59u", WORDS),
    "a wrong step of the key": (r"k1 \+= 0xBB67AE85u", "k1 += 0x9E3779B9u", WORDS),
    "the upper half of the seed": (r"\(uint64_t\)q->seed >> 32", "0", WORDS),
    "the sample is forgotten": (r"c2 = \(uint32_t\)q->sample_index", "c2 = 0", WORDS),
    "all blocks have the first's words": (
        r"\(uint32_t\)\(block \* \(", "(uint32_t)(0 * (", WORDS
    ),
    "noise in float32": (
        r"\(float\)-log\(-log1p\(-\(double\)u\)\)", "-logf(-log1pf(-u))", BITS
    ),
    "no half is added": (r"\(\(float\)word \+ 0\.5f\)", "((float)word + 1.5f)", BITS),
    "the least of the largest noise": (r"MOST_NOISE 22\.875f", "MOST_NOISE 10.f", far_below),
    "a bound of the noise that is too low": (r"1e-3f - 0\.69", "-1e-1f - 0.69", far_below),
    "the last of equal sums": (r"id < \*token", "id > *token", EQUALS),
    "the first block wins ties": (r" \|\| \(sum == \*total && id < \*token\)", "", EQUALS),
    "a block is left out": (r"i == first \|\|", "i == first + 1 ||", same_tokens),
    "temperature": (r" / r->temperature;", ";", same_tokens),
    "min-p is strict": (r"s < r->floor", "s <= r->floor", same_tokens),
    "what is removed is drawn": (
        r"!\(most\[i\] >= \*total\) \|\| s\[i\] < r->edge \|\| \(.*\)\) continue;",
        "!(most[i] >= *total)) continue;",
        TRUNCATION,
    ),
    "all ties stay": (r"id > r->last", "0", TIES),
    "one tie more": (
        r"if \(before >= goal\) return last;", "if (before > goal) return last;", EXACT
    ),
    "the edge is one further": (r"above \+ more >= goal", "above + more > goal", TRUNCATION),
    "top-p of everything after top-k": (
        r"\(cut \? total_weight\(l\) : total_mass\(r\)\)", "total_mass(r)", TRUNCATION
    ),
    "never a second look": (r"if \(!cut && total_weight\(l\) < goal\)", "if (0)", WIDE),
    "what was left above is forgotten": (r"above \+= equal;", "", TRUNCATION),
    "fewer blocks than tokens": (
        r"if \(r->blocks < count\) return", "if (0) return", TRUNCATION
    ),
    "bf16 is the lower half": (r"\(uint32_t\)x << 16", "(uint32_t)x << 15", bf16),
    "the last of equals": (r"if \(top > best\)", "if (top >= best)", bf16),
    "NaN is overlooked": (r"nan \? NAN : best", "best", broken),
    "padding is a token": (
        r"memory\[i\] = -INFINITY;", "memory[i] = 0;", masked
    ),
    "bits of the first half": (r"bits\[i / 32\]", "bits[0]", edited),
    "what is allowed is excluded": (r"\? x\[i\] : excluded", "? excluded : x[i]", edited),
    "NaN is excluded": (r"x\[i\] <= FLT_MAX \? -INFINITY : NAN", "-INFINITY", edited),
    "the last bytes of a mask": (r"\(count \+ 7\) / 8", "count / 8", edited),
    "noise by the place in the shard": (r"r->before \+ block", "block", shards),
    "the best of the shard": (r"r\.best = c->best\[i\]", "r.best += 0 * c->best[i]", shards),
    "the noise alone": (r"total = peak \+ noise", "total = noise", shards),
    "min-p of the whole only": (r"floor = q\.floor;\n(?= +for .*\n +c->tokens\[i\] = draw)",
                                      "floor = -INFINITY;\n", shards),
    "ranks of ties": (r"\? ranks\[j\] : j \+ 1", "? j + 1 : j + 1", logprobs),
    "the normaliser": (r"- r->best - normaliser", "- r->best", logprobs),
    "rank of the target": (r"count \+= x\[i\] > logit", "count += x[i] >= logit", logprobs),
}  # fmt: skip


@cache
def passes_without_a_mistake(test: Callable[[c_library.Library], None]) -> None:
    """So what fails below is the mistake. Once for all mistakes that the same test finds."""
    test(built("native", "F32"))


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, tmp_path):
    pattern, mistake, found_by = MUTANTS[name]
    passes_without_a_mistake(found_by)
    # Outside: a pattern that is not there is no finding.
    file = build_with(("sample.c",), pattern, mistake, ["-DELEMENT_F32"], tmp_path)
    wrong = c_library.load(file)
    with pytest.raises(AssertionError):
        found_by(wrong)
