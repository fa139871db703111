/* y = x W^T + b with a quantised weight and activations rounded to 8 bits (W8A8, W4A8).
 *
 * A decode step is bound by reading weights, and 4-bit codes are a quarter of the bytes of bf16.
 * Converting every code to a float would cost more than it saves. So x is rounded to int8 once, and
 * the processor multiplies small integers: one instruction adds four products of an unsigned code u
 * (8 bits, or 4) and a signed q to an int32.
 *
 * Some channels of a real model are a hundred times larger than the others. With one scale for a row
 * of x, they leave the others a few steps of the 127. So each ROUNDED inputs have a scale of their
 * own, x ~ t q. Of a group of inputs with weight scale s, over its parts of ROUNDED inputs:
 *
 *   sum of w x  ~  s (sum of t (sum of u q)  -  z total)      zero point z
 *   sum of w x  ~  s sum of t (sum of u q)  +  m total        minimum m (GGUF's _1 and K formats)
 *   sum of w x  ~  s sum of t (sum of table[u] q)             a table of 16 whole numbers (NF4, FP4)
 *
 *   total = sum of t (sum of q)
 *
 * The output matrix decides between tokens that are nearly equal: there what remains, x - t q, is
 * rounded in the same way, as a second row that shares the reading of W.
 *
 * Signed 8-bit codes and numbers of a table are stored as u = code + 128, which is subtracted from
 * the inner sums, 8 of 4-bit codes likewise.
 *
 *   8 bits  panels [out / 32, in / 4, 32, 4]
 *   4 bits  panels [out / 32, in / 32, 4, 32, 4]: byte (j, o, e) of a block has input 4 j + e in its
 *           low half, and input 16 + 4 j + e in its high half
 *
 * With AMX, tiles compute the inner sums of eight rows and more, and vectors scale them.
 *
 * Inner sums are exact, and outer ones are added in order. So an output depends only on its rows of
 * x and W, not on the number of rows or threads, nor on the instruction set.
 */
#include <stdlib.h>
#include "integers.h"
#include "matrix.h"
#include "threads.h"

#define LONGEST 512 /* inputs of a group that are added before they become float: 16 KiB of codes */
#define FEW 16      /* up to so many rows, a task is one or more panels */
#define ROWS 32     /* rows of x that are processed together; a multiple of BLOCK_ROWS */
#define AHEAD 4096  /* prefetch distance in bytes */
#define LEAST_GROUP 16 /* inputs of a group, as in cpu_quantized.py */
#define SMALLEST 1e-30f /* of the largest number of inputs that are not taken for zeros */
#if defined(WIDE)
#define BLOCK_ROWS 8
#else
#define BLOCK_ROWS 4
#endif
#define EACH (PANEL / LANES) /* vectors of outputs of a panel */
#define LEAST_TILED 8        /* rows from which on AMX tiles are faster than vectors (measured) */

enum { BYTES, HALVES, TABLE }; /* codes of 8 bits, of 4 bits, and of 4 bits with a table */

/* A product of rounded rows of x. */
typedef struct {
    const matrix *w;
    const element *rows, *bias; /* x, and the bias or NULL */
    element *y;
    rounded_rows x;
    int64_t n, in, out, gated, apart, chunk; /* rows of y are `apart` */
} product;

/* Rows of x to be rounded. */
typedef struct {
    const element *x;
    const matrix *w;
    rounded_rows to;
    int64_t in;
} rounding;

/* Inputs of an inner sum: they have one scale of x and one of the weight. */
static int64_t step_of(int64_t group) { return group % ROUNDED ? LEAST_GROUP : ROUNDED; }

