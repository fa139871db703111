/* A mixture of experts: every token's chosen SwiGLU experts, weighted, and the shared experts.
 *
 * With few tokens the layer is bound by reading the chosen experts' weights, so each panel of them
 * is read once: tokens are grouped by expert, and an expert multiplies all its rows together.
 *
 *   tokens      a: 1 4     b: 0 4         the chosen experts of two tokens
 *   rows        b | a | a b               one row per token and chosen expert, sorted by expert
 *   experts     0   1   4   shared        products of unequal numbers of rows
 *
 * The panels of all products together are the items of one job. So one token with 8 experts keeps
 * all threads busy, and threads wait for each other only twice: after gate and up, and after down.
 */
#include "experts.h"
#include "threads.h"

#define MOST_TOKENS 1024 /* that are processed together: limits the memory for their rows */
#define BLOCK 512        /* columns of a token's output that are added up at a time */

/* The products of all experts that have rows. */
typedef struct {
    piece_of_matrix *products;
    int64_t *starts; /* [count + 1] number of the first panel of each, counted over all */
    int64_t count;
} batch;

/* Memory of a layer. */
typedef struct {
    float *logits, *weights; /* [n, experts], [n, chosen] */
    int64_t *ids, *places;   /* [n, chosen], and the row of each choice */
    int64_t *starts;         /* [experts + 1] first row of each expert */
    batch up, down;
    element *rows, *units, *outputs;      /* [n x chosen, hidden or size] */
    element *shared_units, *shared_output; /* [n, shared_size], [n, hidden] */
    char *rounded, *shared_rounded;        /* for quantised weights: `rows` or `units`, rounded */
} buffers;

/* A job on tokens: copying x to the rows, or adding up the outputs. */
typedef struct {
    const expert_shape *shape;
    const buffers *b;
    const element *x;
    element *out;
    int64_t shared;
} job;

static void *take(uintptr_t *memory, int64_t bytes) {
    uintptr_t taken = *memory;
    *memory += (uintptr_t)((bytes + 63) / 64 * 64); /* whole cache lines */
    return (void *)taken;
}

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Lay out the memory for `n` tokens; returns its end. */
static uintptr_t lay_out(const expert_shape *s, int64_t n, uintptr_t memory, buffers *b) {
    int64_t pairs = n * s->chosen, wide = s->hidden * (int64_t)sizeof(element);
    b->logits = take(&memory, n * s->experts * 4);
    b->weights = take(&memory, pairs * 4);
    b->ids = take(&memory, pairs * 8);
    b->places = take(&memory, pairs * 8);
    b->starts = take(&memory, (s->experts + 1) * 8);
    for (int64_t i = 0; i < 2; i++) {
        batch *each = i ? &b->down : &b->up;
        each->products = take(&memory, (s->experts + 1) * (int64_t)sizeof(piece_of_matrix));
        each->starts = take(&memory, (s->experts + 2) * 8);
    }
    b->rows = take(&memory, pairs * wide);
    b->outputs = take(&memory, pairs * wide);
    b->units = take(&memory, pairs * s->size * (int64_t)sizeof(element));
    b->shared_units = take(&memory, n * s->shared_size * (int64_t)sizeof(element));
    b->shared_output = take(&memory, s->shared_size ? n * wide : 0);
    b->rounded = take(&memory, rounded_bytes(pairs, larger_of(s->hidden, s->size)));
    b->shared_rounded = take(&memory, rounded_bytes(n, larger_of(s->hidden, s->shared_size)));
    return memory;
}

int64_t expert_memory(const expert_shape *s, int64_t n) {
    buffers b;
    return (int64_t)lay_out(s, n < MOST_TOKENS ? n : MOST_TOKENS, 0, &b);
}

