/* The router's choice of experts, from its logits (`reference.moe_route`).
 *
 * A token gets the `chosen` experts with the largest scores. DeepSeek-V3 adds a bias to the scores
 * for the choice, but not for the weights; DeepSeek limits the choice to the best groups of experts
 * (DeepSeek-V2, 2024, section 2.2.2).
 */
#include "experts.h"
#include "threads.h"

#define MOST_EXPERTS 4096

typedef struct {
    const expert_shape *shape;
    float *logits;
    const float *bias;
    int64_t *ids;
    float *weights;
} routing;

/* e^x for x <= 0: 0 below -87, where it is under 1e-37. */
static inline float exp_or_zero(float x) { return x < -87.f ? 0.f : fast_exp(x); }

static void softmax(float *x, int64_t n) {
    float most = x[0], sum = 0;
    for (int64_t i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < n; i++) x[i] = exp_or_zero(x[i] - most);
    for (int64_t i = 0; i < n; i++) sum += x[i];
    for (int64_t i = 0; i < n; i++) x[i] /= sum; /* a NaN makes all scores NaN, as in torch */
}

/* 1 / (1 + e^-x), with an argument of e that is at most 0. */
static void sigmoid(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float e = exp_or_zero(x[i] < 0 ? x[i] : -x[i]);
        x[i] = (x[i] < 0 ? e : 1.f) / (1.f + e);
    }
}

/* Whether a is larger; NaN is the largest number, as for torch's `topk`. */
static inline int larger(float a, float b) { return a > b || (a != a && b == b); }

/* Index of the largest value that is not taken, the first among equals; it is then taken. */
static int64_t take_largest(const float *values, char *taken, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (!taken[i] && (taken[best] || larger(values[i], values[best]))) best = i;
    taken[best] = 1;
    return best;
}

/* The score of a group of experts: its best, or the sum of its two best. */
static float group_score(const float *values, int64_t size, int64_t best_two) {
    char taken[MOST_EXPERTS] = {0};
    float score = values[take_largest(values, taken, size)];
    return best_two ? score + values[take_largest(values, taken, size)] : score;
}

/* Mark the experts of all groups but the best as taken. */
static void exclude_groups(const expert_shape *s, const float *values, char *taken) {
    float scores[MOST_EXPERTS];
    char chosen[MOST_EXPERTS] = {0};
    int64_t size = s->experts / s->groups;
    for (int64_t g = 0; g < s->groups; g++)
        scores[g] = group_score(values + g * size, size, s->best_two);
    for (int64_t i = 0; i < s->top_groups; i++) take_largest(scores, chosen, s->groups);
    for (int64_t g = 0; g < s->groups; g++) memset(taken + g * size, !chosen[g], (size_t)size);
}

/* Sort a token's experts by id, with their weights: insertion sort, because there are few. */
void sort_experts(int64_t *ids, float *weights, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        int64_t id = ids[i], j = i;
        float weight = weights[i];
        for (; j > 0 && ids[j - 1] > id; j--) ids[j] = ids[j - 1], weights[j] = weights[j - 1];
        ids[j] = id, weights[j] = weight;
    }
}

static void choose_for_token(const expert_shape *s, float *scores, const float *bias, int64_t *ids,
                             float *weights) {
    float values[MOST_EXPERTS], sum = 0;
    char taken[MOST_EXPERTS];
    memset(taken, 0, (size_t)s->experts);
    if (s->sigmoid) sigmoid(scores, s->experts);
    else softmax(scores, s->experts);
    for (int64_t e = 0; e < s->experts; e++) values[e] = bias ? scores[e] + bias[e] : scores[e];
    if (s->groups > 1) exclude_groups(s, values, taken);
    for (int64_t i = 0; i < s->chosen; i++) {
        ids[i] = take_largest(values, taken, s->experts);
        weights[i] = scores[ids[i]];
        sum += weights[i];
    }
    sum = sum < 1e-20f ? 1e-20f : sum;
    for (int64_t i = 0; i < s->chosen; i++)
        weights[i] = (s->normalize ? weights[i] / sum : weights[i]) * s->factor;
    sort_experts(ids, weights, s->chosen);
}

static void choose_for_tokens(void *context, int64_t begin, int64_t end, int64_t thread) {
    const routing *r = context;
    const expert_shape *s = r->shape;
    (void)thread;
    for (int64_t token = begin; token < end; token++)
        choose_for_token(s, r->logits + token * s->experts, r->bias, r->ids + token * s->chosen,
                         r->weights + token * s->chosen);
}

void choose_experts(const expert_shape *s, float *logits, const float *bias, int64_t *ids,
                    float *weights, int64_t n) {
    routing r = {s, logits, bias, ids, weights};
    int64_t nanoseconds = n * s->experts * (s->chosen + 4); /* about one per comparison */
    divide_job(n, nanoseconds, choose_for_tokens, &r);
}
