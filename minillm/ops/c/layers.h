/* Weights, shape and inputs of the layers of a decoder, and the functions that they call. */
#pragma once
#include "experts.h"
#include "int8_cache.h"
#include "latent.h"
#include "matrix.h"
#include "tails.h"

/* Weights and KV cache of one layer; pointers that may be NULL are marked. Python fills it in, with
 * the same order of fields (`minillm/ops/cpu_layers.py`). */
typedef struct {
    const element *input_norm, *mlp_norm;
    const matrix *qkv;                   /* [.., hidden]; NULL with MLA */
    const element *qkv_bias;             /* NULL */
    const element *q_norm, *k_norm;      /* NULL */
    const matrix *o;
    const element *o_bias;               /* NULL; only one rank has it */
    const matrix *gate_up;
    const element *gate_up_bias;
    const matrix *down;
    const element *down_bias;
    element *k_cache, *v_cache;          /* [blocks, kv_heads, block_size, head_dim] */
    const int8_pages *codes;             /* in place of k_cache and v_cache; NULL */
    int64_t window;                      /* sliding window; 0: none */
    const latent_weights *latent;        /* MLA in place of qkv, q_norm, k_norm; NULL */
    const expert_weights *experts;       /* in place of gate_up and down; NULL */
} layer;

/* The common shape of all layers. */
typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, intermediate, interleaved;
    int64_t num_blocks, block_size, cache_strides[6];
    float eps, qk_eps, scale;
    const latent_shape *latent;          /* NULL */
    const expert_shape *experts;         /* NULL */
} shape;

/* One step: the flat batch (`minillm/ops/batch.py`), and memory for intermediate results. */
typedef struct {
    int64_t n, sequences, num_slots, columns, max_query_len;
    const float *cos, *sin;      /* [n, head_dim / 2] */
    const int64_t *slots;        /* [num_slots] */
    const int32_t *query_start, *seq_lens;
    const int64_t *tables;       /* [sequences, columns] */
    int64_t table_stride;
    const batch_tails *tails;    /* NULL */
    element *x, *residual;       /* [n, hidden]: the embedding, later the output of a half layer */
    element *normed;             /* [n, hidden] */
    element *wide;               /* [n, (heads + 2 kv_heads) x head_dim] */
    element *narrow, *attended;  /* [n, max(heads x head_dim, intermediate)] each */
    char *memory;                /* for MLA and experts */
    element *const *taps;        /* pages for the states after i layers, NULL entries; NULL */
    int64_t tap_stride;          /* from one slot of these pages to the next */
} step;

void rms_norm(const element *, int64_t, const element *, element *, int64_t, int64_t, float);
void add_rms_norm(const element *, const element *, const element *, element *, element *, int64_t,
                  int64_t, float);
int64_t norm_rope_write(const element *, const element *, const element *, float, const float *,
                        const float *, int64_t, element *, element *, int64_t, int64_t, int64_t,
                        const int64_t *, int64_t, element *, int64_t, int64_t, int64_t, int64_t,
                        int64_t);
int64_t decode_attention(const element *, const element *, const element *, const int64_t *,
                         int64_t, const int32_t *, const int32_t *, const int64_t *, int64_t, float,
                         int64_t, element *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, const batch_tails *);
int64_t decode_queries(int64_t);
int64_t prefill_attention(const element *, const element *, const element *, const int64_t *,
                          int64_t, const int32_t *, const int32_t *, const int64_t *, int64_t,
                          float, int64_t, element *, int64_t, int64_t, int64_t, int64_t, int64_t,
                          int64_t);
int64_t latent_write(const latent_shape *, const element *, const element *, const element *,
                     const float *, const float *, int64_t, element *, int64_t, int64_t, int64_t,
                     const int64_t *, int64_t, int64_t, element *, int64_t);

/* Attention of layer `l` with heads of `d` and values of `dv` numbers: q -> out. */
int64_t attend(const layer *, const shape *, const step *, const element *q, element *out,
               int64_t kv_heads, int64_t d, int64_t dv);

/* MLA: normed -> x. Returns 0 or an error of `run_layers`. */
int64_t latent_half(const layer *, const shape *, const step *);
