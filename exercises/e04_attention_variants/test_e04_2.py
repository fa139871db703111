"""The public checks of e04.2: latents against explicit keys and values, in float64."""

import random
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from minillm_exercises.checking import accept, check, close, describe, expect, seeds, tensor
from minillm_exercises.counting import Counts, banned_calls, counting


@dataclass(frozen=True)
class Sizes:
    """Heads, hidden numbers, and the widths of a head's key, its rotation, its value, a latent."""

    heads: int
    hidden: int
    nope: int
    rope: int
    value: int
    latent: int

    def __str__(self) -> str:
        return (
            f"H={self.heads}, E={self.hidden}, Dn={self.nope}, Dr={self.rope}, Dv={self.value}, "
            f"R={self.latent}"
        )


PLAIN = Sizes(heads=3, hidden=7, nope=4, rope=2, value=4, latent=5)


@dataclass(frozen=True)
class Layer:
    """The four matrices of a layer, as the README lists them, and what they make of one another."""

    w_q: Tensor
    w_uk: Tensor
    w_uv: Tensor
    w_o: Tensor

    @classmethod
    def random(cls, seed: int, sizes: Sizes) -> "Layer":
        """Matrices of random numbers in float64."""
        heads, hidden = sizes.heads, sizes.hidden
        shapes = (
            (heads, sizes.nope, hidden),
            (heads, sizes.nope, sizes.latent),
            (heads, sizes.value, sizes.latent),
            (hidden, heads * sizes.value),
        )
        return cls(*(tensor(seed + 7 * n, *shape).double() for n, shape in enumerate(shapes)))

    def to_latent(self) -> Tensor:
        """[H, R, E], head by head."""
        return torch.stack([uk.T @ q for uk, q in zip(self.w_uk, self.w_q, strict=True)])

    def from_latent(self) -> Tensor:
        """[H, E, R], head by head."""
        columns = self.w_o.split(self.w_uv.shape[1], dim=1)
        return torch.stack([o @ uv for o, uv in zip(columns, self.w_uv, strict=True)])


@dataclass(frozen=True)
class Step:
    """T tokens that attend, and the S cached ones that they are the last of; all in float64."""

    hidden: Tensor
    rotated: Tensor
    latents: Tensor
    shared: Tensor

    @classmethod
    def random(cls, seed: int, tokens: int, length: int, sizes: Sizes) -> "Step":
        """Tokens of random numbers."""
        shapes = (
            (tokens, sizes.hidden),
            (tokens, sizes.heads, sizes.rope),
            (length, sizes.latent),
            (length, sizes.rope),
        )
        return cls(*(tensor(seed + 7 * n, *shape).double() for n, shape in enumerate(shapes)))

    def __str__(self) -> str:
        return f"T={len(self.hidden)}, S={len(self.latents)}"


def explicit(layer: Layer, step: Step) -> Tensor:
    """What the layer must give [T, E]: every head with keys and values of its own."""
    first, width = len(step.latents) - len(step.hidden), layer.w_q.shape[1] + step.shared.shape[1]
    outputs = []
    for head in range(len(layer.w_q)):
        keys = torch.cat((step.latents @ layer.w_uk[head].T, step.shared), dim=1)
        values = step.latents @ layer.w_uv[head].T
        queries = torch.cat((step.hidden @ layer.w_q[head].T, step.rotated[:, head]), dim=1)
        rows = []
        for row, query in enumerate(queries):
            seen = slice(0, first + row + 1)
            rows.append((keys[seen] @ query / width**0.5).softmax(0) @ values[seen])
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, dim=1) @ layer.w_o.T


def agree(got: Any, want: Tensor, what: str, case: str) -> None:
    """`got` is a float64 tensor equal to `want`; NaN and other types get a sentence."""
    about = f"{what} ({case}): "
    if type(got) is Tensor and got.dtype == torch.float64:
        expect(
            not got.isnan().any(),
            f"{about}there is NaN in it, which is what a softmax over no position at all gives. "
            f"Each query sees the positions up to its own, and its own too.",
            ("NaN", tuple(got.shape)) if got.isnan().any() else "numbers",
        )
    elif type(got) is Tensor:
        expect(
            False,
            f"{about}it is {got.dtype}, and all tensors here are torch.float64. One that you make "
            f"yourself is torch.float32 unless you say dtype=hidden.dtype.",
            str(got.dtype),
        )
    elif type(got) in (list, tuple, float, int):
        kind = type(got).__name__
        expect(False, f"{about}got a {kind}, not a Tensor.", kind)
    close(got, want, what, case, rtol=1e-9, atol=1e-9)
    expect(type(got) is Tensor, f"{about}got {describe(got)}; return a plain Tensor.")


