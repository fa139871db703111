/* All layers of a dense decoder in one call, or half a layer.
 *
 * A decode step of a small model is about 300 operations of 10 to 100 microseconds, and Python adds
 * several microseconds of overhead to each. Here weights and their order are passed once, and a
 * step passes only its batch. CUDA graphs do the same on a GPU.
 *
 * A layer has two halves, attention and MLP. With tensor parallelism (Shoeybi et al., 2019) each
 * rank has some of the heads and a part of the MLP. After each half, `x` is the rank's partial sum,
 * which the caller all-reduces before the next half.
 */
#include "common.h"

enum { ATTENTION = 1, MLP = 2 }; /* the halves of a layer */

/* Weights and KV cache of one layer; pointers that may be NULL are marked. Python fills it in, with
 * the same order of fields (`minillm/ops/cpu_layers.py`). */
typedef struct {
    const element *input_norm, *mlp_norm;
    const element *qkv, *qkv_bias;       /* panels [.., hidden]; bias: NULL */
    const element *q_norm, *k_norm;      /* NULL */
    const element *o, *o_bias;           /* bias: NULL; only one rank has it */
    const element *gate_up, *gate_up_bias;
    const element *down, *down_bias;
    element *k_cache, *v_cache;          /* [blocks, kv_heads, block_size, head_dim] */
    int64_t window;                      /* sliding window; 0: none */
} layer;

/* The common shape of all layers. */
typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, intermediate, interleaved;
    int64_t num_blocks, block_size, cache_strides[6];
    float eps, qk_eps, scale;
} shape;

/* One step: the flat batch (`minillm/ops/batch.py`), and memory for intermediate results. */
typedef struct {
    int64_t n, sequences, num_slots, columns, max_query_len;
    const float *cos, *sin;      /* [n, head_dim / 2] */
    const int64_t *slots;        /* [num_slots] */
    const int32_t *query_start, *seq_lens;
    const int64_t *tables;       /* [sequences, columns] */
    int64_t table_stride;
    element *x, *residual;       /* [n, hidden]: the embedding, later the output of a half layer */
    element *normed;             /* [n, hidden] */
    element *wide;               /* [n, (heads + 2 kv_heads) x head_dim] */
    element *narrow, *attended;  /* [n, max(heads x head_dim, intermediate)] each */
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
                         int64_t, int64_t);
int64_t decode_queries(int64_t);
int64_t prefill_attention(const element *, const element *, const element *, const int64_t *,
                          int64_t, const int32_t *, const int32_t *, const int64_t *, int64_t,
                          float, int64_t, element *, int64_t, int64_t, int64_t, int64_t, int64_t,
                          int64_t);
void panel_product(const element *, const element *, const element *, element *, int64_t, int64_t,
                   int64_t, int64_t);

static int64_t attend(const layer *l, const shape *s, const step *now) {
    int64_t d = s->head_dim;
    int64_t status = decode_attention(
        now->narrow, l->k_cache, l->v_cache, s->cache_strides, s->block_size, now->query_start,
        now->seq_lens, now->tables, now->table_stride, s->scale, l->window, now->attended,
        now->sequences, s->heads, s->kv_heads, d, d, now->n, s->num_blocks, now->columns);
    int64_t few = decode_queries(s->heads / s->kv_heads);
    if (status || now->max_query_len <= few) return status;
    return prefill_attention(now->narrow, l->k_cache, l->v_cache, s->cache_strides, s->block_size,
                             now->query_start, now->seq_lens, now->tables, now->table_stride,
                             s->scale, l->window, now->attended, now->sequences, s->heads,
                             s->kv_heads, d, d, few + 1);
}

/* residual += x; x = attention(norm(residual)). In the first layer, residual = x. */
static int64_t attention_half(const layer *l, const shape *s, const step *now, int64_t is_first) {
    int64_t n = now->n, hidden = s->hidden;
    int64_t qkv = (s->heads + 2 * s->kv_heads) * s->head_dim;
    if (is_first) {
        memcpy(now->residual, now->x, (size_t)(n * hidden) * sizeof(element));
        rms_norm(now->x, hidden, l->input_norm, now->normed, n, hidden, s->eps);
    } else {
        add_rms_norm(now->x, now->residual, l->input_norm, now->normed, now->residual, n, hidden,
                     s->eps);
    }
    panel_product(now->normed, l->qkv, l->qkv_bias, now->wide, n, hidden, qkv, 0);
    if (norm_rope_write(now->wide, l->q_norm, l->k_norm, s->qk_eps, now->cos, now->sin,
                        s->interleaved, l->k_cache, l->v_cache, s->cache_strides[0],
                        s->cache_strides[1], s->block_size, now->slots, now->num_slots, now->narrow,
                        n, s->heads, s->kv_heads, s->head_dim, s->num_blocks * s->block_size))
        return 3;
    int64_t status = attend(l, s, now);
    if (status) return status;
    panel_product(now->attended, l->o, l->o_bias, now->x, n, s->heads * s->head_dim, hidden, 0);
    return 0;
}

/* residual += x; x = MLP(norm(residual)). */
static void mlp_half(const layer *l, const shape *s, const step *now) {
    int64_t n = now->n, hidden = s->hidden;
    add_rms_norm(now->x, now->residual, l->mlp_norm, now->normed, now->residual, n, hidden, s->eps);
    panel_product(now->normed, l->gate_up, l->gate_up_bias, now->narrow, n, hidden, s->intermediate,
                  1);
    panel_product(now->narrow, l->down, l->down_bias, now->x, n, s->intermediate, hidden, 0);
}

/* Run `halves` of layers `first` to `last` - 1 on x [n, hidden]. Afterwards `x` is the output of
 * the last half and `residual` the residual stream without it. Returns 0 or an error: 1 and 2 as in
 * decode_attention, 3 if a slot is outside the cache. */
int64_t run_layers(const layer *layers, int64_t first, int64_t last, int64_t halves, const shape *s,
                   const step *now) {
    for (int64_t i = first; i < last; i++) {
        if (halves & ATTENTION) {
            int64_t status = attention_half(&layers[i], s, now, i == 0);
            if (status) return status;
        }
        if (halves & MLP) mlp_half(&layers[i], s, now);
    }
    return 0;
}