/* ROUNDED inputs: x ~ t q. Returns t, which is NaN if a number is infinite or NaN. */
static inline float round_part(const float *x, int8_t *q) {
    float most = 0, poison = 0;
#pragma omp simd reduction(max : most) reduction(+ : poison)
    for (int i = 0; i < ROUNDED; i++) {
        float f = fabsf(x[i]);
        most = f > most ? f : most;
        poison += f * 0.f;
    }
    if (poison != 0 || most < SMALLEST) {
        memset(q, 0, ROUNDED);
        return poison;
    }
    float inverse = 127.f / most;
    for (int i = 0; i < ROUNDED; i++) q[i] = (int8_t)__builtin_rintf(x[i] * inverse);
    return most / 127.f;
}

/* Rounded rows for each row of x: the second has what remains after the first. */
static int64_t planes_of(const matrix *w) { return w->twice && !w->float8 ? 2 : 1; }

/* What codes are stored with: 128 or 8, and their zero points. */
static int32_t constant_of(const matrix *w) {
    if (w->bits == 4 && !w->numbers) return w->offset_kind == EXACT ? 8 : 0;
    return SIGNED ? 0 : 128;
}

/* The sums of a rounded row times this constant, and the totals of its groups. */
static void add_up(const rounding *c, int64_t row) {
    int64_t in = c->in, group = c->w->group, step = step_of(group);
    int32_t constant = constant_of(c->w);
    rounded_rows to = rounded_from(c->to, row, in, group);
    for (int64_t k = 0; k < in; k += group) {
        double total = 0; /* products are exact */
        for (int64_t i = k; i < k + group; i += step) {
            int32_t sum = 0;
            for (int64_t j = i; j < i + step; j++) sum += to.q[j];
            to.sums[i / step] = constant * sum;
            total += (double)to.t[i / ROUNDED] * sum;
        }
        to.totals[k / group] = (float)total;
    }
}

/* Round rows `begin` to `end` - 1 of x. */
static void round_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const rounding *c = context;
    const int32_t *order = c->w->order;
    int64_t in = c->in, planes = planes_of(c->w);
    for (int64_t r = begin; r < end; r++) {
        const element *x = c->x + r * in;
        for (int64_t k = 0; k < in; k += ROUNDED) {
            float some[ROUNDED];
            if (order)
                for (int64_t i = 0; i < ROUNDED; i++) some[i] = load(x[order[k + i]]);
            else
                for (int64_t i = 0; i < ROUNDED; i++) some[i] = load(x[k + i]);
            for (int64_t row = r * planes; row < (r + 1) * planes; row++) {
                int8_t *q = c->to.q + row * in + k;
                float t = round_part(some, q);
                c->to.t[(row * in + k) / ROUNDED] = t * c->w->unit;
                if (planes > 1) /* exact, so not changed by being contracted */
                    for (int64_t i = 0; i < ROUNDED; i++) some[i] -= (float)((double)t * q[i]);
            }
        }
        for (int64_t row = r * planes; row < (r + 1) * planes; row++) add_up(c, row);
    }
    (void)thread;
}

int64_t rounded_bytes(int64_t n, int64_t in) {
    return (n * (in + in / ROUNDED * 4 + in / LEAST_GROUP * 8) + 63) / 64 * 64;
}

rounded_rows rounded_at(char *memory, int64_t n, int64_t in, int64_t group) {
    float *t = (float *)(memory + n * in), *totals = t + n * (in / ROUNDED);
    return (rounded_rows){(int8_t *)memory, t, totals, (int32_t *)(totals + n * (in / group))};
}

rounded_rows rounded_from(rounded_rows x, int64_t first, int64_t in, int64_t group) {
    return (rounded_rows){x.q + first * in, x.t + first * (in / ROUNDED),
                          x.totals + first * (in / group), x.sums + first * (in / step_of(group))};
}

void round_for(const matrix *w, const element *x, int64_t n, int64_t in, rounded_rows to) {
    rounding all = {x, w, to, in};
    if (w->scales && !w->float8) divide_job(n, n * in / 8, round_rows, &all);
}

/* Request the next codes, of as many as are being read. */
static inline __attribute__((always_inline)) void prefetch(const char *codes, const int vecs) {
    for (int line = 0; line < vecs * 4 * LANES; line += 64)
        __builtin_prefetch(codes + AHEAD + line);
}

