/* y = x W^T + b with a weight that is packed in the order in which it is read.
 *
 * AMX and AVX-512 multiply pairs of bf16 that are adjacent along the inner dimension. So a weight
 * is stored in panels of 32 outputs (two tiles or two vectors), and in a panel pair by pair:
 *
 *   W [out, in]  ->  panels [out / 32, in / 2, 32, 2]     panels[p, k, j, e] = W[32 p + j, 2 k + e]
 *
 * A thread reads its panels sequentially and prefetches them, so a product with one row runs at
 * memory bandwidth.
 *
 * Products use AMX tiles if CPU and Linux support them, and vectors otherwise. All other code is
 * shared.
 *
 * An output is one sequential sum along the inner dimension. It depends only on its row of x and
 * its row of W: not on the number of rows, other outputs or threads. `panel_sums` splits the inner
 * dimension into equal parts, which are added as a balanced tree, so that several ranks can compute
 * the parts and get the bits of a single process.
 */
#include <stdatomic.h>
#include "panels.h"
#include "threads.h"
#include "vectors.h"

#define STEP 32           /* inputs per tile instruction; `in` is a multiple */
#if defined(AMX)
#define ROWS 32           /* rows of x that are processed together: two tiles */
#else
#define ROWS 48           /* a multiple of BLOCK */
#endif
#define FEW 16            /* up to so many rows (one tile), panels are processed in pairs */
#define AHEAD 2048        /* prefetch distance in bytes, of tiles */
#define AHEAD_VECTORS 8192 /* and of vectors */
#if defined(WIDE)
#define PIECE 1024        /* inputs of a panel that are multiplied by all rows before the next */
#else
#define PIECE 128         /* a quarter or half of L1: half of the outputs are multiplied at a time */
#endif
#define CHUNK_BYTES (1 << 20) /* of the words of x, half of a large L2: a panel is read once for all */
#define LEVELS 4          /* of the tree of up to 8 parts, including the leaves */

#if defined(ELEMENT_BF16)
#define TWO 2 /* adjacent inputs of an output in a panel */
#else
#define TWO 1
#endif

/* Whether AMX tiles are available; checked once. */
static int with_tiles(void) {
    static int known; /* 0: not checked; concurrent checks get the same result */
    if (!known) known = find_tiles() ? 1 : -1;
    return known > 0;
}

/* Instructions of products: 0 any, 1 AVX2, 2 AVX-512, 3 AVX-512 with pairs of bf16, 4 AMX tiles,
 * 5 NEON with pairs of bf16. */
int64_t panel_unit(void) {
    if (with_tiles()) return 4;
#if defined(NEON)
    return PAIR == 2 ? 5 : 0;
#elif PAIR == 2
    return 3;
#elif defined(WIDE)
    return 2;
#elif defined(__AVX2__) && defined(__FMA__)
    return 1;
#else
    return 0;
#endif
}

/* A weight to be packed. */
typedef struct {
    const element *w;
    element *panels;
    int64_t out, in;
} packing;

/* Pack panels `begin` to `end` - 1, a cache line (of bf16) of each row at a time. */
static void pack_some(void *context, int64_t begin, int64_t end, int64_t thread) {
    const packing *c = context;
    int64_t in = c->in;
    for (int64_t p = begin; p < end; p++)
        for (int64_t k = 0; k < in; k += STEP) {
            element *to = c->panels + (p * in + k) * PANEL;
            for (int64_t j = 0; j < PANEL; j++) {
                element line[STEP] = {0};
                int64_t row = p * PANEL + j;
                if (row < c->out) memcpy(line, c->w + row * in + k, sizeof line);
                for (int64_t i = 0; i < STEP; i += TWO)
                    memcpy(to + i * PANEL + j * TWO, line + i, TWO * sizeof(element));
            }
        }
    (void)thread;
}

/* W -> panels. Rows after the last are 0. */
void pack_panels(const element *w, element *panels, int64_t out, int64_t in) {
    packing all = {w, panels, out, in};
    divide_job((out + PANEL - 1) / PANEL, out * in / 4, pack_some, &all);
}

