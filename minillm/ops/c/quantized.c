/* y = x W^T + b with a quantised weight and activations rounded to 8 bits (W8A8, W4A8).
 *
 * A decode step is bound by reading weights, and 4-bit codes are a quarter of the bytes of bf16.
 * Converting every code to a float would cost more than it saves. So a row of x is rounded to int8
 * once, x ~ t q, and the processor multiplies small integers: one instruction adds four products of
 * an unsigned code u (8 bits, or 4) and a signed q to an int32. Of a group of inputs with scale s:
 *
 *   sum of w x  ~  t s (sum of u q  -  z sum of q)       zero point z, an exact integer
 *   sum of w x  ~  t (s sum of u q  +  m sum of q)       minimum m (GGUF's _1 and K formats)
 *
 * Signed 8-bit codes are stored as u = code + 128, with 128 added to z.
 *
 *   8 bits  panels [out / 32, in / 4, 32, 4]
 *   4 bits  panels [out / 32, in / 32, 4, 32, 4]: byte (j, o, e) of a block has input 4 j + e in its
 *           low half, and input 16 + 4 j + e in its high half
 *
 * Integer sums are exact, and groups are added in order. So an output depends only on its rows of x
 * and W, not on the number of rows or threads.
 */
#include <stdlib.h>
#include "matrix.h"
#include "threads.h"
#include "vectors.h"

#define LONGEST 1024 /* inputs of a group that are added before they become float */
#define FEW 16       /* up to so many rows, a task is one or more panels */
#define ROWS 32      /* rows of x that are processed together; a multiple of BLOCK_ROWS */
#define AHEAD 4096   /* prefetch distance in bytes */
#if defined(WIDE)
#define BLOCK_ROWS 8
#define STEPS 2 /* vectors of outputs at a time */
#else
#define BLOCK_ROWS 4
#define STEPS 2
#endif

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* sum + u q, four products per lane: u unsigned, q signed. Without an instruction that cannot
 * overflow, 8-bit codes are multiplied as |code| times q with the code's sign, at most 128 x 127: a
 * sum of two fits in 16 bits. */
#if defined(WIDE) && defined(__AVX512VNNI__)
#define SIGNED 0 /* codes are multiplied as they are stored, */
static inline ints dot4(ints sum, ints u, ints q) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)q);
}
static inline ints dot_half(ints sum, ints u, ints q) { return dot4(sum, u, q); }
#elif defined(WIDE)
#define SIGNED 1 /* or minus 128 */
static inline ints add_pairs(ints sum, __m512i pairs) {
    return (ints)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
static inline ints dot_half(ints sum, ints u, ints q) { /* u below 16 */
    return add_pairs(sum, _mm512_maddubs_epi16((__m512i)u, (__m512i)q));
}
static inline ints dot4(ints sum, ints u, ints q) {
    __m512i code = _mm512_xor_si512((__m512i)u, _mm512_set1_epi8(-128)), x = (__m512i)q;
    __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(code), _mm512_setzero_si512(), x);
    return add_pairs(sum, _mm512_maddubs_epi16(_mm512_abs_epi8(code), turned));
}
#elif defined(__AVX2__)
#include <immintrin.h>
#define SIGNED 1
static inline ints add_pairs(ints sum, __m256i pairs) {
    return (ints)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline ints dot_half(ints sum, ints u, ints q) {
    return add_pairs(sum, _mm256_maddubs_epi16((__m256i)u, (__m256i)q));
}
static inline ints dot4(ints sum, ints u, ints q) {
    __m256i code = _mm256_xor_si256((__m256i)u, _mm256_set1_epi8(-128)), x = (__m256i)q;
    return add_pairs(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(x, code)));
}
#else
#define SIGNED 0
static inline ints dot4(ints sum, ints u, ints q) {
    for (int e = 0; e < 4; e++) sum += (u >> (8 * e) & 255) * (q << (24 - 8 * e) >> 24);
    return sum;
}
static inline ints dot_half(ints sum, ints u, ints q) { return dot4(sum, u, q); }
#endif

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

#if !defined(WIDE) && !(defined(__AVX2__) && defined(__F16C__))
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
#endif

/* LANES scales at index `at`. */
static inline vec scales_at(const void *scales, int64_t kind, int64_t at) {
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

/* A product of rows of x, rounded: q [n, in] with factors t [n] and sums of q [n, in / group]. */
typedef struct {
    const matrix *w;
    const element *x, *bias;
    element *y;
    int8_t *q;
    float *t;
    int32_t *sums;
    int64_t n, in, out, gated, chunk;
} product;

/* Round rows `begin` to `end` - 1 of x. */
static void round_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const product *p = context;
    int64_t in = p->in, group = p->w->group, groups = in / group;
    for (int64_t r = begin; r < end; r++) {
        const element *x = p->x + r * in;
        int8_t *q = p->q + r * in;
        float most = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < in; i++) {
            float f = fabsf(load(x[i]));
            most = f > most ? f : most;
        }
        float inverse = most > 0 ? 127.f / most : 0;
        p->t[r] = most / 127.f;
        INDEPENDENT
        for (int64_t i = 0; i < in; i++) q[i] = (int8_t)__builtin_rintf(load(x[i]) * inverse);
        for (int64_t g = 0; g < groups; g++) {
            int32_t sum = 0;
            for (int64_t i = 0; i < group; i++) sum += q[g * group + i];
            p->sums[r * groups + g] = sum;
        }
    }
    (void)thread;
}