def absorbed(impl: Any, layer: Layer, case: str) -> Any:
    """The two matrices that the submission makes of a layer."""
    names = [field.name for field in fields(layer)]
    given = [value.clone() for value in vars(layer).values()]
    got = accept(impl.absorb(*given), "absorb", case)
    kept(names, given, list(vars(layer).values()), f"absorb ({case})")
    two = type(got) in (tuple, list) and len(got) == 2
    expect(two, f"absorb ({case}): return two tensors, to_latent and from_latent.", str(type(got)))
    return got


def attended(impl: Any, matrices: Any, step: Step, nope: int) -> tuple[Any, Counts]:
    """What `attend` gives with these absorbed matrices, and what was counted meanwhile."""
    parts = [step.hidden, step.rotated, *matrices, step.latents, step.shared]
    names = ["hidden", "rotated", "to_latent", "from_latent", "latents", "shared"]
    given = [part.clone() for part in parts]
    with banned_calls("scaled_dot_product_attention"), counting() as counts:
        got = impl.attend(*given, nope)
    kept(names, given, parts, f"attend ({step})")
    return got, counts


def kept(names: list[str], given: list[Tensor], before: list[Tensor], case: str) -> None:
    """What was given to a function is as it was."""
    pairs = zip(names, given, before, strict=True)
    changed = [name for name, now, then in pairs if not torch.equal(now, then)]
    expect(
        not changed,
        f"{case}: {', '.join(changed)} has changed. Does your function compute in place (*=, /=, a "
        f"function whose name ends in _)? Make new tensors.",
        changed,
    )


