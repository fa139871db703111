/* Sampling: one token id per row of logits, and log-probabilities.
 *
 * A sample is argmax((logit - best) / temperature + Gumbel noise), where the noise of a token is a
 * function of seed, sample index, position and id (`minillm_kernels/philox.py`). The random words
 * are the same bits as there; the noise is also computed in float64 and rounded once. Two
 * logarithms for each of 49,152 tokens would take longer than a small model's layers. An upper
 * bound of the noise avoids most of them, because it shows that a token cannot win:
 *
 *   Block: if its largest logit loses even with the largest possible noise, it needs no words.
 *   Token: -log(-log(1 - u)) <= -log(u), and log2 is at least its chord between powers of 2, which
 *   is the float's bits read as an integer. So the bound costs a multiplication per token, and
 *   only tokens that may win (about thirty per row) need logarithms.
 *
 * Both bounds also hold after rounding, because float addition is monotone.
 *
 * Top-k and top-p are reduced to a threshold: the smallest value that is kept, and the id of the
 * last kept token with that value. The maximum of each block of 64 tokens is computed together with
 * the row's maximum. The k-th largest of these is a lower bound of the k-th largest token, so few
 * tokens have to be examined.
 *
 * Threads divide the rows, never a single row, so the result of a row depends only on that row.
 */
#include <float.h>
#include <stdlib.h>
#include "common.h"
#include "threads.h"

#define BLOCK 64           /* tokens; 16 Philox counters */
#define PREFIX 64          /* minimum number of top tokens that top-p tries first */
#define MOST_NOISE 22.875f /* bound of the largest noise, 22.8738 for word 0 */
#define TOKENS 4           /* logits that a thread processes in a nanosecond */

/* Sampling parameters, one value per row. Python fills it in, with the same order of fields
 * (`minillm/ops/cpu_sampling.py`). */
typedef struct {
    const float *temperature;           /* 0: greedy */
    const float *min_p, *top_p;         /* 0 and 1: off */
    const int32_t *top_k;               /* 0: off */
    const int64_t *seed, *sample_index, *position;
    const uint8_t *const *mask;         /* or NULL: all tokens may be chosen */
} pack;

/* Sampling parameters of one row. */
typedef struct {
    double top_p;
    int64_t seed, sample_index, position, top_k;
    float temperature, floor; /* log(min_p); -infinity: off */
} request;

/* A row of logits and its state. */
typedef struct {
    const void *at;
    const uint8_t *mask; /* bit i % 8 of byte i / 8: whether token i may be chosen; NULL: all may */
    int wide; /* float32, else bf16; both in either library, because edited logits are float32 */
    int64_t size, blocks;
    float best;      /* the largest logit */
    int64_t place;   /* its index; the first of ties */
    float *peaks;    /* [blocks] the maximum of each block, later scaled */
    float temperature, floor;
    float edge;      /* threshold: greater values are kept, and equal ones up to the id `last` */
    int64_t last;
    int64_t before;  /* vocabulary blocks before this row, if it is a shard; else 0 */
} row;

/* Values selected from a row, and their weights. */
typedef struct {
    float *value, *weight;
    int64_t n;
} list;

/* ---- blocks of a row ------------------------------------------------------------------------ */

/* Not inlined: one call per 64 tokens is cheap, and inlining took a quarter of the build time. */
#define ONCE __attribute__((noinline))

static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Make the logits of excluded tokens -infinity, or NaN if they are NaN or infinite, because a model
 * that computes such logits has failed. */
static inline void exclude(float *restrict x, const uint8_t *mask, int count) {
    uint32_t bits[BLOCK / 32] = {0};
    memcpy(bits, mask, (size_t)(count + 7) / 8);
    for (int i = 0; i < BLOCK; i++) {
        float excluded = x[i] <= FLT_MAX ? -INFINITY : NAN;
        x[i] = bits[i / 32] >> i % 32 & 1 ? x[i] : excluded;
    }
}

