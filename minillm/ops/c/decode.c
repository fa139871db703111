/* Attention of one new token per sequence over its pages, read in place (Kwon et al., 2023).
 *
 * A step reads every cached key and value once and does little with them, so what counts is that
 * they come at the speed of memory: no copy, rows asked for a tile ahead, and the query heads of a
 * KV head share each row. The softmax is online (Milakov and Gimelshein, 2018), a tile at a time.
 *
 * A task is a KV head of a sequence, or a part of its positions where there are fewer heads than
 * threads would like; parts are joined afterwards (Flash-Decoding, Dao et al., 2023).
 */
#include <omp.h>
#include <stdlib.h>
#include "common.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LANES 16
#define TILE 64         /* positions between two looks at the maximum */
#define WIDE (TILE + LANES) /* their weights, and room for a vector that begins at the last */
#define LEAST_PART 256  /* positions that are worth a task of their own */
#define TASKS 4         /* per thread, so that none waits long for the last */
#define MOST_GROUP 4    /* query heads whose sums are kept in registers together */

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

/* One step of `sum_each`: halves every group of lanes of a and b, whose groups alternate. */
#define JOIN(a, b, low, high) \
    (__builtin_shuffle(a, b, (lanes)low) + __builtin_shuffle(a, b, (lanes)high))
#define LIST(...) {__VA_ARGS__}

/* Lane i of the result is the sum of a[i]: 15 additions of vectors, where one sum after another
 * would take 64. */
