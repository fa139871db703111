/* Operations on rows: norms, the MLP's gate, and the steps between QKV projection and attention.
 * Each is one pass over memory; torch needs a call and a pass for each step.
 *
 * Threads divide the rows, never a single row, so the result of a row depends only on that row.
 */
#include <stdatomic.h>
#include "int8_cache.h"
#include "latent.h"
#include "threads.h"

static inline float sum_of_squares(const element *restrict x, int64_t d) {
    float lanes[16] = {0}; /* one sum per vector lane: fixes the order of additions */
    int64_t i = 0;
    for (; i + 16 <= d; i += 16)
        for (int j = 0; j < 16; j++) {
            float f = load(x[i + j]);
            lanes[j] += f * f;
        }
    for (; i < d; i++) lanes[0] += load(x[i]) * load(x[i]);
    float sum = 0;
    for (int j = 0; j < 16; j++) sum += lanes[j];
    return sum;
}

static inline void norm_row(const element *x, const element *weight, element *out, int64_t d,
                            float eps) {
    float scale = 1.f / sqrtf(sum_of_squares(x, d) / (float)d + eps);
    for (int64_t i = 0; i < d; i++) out[i] = store(load(x[i]) * scale * load(weight[i]));
}

/* Rows to be normalised: the arguments of `rms_norm` and `add_rms_norm`. */
typedef struct {
    const element *x, *residual, *weight;
    element *out, *sum;
    int64_t stride, d;
    float eps;
} norms;

static void norm_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const norms *c = context;
    for (int64_t row = begin; row < end; row++)
        norm_row(c->x + row * c->stride, c->weight, c->out + row * c->d, c->d, c->eps);
    (void)thread;
}

/* RMSNorm (Zhang and Sennrich, 2019): rows [n, d], `stride` elements apart, -> out [n, d]. */
void rms_norm(const element *x, int64_t stride, const element *weight, element *out, int64_t n,
              int64_t d, float eps) {
    norms all = {x, 0, weight, out, 0, stride, d, eps};
    divide_job(n, n * d / 4, norm_rows, &all);
}

static void add_and_norm_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const norms *c = context;
    int64_t d = c->d;
    for (int64_t row = begin; row < end; row++) {
        const element *a = c->x + row * d, *b = c->residual + row * d;
        element *s = c->sum + row * d;
        INDEPENDENT
        for (int64_t i = 0; i < d; i++) s[i] = store(load(a[i]) + load(b[i]));
        norm_row(s, c->weight, c->out + row * d, d, c->eps);
    }
    (void)thread;
}

/* sum = x + residual, rounded to the element type; out = norm(sum). All are [n, d]; `sum` may be
 * the same memory as `residual`. */
void add_rms_norm(const element *x, const element *residual, const element *weight, element *out,
                  element *sum, int64_t n, int64_t d, float eps) {
    norms all = {x, residual, weight, out, sum, d, d, eps};
    divide_job(n, n * d / 4, add_and_norm_rows, &all);
}

/* Gates to be applied: the arguments of `silu_mul`. */
typedef struct {
    const element *gate_up;
    element *out;
    int64_t size;
} gates;

static void gate_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const gates *c = context;
    for (int64_t row = begin; row < end; row++) {
        const element *gate = c->gate_up + row * 2 * c->size, *up = gate + c->size;
        element *restrict o = c->out + row * c->size;
        for (int64_t i = 0; i < c->size; i++)
            o[i] = store(rounded(silu(load(gate[i]))) * load(up[i]));
    }
    (void)thread;
}

/* SwiGLU's gate (Shazeer, 2020): [n, 2 size] -> silu(first half) * second half, [n, size]. */
void silu_mul(const element *gate_up, element *out, int64_t n, int64_t size) {
    gates all = {gate_up, out, size};
    divide_job(n, n * size, gate_rows, &all);
}

/* Rotary embedding (Su et al., 2021) of one head in float32. A pair is (i, i + d/2), or
 * (2i, 2i + 1) if `interleaved`; the output always has the first layout. */
static inline void rotate_head(const float *restrict x, const float *restrict cos,
                               const float *restrict sin, element *restrict out, int64_t d,
                               int interleaved) {
    int64_t half = d / 2;
    if (interleaved)
        for (int64_t i = 0; i < half; i++) {
            out[i] = store(x[2 * i] * cos[i] - x[2 * i + 1] * sin[i]);
            out[i + half] = store(x[2 * i + 1] * cos[i] + x[2 * i] * sin[i]);
        }
    else
        for (int64_t i = 0; i < half; i++) {
            out[i] = store(x[i] * cos[i] - x[i + half] * sin[i]);
            out[i + half] = store(x[i + half] * cos[i] + x[i] * sin[i]);
        }
}