/* acc [rows][vecs] += codes by q, of `length` inputs from a panel. */
static inline __attribute__((always_inline)) void add_codes(const int rows, const int half,
                                                            const char *codes, const int8_t *q,
                                                            int64_t length, int64_t in,
                                                            ints acc[BLOCK_ROWS][STEPS]) {
    const ints low = (ints){0} + 0x0f0f0f0f;
    const int64_t step = half ? 32 : 4; /* inputs of PANEL x 16 or PANEL x 4 bytes */
    for (int64_t k = 0; k < length; k += step) {
        for (int j = 0; j < (half ? 4 : 1); j++, codes += 4 * PANEL) {
            for (int line = 0; line < STEPS * 4 * LANES; line += 64)
                __builtin_prefetch(codes + AHEAD + line);
            ints u[STEPS], v[STEPS];
            for (int s = 0; s < STEPS; s++) {
                u[s] = load_ints(codes + s * 4 * LANES);
                if (!half) continue;
                v[s] = (u[s] >> 4) & low;
                u[s] &= low;
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int8_t *at = q + r * in + k + 4 * j;
                ints first = four(at);
                for (int s = 0; s < STEPS; s++)
                    acc[r][s] = half ? dot_half(acc[r][s], u[s], first) : dot4(acc[r][s], u[s], first);
                if (!half) continue;
                ints second = four(at + 16);
                for (int s = 0; s < STEPS; s++) acc[r][s] = dot_half(acc[r][s], v[s], second);
            }
        }
    }
}

/* sums [rows, 32] += the products of one group (or LONGEST inputs of it) with a panel, from input
 * `k` on. `first`: the offsets are added here. */
static inline __attribute__((always_inline)) void add_group(const product *p, const int rows,
                                                            const int half, int64_t panel,
                                                            int64_t row, int64_t k, int64_t length,
                                                            int first, float *sums) {
    const matrix *w = p->w;
    int64_t groups = p->in / w->group, g = k / w->group, at = (panel * groups + g) * PANEL;
    int64_t base = panel * p->in * PANEL + k * PANEL; /* codes before these */
    const char *codes = (const char *)w->panels + (half ? base / 2 : base);
    /* What codes are stored with: 128 or 8, and their zero points. */
    const int constant = half ? (w->offset_kind == EXACT ? 8 : 0) : SIGNED ? 0 : 128;
    for (int o = 0; o < PANEL; o += STEPS * LANES) {
        ints acc[BLOCK_ROWS][STEPS];
        for (int r = 0; r < rows; r++) {
            int32_t start = first ? -constant * p->sums[(row + r) * groups + g] : 0;
            for (int s = 0; s < STEPS; s++) acc[r][s] = (ints){0} + start;
        }
        add_codes(rows, half, codes + 4 * o, p->q + row * p->in + k, length, p->in, acc);
        for (int s = 0; s < STEPS; s++) {
            int64_t lanes = o + s * LANES;
            vec scale = scales_at(w->scales, w->scale_kind, at + lanes), offset = {0};
            if (w->offset_kind == ZEROS)
                for (int i = 0; i < LANES; i++)
                    offset[i] = -(float)((const int8_t *)w->offsets)[at + lanes + i];
            if (w->offset_kind == ZEROS) offset *= scale;
            if (w->offset_kind == MINIMA) offset = scales_at(w->offsets, w->scale_kind, at + lanes);
            for (int r = 0; r < rows; r++) {
                float *to = sums + r * PANEL + lanes;
                vec found = load_vec(to) + __builtin_convertvector(acc[r][s], vec) * scale;
                if (first && w->offset_kind != EXACT)
                    found += offset * (float)p->sums[(row + r) * groups + g];
                store_vec(to, found);
            }
        }
    }
}