/* 64 logits as float32, padded with -infinity: in place, or converted to `memory`. */
static ONCE const float *read_block(const row *r, int64_t block, float *restrict memory) {
    int64_t first = block * BLOCK, count = r->size - first < BLOCK ? r->size - first : BLOCK;
    const float *wide = (const float *)r->at + first;
    const uint16_t *narrow = (const uint16_t *)r->at + first;
    if (count == BLOCK) {
        if (r->wide && !r->mask) return wide;
        for (int i = 0; i < BLOCK; i++) memory[i] = r->wide ? wide[i] : from_bf16(narrow[i]);
    } else {
        for (int i = 0; i < BLOCK; i++) memory[i] = -INFINITY;
        for (int i = 0; i < count; i++) memory[i] = r->wide ? wide[i] : from_bf16(narrow[i]);
    }
    if (r->mask) exclude(memory, r->mask + first / 8, (int)count);
    return memory;
}

/* The maximum of a block that has no greater logit than the lowest finite number. OpenMP's maxima
 * begin with that number, in Clang's code, and so are never -infinity. */
static ONCE float lowest_of(const float *x) {
    for (int i = 0; i < BLOCK; i++)
        if (x[i] == -FLT_MAX) return -FLT_MAX;
    return -INFINITY;
}

/* Find the maximum of each block and of the row, and its index. The maximum is NaN if there is one.
 */
static void find_best(row *r) {
    float best = -INFINITY, memory[BLOCK];
    int64_t at = 0;
    int32_t nan = 0;
    for (int64_t b = 0; b < r->blocks; b++) {
        const float *x = read_block(r, b, memory);
        float top = -INFINITY;
#pragma omp simd reduction(max : top) reduction(| : nan)
        for (int i = 0; i < BLOCK; i++) {
            top = x[i] > top ? x[i] : top;
            nan |= x[i] != x[i];
        }
        if (top <= -FLT_MAX) top = lowest_of(x);
        r->peaks[b] = top;
        if (top > best) best = top, at = b;
    }
    const float *x = read_block(r, at, memory);
    int64_t place = 0;
    while (place < BLOCK - 1 && x[place] != best) place++;
    place += at * BLOCK;
    r->best = nan ? NAN : best;
    r->place = place < r->size ? place : 0;
}

/* A logit after temperature and min-p: 0 for the best, -infinity below the floor. */
static inline float scaled(const row *r, float logit) {
    float s = (logit - r->best) / r->temperature;
    return s < r->floor ? -INFINITY : s;
}

static ONCE void scale_block(const row *r, int64_t block, float *restrict out) {
    float memory[BLOCK];
    const float *x = read_block(r, block, memory);
    for (int i = 0; i < BLOCK; i++) out[i] = scaled(r, x[i]);
}

/* ---- sampling ------------------------------------------------------------------------------- */

/* Philox4x32-10 (Salmon et al., 2011): the random words of a block's tokens. */
static inline void draw_words(const request *q, int64_t purpose, int64_t block,
                              uint32_t *restrict words) {
    for (int j = 0; j < BLOCK / 4; j++) {
        uint32_t c0 = (uint32_t)(block * (BLOCK / 4)) + (uint32_t)j, c1 = (uint32_t)q->position;
        uint32_t c2 = (uint32_t)q->sample_index, c3 = (uint32_t)purpose;
        uint32_t k0 = (uint32_t)q->seed, k1 = (uint32_t)((uint64_t)q->seed >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)p0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        words[4 * j] = c0, words[4 * j + 1] = c1, words[4 * j + 2] = c2, words[4 * j + 3] = c3;
    }
}

/* `philox.to_gumbel`. */
static float noise(uint32_t word) {
    float u = ((float)word + 0.5f) * 0x1p-32f;
    u = u > 1.f - 0x1p-24f ? 1.f - 0x1p-24f : u;
    return (float)-log(-log1p(-(double)u));
}

/* Upper bound of the noise of a word, at most 0.07 too large where it matters: -log(u), with the
 * chord of log2 and a slightly smaller u. The 1e-3 is a hundred times the rounding error. */
static inline float noise_bound(uint32_t word) {
    float u = (float)(int32_t)(word >> 1); /* times 2^31 */
    int32_t bits;
    memcpy(&bits, &u, sizeof bits);
    return 1e-3f - 0.693147182f * ((float)bits * 0x1p-23f - (127 + 31));
}

/* Update `total`, the best sum so far, and `token` with the tokens of one block. Ties go to the
 * lowest id. */
