/* A KV cache of 8-bit codes with a float16 scale for each token and KV head. */
#pragma once
#include "common.h"
#include "tails.h"

/* Pages of one layer. Python fills it in, with the same order of fields
 * (`minillm/ops/cpu_int8_cache.py`). */
typedef struct {
    uint8_t *key;  /* 128 added [blocks, kv_heads, size / 4, d / 4, 4 positions, 4 dimensions] */
    int8_t *value; /* [blocks, kv_heads, size / 4, d, 4 positions] */
    uint16_t *key_scale, *value_scale; /* [blocks, kv_heads, size] */
    int64_t num_blocks, block_size;
} int8_pages;

/* Store a key and a value [d] of a KV head in a slot. */
void store_codes(const int8_pages *, int64_t slot, int64_t head, int64_t kv_heads,
                 const element *key, const element *value, int64_t d);

int64_t int8_attention(const element *, const int8_pages *, const int32_t *, const int32_t *,
                       const int64_t *, int64_t, float, int64_t, element *, int64_t, int64_t,
                       int64_t, int64_t, int64_t, int64_t, const batch_tails *);

int64_t norm_rope_write_int8(const element *, const element *, const element *, float,
                             const float *, const float *, int64_t, const int8_pages *,
                             const int64_t *, int64_t, element *, int64_t, int64_t, int64_t,
                             int64_t);
