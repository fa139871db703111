/* Attention over a KV cache of 8-bit codes, of any number of queries per sequence.
 *
 * `minillm_kernels/int8_cache.py` defines the arithmetic, and has the same bits: queries are rounded
 * to 8 bits, and the weights of each tile to 7, so that both products are sums of integers, which are
 * exact in any order. Whatever is float32 is computed number by number, or summed in a fixed order,
 * on every processor. So a result depends on neither the batch, nor the chunks of a prompt, the
 * threads or the instructions.
 *
 * In the pages four positions are interleaved, so that a vector of products has the sums of four
 * positions of a key, or of LANES dimensions of a value. Few queries read the pages in place, while
 * the next tile is prefetched; as in decode.c, a long sequence is divided into parts, whose sums are
 * joined in ascending order. Many queries of a KV head are a task of their own.
 */
#include "int8_cache.h"
#include <stdlib.h>
#include "integers.h"
#include "lanes.h"
#include "tails.h"
#include "threads.h"
#include "transpose.h"

#define TILE 64 /* positions */
#define GROUPS (TILE / 4)
#define FIRST_PARTS 8
#define PART 128
#define LATER_PART 512
#define LEVELS 127.f  /* of codes and of weights */
#define TINY 1e-30f   /* weights below are 0 */
#define FEW 16        /* queries x heads of a group: up to so many, all KV heads are one task */
#define ROWS 256      /* otherwise most of one task, of one KV head */
#define BLOCK_ROWS 32 /* rows of a tile that are computed together */
#define TASKS 4       /* tasks per thread, for load balance */
#define WORK 32       /* products of a query and a key or value per nanosecond and thread */
#define TOGETHER 4    /* rows whose sums are kept in registers at the same time, and */
#define COLUMNS (LANES == 16 ? 4 : 2) /* vectors of a value's dimensions */
#define SIDE (LANES / 4) /* groups of positions whose sums are one vector */
#define STATE(d) ((d) + 16) /* of a row: weighted values, largest score, sum of weights */
#define ROUND_UP(x, to) (((x) + (to) - 1) / (to) * (to))

/* ---- rounding --------------------------------------------------------------------------------- */

/* The smallest float16 that is at least f, for f >= 0. */
static inline uint16_t half_above(float f) {
    if (!(f <= 65504.f)) return 0x7c00;
    if (f < 6.103515625e-5f) return (uint16_t)ceilf(f * 16777216.f); /* subnormal */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)((bits - (112u << 23) + 0x1fff) >> 13);
}

