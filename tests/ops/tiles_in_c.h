/* AMX's tile instructions in plain C, so that the code which uses them runs on other processors.
 *
 * Given to the compiler with -include: afterwards a source takes this processor for one with tiles.
 * Only what it uses is there: eight tiles of at most 16 rows of 64 bytes, and the products of pairs of
 * bf16, and of signed by signed or unsigned bytes. What real tiles refuse, a tile without a shape or
 * with another one, fills sums with NaN or 2^30 here.
 */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    uint8_t palette, start_row, unused[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} tile_shapes;

static _Thread_local tile_shapes shaped_tiles;
static _Thread_local uint32_t tile_words[8][16][16];

static void shape_in_c(const void *shapes) { memcpy(&shaped_tiles, shapes, sizeof shaped_tiles); }

static void release_in_c(void) { memset(&shaped_tiles, 0, sizeof shaped_tiles); }

/* Loading sets the rows and columns that a tile does not have to 0. */
static void load_in_c(int tile, const void *from, int64_t stride) {
    memset(tile_words[tile], 0, sizeof tile_words[tile]);
    for (int i = 0; i < shaped_tiles.rows[tile]; i++)
        memcpy(tile_words[tile][i], (const char *)from + i * stride,
               shaped_tiles.bytes_per_row[tile]);
}

static void store_in_c(int tile, void *to, int64_t stride) {
    for (int i = 0; i < shaped_tiles.rows[tile]; i++)
        memcpy((char *)to + i * stride, tile_words[tile][i], shaped_tiles.bytes_per_row[tile]);
}

static float half_in_c(uint32_t word, int upper) {
    uint32_t bits = upper ? word & 0xffff0000 : word << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static void multiply_in_c(int c, int a, int b) {
    float sums[16];
    for (int m = 0; m < shaped_tiles.rows[c]; m++) {
        memcpy(sums, tile_words[c][m], sizeof sums);
        for (int k = 0; k < shaped_tiles.rows[b]; k++)
            for (int n = 0; n < 16; n++)
                for (int e = 0; e < 2; e++)
                    sums[n] += half_in_c(tile_words[a][m][k], e) *
                               half_in_c(tile_words[b][k][n], e);
        for (int n = 0; shaped_tiles.palette != 1 && n < 16; n++) sums[n] = NAN;
        memcpy(tile_words[c][m], sums, sizeof sums);
    }
}

static void multiply_bytes_in_c(int c, int a, int b, int is_signed) {
    int fits = shaped_tiles.palette == 1 &&
               shaped_tiles.bytes_per_row[a] == 4 * shaped_tiles.rows[b];
    for (int m = 0; m < shaped_tiles.rows[c]; m++)
        for (int n = 0; n < 16; n++) {
            int32_t sum = (int32_t)tile_words[c][m][n];
            for (int k = 0; k < shaped_tiles.rows[b]; k++)
                for (int e = 0; e < 32; e += 8) {
                    uint32_t code = tile_words[b][k][n] >> e;
                    sum += (int8_t)(tile_words[a][m][k] >> e) *
                           (is_signed ? (int8_t)code : (uint8_t)code);
                }
            tile_words[c][m][n] = (uint32_t)(fits ? sum : 1 << 30);
        }
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig shape_in_c
#define _tile_release release_in_c
#define _tile_zero(tile) memset(tile_words[tile], 0, sizeof tile_words[tile])
#define _tile_loadd load_in_c
#define _tile_stored store_in_c
#define _tile_dpbf16ps multiply_in_c
#define _tile_dpbssd(c, a, b) multiply_bytes_in_c(c, a, b, 1)
#define _tile_dpbsud(c, a, b) multiply_bytes_in_c(c, a, b, 0)
#define syscall(...) 0 /* Linux lends them */
#undef __AMX_BF16__
#define __AMX_BF16__ 1
