/* The matrix product and the vector functions of prefill.c.
 *
 *   C [m, 32] float32  (+)=  A [m, k] words  x  B [k, 32] words
 */
#pragma once
#include "transpose.h"

#define COLUMNS 32 /* of B and C: two AMX tiles, or two vectors of 16 */
#define ROUND_UP(x, to) (((x) + (to) - 1) / (to) * (to))

/* 2^x for x <= 0, error below 2e-7: x = n + r, 2^r by a minimax polynomial on 0 <= r <= 1.
 * Exactly 1 at 0, exactly 0 at -infinity, NaN stays NaN. */
static inline vec exp2_vec(vec x) {
#if defined(WIDE)
    vec r = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    /* Adding 1.5 * 2^23 + 127 rounds to an integer and leaves n + 127, the exponent of 2^n, in the
     * lowest bits. At -126 that is 0, and so is the shifted result. */
    const float round = 12582912.f + 127.f;
    x = larger((vec){0} - 126.f, x);
    vec t = x - 0.49999997f + round;
    vec r = x - (t - round);
#endif
    vec p = r * 1.86713063e-3f + 9.01702885e-3f;
    p = p * r + 5.57999127e-2f;
    p = p * r + 2.40164444e-1f;
    p = p * r + 6.93151295e-1f;
    p = p * r + 1.f;
#if defined(WIDE)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)x); /* p 2^floor(x) */
#else
    return p * (vec)((words)t << 23);
#endif
}

/* Rows k and k + 1 (k even) of a float32 matrix -> words in the layout of B. */
static inline void store_words(word *to, vec even, vec odd) {
#if PAIR == 2 && defined(NEON)
    store_vec(to, (vec)round_to_pairs((float32x4_t)even, (float32x4_t)odd));
#elif PAIR == 2
    const __m512i alternate =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    store_vec(to, (vec)_mm512_permutexvar_epi16(alternate, both));
#else
    store_vec(to, even);
    store_vec(to + COLUMNS, odd);
#endif
}

/* `rows` rows of C = A B, or C += A B if `add`. Rows of A are `a_stride` words apart. */
static inline __attribute__((always_inline)) void multiply_block(const int rows, float *c,
                                                                 const word *a, int64_t a_stride,
                                                                 const word *b, int64_t k,
                                                                 int add) {
    for (int64_t column = 0; column < COLUMNS; column += VECTORS * LANES, c += VECTORS * LANES) {
        vec sums[BLOCK][VECTORS] = {0};
        if (add)
            for (int r = 0; r < rows; r++)
                for (int h = 0; h < VECTORS; h++)
                    sums[r][h] = load_vec(c + r * COLUMNS + h * LANES);
        for (int64_t j = 0; j < k; j++) {
            vec right[VECTORS];
            for (int h = 0; h < VECTORS; h++) {
                right[h] = load_vec(b + j * COLUMNS + column + h * LANES);
                KEEP_IN_REGISTER(right[h]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vec left = all_lanes(a[r * a_stride + j]);
                for (int h = 0; h < VECTORS; h++) {
                    sums[r][h] = multiply_add(sums[r][h], left, right[h]);
                    KEEP_IN_REGISTER(sums[r][h]);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < VECTORS; h++) store_vec(c + r * COLUMNS + h * LANES, sums[r][h]);
    }
}

/* All rows; m is a multiple of 32. With blocks of 6, 32 are 4 x 6 + 2 x 4. */
static __attribute__((noinline)) void multiply_vectors(float *c, const word *a, int64_t a_stride,
                                                       const word *b, int64_t m, int64_t k,
                                                       int add) {
    const int64_t whole = 32 % BLOCK ? 24 : 32;
    for (int64_t i = 0; i < m; i += 32, c += 32 * COLUMNS, a += 32 * a_stride) {
        for (int64_t r = 0; r < whole; r += BLOCK)
            multiply_block(BLOCK, c + r * COLUMNS, a + r * a_stride, a_stride, b, k, add);
        for (int64_t r = whole; r < 32; r += 4)
            multiply_block(4, c + r * COLUMNS, a + r * a_stride, a_stride, b, k, add);
    }
}

#if defined(AMX)
/* The same with AMX tiles of 16 rows by 16 words; m is a multiple of 32, k of 16. */
static __attribute__((noinline)) void multiply_tiles(float *c, const word *a, int64_t a_stride,
                                                     const word *b, int64_t m, int64_t k, int add) {
    const int64_t row = COLUMNS * 4; /* bytes */
    ALL_STORED;
    for (int64_t i = 0; i < m; i += 32, c += 32 * COLUMNS, a += 32 * a_stride) {
        if (add) {
            _tile_loadd(0, c, row);
            _tile_loadd(1, c + 16, row);
            _tile_loadd(2, c + 16 * COLUMNS, row);
            _tile_loadd(3, c + 16 * COLUMNS + 16, row);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t j = 0; j < k; j += 16) {
            _tile_loadd(4, a + j, a_stride * 4);
            _tile_loadd(5, a + j + 16 * a_stride, a_stride * 4);
            _tile_loadd(6, b + j * COLUMNS, row);
            _tile_loadd(7, b + j * COLUMNS + 16, row);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c, row);
        _tile_stored(1, c + 16, row);
        _tile_stored(2, c + 16 * COLUMNS, row);
        _tile_stored(3, c + 16 * COLUMNS + 16, row);
    }
}
#endif

/* The tile unit powers down after about 2,000 idle cycles and takes 800 to wake up (measured on
 * Sapphire Rapids), as long as a small product. One instruction keeps it awake. */
static inline void keep_awake(int amx) {
#if defined(AMX)
    if (amx) _tile_dpbf16ps(0, 4, 6); /* the result is not used */
#endif
    (void)amx;
}

/* C = A B, or C += A B if `add`; m and k are multiples of 32 elements. */
static inline void multiply(int amx, float *c, const word *a, int64_t a_stride, const word *b,
                            int64_t m, int64_t k, int add) {
#if defined(AMX)
    if (amx) {
        multiply_tiles(c, a, a_stride, b, m, k, add);
        return;
    }
#endif
    (void)amx;
    multiply_vectors(c, a, a_stride, b, m, k, add);
}