#if defined(AMX)
/* Multiply up to 32 rows of x [.., in], `stride` apart, by one panel, into sums [rows, 32]. */
static inline __attribute__((always_inline)) void tiles_by_panel(const int two, const int prefetch,
                                                                 const element *x,
                                                                 const element *panel, int64_t in,
                                                                 int64_t stride, float *sums) {
    ALL_STORED;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < in; k += STEP) {
        const char *b = (const char *)(panel + k * PANEL);
        if (prefetch)
            for (int line = 0; line < STEP * PANEL * 2; line += 64)
                _mm_prefetch(b + AHEAD + line, _MM_HINT_T0);
        _tile_loadd(6, b, PANEL * 4);
        _tile_loadd(7, b + 64, PANEL * 4);
        _tile_loadd(4, x + k, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + 16 * stride + k, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    if (two) {
        _tile_stored(2, sums + 16 * PANEL, PANEL * 4);
        _tile_stored(3, sums + 16 * PANEL + 16, PANEL * 4);
    }
}

/* Multiply up to 16 rows by two panels, into sums and others [rows, 32]: two memory streams, and
 * half as many loads of x. */
static void tiles_by_pair(const element *x, const element *panel, const element *other, int64_t in,
                          int64_t stride, float *sums, float *others) {
    ALL_STORED;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < in; k += STEP) {
        const char *b = (const char *)(panel + k * PANEL), *c = (const char *)(other + k * PANEL);
        for (int line = 0; line < STEP * PANEL * 2; line += 64) {
            _mm_prefetch(b + AHEAD + line, _MM_HINT_T0);
            _mm_prefetch(c + AHEAD + line, _MM_HINT_T0);
        }
        _tile_loadd(4, x + k, stride * 2);
        _tile_loadd(6, b, PANEL * 4);
        _tile_loadd(7, b + 64, PANEL * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, c, PANEL * 4);
        _tile_loadd(7, c + 64, PANEL * 4);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    _tile_stored(2, others, PANEL * 4);
    _tile_stored(3, others + 16, PANEL * 4);
}

/* Multiply up to 32 rows by one panel. Tiles are configured for `shaped` rows, and reconfigured if
 * necessary. */
static inline void tiles_of_rows(const element *x, const element *panel, int64_t in, int64_t stride,
                                 int64_t rows, int first, int64_t *shaped, float *sums) {
    if (rows != *shaped) shape_tiles(rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 1);
    *shaped = rows;
    if (rows <= 16) tiles_by_panel(0, first, x, panel, in, stride, sums);
    else if (first) tiles_by_panel(1, 1, x, panel, in, stride, sums);
    else tiles_by_panel(1, 0, x, panel, in, stride, sums);
}
#endif

/* Words of LANES outputs: of two inputs at once, or of the first or second (`step`). */
static inline vec weights(const element *panel, const int step) {
#if TWO == 1
    return load_vec(panel + step * PANEL);
#elif PAIR == 2
    (void)step;
    return load_vec(panel);
#else
    words both;
    memcpy(&both, panel, sizeof both);
    return (vec)(step ? both & 0xffff0000 : both << 16); /* the lower half of a word is first */
#endif
}

/* sums [rows, 32] += `rows` rows of x, `stride` words apart, by LANES * `vecs` outputs of a panel
 * and `in` inputs. As many bytes are prefetched from `next` on, if it is not NULL. */
static inline __attribute__((always_inline)) void block_by_outputs(const int rows, const int vecs,
                                                                   const word *x,
                                                                   const element *panel, int64_t in,
                                                                   int64_t stride, const char *next,
                                                                   float *sums) {
    vec sum[BLOCK][PANEL / LANES];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) sum[r][c] = load_vec(sums + r * PANEL + c * LANES);
    for (int64_t k = 0; k < in; k += 2, panel += 2 * PANEL) {
        if (next)
            for (int line = 0; line < 2 * vecs * LANES * (int)sizeof(element); line += 64, next += 64)
                __builtin_prefetch(next);
        for (int step = 0; step < 2 / PAIR; step++, x++) {
            vec b[PANEL / LANES];
            for (int c = 0; c < vecs; c++) {
                b[c] = weights(panel + TWO * LANES * c, step);
                KEEP_IN_REGISTER(b[c]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vec a = all_lanes(x[r * stride]);
                for (int c = 0; c < vecs; c++) {
                    sum[r][c] = multiply_add(sum[r][c], a, b[c]);
                    KEEP_IN_REGISTER(sum[r][c]);
                }
            }
            FORGET_MEMORY;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) store_vec(sums + r * PANEL + c * LANES, sum[r][c]);
}

/* The same for all outputs: at once for up to two rows, otherwise some outputs at a time.
 */
static inline __attribute__((always_inline)) void block(const int rows, const word *x,
                                                        const element *panel, int64_t in,
                                                        int64_t stride, const char *next,
                                                        float *sums) {
    const int vecs = rows > 2 ? VECTORS : PANEL / LANES;
    for (int first = 0; first < PANEL; first += vecs * LANES)
        block_by_outputs(rows, vecs, x, panel + TWO * first, in, stride,
                         next ? next + first * in * (int64_t)sizeof(element) : 0, sums + first);
}

/* Multiply any number of rows by one panel, into sums [rows, 32]. A piece of the panel stays in the
 * first cache for all rows; the next piece is prefetched with the first rows. */
static void vectors_by_panel(const word *x, const element *panel, int64_t in, int64_t stride,
                             int64_t rows, float *sums) {
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    for (int64_t k = 0; k < in; k += PIECE, panel += PIECE * PANEL, x += PIECE / PAIR) {
        int64_t now = in - k < PIECE ? in - k : PIECE;
        const char *next = (const char *)panel + AHEAD_VECTORS;
        const word *from = x;
        float *to = sums;
        for (int64_t left = rows; left > 0; left -= BLOCK, next = 0) {
            switch (left < BLOCK ? left : BLOCK) {
                case 1: block(1, from, panel, now, stride, next, to); break;
                case 2: block(2, from, panel, now, stride, next, to); break;
                case 3: block(3, from, panel, now, stride, next, to); break;
                case 4: block(4, from, panel, now, stride, next, to); break;
                case 5: block(5, from, panel, now, stride, next, to); break;
#if BLOCK > 6
                case 6: block(6, from, panel, now, stride, next, to); break;
                case 7: block(7, from, panel, now, stride, next, to); break;
#endif
                default: block(BLOCK, from, panel, now, stride, next, to);
            }
            from += BLOCK * stride;
            to += BLOCK * PANEL;
        }
    }
}

/* A product. The output is `y`, or unrounded sums in `totals`. */
typedef struct {
    const word *x; /* rows of in / PAIR words */
    const element *panels, *bias;
    element *y;
    float *totals;
    int64_t n, in, out, gated, parts;
    int64_t x_stride, y_stride; /* between rows, in words and elements */
    int amx;
    int64_t chunk; /* rows of a task, if there are more than 16 */
} product;

/* Multiply up to 16 rows of a part by two panels, which may be the same, into sums and others. */
static inline void multiply_pair(const product *p, const word *x, const element *panel,
                                 const element *other, int64_t size, float *sums, float *others) {
#if defined(AMX)
    if (p->amx) {
        tiles_by_pair((const element *)x, panel, other, size, p->x_stride * PAIR, sums, others);
        return;
    }
#endif
    vectors_by_panel(x, panel, size, p->x_stride, p->n, sums);
    if (other != panel) vectors_by_panel(x, other, size, p->x_stride, p->n, others);
}

/* Multiply up to 32 rows of a part by one panel. Only tiles use `first` (first use of this panel)
 * and `shaped`. */
static inline void multiply_rows(const product *p, const word *x, const element *panel,
                                 int64_t size, int64_t rows, int first, int64_t *shaped,
                                 float *sums) {
#if defined(AMX)
    if (p->amx) {
        tiles_of_rows((const element *)x, panel, size, p->x_stride * PAIR, rows, first, shaped,
                      sums);
        return;
    }
#endif
    (void)first, (void)shaped;
    vectors_by_panel(x, panel, size, p->x_stride, rows, sums);
}

/* The sum of part `part` is in sums[height]. Add all pairs of subtrees that it completes. Returns
 * the index for the next part. Parts 0 to 7 become ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
static inline int64_t join_parts(int64_t part, int64_t height, int64_t rows, int64_t size,
                                 float *sums) {
    for (; part & 1; part >>= 1) {
        float *right = sums + height-- * size, *left = right - size;
        for (int64_t i = 0; i < rows * PANEL; i++) left[i] += right[i];
    }
    return height + 1;
}

/* Sum all parts of up to 16 rows by two panels, into the first of sums and others
 * [LEVELS, FEW, 32]. */
static inline void sum_pair(const product *p, const element *panel, const element *other,
                            float *sums, float *others) {
    int64_t size = p->in / p->parts, height = 0, each = FEW * PANEL;
    for (int64_t part = 0, k = 0; part < p->parts; part++, k += size) {
        multiply_pair(p, p->x + k / PAIR, panel + k * PANEL, other + k * PANEL, size,
                      sums + height * each, others + height * each);
        if (other != panel) join_parts(part, height, p->n, each, others);
        height = join_parts(part, height, p->n, each, sums);
    }
}

/* Sum all parts of up to 32 rows of x by one panel, into the first of sums [LEVELS, ROWS, 32]. */
static inline void sum_rows(const product *p, const word *x, const element *panel, int64_t rows,
                            int first, int64_t *shaped, float *sums) {
    int64_t size = p->in / p->parts, height = 0, each = ROWS * PANEL;
    for (int64_t part = 0, k = 0; part < p->parts; part++, k += size) {
        multiply_rows(p, x + k / PAIR, panel + k * PANEL, size, rows, first, shaped,
                      sums + height * each);
        height = join_parts(part, height, rows, each, sums);
    }
}

/* sums [rows, 32] -> totals, without rounding. */
static inline void write_totals(const float *sums, float *totals, int64_t rows, int64_t columns,
                                int64_t out) {
    for (int64_t r = 0; r < rows; r++)
        memcpy(totals + r * out, sums + r * PANEL, (size_t)columns * sizeof(float));
}

/* Up to 16 rows by panels `begin` to `end` - 1, in pairs, or if `gated`, pairs of gate and up. An
 * odd last panel is paired with itself. */
static void few_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const product *p = context;
    int64_t num_panels = (p->out + PANEL - 1) / PANEL, n = p->n, out = p->out;
    float sums[2][LEVELS * FEW * PANEL] __attribute__((aligned(64))), biases[2][PANEL];
    take_tiles(p->amx, n, n);
    for (int64_t at = begin; at < end; at += p->gated ? 1 : 2) {
        int64_t other = p->gated ? at + num_panels : at + 1 < end ? at + 1 : at;
        sum_pair(p, p->panels + at * PANEL * p->in, p->panels + other * PANEL * p->in, sums[0],
                 sums[1]);
        for (int64_t i = 0; i < 2; i++) {
            int64_t first = (i ? other : at) * PANEL;
            read_bias(p->bias ? p->bias + first : 0, columns_of(first, out, p->gated), biases[i]);
        }
        if (p->gated) {
            write_gated(sums[0], sums[1], biases[0], biases[1], p->y + at * PANEL, n, p->y_stride);
            continue;
        }
        for (int64_t i = 0; i <= other - at; i++) {
            int64_t first = (at + i) * PANEL, columns = columns_of(first, out, 0);
            if (p->totals) write_totals(sums[i], p->totals + first, n, columns, p->y_stride);
            else write_rows(sums[i], biases[i], p->y + first, n, columns, p->y_stride);
        }
    }
    give_tiles_back(p->amx);
    (void)thread;
}

/* Rows `begin` to `end` - 1 by panel `at`. */
static void rows_by_one(const product *p, int64_t at, int64_t begin, int64_t end, int64_t *shaped) {
    float sums[2][LEVELS * ROWS * PANEL] __attribute__((aligned(64))), biases[2][PANEL];
    const element *panel = p->panels + at * p->in * PANEL;
    int64_t first = at * PANEL, out = p->out, columns = columns_of(first, out, p->gated);
    int64_t apart = p->y_stride;
    read_bias(p->bias ? p->bias + first : 0, columns, biases[0]);
    if (p->gated) read_bias(p->bias ? p->bias + out + first : 0, PANEL, biases[1]);
    for (int64_t row = begin; row < end; row += ROWS) {
        int64_t rows = end - row < ROWS ? end - row : ROWS, to = row * apart + first;
        const word *x = p->x + row * p->x_stride;
        sum_rows(p, x, panel, rows, row == begin, shaped, sums[0]);
        if (p->gated) {
            sum_rows(p, x, panel + out * p->in, rows, row == begin, shaped, sums[1]);
            write_gated(sums[0], sums[1], biases[0], biases[1], p->y + to, rows, apart);
        } else if (p->totals) {
            write_totals(sums[0], p->totals + to, rows, columns, apart);
        } else {
            write_rows(sums[0], biases[0], p->y + to, rows, columns, apart);
        }
    }
}

/* Tasks `begin` to `end` - 1 of more rows. A task is a panel and a chunk of rows. */
static void many_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const product *p = context;
    int64_t num_panels = (p->out + PANEL - 1) / PANEL, shaped = 0;
    for (int64_t task = begin; task < end; task++) {
        int64_t row = task / num_panels * p->chunk;
        int64_t last = row + p->chunk < p->n ? row + p->chunk : p->n;
        rows_by_one(p, task % num_panels, row, last, &shaped);
    }
    give_tiles_back(p->amx);
    (void)thread;
}