/* Sort the choices of `n` tokens by expert: the row of each choice, and each expert's first row. */
static void group_by_expert(const expert_shape *s, const buffers *b, int64_t n) {
    int64_t *next = b->starts + 1; /* shifted by one: becomes the starts when all are counted */
    memset(b->starts, 0, (size_t)(s->experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < n * s->chosen; i++)
        if (b->ids[i] + 1 < s->experts) next[b->ids[i] + 1]++;
    for (int64_t e = 1; e < s->experts; e++) next[e] += next[e - 1];
    for (int64_t i = 0; i < n * s->chosen; i++) b->places[i] = next[b->ids[i]]++;
}

/* Add a product of the rows of x and y from `first` on; x has `rows` rows, whose rounded copies lie
 * in `memory`. */
static void add_product(batch *all, piece_of_product plain, matrix w, int64_t first, char *memory,
                        int64_t rows) {
    int64_t panels = (plain.out + PANEL - 1) / PANEL;
    piece_of_matrix product = {plain, w, {0}};
    product.plain.x += first * plain.in;
    product.plain.y += first * plain.out;
    if (w.scales)
        product.rounded =
            rounded_from(rounded_at(memory, rows, plain.in, w.group), first, plain.in, w.group);
    all->products[all->count] = product;
    all->starts[all->count + 1] = all->starts[all->count] + panels;
    all->count++;
}

/* Add the products of expert `e` with its rows. */
static void add_expert(buffers *b, const expert_weights *w, const expert_shape *s, int64_t e,
                       int64_t pairs) {
    int64_t hidden = s->hidden, size = s->size, first = b->starts[e], n = b->starts[e + 1] - first;
    piece_of_product up = {b->rows, 0, 0, b->units, n, hidden, size, 1, hidden, size};
    piece_of_product down = {b->units, 0, 0, b->outputs, n, size, hidden, 0, size, hidden};
    if (!n) return;
    add_product(&b->up, up, outputs_from(w->gate_up, e * 2 * size, hidden), first, b->rounded,
                pairs);
    add_product(&b->down, down, outputs_from(w->down, e * hidden, size), first, b->rounded, pairs);
}

/* Add the products of the shared experts with all `n` tokens. */
static void add_shared(buffers *b, const expert_weights *w, const expert_shape *s, const element *x,
                       int64_t n) {
    int64_t hidden = s->hidden, size = s->shared_size;
    piece_of_product up = {x, 0, w->shared_gate_up_bias, b->shared_units, n, hidden, size, 1,
                           hidden, size};
    piece_of_product down = {b->shared_units, 0, w->shared_down_bias, b->shared_output, n, size,
                             hidden, 0, size, hidden};
    add_product(&b->up, up, *w->shared_gate_up, 0, b->shared_rounded, n);
    add_product(&b->down, down, *w->shared_down, 0, b->shared_rounded, n);
}

/* Round the inputs of quantised weights, once for all experts of a row's kind. */
static void round_inputs(const matrix *w, const element *x, int64_t n, int64_t in, char *memory) {
    if (w && w->scales) round_for(w, x, n, in, rounded_at(memory, n, in, w->group));
}

/* Panels `begin` to `end` - 1 of all products. */
static void multiply_panels(void *context, int64_t begin, int64_t end, int64_t thread) {
    const batch *all = context;
    int64_t low = 0, high = all->count; /* the product that has panel `begin` */
    (void)thread;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (all->starts[middle] <= begin) low = middle;
        else high = middle;
    }
    for (; begin < end; low++) {
        int64_t first = all->starts[low], stop = all->starts[low + 1];
        stop = stop < end ? stop : end;
        matrix_piece(&all->products[low], begin - first, stop - first);
        begin = stop;
    }
}

/* All products as one job. Pieces are pairs of panels, which tiles multiply together. */
static void multiply(batch *all) {
    int64_t nanoseconds = 0, count = all->starts[all->count];
    for (int64_t i = 0; i < all->count; i++) nanoseconds += matrix_time(&all->products[i]);
    int64_t threads = threads_for(nanoseconds), piece = piece_for(count, threads, nanoseconds);
    run_job(count, (piece + 1) / 2 * 2, threads, multiply_panels, all);
}

/* Copy tokens to the rows of their experts. */
static void copy_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const job *j = context;
    int64_t hidden = j->shape->hidden, chosen = j->shape->chosen;
    (void)thread;
    for (int64_t i = begin * chosen; i < end * chosen; i++)
        memcpy(j->b->rows + j->b->places[i] * hidden, j->x + i / chosen * hidden,
               (size_t)hidden * sizeof(element));
}

/* Columns `begin` to `end` - 1 of a token: outputs of its experts in ascending order, weighted and
 * added in float32, then rounded. Shared experts are added to the rounded sum, as in torch. */
