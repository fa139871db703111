/* Paged causal attention of many queries per sequence: prompts, prefill chunks, and many drafts.
 * The loop is FlashAttention-2's (Dao, 2023): a task keeps its queries and iterates over tiles of
 * keys and values with an online softmax (Milakov and Gimelshein, 2018).
 *
 * Everything is transposed, S^T = K Q^T and O^T = V^T P^T, so that a vector holds the values of 16
 * queries: maximum, sum and mask need no operations across lanes. Both products are `multiply` of
 * tiles.h. A is the keys, or the transposed values; B is the transposed queries, or the
 * probabilities in the layout that the softmax writes.
 *
 * Query heads that share a KV head are treated as additional queries. Tiles of keys begin at
 * multiples of TILE, and masked positions add exact zeros. So the result of a query does not depend
 * on the batch, the prefill chunks or the threads.
 */
#include <stdlib.h>
#include "threads.h"
#include "tiles.h"

#define TILE 128             /* positions of a tile */
#define TASK_BYTES (1 << 19) /* queries and sums of a task, half of a small L2 */
#define TASKS 4              /* tasks per thread, for load balance */
#define WORK 64              /* products of a query and a key or value per nanosecond and thread */
#define AHEAD 1024           /* prefetch distance in bytes */
#define LOG2_E 1.44269504f

/* Pages of keys or of values: [blocks, kv_heads, block_size, dim], strides in elements. */
typedef struct {
    const element *data;
    int64_t block, head, row, dim;
} pages;

typedef struct {
    const element *q;
    element *out;
    pages k, v;
    const int64_t *tables;
    int64_t table_stride, block_size, heads, group;
    int64_t k_words, v_rows; /* dimensions padded to multiples of a tile */
    int32_t window;
    float scale;
    int amx;
} problem;

/* Some rows of a KV head of a sequence; row r is query r / group, head r % group. */
typedef struct {
    int64_t sequence, head, begin, end, query_row, past;
} task;

/* A thread's memory. The rows of a task are processed in groups of COLUMNS. */
typedef struct {
    word *q;              /* [groups, k_words, COLUMNS] */
    float *sums;          /* [groups, v_rows, COLUMNS] of weights times values */
    float *best, *total;  /* [groups, COLUMNS] maximum score * scale, sum of weights */
    int32_t *seen_to;     /* [groups, COLUMNS] position of the query */
    word *keys, *values;  /* [TILE, k_words], [v_rows, TILE / PAIR] */
    float *scores;        /* [TILE, COLUMNS], then weights, as words, in the same memory */
    word *staged;         /* rows to be transposed */
} scratch;

/* `count` rows of elements -> words [count, width], with zeros after `dim`. */
static inline void stage(const element *from, int64_t stride, int64_t count, int64_t dim, word *to,
                         int64_t width) {
#if PAIR == 2
    if (stride == dim && dim == width * PAIR) { /* contiguous: prefetch */
        for (int64_t i = 0; i < count * width; i += LANES) {
            __builtin_prefetch((const char *)(from + PAIR * i) + AHEAD);
            store_vec(to + i, load_vec(from + PAIR * i));
        }
        return;
    }
#endif
    for (int64_t i = 0; i < count; i++, from += stride, to += width) {
        memset(to, 0, (size_t)width * sizeof(word));
#if PAIR == 2
        memcpy(to, from, (size_t)dim * sizeof(element));
#else
        for (int64_t j = 0; j < dim; j++) ((float *)to)[j] = load(from[j]);
#endif
    }
}

/* Words -> a row of elements. */
static inline void unstage(const word *from, int64_t dim, element *to) {
#if PAIR == 2
    memcpy(to, from, (size_t)dim * sizeof(element));
#else
    for (int64_t j = 0; j < dim; j++) to[j] = store(((const float *)from)[j]);
#endif
}

/* Gather `count` positions from their pages to words [count rounded up to 32, width]. The padding
 * is set to 0, because the product reads it. */
static void join_pages(const problem *p, pages from, const task *t, int64_t begin, int64_t count,
                       word *to, int64_t width) {
    const int64_t *table = p->tables + t->sequence * p->table_stride;
    memset(to + count * width, 0, (size_t)((ROUND_UP(count, 32) - count) * width) * sizeof(word));
    while (count > 0) {
        int64_t offset = begin % p->block_size, now = p->block_size - offset;
        now = now < count ? now : count;
        stage(from.data + table[begin / p->block_size] * from.block + t->head * from.head +
                  offset * from.row,
              from.row, now, from.dim, to, width);
        begin += now;
        count -= now;
        to += now * width;
    }
}