/* The time of a product on one thread: 32 bytes of weights a nanosecond, and 256 multiplications
 * with tiles, 128 with pairs and 64 in float32. */
static int64_t nanoseconds_of(int64_t n, int64_t in, int64_t out, int64_t gated) {
    int64_t weights = in * out * (gated ? 2 : 1);
    return weights * (int64_t)sizeof(element) / 32 + weights * n / (with_tiles() ? 256 : 64 * PAIR);
}

int64_t product_time(const piece_of_product *w) {
    return nanoseconds_of(w->n, w->in, w->out, w->gated);
}

static void multiply(product *p) {
    if (p->n <= 0) return;
    int64_t num_panels = (p->out + PANEL - 1) / PANEL;
    int64_t time = nanoseconds_of(p->n, p->in, p->out, p->gated);
    if (p->n <= FEW) {
        int64_t threads = threads_for(time), piece = piece_for(num_panels, threads, time);
        if (p->amx) piece = (piece + 1) / 2 * 2; /* tiles process panels in pairs */
        run_job(num_panels, piece, threads, few_rows, p);
        return;
    }
    p->chunk = CHUNK_BYTES / (p->in / PAIR * (int64_t)sizeof(word)) / ROWS * ROWS;
    if (p->chunk < ROWS) p->chunk = ROWS;
    divide_job(num_panels * ((p->n + p->chunk - 1) / p->chunk), time, many_rows, p);
}

