/* Shared definitions: the element type, its conversions, and exp.
 *
 * A library is built for one element type: -DELEMENT_BF16 or -DELEMENT_F32. Arithmetic is float32
 * in both; elements are rounded to nearest even when they are stored.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(ELEMENT_BF16)
typedef uint16_t element;

/* bf16 is the upper half of a float32. */
static inline float load(element x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline element store(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return f == f ? (element)rounded : 0x7fc0; /* rounding could turn a NaN into infinity */
}
#elif defined(ELEMENT_F32)
typedef float element;
static inline float load(element x) { return x; }
static inline element store(float f) { return f; }
#else
#error "define ELEMENT_BF16 or ELEMENT_F32"
#endif

/* Before a loop whose iterations do not depend on each other, although the compiler cannot know. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Processors without registers of a vector's size pass vectors otherwise. This would matter for
 * functions that are called from another file; those of vectors are all `static`. */
#pragma GCC diagnostic ignored "-Wpsabi"

#define MOST_HEAD_DIM 512

/* Round to the element type. */
static inline float rounded(float f) { return load(store(f)); }

/* exp(x) with an error below 2e-7, without branches, so that loops vectorise:
 * x = n ln 2 + r, exp(x) = 2^n exp(r), exp(r) by its Taylor polynomial on |r| <= ln 2 / 2.
 * x must be at most 88; below -87 the result is exp(-87), nearly 0. NaN stays NaN. */
static inline float fast_exp(float x) {
    x = x < -87.f ? -87.f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = __builtin_fmaf(n, -0.693145752f, x); /* ln 2 in two parts: n times the first, */
    r = __builtin_fmaf(n, -1.42860677e-6f, r);     /* which has few bits, is exact */
    float p = 1.f / 5040;
    p = __builtin_fmaf(p, r, 1.f / 720);
    p = __builtin_fmaf(p, r, 1.f / 120);
    p = __builtin_fmaf(p, r, 1.f / 24);
    p = __builtin_fmaf(p, r, 1.f / 6);
    p = __builtin_fmaf(p, r, 0.5f);
    p = __builtin_fmaf(p, r, 1.f);
    p = __builtin_fmaf(p, r, 1.f);
    uint32_t bits;
    memcpy(&bits, &p, 4);
    bits += (uint32_t)(int32_t)n << 23; /* add n to the exponent of p */
    memcpy(&p, &bits, 4);
    return p;
}

/* x / (1 + exp(-x)): 0 below -88, where it is under 1e-36; NaN at -infinity, as in torch. */
static inline float silu(float x) {
    float result = x / (1.f + fast_exp(x < -88.f ? 88.f : -x));
    return x < -88.f ? x * 0.f : result;
}