/* The same for any number of rows up to ROWS. */
static inline __attribute__((always_inline)) void add_rows(const product *p, const int half,
                                                           int64_t panel, int64_t row, int64_t rows,
                                                           int64_t k, int64_t length, int first,
                                                           float *sums) {
    for (; rows > 0; rows -= BLOCK_ROWS, row += BLOCK_ROWS, sums += BLOCK_ROWS * PANEL) {
        switch (rows < BLOCK_ROWS ? rows : BLOCK_ROWS) {
            case 1: add_group(p, 1, half, panel, row, k, length, first, sums); break;
            case 2: add_group(p, 2, half, panel, row, k, length, first, sums); break;
            case 3: add_group(p, 3, half, panel, row, k, length, first, sums); break;
#if BLOCK_ROWS > 4
            case 4: add_group(p, 4, half, panel, row, k, length, first, sums); break;
            case 5: add_group(p, 5, half, panel, row, k, length, first, sums); break;
            case 6: add_group(p, 6, half, panel, row, k, length, first, sums); break;
            case 7: add_group(p, 7, half, panel, row, k, length, first, sums); break;
#endif
            default: add_group(p, BLOCK_ROWS, half, panel, row, k, length, first, sums);
        }
    }
}

/* Rows `row` to `row + rows` - 1 of x by a panel, times t -> sums [rows, 32]. */
static void sum_panel(const product *p, int64_t panel, int64_t row, int64_t rows, float *sums) {
    int64_t group = p->w->group;
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    for (int64_t k = 0; k < p->in; k += group)
        for (int64_t part = 0; part < group; part += LONGEST) {
            int64_t length = group - part < LONGEST ? group - part : LONGEST;
            if (p->w->bits == 4) add_rows(p, 1, panel, row, rows, k + part, length, !part, sums);
            else add_rows(p, 0, panel, row, rows, k + part, length, !part, sums);
        }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < PANEL; j++) sums[r * PANEL + j] *= p->t[row + r];
}

/* Tasks `begin` to `end` - 1: a panel (if `gated`, of gate and up) and a chunk of rows. */
static void multiply_some(void *context, int64_t begin, int64_t end, int64_t thread) {
    const product *p = context;
    int64_t num_panels = (p->out + PANEL - 1) / PANEL, out = p->out;
    float sums[2][ROWS * PANEL] __attribute__((aligned(64))), biases[2][PANEL];
    for (int64_t task = begin; task < end; task++) {
        int64_t panel = task % num_panels, first = panel * PANEL, row = task / num_panels * p->chunk;
        int64_t last = row + p->chunk < p->n ? row + p->chunk : p->n;
        int64_t columns = p->gated || out - first > PANEL ? PANEL : out - first;
        read_bias(p->bias ? p->bias + first : 0, columns, biases[0]);
        if (p->gated) read_bias(p->bias ? p->bias + out + first : 0, PANEL, biases[1]);
        for (; row < last; row += ROWS) {
            int64_t rows = last - row < ROWS ? last - row : ROWS;
            element *y = p->y + row * out + first;
            sum_panel(p, panel, row, rows, sums[0]);
            if (p->gated) {
                sum_panel(p, panel + num_panels, row, rows, sums[1]);
                write_gated(sums[0], sums[1], biases[0], biases[1], y, rows, out);
            } else {
                write_rows(sums[0], biases[0], y, rows, columns, out);
            }
        }
    }
    (void)thread;
}

/* Memory for rounded rows, which belongs to the calling thread and is kept between calls. */
static char *scratch(size_t size) {
    static _Thread_local char *memory;
    static _Thread_local size_t held;
    if (size > held) {
        free(memory);
        memory = malloc(size);
        held = memory ? size : 0;
    }
    return memory;
}

int64_t quantized_product(const element *x, const matrix *w, const element *bias, element *y,
                          int64_t n, int64_t in, int64_t out, int64_t gated) {
    product p = {w, x, bias, y, 0, 0, 0, n, in, out, gated, 0};
    if (n <= 0) return 0;
    size_t factors = (size_t)n * 4, sums = (size_t)(n * (in / w->group)) * 4;
    char *memory = scratch(factors + sums + (size_t)(n * in));
    if (!memory) return 1;
    p.t = (float *)memory;
    p.sums = (int32_t *)(memory + factors);
    p.q = (int8_t *)(memory + factors + sums);
    divide_job(n, n * in / 8, round_rows, &p);
    int64_t num_panels = (out + PANEL - 1) / PANEL, codes = in * out * (gated ? 2 : 1);
    int64_t time = codes * w->bits / 8 / 32 + codes * n / (SIGNED ? 128 : 256);
    p.chunk = n <= FEW ? n : (1 << 19) / in / ROWS * ROWS;
    if (p.chunk < ROWS) p.chunk = n < ROWS ? n : ROWS;
    divide_job(num_panels * ((n + p.chunk - 1) / p.chunk), time, multiply_some, &p);
    return 0;
}

int64_t product_of(const element *x, const matrix *w, const element *bias, element *y, int64_t n,
                   int64_t in, int64_t out, int64_t gated) {
    if (w->scales) return quantized_product(x, w, bias, y, n, in, out, gated);
    panel_product(x, w->panels, bias, y, n, in, out, gated);
    return 0;
}