static inline void draw_block(const row *r, int64_t block, const uint32_t *words, float *total,
                              int64_t *token) {
    float s[BLOCK], most[BLOCK];
    scale_block(r, block, s);
    int32_t any = 0;
    for (int i = 0; i < BLOCK; i++) {
        most[i] = s[i] + noise_bound(words[i]);
        any |= most[i] >= *total && s[i] >= r->edge;
    }
    for (int64_t i = 0; any && i < BLOCK; i++) {
        int64_t id = block * BLOCK + i;
        if (!(most[i] >= *total) || s[i] < r->edge || (s[i] == r->edge && id > r->last)) continue;
        float sum = s[i] + noise(words[i]);
        if (sum > *total || (sum == *total && id < *token)) *total = sum, *token = id;
    }
}

/* The token with the largest sum. The block with the largest logit comes first, because its sum
 * rules out most others. */
static int64_t draw(const row *r, const request *q, int64_t purpose, float *won) {
    int64_t token = r->size, first = r->place / BLOCK;
    float total = -INFINITY;
    for (int64_t i = -1; i < r->blocks; i++) {
        int64_t block = i < 0 ? first : i;
        float peak = r->peaks[block];
        if (i == first || peak < r->edge || peak + MOST_NOISE < total) continue;
        uint32_t words[BLOCK];
        draw_words(q, purpose, r->before + block, words);
        if (i < 0 && (r->edge < 0 || r->place <= r->last))
            token = r->place, total = peak + noise(words[token % BLOCK]);
        draw_block(r, block, words, &total, &token);
    }
    *won = total;
    return token < r->size ? token : r->place;
}

/* ---- top-k and top-p ------------------------------------------------------------------------ */

/* Keep the values greater than the pivot, or the values less than it. */
static void keep(list *l, float pivot, int greater) {
    float *restrict value = l->value, *restrict weight = l->weight;
    int64_t n = 0;
    for (int64_t i = 0; i < l->n; i++) {
        float v = value[i];
        value[n] = v, weight[n] = weight[i];
        n += greater ? v > pivot : v < pivot;
    }
    l->n = n;
}

/* Total weight of the values greater than the pivot, and of those equal to it. */
static void weigh(const list *l, float pivot, double *greater, double *equal) {
    const float *restrict value = l->value, *restrict weight = l->weight;
    double more = 0, same = 0;
#pragma omp simd reduction(+ : more, same)
    for (int64_t i = 0; i < l->n; i++) {
        more += (double)(value[i] > pivot ? weight[i] : 0.f);
        same += (double)(value[i] == pivot ? weight[i] : 0.f);
    }
    *greater = more, *equal = same;
}

/* The largest value such that it and all greater values have a total weight of at least `goal`, or
 * the smallest value; `greater` is the weight of the greater values. This is quickselect (Hoare,
 * 1961) and destroys the list. Pivots are medians of three random values, so that no order of
 * logits is a bad case. */
static float find_edge(list *l, double goal, double *greater) {
    uint64_t state = 1;
    double above = 0;
    float pivot = -INFINITY;
    while (l->n > 0) {
        float three[3];
        for (int i = 0; i < 3; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            three[i] = l->value[(state >> 33) % (uint64_t)l->n];
        }
        float low = fminf(three[0], three[1]), high = fmaxf(three[0], three[1]);
        pivot = fmaxf(low, fminf(high, three[2]));
        double more, equal;
        weigh(l, pivot, &more, &equal);
        if (above + more >= goal) {
            keep(l, pivot, 1);
            continue;
        }
        above += more;
        *greater = above;
        if (above + equal >= goal) break;
        above += equal;
        keep(l, pivot, 0);
    }
    return pivot;
}

/* Select all values >= `least`, with weight 1, or exp(value) if `by_mass`. */
static void pick(const row *r, float least, int by_mass, list *l) {
    float *restrict value = l->value, *restrict weight = l->weight;
    int64_t n = 0;
    for (int64_t b = 0; b < r->blocks; b++) {
        if (!(r->peaks[b] >= least && r->peaks[b] > -INFINITY)) continue;
        float s[BLOCK];
        scale_block(r, b, s);
        for (int i = 0; i < BLOCK; i++) {
            value[n] = s[i];
            n += (s[i] >= least) & (s[i] > -INFINITY);
        }
    }
    l->n = n;
    if (by_mass)
        for (int64_t i = 0; i < n; i++) weight[i] = fast_exp(value[i]);
    else
        for (int64_t i = 0; i < n; i++) weight[i] = 1.f;
}