/* Staged values [count, rows] -> [rows, TILE], 32 positions at a time. */
static void transpose_values(const word *staged, int64_t count, int64_t rows, word *values) {
    const int64_t width = rows / PAIR, row = TILE / PAIR;
    for (int64_t at = 0; at < ROUND_UP(count, 32); at += 16 * PAIR)
        for (int64_t j = 0; j < width; j += 16) {
            const word *block = staged + at * width + j;
#if PAIR == 2 /* words of two dimensions of a position -> of two positions of a dimension */
            word even[16 * 16], odd[16 * 16];
            for (int64_t i = 0; i < 16; i++)
                for (int64_t l = 0; l < 16; l++) {
                    word a = block[2 * i * width + l], b = block[(2 * i + 1) * width + l];
                    even[i * 16 + l] = (a & 0xffff) | b << 16;
                    odd[i * 16 + l] = a >> 16 | (b & 0xffff0000);
                }
            transpose(even, 16, values + 2 * j * row + at / 2, 2 * row);
            transpose(odd, 16, values + (2 * j + 1) * row + at / 2, 2 * row);
#else
            transpose(block, width, values + j * row + at, row);
#endif
        }
}

/* Set scores to -infinity at positions at + i after the query, or before its window. */
static void mask(float *scores, int64_t at, int64_t begin, int64_t end, const int32_t *seen_to,
                 int32_t window) {
    for (int64_t i = begin; i < end; i++)
        for (int64_t j = 0; j < COLUMNS; j++) {
            int32_t behind = seen_to[j] - (int32_t)(at + i);
            float s = scores[i * COLUMNS + j];
            scores[i * COLUMNS + j] = behind < 0 || behind >= window ? -INFINITY : s;
        }
}

/* Online softmax: replace scores [count, COLUMNS] in place by weights 2^(score * scale - best), in
 * the layout of B, rounded to elements. Rescale the sums to the new maximum. */
static __attribute__((noinline)) void softmax(const problem *p, float *scores, int64_t count,
                                              float *best, float *total, float *sums) {
    for (int64_t at = 0; at < COLUMNS; at += LANES) {
        float *s = scores + at;
        vec none = (vec){0} - INFINITY, tops[4] = {none, none, none, none};
        for (int64_t i = 0; i < count; i += 4) /* 4 independent maxima, to hide latency */
#pragma GCC unroll 4
            for (int l = 0; l < 4; l++) tops[l] = larger(tops[l], load_vec(s + (i + l) * COLUMNS));
        vec top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
        vec scale = (vec){0} + p->scale, old = load_vec(best + at), sum = {0};
        vec new = larger(old, top * scale), shrink = exp2_vec(old - new);
        for (int64_t i = 0; i < count; i += 2) {
            vec a = exp2_vec(load_vec(s + i * COLUMNS) * scale - new);
            vec b = exp2_vec(load_vec(s + (i + 1) * COLUMNS) * scale - new);
            sum += a + b;
            store_words((word *)s + i / PAIR * COLUMNS, a, b);
        }
        store_vec(best + at, new);
        store_vec(total + at, load_vec(total + at) * shrink + sum);
        keep_awake(p->amx);
        words same = (words)(shrink == 1.f);
        uint32_t all = UINT32_MAX;
        for (int l = 0; l < LANES; l++) all &= same[l];
        if (all) continue; /* most tiles do not change the maximum */
        for (int64_t r = 0; r < p->v_rows; r++) {
            float *x = sums + r * COLUMNS + at;
            store_vec(x, load_vec(x) * shrink);
        }
    }
}

/* Index of row r of a task in the rows [n, heads] of q and out. */
static inline int64_t place(const problem *p, const task *t, int64_t r) {
    return (t->query_row + r / p->group) * p->heads + t->head * p->group + r % p->group;
}

/* Transpose the queries of a task, padded by repeating the last row, and clear the sums. */
static void begin_task(const problem *p, const task *t, scratch *w) {
    int64_t columns = ROUND_UP(t->end - t->begin, COLUMNS), width = p->k_words, d = p->k.dim;
    for (int64_t at = 0; at < columns; at += 16) {
        for (int64_t i = 0; i < 16; i++) {
            int64_t r = t->begin + at + i < t->end ? t->begin + at + i : t->end - 1;
            stage(p->q + place(p, t, r) * d, d, 1, d, w->staged + i * width, width);
            w->seen_to[at + i] = (int32_t)(t->past + r / p->group);
            w->best[at + i] = -1e30f; /* finite: the difference of two infinities is NaN */
            w->total[at + i] = 0;
        }
        word *q = w->q + at / COLUMNS * COLUMNS * width + at % COLUMNS;
        for (int64_t j = 0; j < width; j += 16)
            transpose(w->staged + j, width, q + j * COLUMNS, COLUMNS);
    }
    memset(w->sums, 0, (size_t)(columns * p->v_rows) * sizeof(float));
}