/* Angles of the rotary embedding: cos and sin [n, half] of positions x frequencies, times `factor`.
 * On one thread: torch starts several even for one position, and they take cores from ours. */
void cos_sin(const int64_t *positions, const float *frequencies, float factor, float *cos,
             float *sin, int64_t n, int64_t half) {
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)positions[row] * frequencies[i];
            cos[row * half + i] = cosf(angle) * factor;
            sin[row * half + i] = sinf(angle) * factor;
        }
}

/* A head of q or k: norm if there is a weight (QK norm), then RoPE. */
static inline void norm_and_rotate(const element *x, const element *weight, float eps,
                                   const float *cos, const float *sin, element *out, int64_t d,
                                   int interleaved) {
    float head[MOST_HEAD_DIM];
    if (weight) {
        float scale = 1.f / sqrtf(sum_of_squares(x, d) / (float)d + eps);
        for (int64_t i = 0; i < d; i++) head[i] = rounded(load(x[i]) * scale * load(weight[i]));
    } else {
        for (int64_t i = 0; i < d; i++) head[i] = load(x[i]);
    }
    rotate_head(head, cos, sin, out, d, interleaved);
}

/* The arguments of `norm_rope_write`. */
typedef struct {
    const element *qkv, *q_weight, *k_weight;
    const float *cos, *sin;
    element *k_cache, *v_cache, *q_out;
    const int8_pages *codes; /* in place of k_cache and v_cache */
    const int64_t *slots;
    int64_t block_stride, head_stride, block_size, num_slots, all_slots;
    int64_t heads, kv_heads, d;
    float eps;
    int interleaved;
    _Atomic int64_t wrong; /* slots outside the cache */
} projections;

static void write_tokens(void *context, int64_t begin, int64_t end, int64_t thread) {
    projections *p = context;
    int64_t heads = p->heads, kv_heads = p->kv_heads, d = p->d;
    for (int64_t token = begin; token < end; token++) {
        const element *x = p->qkv + token * (heads + 2 * kv_heads) * d;
        const float *c = p->cos + token * (d / 2), *s = p->sin + token * (d / 2);
        for (int64_t h = 0; h < heads; h++)
            norm_and_rotate(x + h * d, p->q_weight, p->eps, c, s,
                            p->q_out + (token * heads + h) * d, d, p->interleaved);
        int64_t slot = token < p->num_slots ? p->slots[token] : -1;
        if (slot >= p->all_slots) p->wrong++;
        if (slot < 0 || slot >= p->all_slots) continue;
        int64_t at = slot / p->block_size * p->block_stride + slot % p->block_size * d;
        for (int64_t h = 0; h < kv_heads; h++, at += p->head_stride) {
            const element *k = x + (heads + h) * d, *v = k + kv_heads * d;
            if (p->codes) {
                element key[MOST_HEAD_DIM];
                norm_and_rotate(k, p->k_weight, p->eps, c, s, key, d, p->interleaved);
                store_codes(p->codes, slot, h, kv_heads, key, v, d);
                continue;
            }
            norm_and_rotate(k, p->k_weight, p->eps, c, s, p->k_cache + at, d, p->interleaved);
            memcpy(p->v_cache + at, v, (size_t)d * sizeof(element));
        }
    }
    (void)thread;
}

/* QK norm and RoPE; write keys and values to the cache.
 *
 *   qkv [n, heads + 2 kv_heads, d]      q, k and v of each token
 *   cos, sin [n, d / 2]                 float32
 *   k_cache, v_cache                    [blocks, kv_heads, block_size, d], strides in elements
 *   slots [num_slots]                   block * block_size + offset; negative: not cached;
 *                                       rows from num_slots on are padding
 *   q_out [n, heads, d]
 *
 * Returns the number of slots outside the cache, which are skipped.
 */
