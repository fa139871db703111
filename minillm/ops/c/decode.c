/* Paged attention of a few queries per sequence (Kwon et al., 2023): one decode token, or drafts to
 * verify, which are treated as additional query heads.
 *
 * Decode attention is memory-bound: it reads every cached key and value once. So they are read in
 * place and prefetched one tile ahead, and the query heads of a KV head share each row. The softmax
 * is online (Milakov and Gimelshein, 2018), tile by tile. A core can have about a dozen cache
 * misses in flight, which alone gives half the memory bandwidth; the hardware prefetcher adds the
 * rest, for each 4 KB page that is read sequentially. So the next tile is prefetched from many
 * pages at once: one position of every head, then the next position.
 *
 * Positions are split into parts, and parts into tiles, at fixed boundaries. Each part has its own
 * sums, and parts are joined in ascending order (Flash-Decoding, Dao et al., 2023). A task is one
 * sequence, or one part if there are too few sequences for the threads. So the result of a query
 * depends on its position, keys and window, but not on the batch, on other queries of its sequence
 * or on the number of threads.
 */
#include <stdlib.h>
#include "lanes.h"
#include "tails.h"
#include "threads.h"

#define TILE 64         /* maximum positions of a tile */
#define TILE_BYTES 4096 /* maximum bytes of a head's keys in a tile */
#define PART 128        /* positions of each of the first parts: enough work for a task */
#define FIRST_PARTS 8
#define LATER_PART 512  /* positions of later parts: longer, because joining parts has a cost */
#define TASKS 4         /* tasks per thread, for load balance */
#define WORK 16         /* products of a query and a key or value per nanosecond and thread */
#define TOGETHER 4      /* query heads whose sums are kept in registers at the same time */
#define KEYS (LANES > 4 ? LANES / 2 : LANES) /* keys multiplied by two heads at the same time */
#define MOST_QUERIES 16 /* maximum queries of a sequence */
#if defined(ELEMENT_BF16)
#define MOST_ROWS 16 /* maximum queries x heads of a group; above, prefill.c is as fast (AVX-512) */
#else
#define MOST_ROWS 24
#endif
#define ROUND_UP(n, step) (((n) + (step) - 1) / (step) * (step))

/* Pages of keys or of values: [blocks, kv_heads, block_size, dim], strides in elements. */
typedef struct {
    const element *data;
    int64_t block, head, row;
} pages;

/* A sequence and its queries, the last of which is at the last position. */
typedef struct {
    const element *q; /* [queries, kv_heads, group, d] */
    pages k, v;
    const int64_t *table;
    int64_t block_size, length, queries, window, kv_heads, group, d, dv;
    float scale;
    row_tail tail;
} problem;

/* Positions begin to end - 1. */
typedef struct {
    int64_t begin, end;
} range;

/* The positions that a query attends to; empty if its own position is negative. */
static inline range seen_by(const problem *p, int64_t query) {
    int64_t end = p->length - p->queries + query + 1;
    end = end > 0 ? end : 0;
    return (range){p->window && end > p->window ? end - p->window : 0, end};
}

static inline int64_t part_begin(int64_t part) {
    int64_t later = part - FIRST_PARTS;
    return later < 0 ? part * PART : FIRST_PARTS * PART + later * LATER_PART;
}

static inline int64_t part_of(int64_t position) {
    int64_t later = position - FIRST_PARTS * PART;
    return later < 0 ? position / PART : FIRST_PARTS + later / LATER_PART;
}

/* The parts that the queries of a sequence attend to. */
static inline range parts_of(const problem *p) {
    return (range){part_of(seen_by(p, 0).begin), part_of(p->length - 1) + 1};
}

/* Addresses of the first head's keys and values at some positions, padded with the last one. */
typedef struct {
    const element *keys[TILE], *values[TILE];
    int64_t begin, count;
} tile;