/* sums / total -> out; 0 for a row without positions. */
static void finish_task(const problem *p, const task *t, scratch *w) {
    int64_t width = p->v_rows / PAIR, dv = p->v.dim;
    for (int64_t at = 0; at < t->end - t->begin; at += 16) {
        float *sums = w->sums + at / COLUMNS * COLUMNS * p->v_rows + at % COLUMNS;
        for (int64_t lane = 0; lane < 16; lane += LANES) {
            vec scale = 1.f / larger((vec){0} + 1e-30f, load_vec(w->total + at + lane));
            for (int64_t i = 0; i < p->v_rows; i += 2) { /* in place: words take no more memory */
                float *row = sums + i * COLUMNS + lane;
                store_words((word *)sums + i / PAIR * COLUMNS + lane, load_vec(row) * scale,
                            load_vec(row + COLUMNS) * scale);
            }
        }
        for (int64_t j = 0; j < width; j += 16)
            transpose((word *)sums + j * COLUMNS, COLUMNS, w->staged + j, width);
        for (int64_t i = 0; i < 16 && t->begin + at + i < t->end; i++) {
            element *out = p->out + place(p, t, t->begin + at + i) * dv;
            unstage(w->staged + i * width, dv, out);
        }
    }
}

/* Attention of one group of rows to a tile of `count` positions from `at`. */
static void attend_tile(const problem *p, scratch *w, int64_t group, int64_t at, int64_t count) {
    const int32_t *seen_to = w->seen_to + group, window = p->window;
    int64_t lowest = seen_to[0], highest = seen_to[COLUMNS - 1];
    int64_t seen = highest + 1 - at < count ? highest + 1 - at : count, keys = ROUND_UP(seen, 32);
    if (seen <= 0 || at + seen <= lowest + 1 - window) return; /* all masked */
    float *sums = w->sums + group * p->v_rows;
    multiply(p->amx, w->scores, w->keys, p->k_words, w->q + group * p->k_words, keys, p->k_words,
             0);
    /* Only positions from `sure` on, or before `gone`, can be masked for some of the queries. */
    int64_t sure = lowest + 1 - at, gone = highest + 1 - window - at;
    mask(w->scores, at, sure > 0 ? sure : 0, keys, seen_to, window);
    mask(w->scores, at, 0, gone < keys ? gone : keys, seen_to, window);
    softmax(p, w->scores, keys, w->best + group, w->total + group, sums);
    multiply(p->amx, sums, w->values, TILE / PAIR, (word *)w->scores, p->v_rows, keys / PAIR, 1);
}

/* FlashAttention-2's loop. A tile is prepared once for all rows of the task. */
static void attend(const problem *p, const task *t, scratch *w) {
    int64_t columns = ROUND_UP(t->end - t->begin, COLUMNS);
    begin_task(p, t, w);
    int64_t first = w->seen_to[0] + 1 - (int64_t)p->window, last = w->seen_to[columns - 1];
    for (int64_t at = first > 0 ? first / TILE * TILE : 0; at <= last; at += TILE) {
        int64_t count = last + 1 - at < TILE ? last + 1 - at : TILE;
        join_pages(p, p->k, t, at, count, w->keys, p->k_words);
        join_pages(p, p->v, t, at, count, w->staged, p->v_rows / PAIR);
        transpose_values(w->staged, count, p->v_rows, w->values);
        for (int64_t group = 0; group < columns; group += COLUMNS)
            attend_tile(p, w, group, at, count);
    }
    finish_task(p, t, w);
}

static void *take(uintptr_t *memory, int64_t size) {
    uintptr_t taken = *memory;
    *memory += (uintptr_t)ROUND_UP(size * 4, 64); /* whole cache lines */
    return (void *)taken;
}

/* Lay out a thread's memory for tasks of `columns` rows; returns its end. */
static uintptr_t divide(const problem *p, int64_t columns, uintptr_t memory, scratch *w) {
    int64_t v_words = p->v_rows / PAIR;
    w->q = take(&memory, columns * p->k_words);
    w->sums = take(&memory, columns * p->v_rows);
    w->best = take(&memory, columns);
    w->total = take(&memory, columns);
    w->seen_to = take(&memory, columns);
    w->keys = take(&memory, TILE * p->k_words);
    w->values = take(&memory, TILE * v_words);
    w->scores = take(&memory, TILE * COLUMNS);
    w->staged = take(&memory, TILE * v_words > 16 * p->k_words ? TILE * v_words : 16 * p->k_words);
    return memory;
}

/* Split every sequence with at least `fewest` queries into tasks of `columns` rows. The last rows,
 * which have the most work, come first. Returns the number of tasks; `tasks` may be NULL. */
