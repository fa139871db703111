/* Attention of one new token per sequence over its pages, read in place (Kwon et al., 2023).
 *
 * A step reads every cached key and value once and does little with them, so what counts is that
 * they come at the speed of memory: no copy, rows asked for a tile ahead, and the query heads of a
 * KV head share each row. The softmax is online (Milakov and Gimelshein, 2018), a tile at a time.
 * A core waits for a dozen lines of memory at once, and that alone would be half its speed; where
 * it sees somebody walk through 4 KB, it fetches ahead by itself. So the next tile is asked for in
 * many places at once: a position of every head, then the next position.
 *
 * A task is a sequence, or a part of its positions where there are fewer sequences than threads
 * would like; parts are joined afterwards (Flash-Decoding, Dao et al., 2023).
 */
#include <omp.h>
#include <stdlib.h>
#include "common.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LANES 16
#define TILE 64         /* positions between two looks at the maximum, at most */
#define TILE_BYTES 4096 /* of a head's keys in a tile, at most */
#define LEAST_PART 128  /* positions that are worth a task of their own */
#define TASKS 4         /* per thread, so that none waits long for the last */
#define TOGETHER 4    /* query heads whose sums are kept in registers together */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t lanes __attribute__((vector_size(4 * LANES)));

static inline vec load_floats(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline vec load_elements(const element *p) {
#if defined(ELEMENT_BF16) && defined(__AVX512F__)
    __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return (vec)_mm512_slli_epi32(words, 16);
#elif defined(ELEMENT_BF16)
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    typedef uint32_t words __attribute__((vector_size(4 * LANES)));
    halves h;
    memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, words) << 16);
#else
    return load_floats(p);
#endif
}

/* Sixteen lanes of a and b by their numbers; 0 to 15 are a's. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif
#define LANES_OF(...) __VA_ARGS__

/* One step of `sum_each`: halves every group of lanes of a and b, whose groups alternate. */
#define JOIN(a, b, low, high) \
    (SHUFFLE(a, b, LANES_OF low) + SHUFFLE(a, b, LANES_OF high))

/* Lane i of the result is the sum of a[i]: 15 additions of vectors, where one sum after another
 * would take 64. */
