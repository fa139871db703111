/* Causal attention of many new tokens over their sequence's pages: prompts, parts of prompts,
 * drafted tokens to verify. The loop is FlashAttention-2's (Dao, 2023): rows of queries stay, tiles
 * of keys and values go by, and the softmax is online (Milakov and Gimelshein, 2018).
 *
 * Everything is transposed, S^T = K Q^T and O^T = V^T P^T, so that a vector holds the same thing of
 * 16 queries. Then the maximum, the sum and the mask of a row need no operation across lanes, and
 * both products have one form, C = A B:
 *
 *   C [m, 32] float32    scores of a key, or sums of a value's dimension, for 32 queries
 *   A [m, k] words       keys as they are, or values transposed
 *   B [k, 32] words      queries transposed, or the probabilities just as the softmax leaves them
 *
 * A word is what one step of the inner product takes: a float32, or where the processor multiplies
 * bf16 a pair of neighbours along k, which is how both AMX and AVX512_BF16 want B.
 *
 * The query heads that share a KV head count as further queries. Tiles of keys begin at multiples
 * of TILE and what a row does not see adds exact zeros, so the bits of a row depend neither on the
 * batch, nor on how its prompt was cut, nor on the threads.
 */
#if defined(ELEMENT_BF16) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIR 2 /* elements of a word */
#else
#define PAIR 1
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define M_STEP 8 /* rows of C in registers, two vectors each */
#else
#define LANES 8
#define M_STEP 4
#endif
#if PAIR == 2 && defined(__AMX_BF16__) && defined(__linux__)
#define AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <omp.h>
#include <stdlib.h>
#include "common.h"

#define COLUMNS 32           /* rows of queries that are worked on together */
#define TILE 128             /* positions that are worked on together */
#define TASK_BYTES (1 << 19) /* of queries and sums of a task, half of a small L2 */
#define TASKS 4              /* per thread, so that none waits long for the last */
#define ROUND_UP(x, to) (((x) + (to) - 1) / (to) * (to))

typedef uint32_t word;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

/* Pages of keys or of values: [blocks, kv_heads, block_size, dim], strides in elements. */
typedef struct {
    const element *data;
    int64_t block, head, row, dim;
} pages;

typedef struct {
    const element *q;
    element *out;
    pages k, v;
    const int64_t *tables;
    int64_t table_stride, block_size, heads, group, window;
    int64_t k_words, v_rows; /* dimensions as the products see them: multiples of a tile */
    float scale;
    int amx;
} problem;

/* A KV head of a sequence, and some of its rows: row r is query r / group, head r % group. */
typedef struct {
    int64_t sequence, head, begin, end, query_row, past;
} task;

/* A thread's memory. Rows of a task come in groups of COLUMNS: q [groups, k_words, COLUMNS],
 * sums [groups, v_rows, COLUMNS], best and total [groups, COLUMNS], seen_to [groups, COLUMNS]. */
typedef struct {
    word *q, *keys, *values, *staged, *weights;
    float *sums, *scores, *best, *total;
    int32_t *seen_to;
} scratch;

