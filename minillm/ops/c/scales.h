/* Scales of groups of inputs, in float32, bf16 or float16. */
#pragma once
#include "vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* float16 -> float32. */
static inline float half_to_float(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float f;
    memcpy(&f, &magnitude, 4);
    f *= 5.192296858534828e33f; /* 2^112, exact also for subnormal halves */
    memcpy(&magnitude, &f, 4);
    if ((h & 0x7c00) == 0x7c00) magnitude = 0x7f800000 | (uint32_t)(h & 0x3ff) << 13;
    magnitude |= sign;
    memcpy(&f, &magnitude, 4);
    return f;
}

/* LANES scales at index `at`. */
static inline __attribute__((always_inline)) vec scales_at(const void *scales, int64_t kind,
                                                          int64_t at) {
    if (kind == 0) return load_vec((const float *)scales + at);
    const uint16_t *from = (const uint16_t *)scales + at;
#if defined(WIDE)
    __m256i sixteen = _mm256_loadu_si256((const __m256i *)from);
    if (kind == 2) return (vec)_mm512_cvtph_ps(sixteen);
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(sixteen), 16);
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i eight = _mm_loadu_si128((const __m128i *)from);
    if (kind == 2) return (vec)_mm256_cvtph_ps(eight);
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
#else
    vec found;
    for (int i = 0; i < LANES; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        float f;
        memcpy(&f, &bits, 4);
        found[i] = kind == 2 ? half_to_float(from[i]) : f;
    }
    return found;
#endif
}