int64_t norm_rope_write(const element *qkv, const element *q_weight, const element *k_weight,
                        float eps, const float *cos, const float *sin, int64_t interleaved,
                        element *k_cache, element *v_cache, int64_t block_stride,
                        int64_t head_stride, int64_t block_size, const int64_t *slots,
                        int64_t num_slots, element *q_out, int64_t n, int64_t heads,
                        int64_t kv_heads, int64_t d, int64_t all_slots) {
    projections all = {
        .qkv = qkv,
        .q_weight = q_weight,
        .k_weight = k_weight,
        .cos = cos,
        .sin = sin,
        .k_cache = k_cache,
        .v_cache = v_cache,
        .q_out = q_out,
        .slots = slots,
        .block_stride = block_stride,
        .head_stride = head_stride,
        .block_size = block_size,
        .num_slots = num_slots,
        .all_slots = all_slots,
        .heads = heads,
        .kv_heads = kv_heads,
        .d = d,
        .eps = eps,
        .interleaved = (int)interleaved,
    };
    divide_job(n, n * (heads + 2 * kv_heads) * d / 2, write_tokens, &all);
    return all.wrong;
}

/* The same for a cache of codes. */
int64_t norm_rope_write_int8(const element *qkv, const element *q_weight, const element *k_weight,
                             float eps, const float *cos, const float *sin, int64_t interleaved,
                             const int8_pages *codes, const int64_t *slots, int64_t num_slots,
                             element *q_out, int64_t n, int64_t heads, int64_t kv_heads,
                             int64_t d) {
    projections all = {
        .qkv = qkv,
        .q_weight = q_weight,
        .k_weight = k_weight,
        .cos = cos,
        .sin = sin,
        .codes = codes,
        .q_out = q_out,
        .slots = slots,
        .block_size = codes->block_size,
        .num_slots = num_slots,
        .all_slots = codes->num_blocks * codes->block_size,
        .heads = heads,
        .kv_heads = kv_heads,
        .d = d,
        .eps = eps,
        .interleaved = (int)interleaved,
    };
    divide_job(n, n * (heads + 4 * kv_heads) * d / 2, write_tokens, &all);
    return all.wrong;
}

/* The arguments of `latent_write`. */
typedef struct {
    const latent_shape *shape;
    const element *q, *kv, *weight;
    const float *cos, *sin;
    int interleaved;
    element *cache, *query;
    int64_t block_stride, row_stride, block_size, num_slots, all_slots;
    const int64_t *slots;
} latent_rows;

/* Tokens `begin` to `end` - 1 of `latent_write`. */
static void write_latents(void *context, int64_t begin, int64_t end, int64_t thread) {
    const latent_rows *w = context;
    const latent_shape *s = w->shape;
    int64_t from = s->nope + s->rope, to = s->rank + s->rope, half = s->rope / 2;
    (void)thread;
    for (int64_t token = begin; token < end; token++) {
        const float *cos = w->cos + token * half, *sin = w->sin + token * half;
        for (int64_t h = token * s->heads; h < (token + 1) * s->heads; h++)
            norm_and_rotate(w->q + h * from + s->nope, 0, 0, cos, sin, w->query + h * to + s->rank,
                            s->rope, w->interleaved);
        int64_t slot = token < w->num_slots ? w->slots[token] : -1;
        if (slot < 0 || slot >= w->all_slots) continue;
        const element *latent = w->kv + token * to;
        element *row = w->cache + slot / w->block_size * w->block_stride +
                       slot % w->block_size * w->row_stride;
        norm_row(latent, w->weight, row, s->rank, s->eps);
        norm_and_rotate(latent + s->rank, 0, 0, cos, sin, row + s->rank, s->rope, w->interleaved);
    }
}

/* RoPE of MLA's queries; write normed latents and rotated keys to the cache.
 *
 *   q [n, heads, nope + rope]      only the second part is read
 *   kv [n, rank + rope]            latent and key part of each token
 *   cache [blocks, block_size, rank + rope], strides in elements; slots as in norm_rope_write
 *   query [n, heads, rank + rope]  only the second part is written
 *
 * Returns the number of slots outside the cache, which are skipped.
 */
int64_t latent_write(const latent_shape *s, const element *q, const element *kv,
                     const element *weight, const float *cos, const float *sin,
                     int64_t interleaved, element *cache, int64_t block_stride, int64_t row_stride,
                     int64_t block_size, const int64_t *slots, int64_t num_slots,
                     int64_t all_slots, element *query, int64_t n) {
    latent_rows w = {s,     q,     kv,           weight,     cos,        sin,       (int)interleaved,
                     cache, query, block_stride, row_stride, block_size, num_slots, all_slots,
                     slots};
    int64_t wrong = 0, numbers = n * (s->heads * s->rope + s->rank + s->rope);
    for (int64_t token = 0; token < n && token < num_slots; token++)
        wrong += slots[token] >= all_slots;
    divide_job(n, numbers, write_latents, &w);
    return wrong;
}
