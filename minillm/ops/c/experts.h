/* Mixture-of-experts layers: weights and shape. Python fills both in, with the same order of fields
 * (`minillm/ops/cpu_experts.py`). */
#pragma once
#include "matrix.h"

typedef struct {
    const element *router;                           /* panels [experts, hidden] */
    const float *bias;                               /* [experts], of the choice only; NULL */
    const matrix *gate_up;                           /* [experts x 2 size, hidden] */
    const matrix *down;                              /* [experts x hidden, size] */
    const matrix *shared_gate_up;                    /* shared experts as one MLP; NULL */
    const element *shared_gate_up_bias;              /* NULL */
    const matrix *shared_down;
    const element *shared_down_bias;
} expert_weights;

typedef struct {
    int64_t hidden, experts, chosen, size, shared_size;
    int64_t sigmoid;            /* scores: 1 a sigmoid of each logit, 0 a softmax of all */
    int64_t normalize;          /* the weights of a token's experts sum to one */
    int64_t groups, top_groups; /* a token's experts are in its best groups */
    int64_t best_two;           /* a group's score: 1 the sum of its two best, 0 its best */
    float factor;               /* of all weights */
} expert_shape;

/* Choose the experts of `n` tokens by their logits [n, experts], which are overwritten. Ids
 * [n, chosen] are ascending; `weights` are in the same order. */
void choose_experts(const expert_shape *, float *logits, const float *bias, int64_t *ids,
                    float *weights, int64_t n);

/* Sort one token's experts by id, with their weights. */
void sort_experts(int64_t *ids, float *weights, int64_t count);

/* Bytes of memory for `n` tokens. */
int64_t expert_memory(const expert_shape *, int64_t n);

/* out [n, hidden] = the weighted experts of x [n, hidden], and the shared experts. */
void moe_half(const expert_weights *, const expert_shape *, const element *x, element *out,
              int64_t n, char *memory);