static inline vec sum_each(vec *a) {
    for (int i = 0; i < 8; i++)
        a[i] = JOIN(a[i], a[i + 8], (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                    (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    for (int i = 0; i < 4; i++)
        a[i] = JOIN(a[i], a[i + 4], (0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                    (4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    for (int i = 0; i < 2; i++)
        a[i] = JOIN(a[i], a[i + 2], (0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                    (2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    return JOIN(a[0], a[1], (0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                (1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
}

/* Pages of keys or of values: [blocks, kv_heads, block_size, dim], strides in elements. */
typedef struct {
    const element *data;
    int64_t block, head, row;
} pages;

/* The rows of the first head at some positions; behind the last one, that one's again. */
typedef struct {
    const element *keys[TILE], *values[TILE];
    int64_t begin, count;
} tile;

/* The tile that begins at a position, and ends before `end`. */
static void find_tile(pages k, pages v, const int64_t *table, int64_t block_size, int64_t begin,
                      int64_t end, int64_t d, tile *t) {
    int64_t most = TILE_BYTES / (d * (int64_t)sizeof(element)) / LANES * LANES, i = 0;
    most = most < LANES ? LANES : most < TILE ? most : TILE;
    t->begin = begin;
    t->count = end - begin < most ? end - begin : most;
    while (i < t->count) {
        int64_t block = table[(begin + i) / block_size], offset = (begin + i) % block_size;
        const element *key = k.data + block * k.block + offset * k.row;
        const element *value = v.data + block * v.block + offset * v.row;
        int64_t run = block_size - offset < t->count - i ? block_size - offset : t->count - i;
        for (int64_t j = 0; j < run; j++) t->keys[i + j] = key + j * k.row;
        for (int64_t j = 0; j < run; j++) t->values[i + j] = value + j * v.row;
        i += run;
    }
    for (; i % LANES; i++) t->keys[i] = t->keys[i - 1], t->values[i] = t->values[i - 1];
}

/* Rows that will be needed: of `count` positions, `dim` elements of each head. */
typedef struct {
    const element *const *rows;
    int64_t count, heads, stride, dim, head;
} wishes;

/* Ask for the next row; into the second cache, as it is for later. */
static inline void ask(wishes *w) {
    if (w->count <= 0) return;
    const char *row = (const char *)(*w->rows + w->head * w->stride);
    for (int64_t byte = 0; byte < w->dim * (int64_t)sizeof(element); byte += 64)
        __builtin_prefetch(row + byte, 0, 2);
    if (++w->head < w->heads) return;
    w->head = 0;
    w->rows++;
    w->count--;
}

/* q . k of one query head for 16 keys, which begin `first` elements behind `rows`. */
static inline vec score(const element *q, const element *const *rows, int64_t first, int64_t d) {
    vec sums[LANES] = {0};
    int64_t j = 0;
#if defined(ELEMENT_BF16) && defined(__AVX512BF16__)
    for (; j + 2 * LANES <= d; j += 2 * LANES) { /* 32 products, by pairs, at once */
        __m512bh part = (__m512bh)_mm512_loadu_si512(q + j);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            sums[i] = (vec)_mm512_dpbf16_ps((__m512)sums[i], part,
                                            (__m512bh)_mm512_loadu_si512(rows[i] + first + j));
    }
#endif
    for (; j < d; j += LANES) {
        vec part = load_elements(q + j);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) sums[i] += load_elements(rows[i] + first + j) * part;
    }
    return sum_each(sums);
}

/* sums[g] += sum over positions of weights[g] * value, for `group` heads whose sums are `stride`
 * floats apart, for `columns` vectors of the values, which begin `column` elements behind `rows`.
 * `later` is asked for meanwhile, if it is not NULL. */
static inline __attribute__((always_inline)) void add_values(
    const int group, const float *weights, const element *const *rows, wishes *later,
    int64_t count, int64_t column, const int columns, float *sums, int64_t stride) {
    vec sum[group][2];
    for (int g = 0; g < group; g++)
        for (int c = 0; c < columns; c++)
            sum[g][c] = load_floats(sums + g * stride + c * LANES);
    for (int64_t i = 0; i < count; i++) {
        if (later) ask(later);
        for (int c = 0; c < columns; c++) {
            vec value = load_elements(rows[i] + column + c * LANES);
            for (int g = 0; g < group; g++) sum[g][c] += value * weights[g * TILE + i];
        }
    }
    for (int g = 0; g < group; g++)
        for (int c = 0; c < columns; c++)
            memcpy(sums + g * stride + c * LANES, &sum[g][c], sizeof(vec));
}

/* The same for all columns of up to 4 heads: constant numbers keep the sums in registers. */
static inline void add_all_values(int64_t group, const float *weights, const element *const *rows,
                                  wishes *later, int64_t count, int64_t first, int64_t dim,
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

/* The state of one query head: the weighted values, the largest score, the sum of weights. */
#define STATE(dim) ((dim) + 2)

static inline vec larger(vec a, vec b) {
    lanes chosen = a > b; /* all bits of a lane, or none */
    return (vec)((chosen & (lanes)a) | (~chosen & (lanes)b));
}

/* The lanes of a vector, each exchanged with the one that many places on. */
#define SWAP_8(a) SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define SWAP_4(a) SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define SWAP_2(a) SHUFFLE(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SWAP_1(a) SHUFFLE(a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)

static inline float largest(vec a) {
    a = larger(a, SWAP_8(a));
    a = larger(a, SWAP_4(a));
    a = larger(a, SWAP_2(a));
    return larger(a, SWAP_1(a))[0];
}

static inline float sum_of(vec a) {
    a += SWAP_8(a);
    a += SWAP_4(a);
    a += SWAP_2(a);
    return (a + SWAP_1(a))[0];
}

/* Scores of a tile, behind `count` -inf, become weights; what was summed before shrinks with the
 * new maximum. */
static inline void reweigh(float *scores, int64_t count, float *state, int64_t dim) {
    vec most = load_floats(scores), sums = {0};
    for (int64_t i = LANES; i < count; i += LANES) most = larger(most, load_floats(scores + i));
    float best = largest(most);
    best = state[dim] > best ? state[dim] : best;
    float origin = best == -INFINITY ? 0.f : best; /* -inf - -inf would be NaN */
    for (int64_t i = 0; i < count; i += LANES) {
        for (int64_t j = i; j < i + LANES; j++) scores[j] = fast_exp(scores[j] - origin);
        sums += load_floats(scores + i);
    }
    float shrink = fast_exp(state[dim] - origin);
    state[dim] = best;
    state[dim + 1] = state[dim + 1] * shrink + sum_of(sums);
    if (shrink != 1.f)
        for (int64_t j = 0; j < dim; j++) state[j] *= shrink;
}

/* Attention of all heads of q over positions begin .. end, into their states. */
static void attend(const element *q, pages k, pages v, const int64_t *table, int64_t block_size,
                   int64_t begin, int64_t end, float scale, int64_t kv_heads, int64_t group,
                   int64_t d, int64_t dv, float *states) {
    float weights[group * TILE];
    tile tiles[2], *now = &tiles[0], *next = &tiles[1];
    for (int64_t g = 0; g < kv_heads * group; g++) {
        memset(states + g * STATE(dv), 0, (size_t)dv * sizeof(float));
        states[g * STATE(dv) + dv] = -INFINITY;
        states[g * STATE(dv) + dv + 1] = 0;
    }
    find_tile(k, v, table, block_size, begin, end, d, now);
    while (now->count > 0) {
        int64_t count = now->count;
        find_tile(k, v, table, block_size, now->begin + count, end, d, next);
        wishes keys = {next->keys, next->count, kv_heads, k.head, d, 0};
        wishes values = {next->values, next->count, kv_heads, v.head, dv, 0};
        for (int64_t head = 0; head < kv_heads; head++) {
            const element *mine = q + head * group * d;
            float *sums = states + head * group * STATE(dv);
            for (int64_t i = 0; i < count; i += LANES)
                for (int64_t g = 0; g < group; g++) {
                    for (int64_t r = g; r < LANES; r += group) ask(&keys);
                    vec scores = score(mine + g * d, now->keys + i, head * k.head, d);
                    scores *= scale;
                    memcpy(weights + g * TILE + i, &scores, sizeof scores);
                }
            for (int64_t g = 0; g < group; g++) {
                for (int64_t i = count; i % LANES; i++) weights[g * TILE + i] = -INFINITY;
                reweigh(weights + g * TILE, count, sums + g * STATE(dv), dv);
            }
            for (int64_t g = 0; g < group; g += TOGETHER)
                add_all_values(group - g < TOGETHER ? group - g : TOGETHER, weights + g * TILE,
                               now->values, g ? 0 : &values, count, head * v.head, dv,
                               sums + g * STATE(dv), STATE(dv));
        }
        tile *done = now;
        now = next;
        next = done;
    }
}

/* Join the parts of one query head and write its output. */
static void finish(const float *states, int64_t parts, int64_t stride, int64_t dim, element *out) {
    float best = -INFINITY, total = 0, sums[dim];
    memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < parts; i++) {
        float largest = states[i * stride + dim];
        best = largest > best ? largest : best;
    }
    for (int64_t i = 0; i < parts; i++) {
        const float *state = states + i * stride;
        float weight = state[dim] == -INFINITY ? 0.f : fast_exp(state[dim] - best);
        total += state[dim + 1] * weight;
        for (int64_t j = 0; j < dim; j++) sums[j] += state[j] * weight;
    }
    for (int64_t j = 0; j < dim; j++) out[j] = store(sums[j] / total);
}

/* For every sequence with exactly one query (others are left to prefill.c):
 *
 *   q [n, heads, d], out [n, heads, dv]
 *   strides[6]                   of blocks, heads and rows of k_cache, then of v_cache
 *   query_start [sequences + 1]  the row of each sequence's first query
 *   seq_lens [sequences]         its positions, the new one included; 0: the output is 0
 *   tables [sequences, columns]  its blocks, rows `table_stride` apart
 *   window                       how many of the latest positions are seen; 0: all
 *
 * Returns 0; 1 where there is no memory; 2, and nothing is read or written, where a table names a
 * block that does not exist or is too short, or `query_start` a row that does not exist.
 */
int64_t decode_attention(const element *q, const element *k_cache, const element *v_cache,
                         const int64_t *strides, int64_t block_size, const int32_t *query_start,
                         const int32_t *seq_lens, const int64_t *tables, int64_t table_stride,
                         float scale, int64_t window, element *out, int64_t sequences,
                         int64_t heads, int64_t kv_heads, int64_t d, int64_t dv, int64_t n,
                         int64_t num_blocks, int64_t columns) {
    pages k = {k_cache, strides[0], strides[1], strides[2]};
    pages v = {v_cache, strides[3], strides[4], strides[5]};
    int64_t group = heads / kv_heads, longest = 0;
    if (sequences == 0) return 0;
    for (int64_t b = 0; b < sequences; b++) {
        int64_t used = (seq_lens[b] + block_size - 1) / block_size;
        if (seq_lens[b] < 0 || used > columns) return 2;
        if (query_start[b] < 0 || query_start[b] > query_start[b + 1]) return 2;
        if (query_start[b + 1] > n) return 2;
        for (int64_t i = 0; i < used; i++)
            if ((uint64_t)tables[b * table_stride + i] >= (uint64_t)num_blocks) return 2;
        if (seq_lens[b] > longest) longest = seq_lens[b];
    }
    if (window && longest > window) longest = window;
    int64_t wanted = TASKS * omp_get_max_threads();
    int64_t most = longest / LEAST_PART, parts = (wanted + sequences - 1) / sequences;
    parts = parts < most ? parts : most;
    if (parts < 1) parts = 1;
    int64_t size = heads * STATE(dv);
    float *states = malloc((size_t)(sequences * parts * size) * sizeof(float));
    if (!states) return 1;
#pragma omp parallel for schedule(dynamic) if (sequences * longest > LEAST_PART)
    for (int64_t task = 0; task < sequences * parts; task++) {
        int64_t b = task / parts, part = task % parts;
        int64_t row = query_start[b], length = seq_lens[b];
        if (query_start[b + 1] - row != 1 || length == 0) continue;
        int64_t first = window && length > window ? length - window : 0;
        int64_t begin = first + (length - first) * part / parts;
        int64_t end = first + (length - first) * (part + 1) / parts;
        float *mine = states + task * size;
        attend(q + row * heads * d, k, v, tables + b * table_stride, block_size, begin, end, scale,
               kv_heads, group, d, dv, mine);
        if (parts == 1)
            for (int64_t h = 0; h < heads; h++)
                finish(mine + h * STATE(dv), 1, size, dv, out + (row * heads + h) * dv);
    }
    for (int64_t b = 0; b < sequences; b++) {
        if (query_start[b + 1] - query_start[b] != 1) continue;
        element *rows = out + query_start[b] * heads * dv;
        if (seq_lens[b] == 0) memset(rows, 0, (size_t)(heads * dv) * sizeof(element));
        else if (parts > 1)
            for (int64_t h = 0; h < heads; h++)
                finish(states + b * parts * size + h * STATE(dv), parts, size, dv, rows + h * dv);
    }
    free(states);
    return 0;
}
