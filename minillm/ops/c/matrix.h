/* A weight: elements in panels (linear.c), or codes with scales (quantized.c, float8.c). */
#pragma once
#include "panels.h"

enum { EXACT = 0, ZEROS = 1, MINIMA = 2 }; /* kinds of offsets */

/* Python fills it in, with the same order of fields (`minillm/ops/cpu_quantized.py`). */
typedef struct matrix {
    const void *panels;    /* elements, or codes */
    const void *scales;    /* [panels, groups, 32]; NULL: `panels` are elements */
    const void *offsets;   /* NULL, zero points int8, or minima like scales */
    const uint8_t *numbers; /* [16] that 4-bit codes stand for, 128 added (NF4, FP4); NULL */
    const int32_t *order;  /* [in] the input that each column multiplies; NULL: its own */
    int64_t bits, group;   /* of a code: 4 or 8; inputs that share a scale */
    int64_t scale_kind;    /* 0: float32, 1: bf16, 2: float16 */
    int64_t offset_kind;   /* EXACT, ZEROS or MINIMA */
    float unit;            /* of these numbers; otherwise 1 */
    int64_t float8;        /* codes of 8 bits are e4m3 numbers (float8.c) */
    int64_t twice;         /* x is rounded again: x ~ t q + t' q', about 16 bits */
    int64_t outputs;       /* of this matrix, if it has a `next` */
    const struct matrix *next; /* of the outputs after these, in another format; NULL: none */
} matrix;

/* y = x W^T + b, or with `gated` silu(gate) * up, as `panel_product` for both kinds. A matrix with a
 * `next` is not gated. Returns 1 if memory is exhausted. */
int64_t product_of(const element *x, const matrix *, const element *bias, element *y, int64_t n,
                   int64_t in, int64_t out, int64_t gated);

/* Rows of x, rounded to 8 bits by groups of ROUNDED inputs, x ~ t q: q [n, in], t [n, in / ROUNDED];
 * t q added up over the weight's groups [n, in / group], and q over 16 or ROUNDED inputs. */
#define ROUNDED 32
typedef struct {
    int8_t *q;
    float *t, *totals;
    int32_t *sums;
} rounded_rows;

/* A product that is a part of a job with others (experts.c). `plain.panels` is not used. */
typedef struct {
    piece_of_product plain;
    matrix w;
    rounded_rows rounded; /* only for a quantised weight */
} piece_of_matrix;

/* Outputs of panels `begin` to `end` - 1, by the calling thread. */
void matrix_piece(const piece_of_matrix *, int64_t begin, int64_t end);

/* Nanoseconds of a product on one thread, about. */
int64_t matrix_time(const piece_of_matrix *);

/* Outputs from `first` on, a multiple of 32, of a weight with `in` inputs. */
matrix outputs_from(const matrix *, int64_t first, int64_t in);

/* Bytes of `n` rounded rows with any group size, and where each part of them lies. */
int64_t rounded_bytes(int64_t n, int64_t in);
rounded_rows rounded_at(char *memory, int64_t n, int64_t in, int64_t group);

/* Those from `first` on. */
rounded_rows rounded_from(rounded_rows, int64_t first, int64_t in, int64_t group);

/* Round all rows of x [n, in] for products with a weight, if it is quantised, as a job. */
void round_for(const matrix *, const element *x, int64_t n, int64_t in, rounded_rows);

/* x [rows, in], up to 32 rows, by a panel of e4m3 codes -> sums [rows, 32]. */
void float8_panel(const matrix *, const element *x, int64_t in, int64_t panel, int64_t rows,
                  float *sums);

/* Instructions of products, as in linear.c; 4 is AMX. */
int64_t panel_unit(void);