static inline vec load_vec(const void *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store_vec(void *p, vec v) { memcpy(p, &v, sizeof v); }

static inline vec larger(vec a, vec b) { /* b if one is NaN */
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    words first = (words)(a > b);
    return (vec)(((words)a & first) | ((words)b & ~first));
#endif
}

/* 2^x for x <= 0, within 2e-7: x = n + r, 2^r by a polynomial (least maximum error on |r| <= 1/2).
 * To add 1.5 * 2^23 + 127 rounds x to a whole number and leaves n + 127, the exponent of 2^n, in
 * the lowest bits. Exactly 0 from -127 downwards, NaN stays NaN. */
static inline vec exp2_vec(vec x) {
    const float round = 12582912.f + 127.f;
    x = larger((vec){0} - 127.f, x);
    vec t = x + round;
    vec r = x - (t - round);
    vec p = r * 1.32647e-3f + 9.67151e-3f;
    p = p * r + 5.550734e-2f;
    p = p * r + 2.4022242e-1f;
    p = p * r + 6.9314698e-1f;
    p = p * r + 1.f;
    return p * (vec)((words)t << 23);
}

/* Words [16, 16] -> transposed; strides in words. */
static inline void transpose(const word *from, int64_t from_stride, word *to, int64_t to_stride) {
#if defined(__AVX512F__)
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(from + i * from_stride);
#pragma GCC unroll 4
    for (int step = 8; step > 0; step /= 2) { /* exchange the off-diagonal quarters */
        __mmask16 upper = step == 8 ? 0xff00 : step == 4 ? 0xf0f0 : step == 2 ? 0xcccc : 0xaaaa;
        __m512i low = _mm512_mask_add_epi32(lane, upper, lane, _mm512_set1_epi32(16 - step));
        __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(step)), upper,
                                             lane, _mm512_set1_epi32(16));
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & step) continue;
            __m512i a = rows[i], b = rows[i + step];
            rows[i] = _mm512_permutex2var_epi32(a, low, b);
            rows[i + step] = _mm512_permutex2var_epi32(a, high, b);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_stride, rows[i]);
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[i * to_stride + j] = from[j * from_stride + i];
#endif
}

/* `count` rows of elements -> words, [count, width] with zeros behind `dim`. */
static inline void stage(const element *from, int64_t stride, int64_t count, int64_t dim, word *to,
                         int64_t width) {
#if PAIR == 2
    if (stride == dim && dim == width * PAIR) {
        memcpy(to, from, (size_t)(count * width) * sizeof(word));
        return;
    }
#endif
    for (int64_t i = 0; i < count; i++, from += stride, to += width) {
        memset(to, 0, (size_t)width * sizeof(word));
#if PAIR == 2
        memcpy(to, from, (size_t)dim * sizeof(element));
#else
        for (int64_t j = 0; j < dim; j++) ((float *)to)[j] = load(from[j]);
#endif
    }
}

/* Join `count` positions from their pages to words [count up to a multiple of 32, width]; behind
 * the last they are 0, for the product meets them and memory there may hold anything. */
static void join_pages(const problem *p, pages from, const task *t, int64_t begin, int64_t count,
                       word *to, int64_t width) {
    const int64_t *table = p->tables + t->sequence * p->table_stride;
    memset(to + count * width, 0, (size_t)((ROUND_UP(count, 32) - count) * width) * sizeof(word));
    while (count > 0) {
        int64_t offset = begin % p->block_size, now = p->block_size - offset;
        now = now < count ? now : count;
        stage(from.data + table[begin / p->block_size] * from.block + t->head * from.head +
                  offset * from.row,
              from.row, now, from.dim, to, width);
        begin += now;
        count -= now;
        to += now * width;
    }
}

/* Staged values [count, rows] -> [rows, TILE], 32 positions at a time. */
static void transpose_values(const word *staged, int64_t count, int64_t rows, word *values) {
    const int64_t width = rows / PAIR, row = TILE / PAIR;
    for (int64_t at = 0; at < ROUND_UP(count, 32); at += 16 * PAIR)
        for (int64_t j = 0; j < width; j += 16) {
            const word *block = staged + at * width + j;
#if PAIR == 2 /* words of two dimensions of a position -> of two positions of a dimension */
            word even[16 * 16], odd[16 * 16];
            for (int64_t i = 0; i < 16; i++)
                for (int64_t l = 0; l < 16; l++) {
                    word a = block[2 * i * width + l], b = block[(2 * i + 1) * width + l];
                    even[i * 16 + l] = (a & 0xffff) | b << 16;
                    odd[i * 16 + l] = a >> 16 | (b & 0xffff0000);
                }
            transpose(even, 16, values + 2 * j * row + at / 2, 2 * row);
            transpose(odd, 16, values + (2 * j + 1) * row + at / 2, 2 * row);
#else
            transpose(block, width, values + j * row + at, row);
#endif
        }
}

