/* y = x W^T + b in bf16 on processors with AMX (Intel, from Sapphire Rapids on).
 *
 * AMX multiplies tiles: A, 16 rows of 32 bf16, by B, 16 rows of 16 pairs, into 16 x 16 float32. A
 * pair is two neighbours along the inner dimension, so a weight is stored once and for all as B
 * wants it, in panels of 32 outputs (two tiles beside each other):
 *
 *   W [out, in]  ->  panels [out / 32, in / 2, 32, 2]     panels[p, k, j, e] = W[32 p + j, 2 k + e]
 *
 * A thread walks its panels from front to back, so that a decode step reads each weight once, in
 * one stream, which it asks for ahead of time: with one row the product is as fast as memory.
 */
#if defined(ELEMENT_BF16) && defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "common.h"

#define PANEL 32          /* outputs */
#define STEP 32           /* inputs that one tile instruction takes */
#define ROWS 32           /* rows of x that are worked on together: two tiles */
#define AHEAD 2048        /* bytes from where a weight is used to where the next is asked for */
#define CHUNK_BYTES 1048576 /* of x, half of a large L2: each panel comes once per chunk */

/* Linux hands the tile registers out on demand (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
int64_t has_panels(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

void pack_panels(const element *w, element *panels, int64_t out, int64_t in) {
#pragma omp parallel for
    for (int64_t p = 0; p < (out + PANEL - 1) / PANEL; p++)
        for (int64_t j = 0; j < PANEL; j++)
            for (int64_t k = 0; k < in; k++) {
                int64_t row = p * PANEL + j; /* rows behind the last are 0 */
                panels[(p * (in / 2) + k / 2) * PANEL * 2 + j * 2 + k % 2] =
                    row < out ? w[row * in + k] : 0;
            }
}

/* Tiles 0 to 3 are sums, 4 and 5 rows of x, `first` and `second` of them, 6 and 7 the halves of a
 * panel. */
static void shape_tiles(int64_t first, int64_t second) {
    struct {
        uint8_t palette, start_row, unused[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    uint8_t one = (uint8_t)first, two = (uint8_t)second;
    uint8_t counts[8] = {one, one, two, two, one, two, 16, 16};
    memcpy(tiles.rows, counts, 8);
    for (int i = 0; i < 8; i++) tiles.bytes_per_row[i] = 64;
    __asm__ volatile("" ::"r"(&tiles) : "memory"); /* GCC takes these stores for useless */
    _tile_loadconfig(&tiles);
}

/* All that tiles will read is stored; GCC does not know that they do. */
#define FENCE __asm__ volatile("" ::: "memory")

/* Up to 32 rows of x [.., in] by one panel, into sums [rows, 32]. */
static inline __attribute__((always_inline)) void multiply(const int two, const int prefetch,
                                                           const element *x, const element *panel,
                                                           int64_t in, float *sums) {
    FENCE;
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
        _tile_loadd(4, x + k, in * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + 16 * in + k, in * 2);
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

/* Up to 16 rows by two panels at once, into sums and others [rows, 32]: two streams of memory, and
 * half as many loads of x. */
static void multiply_pair(const element *x, const element *panel, const element *other, int64_t in,
                          float *sums, float *others) {
    FENCE;
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
        _tile_loadd(4, x + k, in * 2);
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

/* The biases of a panel's outputs, 0 where there are none. Not read where they are added: GCC would
 * read NULL under an empty mask, which is allowed, and takes hundreds of cycles. */
static inline void read_bias(const element *bias, int64_t columns, float *floats) {
    memset(floats, 0, PANEL * sizeof(float));
    if (bias)
        for (int64_t j = 0; j < columns; j++) floats[j] = load(bias[j]);
}

/* sums [rows, 32] + bias -> `columns` of y, whose rows are `out` apart. */
static inline void write_rows(const float *sums, const float *bias, element *y, int64_t rows,
                              int64_t columns, int64_t out) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < columns; j++) y[r * out + j] = store(sums[r * PANEL + j] + bias[j]);
}

/* The same for the gate and the up projection of one panel: silu(gate) * up, both rounded first, as
 * if they had been stored (rows.c: silu_mul). */
static inline void write_gated(const float *gate, const float *up, const float *gate_bias,
                               const float *up_bias, element *y, int64_t rows, int64_t out) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < PANEL; j++) {
            float g = rounded(gate[r * PANEL + j] + gate_bias[j]);
            float u = rounded(up[r * PANEL + j] + up_bias[j]);
            y[r * out + j] = store(rounded(silu(g)) * u);
        }
}

/* Of a panel's outputs those that there are. */
static inline int64_t columns_of(int64_t first, int64_t out, int64_t gated) {
    return gated || out - first > PANEL ? PANEL : out - first;
}

/* Up to 16 rows: every thread has neighbouring panels and takes them by pairs, if `gated` those of
 * gate and up. The last may be its own partner. */