static inline int64_t tile_size(const problem *p) {
    int64_t most = TILE_BYTES / (p->d * (int64_t)sizeof(element)) / LANES * LANES;
    return most < LANES ? LANES : most < TILE ? most : TILE;
}

/* Find the tile from position `begin` on, limited by `end`. */
static void find_tile(const problem *p, int64_t begin, int64_t end, tile *t) {
    int64_t most = tile_size(p), i = 0, size = p->block_size;
    t->begin = begin;
    t->count = end - begin < most ? end - begin : most;
    while (i < t->count) {
        int64_t at = place_at(p->tail, begin + i), block = p->table[at / size], offset = at % size;
        const element *key = p->k.data + block * p->k.block + offset * p->k.row;
        const element *value = p->v.data + block * p->v.block + offset * p->v.row;
        int64_t run = size - offset < t->count - i ? size - offset : t->count - i;
        run = in_order(p->tail, begin + i, run);
        for (int64_t j = 0; j < run; j++) t->keys[i + j] = key + j * p->k.row;
        for (int64_t j = 0; j < run; j++) t->values[i + j] = value + j * p->v.row;
        i += run;
    }
    for (; i % LANES; i++) t->keys[i] = t->keys[i - 1], t->values[i] = t->values[i - 1];
}

/* Rows to prefetch: `count` positions, `dim` elements of each head. */
typedef struct {
    const element *const *rows;
    int64_t count, heads, stride, dim, head;
} prefetches;

/* Prefetch the next row into the L2 cache. */
static inline void prefetch_next(prefetches *w) {
    if (w->count <= 0) return;
    const char *row = (const char *)(*w->rows + w->head * w->stride);
    for (int64_t byte = 0; byte < w->dim * (int64_t)sizeof(element); byte += 64)
        __builtin_prefetch(row + byte, 0, 2);
    if (++w->head < w->heads) return;
    w->head = 0;
    w->rows++;
    w->count--;
}

/* Scores q . k of one or two query heads for LANES keys, `first` elements after `rows`. Some keys at
 * a time, so that addresses and sums stay in registers. */
static inline __attribute__((always_inline)) void score(
    const int heads, const element *const *q, const element *const *rows, int64_t first, int64_t d,
    float scale, float *scores) {
    vec sums[2][LANES];
    for (int done = 0; done < LANES; done += KEYS) {
        vec sum[2][KEYS] = {0};
        int64_t j = 0;
#if PAIR == 2
        for (; j + 2 * LANES <= d; j += 2 * LANES) /* products of bf16 pairs */
#pragma GCC unroll 8
            for (int i = 0; i < KEYS; i++) {
                vec key = load_vec(rows[done + i] + first + j);
                for (int h = 0; h < heads; h++)
                    sum[h][i] = multiply_add(sum[h][i], load_vec(q[h] + j), key);
            }
#endif
        for (; j < d; j += LANES)
#pragma GCC unroll 8
            for (int i = 0; i < KEYS; i++) {
                vec key = load_elements(rows[done + i] + first + j);
                for (int h = 0; h < heads; h++) sum[h][i] += key * load_elements(q[h] + j);
            }
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < KEYS; i++) sums[h][done + i] = sum[h][i];
    }
    for (int h = 0; h < heads; h++) {
        vec each = sum_each(sums[h]) * scale;
        memcpy(scores + h * TILE, &each, sizeof each);
    }
}

/* sums[g] += sum over positions of weights[g] * value, for `group` heads with sums `stride` floats
 * apart, and `columns` vectors of the values, from `column` elements after `rows`. Meanwhile
 * `later` is prefetched, if it is not NULL. */
