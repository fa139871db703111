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

/* All outputs, as a job. */
void panel_job(const piece_of_product *);

/* Nanoseconds of a product on one thread, about. */
int64_t product_time(const piece_of_product *);

void panel_product(const element *, const element *, const element *, element *, int64_t, int64_t,
                   int64_t, int64_t);
void panel_sums(const element *, const element *, float *, int64_t, int64_t, int64_t, int64_t);

/* The biases of a panel's outputs, or 0. This is separate from the addition, where GCC would read
 * NULL under an empty mask: legal, but hundreds of cycles. */
static inline void read_bias(const element *bias, int64_t columns, float *floats) {
    memset(floats, 0, PANEL * sizeof(float));
    if (bias)
        for (int64_t j = 0; j < columns; j++) floats[j] = load(bias[j]);
}

/* sums [rows, 32] + bias -> `columns` of y, whose rows are `out` apart. */
static inline void write_rows(const float *sums, const float *bias, element *y, int64_t rows,
                              int64_t columns, int64_t out) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < columns; j++) y[r * out + j] = store(sums[r * PANEL + j] + bias[j]);
}

/* silu(gate) * up for one panel of each, both rounded to the element type first, as in silu_mul of
 * rows.c. */
static inline void write_gated(const float *gate, const float *up, const float *gate_bias,
                               const float *up_bias, element *y, int64_t rows, int64_t out) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < PANEL; j++) {
            float g = rounded(gate[r * PANEL + j] + gate_bias[j]);
            float u = rounded(up[r * PANEL + j] + up_bias[j]);
            y[r * out + j] = store(rounded(silu(g)) * u);
        }
}

/* Number of valid outputs of a panel. */
static inline int64_t columns_of(int64_t first, int64_t out, int64_t gated) {
    return gated || out - first > PANEL ? PANEL : out - first;
}