static void add_columns(const job *j, int64_t token, int64_t begin, int64_t end) {
    int64_t hidden = j->shape->hidden, chosen = j->shape->chosen, size = end - begin;
    float sums[BLOCK] = {0};
    for (int64_t i = token * chosen; i < (token + 1) * chosen; i++) {
        const element *output = j->b->outputs + j->b->places[i] * hidden + begin;
        float weight = j->b->weights[i];
        for (int64_t c = 0; c < size; c++) sums[c] += load(output[c]) * weight;
    }
    const element *shared = j->b->shared_output + token * hidden + begin;
    if (j->shared)
        for (int64_t c = 0; c < size; c++) sums[c] = rounded(sums[c]) + load(shared[c]);
    for (int64_t c = 0; c < size; c++) j->out[token * hidden + begin + c] = store(sums[c]);
}

static void add_outputs(void *context, int64_t begin, int64_t end, int64_t thread) {
    const job *j = context;
    int64_t hidden = j->shape->hidden;
    (void)thread;
    for (int64_t token = begin; token < end; token++)
        for (int64_t at = 0; at < hidden; at += BLOCK)
            add_columns(j, token, at, at + BLOCK < hidden ? at + BLOCK : hidden);
}

/* Products of the chosen experts of up to MOST_TOKENS tokens, for the ids and weights in `b`. */
static void run_experts(const expert_weights *w, const expert_shape *s, const element *x,
                        element *out, int64_t n, buffers *b) {
    int64_t hidden = s->hidden, pairs = n * s->chosen, moved = pairs * hidden;
    job j = {s, b, x, out, w->shared_down != 0};
    b->up.count = b->down.count = b->up.starts[0] = b->down.starts[0] = 0;
    group_by_expert(s, b, n);
    for (int64_t e = 0; e < s->experts; e++) add_expert(b, w, s, e, pairs);
    if (j.shared) add_shared(b, w, s, x, n);
    divide_job(n, moved / 16, copy_rows, &j);
    round_inputs(w->gate_up, b->rows, pairs, hidden, b->rounded);
    round_inputs(w->shared_gate_up, x, n, hidden, b->shared_rounded);
    multiply(&b->up);
    round_inputs(w->down, b->units, pairs, s->size, b->rounded);
    round_inputs(w->shared_down, b->shared_units, n, s->shared_size, b->shared_rounded);
    multiply(&b->down);
    divide_job(n, moved / 8, add_outputs, &j);
}

void moe_half(const expert_weights *w, const expert_shape *s, const element *x, element *out,
              int64_t n, char *memory) {
    buffers b;
    for (int64_t at = 0; at < n; at += MOST_TOKENS) {
        int64_t count = n - at < MOST_TOKENS ? n - at : MOST_TOKENS;
        lay_out(s, count, (uintptr_t)memory, &b);
        panel_sums(x + at * s->hidden, w->router, b.logits, count, s->hidden, s->experts, 1);
        choose_experts(s, b.logits, w->bias, b.ids, b.weights, count);
        run_experts(w, s, x + at * s->hidden, out + at * s->hidden, count, &b);
    }
}

/* x [n, hidden], experts `ids` [n, chosen] and their `weights` -> out [n, hidden], without shared
 * experts. Ids need not be ascending or different. Returns the number of invalid ids; with any,
 * nothing is computed. */
int64_t chosen_experts(const expert_weights *w, const expert_shape *s, const element *x,
                       const int64_t *ids, const float *weights, element *out, int64_t n,
                       char *memory) {
    buffers b;
    int64_t wrong = 0;
    for (int64_t i = 0; i < n * s->chosen; i++) wrong += ids[i] < 0 || ids[i] >= s->experts;
    for (int64_t at = 0; at < n && !wrong; at += MOST_TOKENS) {
        int64_t count = n - at < MOST_TOKENS ? n - at : MOST_TOKENS, pairs = count * s->chosen;
        lay_out(s, count, (uintptr_t)memory, &b);
        memcpy(b.ids, ids + at * s->chosen, (size_t)pairs * sizeof(int64_t));
        memcpy(b.weights, weights + at * s->chosen, (size_t)pairs * sizeof(float));
        for (int64_t i = 0; i < count; i++)
            sort_experts(b.ids + i * s->chosen, b.weights + i * s->chosen, s->chosen);
        run_experts(w, s, x + at * s->hidden, out + at * s->hidden, count, &b);
    }
    return wrong;
}