static int64_t cut(const problem *p, const int32_t *query_start, const int32_t *seq_lens,
                   int64_t sequences, int64_t fewest, int64_t columns, task *tasks) {
    int64_t count = 0;
    for (int64_t b = 0; b < sequences; b++) {
        int64_t queries = query_start[b + 1] - query_start[b], rows = queries * p->group;
        if (queries < fewest || queries == 0) continue;
        for (int64_t begin = (rows - 1) / columns * columns; begin >= 0; begin -= columns)
            for (int64_t head = 0; head < p->heads / p->group; head++, count++)
                if (tasks)
                    tasks[count] = (task){b,
                                          head,
                                          begin,
                                          begin + columns < rows ? begin + columns : rows,
                                          query_start[b],
                                          seq_lens[b] - queries};
    }
    return count;
}

/* A batch that is computed. */
typedef struct {
    const problem *p;
    const task *tasks;
    int64_t columns, size; /* most rows of a task; bytes of a thread's memory */
    char *memory;
} attention;

static void attend_some(void *context, int64_t begin, int64_t end, int64_t thread) {
    const attention *a = context;
    scratch w;
    divide(a->p, a->columns, (uintptr_t)(a->memory + thread * a->size), &w);
    take_tiles(a->p->amx, 16, 16);
    for (int64_t i = begin; i < end; i++) attend(a->p, &a->tasks[i], &w);
    give_tiles_back(a->p->amx);
}

/* The time on one thread: each query attends to the positions before it. */
static int64_t nanoseconds_of(const problem *p, const int32_t *query_start, const int32_t *seq_lens,
                              int64_t sequences, int64_t fewest) {
    int64_t pairs = 0;
    for (int64_t b = 0; b < sequences; b++) {
        int64_t queries = query_start[b + 1] - query_start[b];
        if (queries >= fewest) pairs += queries * (seq_lens[b] - queries / 2);
    }
    return pairs * p->heads * (p->k.dim + p->v.dim) / WORK;
}

/* Causal attention of every sequence with at least `fewest` queries. The last query of a sequence
 * is at its last position.
 *
 *   q [n, heads, d], out [n, heads, dv]
 *   strides[6]                   of blocks, heads and rows of k_cache, then of v_cache
 *   query_start [sequences + 1]  index of each sequence's first query
 *   seq_lens [sequences]         its length including the new positions; 0: the output is 0
 *   tables [sequences, ..]       block tables, rows `table_stride` apart
 *   scale                        factor of the scores, above 0
 *   window                       sliding window; 0: none
 *
 * Returns 0 on success, 1 if out of memory.
 */
int64_t prefill_attention(const element *q, const element *k_cache, const element *v_cache,
                          const int64_t *strides, int64_t block_size, const int32_t *query_start,
                          const int32_t *seq_lens, const int64_t *tables, int64_t table_stride,
                          float scale, int64_t window, element *out, int64_t sequences,
                          int64_t heads, int64_t kv_heads, int64_t d, int64_t dv, int64_t fewest) {
    problem p = {
        .q = q,
        .out = out,
        .k = {k_cache, strides[0], strides[1], strides[2], d},
        .v = {v_cache, strides[3], strides[4], strides[5], dv},
        .tables = tables,
        .table_stride = table_stride,
        .block_size = block_size,
        .heads = heads,
        .group = heads / kv_heads,
        .k_words = ROUND_UP(d, 32) / PAIR,
        .v_rows = ROUND_UP(dv, 32),
        .window = window > 0 && window < INT32_MAX ? (int32_t)window : INT32_MAX,
        .scale = scale * LOG2_E, /* 2^x is cheaper than e^x */
        .amx = find_tiles(),
    };
    int64_t time = nanoseconds_of(&p, query_start, seq_lens, sequences, fewest);
    int64_t threads = threads_for(time), count;
    int64_t columns = ROUND_UP(TASK_BYTES / 4 / (p.k_words + p.v_rows), COLUMNS);
    while ((count = cut(&p, query_start, seq_lens, sequences, fewest, columns, 0)) <
               TASKS * threads &&
           columns > COLUMNS)
        columns = ROUND_UP(columns / 2, COLUMNS);
    if (count == 0) return 0;
    scratch w;
    int64_t size = (int64_t)divide(&p, columns, 0, &w);
    task *tasks = malloc((size_t)count * sizeof(task));
    char *memory = aligned_alloc(64, (size_t)(threads * size));
    if (memory && tasks) {
        cut(&p, query_start, seq_lens, sequences, fewest, columns, tasks);
        attention a = {&p, tasks, columns, size, memory};
        run_job(count, 1, threads, attend_some, &a);
    }
    int64_t failed = !(memory && tasks);
    free(memory);
    free(tasks);
    return failed;
}