/* The largest |x|; at least infinity if one of them is not finite. */
static inline float largest_of(const element *x, int64_t d) {
    uint32_t most = 0, bits;
    for (int64_t j = 0; j < d; j++) {
        float f = load(x[j]);
        memcpy(&bits, &f, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float f;
    memcpy(&f, &most, 4);
    return f;
}

/* Codes and scale of a row. One that is not finite has the scale infinity and codes 0. */
static inline uint16_t round_row(const element *x, int64_t d, int8_t *codes) {
    uint16_t half = half_above(largest_of(x, d) / LEVELS);
    float scale = half_to_float(half);
    memset(codes, 0, (size_t)d);
    if (half > 0 && half < 0x7c00)
        for (int64_t j = 0; j < d; j++) codes[j] = (int8_t)__builtin_rintf(load(x[j]) / scale);
    return half;
}

void store_codes(const int8_pages *pages, int64_t slot, int64_t head, int64_t kv_heads,
                 const element *key, const element *value, int64_t d) {
    int8_t codes[MOST_HEAD_DIM];
    int64_t size = pages->block_size, offset = slot % size, side = offset % 4;
    int64_t at = (slot / size * kv_heads + head) * size;
    uint8_t *k = pages->key + (at + offset - side) * d + 4 * side;
    int8_t *v = pages->value + (at + offset - side) * d + side;
    pages->key_scale[at + offset] = round_row(key, d, codes);
    for (int64_t j = 0; j < d; j++) k[j / 4 * 16 + j % 4] = (uint8_t)(codes[j] + 128);
    pages->value_scale[at + offset] = round_row(value, d, codes);
    for (int64_t j = 0; j < d; j++) v[4 * j] = codes[j];
}

/* a b + c, rounded once on every processor. */
static inline vec exact(vec a, vec b, vec c) {
#if defined(WIDE) || defined(__FMA__) || defined(NEON)
    return fused_add(c, a, b);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

#define MAGIC 12582912.f /* 1.5 x 2^23: what is added to it is rounded to an integer */

/* 2^x for x <= 0: 2^n times a polynomial in r, x = n + r. Exactly 1 at 0; NaN stays NaN. */
static inline vec powers(vec x) {
    x = larger((vec){0} - 100.f, x);
    vec sum = x + MAGIC, r = x - (sum - MAGIC), p = (vec){0} + 1.326472731307149e-3f;
    p = exact(p, r, (vec){0} + 9.671512991189957e-3f);
    p = exact(p, r, (vec){0} + 5.550733581185341e-2f);
    p = exact(p, r, (vec){0} + 2.4022242426872253e-1f);
    p = exact(p, r, (vec){0} + 6.931470036506653e-1f);
    p = exact(p, r, (vec){0} + 1.f);
    return (vec)((words)p + ((words)sum << 23)); /* n is in the lowest bits of the sum */
}

static inline float power(float x) { return powers((vec){0} + x)[0]; }

/* ---- one tile --------------------------------------------------------------------------------- */

typedef struct {
    const element *q;
    element *out;
    const int8_pages *pages;
    const int32_t *query_start, *seq_lens;
    const int64_t *tables;
    int64_t table_stride, window, kv_heads, group, d;
    float factor; /* of scores, whose weights are powers of 2 */
    int amx;
    const batch_tails *tails; /* NULL */
} problem;

/* Rows `begin` to `end` - 1 of some KV heads of a sequence, over some parts. Row r is query r / group,
 * head r % group. */
typedef struct {
    int64_t sequence, head, heads, begin, end, part, parts;
    float *sums; /* to be joined with those of other parts; NULL: the result is written */
} task;

/* A thread's memory, for the rows of all heads of a task. */
typedef struct {
    int32_t *q;           /* [rows, d] four codes in a word, each word in four adjacent words */
    float *factors;       /* [rows] of the integer scores */
    int32_t *excess;      /* [rows] what the 128 in keys add to them */
    float *whole, *part;  /* [rows, STATE] of all parts, of the present one */
    int32_t *scores;      /* [BLOCK_ROWS, TILE]; with tiles of AMX [TILE, BLOCK_ROWS] */
    uint8_t *weights;     /* [BLOCK_ROWS, TILE] */
    float *units, *shrinks; /* [BLOCK_ROWS] */
    float *key_scales, *value_scales; /* [TILE] */
    /* For tiles of AMX: [rows / 32, k / 4, 32, 4], [TILE, k], [GROUPS, n, 4]. */
    int8_t *codes, *keys, *values;
    int32_t *products; /* [32, n]; k and n are d rounded up to 64 and 32 */
    int8_pages copies[2]; /* of tiles with positions that are not in order */
} scratch;

/* Positions from `at` on, of the first KV head; groups behind the end are the last one again. */
typedef struct {
    int64_t at, count, scales[GROUPS];
    const uint8_t *keys[GROUPS];
    const int8_t *values[GROUPS];
    const int8_pages *pages; /* that they are in: the cache, or */
    int8_pages *copy;
} tile;

typedef struct {
    int64_t begin, end;
} range;

/* The positions that a row attends to. */
static inline range seen_by(const problem *p, int64_t sequence, int64_t row) {
    const int32_t *start = p->query_start + sequence;
    int64_t end = p->seq_lens[sequence] - (start[1] - start[0]) + row / p->group + 1;
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

/* Copy the codes of a slot, an index of [blocks, kv_heads, size], between pages. */
static void copy_codes(const int8_pages *from, int64_t source, int8_pages *to, int64_t target,
                       int64_t d) {
    int64_t a = source % 4, b = target % 4;
    const uint8_t *key = from->key + (source - a) * d + 4 * a;
    const int8_t *value = from->value + (source - a) * d + a;
    uint8_t *k = to->key + (target - b) * d + 4 * b;
    int8_t *v = to->value + (target - b) * d + b;
    for (int64_t j = 0; j < d; j += 4) memcpy(k + 4 * j, key + 4 * j, 4);
    for (int64_t j = 0; j < d; j++) v[4 * j] = value[4 * j];
    to->key_scale[target] = from->key_scale[source];
    to->value_scale[target] = from->value_scale[source];
}

/* Copy a tile with positions of a tail, so that they are in order. */
static void untangle(const problem *p, const task *t, row_tail tail, tile *found) {
    int64_t size = p->pages->block_size, heads = p->kv_heads;
    const int64_t *table = p->tables + t->sequence * p->table_stride;
    for (int64_t i = 0; i < found->count; i++) {
        int64_t at = place_at(tail, found->at + i), block = table[at / size];
        for (int64_t h = t->head; h < t->head + t->heads; h++)
            copy_codes(p->pages, (block * heads + h) * size + at % size, found->copy,
                       (i / size * heads + h) * size + i % size, p->d);
    }
}

static void find_tile(const problem *p, const task *t, int64_t at, int64_t end, tile *found) {
    int64_t size = p->pages->block_size, origin = 0;
    const int64_t *table = p->tables + t->sequence * p->table_stride;
    row_tail tail = tail_of(p->tails, t->sequence);
    found->at = at;
    found->count = end - at < TILE ? end - at : TILE;
    found->pages = p->pages;
    if (tail.start < at + found->count) {
        untangle(p, t, tail, found);
        found->pages = found->copy;
        origin = at;
    }
    for (int64_t g = 0, from = at; g < GROUPS; g++, from += from + 4 < end ? 4 : 0) {
        int64_t block = found->pages == p->pages ? table[from / size] : (from - origin) / size;
        int64_t place = (block * p->kv_heads + t->head) * size + (from - origin) % size;
        found->scales[g] = place;
        found->keys[g] = found->pages->key + place * p->d;
        found->values[g] = found->pages->value + place * p->d;
    }
}

/* The scales of a tile in float32, `offset` after those of its first KV head. */
static inline void load_scales(const tile *t, const uint16_t *scales, int64_t offset, float *to) {
    uint16_t halves[TILE];
    for (int g = 0; g < GROUPS; g++) memcpy(halves + 4 * g, scales + t->scales[g] + offset, 8);
    for (int i = 0; i < TILE; i += LANES) store_vec(to + i, scales_at(halves, 2, i));
}

/* Products of four unsigned and four signed bytes in each lane are added. u is below 128. */
static inline ints add_bytes(ints sum, ints u, ints q) {
#if SIGNED
    return sum + widened(add_half((partial){0}, u, q));
#else
    return add_half(sum, u, q);
#endif
}

/* Sums of the four positions of SIDE groups, each of which is in SIDE quarters of a vector. */
static inline ints add_sides(const ints *a) {
#if LANES == 16
    ints x = SHUFFLE(a[0], a[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             SHUFFLE(a[0], a[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    ints y = SHUFFLE(a[2], a[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
             SHUFFLE(a[2], a[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    return SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif LANES == 8
    return SHUFFLE(a[0], a[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           SHUFFLE(a[0], a[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    return a[0];
#endif
}

/* Integer scores of up to 4 rows for the tile's positions. Meanwhile the same bytes of the next
 * tile's keys are prefetched, if there is one. */
static inline __attribute__((always_inline)) void score(const int rows, const tile *now,
                                                        const tile *next, int64_t offset,
                                                        const int32_t *q, const int32_t *excess,
                                                        int64_t d, int32_t *scores) {
    for (int64_t i = 0; 4 * i < now->count; i += SIDE) {
        ints sums[TOGETHER][SIDE] = {0};
        for (int64_t j = 0; j < d; j += LANES)
            for (int g = 0; g < SIDE; g++) {
                int64_t at = offset + 4 * j;
                if (next && at % 64 == 0) __builtin_prefetch(next->keys[i + g] + at, 0, 2);
                whole key = whole_of(load_ints(now->keys[i + g] + at));
                for (int r = 0; r < rows; r++)
                    sums[r][g] = add_whole(sums[r][g], key, load_ints(q + r * d + j));
            }
        for (int r = 0; r < rows; r++) {
            ints each = add_sides(sums[r]) - excess[r];
            memcpy(scores + r * TILE + 4 * i, &each, sizeof each);
        }
    }
}

/* Of up to 4 rows, `columns` vectors of dimensions: values = values * shrink + unit * products of
 * weights and codes. */
static inline __attribute__((always_inline)) void add_values(
    const int rows, const int columns, const tile *now, const tile *next, int64_t offset,
    const uint8_t *weights, const float *units, const float *shrinks, float *state, int64_t d) {
    ints sums[TOGETHER][COLUMNS] = {0};
    for (int64_t g = 0; 4 * g < now->count; g++)
        for (int c = 0; c < columns; c++) {
            int64_t at = offset + 4 * c * LANES;
            if (next && at % 64 == 0) __builtin_prefetch(next->values[g] + at, 0, 2);
            ints value = load_ints(now->values[g] + at);
            for (int r = 0; r < rows; r++)
                sums[r][c] = add_bytes(
                    sums[r][c], four((const int8_t *)weights + r * TILE + 4 * g), value);
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float *to = state + r * STATE(d) + c * LANES;
            vec product = __builtin_convertvector(sums[r][c], vec), old = load_vec(to);
            store_vec(to, exact((vec){0} + units[r], product, old * shrinks[r]));
        }
}

/* Set numbers of a tile that a row does not see. */
static inline void hide(vec *x, range seen, float hidden) {
    float all[TILE];
    memcpy(all, x, sizeof all);
    for (int64_t i = 0; i < TILE; i++)
        if (i < seen.begin || i >= seen.end) all[i] = hidden;
    memcpy(x, all, sizeof all);
}

/* Online softmax of a row: integer scores -> weights of 7 bits, their unit and, in `shrink`, the
 * factor of the values so far. Positions outside of `seen` may have any scale. */
static inline float weigh(const int32_t *scores, float factor, const float *key_scales,
                          const float *value_scales, range seen, float *best, float *total,
                          uint8_t *weights, float *shrink) {
    enum { VECTORS_OF_TILE = TILE / LANES };
    vec x[VECTORS_OF_TILE], w[VECTORS_OF_TILE], most = (vec){0} - INFINITY, tops = {0};
    int is_whole = seen.begin == 0 && seen.end == TILE;
    for (int i = 0; i < VECTORS_OF_TILE; i++)
        x[i] = __builtin_convertvector(load_ints(scores + i * LANES), vec) * factor *
               load_vec(key_scales + i * LANES);
    if (!is_whole) hide(x, seen, -INFINITY);
    for (int i = 0; i < VECTORS_OF_TILE; i++) most = larger(most, x[i]);
    float new = largest(most);
    new = *best > new ? *best : new;
    float origin = new == -INFINITY ? 0.f : new; /* -inf - -inf would be NaN */
    for (int i = 0; i < VECTORS_OF_TILE; i++) x[i] = powers(x[i] - origin);
    if (!is_whole) hide(x, seen, 0);
    for (int i = 0; i < VECTORS_OF_TILE; i++) w[i] = x[i] * load_vec(value_scales + i * LANES);
    if (!is_whole) hide(w, seen, 0);
    for (int i = 0; i < VECTORS_OF_TILE; i++) tops = larger(tops, w[i]);
    float top = largest(tops), inverse = top > TINY && top < INFINITY ? LEVELS / top : 0.f;
    for (int i = 0; i < VECTORS_OF_TILE; i++) {
        typedef uint8_t bytes __attribute__((vector_size(LANES)));
        words code = (words)exact(w[i], (vec){0} + inverse, (vec){0} + MAGIC);
        bytes each = __builtin_convertvector(code & 255, bytes);
        memcpy(weights + i * LANES, &each, sizeof each);
    }
    if (inverse == 0.f) memset(weights, 0, TILE); /* infinity x 0 is NaN */
    for (int half = VECTORS_OF_TILE / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    *shrink = *best == new ? 1.f : *best == -INFINITY ? 0.f : power(*best - new);
    *best = new;
    *total = __builtin_fmaf(*total, *shrink, sum_of(x[0]));
    return top / LEVELS;
}

#if defined(AMX)
/* C [32, n] = A [32, k bytes] B [k / 4, n, 4 bytes]. */
static __attribute__((noinline)) void multiply(int32_t *c, const int8_t *a, const int8_t *b,
                                               int64_t n, int64_t k) {
    ALL_STORED;
    for (int64_t j = 0; j < n; j += 32) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < k; i += 64) {
            _tile_loadd(4, a + i, k);
            _tile_loadd(5, a + i + 16 * k, k);
            _tile_loadd(6, b + i * n + 4 * j, 4 * n);
            _tile_loadd(7, b + i * n + 4 * j + 64, 4 * n);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
        _tile_stored(0, c + j, 4 * n);
        _tile_stored(1, c + j + 16, 4 * n);
        _tile_stored(2, c + j + 16 * n, 4 * n);
        _tile_stored(3, c + j + 16 * n + 16, 4 * n);
    }
}

/* Codes of a tile as the tiles of AMX multiply them: keys signed, a row for each position. */
static void stage(const problem *p, const tile *now, scratch *w) {
    int64_t k = ROUND_UP(p->d, 64);
    for (int64_t g = 0; g < GROUPS; g++) {
        memcpy(w->values + g * ROUND_UP(p->d, 32) * 4, now->values[g], (size_t)(4 * p->d));
        for (int64_t j = 0; j < p->d; j += LANES) {
            ints x = load_ints(now->keys[g] + 4 * j) ^ (int32_t)0x80808080;
            x = SHUFFLE(x, x, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            for (int i = 0; i < 4; i++)
                memcpy(w->keys + (4 * g + i) * k + j, (const char *)&x + 16 * i, 16);
        }
    }
}

/* The tile unit would power down during a softmax (tiles.h). */
static inline void stay_awake(void) { _tile_dpbssd(0, 4, 6); }

static inline vec where(ints some, vec a, vec b) {
    return (vec)(((ints)a & some) | ((ints)b & ~some));
}

/* `weigh` for rows `row` to `row` + LANES - 1 of a block, each a lane of vectors, with the same bits:
 * the tree of a sum is the same. `rows` are left in the block; behind them, `seen` is empty. */
static void weigh_lanes(scratch *w, int64_t row, const range *seen, const float *factors,
                        int64_t rows, float *states, int64_t d) {
    int32_t begins[LANES], ends[LANES];
    float bests[LANES], totals[LANES];
    int is_whole = rows >= LANES;
    for (int l = 0; l < LANES; l++) {
        begins[l] = (int32_t)seen[l].begin, ends[l] = (int32_t)seen[l].end;
        is_whole &= seen[l].begin == 0 && seen[l].end == TILE;
        bests[l] = l < rows ? states[l * STATE(d) + d] : -INFINITY;
        totals[l] = l < rows ? states[l * STATE(d) + d + 1] : 0;
    }
    ints begin = load_ints(begins), end = load_ints(ends);
    vec x[TILE], v[TILE], best = load_vec(bests), most = (vec){0} - INFINITY, tops = {0};
    vec factor = load_vec(factors);
    for (int i = 0; i < TILE; i++) {
        ints score = load_ints(w->scores + i * BLOCK_ROWS + row);
        x[i] = __builtin_convertvector(score, vec) * factor * w->key_scales[i];
        if (!is_whole) x[i] = where((begin <= i) & (i < end), x[i], (vec){0} - INFINITY);
        most = larger(most, x[i]);
    }
    stay_awake();
    vec new = larger(best, most), origin = where(new == -INFINITY, (vec){0}, new);
    for (int i = 0; i < TILE; i++) {
        x[i] = powers(x[i] - origin);
        v[i] = x[i] * w->value_scales[i];
        if (!is_whole) {
            ints shown = (begin <= i) & (i < end);
            x[i] = (vec)((ints)x[i] & shown), v[i] = (vec)((ints)v[i] & shown);
        }
        tops = larger(tops, v[i]);
    }
    stay_awake();
    vec inverse = where((tops > TINY) & (tops < INFINITY), LEVELS / tops, (vec){0});
    ints valid = inverse != 0.f; /* infinity x 0 is NaN */
    word block[GROUPS * LANES];  /* four weights of a row in each word */
    for (int g = 0; g < GROUPS; g++) {
        ints codes = {0};
        for (int i = 3; i >= 0; i--)
            codes = codes << 8 | ((ints)exact(v[4 * g + i], inverse, (vec){0} + MAGIC) & 255);
        codes &= valid;
        memcpy(block + g * LANES, &codes, sizeof codes);
    }
    transpose(block, LANES, (word *)w->weights + row * GROUPS, GROUPS);
    for (int half = TILE / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    vec shrink = where(best == -INFINITY, (vec){0}, powers(best - new));
    shrink = where(best == new, (vec){0} + 1.f, shrink);
    store_vec(bests, new);
    store_vec(totals, exact(load_vec(totals), shrink, x[0]));
    store_vec(w->units + row, tops / LEVELS);
    store_vec(w->shrinks + row, shrink);
    for (int l = 0; l < LANES && l < rows; l++)
        states[l * STATE(d) + d] = bests[l], states[l * STATE(d) + d + 1] = totals[l];
}

/* `add_values` for some rows and all dimensions. */
static void add_by_tiles(const problem *p, scratch *w, int64_t row, int64_t rows) {
    int64_t d = p->d, n = ROUND_UP(d, 32);
    const int32_t *products = w->products;
    float *states = w->part + row * STATE(d);
    multiply(w->products, (const int8_t *)w->weights, w->values, n, TILE);
    for (int64_t r = 0; r < rows; r++, states += STATE(d), products += n) {
        vec unit = (vec){0} + w->units[r], shrink = (vec){0} + w->shrinks[r];
        for (int64_t j = 0; j < d; j += LANES) {
            vec product = __builtin_convertvector(load_ints(products + j), vec);
            store_vec(states + j, exact(unit, product, load_vec(states + j) * shrink));
        }
    }
}
#endif

/* The positions of a tile that a row attends to; none are behind its end. */
static inline range seen_in(const problem *p, const task *t, const tile *now, int64_t row) {
    range seen = seen_by(p, t->sequence, row);
    seen.begin = seen.begin > now->at ? seen.begin - now->at : 0;
    seen.end = seen.end - now->at < now->count ? seen.end - now->at : now->count;
    return seen.begin < seen.end ? seen : (range){TILE, TILE};
}

#if defined(AMX)
/* `attend_rows` with tiles of AMX, for a task of one KV head. */
static void attend_by_tiles(const problem *p, const task *t, scratch *w, const tile *now,
                            int64_t row, int64_t rows) {
    int64_t k = ROUND_UP(p->d, 64);
    for (int64_t i = 0; i < now->count; i += 32)
        multiply(w->scores + i * BLOCK_ROWS, w->keys + i * k, w->codes + row * k, BLOCK_ROWS, k);
    range seen = seen_in(p, t, now, t->begin + row), each[LANES];
    int64_t left = p->group - row % p->group; /* rows of the same query */
    for (int64_t r = 0; r < rows; r += LANES) {
        for (int64_t l = 0; l < LANES; l++, left--) {
            if (left == 0) seen = seen_in(p, t, now, t->begin + row + r + l), left = p->group;
            each[l] = r + l < rows ? seen : (range){0, 0};
        }
        weigh_lanes(w, r, each, w->factors + row + r, rows - r, w->part + (row + r) * STATE(p->d),
                    p->d);
    }
    add_by_tiles(p, w, row, rows);
}
#else
#define stage(p, now, w) (void)0
#define attend_by_tiles(p, t, w, now, row, rows) (void)0
#endif

/* Rows `row` to `row` + `rows` - 1, at most BLOCK_ROWS, of KV head `h` of a task. */
static void attend_rows(const problem *p, const task *t, scratch *w, const tile *now,
                        const tile *next, int64_t h, int64_t row, int64_t rows) {
    int64_t d = p->d, first = h * (t->end - t->begin) + row, offset = h * p->pages->block_size * d;
    float *states = w->part + first * STATE(d);
    for (int64_t r = 0; r < rows; r += TOGETHER) {
        const int32_t *q = w->q + (first + r) * d, *excess = w->excess + first + r;
        switch (rows - r) {
#define CASE(n) score(n, now, r ? 0 : next, offset, q, excess, d, w->scores + r * TILE)
        case 1: CASE(1); break;
        case 2: CASE(2); break;
        case 3: CASE(3); break;
        default: CASE(4);
#undef CASE
        }
    }
    range seen = {0, 0};
    for (int64_t r = 0; r < rows; r++) {
        if (r == 0 || (row + r) % p->group == 0) seen = seen_in(p, t, now, t->begin + row + r);
        float *end = states + r * STATE(d) + d;
        w->units[r] = weigh(w->scores + r * TILE, w->factors[first + r], w->key_scales,
                            w->value_scales, seen, end, end + 1, w->weights + r * TILE,
                            w->shrinks + r);
    }
    for (int64_t r = 0; r < rows; r += TOGETHER)
        for (int64_t j = 0; j < d;) {
            int wide = d - j >= COLUMNS * LANES;
#define CASE(n, columns)                                                                \
    add_values(n, columns, now, r ? 0 : next, offset + 4 * j, w->weights + r * TILE,    \
               w->units + r, w->shrinks + r, states + r * STATE(d) + j, d)
            switch (rows - r) {
            case 1: if (wide) CASE(1, COLUMNS); else CASE(1, 1); break;
            case 2: if (wide) CASE(2, COLUMNS); else CASE(2, 1); break;
            case 3: if (wide) CASE(3, COLUMNS); else CASE(3, 1); break;
            default: if (wide) CASE(4, COLUMNS); else CASE(4, 1);
            }
#undef CASE
            j += wide ? COLUMNS * LANES : LANES;
        }
}

/* One KV head of a tile; `h` counts those of the task. */
static void attend_tile(const problem *p, const task *t, scratch *w, const tile *now,
                        const tile *next, int64_t h) {
    int64_t rows = t->end - t->begin, size = p->pages->block_size;
    int tiles = p->amx && rows > FEW;
    load_scales(now, now->pages->key_scale, h * size, w->key_scales);
    load_scales(now, now->pages->value_scale, h * size, w->value_scales);
    if (tiles) stage(p, now, w);
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
        int64_t some = rows - row < BLOCK_ROWS ? rows - row : BLOCK_ROWS;
        if (seen_by(p, t->sequence, t->begin + row + some - 1).end <= now->at) continue;
        if (tiles) attend_by_tiles(p, t, w, now, row, some);
        else attend_rows(p, t, w, now, row ? 0 : next, h, row, some);
    }
}

/* ---- tasks ------------------------------------------------------------------------------------ */

static void clear(float *states, int64_t rows, int64_t d) {
    memset(states, 0, (size_t)(rows * STATE(d)) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) states[r * STATE(d) + d] = -INFINITY;
}

/* Add the sums of the next part to those of the parts before. */
static void join(float *states, const float *parts, int64_t rows, int64_t d) {
    for (int64_t r = 0; r < rows; r++, states += STATE(d), parts += STATE(d)) {
        float best = parts[d] > states[d] ? parts[d] : states[d];
        float old = states[d] == -INFINITY ? 0.f : power(states[d] - best);
        float new = parts[d] == -INFINITY ? 0.f : power(parts[d] - best);
        for (int64_t j = 0; j < d; j += LANES)
            store_vec(states + j, exact(load_vec(parts + j), (vec){0} + new,
                                        load_vec(states + j) * old));
        states[d + 1] = __builtin_fmaf(parts[d + 1], new, states[d + 1] * old);
        states[d] = best;
    }
}

/* Index of a row in q and out [n, heads]. */
static inline int64_t place_of(const problem *p, const task *t, int64_t h, int64_t r) {
    int64_t query = p->query_start[t->sequence] + (t->begin + r) / p->group;
    return (query * p->kv_heads + t->head + h) * p->group + (t->begin + r) % p->group;
}

static void finish(const problem *p, const task *t, const float *states) {
    int64_t d = p->d;
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t r = 0; r < t->end - t->begin; r++, states += STATE(d)) {
            element *out = p->out + place_of(p, t, h, r) * d;
            float total = states[d + 1];
            for (int64_t j = 0; j < d; j++) out[j] = store(total == 0 ? 0.f : states[j] / total);
        }
}

/* Round the queries of a task. */
static void begin_task(const problem *p, const task *t, scratch *w) {
    int64_t rows = t->end - t->begin, d = p->d;
    for (int64_t i = 0; i < t->heads * rows; i++) {
        const element *q = p->q + place_of(p, t, i / rows, i % rows) * d;
        float most = largest_of(q, d);
        float inverse = most > TINY && most < INFINITY ? LEVELS / most : 0.f;
        int8_t codes[MOST_HEAD_DIM] = {0};
        int32_t sum = 0;
        for (int64_t j = 0; inverse > 0 && j < d; j++)
            codes[j] = (int8_t)__builtin_rintf(load(q[j]) * inverse);
        for (int64_t j = 0; j < d; j++) sum += codes[j];
        for (int64_t j = 0; j < d; j++) memcpy(w->q + i * d + j, codes + j / 4 * 4, 4);
        w->excess[i] = SIGNED ? 0 : 128 * sum;
        if (p->amx && rows > FEW)
            for (int64_t j = 0; j < ROUND_UP(d, 64); j += 4)
                memcpy(w->codes + i / 32 * 32 * ROUND_UP(d, 64) + 32 * j + i % 32 * 4, codes + j,
                       4);
        w->factors[i] = (most < INFINITY ? most / LEVELS : INFINITY) * p->factor;
    }
}

static void attend(const problem *p, const task *t, scratch *w) {
    int64_t all = t->heads * (t->end - t->begin);
    range first = seen_by(p, t->sequence, t->begin), last = seen_by(p, t->sequence, t->end - 1);
    tile tiles[2], *now = &tiles[0], *next = &tiles[1];
    now->copy = &w->copies[0];
    next->copy = &w->copies[1];
    begin_task(p, t, w);
    clear(w->whole, all, p->d);
    for (int64_t part = t->part; part < t->part + t->parts; part++) {
        int64_t begin = part_begin(part), end = part_begin(part + 1);
        end = end < last.end ? end : last.end;
        begin += first.begin > begin ? (first.begin - begin) / TILE * TILE : 0;
        clear(w->part, all, p->d);
        find_tile(p, t, begin, end, now);
        for (; begin < end; begin += TILE) {
            int more = begin + TILE < end;
            if (more) find_tile(p, t, begin + TILE, end, next);
            for (int64_t h = 0; h < t->heads; h++) attend_tile(p, t, w, now, more ? next : 0, h);
            tile *done = now;
            now = next;
            next = done;
        }
        join(w->whole, w->part, all, p->d);
    }
    if (t->sums) memcpy(t->sums, w->part, (size_t)(all * STATE(p->d)) * sizeof(float));
    else finish(p, t, w->whole);
}

/* Cut every sequence into tasks; those of few rows by parts if `divided`. Returns the number of tasks,
 * and in `kept` that of states that they leave in `sums`. `tasks` may be NULL. */
static int64_t cut(const problem *p, int64_t sequences, int divided, float *sums, task *tasks,
                   int64_t *kept) {
    int64_t count = 0;
    *kept = 0;
    for (int64_t b = 0; b < sequences; b++) {
        int64_t rows = (p->query_start[b + 1] - p->query_start[b]) * p->group;
        int64_t few = rows <= FEW, heads = few ? p->kv_heads : 1;
        int64_t columns = few ? rows : ROWS / p->group * p->group;
        columns = columns ? columns : p->group;
        for (int64_t begin = rows ? (rows - 1) / columns * columns : -1; begin >= 0; begin -= columns)
            for (int64_t head = 0; head < p->kv_heads; head += heads) {
                task each = {b, head, heads, begin, begin + columns, 0, 0, 0};
                each.end = each.end < rows ? each.end : rows;
                int64_t end = seen_by(p, b, each.end - 1).end;
                each.part = part_of(seen_by(p, b, begin).begin);
                each.parts = end ? part_of(end - 1) + 1 - each.part : 0;
                int64_t pieces = divided && few && each.parts > 1 ? each.parts : 1;
                each.parts /= pieces;
                for (; pieces > 0; pieces--, count++, each.part++) {
                    if (divided && few) {
                        each.sums = sums + *kept * STATE(p->d);
                        *kept += heads * rows;
                    }
                    if (tasks) tasks[count] = each;
                }
            }
    }
    return count;
}

/* A batch that is computed. */
typedef struct {
    const problem *p;
    const task *tasks;
    int64_t count, size; /* of the tasks; bytes of a thread's memory */
    char *memory;
} attention;

static void *take(uintptr_t *memory, int64_t size) {
    uintptr_t taken = *memory;
    *memory += (uintptr_t)ROUND_UP(size * 4, 64);
    return (void *)taken;
}

/* Lay out a thread's memory; returns its end. */
static uintptr_t divide(const problem *p, uintptr_t memory, scratch *w) {
    int64_t most = ROUND_UP(p->group > ROWS ? p->group : ROWS, 32);
    int64_t rows = p->kv_heads * FEW > most ? p->kv_heads * FEW : most;
    w->q = take(&memory, rows * p->d);
    w->factors = take(&memory, rows);
    w->excess = take(&memory, rows);
    w->whole = take(&memory, rows * STATE(p->d));
    w->part = take(&memory, rows * STATE(p->d));
    w->scores = take(&memory, BLOCK_ROWS * TILE);
    w->weights = take(&memory, BLOCK_ROWS * TILE / 4);
    w->units = take(&memory, BLOCK_ROWS);
    w->shrinks = take(&memory, BLOCK_ROWS);
    w->key_scales = take(&memory, TILE);
    w->value_scales = take(&memory, TILE);
    int64_t k = ROUND_UP(p->d, 64), n = ROUND_UP(p->d, 32);
    w->codes = take(&memory, most * k / 4);
    w->keys = take(&memory, k * TILE / 4);
    w->values = take(&memory, GROUPS * n);
    w->products = take(&memory, 32 * n);
    int64_t size = p->pages->block_size, slots = ROUND_UP(TILE, size) * p->kv_heads;
    for (int i = 0; i < 2 && p->tails; i++) {
        w->copies[i] = *p->pages;
        w->copies[i].key = take(&memory, slots * p->d / 4);
        w->copies[i].value = take(&memory, slots * p->d / 4);
        w->copies[i].key_scale = take(&memory, slots / 2);
        w->copies[i].value_scale = take(&memory, slots / 2);
    }
    return memory;
}

static void attend_some(void *context, int64_t begin, int64_t end, int64_t thread) {
    const attention *a = context;
    scratch w;
    divide(a->p, (uintptr_t)(a->memory + thread * a->size), &w);
    take_tiles(a->p->amx, 16, 16);
    for (int64_t i = begin; i < end; i++) attend(a->p, &a->tasks[i], &w);
    give_tiles_back(a->p->amx);
}

/* Join the parts of the sequences whose first part is one of the tasks. */
static void join_some(void *context, int64_t begin, int64_t end, int64_t thread) {
    const attention *a = context;
    scratch w;
    divide(a->p, (uintptr_t)(a->memory + thread * a->size), &w);
    for (int64_t i = begin; i < end; i++) {
        const task *t = &a->tasks[i];
        if (!t->sums || (i && t[-1].sequence == t->sequence)) continue;
        int64_t rows = t->heads * (t->end - t->begin), j = i;
        clear(w.whole, rows, a->p->d);
        for (; j < a->count && a->tasks[j].sequence == t->sequence; j++)
            join(w.whole, a->tasks[j].sums, rows, a->p->d);
        finish(a->p, t, w.whole);
    }
}

static int points_outside(const problem *p, int64_t sequences, int64_t n, int64_t columns) {
    int64_t size = p->pages->block_size;
    for (int64_t b = 0; b < sequences; b++) {
        int64_t begin = p->query_start[b], end = p->query_start[b + 1], length = p->seq_lens[b];
        int64_t used = (length + size - 1) / size;
        if (length < 0 || used > columns || begin < 0 || begin > end || end > n) return 1;
        for (int64_t i = 0; i < used; i++)
            if ((uint64_t)p->tables[b * p->table_stride + i] >= (uint64_t)p->pages->num_blocks)
                return 1;
        if (tail_outside(p->tails, b, length, p->tables + b * p->table_stride, columns, size,
                         p->pages->num_blocks))
            return 1;
    }
    return 0;
}

/* Causal attention of all sequences. Arguments and results are those of decode_attention, but for
 * the pages; values have as many dimensions as keys, a multiple of 16. */
int64_t int8_attention(const element *q, const int8_pages *pages, const int32_t *query_start,
                       const int32_t *seq_lens, const int64_t *tables, int64_t table_stride,
                       float scale, int64_t window, element *out, int64_t sequences, int64_t heads,
                       int64_t kv_heads, int64_t d, int64_t n, int64_t columns,
                       const batch_tails *tails) {
    problem p = {q,      out,      pages,        query_start, seq_lens, tables, table_stride,
                 window, kv_heads, heads / kv_heads, d,           scale * 1.44269504f,
                 find_tiles(), tails};
    if (points_outside(&p, sequences, n, columns)) return 2;
    int64_t work = 0, kept = 0;
    for (int64_t b = 0; b < sequences; b++)
        work += (int64_t)(query_start[b + 1] - query_start[b]) * seq_lens[b];
    int64_t time = work * heads * 2 * d / WORK, threads = threads_for(time);
    int64_t count = cut(&p, sequences, 0, 0, 0, &kept);
    if (count == 0) return 0;
    int divided = threads > 1 && count < TASKS * threads;
    if (divided) count = cut(&p, sequences, 1, 0, 0, &kept);
    scratch w;
    int64_t size = (int64_t)divide(&p, 0, &w);
    task *tasks = malloc((size_t)count * sizeof(task));
    float *sums = malloc((size_t)(kept * STATE(d)) * sizeof(float) + 1);
    char *memory = aligned_alloc(64, (size_t)(threads * size));
    int64_t failed = !(memory && tasks && sums);
    if (!failed) {
        cut(&p, sequences, divided, sums, tasks, &kept);
        attention a = {&p, tasks, count, size, memory};
        run_job(count, piece_for(count, threads, time), threads, attend_some, &a);
        if (divided) run_job(count, 1, threads, join_some, &a);
    }
    free(memory);
    free(sums);
    free(tasks);
    return failed;
}