#if defined(ELEMENT_BF16) && PAIR == 1
/* Without bf16 instructions, products read a float32 copy of some rows of x, so that an input is
 * converted once for all panels. The copy belongs to the calling thread. */
#define COPY_WORDS (1 << 18)

static inline const word *words_of(const element *x, int64_t rows, int64_t in, int64_t *stride) {
    static _Thread_local float copy[COPY_WORDS] __attribute__((aligned(64)));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < in; k++) copy[r * in + k] = load(x[r * *stride + k]);
    *stride = in;
    return (const word *)copy;
}

static inline int64_t rows_at_once(int64_t in) {
    int64_t most = COPY_WORDS / in;
    return most > ROWS ? most / ROWS * ROWS : most;
}
#else
static inline const word *words_of(const element *x, int64_t rows, int64_t in, int64_t *stride) {
    (void)rows, (void)in;
    *stride /= PAIR;
    return (const word *)x;
}

static inline int64_t rows_at_once(int64_t in) {
    (void)in;
    return INT64_MAX;
}
#endif

/* Panels `begin` to `end` - 1 of a product, by the calling thread, or with `end` = 0 all panels, as
 * a job. Rows of x are `x_stride` elements apart. */
static void run(product p, const element *x, int64_t x_stride, int64_t begin, int64_t end) {
    int64_t left = p.n, most = rows_at_once(p.in);
    for (; left > 0; left -= p.n, x += p.n * x_stride) {
        p.n = p.chunk = left < most ? left : most;
        p.x_stride = x_stride;
        p.x = words_of(x, p.n, p.in, &p.x_stride);
        if (end == 0) multiply(&p);
        else if (p.n <= FEW) few_rows(&p, begin, end, 0);
        else many_rows(&p, begin, end, 0); /* one chunk: tasks are panels */
        if (p.totals) p.totals += p.n * p.y_stride;
        else p.y += p.n * p.y_stride;
    }
}

