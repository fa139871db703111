/* Vectors and tiles for the products of linear.c and prefill.c, on six kinds of CPU.
 *
 *   AMX                    tiles of 16 rows by 16 pairs of bf16
 *   AVX-512 with bf16      vectors of 16 pairs of bf16
 *   AVX-512                vectors of 16 float32
 *   Arm with BF16          vectors of 4 pairs of bf16
 *   Arm                    vectors of 4 float32
 *   any other              vectors of 8 float32, which the compiler may split
 *
 * A word is the input of one step of the inner product: a float32, or, on CPUs with bf16
 * instructions, two adjacent bf16 along the inner dimension.
 */
#pragma once
#include "common.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define WIDE
#define LANES 16
#define BLOCK 8   /* rows of a product whose sums are kept in registers, */
#define VECTORS 2 /* and vectors of outputs of each row */
#elif defined(__aarch64__)
#include "neon.h"
#define NEON
#define LANES 4
#define BLOCK 6 /* 24 of 32 registers are sums: 4 additions take 4 cycles each at the same time */
#define VECTORS 4
#else
#if defined(__FMA__)
#include <immintrin.h>
#endif
#define LANES 8
#define BLOCK 6
#define VECTORS 2
#endif
#if defined(ELEMENT_BF16) && \
    ((defined(WIDE) && defined(__AVX512BF16__)) || (defined(NEON) && defined(ARM_BF16)))
#define PAIR 2 /* elements per word */
#else
#define PAIR 1
#endif
#if PAIR == 2 && defined(__AMX_BF16__) && defined(__linux__)
#define AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef uint32_t word;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

static inline vec load_vec(const void *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store_vec(void *p, vec v) { memcpy(p, &v, sizeof v); }

/* Select lanes of a (0 to LANES - 1) and b (LANES to 2 LANES - 1). */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

/* The maximum of each lane; b if one is NaN. */
static inline vec larger(vec a, vec b) {
#if defined(WIDE)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    words first = (words)(a > b);
    return (vec)(((words)a & first) | ((words)b & ~first));
#endif
}

/* AVX2 has 16 registers, and GCC copies sums between them, or to the stack; on Arm, too. The first
 * keeps a value in its register, the second makes the compiler read memory again rather than keep a
 * copy. */
#if defined(__AVX2__) && !defined(WIDE)
#define KEEP_IN_REGISTER(v) __asm__ volatile("" : "+x"(v))
#define FORGET_MEMORY __asm__ volatile("" ::: "memory")
#elif defined(NEON)
#define KEEP_IN_REGISTER(v) __asm__ volatile("" : "+w"(v))
#define FORGET_MEMORY
#else
#define KEEP_IN_REGISTER(v)
#define FORGET_MEMORY
#endif

/* A word in all lanes. */
static inline vec all_lanes(word a) { return (vec)((words){0} + a); }

/* sum + a b, for vectors of words. */
static inline vec multiply_add(vec sum, vec a, vec b) {
#if PAIR == 2 && defined(NEON)
    return (vec)dot_pairs((float32x4_t)sum, (uint32x4_t)a, (uint32x4_t)b);
#elif PAIR == 2
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    return sum + a * b;
#endif
}

/* sum + a b, rounded once. The compiler may round a b first in one place and not in another, which
 * would make the bits of a row depend on the number of rows. */
static inline vec fused_add(vec sum, vec a, vec b) {
#if defined(WIDE)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__) && LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(NEON)
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

#if defined(AMX)
/* Request the tile registers from Linux (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
static inline int has_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

/* The compiler does not know which memory tile instructions read: finish all stores first. */
#define ALL_STORED __asm__ volatile("" ::: "memory")

/* Tiles 0 to 3 are sums; 4 and 5 have `first` and `second` rows of A, of up to 64 bytes; 6 and 7 are
 * halves of B. */
static inline void shape_tiles_of(int64_t bytes, int64_t first, int64_t second) {
    struct {
        uint8_t palette, start_row, unused[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    uint8_t one = (uint8_t)first, two = (uint8_t)second;
    uint8_t inner = (uint8_t)(bytes / 4), counts[8] = {one, one, two, two, one, two, inner, inner};
    memcpy(tiles.rows, counts, 8);
    for (int i = 0; i < 8; i++) tiles.bytes_per_row[i] = i / 2 == 2 ? (uint16_t)bytes : 64;
    __asm__ volatile("" ::"r"(&tiles) : "memory"); /* or GCC removes these stores */
    _tile_loadconfig(&tiles);
}

static inline void shape_tiles(int64_t first, int64_t second) { shape_tiles_of(64, first, second); }
#endif

/* Whether there are tiles. Each thread calls `take_tiles` before products and `give_tiles_back`
 * after them. */
static inline int find_tiles(void) {
#if defined(AMX)
    return has_tiles();
#else
    return 0;
#endif
}

static inline void take_tiles(int amx, int64_t first, int64_t second) {
#if defined(AMX)
    if (amx) shape_tiles(first, second);
#endif
    (void)amx, (void)first, (void)second;
}

static inline void give_tiles_back(int amx) {
#if defined(AMX)
    if (amx) _tile_release();
#endif
    (void)amx;
}
