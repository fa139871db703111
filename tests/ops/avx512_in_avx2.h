/* AVX-512 on a processor that has only AVX2, by SIMDe (Debian's libsimde-dev): it computes what the
 * instructions compute. Given to the compiler with -include: afterwards a source takes this
 * processor for one with AVX-512. With EMULATE_VNNI and EMULATE_BF16, also with VNNI and BF16.
 *
 * The last functions are not in SIMDe 0.7. Its product of pairs of bf16 rounds each addition, where
 * the instruction rounds once.
 */
#pragma once
#define _GNU_SOURCE
#include <simde/x86/avx512.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#define __m512 simde__m512
#define __m512i simde__m512i
#define __m512bh simde__m512bh
#define _mm512_abs_epi8 simde_mm512_abs_epi8
#define _mm512_add_epi32 simde_mm512_add_epi32
#define _mm512_dpbf16_ps simde_mm512_dpbf16_ps
#define _mm512_dpbusd_epi32 simde_mm512_dpbusd_epi32
#define _mm512_fmadd_ps simde_mm512_fmadd_ps
#define _mm512_loadu_si512 simde_mm512_loadu_si512
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#define _mm512_maddubs_epi16 simde_mm512_maddubs_epi16
#define _mm512_mask_add_epi32 simde_mm512_mask_add_epi32
#define _mm512_mask_permutexvar_epi16 simde_mm512_mask_permutexvar_epi16
#define _mm512_mask_sub_epi8 simde_mm512_mask_sub_epi8
#define _mm512_max_ps simde_mm512_max_ps
#define _mm512_movepi8_mask simde_mm512_movepi8_mask
#define _mm512_permutex2var_epi32 simde_mm512_permutex2var_epi32
#define _mm512_permutexvar_epi16 simde_mm512_permutexvar_epi16
#define _mm512_scalef_ps simde_mm512_scalef_ps
#define _mm512_set1_epi16 simde_mm512_set1_epi16
#define _mm512_set1_epi32 simde_mm512_set1_epi32
#define _mm512_set_epi16 simde_mm512_set_epi16
#define _mm512_set_epi32 simde_mm512_set_epi32
#define _mm512_setzero_si512 simde_mm512_setzero_si512
#define _mm512_shuffle_epi8 simde_mm512_shuffle_epi8
#define _mm512_slli_epi32 simde_mm512_slli_epi32
#define _mm512_storeu_si512 simde_mm512_storeu_si512
#define _mm512_cmplt_epu16_mask below_in_c
#define _mm512_cvtepu16_epi32 widen_in_c
#define _mm512_cvtph_ps from_half_in_c
#define _mm512_cvtne2ps_pbh round_pairs_in_c
#define _mm512_reduce_ps fraction_in_c
#define _mm512_zextsi128_si512 extend_in_c

static inline simde__mmask32 below_in_c(simde__m512i a, simde__m512i b) {
    uint16_t left[32], right[32];
    simde__mmask32 found = 0;
    memcpy(left, &a, 64), memcpy(right, &b, 64);
    for (int i = 0; i < 32; i++) found |= (simde__mmask32)(left[i] < right[i]) << i;
    return found;
}

static inline simde__m512i widen_in_c(__m256i a) {
    uint16_t from[16];
    uint32_t to[16];
    simde__m512i result;
    memcpy(from, &a, 32);
    for (int i = 0; i < 16; i++) to[i] = from[i];
    memcpy(&result, to, 64);
    return result;
}

static inline simde__m512 from_half_in_c(__m256i a) {
    __m128i from[2];
    __m256 to[2];
    simde__m512 result;
    memcpy(from, &a, 32);
    for (int i = 0; i < 2; i++) to[i] = _mm256_cvtph_ps(from[i]);
    memcpy(&result, to, 64);
    return result;
}

/* float32 -> bf16, to the nearest even; b is in the lower half. */
static inline simde__m512bh round_pairs_in_c(simde__m512 a, simde__m512 b) {
    uint32_t from[32];
    uint16_t to[32];
    simde__m512bh result;
    memcpy(from, &b, 64), memcpy(from + 16, &a, 64);
    for (int i = 0; i < 32; i++) {
        int is_nan = (from[i] & 0x7fffffff) > 0x7f800000;
        to[i] = (uint16_t)(is_nan ? from[i] >> 16 | 0x40
                                  : (from[i] + 0x7fff + (from[i] >> 16 & 1)) >> 16);
    }
    memcpy(&result, to, 64);
    return result;
}

/* x - floor(x), the only rounding that is used. */
static inline simde__m512 fraction_in_c(simde__m512 a, int rounding) {
    float x[16];
    memcpy(x, &a, 64);
    for (int i = 0; i < 16; i++) x[i] = isinf(x[i]) ? 0 : x[i] - floorf(x[i]);
    memcpy(&a, x, 64);
    (void)rounding;
    return a;
}

static inline simde__m512i extend_in_c(__m128i a) {
    simde__m512i result;
    memset(&result, 0, 64);
    memcpy(&result, &a, 16);
    return result;
}

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if defined(EMULATE_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATE_BF16)
#define __AVX512BF16__ 1
#endif