#if defined(AMX)
/* Linux hands the tile registers out on demand (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
static int has_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

static void shape_tiles(void) { /* all 16 rows of 16 words */
    struct {
        uint8_t palette, start_row, unused[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.rows[i] = 16;
    for (int i = 0; i < 8; i++) tiles.bytes_per_row[i] = 64;
    __asm__ volatile("" ::"r"(&tiles) : "memory"); /* the intrinsics do not say what they read */
    _tile_loadconfig(&tiles);
}

static void multiply_tiles(float *c, const word *a, int64_t a_stride, const word *b, int64_t m,
                           int64_t k, int add) {
    __asm__ volatile("" ::: "memory");
    for (int64_t i = 0; i < m; i += 32, c += 32 * COLUMNS, a += 32 * a_stride) {
        if (add) {
            _tile_loadd(0, c, COLUMNS * 4);
            _tile_loadd(1, c + 16, COLUMNS * 4);
            _tile_loadd(2, c + 16 * COLUMNS, COLUMNS * 4);
            _tile_loadd(3, c + 16 * COLUMNS + 16, COLUMNS * 4);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t j = 0; j < k; j += 16) {
            _tile_loadd(4, a + j, a_stride * 4);
            _tile_loadd(6, b + j * COLUMNS, COLUMNS * 4);
            _tile_loadd(7, b + j * COLUMNS + 16, COLUMNS * 4);
            _tile_loadd(5, a + 16 * a_stride + j, a_stride * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c, COLUMNS * 4);
        _tile_stored(1, c + 16, COLUMNS * 4);
        _tile_stored(2, c + 16 * COLUMNS, COLUMNS * 4);
        _tile_stored(3, c + 16 * COLUMNS + 16, COLUMNS * 4);
    }
}
#endif

/* sum + a b, of one word of A and a vector of words of B. */
static inline vec multiply_add(vec sum, word a, vec b) {
#if PAIR == 2
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
#else
    float f;
    memcpy(&f, &a, 4);
    return sum + b * f;
#endif
}

/* C = A B, or C += A B: C [m, 32], A [m, k] with rows `a_stride` apart, B [k, 32]; m and k are
 * multiples of 32 elements. */
static void multiply(const problem *p, float *c, const word *a, int64_t a_stride, const word *b,
                     int64_t m, int64_t k, int add) {
#if defined(AMX)
    if (p->amx) {
        multiply_tiles(c, a, a_stride, b, m, k, add);
        return;
    }
#endif
    (void)p;
    for (int64_t i = 0; i < m; i += M_STEP, c += M_STEP * COLUMNS, a += M_STEP * a_stride)
        for (int64_t column = 0; column < COLUMNS; column += 2 * LANES) {
            vec sums[M_STEP][2] = {0};
            if (add)
                for (int r = 0; r < M_STEP; r++) {
                    sums[r][0] = load_vec(c + r * COLUMNS + column);
                    sums[r][1] = load_vec(c + r * COLUMNS + column + LANES);
                }
            for (int64_t j = 0; j < k; j++) {
                vec left = load_vec(b + j * COLUMNS + column);
                vec right = load_vec(b + j * COLUMNS + column + LANES);
#pragma GCC unroll 8
                for (int r = 0; r < M_STEP; r++) {
                    sums[r][0] = multiply_add(sums[r][0], a[r * a_stride + j], left);
                    sums[r][1] = multiply_add(sums[r][1], a[r * a_stride + j], right);
                }
            }
            for (int r = 0; r < M_STEP; r++) {
                store_vec(c + r * COLUMNS + column, sums[r][0]);
                store_vec(c + r * COLUMNS + column + LANES, sums[r][1]);
            }
        }
}

/* -infinity where a query does not see a position: it stands before it, or beyond the window. */
static void mask(float *scores, int64_t begin, int64_t count, const int32_t *seen_to,
                 int32_t window) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < COLUMNS; j++) {
            int32_t behind = seen_to[j] - (int32_t)(begin + i);
            float s = scores[i * COLUMNS + j];
            scores[i * COLUMNS + j] = behind < 0 || behind >= window ? -INFINITY : s;
        }
}

