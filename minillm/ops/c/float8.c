/* Sums of products with weights in 8-bit floating point (e4m3): a sign, 4 bits of exponent with bias
 * 7, 3 bits of mantissa; exponent 0 has subnormal numbers, and there is no infinity.
 *
 * Every such number is a bf16 and a float32, so a piece of a panel is decoded exactly by integer
 * operations, into the words that the products of tiles.h read. It stays in the first cache for all
 * rows of x, which are not rounded. A scale belongs to a group of inputs: it multiplies the sum.
 *
 *   panels [out / 32, in / 4, 32, 4], the four inputs of an output in the order 0, 2, 1, 3: so the
 *   low bytes of the two halves of a word are inputs 0 and 1, and the high bytes are 2 and 3
 *
 * NaN has no code here: Python makes the scale of its group NaN.
 */
#include "matrix.h"
#include "scales.h"
#include "tiles.h"

#define SIDE 64    /* inputs that are decoded at a time: with x and sums half of L1 */
#define ROWS 32    /* rows of x that are processed together, as in quantized.c */
#define AHEAD 4096 /* prefetch distance in bytes */
#define EACH (PANEL / LANES)

typedef uint16_t shorts __attribute__((vector_size(4 * LANES)));

static inline words load_words(const void *p) {
    words v;
    memcpy(&v, p, sizeof v);
    return v;
}

#if PAIR == 2
/* Magnitudes m (0 to 127) -> bf16. From exponent 1 on, the exponent's bias is changed from 7 to 127.
 * Below, bits are a concave function of m that consists of lines, so they are the least of these. */