static double total_weight(const list *l) {
    double greater, equal;
    weigh(l, -INFINITY, &greater, &equal);
    return greater;
}

/* Sum of exp over the whole row. */
static double total_mass(const row *r) {
    double sum = 0;
    for (int64_t b = 0; b < r->blocks; b++) {
        if (r->peaks[b] < -87.f) continue; /* negligible */
        float s[BLOCK];
        scale_block(r, b, s);
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < BLOCK; i++) sum += (double)fast_exp(s[i]);
    }
    return sum;
}

/* A lower bound of the `count`-th largest value: the `count`-th largest block maximum. */
static float reached_by(const row *r, int64_t count, list *l) {
    if (r->blocks < count) return -INFINITY;
    memcpy(l->value, r->peaks, (size_t)r->blocks * sizeof(float));
    for (int64_t b = 0; b < r->blocks; b++) l->weight[b] = 1.f;
    l->n = r->blocks;
    double greater;
    return find_edge(l, (double)count, &greater);
}

/* The id of the last token that top-p keeps among those with the threshold value, in order of ids:
 * tokens are added until the mass reaches the goal. `before` is the mass of all greater values. */
static int64_t last_of_edge(const row *r, double before, double goal) {
    double mass = (double)fast_exp(r->edge);
    int64_t last = -1;
    for (int64_t b = 0; b < r->blocks; b++) {
        if (!(r->peaks[b] >= r->edge)) continue;
        float s[BLOCK];
        scale_block(r, b, s);
        for (int64_t i = 0; i < BLOCK; i++)
            if (s[i] == r->edge) {
                if (before >= goal) return last;
                last = b * BLOCK + i;
                before += mass;
            }
    }
    return last;
}

/* Top-k, then top-p of the remaining tokens; ties as in `reference.truncate`. */
static void truncate_row(row *r, const request *q, list *l) {
    double before = 0;
    if (q->top_k > 0 && q->top_k < r->size) {
        pick(r, reached_by(r, q->top_k, l), 0, l);
        r->edge = find_edge(l, (double)q->top_k, &before);
    }
    if (q->top_p >= 1) return;
    int cut = r->edge > -INFINITY;
    pick(r, cut ? r->edge : reached_by(r, PREFIX, l), 1, l);
    double goal = q->top_p * (cut ? total_weight(l) : total_mass(r));
    if (!cut && total_weight(l) < goal) pick(r, -INFINITY, 1, l);
    r->edge = find_edge(l, goal, &before);
    r->last = last_of_edge(r, before, goal);
}

/* ---- rows ----------------------------------------------------------------------------------- */

static inline int truncates(const request *q) {
    return q->temperature > 0 && (q->top_k > 0 || q->top_p < 1);
}

static row row_of(const void *at, int64_t wide, int64_t size, const uint8_t *mask, float *peaks) {
    row r = {.at = at, .mask = mask, .wide = wide != 0, .size = size, .peaks = peaks};
    r.blocks = (size + BLOCK - 1) / BLOCK;
    r.edge = -INFINITY;
    r.last = INT64_MAX;
    find_best(&r);
    return r;
}

static request request_of(const pack *p, int64_t i) {
    double min_p = (double)p->min_p[i];
    return (request){
        .top_p = (double)p->top_p[i], .seed = p->seed[i], .sample_index = p->sample_index[i],
        .position = p->position[i], .top_k = p->top_k[i], .temperature = p->temperature[i],
        .floor = min_p > 0 ? (float)log(min_p) : -INFINITY};
}

static int64_t choose_one(row *r, const request *q, int64_t purpose, list *l) {
    if (!(q->temperature > 0) || !isfinite(r->best)) return r->place;
    r->temperature = q->temperature;
    r->floor = q->floor;
    for (int64_t b = 0; b < r->blocks; b++) r->peaks[b] = scaled(r, r->peaks[b]);
    if (truncates(q)) truncate_row(r, q, l);
    float total;
    return draw(r, q, purpose, &total);
}