/* Scores of one tile, [count, COLUMNS], become weights, 2^((score - best) * scale), as B of the
 * next product, rounded to elements; what was summed before shrinks with the new maximum. */
static void softmax(const float *scores, int64_t count, float scale, word *weights, float *best,
                    float *total, float *sums, int64_t rows) {
    for (int64_t at = 0; at < COLUMNS; at += LANES) {
        const float *s = scores + at;
        vec old = load_vec(best + at), tops[4] = {old, old, old, old};
        for (int64_t i = 0; i < count; i += 4) /* several maxima: one would wait for itself */
#pragma GCC unroll 4
            for (int l = 0; l < 4; l++) tops[l] = larger(tops[l], load_vec(s + (i + l) * COLUMNS));
        vec top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
        vec shift = top * scale, shrink = exp2_vec((old - top) * scale), sum = {0};
        for (int64_t i = 0; i < count; i += 2) {
            vec a = exp2_vec(load_vec(s + i * COLUMNS) * scale - shift);
            vec b = exp2_vec(load_vec(s + (i + 1) * COLUMNS) * scale - shift);
            sum += a + b;
#if PAIR == 2
            const __m512i alternate = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26,
                                                       10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                                       19, 3, 18, 2, 17, 1, 16, 0);
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
            store_vec(weights + i / 2 * COLUMNS + at,
                      (vec)_mm512_permutexvar_epi16(alternate, both));
#else
            store_vec(weights + i * COLUMNS + at, a);
            store_vec(weights + (i + 1) * COLUMNS + at, b);
#endif
        }
        store_vec(best + at, top);
        store_vec(total + at, load_vec(total + at) * shrink + sum);
        words same = (words)(shrink == 1.f);
        uint32_t all = UINT32_MAX;
        for (int l = 0; l < LANES; l++) all &= same[l];
        if (all) continue; /* most tiles raise no maximum */
        for (int64_t r = 0; r < rows; r++) {
            float *x = sums + r * COLUMNS + at;
            store_vec(x, load_vec(x) * shrink);
        }
    }
}

/* Row r of a task's sequence and KV head among all rows of q and out: [n, heads]. */
static inline int64_t place(const problem *p, const task *t, int64_t r) {
    return (t->query_row + r / p->group) * p->heads + t->head * p->group + r % p->group;
}

/* The queries of a task, transposed, and sums of nothing. */
static void begin_task(const problem *p, const task *t, scratch *w) {
    int64_t d = p->k.dim, width = p->k_words;
    for (int64_t r = t->begin; r < ROUND_UP(t->end, COLUMNS); r++) {
        int64_t at = r - t->begin, column = at % COLUMNS;
        word *row = w->staged + column * width;
        if (r < t->end) stage(p->q + place(p, t, r) * d, d, 1, d, row, width);
        else memset(row, 0, (size_t)width * sizeof(word)); /* a full group is simpler */
        w->seen_to[at] = (int32_t)(t->past + (r < t->end ? r : t->end - 1) / p->group);
        w->best[at] = -1e30f; /* finite: the difference of two infinities is NaN */
        w->total[at] = 0;
        if (column % 16 == 15)
            for (int64_t j = 0; j < width; j += 16)
                transpose(row - 15 * width + j, width,
                          w->q + ((at / COLUMNS) * width + j) * COLUMNS + column - 15, COLUMNS);
    }
    int64_t columns = ROUND_UP(t->end - t->begin, COLUMNS);
    memset(w->sums, 0, (size_t)(columns * p->v_rows) * sizeof(float));
}