static inline __attribute__((always_inline)) void add_values(
    const int group, const float *weights, const element *const *rows, prefetches *later,
    int64_t count, int64_t column, const int columns, float *sums, int64_t stride) {
    vec sum[TOGETHER][2]; /* a constant size keeps them in registers */
    for (int g = 0; g < group; g++)
        for (int c = 0; c < columns; c++)
            sum[g][c] = load_vec(sums + g * stride + c * LANES);
    for (int64_t i = 0; i < count; i++) {
        if (later) prefetch_next(later);
        for (int c = 0; c < columns; c++) {
            vec value = load_elements(rows[i] + column + c * LANES);
            for (int g = 0; g < group; g++) sum[g][c] += value * weights[g * TILE + i];
        }
    }
    for (int g = 0; g < group; g++)
        for (int c = 0; c < columns; c++)
            memcpy(sums + g * stride + c * LANES, &sum[g][c], sizeof(vec));
}

/* The same for all columns of up to 4 heads, with constant counts for each case. */
static inline void add_all_values(int64_t group, const float *weights, const element *const *rows,
                                  prefetches *later, int64_t count, int64_t first, int64_t dim,
                                  float *sums, int64_t stride) {
    for (int64_t j = 0; j < dim; j += 2 * LANES, later = 0) {
        int both = dim - j > LANES;
        switch (group) {
#define CASE(n)                                                                                \
    case n:                                                                                    \
        if (both) add_values(n, weights, rows, later, count, first + j, 2, sums + j, stride);  \
        else add_values(n, weights, rows, later, count, first + j, 1, sums + j, stride);       \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
    }
}

/* State of one query head: weighted values, maximum score, sum of weights. */
#define STATE(dim) ((dim) + 2)

/* Online softmax: replace the scores of a tile (padded with -inf) by weights, and rescale the state
 * to the new maximum. */
static inline void reweigh(float *scores, int64_t count, float *state, int64_t dim) {
    vec most = load_vec(scores), sums = {0};
    for (int64_t i = LANES; i < count; i += LANES) most = larger(most, load_vec(scores + i));
    float best = largest(most);
    best = state[dim] > best ? state[dim] : best;
    float origin = best == -INFINITY ? 0.f : best; /* -inf - -inf would be NaN */
    for (int64_t i = 0; i < count; i += LANES) {
        for (int64_t j = i; j < i + LANES; j++) scores[j] = fast_exp(scores[j] - origin);
        sums += load_vec(scores + i);
    }
    float shrink = best == state[dim] ? 1.f : fast_exp(state[dim] - origin); /* usually 1 */
    state[dim] = best;
    state[dim + 1] = state[dim + 1] * shrink + sum_of(sums);
    if (shrink != 1.f)
        for (int64_t j = 0; j < dim; j++) state[j] *= shrink;
}

/* The positions of a tile that a query attends to, relative to the tile. */
static inline range seen_in(const problem *p, int64_t query, const tile *t) {
    range seen = seen_by(p, query);
    int64_t begin = seen.begin - t->begin, end = seen.end - t->begin;
    return (range){begin > 0 ? begin : 0, end < t->count ? end : t->count};
}

/* One KV head of a tile: scores of all rows, their weights, and the weighted values. */
static inline __attribute__((always_inline)) void attend_tile(const problem *p, const tile *t,
                                                              int64_t head,
                                                              float *restrict weights,
                                                              prefetches *keys,
                                                              prefetches *values, float *states) {
    int64_t group = p->group, rows = p->queries * group, dv = p->dv, count = t->count;
    const element *q[rows];
    for (int64_t query = 0, r = 0; query < p->queries; query++)
        for (int64_t g = 0; g < group; g++, r++)
            q[r] = p->q + ((query * p->kv_heads + head) * group + g) * p->d;
    for (int64_t i = 0; i < count; i += LANES)
        for (int64_t r = 0; r < rows; r += 2) {
            for (int64_t a = r; a < LANES; a += ROUND_UP(rows, 2))
                prefetch_next(keys), prefetch_next(keys);
            float *scores = weights + r * TILE + i;
            const element *const *at = t->keys + i;
            if (r + 1 < rows) score(2, q + r, at, head * p->k.head, p->d, p->scale, scores);
            else score(1, q + r, at, head * p->k.head, p->d, p->scale, scores);
        }
    int whole = seen_in(p, p->queries - 1, t).begin == 0 && seen_in(p, 0, t).end == count;
    for (int64_t r = 0, last; r < rows; r = last) { /* rows with the same positions together */
        range seen = seen_in(p, r / group, t);
        last = whole ? rows : r + group;
        if (seen.begin >= seen.end) continue;
        int64_t first = seen.begin / LANES * LANES;
        for (int64_t g = r; g < last; g++) {
            float *scores = weights + g * TILE;
            for (int64_t i = first; i < seen.begin; i++) scores[i] = -INFINITY;
            for (int64_t i = seen.end; i % LANES; i++) scores[i] = -INFINITY;
            reweigh(scores + first, seen.end - first, states + g * STATE(dv), dv);
        }
        for (int64_t g = r; g < last; g += TOGETHER)
            add_all_values(last - g < TOGETHER ? last - g : TOGETHER,
                           weights + g * TILE + seen.begin, t->values + seen.begin,
                           g ? 0 : values, seen.end - seen.begin, head * p->v.head, dv,
                           states + g * STATE(dv), STATE(dv));
    }
}

/* Attention of all queries to a part, into states [kv_heads, queries, group]. Tiles begin at
 * multiples of their size from the start of the part. */
static void attend(const problem *p, int64_t part, float *states) {
    int64_t rows = p->queries * p->group, begin = part_begin(part), end = part_begin(part + 1);
    int64_t first = seen_by(p, 0).begin - begin, size = tile_size(p);
    float weights[rows * TILE];
    tile tiles[2], *now = &tiles[0], *next = &tiles[1];
    for (int64_t r = 0; r < p->kv_heads * rows; r++) {
        float *state = states + r * STATE(p->dv);
        memset(state, 0, (size_t)p->dv * sizeof(float));
        state[p->dv] = -INFINITY;
        state[p->dv + 1] = 0;
    }
    end = end < p->length ? end : p->length;
    find_tile(p, first > 0 ? begin + first / size * size : begin, end, now);
    while (now->count > 0) {
        find_tile(p, now->begin + now->count, end, next);
        prefetches keys = {next->keys, next->count, p->kv_heads, p->k.head, p->d, 0};
        prefetches values = {next->values, next->count, p->kv_heads, p->v.head, p->dv, 0};
        for (int64_t head = 0; head < p->kv_heads; head++)
            attend_tile(p, now, head, weights, &keys, &values,
                        states + head * rows * STATE(p->dv));
        tile *done = now;
        now = next;
        next = done;
    }
}

/* Merge the state of the next part into a row's state. */
static void join(float *state, const float *part, int64_t dim) {
    float best = part[dim] > state[dim] ? part[dim] : state[dim];
    float old = state[dim] == -INFINITY ? 0.f : fast_exp(state[dim] - best);
    float new = part[dim] == -INFINITY ? 0.f : fast_exp(part[dim] - best);
    for (int64_t j = 0; j < dim; j++) state[j] = state[j] * old + part[j] * new;
    state[dim] = best;
    state[dim + 1] = state[dim + 1] * old + part[dim + 1] * new;
}

/* Write the output [queries, heads, dv] of a KV head's rows from their states. */
static void finish(const problem *p, int64_t head, const float *states, element *out) {
    int64_t dv = p->dv;
    for (int64_t query = 0; query < p->queries; query++) {
        element *to = out + (query * p->kv_heads + head) * p->group * dv;
        if (seen_by(p, query).end == 0) {
            memset(to, 0, (size_t)(p->group * dv) * sizeof(element));
            continue;
        }
        for (int64_t g = 0; g < p->group; g++, to += dv) {
            const float *state = states + (query * p->group + g) * STATE(dv);
            for (int64_t j = 0; j < dv; j++) to[j] = store(state[j] / state[dv + 1]);
        }
    }
}

/* A whole sequence. `states` has room for two states per row. */
static void attend_all(const problem *p, float *states, element *out) {
    int64_t rows = p->kv_heads * p->queries * p->group, size = STATE(p->dv);
    range parts = parts_of(p);
    for (int64_t part = parts.begin; part < parts.end; part++) {
        float *mine = part == parts.begin ? states : states + rows * size;
        attend(p, part, mine);
        for (int64_t r = 0; mine != states && r < rows; r++)
            join(states + r * size, mine + r * size, p->dv);
    }
    for (int64_t head = 0; head < p->kv_heads; head++)
        finish(p, head, states + head * p->queries * p->group * size, out);
}

/* Join the parts of one KV head of a sequence; states of a part are `stride` floats. */
static void join_all(const problem *p, int64_t head, float *states, int64_t stride, element *out) {
    int64_t rows = p->queries * p->group, size = STATE(p->dv);
    range parts = parts_of(p);
    float *first = states + head * rows * size;
    for (int64_t i = 1; i < parts.end - parts.begin; i++)
        for (int64_t r = 0; r < rows; r++)
            join(first + r * size, first + i * stride + r * size, p->dv);
    finish(p, head, first, out);
}

/* Maximum number of queries of a sequence for `decode_attention`. */
int64_t decode_queries(int64_t group) {
    int64_t most = MOST_ROWS / group;
    return most < 1 ? 1 : most < MOST_QUERIES ? most : MOST_QUERIES;
}

/* A flat batch: the arguments of `decode_attention`. */
typedef struct {
    const element *q;
    element *out;
    const int32_t *query_start, *seq_lens;
    const int64_t *tables;
    int64_t table_stride;
    const batch_tails *tails;
} batch;

/* Sequence b of a batch; `queries` is 0 if it has too many for this kernel. */
static problem sequence(const problem *all, const batch *given, int64_t b) {
    problem p = *all;
    int64_t row = given->query_start[b], queries = given->query_start[b + 1] - row;
    p.q = given->q + row * p.kv_heads * p.group * p.d;
    p.table = given->tables + b * given->table_stride;
    p.length = given->seq_lens[b];
    p.queries = queries > decode_queries(p.group) ? 0 : queries;
    p.tail = tail_of(given->tails, b);
    return p;
}

/* Address of the output of its first query. */
static element *result(const problem *p, const batch *given, int64_t b) {
    return given->out + given->query_start[b] * p->kv_heads * p->group * p->dv;
}

/* A batch that is computed: sequences, or parts of sequences if `divided`. */
typedef struct {
    const problem *all;
    const batch *given;
    float *states;         /* of each part, or two for each thread */
    int64_t size, most;    /* floats of a state; parts of the longest sequence */
    int divided;
} attention;

/* Tasks `begin` to `end` - 1: a sequence each, or a part of a sequence, the longest parts first. */
static void attend_some(void *context, int64_t begin, int64_t end, int64_t thread) {
    const attention *a = context;
    int64_t each = a->divided ? a->most : 1;
    for (int64_t task = begin; task < end; task++) {
        int64_t b = task / each, i = each - 1 - task % each;
        problem p = sequence(a->all, a->given, b);
        range parts = parts_of(&p);
        if (p.queries == 0 || i >= parts.end - parts.begin) continue;
        if (a->divided) attend(&p, parts.begin + i, a->states + (b * a->most + i) * a->size);
        else attend_all(&p, a->states + thread * 2 * a->size, result(&p, a->given, b));
    }
}

/* Tasks `begin` to `end` - 1: join the parts of a KV head of a sequence each. */
static void join_some(void *context, int64_t begin, int64_t end, int64_t thread) {
    const attention *a = context;
    for (int64_t task = begin; task < end; task++) {
        int64_t b = task / a->all->kv_heads, head = task % a->all->kv_heads;
        problem p = sequence(a->all, a->given, b);
        if (p.queries)
            join_all(&p, head, a->states + b * a->most * a->size, a->size, result(&p, a->given, b));
    }
    (void)thread;
}

static int points_outside(const problem *p, const batch *given, int64_t sequences, int64_t n,
                          int64_t num_blocks, int64_t columns) {
    for (int64_t b = 0; b < sequences; b++) {
        int64_t begin = given->query_start[b], end = given->query_start[b + 1];
        int64_t length = given->seq_lens[b], used = (length + p->block_size - 1) / p->block_size;
        if (length < 0 || used > columns || begin < 0 || begin > end || end > n) return 1;
        for (int64_t i = 0; i < used; i++)
            if ((uint64_t)given->tables[b * given->table_stride + i] >= (uint64_t)num_blocks)
                return 1;
        if (tail_outside(given->tails, b, length, given->tables + b * given->table_stride, columns,
                         p->block_size, num_blocks))
            return 1;
    }
    return 0;
}

/* Causal attention of every sequence with 1 to `decode_queries` queries; prefill.c does the others.
 * The last query of a sequence is at its last position.
 *
 *   q [n, heads, d], out [n, heads, dv]
 *   strides[6]                   of blocks, heads and rows of k_cache, then of v_cache
 *   query_start [sequences + 1]  index of each sequence's first query
 *   seq_lens [sequences]         its length including the new positions; 0: the output is 0
 *   tables [sequences, columns]  block tables, rows `table_stride` apart
 *   window                       sliding window; 0: none
 *   tails                        of paths of token trees (tails.h); NULL: none
 *
 * Returns 0 on success; 1 if out of memory; 2 if a block table is too short or has an invalid
 * block, or `query_start` an invalid index (nothing is read or written then).
 */
int64_t decode_attention(const element *q, const element *k_cache, const element *v_cache,
                         const int64_t *strides, int64_t block_size, const int32_t *query_start,
                         const int32_t *seq_lens, const int64_t *tables, int64_t table_stride,
                         float scale, int64_t window, element *out, int64_t sequences,
                         int64_t heads, int64_t kv_heads, int64_t d, int64_t dv, int64_t n,
                         int64_t num_blocks, int64_t columns, const batch_tails *tails) {
    problem all = {
        .k = {k_cache, strides[0], strides[1], strides[2]},
        .v = {v_cache, strides[3], strides[4], strides[5]},
        .block_size = block_size,
        .window = window,
        .kv_heads = kv_heads,
        .group = heads / kv_heads,
        .d = d,
        .dv = dv,
        .scale = scale,
    };
    batch given = {q, out, query_start, seq_lens, tables, table_stride, tails};
    if (points_outside(&all, &given, sequences, n, num_blocks, columns)) return 2;
    int64_t rows = 0, most = 0, work = 0;
    for (int64_t b = 0; b < sequences; b++) {
        problem p = sequence(&all, &given, b);
        range parts = parts_of(&p);
        if (p.queries == 0) continue;
        rows = p.queries * heads > rows ? p.queries * heads : rows;
        most = parts.end - parts.begin > most ? parts.end - parts.begin : most;
        work += p.queries * p.length;
    }
    if (rows == 0) return 0;
    int64_t time = work * heads * (d + dv) / WORK, threads = threads_for(time);
    int divided = most > 1 && threads > 1 && sequences < TASKS * threads;
    int64_t size = rows * STATE(dv), places = divided ? sequences * most : 2 * threads;
    float *states = malloc((size_t)(places * size) * sizeof(float));
    if (!states) return 1;
    attention a = {&all, &given, states, size, most, divided};
    int64_t tasks = divided ? sequences * most : sequences;
    run_job(tasks, piece_for(tasks, threads, time), threads, attend_some, &a);
    if (divided) divide_job(sequences * kv_heads, sequences * most * size, join_some, &a);
    free(states);
    return 0;
}