/* x [n, in], panels, bias [out] or NULL -> y [n, out]; `in` is a multiple of 32, up to MOST_INPUTS.
 * If `gated`, the panels have 2 x out outputs, `out` is a multiple of 32, and
 * y = silu(first half) * second half. */
void panel_product(const element *x, const element *panels, const element *bias, element *y,
                   int64_t n, int64_t in, int64_t out, int64_t gated) {
    product p = {0, panels, bias, y, 0, n, in, out, gated, 1, 0, out, with_tiles(), 0};
    run(p, x, in, 0, 0);
}

static product product_with(const piece_of_product *w) {
    return (product){0, w->panels, w->bias, w->y, 0, w->n, w->in, w->out, w->gated, 1, 0,
                     w->y_stride, with_tiles(), 0};
}

/* Panels `begin` to `end` - 1 of a product, by the calling thread. */
void panel_piece(const piece_of_product *w, int64_t begin, int64_t end) {
    if (begin < end) run(product_with(w), w->x, w->x_stride, begin, end);
}

void panel_job(const piece_of_product *w) { run(product_with(w), w->x, w->x_stride, 0, 0); }

/* x [n, in], panels -> float32 y [n, out], not rounded: sums over 1, 2, 4 or 8 equal parts of the
 * inner dimension, each a multiple of 32, added as a balanced tree. */