/* sums / total -> out. A row that saw nothing is 0. */
static void finish_task(const problem *p, const task *t, scratch *w) {
    for (int64_t r = t->begin; r < t->end; r++) {
        int64_t at = r - t->begin, column = at % COLUMNS;
        float *row = (float *)w->staged + column % 16 * p->v_rows;
        if (column % 16 == 0)
            for (int64_t j = 0; j < p->v_rows; j += 16)
                transpose((word *)w->sums + ((at / COLUMNS) * p->v_rows + j) * COLUMNS + column,
                          COLUMNS, w->staged + j, p->v_rows);
        element *out = p->out + place(p, t, r) * p->v.dim;
        float scale = w->total[at] == 0 ? 0 : 1 / w->total[at];
        for (int64_t j = 0; j < p->v.dim; j++) out[j] = store(row[j] * scale);
    }
}

/* FlashAttention-2's loop. */
static void attend(const problem *p, const task *t, scratch *w) {
    int64_t columns = ROUND_UP(t->end - t->begin, COLUMNS), v_words = p->v_rows / PAIR;
    begin_task(p, t, w);
    int64_t first = w->seen_to[0] - p->window + 1, last = w->seen_to[columns - 1];
    for (int64_t at = first > 0 ? first / TILE * TILE : 0; at <= last; at += TILE) {
        int64_t count = last + 1 - at < TILE ? last + 1 - at : TILE;
        join_pages(p, p->k, t, at, count, w->keys, p->k_words);
        join_pages(p, p->v, t, at, count, w->staged, v_words);
        transpose_values(w->staged, count, p->v_rows, w->values);
        for (int64_t c = 0; c < columns; c += COLUMNS) {
            int64_t lowest = w->seen_to[c], highest = w->seen_to[c + COLUMNS - 1];
            int64_t seen = highest + 1 - at < count ? highest + 1 - at : count;
            if (seen <= 0 || at + seen + p->window <= lowest + 1) continue; /* none sees it */
            int64_t keys = ROUND_UP(seen, 32);
            float *sums = w->sums + c * p->v_rows;
            multiply(p, w->scores, w->keys, p->k_words, w->q + c * p->k_words, keys, p->k_words, 0);
            if (at + keys > lowest + 1 || at + p->window <= highest)
                mask(w->scores, at, keys, w->seen_to + c, (int32_t)p->window);
            softmax(w->scores, keys, p->scale, w->weights, w->best + c, w->total + c, sums,
                    p->v_rows);
            multiply(p, sums, w->values, TILE / PAIR, w->weights, p->v_rows, keys / PAIR, 1);
        }
    }
    finish_task(p, t, w);
}

static word *take(word **memory, int64_t size) {
    word *taken = *memory;
    *memory += ROUND_UP(size, 16); /* whole cache lines */
    return taken;
}

/* A thread's memory for tasks of `columns` rows; returns where it ends. */
static word *divide(const problem *p, int64_t columns, word *memory, scratch *w) {
    int64_t v_words = p->v_rows / PAIR, wide = p->k_words > p->v_rows ? p->k_words : p->v_rows;
    w->q = take(&memory, columns * p->k_words);
    w->keys = take(&memory, TILE * p->k_words);
    w->values = take(&memory, TILE * v_words);
    w->staged = take(&memory, TILE * v_words > COLUMNS * wide ? TILE * v_words : COLUMNS * wide);
    w->weights = take(&memory, TILE * COLUMNS);
    w->scores = (float *)take(&memory, TILE * COLUMNS);
    w->sums = (float *)take(&memory, columns * p->v_rows);
    w->best = (float *)take(&memory, columns);
    w->total = (float *)take(&memory, columns);
    w->seen_to = (int32_t *)take(&memory, columns);
    return memory;
}

/* Cut every sequence with at least `fewest` queries into tasks of `columns` rows, the last ones,
 * which see most, first. Returns how many there are; `tasks` may be NULL. */
