"""e04.2: multi-head latent attention with absorbed weights. The task is in README.md."""

from torch import Tensor


def absorb(w_q: Tensor, w_uk: Tensor, w_uv: Tensor, w_o: Tensor) -> tuple[Tensor, Tensor]:
    """What leads from a hidden vector into the space of latents, and back: made once.

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
    """Causal attention of the last T of S tokens over latents alone, output projection included.

    hidden [T, E], rotated [T, H, Dr], latents [S, R], shared [S, Dr]; an explicit key has
    nope_dim + Dr numbers -> [T, E]
    """
    raise NotImplementedError("TODO e04.2: compare queries with latents, and mix latents")
