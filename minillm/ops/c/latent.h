/* Multi-head latent attention (MLA): weights and shape. Python fills both in, with the same order
 * of fields (`minillm/ops/cpu_latent.py`). */
#pragma once
#include "matrix.h"

typedef struct {
    const matrix *q_a;                        /* low-rank queries; NULL */
    const element *q_a_bias, *q_a_norm;       /* NULL */
    const matrix *q;                          /* [heads x (nope + rope), hidden or q_rank] */
    const matrix *kv_a;                       /* [rank + rope, hidden] */
    const element *kv_a_bias;                 /* NULL */
    const element *kv_a_norm;
    const element *keys;                      /* W_uk transposed: panels [heads, rank, nope] */
    const element *values;                    /* W_uv: panels [heads, v, rank] */
} latent_weights;

/* Numbers of a head: `nope` without and `rope` with rotation; `value` of a value. The cache has
 * `rank` + `rope` numbers of a token. */
typedef struct {
    int64_t heads, rank, nope, rope, value, q_rank;
    float eps; /* of the two norms */
} latent_shape;

/* Bytes of memory for `n` tokens. */
int64_t latent_memory(const latent_shape *, int64_t n);
