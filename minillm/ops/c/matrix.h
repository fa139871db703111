/* A weight of one of two kinds: elements in panels (linear.c), or quantised (quantized.c). */
#pragma once
#include "panels.h"

enum { EXACT = 0, ZEROS = 1, MINIMA = 2 }; /* kinds of offsets */

/* Python fills it in, with the same order of fields (`minillm/ops/cpu_quantized.py`). */
typedef struct {
    const void *panels;    /* elements, or codes */
    const void *scales;    /* [panels, groups, 32]; NULL: `panels` are elements */
    const void *offsets;   /* NULL, zero points int8, or minima like scales */
    int64_t bits, group;   /* of a code: 4 or 8; inputs that share a scale */
    int64_t scale_kind;    /* 0: float32, 1: bf16, 2: float16 */
    int64_t offset_kind;   /* EXACT, ZEROS or MINIMA */
} matrix;

/* y = x W^T + b, or with `gated` silu(gate) * up, as `panel_product` for both kinds. Returns 1 if
 * memory is exhausted. */
int64_t product_of(const element *x, const matrix *, const element *bias, element *y, int64_t n,
                   int64_t in, int64_t out, int64_t gated);
