/* A layer of a paged KV cache: [blocks][2][slots][kv heads][head size], or [blocks][2][kv heads][slots][head size] (HND). */

#pragma once

#include "vectors.h"

/* Copies a token's key and value, of heads of `vector` bytes each, to a slot. */
INLINE void write_slot(char *cache, int slot, size_t vector, int kv_heads, int block_size, int hnd, const char *k, const char *v) {
    const int block = slot / block_size, place = slot % block_size;
    const size_t values = vector * kv_heads * block_size;
    const size_t run = hnd ? vector : vector * kv_heads; /* bytes of a token that lie together */
    for (int i = 0; i < (hnd ? kv_heads : 1); i++) {
        char *to = cache + (size_t)block * 2 * values + (i * (size_t)block_size + place) * run;
        memcpy(to, k + i * run, run);
        memcpy(to + values, v + i * run, run);
    }
}
