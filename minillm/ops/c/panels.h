/* Products with weights in panels (linear.c), for jobs that another file divides into pieces. */
#pragma once
#include "common.h"

#define PANEL 32 /* outputs of a panel */

/* y = x W^T + b, or with `gated` silu(gate) * up, as `panel_product`. Rows of x and y lie
 * `x_stride` and `y_stride` elements apart, so that a product can be a part of a wider row. */
typedef struct {
    const element *x, *panels, *bias; /* [n, in], panels [out, in] or gated [2 out, in], NULL */
    element *y;                       /* [n, out] */
    int64_t n, in, out, gated, x_stride, y_stride;
} piece_of_product;

/* Outputs of panels `begin` to `end` - 1, by the calling thread. */
void panel_piece(const piece_of_product *, int64_t begin, int64_t end);

/* Nanoseconds of a product on one thread, about. */
int64_t product_time(const piece_of_product *);

void panel_product(const element *, const element *, const element *, element *, int64_t, int64_t,
                   int64_t, int64_t);
void panel_sums(const element *, const element *, float *, int64_t, int64_t, int64_t, int64_t);