static int64_t cut(const problem *p, const int32_t *query_start, const int32_t *seq_lens,
                   int64_t sequences, int64_t fewest, int64_t columns, task *tasks) {
    int64_t count = 0;
    for (int64_t b = 0; b < sequences; b++) {
        int64_t queries = query_start[b + 1] - query_start[b], rows = queries * p->group;
        if (queries < fewest) continue;
        if (seq_lens[b] == 0)
            memset(p->out + query_start[b] * p->heads * p->v.dim, 0,
                   (size_t)(queries * p->heads * p->v.dim) * sizeof(element));
        if (seq_lens[b] == 0) continue;
        for (int64_t begin = (rows - 1) / columns * columns; begin >= 0; begin -= columns)
            for (int64_t head = 0; head < p->heads / p->group; head++, count++)
                if (tasks)
                    tasks[count] = (task){b, head, begin,
                                          begin + columns < rows ? begin + columns : rows,
                                          query_start[b], seq_lens[b] - queries};
    }
    return count;
}

/* Attention of every sequence with at least `fewest` queries.
 *
 *   q [n, heads, d], out [n, heads, dv]
 *   strides[6]                   of blocks, heads and rows of k_cache, then of v_cache
 *   query_start [sequences + 1]  the row of each sequence's first query
 *   seq_lens [sequences]         its positions, the new ones included; 0: the output is 0
 *   tables [sequences, ..]       its blocks, rows `table_stride` apart
 *   scale                        of the scores, above 0
 *   window                       how many of the latest positions are seen; 0: all
 *
 * Returns 0, or 1 where there was no memory.
 */
int64_t prefill_attention(const element *q, const element *k_cache, const element *v_cache,
                          const int64_t *strides, int64_t block_size, const int32_t *query_start,
                          const int32_t *seq_lens, const int64_t *tables, int64_t table_stride,
                          float scale, int64_t window, element *out, int64_t sequences,
                          int64_t heads, int64_t kv_heads, int64_t d, int64_t dv, int64_t fewest) {
    problem p = {
        .q = q, .out = out, .tables = tables, .table_stride = table_stride,
        .k = {k_cache, strides[0], strides[1], strides[2], d},
        .v = {v_cache, strides[3], strides[4], strides[5], dv},
        .block_size = block_size, .heads = heads, .group = heads / kv_heads,
        .window = window > 0 && window < INT32_MAX ? window : INT32_MAX, .scale = scale * 1.44269504f, /* 2^x for e^x */
        .k_words = ROUND_UP(d, 32) / PAIR, .v_rows = ROUND_UP(dv, 32),
    };
#if defined(AMX)
    p.amx = has_tiles();
#endif
    int64_t threads = omp_get_max_threads(), columns = TASK_BYTES / (p.k_words + p.v_rows) / 4;
    columns = ROUND_UP(columns, COLUMNS);
    while (columns > COLUMNS &&
           cut(&p, query_start, seq_lens, sequences, fewest, columns, 0) < TASKS * threads)
        columns = ROUND_UP(columns / 2, COLUMNS);
    int64_t count = cut(&p, query_start, seq_lens, sequences, fewest, columns, 0);
    scratch w;
    int64_t size = divide(&p, columns, 0, &w) - (word *)0;
    task *tasks = malloc((size_t)count * sizeof(task));
    word *memory = aligned_alloc(64, (size_t)(threads * size) * sizeof(word));
    if (memory && tasks) {
        cut(&p, query_start, seq_lens, sequences, fewest, columns, tasks);
#pragma omp parallel num_threads(threads) if (count > 1) private(w)
        {
            divide(&p, columns, memory + omp_get_thread_num() * size, &w);
#if defined(AMX)
            if (p.amx) shape_tiles();
#endif
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < count; i++) attend(&p, &tasks[i], &w);
#if defined(AMX)
            if (p.amx) _tile_release(); /* others shape their own */
#endif
        }
    }
    int64_t failed = count > 0 && !(memory && tasks);
    free(memory);
    free(tasks);
    return failed;
}