static inline shorts magnitudes(shorts m) {
    shorts from_one = (m << 4) + 0x3c00;
#if defined(WIDE)
    const __m512i below = _mm512_zextsi128_si512(_mm_setr_epi16(
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __mmask32 subnormal = _mm512_cmplt_epu16_mask((__m512i)m, _mm512_set1_epi16(8));
    return (shorts)_mm512_mask_permutexvar_epi16((__m512i)from_one, subnormal, (__m512i)m, below);
#else
    uint16x8_t least = vminq_u16((uint16x8_t)from_one, (uint16x8_t)((m << 5) + 0x3b80));
    least = vminq_u16(least, (uint16x8_t)((m << 6) + 0x3b00));
    least = vminq_u16(least, (uint16x8_t)((m << 7) + 0x3a80));
    return (shorts)least & (shorts)(m != 0);
#endif
}

/* Four inputs of LANES outputs -> words of inputs 0 and 1, and of 2 and 3. */
static inline void decode_four(const char *codes, vec *to) {
    shorts u = (shorts)load_words(codes);
    to[0] = (vec)(magnitudes(u & 0x7f) | (u << 8 & 0x8000));
    to[1] = (vec)(magnitudes(u >> 8 & 0x7f) | (u & 0x8000));
}
#else
/* Four inputs of LANES outputs -> four vectors of float32. Sign, exponent and mantissa are moved to
 * their places in a bf16 of exponent bias 127, and 2^120 makes up for the bias. */
static inline void decode_four(const char *codes, vec *to) {
    typedef int16_t halves __attribute__((vector_size(4 * LANES)));
    halves u = (halves)load_words(codes);
    words low = (words)(u << 8 >> 4 & (int16_t)0x87f0), high = (words)(u >> 4 & (int16_t)0x87f0);
    const float unit = 0x1p120f;
    to[0] = (vec)(low << 16) * unit;
    to[1] = (vec)(low & 0xffff0000) * unit;
    to[2] = (vec)(high << 16) * unit;
    to[3] = (vec)(high & 0xffff0000) * unit;
}
#endif

#define FOUR (4 / PAIR) /* words of four inputs */

/* `length` inputs of a panel -> words [length / PAIR, 32]. */
static void decode(const char *codes, int64_t length, word *to) {
    for (int64_t k = 0; k < length; k += 4, codes += 4 * PANEL, to += FOUR * PANEL) {
        __builtin_prefetch(codes + AHEAD), __builtin_prefetch(codes + AHEAD + 64);
        for (int c = 0; c < EACH; c++) {
            vec four[FOUR];
            decode_four(codes + c * 4 * LANES, four);
            for (int i = 0; i < FOUR; i++) store_vec(to + i * PANEL + c * LANES, four[i]);
        }
    }
}

#if PAIR == 1
/* One row: sums [32] of the products with `length` inputs. Nothing is stored in between. */
static void multiply_one(float *sums, const word *x, const char *codes, int64_t length, int add) {
    vec sum[EACH] = {0};
    if (add)
        for (int c = 0; c < EACH; c++) sum[c] = load_vec(sums + c * LANES);
    for (int64_t k = 0; k < length; k += 4, codes += 4 * PANEL) {
        __builtin_prefetch(codes + AHEAD), __builtin_prefetch(codes + AHEAD + 64);
        for (int c = 0; c < EACH; c++) {
            vec four[FOUR];
            decode_four(codes + c * 4 * LANES, four);
            for (int i = 0; i < 4; i++) {
                sum[c] = multiply_add(sum[c], all_lanes(x[k + i]), four[i]);
                KEEP_IN_REGISTER(sum[c]);
            }
        }
    }
    for (int c = 0; c < EACH; c++) store_vec(sums + c * LANES, sum[c]);
}
#endif

/* `rows` rows of x by decoded words. */
static void multiply_rows(float *sums, const word *x, int64_t stride, const word *b, int64_t rows,
                          int64_t k, int add) {
    for (int64_t now; rows > 0; rows -= now, sums += now * PANEL, x += now * stride) {
        now = rows < BLOCK ? rows : BLOCK == 6 && rows > 6 && rows < 9 ? 4 : BLOCK; /* even parts */
        switch (now) {
            case 1: multiply_block(1, sums, x, stride, b, k, add); break;
            case 2: multiply_block(2, sums, x, stride, b, k, add); break;
            case 3: multiply_block(3, sums, x, stride, b, k, add); break;
            case 4: multiply_block(4, sums, x, stride, b, k, add); break;
            case 5: multiply_block(5, sums, x, stride, b, k, add); break;
#if BLOCK > 6
            case 6: multiply_block(6, sums, x, stride, b, k, add); break;
            case 7: multiply_block(7, sums, x, stride, b, k, add); break;
#endif
            default: multiply_block(BLOCK, sums, x, stride, b, k, add);
        }
    }
}

/* `length` inputs of `rows` rows of x, as words. The copy has zeros in missing rows, for tiles. */
static inline const word *words_of(const element *x, int64_t in, int64_t rows, int64_t length,
                                   int amx, word *copy, int64_t *stride) {
#if PAIR == 1 && defined(ELEMENT_BF16)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < length; k++) {
            float f = load(x[r * in + k]);
            memcpy(copy + r * SIDE + k, &f, sizeof f);
        }
    *stride = SIDE;
    (void)amx;
    return copy;
#else
    *stride = in / PAIR;
    if (!amx) return (const word *)x;
    *stride = SIDE / PAIR;
    memset(copy, 0, ROWS * SIDE / PAIR * sizeof(word));
    for (int64_t r = 0; r < rows; r++)
        memcpy(copy + r * *stride, x + r * in, (size_t)length * sizeof(element));
    return copy;
#endif
}

/* sums [rows, 32] (+)= the products of `length` inputs of x with codes. */
static void add_piece(float *sums, const element *x, int64_t in, int64_t rows, const char *codes,
                      int64_t length, int amx, int add) {
    word copy[ROWS * SIDE / PAIR] __attribute__((aligned(64)));
    word b[SIDE / PAIR * PANEL] __attribute__((aligned(64)));
    int64_t stride;
    const word *a = words_of(x, in, rows, length, amx, copy, &stride);
#if PAIR == 1
    if (rows == 1) {
        multiply_one(sums, a, codes, length, add);
        return;
    }
#endif
    decode(codes, length, b);
#if defined(AMX)
    if (amx) {
        multiply_tiles(sums, a, stride, b, ROWS, length / PAIR, add);
        return;
    }
#endif
    multiply_rows(sums, a, stride, b, rows, length / PAIR, add);
}

/* x [rows, in], up to 32 rows, by a panel -> sums [rows, 32]. */
void float8_panel(const matrix *w, const element *x, int64_t in, int64_t panel, int64_t rows,
                  float *sums) {
    const char *codes = (const char *)w->panels + panel * in * PANEL;
    int64_t groups = in / w->group, amx = panel_unit() == 4;
    float of_group[ROWS * PANEL] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    take_tiles((int)amx, 16, 16);
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t part = 0, k = g * w->group; part < w->group; part += SIDE, k += SIDE) {
            int64_t length = w->group - part < SIDE ? w->group - part : SIDE;
            add_piece(of_group, x + k, in, rows, codes + k * PANEL, length, (int)amx, part > 0);
        }
        for (int64_t j = 0; j < PANEL; j += LANES) {
            vec s = scales_at(w->scales, w->scale_kind, (panel * groups + g) * PANEL + j);
            for (int64_t r = 0; r < rows; r++) {
                float *to = sums + r * PANEL + j;
                store_vec(to, load_vec(to) + load_vec(of_group + r * PANEL + j) * s);
            }
        }
    }
    give_tiles_back((int)amx);
}