def follow(impl: Any, layer: Layer, step: Step, what: str, sizes: Sizes = PLAIN) -> None:
    """`attend` with matrices that are right, against the explicit form."""
    got, _ = attended(impl, (layer.to_latent(), layer.from_latent()), step, sizes.nope)
    agree(got, explicit(layer, step), what, f"{step}, {sizes}")


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Two tokens of equal scores, half of it from the rotated part."""
    w_q, w_uk, w_uv = (
        torch.tensor(numbers).double()[None, :, None] for numbers in ([1, 2, 3], [1, 0, 1], [1, 2])
    )
    layer = Layer(w_q, w_uk, w_uv, torch.tensor([[3.0, 1.0]]).double())
    to_latent, from_latent = absorbed(impl, layer, "the example")
    four, five = (torch.full((1, 1, 1), number).double() for number in (4.0, 5.0))
    agree(to_latent, four, "The worked example: to_latent", "1 * 1 + 0 * 2 + 1 * 3")
    agree(from_latent, five, "The worked example: from_latent", "3 * 1 + 1 * 2")
    two = torch.tensor([[1.0, 2.0], [3.0, -2.0]]).double()
    step = Step(four[0] / 4, four / 2, two[:, :1], two[:, 1:])
    got, _ = attended(impl, (four, five), step, 3)
    agree(got, 2 * five[0], "The worked example: the output", "c = 1, 3, shared = 2, -2")


@check(2, "to_latent, from the queries' matrix")
def test_to_latent(impl: Any) -> None:
    """The scores of a head with latents are those with its explicit keys."""
    layer = Layer.random(10, PLAIN)
    to_latent, _ = absorbed(impl, layer, str(PLAIN))
    agree(to_latent, layer.to_latent(), "to_latent [H, R, E]", str(PLAIN))


@check(2, "from_latent, from the output projection")
def test_from_latent(impl: Any) -> None:
    """Each head's columns of w_o, and its values' matrix."""
    layer = Layer.random(20, PLAIN)
    _, from_latent = absorbed(impl, layer, str(PLAIN))
    agree(from_latent, layer.from_latent(), "from_latent [H, E, R]", str(PLAIN))


@check(2, "One query")
def test_decode(impl: Any) -> None:
    """A step of decoding, and a first token."""
    follow(impl, Layer.random(30, PLAIN), Step.random(35, 1, 6, PLAIN), "One query")
    follow(impl, Layer.random(40, PLAIN), Step.random(45, 1, 1, PLAIN), "A first token")


@check(2, "A whole prompt, and several queries after others")
def test_several(impl: Any) -> None:
    """T = S, and T < S."""
    follow(impl, Layer.random(50, PLAIN), Step.random(55, 5, 5, PLAIN), "A prompt")
    for tokens, length in ((2, 5), (4, 9)):
        step = Step.random(60 + tokens, tokens, length, PLAIN)
        follow(impl, Layer.random(65, PLAIN), step, "Several queries after earlier positions")


@check(2, "Only the latents, only the rotated parts")
def test_parts(impl: Any) -> None:
    """One of the two parts of a score is 0."""
    layer, step = Layer.random(70, PLAIN), Step.random(75, 1, 6, PLAIN)
    still = replace(step, rotated=torch.zeros_like(step.rotated))
    follow(impl, layer, still, "Rotated queries that are all 0")
    silent = replace(layer, w_uk=torch.zeros_like(layer.w_uk))
    follow(impl, silent, step, "Matrices w_uk that are all 0, so that only rotation tells")


@check(2, "The width under the root")
def test_width(impl: Any) -> None:
    """Dn, Dr and R far from each other."""
    for number, (nope, rope, latent) in enumerate(((2, 3, 20), (24, 1, 3), (3, 12, 4))):
        sizes = replace(PLAIN, nope=nope, rope=rope, latent=latent)
        layer, step = Layer.random(80 + number, sizes), Step.random(90 + number, 1, 5, sizes)
        halves = replace(layer, w_q=layer.w_q / (nope * latent) ** 0.5)
        follow(impl, halves, step, "Widths far from each other", sizes)


LONG = Sizes(heads=4, hidden=16, nope=10, rope=4, value=10, latent=12)


@check(3, "No key or value is made of a cached latent")
def test_lean(impl: Any) -> None:
    """One query and 128 cached tokens: elements and operations."""
    layer, step = Layer.random(100, LONG), Step.random(105, 1, 128, LONG)
    matrices = (layer.to_latent(), layer.from_latent())
    got, counts = attended(impl, matrices, step, LONG.nope)
    case = f"{step}, {LONG}"
    shape = tuple(got.shape) if type(got) is Tensor else describe(got)
    expect(shape == (1, 16), f"attend ({case}): expected shape (1, 16), got {shape}.", shape)
    cached = len(step.latents) * (LONG.latent + LONG.rope)
    expect(
        counts.max_new <= cached,
        f"attend ({case}): the largest tensor you make has {counts.max_new:,} elements; the whole "
        f"cache has {cached:,}. Are there keys or values of every head in it, or latents that were "
        f"multiplied by a matrix? Multiply the query before, and what came out behind.",
        "large" if counts.max_new > cached else "small",
    )
    least = flops(1, 128, LONG)
    expect(
        counts.flops <= least * 5 // 4,
        f"attend ({case}): your matrix products take {counts.flops:,} operations, and {least:,} "
        f"are needed. What is multiplied by a matrix once for each cached token that could be "
        f"multiplied once for the query, or for the sum that comes out?",
        "many" if counts.flops > least * 5 // 4 else "few",
    )
    expect(
        counts.flops >= least,
        f"attend ({case}): your matrix products take {counts.flops:,} operations, and the task "
        f"takes {least:,}. Write products as matrix products (@, einsum, matmul), so that they can "
        f"be counted, and leave none of them out.",
        "uncounted" if counts.flops < least else "counted",
    )


def flops(tokens: int, length: int, sizes: Sizes) -> int:
    """Operations of the absorbed form: into the latent space, scores, mixture, and back."""
    there_and_back = 2 * sizes.hidden * sizes.latent
    pairs = length * (2 * sizes.latent + sizes.rope)
    return 2 * tokens * sizes.heads * (there_and_back + pairs)


@check(3, "Twelve random layers, from the weights to the output")
def test_everything(impl: Any) -> None:
    """Random sizes; the submission's own matrices."""
    for seed in seeds(12):
        draw = random.Random(seed)
        sizes = Sizes(*(draw.randint(1, 6) for _ in range(6)))
        length = draw.randint(1, 7)
        layer = Layer.random(seed, sizes)
        step = Step.random(seed + 1, draw.randint(1, length), length, sizes)
        matrices = absorbed(impl, layer, str(sizes))
        got, _ = attended(impl, matrices, step, sizes.nope)
        agree(got, explicit(layer, step), "absorb, then attend", f"{step}, {sizes}")