static inline vec sum_each(vec *a) {
    for (int i = 0; i < 8; i++)
        a[i] = JOIN(a[i], a[i + 8], LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                    LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    for (int i = 0; i < 4; i++)
        a[i] = JOIN(a[i], a[i + 4], LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                    LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    for (int i = 0; i < 2; i++)
        a[i] = JOIN(a[i], a[i + 2], LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                    LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    return JOIN(a[0], a[1], LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
}

/* Pages of keys or of values: [blocks, kv_heads, block_size, dim], strides in elements. */
typedef struct {
    const element *data;
    int64_t block, head, row;
} pages;

/* Positions whose rows lie one after another, in one page. */
typedef struct {
    const element *keys, *values;
    int64_t count;
} run;

/* The run that begins at a position and ends before `end`. */
static inline run find_run(pages k, pages v, int64_t head, const int64_t *table,
                           int64_t block_size, int64_t at, int64_t end) {
    int64_t block = table[at / block_size], offset = at % block_size;
    int64_t left = block_size - offset;
    return (run){k.data + block * k.block + head * k.head + offset * k.row,
                 v.data + block * v.block + head * v.head + offset * v.row,
                 left < end - at ? left : end - at};
}

/* Ask for 16 rows before they are needed. Few at a time, between other work: a core can wait for a
 * dozen lines of memory at once, and stands still with more. */
static inline void ask_for(const element *rows, int64_t stride, int64_t count, int64_t dim) {
    for (int64_t i = 0; i < count && i < LANES; i++)
        for (int64_t byte = 0; byte < dim * (int64_t)sizeof(element); byte += 64)
            __builtin_prefetch((const char *)(rows + i * stride) + byte);
}

/* q . k of one query head for `count` rows of keys, at most 16; behind them the last one's. */
static inline vec score(const element *q, const element *keys, int64_t stride, int64_t count,
                        int64_t d) {
    const element *rows[LANES];
    for (int64_t i = 0; i < LANES; i++) rows[i] = keys + (i < count ? i : count - 1) * stride;
    vec sums[LANES] = {0};
    int64_t j = 0;
#if defined(ELEMENT_BF16) && defined(__AVX512BF16__)
    for (; j + 2 * LANES <= d; j += 2 * LANES) { /* 32 products, by pairs, at once */
        __m512bh part = (__m512bh)_mm512_loadu_si512(q + j);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            sums[i] = (vec)_mm512_dpbf16_ps((__m512)sums[i], part,
                                            (__m512bh)_mm512_loadu_si512(rows[i] + j));
    }
#endif
    for (; j < d; j += LANES) {
        vec part = load_elements(q + j);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) sums[i] += load_elements(rows[i] + j) * part;
    }
    return sum_each(sums);
}

/* sums[g] += sum over positions of weights[g] * value, for `group` heads whose sums are `stride`
 * floats apart, for 32 of the values' columns. */
static inline __attribute__((always_inline)) void add_values(const int group, const float *weights,
                                                             const element *rows, int64_t row,
                                                             int64_t count, int64_t column,
                                                             int columns, float *sums,
                                                             int64_t stride) {
    vec sum[group][2];
    for (int g = 0; g < group; g++)
        for (int c = 0; c < columns; c++)
            sum[g][c] = load_floats(sums + g * stride + column + c * LANES);
    for (int64_t i = 0; i < count; i++)
        for (int c = 0; c < columns; c++) {
            vec value = load_elements(rows + i * row + column + c * LANES);
            for (int g = 0; g < group; g++) sum[g][c] += value * weights[g * WIDE + i];
        }
    for (int g = 0; g < group; g++)
        for (int c = 0; c < columns; c++)
            memcpy(sums + g * stride + column + c * LANES, &sum[g][c], sizeof(vec));
}

/* The same for all columns of up to 4 heads: constant numbers keep the sums in registers. */
static inline void add_all_values(int64_t group, const float *weights, const element *rows,
                                  int64_t row, int64_t count, int64_t dim, float *sums,
                                  int64_t stride) {
    for (int64_t j = 0; j < dim; j += 2 * LANES) {
        int both = dim - j > LANES;
        switch (group) {
#define CASE(n)                                                                    \
    case n:                                                                        \
        if (both) add_values(n, weights, rows, row, count, j, 2, sums, stride);         \
        else add_values(n, weights, rows, row, count, j, 1, sums, stride);              \
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

/* Scores of a tile, behind `count` -inf, become weights; what was summed before shrinks with the new
 * maximum. */
static inline void reweigh(float *scores, int64_t count, float *state, int64_t dim) {
    vec most = load_floats(scores), sums = {0};
    for (int64_t i = LANES; i < count; i += LANES) most = larger(most, load_floats(scores + i));
    float best = state[dim], total = 0;
    for (int i = 0; i < LANES; i++) best = most[i] > best ? most[i] : best;
    for (int64_t i = 0; i < count; i += LANES) {
        for (int64_t j = i; j < i + LANES; j++) scores[j] = fast_exp(scores[j] - best);
        sums += load_floats(scores + i);
    }
    for (int i = 0; i < LANES; i++) total += sums[i];
    float shrink = fast_exp(state[dim] - best);
    state[dim] = best;
    state[dim + 1] = state[dim + 1] * shrink + total;
    if (shrink != 1.f)
        for (int64_t j = 0; j < dim; j++) state[j] *= shrink;
}

/* Attention of the `group` heads of q over positions begin .. end, into their states. */
static void attend(const element *q, pages k, pages v, int64_t head, const int64_t *table,
                   int64_t block_size, int64_t begin, int64_t end, float scale, int64_t group,
                   int64_t d, int64_t dv, float *states) {
    float weights[group * WIDE];
    run runs[TILE];
    for (int64_t g = 0; g < group; g++) {
        memset(states + g * STATE(dv), 0, (size_t)dv * sizeof(float));
        states[g * STATE(dv) + dv] = -INFINITY;
        states[g * STATE(dv) + dv + 1] = 0;
    }
    if (begin >= end) return; /* a part of nothing */
    run now = find_run(k, v, head, table, block_size, begin, end < begin + TILE ? end : begin + TILE);
    for (int64_t at = begin; at < end;) {
        int64_t stop = at + TILE < end ? at + TILE : end, num_runs = 0, count = 0;
        while (at < stop) {
            run next = {0};
            int64_t after = at + now.count;
            if (after < end) {
                int64_t limit = after < stop ? stop : after + TILE < end ? after + TILE : end;
                next = find_run(k, v, head, table, block_size, after, limit);
            }
            for (int64_t i = 0; i < now.count; i += LANES) {
                ask_for(next.keys + i * k.row, k.row, next.count - i, d);
                ask_for(next.values + i * v.row, v.row, next.count - i, dv);
                for (int64_t g = 0; g < group; g++) {
                    vec scores = score(q + g * d, now.keys + i * k.row, k.row, now.count - i, d);
                    scores *= scale;
                    memcpy(weights + g * WIDE + count + i, &scores, sizeof scores);
                }
            }
            runs[num_runs++] = now;
            count += now.count;
            at = after;
            now = next;
        }
        for (int64_t g = 0; g < group; g++) {
            for (int64_t i = count; i % LANES; i++) weights[g * WIDE + i] = -INFINITY;
            reweigh(weights + g * WIDE, count, states + g * STATE(dv), dv);
        }
        for (int64_t r = 0, done = 0; r < num_runs; done += runs[r++].count)
            for (int64_t g = 0; g < group; g += MOST_GROUP)
                add_all_values(group - g < MOST_GROUP ? group - g : MOST_GROUP,
                               weights + g * WIDE + done, runs[r].values, v.row, runs[r].count, dv,
                               states + g * STATE(dv), STATE(dv));
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
    int64_t wanted = TASKS * omp_get_max_threads(), tasks = sequences * kv_heads;
    int64_t most = longest / LEAST_PART, parts = (wanted + tasks - 1) / tasks;
    parts = parts < most ? parts : most;
    if (parts < 1) parts = 1;
    int64_t size = group * STATE(dv);
    float *states = malloc((size_t)(tasks * parts * size) * sizeof(float));
    if (!states) return 1;
#pragma omp parallel for schedule(dynamic) if (tasks * longest > LEAST_PART)
    for (int64_t task = 0; task < tasks * parts; task++) {
        int64_t b = task / (kv_heads * parts), head = task / parts % kv_heads, part = task % parts;
        int64_t row = query_start[b], length = seq_lens[b];
        if (query_start[b + 1] - row != 1 || length == 0) continue;
        int64_t first = window && length > window ? length - window : 0;
        int64_t begin = first + (length - first) * part / parts;
        int64_t end = first + (length - first) * (part + 1) / parts;
        float *mine = states + task * size;
        attend(q + (row * heads + head * group) * d, k, v, head, tables + b * table_stride,
               block_size, begin, end, scale, group, d, dv, mine);
        if (parts == 1)
            for (int64_t g = 0; g < group; g++)
                finish(mine + g * STATE(dv), 1, size, dv,
                       out + (row * heads + head * group + g) * dv);
    }
    for (int64_t b = 0; b < sequences; b++) {
        if (query_start[b + 1] - query_start[b] != 1) continue;
        element *rows = out + query_start[b] * heads * dv;
        if (seq_lens[b] == 0) memset(rows, 0, (size_t)(heads * dv) * sizeof(element));
        else if (parts > 1)
            for (int64_t h = 0; h < heads; h++)
                finish(states + ((b * kv_heads + h / group) * parts * group + h % group) * STATE(dv),
                       parts, size, dv, rows + h * dv);
    }
    free(states);
    return 0;
}
