"""e04.2: multi-head latent attention with absorbed weights. The task is in README.md."""

from torch import Tensor


def absorb(w_q: Tensor, w_uk: Tensor, w_uv: Tensor, w_o: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two matrices of each head that replace the four weight matrices.

    w_q [H, Dn, E], w_uk [H, Dn, R], w_uv [H, Dv, R], w_o [E, H * Dv]
    -> to_latent [H, R, E], from_latent [H, E, R]
    """
    raise NotImplementedError("TODO e04.2: multiply the matrices with each other")


def attend(
    hidden: Tensor,
    rotated: Tensor,
    to_latent: Tensor,
    from_latent: Tensor,
    latents: Tensor,
    shared: Tensor,
    nope_dim: int,
) -> Tensor:
    """Return causal attention over latents for the last T of S tokens, with output projection.

    hidden [T, E], rotated [T, H, Dr], latents [S, R], shared [S, Dr]; an explicit key has
    nope_dim + Dr values -> [T, E]
    """
    raise NotImplementedError("TODO e04.2: compare queries with latents, and mix latents")