static void few_rows(const element *x, const element *panels, const element *bias, element *y,
                     int64_t n, int64_t in, int64_t out, int64_t gated) {
    int64_t num_panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel
    {
        float sums[2][16 * PANEL] __attribute__((aligned(64))), biases[2][PANEL];
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t end = num_panels * (thread + 1) / threads;
        shape_tiles(n, n);
        for (int64_t p = num_panels * thread / threads; p < end; p += gated ? 1 : 2) {
            int64_t other = gated ? p + num_panels : p + 1 < end ? p + 1 : p;
            multiply_pair(x, panels + p * PANEL * in, panels + other * PANEL * in, in, sums[0],
                          sums[1]);
            for (int64_t i = 0; i < 2; i++) {
                int64_t first = (i ? other : p) * PANEL;
                read_bias(bias ? bias + first : 0, columns_of(first, out, gated), biases[i]);
            }
            if (gated) {
                write_gated(sums[0], sums[1], biases[0], biases[1], y + p * PANEL, n, out);
                continue;
            }
            for (int64_t i = 0; i <= other - p; i++)
                write_rows(sums[i], biases[i], y + (p + i) * PANEL, n,
                           columns_of((p + i) * PANEL, out, 0), out);
        }
        _tile_release();
    }
}

/* Up to 32 rows of x by one panel, with tiles of the right shape. */
static inline void multiply_rows(const element *x, const element *panel, int64_t in, int64_t rows,
                                 int first, int64_t *shaped, float *sums) {
    if (rows != *shaped) shape_tiles(rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 1);
    *shaped = rows;
    if (rows <= 16) multiply(0, first, x, panel, in, sums);
    else if (first) multiply(1, 1, x, panel, in, sums);
    else multiply(1, 0, x, panel, in, sums);
}

/* x [n, in], panels, bias [out] or NULL -> y [n, out]; `in` is a multiple of 32. If `gated`, the
 * panels are those of 2 out outputs, out a multiple of 32, and y = silu(first half) * second half.
 *
 * A task is a panel and a chunk of rows. Up to 32 rows every thread gets neighbouring panels, one
 * stream of memory; with more, whoever is free takes the next. */
void panel_product(const element *x, const element *panels, const element *bias, element *y,
                   int64_t n, int64_t in, int64_t out, int64_t gated) {
    if (n <= 0) return;
    if (n <= 16) return few_rows(x, panels, bias, y, n, in, out, gated);
    int64_t num_panels = (out + PANEL - 1) / PANEL;
    int64_t chunk = CHUNK_BYTES / (in * 2) / ROWS * ROWS;
    if (chunk < ROWS) chunk = ROWS;
    int64_t tasks = num_panels * ((n + chunk - 1) / chunk);
    int64_t share = (num_panels + omp_get_max_threads() - 1) / omp_get_max_threads();
    int64_t at_once = n <= ROWS ? share : 1;
#pragma omp parallel
    {
        float sums[2][ROWS * PANEL] __attribute__((aligned(64))), biases[2][PANEL];
        int64_t shaped = 0;
#pragma omp for schedule(dynamic, at_once)
        for (int64_t task = 0; task < tasks; task++) {
            int64_t begin = task / num_panels * chunk, p = task % num_panels;
            int64_t end = begin + chunk < n ? begin + chunk : n;
            const element *panel = panels + p * in * PANEL;
            int64_t columns = columns_of(p * PANEL, out, gated);
            read_bias(bias ? bias + p * PANEL : 0, columns, biases[0]);
            if (gated) read_bias(bias ? bias + out + p * PANEL : 0, PANEL, biases[1]);
            for (int64_t row = begin; row < end; row += ROWS) {
                int64_t rows = end - row < ROWS ? end - row : ROWS;
                const element *part = x + row * in;
                element *to = y + row * out + p * PANEL;
                multiply_rows(part, panel, in, rows, row == begin, &shaped, sums[0]);
                if (gated) {
                    multiply_rows(part, panel + out * in, in, rows, row == begin, &shaped, sums[1]);
                    write_gated(sums[0], sums[1], biases[0], biases[1], to, rows, out);
                } else {
                    write_rows(sums[0], biases[0], to, rows, columns, out);
                }
            }
        }
        _tile_release();
    }
}

/* Rows `ids` [n] of a weight in panels, [n, in]: an embedding that is the output matrix, too.
 * Returns how many of the ids are not below `out`; their rows are left alone. */
int64_t panel_rows(const element *panels, const int64_t *ids, element *y, int64_t n, int64_t in,
                   int64_t out) {
    int64_t wrong = 0;
#pragma omp parallel for reduction(+ : wrong) if (n > ROWS)
    for (int64_t row = 0; row < n; row++) {
        if (ids[row] < 0 || ids[row] >= out) {
            wrong++;
            continue;
        }
        const element *pair = panels + ids[row] / PANEL * PANEL * in + ids[row] % PANEL * 2;
        for (int64_t k = 0; k < in; k += 2, pair += 2 * PANEL)
            memcpy(y + row * in + k, pair, 2 * sizeof(element));
    }
    return wrong;
}
#else
#include "common.h"
int64_t has_panels(void) { return 0; }
void pack_panels(const element *w, element *panels, int64_t out, int64_t in) {
    (void)w, (void)panels, (void)out, (void)in;
}
void panel_product(const element *x, const element *panels, const element *bias, element *y,
                   int64_t n, int64_t in, int64_t out, int64_t gated) {
    (void)x, (void)panels, (void)bias, (void)y, (void)n, (void)in, (void)out, (void)gated;
}
int64_t panel_rows(const element *panels, const int64_t *ids, element *y, int64_t n, int64_t in,
                   int64_t out) {
    (void)panels, (void)ids, (void)y, (void)in, (void)out;
    return n;
}
#endif
