/* All layers of a decoder in one call, or half a layer.
 *
 * A decode step of a small model is about 300 operations of 10 to 100 microseconds, and Python adds
 * several microseconds of overhead to each. Here weights and their order are passed once, and a
 * step passes only its batch. CUDA graphs do the same on a GPU.
 *
 * A layer has two halves: attention (here, or MLA in latent.c), and an MLP (here, or experts in
 * experts.c). With tensor parallelism (Shoeybi et al., 2019) each
 * rank has some of the heads and a part of the MLP. After each half, `x` is the rank's partial sum,
 * which the caller all-reduces before the next half.
 */
#include "layers.h"

enum { ATTENTION = 1, MLP = 2 }; /* the halves of a layer */

int64_t attend(const layer *l, const shape *s, const step *now, const element *q, element *out,
               int64_t kv_heads, int64_t d, int64_t dv) {
    if (l->codes)
        return int8_attention(q, l->codes, now->query_start, now->seq_lens, now->tables,
                              now->table_stride, s->scale, l->window, out, now->sequences, s->heads,
                              kv_heads, d, now->n, now->columns, now->tails);
    int64_t status = decode_attention(
        q, l->k_cache, l->v_cache, s->cache_strides, s->block_size, now->query_start, now->seq_lens,
        now->tables, now->table_stride, s->scale, l->window, out, now->sequences, s->heads,
        kv_heads, d, dv, now->n, s->num_blocks, now->columns, now->tails);
    int64_t few = decode_queries(s->heads / kv_heads);
    if (status || now->max_query_len <= few) return status;
    return prefill_attention(q, l->k_cache, l->v_cache, s->cache_strides, s->block_size,
                             now->query_start, now->seq_lens, now->tables, now->table_stride,
                             s->scale, l->window, out, now->sequences, s->heads, kv_heads, d, dv,
                             few + 1);
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
    if (l->latent) return latent_half(l, s, now);
    if (product_of(now->normed, l->qkv, l->qkv_bias, now->wide, n, hidden, qkv, 0)) return 1;
    if (l->codes
            ? norm_rope_write_int8(now->wide, l->q_norm, l->k_norm, s->qk_eps, now->cos, now->sin,
                                   s->interleaved, l->codes, now->slots, now->num_slots,
                                   now->narrow, n, s->heads, s->kv_heads, s->head_dim)
            : norm_rope_write(now->wide, l->q_norm, l->k_norm, s->qk_eps, now->cos, now->sin,
                              s->interleaved, l->k_cache, l->v_cache, s->cache_strides[0],
                              s->cache_strides[1], s->block_size, now->slots, now->num_slots,
                              now->narrow, n, s->heads, s->kv_heads, s->head_dim,
                              s->num_blocks * s->block_size))
        return 3;
    int64_t status = attend(l, s, now, now->narrow, now->attended, s->kv_heads, s->head_dim,
                            s->head_dim);
    if (status) return status;
    return product_of(now->attended, l->o, l->o_bias, now->x, n, s->heads * s->head_dim, hidden, 0);
}

/* residual += x; x = MLP(norm(residual)). */
static int64_t mlp_half(const layer *l, const shape *s, const step *now) {
    int64_t n = now->n, hidden = s->hidden;
    add_rms_norm(now->x, now->residual, l->mlp_norm, now->normed, now->residual, n, hidden, s->eps);
    if (l->experts) {
        moe_half(l->experts, s->experts, now->normed, now->x, n, now->memory);
        return 0;
    }
    int64_t inner = s->intermediate;
    if (product_of(now->normed, l->gate_up, l->gate_up_bias, now->narrow, n, hidden, inner, 1))
        return 1;
    return product_of(now->narrow, l->down, l->down_bias, now->x, n, inner, hidden, 0);
}

/* Copy the residual stream to the slots of `pages`. */
static void store_tap(element *pages, const shape *s, const step *now) {
    for (int64_t row = 0; row < now->n && row < now->num_slots; row++)
        if (now->slots[row] >= 0)
            memcpy(pages + now->slots[row] * now->tap_stride, now->residual + row * s->hidden,
                   (size_t)s->hidden * sizeof(element));
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
            if (now->taps && now->taps[i]) store_tap(now->taps[i], s, now);
        }
        if (halves & MLP && mlp_half(&layers[i], s, now)) return 1;
    }
    return 0;
}