/* acc [rows][vecs] += 8-bit codes by q, of `step` inputs from a panel. */
static inline __attribute__((always_inline)) void add_bytes(const int rows, const int vecs,
                                                            const char *codes, const int8_t *q,
                                                            int64_t step, int64_t in, int ahead,
                                                            ints acc[BLOCK_ROWS][EACH]) {
    for (int64_t k = 0; k < step; k += 4, codes += 4 * PANEL) {
        if (ahead) prefetch(codes, vecs);
        whole u[EACH];
        for (int c = 0; c < vecs; c++) u[c] = whole_of(load_ints(codes + c * 4 * LANES));
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            ints x = four(q + r * in + k);
            for (int c = 0; c < vecs; c++) acc[r][c] = add_whole(acc[r][c], u[c], x);
        }
    }
}

/* The same for 32 codes of 4 bits. */
static inline __attribute__((always_inline)) void add_halves(const int rows, const int vecs,
                                                             const char *codes, const int8_t *q,
                                                             int64_t in, int ahead,
                                                             ints acc[BLOCK_ROWS][EACH]) {
    partial sum[BLOCK_ROWS][EACH] = {{{0}}};
    for (int64_t i = 0; i < 16; i += 4, codes += 4 * PANEL) {
        if (ahead) prefetch(codes, vecs);
        ints u[EACH], v[EACH];
        for (int c = 0; c < vecs; c++) {
            ints both = load_ints(codes + c * 4 * LANES);
            u[c] = low_halves(both), v[c] = high_halves(both);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            ints first = four(q + r * in + i), second = four(q + r * in + i + 16);
            for (int c = 0; c < vecs; c++)
                sum[r][c] = add_half(add_half(sum[r][c], u[c], first), v[c], second);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vecs; c++) acc[r][c] += widened(sum[r][c]);
}

/* The same for codes of 4 bits that stand for the numbers of a table. */
static inline __attribute__((always_inline)) void add_numbers(const int rows, const int vecs,
                                                              const uint8_t *numbers,
                                                              const char *codes, const int8_t *q,
                                                              int64_t in, int ahead,
                                                              ints acc[BLOCK_ROWS][EACH]) {
    ints table = {0};
    for (size_t i = 0; i < sizeof table; i += 16) memcpy((char *)&table + i, numbers, 16);
    for (int64_t i = 0; i < 16; i += 4, codes += 4 * PANEL)
        for (int64_t half = 0; half < 2; half++) { /* one after the other: few registers */
            if (ahead && !half) prefetch(codes, vecs);
            whole u[EACH];
            for (int c = 0; c < vecs; c++) {
                ints both = load_ints(codes + c * 4 * LANES);
                u[c] = whole_of(looked_up(table, half ? high_halves(both) : low_halves(both)));
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                ints x = four(q + r * in + i + 16 * half);
                for (int c = 0; c < vecs; c++) acc[r][c] = add_whole(acc[r][c], u[c], x);
            }
        }
}

/* Where a group (or LONGEST inputs of it) begins. */
typedef struct {
    int64_t panel, row, k, length, group, groups, step; /* `groups` of a row */
    int is_first; /* of the group: its offsets are added here */
    int ahead;    /* codes are read for the first time: prefetch the next ones */
} place;

/* The scales and offsets of LANES outputs and a group. */
static inline __attribute__((always_inline)) void factors_at(const matrix *w, int64_t at,
                                                             vec factors[2]) {
    vec s = scales_at(w->scales, w->scale_kind, at), offset = {0};
    if (w->offset_kind == ZEROS) offset = -s * zeros_at(w->offsets, at);
    if (w->offset_kind == MINIMA) offset = scales_at(w->offsets, w->scale_kind, at);
    factors[0] = s, factors[1] = offset;
}

/* sums [rows, 32] += the products of a group with a panel. */
static inline __attribute__((always_inline)) void add_group(const product *p, const int rows,
                                                            const int mode, const place *at,
                                                            float *sums) {
    const matrix *w = p->w;
    const int vecs = rows > 2 ? 2 : EACH; /* of one or two rows all, to read in sequence */
    /* Divisions are slow, but these are by 16 or 32. */
    const int shift = mode == BYTES && at->step != ROUNDED ? 4 : 5;
    int64_t in = p->in, step = 1 << shift, steps = in >> shift, parts = in >> 5;
    int64_t scale = (at->panel * at->groups + at->group) * PANEL;
    const float *totals = p->x.totals + at->row * at->groups + at->group;
    for (int o = 0; o < PANEL; o += vecs * LANES) {
        vec found[BLOCK_ROWS][EACH] = {{{0}}};
        for (int64_t k = at->k; k < at->k + at->length; k += step) {
            int64_t base = (at->panel * in + k) * PANEL; /* codes before these */
            const char *codes = (const char *)w->panels + (mode == BYTES ? base : base / 2) + 4 * o;
            const int8_t *q = p->x.q + at->row * in + k;
            const int32_t *total = p->x.sums + at->row * steps + (k >> shift);
            const float *t = p->x.t + at->row * parts + (k >> 5);
            ints acc[BLOCK_ROWS][EACH];
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < vecs; c++)
                    acc[r][c] = (ints){0} - total[r * steps];
            if (mode == BYTES) add_bytes(rows, vecs, codes, q, step, in, at->ahead, acc);
            else if (mode == HALVES) add_halves(rows, vecs, codes, q, in, at->ahead, acc);
            else add_numbers(rows, vecs, w->numbers, codes, q, in, at->ahead, acc);
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < vecs; c++)
                    found[r][c] = fused_add(found[r][c], __builtin_convertvector(acc[r][c], vec),
                                            (vec){0} + t[r * parts]);
        }
        for (int c = 0; c < vecs; c++) {
            int64_t lanes = o + c * LANES;
            vec each[2];
            factors_at(w, scale + lanes, each);
            for (int r = 0; r < rows; r++) {
                float *to = sums + r * PANEL + lanes;
                vec sum = fused_add(load_vec(to), found[r][c], each[0]);
                if (at->is_first && w->offset_kind != EXACT)
                    sum = fused_add(sum, each[1], (vec){0} + totals[r * at->groups]);
                store_vec(to, sum);
            }
        }
    }
}

