/* Vectors of 16 float32, for decode.c: loads, and sums and maxima over lanes. */
#pragma once
#include "common.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LANES 16

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

/* Select 16 lanes of a (0 to 15) and b (16 to 31). */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif
#define LANES_OF(...) __VA_ARGS__

/* One step of `sum_each`: add the two halves of each group of lanes of a and b. The groups of a and
 * b alternate in the result. */
#define JOIN(a, b, low, high) \
    (SHUFFLE(a, b, LANES_OF low) + SHUFFLE(a, b, LANES_OF high))

/* Lane i of the result is the sum over the lanes of a[i]. Takes 15 vector additions instead of the
 * 64 of separate sums. */
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

static inline vec larger(vec a, vec b) {
    lanes chosen = a > b; /* all bits of a lane, or none */
    return (vec)((chosen & (lanes)a) | (~chosen & (lanes)b));
}

/* Exchange lanes that are 8, 4, 2 or 1 apart. */
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