void panel_sums(const element *x, const element *panels, float *y, int64_t n, int64_t in,
                int64_t out, int64_t parts) {
    product p = {0, panels, 0, 0, y, n, in, out, 0, parts, 0, out, with_tiles(), 0};
    run(p, x, in, 0, 0);
}

/* Rows of a weight in panels to be copied. */
typedef struct {
    const element *panels;
    const int64_t *ids;
    element *y;
    int64_t in, out;
    _Atomic int64_t wrong; /* number of invalid ids */
} lookup;

static void copy_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    lookup *c = context;
    for (int64_t row = begin; row < end; row++) {
        int64_t id = c->ids[row];
        if (id < 0 || id >= c->out) {
            c->wrong++;
            continue;
        }
        const element *at = c->panels + id / PANEL * PANEL * c->in + id % PANEL * TWO;
        for (int64_t k = 0; k < c->in; k += TWO, at += TWO * PANEL)
            memcpy(c->y + row * c->in + k, at, TWO * sizeof(element));
    }
    (void)thread;
}

/* Rows `ids` [n] of a weight in panels -> y [n, in], for a tied embedding. Returns the number of
 * invalid ids; their rows are not written. */
int64_t panel_rows(const element *panels, const int64_t *ids, element *y, int64_t n, int64_t in,
                   int64_t out) {
    lookup all = {panels, ids, y, in, out, 0};
    divide_job(n, n * in, copy_rows, &all);
    return all.wrong;
}
