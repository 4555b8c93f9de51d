/* Attention over a paged KV cache on the matrix unit, in bfloat16: decodes and prefills alike, read where they lie.

   Sequences are cut at every SPAN tokens. Of a query and a span we keep the largest score, the sum of the weights
   e^(score - largest), and the sum of the values times their weights, which are rounded to bfloat16 for it. A query's
   spans are folded in their order. None of this depends on what else is computed, so a token's result has the same bits
   alone and in any batch, as a decode and in a prefill of any length, and with any number of threads.

   Queries of one key head are the columns of a product: 16 of them, or 4 where there are no more. Neighbouring tokens of
   a prefill go through a span together, and so do rows that name the same blocks there (Juravsky et al. 2024,
   "Hydragen"; FlashInfer's cascade).

   A layer of the cache is [blocks][2][slots][kv heads][head size], or [blocks][2][kv heads][slots][head size] (HND). */

#include "tiles.h"

#ifdef HAVE_TILES

enum {
    SPAN = 256,      /* tokens */
    QUERIES = 96,    /* of one key head in an item, at most */
    COLUMNS = QUERIES / TILE,
    FEW = 4,         /* queries of a small item, at most */
    HEADS = 8,       /* key heads that a small item goes through together: to configure the unit takes its time */
    HEAD_SIZE = 256, /* at most */
};

typedef struct {
    int32_t num_heads, num_kv_heads, head_size, block_size, hnd;
    float scale, soft_cap; /* no cap if that is 0 */
} Shape;

/* The tokens members[first] to members[first + count] in the spans first_span to end_span. All of them see the same blocks
   there. If `part` is negative, they see no other spans, and their result is written at once. Otherwise what is known of
   these spans is kept as that part of each token; only a first part is of more than one. */
typedef struct {
    int32_t first, count, first_span, end_span, part;
} Item;

/* Of each token of the step: its row, the positions that it sees (from starts to ends), and of those that have parts,
   which is the first and how many there are. `pending` holds that number too, and again after each call. The arrays named
   kv and slot are a BatchPlan's. */
typedef struct {
    int32_t num_items, num_tokens;
    const Item *items;
    const int32_t *members, *rows, *starts, *ends, *first_parts, *num_parts, *kv_indptr, *kv_indices, *slot_mapping;
    int32_t *pending;
    float *parts; /* 64-byte aligned, part_floats of each */
} Plan;

/* Rows of memory, `stride` bytes apart. */
typedef struct {
    const char *at;
    size_t stride;
} Rows;

/* What a call reads and writes. */
typedef struct {
    char *cache;
    const char *q, *k, *v; /* k is NULL if there is nothing to write */
    size_t q_stride, k_stride, v_stride; /* bytes from a token to the next */
    char *out; /* [tokens][heads][head size] */
    float *lse; /* [tokens][heads], natural logarithms; or NULL */
} Call;

/* Up to 16 queries over some spans: lane i is query i, and its sums are row i. */
typedef struct {
    __m512 max, weight;
    float *sums; /* [queries][head size] */
    int started;
} State;

/* Memory of one thread. */
typedef struct {
    uint32_t queries[QUERIES * HEAD_SIZE / 2]; /* for each unit [pairs of elements][16 or 4 queries] */
    uint16_t keys[SPAN * HEAD_SIZE];           /* those that can't be read where they lie */
    uint32_t values[SPAN / 2 * HEAD_SIZE];     /* tiles of 16 pairs of tokens and 16 elements */
    float scores[2 * SPAN * TILE];             /* [tokens][4 queries], or of two units [tokens][16] */
    uint16_t weights[HEADS][TILE * SPAN];      /* for each unit [queries][tokens] */
    float sums[TILE * HEAD_SIZE];
    float folded[QUERIES * HEAD_SIZE];         /* for each unit [queries][head size] */
} __attribute__((aligned(64))) Work;

