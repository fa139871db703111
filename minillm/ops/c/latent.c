/* Multi-head latent attention in its absorbed form (DeepSeek-V2, 2024, section 2.1, appendix C).
 *
 * The cache holds one latent c per token for all heads. A key is W_uk c, and q . (W_uk c) =
 * (W_uk^T q) . c: W_uk multiplies the query instead of every cached latent. Attention is then that
 * of many query heads and one KV head, over rows [latent, rotated part], whose latents are also the
 * values. W_uv maps the result of each head to its output.
 *
 *   q [heads, nope | rope] --W_uk^T, RoPE--> query [heads, rank | rope]
 *   attention(query, cache) [heads, rank] --W_uv--> [heads, v] --W_o--> x
 */
#include "layers.h"
#include "threads.h"

/* Intermediate results of `n` tokens. */
typedef struct {
    element *q_low, *q, *kv; /* [n, q_rank], [n, heads, nope + rope], [n, rank + rope] */
    element *query, *sums;   /* [n, heads, rank + rope], [n, heads, rank] */
    element *values;         /* [n, heads, v] */
} buffers;

/* A product for each head: that of the first head, and the elements from a head to the next. */
typedef struct {
    piece_of_product first;
    int64_t x_step, y_step;
} head_products;

static element *take(uintptr_t *memory, int64_t count) {
    uintptr_t taken = *memory;
    int64_t bytes = count * (int64_t)sizeof(element);
    *memory += (uintptr_t)((bytes + 63) / 64 * 64); /* whole cache lines */
    return (element *)taken;
}

/* Lay out the memory for `n` tokens; returns its end. */
static uintptr_t lay_out(const latent_shape *s, int64_t n, uintptr_t memory, buffers *b) {
    b->q_low = take(&memory, 2 * n * s->q_rank); /* before and after its norm */
    b->q = take(&memory, n * s->heads * (s->nope + s->rope));
    b->kv = take(&memory, n * (s->rank + s->rope));
    b->query = take(&memory, n * s->heads * (s->rank + s->rope));
    b->sums = take(&memory, n * s->heads * s->rank);
    b->values = take(&memory, n * s->heads * s->value);
    return memory;
}

int64_t latent_memory(const latent_shape *s, int64_t n) {
    buffers b;
    return (int64_t)lay_out(s, n, 0, &b);
}

/* The product of head h, for h from `begin` to `end` - 1: inputs, outputs and panels of the heads
 * lie one after the other. */
static void multiply_heads(void *context, int64_t begin, int64_t end, int64_t thread) {
    const head_products *heads = context;
    (void)thread;
    for (int64_t h = begin; h < end; h++) {
        piece_of_product p = heads->first;
        p.x += h * heads->x_step;
        p.y += h * heads->y_step;
        p.panels += h * p.out * p.in;
        panel_piece(&p, 0, (p.out + PANEL - 1) / PANEL);
    }
}

/* A product of its own for each head of every token. */
static void each_head(head_products *heads, int64_t count) {
    divide_job(count, count * product_time(&heads->first), multiply_heads, heads);
}

/* x -> queries of all heads [n, heads, nope + rope]. Returns 1 if memory is exhausted. */
static int64_t project_queries(const latent_weights *w, const latent_shape *s, const element *x,
                               int64_t n, int64_t hidden, const buffers *b) {
    int64_t out = s->heads * (s->nope + s->rope);
    if (!w->q_a) return product_of(x, w->q, 0, b->q, n, hidden, out, 0);
    element *normed = b->q_low + n * s->q_rank;
    if (product_of(x, w->q_a, w->q_a_bias, b->q_low, n, hidden, s->q_rank, 0)) return 1;
    rms_norm(b->q_low, s->q_rank, w->q_a_norm, normed, n, s->q_rank, s->eps);
    return product_of(normed, w->q, 0, b->q, n, s->q_rank, out, 0);
}

/* The part of each query that is multiplied by latents: W_uk^T q. */
static void absorb(const latent_weights *w, const latent_shape *s, int64_t n, const buffers *b) {
    int64_t from = s->nope + s->rope, to = s->rank + s->rope;
    each_head(&(head_products){{b->q, w->keys, 0, b->query, n, s->nope, s->rank, 0,
                                s->heads * from, s->heads * to},
                               from, to},
              s->heads);
}

/* Sums of latents -> values of the heads: W_uv c. */
static void expand(const latent_weights *w, const latent_shape *s, int64_t n, const buffers *b) {
    each_head(&(head_products){{b->sums, w->values, 0, b->values, n, s->rank, s->value, 0,
                                s->heads * s->rank, s->heads * s->value},
                               s->rank, s->value},
              s->heads);
}

int64_t latent_half(const layer *l, const shape *s, const step *now) {
    const latent_weights *w = l->latent;
    const latent_shape *m = s->latent;
    int64_t n = now->n, hidden = s->hidden, row = m->rank + m->rope;
    buffers b;
    lay_out(m, n, (uintptr_t)now->memory, &b);
    if (project_queries(w, m, now->normed, n, hidden, &b)) return 1;
    if (product_of(now->normed, w->kv_a, w->kv_a_bias, b.kv, n, hidden, row, 0)) return 1;
    if (latent_write(m, b.q, b.kv, w->kv_a_norm, now->cos, now->sin, s->interleaved, l->k_cache,
                     s->cache_strides[0], s->cache_strides[2], s->block_size, now->slots,
                     now->num_slots, s->num_blocks * s->block_size, b.query, n))
        return 3;
    absorb(w, m, n, &b);
    int64_t status = attend(l, s, now, b.query, b.sums, 1, row, m->rank);
    if (status) return status;
    expand(w, m, n, &b);
    if (product_of(b.values, l->o, l->o_bias, now->x, n, m->heads * m->value, hidden, 0)) return 1;
    return 0;
}

/* x [n, heads, in], rows `x_row` elements apart and heads `x_step`, panels [heads, out, in] -> y
 * [n, heads, out]. */
void head_linear(const element *x, int64_t x_row, int64_t x_step, const element *panels, element *y,
                 int64_t n, int64_t heads, int64_t in, int64_t out) {
    each_head(&(head_products){{x, panels, 0, y, n, in, out, 0, x_row, heads * out}, x_step, out},
              heads);
}
