/* The order of the last keys of sequences that are paths of token trees. The nodes of a tree are
 * stored one after another, and a path has some of them: position `start` + i of a sequence is at
 * place `start` + `order[i]` of its blocks. Earlier positions are in order. */
#pragma once
#include "common.h"

/* Of all sequences (`Tails` of ops/batch.py): starts [sequences], order [sequences, width]. */
typedef struct {
    const int32_t *starts, *order;
    int64_t width;
} batch_tails;

/* Of one sequence; without a tree it starts behind every position. */
typedef struct {
    const int32_t *order;
    int64_t start;
} row_tail;

static inline row_tail tail_of(const batch_tails *all, int64_t sequence) {
    if (!all) return (row_tail){0, INT64_MAX};
    return (row_tail){all->order + sequence * all->width, all->starts[sequence]};
}

static inline int64_t place_at(row_tail t, int64_t position) {
    return position < t.start ? position : t.start + t.order[position - t.start];
}

/* How many of `count` positions from `position` on have places one after another; 1 in a tail. */
static inline int64_t in_order(row_tail t, int64_t position, int64_t count) {
    if (position >= t.start) return count < 1 ? count : 1;
    return t.start - position < count ? t.start - position : count;
}

/* Whether a tail points outside of its block table, or the table outside of the cache. */
static inline int tail_outside(const batch_tails *all, int64_t sequence, int64_t length,
                               const int64_t *table, int64_t columns, int64_t block_size,
                               int64_t num_blocks) {
    row_tail t = tail_of(all, sequence);
    if (t.start >= length) return 0;
    if (t.start < 0 || length - t.start > all->width) return 1;
    for (int64_t i = 0; i < length - t.start; i++) {
        int64_t place = t.start + t.order[i];
        if (t.order[i] < 0 || place / block_size >= columns) return 1;
        if ((uint64_t)table[place / block_size] >= (uint64_t)num_blocks) return 1;
    }
    return 0;
}