_Static_assert(HEADS >= COLUMNS && HEADS * FEW <= QUERIES, "a unit is a head of a small item or a column of another");

/* ---- memory ---- */

/* A span of an item: those of its tokens that are seen, from `from` to `to`, and where they are. The others, up to whole
   tiles, have no address, for there may be anything. */
typedef struct {
    int from, to, begin, end;
    const char *tokens[SPAN];
} Place;

/* Keys and values of a place that are asked for while another one is computed, some tokens at a time, so that reading
   memory and computing take their time together: `pieces` of `bytes` each, of keys and of values. */
typedef struct {
    const Place *place;
    int token, quota, pieces, bytes;
    size_t keys, piece, values; /* from a token's address; from a piece to the next; and from keys to values */
} Request;

INLINE void ask(Request *r) {
    const int end = r->token + r->quota < r->place->end ? r->token + r->quota : r->place->end;
    for (; r->token < end; r->token++) {
        const char *at = r->place->tokens[r->token] + r->keys;
        for (int i = 0; i < r->pieces && r->place->tokens[r->token]; i++, at += r->piece) {
            for (int byte = 0; byte < r->bytes; byte += 64) {
                __builtin_prefetch(at + byte, 0, 2);
                __builtin_prefetch(at + r->values + byte, 0, 2);
            }
        }
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
        if (t % DEPTH == 0) ask(request);
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

/* ---- several spans ---- */

/* Takes up what a next span gave for `queries` queries. */
INLINE void fold(const int size, const Shape *s, int queries, State *state, const State *next) {
    const __m512 scale = _mm512_set1_ps(exponent_scale(s)), top = _mm512_max_ps(next->max, state->max), from = or_zero(top);
    const __m512 old = power_of_two((state->max - from) * scale), new = power_of_two((next->max - from) * scale);
    float shares[2][TILE] __attribute__((aligned(64)));
    _mm512_store_ps(shares[0], old);
    _mm512_store_ps(shares[1], new);
    state->max = top;
    state->weight = _mm512_fmadd_ps(state->weight, old, next->weight * new);
    for (int i = 0; i < queries; i++) {
        const __m512 mine = _mm512_set1_ps(shares[0][i]), theirs = _mm512_set1_ps(shares[1][i]);
        for (int d = i * size; d < (i + 1) * size; d += TILE)
            _mm512_store_ps(state->sums + d, _mm512_fmadd_ps(_mm512_load_ps(state->sums + d), mine,
                                                             _mm512_load_ps(next->sums + d) * theirs));
    }
}

/* Writes the result of `head` of `token`, from its sums and the rest of its state. */
INLINE void finish(const int size, const Shape *s, float max, float weight, const float *sums, int token, int head,
                   const Call *call) {
    const __m512 share = _mm512_set1_ps(1 / weight);
    const size_t at = (size_t)token * s->num_heads + head;
    for (int d = 0; d < size; d += DEPTH) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_load_ps(sums + d + TILE) * share, _mm512_load_ps(sums + d) * share);
        _mm512_storeu_si512(call->out + (at * size + d) * 2, (__m512i)both);
    }
    if (call->lse) call->lse[at] = max * (s->soft_cap ? 1 : s->scale) + logf(weight);
}

/* A part of a token: the largest scores and the weights of all heads, in whole vectors, and their sums. */
INLINE int padded_heads(const Shape *s) { return (s->num_heads + TILE - 1) / TILE * TILE; }
INLINE size_t part_floats(const Shape *s) { return padded_heads(s) * (2 + (size_t)s->head_size); }

INLINE State part_of(const Shape *s, float *part, int head) {
    const int heads = padded_heads(s);
    return (State){_mm512_load_ps(part + head), _mm512_load_ps(part + heads + head), part + 2 * heads + head * s->head_size, 1};
}

