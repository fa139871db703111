/* Transposed blocks of words, for prefill.c and int8_cache.c. */
#pragma once
#include "vectors.h"

#if LANES == 4
/* Words [4, 4] -> transposed: exchange the off-diagonal quarters of 4 and 2 rows. */
static inline void transpose_4(const word *from, int64_t from_stride, word *to, int64_t to_stride) {
    vec a[4], b[4];
    for (int i = 0; i < 4; i++) a[i] = load_vec(from + i * from_stride);
    for (int i = 0; i < 2; i++) {
        b[i] = SHUFFLE(a[i], a[i + 2], 0, 1, 4, 5);
        b[i + 2] = SHUFFLE(a[i], a[i + 2], 2, 3, 6, 7);
    }
    for (int i = 0; i < 4; i += 2) {
        store_vec(to + i * to_stride, SHUFFLE(b[i], b[i + 1], 0, 4, 2, 6));
        store_vec(to + (i + 1) * to_stride, SHUFFLE(b[i], b[i + 1], 1, 5, 3, 7));
    }
}
#define TRANSPOSE_SOME transpose_4
#elif LANES == 8
/* Words [8, 8] -> transposed: exchange the off-diagonal quarters of 8, 4 and 2 rows. */
static inline void transpose_8(const word *from, int64_t from_stride, word *to, int64_t to_stride) {
    vec a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = load_vec(from + i * from_stride);
    for (int i = 0; i < 4; i++) {
        b[i] = SHUFFLE(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        b[i + 4] = SHUFFLE(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) {
        a[i] = SHUFFLE(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        a[i + 2] = SHUFFLE(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < 8; i += 2) {
        store_vec(to + i * to_stride, SHUFFLE(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14));
        store_vec(to + (i + 1) * to_stride, SHUFFLE(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15));
    }
}
#define TRANSPOSE_SOME transpose_8
#endif

/* Words [16, 16] -> transposed; strides in words. */
static inline void transpose(const word *from, int64_t from_stride, word *to, int64_t to_stride) {
#if defined(WIDE)
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(from + i * from_stride);
#pragma GCC unroll 4
    for (int step = 8; step > 0; step /= 2) { /* exchange the off-diagonal quarters */
        __mmask16 second = step == 8 ? 0xff00 : step == 4 ? 0xf0f0 : step == 2 ? 0xcccc : 0xaaaa;
        __m512i low = _mm512_mask_add_epi32(lane, second, lane, _mm512_set1_epi32(16 - step));
        __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(step));
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
    for (int i = 0; i < 16; i += LANES)
        for (int j = 0; j < 16; j += LANES)
            TRANSPOSE_SOME(from + j * from_stride + i, from_stride, to + i * to_stride + j,
                           to_stride);
#endif
}
