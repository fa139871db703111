/* Vectors of small integers: products of 8-bit and 4-bit codes, and tables of 16 numbers. */
#pragma once
#include "scales.h"

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* Products of four codes u and four signed q in each lane are added:
 *
 *   add_half   to a `partial`, for u below 16
 *   add_whole  to an int32, for u of 8 bits: as stored, or minus 128 (SIGNED)
 *
 * AVX-512 VNNI has an instruction for both. Before it, one multiplies unsigned by signed bytes and
 * adds two products in 16 bits. With u below 16 these are at most 15 x 127 x 2, and eight of them
 * fit: sums are widened once for each block of 32 inputs. For 8 bits, |code| is multiplied by q with
 * the code's sign: two products are at most 128 x 127 x 2 and just fit. */
#if defined(WIDE) && defined(__AVX512VNNI__)
#define SIGNED 0
typedef ints partial, whole;
static inline partial add_half(partial sum, ints u, ints q) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)q);
}
static inline ints widened(partial sum) { return sum; }
static inline whole whole_of(ints u) { return u; }
static inline ints add_whole(ints sum, whole u, ints q) { return add_half(sum, u, q); }
#elif defined(WIDE) || defined(__AVX2__)
#include <immintrin.h>
#define SIGNED 1
typedef int16_t partial __attribute__((vector_size(4 * LANES)));
typedef struct {
    ints code, magnitude;
} whole;
#if defined(WIDE)
static inline partial add_half(partial sum, ints u, ints q) {
    return sum + (partial)_mm512_maddubs_epi16((__m512i)u, (__m512i)q);
}
static inline ints widened(partial sum) {
    return (ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
}
static inline ints absolute(ints code) { return (ints)_mm512_abs_epi8((__m512i)code); }
static inline ints with_sign(ints q, ints code) {
    __mmask64 negative = _mm512_movepi8_mask((__m512i)code);
    return (ints)_mm512_mask_sub_epi8((__m512i)q, negative, _mm512_setzero_si512(), (__m512i)q);
}
#else
static inline partial add_half(partial sum, ints u, ints q) {
    return sum + (partial)_mm256_maddubs_epi16((__m256i)u, (__m256i)q);
}
static inline ints widened(partial sum) {
    return (ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
}
static inline ints absolute(ints code) { return (ints)_mm256_abs_epi8((__m256i)code); }
static inline ints with_sign(ints q, ints code) {
    return (ints)_mm256_sign_epi8((__m256i)q, (__m256i)code);
}
#endif
static inline whole whole_of(ints u) {
    ints code = u ^ (int32_t)0x80808080;
    return (whole){code, absolute(code)};
}
static inline ints add_whole(ints sum, whole u, ints q) {
    return sum + widened(add_half((partial){0}, u.magnitude, with_sign(q, u.code)));
}
#else
#define SIGNED 0
typedef ints partial, whole;
static inline partial add_half(partial sum, ints u, ints q) {
    for (int e = 0; e < 4; e++) sum += (u >> (8 * e) & 255) * (q << (24 - 8 * e) >> 24);
    return sum;
}
static inline ints widened(partial sum) { return sum; }
static inline whole whole_of(ints u) { return u; }
static inline ints add_whole(ints sum, whole u, ints q) { return add_half(sum, u, q); }
#endif

static inline ints low_halves(ints u) { return u & ((ints){0} + 0x0f0f0f0f); }
static inline ints high_halves(ints u) { return low_halves(u >> 4); }

/* The table's numbers for the codes in each byte of u. `table` has its 16 bytes again and again. */
static inline ints looked_up(ints table, ints u) {
#if defined(WIDE)
    return (ints)_mm512_shuffle_epi8((__m512i)table, (__m512i)u);
#elif defined(__AVX2__)
    return (ints)_mm256_shuffle_epi8((__m256i)table, (__m256i)u);
#elif defined(NEON)
    return (ints)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)u);
#else
    uint8_t from[sizeof u], to[sizeof u], numbers[sizeof u];
    memcpy(from, &u, sizeof u), memcpy(numbers, &table, sizeof u);
    for (size_t i = 0; i < sizeof u; i++) to[i] = numbers[from[i]];
    memcpy(&u, to, sizeof u);
    return u;
#endif
}

static inline ints load_ints(const void *p) {
    ints v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Four adjacent q in all lanes. */
static inline ints four(const int8_t *q) {
    int32_t together;
    memcpy(&together, q, 4);
    return (ints){0} + together;
}

/* Zero points of LANES outputs at index `at`. */
static inline vec zeros_at(const void *offsets, int64_t at) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    bytes zeros;
    memcpy(&zeros, (const int8_t *)offsets + at, sizeof zeros);
    return __builtin_convertvector(zeros, vec);
}