/* Rows of logits that are processed: the arguments of the functions below. */
typedef struct {
    const void *const *at;
    int64_t wide, n, size, purpose, before, top;
    const pack *p;
    const int64_t *targets;
    float *best, *totals, *logprobs;
    int64_t *tokens, *ids, *ranks;
    float *memory;                  /* `needed` floats of each thread */
    int64_t blocks, listed, needed; /* blocks of a row; floats of a list */
} rows;

/* Process each row with its thread's memory. Returns 1 if out of memory. */
static int64_t process_rows(rows *all, piece_work work) {
    int64_t threads = threads_for(all->n * all->size / TOKENS);
    all->memory = malloc((size_t)(all->needed * threads) * sizeof(float));
    if (!all->memory) return 1;
    run_job(all->n, 1, threads, work, all);
    free(all->memory);
    return 0;
}

static void choose_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const rows *c = context;
    float *own = c->memory + c->needed * thread;
    for (int64_t i = begin; i < end; i++) {
        list l = {own + c->blocks, own + c->blocks + c->listed, 0};
        const uint8_t *mask = c->p->mask ? c->p->mask[i] : NULL;
        row r = row_of(c->at[i], c->wide, c->size, mask, own);
        request q = request_of(c->p, i);
        c->best[i] = r.best;
        c->tokens[i] = choose_one(&r, &q, c->purpose, &l);
    }
}

/* Sample one token per row.
 *
 *   at [n]              address of each row of logits; float32 if `wide`, else bf16
 *   p                   sampling parameters
 *   best, tokens [n]    each row's largest logit, NaN if it has one; and its token, arbitrary if
 *                       the largest logit is not finite
 *
 * Returns 1 if out of memory. */
int64_t choose_tokens(const void *const *at, int64_t wide, const pack *p, int64_t n, int64_t size,
                      int64_t purpose, float *best, int64_t *tokens) {
    int64_t blocks = (size + BLOCK - 1) / BLOCK, listed = 0;
    for (int64_t i = 0; i < n; i++) {
        request q = request_of(p, i);
        if (truncates(&q)) listed = (blocks + 1) * BLOCK;
    }
    rows all = {.at = at, .wide = wide, .n = n, .size = size, .p = p, .purpose = purpose,
                .best = best, .tokens = tokens, .blocks = blocks, .listed = listed,
                .needed = blocks + 2 * listed};
    return process_rows(&all, choose_rows);
}

static void draw_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const rows *c = context;
    for (int64_t i = begin; i < end; i++) {
        row r = row_of(c->at[i], c->wide, c->size, NULL, c->memory + c->needed * thread);
        request q = request_of(c->p, i);
        r.before = c->before, r.best = c->best[i];
        r.temperature = q.temperature, r.floor = q.floor;
        for (int64_t b = 0; b < c->blocks; b++) r.peaks[b] = scaled(&r, r.peaks[b]);
        c->tokens[i] = draw(&r, &q, c->purpose, c->totals + i);
    }
}

/* Sample from a rank's shard of the vocabulary.
 *
 *   at, wide, p, n, size    as above, for the shard
 *   before                  blocks of 64 tokens before the shard
 *   best [n]                the largest logit of each whole row
 *   totals, tokens [n]      the largest scaled logit plus noise in the shard, -infinity if min-p
 *                           leaves no token; and its index in the shard
 *
 * Masks, top-k and top-p are not supported. Returns 1 if out of memory. */
int64_t draw_from_shard(const void *const *at, int64_t wide, const pack *p, int64_t n, int64_t size,
                        int64_t purpose, int64_t before, const float *best, float *totals,
                        int64_t *tokens) {
    int64_t blocks = (size + BLOCK - 1) / BLOCK;
    rows all = {.at = at, .wide = wide, .n = n, .size = size, .p = p, .purpose = purpose,
                .before = before, .best = (float *)best, .totals = totals, .tokens = tokens,
                .blocks = blocks, .needed = blocks};
    return process_rows(&all, draw_rows);
}

/* ---- log-probabilities ---------------------------------------------------------------------- */

typedef struct {
    float logit;
    int32_t id;
} entry;