/* The same for any number of rows up to ROWS. */
static inline __attribute__((always_inline)) void add_rows(const product *p, const int mode,
                                                           place at, int64_t rows, float *sums) {
    for (; rows > 0; rows -= BLOCK_ROWS, sums += BLOCK_ROWS * PANEL) {
        switch (rows < BLOCK_ROWS ? rows : BLOCK_ROWS) {
            case 1: add_group(p, 1, mode, &at, sums); break;
            case 2: add_group(p, 2, mode, &at, sums); break;
            case 3: add_group(p, 3, mode, &at, sums); break;
#if BLOCK_ROWS > 4
            case 4: add_group(p, 4, mode, &at, sums); break;
            case 5: add_group(p, 5, mode, &at, sums); break;
            case 6: add_group(p, 6, mode, &at, sums); break;
            case 7: add_group(p, 7, mode, &at, sums); break;
#endif
            default: add_group(p, BLOCK_ROWS, mode, &at, sums);
        }
        at.row += BLOCK_ROWS;
        at.ahead = 0;
    }
}

#if defined(AMX)
/* 4-bit codes of 32 inputs and 16 outputs of a panel, as a tile has them: [8, 16, 4]. */
static inline __attribute__((always_inline)) void unpack_tile(const uint8_t *numbers,
                                                              const char *codes, char *bytes) {
    ints table = {0};
    for (size_t i = 0; numbers && i < sizeof table; i += 16)
        memcpy((char *)&table + i, numbers, 16);
    for (int i = 0; i < 4; i++) {
        ints both = load_ints(codes + i * 4 * PANEL);
        ints low = low_halves(both), high = high_halves(both);
        if (numbers) low = looked_up(table, low), high = looked_up(table, high);
        memcpy(bytes + 64 * i, &low, 64);
        memcpy(bytes + 64 * (i + 4), &high, 64);
    }
}

