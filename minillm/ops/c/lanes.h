/* Loads of elements, and sums and maxima over the lanes of a vector, for decode.c. */
#pragma once
#include "vectors.h"

static inline vec load_elements(const element *p) {
#if defined(ELEMENT_BF16) && defined(WIDE)
    __m512i both = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return (vec)_mm512_slli_epi32(both, 16);
#elif defined(ELEMENT_BF16)
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    halves h;
    memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, words) << 16);
#else
    return load_vec(p);
#endif
}

#define LANES_OF(...) __VA_ARGS__

/* One step of `sum_each`: add the two halves of each group of lanes of a and b. The groups of a and
 * b alternate in the result. */
#define JOIN(a, b, low, high) \
    (SHUFFLE(a, b, LANES_OF low) + SHUFFLE(a, b, LANES_OF high))

/* Lane i of the result is the sum over the lanes of a[i]. Takes LANES - 1 vector additions instead
 * of log2(LANES) for each sum. */
static inline vec sum_each(vec *a) {
#if LANES == 16
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
#elif LANES == 4
    for (int i = 0; i < 2; i++) a[i] = JOIN(a[i], a[i + 2], (0, 1, 4, 5), (2, 3, 6, 7));
    return JOIN(a[0], a[1], (0, 4, 2, 6), (1, 5, 3, 7));
#else
    for (int i = 0; i < 4; i++)
        a[i] = JOIN(a[i], a[i + 4], (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15));
    for (int i = 0; i < 2; i++)
        a[i] = JOIN(a[i], a[i + 2], (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15));
    return JOIN(a[0], a[1], (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15));
#endif
}

/* Exchange lanes that are 8, 4, 2 or 1 apart. */
#if LANES == 16
#define SWAP_8(a) SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define SWAP_4(a) SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define SWAP_2(a) SHUFFLE(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SWAP_1(a) SHUFFLE(a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#elif LANES == 4
#define SWAP_2(a) SHUFFLE(a, a, 2, 3, 0, 1)
#define SWAP_1(a) SHUFFLE(a, a, 1, 0, 3, 2)
#else
#define SWAP_4(a) SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3)
#define SWAP_2(a) SHUFFLE(a, a, 2, 3, 0, 1, 6, 7, 4, 5)
#define SWAP_1(a) SHUFFLE(a, a, 1, 0, 3, 2, 5, 4, 7, 6)
#endif

static inline float largest(vec a) {
#if LANES == 16
    a = larger(a, SWAP_8(a));
#endif
#if LANES > 4
    a = larger(a, SWAP_4(a));
#endif
    a = larger(a, SWAP_2(a));
    return larger(a, SWAP_1(a))[0];
}

static inline float sum_of(vec a) {
#if LANES == 16
    a += SWAP_8(a);
#endif
#if LANES > 4
    a += SWAP_4(a);
#endif
    a += SWAP_2(a);
    return (a + SWAP_1(a))[0];
}