/* Order: descending logit, then ascending id. */
static int before(const void *left, const void *right) {
    const entry *a = left, *b = right;
    if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

/* Sort the tokens with logits >= `least` into `out`; returns their number. */
static int64_t sorted_from(const row *r, float least, entry *out) {
    int64_t n = 0;
    for (int64_t b = 0; b < r->blocks; b++) {
        if (!(r->peaks[b] >= least)) continue;
        float memory[BLOCK];
        const float *x = read_block(r, b, memory);
        for (int64_t i = 0; i < BLOCK && b * BLOCK + i < r->size; i++) {
            out[n] = (entry){x[i], (int32_t)(b * BLOCK + i)};
            n += x[i] >= least;
        }
    }
    qsort(out, (size_t)n, sizeof *out, before);
    return n;
}

/* Number of greater logits. */
static int64_t greater_than(const row *r, float logit) {
    int64_t count = 0;
    for (int64_t b = 0; b < r->blocks; b++) {
        if (!(r->peaks[b] > logit)) continue;
        float memory[BLOCK];
        const float *x = read_block(r, b, memory);
        for (int i = 0; i < BLOCK; i++) count += x[i] > logit;
    }
    return count;
}

static float logit_of(const row *r, int64_t id) {
    return r->wide ? ((const float *)r->at)[id] : from_bf16(((const uint16_t *)r->at)[id]);
}

/* One row's target and its `top` best tokens; missing entries are NaN. */
static void describe_one(row *r, int64_t target, int64_t top, list *l, float *logprobs,
                         int64_t *ids, int64_t *ranks) {
    entry *sorted = (entry *)l->value; /* uses the memory of value and weight */
    int64_t n = top ? sorted_from(r, reached_by(r, top, l), sorted) : 0;
    float logit = logit_of(r, target);
    ids[0] = target, ranks[0] = 1 + greater_than(r, logit), logprobs[0] = logit;
    for (int64_t j = 0; j < top; j++) {
        ids[j + 1] = j < n ? sorted[j].id : target;
        logprobs[j + 1] = j < n ? sorted[j].logit : NAN;
        ranks[j + 1] = j > 0 && logprobs[j + 1] == logprobs[j] ? ranks[j] : j + 1;
    }
    r->temperature = 1;
    r->floor = -INFINITY;
    for (int64_t b = 0; b < r->blocks; b++) r->peaks[b] = scaled(r, r->peaks[b]);
    float normaliser = (float)log(total_mass(r));
    for (int64_t j = 0; j <= top; j++) logprobs[j] = logprobs[j] - r->best - normaliser;
}

static void describe_rows(void *context, int64_t begin, int64_t end, int64_t thread) {
    const rows *c = context;
    float *own = c->memory + c->needed * thread, *first = own + c->blocks + c->blocks % 2;
    for (int64_t i = begin; i < end; i++) {
        list l = {first, first + c->listed, 0};
        row r = row_of(c->at[i], c->wide, c->size, NULL, own);
        int64_t out = i * (c->top + 1);
        describe_one(&r, c->targets[i], c->top, &l, c->logprobs + out, c->ids + out,
                     c->ranks + out);
    }
}

/* Log-probabilities of rows of logits as in `choose_tokens`, each with a finite maximum.
 *
 *   targets [n]                              ids in [0, size)
 *   logprobs, ids, ranks [n, top + 1]        the target, then the best `top` <= size tokens
 *
 * Returns 1 if out of memory, 2 if a target is not a valid id. */
int64_t describe_tokens(const void *const *at, int64_t wide, int64_t n, int64_t size,
                        const int64_t *targets, int64_t top, float *logprobs, int64_t *ids,
                        int64_t *ranks) {
    for (int64_t i = 0; i < n; i++)
        if (targets[i] < 0 || targets[i] >= size) return 2;
    int64_t blocks = (size + BLOCK - 1) / BLOCK, listed = (blocks + 1) * BLOCK;
    rows all = {.at = at, .wide = wide, .n = n, .size = size, .targets = targets, .top = top,
                .logprobs = logprobs, .ids = ids, .ranks = ranks, .blocks = blocks,
                .listed = listed, .needed = blocks + blocks % 2 + 2 * listed};
    return process_rows(&all, describe_rows);
}