/* sums [rows, 32] of up to 16 rows by 16 outputs of a panel, from `o` on, as add_group adds them.
 * While the tiles multiply ROUNDED inputs, the sums of those before are scaled. */
static inline __attribute__((always_inline)) void sum_tiles(const product *p, const int mode,
                                                            const int single, const int rows,
                                                            int64_t panel, int64_t row, int64_t o,
                                                            float *sums) {
    const matrix *w = p->w;
    int64_t in = p->in, parts = in / ROUNDED, group = w->group, groups = in / group;
    int64_t scale = panel * groups * PANEL + o, inside = 0;
    const int64_t size = mode == BYTES ? ROUNDED * PANEL : ROUNDED / 2 * PANEL; /* bytes of a step */
    const char *codes = (const char *)w->panels + panel * parts * size + 4 * o;
    const int8_t *q = p->x.q + row * in;
    const int32_t *totals = p->x.sums + row * parts;
    const float *t = p->x.t + row * parts, *of_groups = p->x.totals + row * groups;
    const uint8_t *numbers = mode == TABLE ? w->numbers : 0;
    int32_t acc[2][16 * 16] __attribute__((aligned(64)));
    char bytes[2][16 * ROUNDED] __attribute__((aligned(64)));
    vec sum[16] = {{0}}, some[16] = {{0}}, factors[2];
    if (mode != BYTES) unpack_tile(numbers, codes, bytes[0]);
    for (int64_t i = 0; i <= parts; i++) {
        if (i < parts) {
            _tile_zero(0);
            _tile_loadd(4, q + i * ROUNDED, in);
            if (mode == BYTES) _tile_loadd(6, codes + i * size, 4 * PANEL);
            else _tile_loadd(6, bytes[i & 1], 64);
            _tile_dpbsud(0, 4, 6);
            ALL_STORED;
            for (int64_t line = 0; line < size; line += 4 * PANEL)
                __builtin_prefetch(codes + i * size + AHEAD + line);
            if (i + 1 < parts && mode != BYTES)
                unpack_tile(numbers, codes + (i + 1) * size, bytes[(i + 1) & 1]);
        }
        if (i > 0) {
            int64_t before = inside;
            inside += ROUNDED;
            int last = single || inside == group || inside % LONGEST == 0;
            if (last) factors_at(w, scale, factors);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                ints total = load_ints(acc[(i - 1) & 1] + 16 * r) - totals[r * parts];
                vec found = __builtin_convertvector(total, vec);
                if (single) found = found * t[r * parts];
                else found = some[r] = fused_add(some[r], found, (vec){0} + t[r * parts]);
                if (last) sum[r] = fused_add(sum[r], found, factors[0]), some[r] = (vec){0};
                if (last && before < LONGEST && w->offset_kind != EXACT)
                    sum[r] = fused_add(sum[r], factors[1], (vec){0} + of_groups[r * groups]);
            }
            if (single || inside == group) inside = 0, scale += PANEL, of_groups++;
            t++, totals++;
        }
        if (i < parts) {
            ALL_STORED;
            _tile_stored(0, acc[i & 1], 64);
            ALL_STORED;
        }
    }
    for (int r = 0; r < rows; r++) store_vec(sums + r * PANEL + o, sum[r]);
}

/* The same for all outputs of a panel and any number of rows. */
static inline __attribute__((always_inline)) void sum_all_tiles(const product *p, const int mode,
                                                                int64_t panel, int64_t row,
                                                                int64_t rows, float *sums) {
    for (int64_t o = 0; o < PANEL; o += 16) {
        if (rows >= 16 && p->w->group == ROUNDED) sum_tiles(p, mode, 1, 16, panel, row, o, sums);
        else if (rows >= 16) sum_tiles(p, mode, 0, 16, panel, row, o, sums);
        else sum_tiles(p, mode, 0, (int)rows, panel, row, o, sums);
    }
}

