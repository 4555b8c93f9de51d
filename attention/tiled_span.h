/* Attention of some queries of one key head over one span of tokens, on the matrix unit: what `tiled.c` is made of. */

#pragma once

#include "tiles.h"

#ifdef HAVE_TILES

enum {
    SPAN = 256,      /* tokens */
    FEW = 4,         /* queries that are computed together, where there are no more; 16 otherwise */
    HEAD_SIZE = 256, /* at most */
};

typedef struct {
    int32_t num_heads, num_kv_heads, head_size, block_size, hnd;
    float scale, soft_cap; /* no cap if that is 0 */
} Shape;

/* Rows of memory, `stride` bytes apart. */
typedef struct {
    const char *at;
    size_t stride;
} Rows;

/* Up to 16 queries over some spans: lane i is query i, and its sums are row i. */
typedef struct {
    __m512 max, weight;
    float *sums; /* [queries][head size] */
    int started;
} State;

/* ---- memory ---- */

/* A span of an item: those of its tokens that are seen, from `from` to `to`, and where they are. The others, up to whole
   tiles, have no address, for there may be anything. */
typedef struct {
    int from, to, begin, end;
    const char *tokens[SPAN];
} Place;

/* Keys and values of a place that are asked for while another one is computed, a few lines of memory at a time, so that
   reading and computing take their time together: of each token, `pieces` of `bytes` that are `apart`. */
typedef struct {
    const Place *place;
    int token, piece, byte; /* to be asked for next */
    int quota, pieces, bytes;
    size_t keys, apart, values; /* from a token's address; from a piece to the next; and from keys to values */
} Request;

INLINE void ask(Request *r) {
    for (int n = r->quota; n && r->token < r->place->end; n--) {
        const char *at = r->place->tokens[r->token];
        if (at) {
            at += r->keys + r->piece * r->apart + r->byte;
            __builtin_prefetch(at, 0, 2);
            __builtin_prefetch(at + r->values, 0, 2);
        }
        if ((r->byte += 64) < r->bytes) continue;
        r->byte = 0;
        if (++r->piece == r->pieces) r->piece = 0, r->token++;
    }
}

/* ---- numbers ---- */

/* 2^x for x <= 0, to 3e-6 of it (a minimax polynomial that is exact at 0); 0 below the normal numbers, which are looked for
   first, since to compute a subnormal one takes a hundred times as long; and NaN for NaN. */
INLINE __m512 power_of_two(__m512 x) {
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = x - whole;
    __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(9.58285e-3f), _mm512_set1_ps(5.590642e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024099e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312419e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
    return _mm512_maskz_scalef_ps(normal, p, whole);
}

/* What scores are multiplied by, so that powers of two are powers of e. */
INLINE float exponent_scale(const Shape *s) { return 1.44269504f * (s->soft_cap ? 1 : s->scale); }

/* Where there is no score yet, the largest is -infinity, from which nothing can be taken away. */
INLINE __m512 or_zero(__m512 max) {
    const __m512 none = _mm512_set1_ps(-INFINITY);
    return _mm512_mask_mov_ps(max, _mm512_cmp_ps_mask(max, none, _CMP_EQ_OQ), _mm512_setzero_ps());
}

INLINE __m512 swap_lanes(__m512 x) { return _mm512_shuffle_f32x4(x, x, 0xb1); } /* fours: 1, 0, 3, 2 */
INLINE __m512 swap_halves(__m512 x) { return _mm512_shuffle_f32x4(x, x, 0x4e); } /* fours: 2, 3, 0, 1 */

/* Rows of 16 words become columns. */
INLINE void transpose(__m512i x[TILE]) {
    __m512i y[TILE];
    for (int i = 0; i < TILE; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < TILE; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) { /* x[4 * b + i] holds columns i, i + 4, i + 8 and i + 12 of rows 4 * b to 4 * b + 3 */
        const __m512i even = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), odd = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        const __m512i even2 = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88), odd2 = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
        y[i] = _mm512_shuffle_i32x4(even, even2, 0x88);
        y[i + 8] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        y[i + 4] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
    memcpy(x, y, sizeof y);
}

/* ---- one span ---- */

/* Tiles 0 to 3 are sums, of [tokens][queries] and then of [queries][elements]. */
static void configure_for_scores(int queries) {
    const int b = 4 * queries;
    configure_tiles((int[]){16, 16, 16, 16, 16, 16, 16, 16}, (int[]){b, b, b, b, b, b, 64, 64});
}
static void configure_for_values(int queries) {
    const int r = queries;
    configure_tiles((int[]){r, r, r, r, r, r, 16, 16}, (int[]){64, 64, 64, 64, 64, 64, 64, 64});
}

