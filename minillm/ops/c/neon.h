/* Arm's instructions for bf16, on Linux and macOS.
 *
 * Everything else that is done on Arm is written with the compiler's own vectors (vectors.h). Both
 * systems have the same intrinsics. Whether a processor has BF16 is found out in Python, and told to
 * the compiler: -march=armv8.2-a+bf16, or -mcpu=native on a Mac.
 */
#pragma once
#include <arm_neon.h>

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(__ARM_FEATURE_BF16)
#define ARM_BF16

/* sum + a b, for vectors of 4 pairs of bf16. BFDOT adds both products of a pair to the sum. It
 * rounds to odd, so a sum of k products has an error of up to k units of the last place of float32,
 * twice that of FMA, and it takes subnormal numbers as 0. */
static inline float32x4_t dot_pairs(float32x4_t sum, uint32x4_t a, uint32x4_t b) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}

/* Pairs of bf16: the lanes of `even` in the lower half of each word, those of `odd` in the upper. */
static inline uint32x4_t round_to_pairs(float32x4_t even, float32x4_t odd) {
    uint16x8_t first = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(even));
    uint16x8_t second = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(odd));
    return vreinterpretq_u32_u16(vzip1q_u16(first, second));
}
#endif