/* Sums as in `sum_panel`, with tiles if they are faster. Returns whether they are. */
static int sum_with_tiles(const product *p, int64_t panel, int64_t row, int64_t rows, float *sums) {
    const matrix *w = p->w;
    if (panel_unit() != 4 || w->group % ROUNDED || rows < LEAST_TILED) return 0;
    for (; rows > 0; rows -= 16, row += 16, sums += 16 * PANEL) {
        shape_tiles_of(ROUNDED, rows < 16 ? rows : 16, 1);
        if (w->numbers) sum_all_tiles(p, TABLE, panel, row, rows, sums);
        else if (w->bits == 4) sum_all_tiles(p, HALVES, panel, row, rows, sums);
        else sum_all_tiles(p, BYTES, panel, row, rows, sums);
    }
    _tile_release();
    return 1;
}
#else
#define sum_with_tiles(p, panel, row, rows, sums) 0
#endif

/* Rows `row` to `row + rows` - 1 of x by a panel -> sums [rows, 32], in memory for ROWS. */
static void sum_panel(const product *p, int64_t panel, int64_t row, int64_t rows, float *sums) {
    const matrix *w = p->w;
    int64_t group = w->group, groups = p->in / group, step = step_of(group);
    int64_t planes = planes_of(w), count = rows * planes;
    if (w->float8) {
        float8_panel(w, p->rows + row * p->in, p->in, panel, rows, sums);
        return;
    }
    int64_t left = sum_with_tiles(p, panel, row * planes, count, sums) ? 0 : count;
    memset(sums, 0, (size_t)(left * PANEL) * sizeof(float));
    for (int64_t g = 0; left && g < groups; g++)
        for (int64_t part = 0; part < group; part += LONGEST) {
            int64_t length = group - part < LONGEST ? group - part : LONGEST;
            place at = {panel, row * planes, g * group + part, length, g, groups, step, !part, 1};
            if (w->numbers) add_rows(p, TABLE, at, left, sums);
            else if (w->bits == 4) add_rows(p, HALVES, at, left, sums);
            else add_rows(p, BYTES, at, left, sums);
        }
    for (int64_t i = 0; planes > 1 && i < rows * PANEL; i++) {
        const float *two = sums + i / PANEL * 2 * PANEL + i % PANEL;
        sums[i] = two[0] + two[PANEL];
    }
}

/* Tasks `begin` to `end` - 1: a panel (if `gated`, of gate and up) and a chunk of rows. */
static void multiply_some(void *context, int64_t begin, int64_t end, int64_t thread) {
    const product *p = context;
    int64_t num_panels = (p->out + PANEL - 1) / PANEL, out = p->out;
    float sums[2][ROWS * PANEL] __attribute__((aligned(64))), biases[2][PANEL];
    for (int64_t task = begin; task < end; task++) {
        int64_t panel = task % num_panels, first = panel * PANEL, row = task / num_panels * p->chunk;
        int64_t last = row + p->chunk < p->n ? row + p->chunk : p->n;
        int64_t columns = columns_of(first, out, p->gated);
        read_bias(p->bias ? p->bias + first : 0, columns, biases[0]);
        if (p->gated) read_bias(p->bias ? p->bias + out + first : 0, PANEL, biases[1]);
        for (int64_t most = ROWS / planes_of(p->w); row < last; row += most) {
            int64_t rows = last - row < most ? last - row : most;
            element *y = p->y + row * p->apart + first;
            sum_panel(p, panel, row, rows, sums[0]);
            if (p->gated) {
                sum_panel(p, panel + num_panels, row, rows, sums[1]);
                write_gated(sums[0], sums[1], biases[0], biases[1], y, rows, p->apart);
            } else {
                write_rows(sums[0], biases[0], y, rows, columns, p->apart);
            }
        }
    }
    (void)thread;
}

/* The time of a product on one thread: 32 bytes of codes a nanosecond, and 128 multiplications, or
 * 64 in float32. */