INLINE void keep(const int size, const Shape *s, float max, float weight, const float *sums, float *part, int head) {
    const int heads = padded_heads(s);
    part[head] = max;
    part[heads + head] = weight;
    memcpy(part + 2 * heads + head * size, sums, size * sizeof(float));
}

/* Folds a token's parts, the last of which was just kept, and writes the result. */
INLINE void merge(const int size, const Shape *s, const Plan *plan, int token, const Call *call) {
    const size_t floats = part_floats(s);
    for (int head = 0; head < s->num_heads; head += TILE) {
        const int heads = s->num_heads - head < TILE ? s->num_heads - head : TILE;
        float *parts = plan->parts + plan->first_parts[token] * floats;
        State state = part_of(s, parts, head);
        for (int i = 1; i < plan->num_parts[token]; i++) {
            const State next = part_of(s, parts + i * floats, head);
            fold(size, s, heads, &state, &next);
        }
        for (int i = 0; i < heads; i++)
            finish(size, s, ((float *)&state.max)[i], ((float *)&state.weight)[i], state.sums + i * size, token, head + i, call);
    }
}

/* ---- an item ---- */

INLINE int within(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
INLINE int down(int x) { return x / DEPTH * DEPTH; }
INLINE int up(int x) { return down(x + DEPTH - 1); }

/* What an item or a unit sees, as positions: lane i of a unit is query i. */
typedef struct {
    __m512i starts, stops;
    int first_start, last_start, first_stop, last_stop;
} Sight;

static void locate(const Shape *s, const Plan *plan, const Item *item, int span, const Sight *sight, const char *cache, Place *p) {
    const int position = span * SPAN, row = plan->rows[plan->members[item->first]];
    const int32_t *blocks = plan->kv_indices + plan->kv_indptr[row];
    const size_t vector = 2 * (size_t)s->head_size, values = vector * s->num_kv_heads * s->block_size;
    const size_t stride = s->hnd ? vector : vector * s->num_kv_heads;
    p->from = within(sight->first_start - position, 0, SPAN), p->to = within(sight->last_stop - position, 0, SPAN);
    p->begin = down(p->from), p->end = up(p->to);
    memset(p->tokens, 0, sizeof p->tokens);
    int block = (position + p->from) / s->block_size, slot = (position + p->from) % s->block_size;
    for (int t = p->from; t < p->to; block++, slot = 0) {
        const char *at = cache + (size_t)blocks[block] * 2 * values + slot * stride;
        for (; slot < s->block_size && t < p->to; slot++, t++, at += stride) p->tokens[t] = at;
    }
}

/* A place's keys, `offset` bytes from its tokens' addresses: where they lie, or copied if a block may end within a tile. */
INLINE void keys_of(const int size, const Shape *s, const Place *p, size_t offset, size_t stride, uint16_t *copies, Rows *keys) {
    for (int t = p->begin; t < p->end; t += TILE) {
        uint16_t *copy = copies + t * size;
        const int together = s->block_size % TILE == 0 && p->from <= t && t + TILE <= p->to;
        keys[t / TILE] = together ? (Rows){p->tokens[t] + offset, stride} : (Rows){(char *)copy, 2 * size};
        for (int i = t; !together && i < t + TILE; i++, copy += size) {
            if (p->tokens[i]) memcpy(copy, p->tokens[i] + offset, 2 * size);
            else memset(copy, 0, 2 * size);
        }
    }
}

INLINE Sight sight_of(const int n, const Plan *plan, const int32_t *members, int group, int first, int queries) {
    int32_t starts[TILE] __attribute__((aligned(64))), stops[TILE] __attribute__((aligned(64)));
    Sight sight = {.first_start = INT32_MAX, .first_stop = INT32_MAX};
    for (int i = 0; i < TILE; i++) {
        const int query = first + i % n, token = members[(query < queries ? query : queries - 1) / group];
        starts[i] = plan->starts[token], stops[i] = plan->ends[token];
        if (starts[i] < sight.first_start) sight.first_start = starts[i];
        if (starts[i] > sight.last_start) sight.last_start = starts[i];
        if (stops[i] < sight.first_stop) sight.first_stop = stops[i];
        if (stops[i] > sight.last_stop) sight.last_stop = stops[i];
    }
    sight.starts = _mm512_load_si512(starts);
    sight.stops = _mm512_load_si512(stops);
    return sight;
}

static Sight sight_of_all(const Plan *plan, const Item *item) {
    Sight sight = {.first_start = INT32_MAX};
    for (int i = item->first; i < item->first + item->count; i++) {
        const int token = plan->members[i];
        if (plan->starts[token] < sight.first_start) sight.first_start = plan->starts[token];
        if (plan->ends[token] > sight.last_stop) sight.last_stop = plan->ends[token];
    }
    return sight;
}

/* Queries first to first + n of a key head as pairs of elements: each pair of all queries, and then the next. What is too
   many repeats the last query. */
INLINE void pack(const int n, const int size, const Shape *s, const Call *call, const int32_t *members, int head, int first,
                 int queries, uint32_t *packed) {
    const int group = s->num_heads / s->num_kv_heads;
    const char *from[TILE];
    for (int i = 0; i < n; i++) {
        const int query = first + i < queries ? first + i : queries - 1;
        from[i] = call->q + members[query / group] * call->q_stride + (head * group + query % group) * 2 * (size_t)size;
    }
    for (int d = 0; d < size / 2; d += TILE) {
        if (n == TILE) {
            __m512i x[TILE];
            for (int i = 0; i < TILE; i++) x[i] = _mm512_loadu_si512(from[i] + 4 * d);
            transpose(x);
            for (int i = 0; i < TILE; i++) _mm512_store_si512(packed + (d + i) * TILE, x[i]);
        } else {
            for (int i = 0; i < n; i++)
                for (int pair = d; pair < d + TILE; pair++) memcpy(packed + pair * n + i, from[i] + 4 * pair, 4);
        }
    }
}

/* An item's units are the key heads of a small one, HEADS at a time, and the columns of another, one key head at a time.
   `after` is the item that this thread has next, if there is one: its keys are asked for. */
INLINE void attend(const int n, const int size, const Shape *s, const Plan *plan, const Item *item, const Item *after,
                   const Call *call, Work *w) {
    const int group = s->num_heads / s->num_kv_heads, queries = item->count * group, small = n == FEW;
    const int32_t *members = plan->members + item->first;
    const size_t vector = 2 * size, values = vector * s->num_kv_heads * s->block_size;
    const size_t stride = s->hnd ? vector : vector * s->num_kv_heads, head_offset = s->hnd ? vector * s->block_size : vector;
    const Sight sight = sight_of_all(plan, item);
    Sight sights[COLUMNS];
    Place places[2], *here = &places[0], *next = &places[1];
    locate(s, plan, item, item->first_span, &sight, call->cache, next);
    for (int c = 0; c * n < queries; c++) sights[c] = sight_of(n, plan, members, group, c * n, queries);
    const int most_heads = !small ? 1 : size > 64 ? HEADS / 2 : HEADS;
    for (int head = 0, heads; head < s->num_kv_heads; head += heads) {
        heads = s->num_kv_heads - head < most_heads ? s->num_kv_heads - head : most_heads;
        const int units = small ? heads : (queries + n - 1) / n;
        State states[HEADS], got[HEADS];
        int ends[HEADS];
        for (int u = 0; u < units; u++) {
            pack(n, size, s, call, members, small ? head + u : head, small ? 0 : u * n, queries, w->queries + u * n * size / 2);
            states[u] = (State){.sums = w->folded + u * n * size};
        }
        for (int span = item->first_span; span < item->end_span; span++) {
            const int position = span * SPAN, last = span + 1 == item->end_span;
            size_t keys_asked = head * head_offset;
            Place *swap = here;
            here = next, next = swap;
            if (!last) {
                locate(s, plan, item, span + 1, &sight, call->cache, next);
            } else if (head + heads < s->num_kv_heads) {
                locate(s, plan, item, item->first_span, &sight, call->cache, next);
                keys_asked += heads * head_offset;
            } else if (after) {
                const Sight other = sight_of_all(plan, after);
                locate(s, plan, after, after->first_span, &other, call->cache, next);
                keys_asked = 0;
            } else {
                next->begin = next->end = 0;
            }
            Request request = {next, next->begin, 0, s->hnd ? heads : 1, s->hnd ? vector : heads * vector, keys_asked, head_offset, values};
            request.quota = 1 + (next->end - next->begin) / (1 + 4 * units * (here->end - here->begin) / DEPTH);
            Rows keys[SPAN / TILE];
            if (small) configure_for_scores(n);
            for (int u = 0; u < units; u++) {
                const Sight *seen = &sights[small ? 0 : u];
                const uint32_t *packed = w->queries + u * n * size / 2;
                float *scores = w->scores + (small ? 0 : u % 2 * SPAN * n);
                if (small || u == 0) keys_of(size, s, here, (head + (small ? u : 0)) * head_offset, stride, w->keys, keys);
                ends[u] = up(within(seen->last_stop - position, 0, SPAN));
                __asm__ volatile("" : : : "memory"); /* GCC does not know that tiles are loaded from memory */
                if (small || (u % 2 == 0 && u + 1 == units)) {
                    score(n, size, keys, here->begin, ends[u], packed, scores, &request);
                } else if (u % 2 == 0) {
                    const int end = up(within(sights[u + 1].last_stop - position, 0, SPAN));
                    score_two(size, keys, here->begin, ends[u] > end ? ends[u] : end, packed, scores, &request);
                }
                __asm__ volatile("" : : : "memory");
                if (ends[u] > here->begin)
                    weigh(n, s, scores, here->begin, ends[u], position, seen->starts, seen->stops, seen->last_start - position,
                          seen->first_stop - position, &got[u], w->weights[u], &request);
            }
            if (small) configure_for_values(n);
            for (int u = 0; u < units; u++) {
                const size_t offset = (small ? u : 0) * head_offset;
                if (small || u == 0)
                    arrange(size, here->tokens, values + head * head_offset + offset, here->begin, here->end, w->values,
                            &request);
                if (ends[u] <= here->begin) continue;
                got[u].sums = states[u].started ? w->sums : states[u].sums;
                __asm__ volatile("" : : : "memory");
                add_values(size, w->weights[u], w->values, here->begin, ends[u], got[u].sums, &request);
                __asm__ volatile("" : : : "memory");
                if (states[u].started) fold(size, s, small ? queries : n, &states[u], &got[u]);
                else states[u] = got[u], states[u].started = 1;
            }
        }
        for (int u = 0; u < units; u++) {
            const int of = small ? head + u : head, first = small ? 0 : u * n;
            float max[TILE] __attribute__((aligned(64))), weight[TILE] __attribute__((aligned(64)));
            _mm512_store_ps(max, states[u].max);
            _mm512_store_ps(weight, states[u].weight);
            for (int i = 0; i < n && first + i < queries; i++) {
                const int token = members[(first + i) / group], query_head = of * group + (first + i) % group;
                const float *sums = states[u].sums + i * size;
                if (item->part < 0) {
                    finish(size, s, max[i], weight[i], sums, token, query_head, call);
                } else {
                    float *part = plan->parts + (plan->first_parts[token] + item->part) * part_floats(s);
                    keep(size, s, max[i], weight[i], sums, part, query_head);
                }
            }
        }
    }
    for (int i = 0; item->part >= 0 && i < item->count; i++) {
        const int token = members[i];
        if (__atomic_sub_fetch(&plan->pending[token], 1, __ATOMIC_ACQ_REL) == 0) {
            plan->pending[token] = plan->num_parts[token];
            merge(size, s, plan, token, call);
        }
    }
}

/* Have the compiler make it for the usual head sizes. */
#define FOR_EACH_SIZE(n) \
    if (s->head_size == 64) attend(n, 64, s, plan, item, after, call, w); \
    else if (s->head_size == 128) attend(n, 128, s, plan, item, after, call, w); \
    else attend(n, s->head_size, s, plan, item, after, call, w);
static void attend_few(const Shape *s, const Plan *plan, const Item *item, const Item *after, const Call *call, Work *w) {
    FOR_EACH_SIZE(FEW)
}
static void attend_many(const Shape *s, const Plan *plan, const Item *item, const Item *after, const Call *call, Work *w) {
    FOR_EACH_SIZE(TILE)
}

/* Copies a token's key and value to its slot. */
static void write_token(const Shape *s, const Plan *plan, const Call *call, int token) {
    const int block = plan->slot_mapping[token] / s->block_size, slot = plan->slot_mapping[token] % s->block_size;
    const size_t vector = 2 * (size_t)s->head_size, values = vector * s->num_kv_heads * s->block_size;
    const size_t run = s->hnd ? vector : vector * s->num_kv_heads; /* bytes of a token that lie together */
    for (int i = 0; i < (s->hnd ? s->num_kv_heads : 1); i++) {
        char *to = call->cache + (size_t)block * 2 * values + (i * (size_t)s->block_size + slot) * run;
        memcpy(to, call->k + token * call->k_stride + i * run, run);
        memcpy(to + values, call->v + token * call->v_stride + i * run, run);
    }
}

/* ---- what Python calls ---- */

int kvproof_limits(int i) { return ((int[]){SPAN, QUERIES, HEAD_SIZE})[i]; }
size_t kvproof_work_bytes(void) { return sizeof(Work); }
size_t kvproof_part_floats(const Shape *s) { return part_floats(s); }

/* Writes the step's keys and values. */
void kvproof_write(const Shape *s, const Plan *plan, const Call *call) {
    for (int token = 0; token < plan->num_tokens; token++) write_token(s, plan, call, token);
}

/* Writes the step's keys and values if there are any, and then attends. `work` has kvproof_work_bytes for each thread. */
void kvproof_attend(const Shape *s, const Plan *plan, const Call *call, int threads, Work *work) {
    const int group = s->num_heads / s->num_kv_heads;
    int started = 0, taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (call->k) {
#pragma omp for schedule(static)
            for (int token = 0; token < plan->num_tokens; token++) write_token(s, plan, call, token);
        }
        /* Items are taken in their order, and one ahead. */
        Work *mine = &work[__atomic_fetch_add(&started, 1, __ATOMIC_RELAXED)];
        int i = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
        while (i < plan->num_items) {
            const int next = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
            const Item *item = &plan->items[i], *after = next < plan->num_items ? &plan->items[next] : NULL;
            if (item->count * group <= FEW) {
                attend_few(s, plan, item, after, call, mine);
            } else {
                configure_for_scores(TILE); /* it does for both */
                attend_many(s, plan, item, after, call, mine);
            }
            i = next;
        }
        _tile_release();
    }
}

/* A planned step on a cache. */
typedef struct {
    const Shape *shape;
    const Plan *plan;
    char *cache;
    size_t layer_bytes;
    Work *work;
    int threads;
} Context;

/* For compiled code; Python takes its address. */
void kvproof_attend_layer(const Context *c, int layer, const char *q, const char *k, const char *v, size_t stride, char *out) {
    const Call call = {c->cache + layer * c->layer_bytes, q, k, v, stride, stride, stride, out, NULL};
    kvproof_attend(c->shape, c->plan, &call, c->threads, c->work);
}

#endif
