/* Attention over a paged KV cache on the matrix unit, in bfloat16: decodes and prefills alike, read where they lie.

   Sequences are cut at every SPAN tokens. Of a query and a span we keep the largest score, the sum of the weights
   e^(score - largest), and the sum of the values times their weights, which are rounded to bfloat16 for it. A query's
   spans are folded in their order. None of this depends on what else is computed, so a token's result has the same bits
   alone and in any batch, as a decode and in a prefill of any length, and with any number of threads, if values are finite
   (0 times infinity is NaN, also for a token that does not see it).

   Queries of one key head are the columns of a product: 16 of them, or 4 where there are no more. Neighbouring tokens of
   a prefill go through a span together, and so do rows that name the same blocks from the beginning on (Juravsky et al.
   2024, "Hydragen"; FlashInfer's cascade).

   A layer of the cache is [blocks][2][slots][kv heads][head size], or [blocks][2][kv heads][slots][head size] (HND). */

#include "paged.h"
#include "tiled_span.h"

#ifdef HAVE_TILES

enum {
    QUERIES = 96, /* of one key head in an item, at most */
    COLUMNS = QUERIES / TILE,
    HEADS = 8,    /* key heads that an item of few queries goes through together: to configure the unit takes its time */
};

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

/* What a call reads and writes. */
typedef struct {
    char *cache;
    const char *q, *k, *v; /* k is NULL if there is nothing to write */
    size_t q_stride, k_stride, v_stride; /* bytes from a token to the next */
    char *out; /* [tokens][heads][head size] */
    float *lse; /* [tokens][heads], natural logarithms; or NULL */
} Call;

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

/* Writes what is known of a unit's queries, `first` to first + n of the item's for a key head, or keeps it as parts. */
INLINE void conclude(const int n, const int size, const Shape *s, const Plan *plan, const Item *item, const State *state, int head,
                     int first, const Call *call) {
    const int group = s->num_heads / s->num_kv_heads, queries = item->count * group;
    float max[TILE] __attribute__((aligned(64))), weight[TILE] __attribute__((aligned(64)));
    _mm512_store_ps(max, state->max);
    _mm512_store_ps(weight, state->weight);
    for (int i = 0; i < n && first + i < queries; i++) {
        const int token = plan->members[item->first + (first + i) / group], query_head = head * group + (first + i) % group;
        const float *sums = state->sums + i * size;
        if (item->part < 0) {
            finish(size, s, max[i], weight[i], sums, token, query_head, call);
        } else {
            float *part = plan->parts + (plan->first_parts[token] + item->part) * part_floats(s);
            keep(size, s, max[i], weight[i], sums, part, query_head);
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
    const int most_heads = !small ? 1 : size > 64 ? HEADS / 2 : HEADS; /* more would not stay in the cache */
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
            const int calls = 10 * units * (here->end - here->begin) / DEPTH; /* of `ask`, about */
            Request request = {
                .place = next, .token = next->begin, .values = values, .keys = keys_asked, .apart = head_offset,
                .pieces = s->hnd ? heads : 1, .bytes = s->hnd ? vector : heads * vector,
            };
            request.quota = 1 + (next->end - next->begin) * request.pieces * request.bytes / 64 / (1 + calls);
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
        for (int u = 0; u < units; u++)
            conclude(n, size, s, plan, item, &states[u], small ? head + u : head, small ? 0 : u * n, call);
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

static void write_token(const Shape *s, const Plan *plan, const Call *call, int token) {
    const char *k = call->k + token * call->k_stride, *v = call->v + token * call->v_stride;
    write_slot(call->cache, plan->slot_mapping[token], 2 * (size_t)s->head_size, s->num_kv_heads, s->block_size, s->hnd, k, v);
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