static int64_t nanoseconds_of(const matrix *w, int64_t n, int64_t in, int64_t out, int64_t gated) {
    int64_t codes = in * out * (gated ? 2 : 1);
    return codes * w->bits / 8 / 32 + codes * n / (w->float8 ? 64 : 128);
}

int64_t matrix_time(const piece_of_matrix *piece) {
    const piece_of_product *p = &piece->plain;
    if (!piece->w.scales) return product_time(p);
    return nanoseconds_of(&piece->w, p->n, p->in, p->out, p->gated);
}

void matrix_piece(const piece_of_matrix *piece, int64_t begin, int64_t end) {
    piece_of_product plain = piece->plain;
    if (!piece->w.scales) {
        plain.panels = piece->w.panels;
        panel_piece(&plain, begin, end);
        return;
    }
    product p = {&piece->w, plain.x,   plain.bias,  plain.y,        piece->rounded, plain.n,
                 plain.in,  plain.out, plain.gated, plain.y_stride, plain.n};
    multiply_some(&p, begin, end, 0); /* one chunk: tasks are panels */
}

matrix outputs_from(const matrix *w, int64_t first, int64_t in) {
    matrix part = *w;
    if (!w->scales) {
        part.panels = (const element *)w->panels + first * in;
        return part;
    }
    int64_t groups = first * (in / w->group), size = w->scale_kind ? 2 : 4;
    part.panels = (const char *)w->panels + first * in * w->bits / 8;
    part.scales = (const char *)w->scales + groups * size;
    if (w->offsets)
        part.offsets = (const char *)w->offsets + groups * (w->offset_kind == ZEROS ? 1 : size);
    return part;
}

/* Memory for rounded rows, which belongs to the calling thread and is kept between calls. */
static char *scratch(size_t size) {
    static _Thread_local char *memory;
    static _Thread_local size_t held;
    if (size > held) {
        free(memory);
        memory = aligned_alloc(64, size); /* cache lines */
        held = memory ? size : 0;
    }
    return memory;
}

/* A product with one quantised matrix, whose rows of x lie one after the other. */
static int64_t quantized_job(const matrix *w, const piece_of_product *plain) {
    int64_t n = plain->n, in = plain->in, out = plain->out, gated = plain->gated;
    if (n <= 0) return 0;
    char *memory = scratch((size_t)rounded_bytes(n * planes_of(w), in));
    if (!memory) return 1;
    rounded_rows rows = rounded_at(memory, n * planes_of(w), in, w->group);
    product p = {w, plain->x, plain->bias, plain->y, rows, n, in, out, gated, plain->y_stride, n};
    round_for(w, plain->x, n, in, p.x);
    if (n > FEW) p.chunk = (1 << 19) / in / ROWS * ROWS;
    if (p.chunk < ROWS) p.chunk = n < ROWS ? n : ROWS;
    int64_t num_panels = (out + PANEL - 1) / PANEL, chunks = (n + p.chunk - 1) / p.chunk;
    divide_job(num_panels * chunks, nanoseconds_of(w, n, in, out, gated), multiply_some, &p);
    return 0;
}

int64_t quantized_product(const element *x, const matrix *w, const element *bias, element *y,
                          int64_t n, int64_t in, int64_t out, int64_t gated) {
    piece_of_product plain = {x, 0, bias, y, n, in, out, gated, in, out};
    return quantized_job(w, &plain);
}

int64_t product_of(const element *x, const matrix *w, const element *bias, element *y, int64_t n,
                   int64_t in, int64_t out, int64_t gated) {
    for (int64_t first = 0; w; w = w->next) {
        int64_t columns = w->next ? w->outputs : out - first;
        const element *own = bias ? bias + first : 0;
        piece_of_product plain = {x, w->panels, own, y + first, n, in, columns, gated, in, out};
        if (!w->scales) panel_job(&plain);
        else if (quantized_job(w, &plain)) return 1;
        first += columns;
    }
    return 0;
}