/* The products of keys, in `tiles` tiles of 16 tokens, and n queries. */
INLINE void multiply(const int n, const int size, const int tiles, const Rows *keys, const uint32_t *queries, float *scores) {
    _tile_zero(0);
    _tile_zero(1);
    if (tiles == 4) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int d = 0; d < size; d += DEPTH) {
        _tile_loadd(4, queries + d / 2 * n, 4 * n);
        _tile_loadd(6, keys[0].at + 2 * d, keys[0].stride);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(7, keys[1].at + 2 * d, keys[1].stride);
        _tile_dpbf16ps(1, 7, 4);
        if (tiles == 4) {
            _tile_loadd(6, keys[2].at + 2 * d, keys[2].stride);
            _tile_dpbf16ps(2, 6, 4);
            _tile_loadd(7, keys[3].at + 2 * d, keys[3].stride);
            _tile_dpbf16ps(3, 7, 4);
        }
    }
    _tile_stored(0, scores, 4 * n);
    _tile_stored(1, scores + TILE * n, 4 * n);
    if (tiles == 4) {
        _tile_stored(2, scores + 2 * TILE * n, 4 * n);
        _tile_stored(3, scores + 3 * TILE * n, 4 * n);
    }
}

/* The scores of tokens begin to end. */
INLINE void score(const int n, const int size, const Rows *keys, int begin, int end, const uint32_t *queries, float *scores,
                  Request *request) {
    for (int t = begin, step; t < end; t += step) {
        step = end - t < 4 * TILE ? 2 * TILE : 4 * TILE;
        ask(request);
        ask(request);
        if (step == 4 * TILE) multiply(n, size, 4, keys + t / TILE, queries, scores + t * n);
        else multiply(n, size, 2, keys + t / TILE, queries, scores + t * n);
        ask(request);
        ask(request);
    }
}

/* The same for two units of 16 queries, one behind the other: keys are loaded once for both. */
INLINE void score_two(const int size, const Rows *keys, int begin, int end, const uint32_t *queries, float *scores,
                      Request *request) {
    const uint32_t *others = queries + TILE * size / 2;
    for (int t = begin; t < end; t += 2 * TILE) {
        const Rows *pair = keys + t / TILE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < size; d += DEPTH) {
            _tile_loadd(4, queries + d / 2 * TILE, 64);
            _tile_loadd(6, pair[0].at + 2 * d, pair[0].stride);
            _tile_dpbf16ps(0, 6, 4);
            _tile_loadd(5, others + d / 2 * TILE, 64);
            _tile_dpbf16ps(1, 6, 5);
            _tile_loadd(7, pair[1].at + 2 * d, pair[1].stride);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
        }
        float *to = scores + t * TILE, *other = to + SPAN * TILE;
        _tile_stored(0, to, 64);
        _tile_stored(1, other, 64);
        _tile_stored(2, to + TILE * TILE, 64);
        _tile_stored(3, other + TILE * TILE, 64);
        ask(request);
        ask(request);
    }
}

/* Turns the scores of tokens begin to end into weights; both are multiples of 32, and `position` is that of token 0. A
   lane sees the positions from its `start` to its `stop`, and all see the tokens from `from` to `to`. */
INLINE void weigh(const int n, const Shape *s, float *scores, int begin, int end, int position, __m512i start, __m512i stop,
                  int from, int to, State *state, uint16_t *weights, Request *request) {
    const int step = TILE / n; /* tokens of a vector */
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i token = n == FEW ? _mm512_srli_epi32(lanes, 2) : _mm512_setzero_si512();
    const __m512 none = _mm512_set1_ps(-INFINITY);
    __m512 max[4] = {none, none, none, none}, weight[4] = {0};
    for (int t = begin; t < end; t += 4 * step) {
        if (t % DEPTH == 0) ask(request);
        const int all = from <= t && t + 4 * step <= to;
        for (int i = 0; i < 4; i++) {
            float *at = scores + n * (t + i * step);
            __m512 x = _mm512_load_ps(at);
            if (s->soft_cap) x = (__m512)(s->soft_cap * hyperbolic_tangent((vec)x * (s->scale / s->soft_cap)));
            if (!all) {
                const __m512i at_position = _mm512_add_epi32(token, _mm512_set1_epi32(position + t + i * step));
                const __mmask16 seen = _mm512_cmpge_epi32_mask(at_position, start) & _mm512_cmplt_epi32_mask(at_position, stop);
                x = _mm512_mask_mov_ps(none, seen, x);
            }
            if (s->soft_cap || !all) _mm512_store_ps(at, x);
            max[i] = _mm512_max_ps(x, max[i]);
        }
    }
    __m512 top = _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
    if (n == FEW) top = _mm512_max_ps(top, swap_lanes(top)), top = _mm512_max_ps(top, swap_halves(top));

    const __m512 scale = _mm512_set1_ps(exponent_scale(s)), offset = or_zero(top) * scale;
    for (int t = begin; t < end; t += DEPTH) {
        ask(request);
        if (n == FEW) {
            __m512 x[8], both[4], query[2][4];
            for (int i = 0; i < 8; i++) {
                x[i] = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + n * t + i * TILE), scale, offset));
                weight[0] += x[i];
            }
            const __m512i first = _mm512_set_epi32(29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
            const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
            for (int half = 0; half < 2; half++) {
                for (int i = 0; i < 2; i++) {
                    both[i] = _mm512_permutex2var_ps(x[4 * half + 2 * i], first, x[4 * half + 2 * i + 1]);
                    both[i + 2] = _mm512_permutex2var_ps(x[4 * half + 2 * i], second, x[4 * half + 2 * i + 1]);
                }
                for (int i = 0; i < 2; i++) {
                    query[half][2 * i] = _mm512_shuffle_f32x4(both[2 * i], both[2 * i + 1], 0x44);
                    query[half][2 * i + 1] = _mm512_shuffle_f32x4(both[2 * i], both[2 * i + 1], 0xee);
                }
            }
            for (int q = 0; q < FEW; q++)
                _mm512_store_si512(weights + q * SPAN + t, (__m512i)_mm512_cvtne2ps_pbh(query[1][q], query[0][q]));
        } else {
            __m512i pairs[TILE];
            const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                                   21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
            for (int i = 0; i < TILE; i++) {
                __m512 x[2];
                for (int j = 0; j < 2; j++) {
                    x[j] = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + n * (t + 2 * i + j)), scale, offset));
                    weight[(2 * i + j) % 4] += x[j];
                }
                pairs[i] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
            }
            transpose(pairs);
            for (int q = 0; q < TILE; q++) _mm512_store_si512(weights + q * SPAN + t, pairs[q]);
        }
    }
    __m512 sum = weight[0];
    if (n == FEW) sum += swap_lanes(sum), sum += swap_halves(sum);
    else sum = (weight[0] + weight[1]) + (weight[2] + weight[3]);
    state->max = top;
    state->weight = sum;
}

/* Values of tokens begin to end in tiles, pair by pair. Those of a token that has no address are zeros. */
INLINE void arrange(const int size, const char *const *tokens, size_t offset, int begin, int end, uint32_t *values,
                    Request *request) {
    static const char zeros[2 * HEAD_SIZE];
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                         35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int t = begin; t < end; t += 2) {
        const char *first = tokens[t] ? tokens[t] + offset : zeros, *second = tokens[t + 1] ? tokens[t + 1] + offset : zeros;
        uint32_t *to = values + t / DEPTH * (size / TILE) * TILE * TILE + t % DEPTH / 2 * TILE;
        if (t % 8 == 0) ask(request);
        for (int d = 0; d < size; d += DEPTH, to += 2 * TILE * TILE) {
            const __m512i a = _mm512_loadu_si512(first + 2 * d), b = _mm512_loadu_si512(second + 2 * d);
            _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(to + TILE * TILE, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

/* Sums of the values of tokens begin to end, times their weights. */
INLINE void add_values(const int size, const uint16_t *weights, const uint32_t *values, int begin, int end, float *sums,
                       Request *request) {
    const int tiles = size / TILE;
    for (int tile = 0; tile < tiles; tile += 4) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int t = begin; t < end; t += DEPTH) {
            const uint32_t *from = values + (t / DEPTH * tiles + tile) * TILE * TILE;
            ask(request);
            _tile_loadd(4, weights + t, 2 * SPAN);
            _tile_loadd(6, from, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, from + TILE * TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            ask(request);
            if (tile + 2 < tiles) {
                _tile_loadd(6, from + 2 * TILE * TILE, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, from + 3 * TILE * TILE, 64);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        float *to = sums + tile * TILE;
        _tile_stored(0, to, 4 * size);
        _tile_stored(1, to + TILE, 4 * size);
        if (tile + 2 < tiles) {
            _tile_stored(2, to + 2 * TILE, 4 * size);
            _tile_stored(3, to + 3 * TILE, 4 * size);
        }
    }
}

#endif
