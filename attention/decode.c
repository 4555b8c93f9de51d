/* Decode attention over a paged KV cache: every key and value is read once, where it lies.

   What a row (a sequence with one query token) sees is cut into spans of SPAN tokens, which depend on its length alone,
   and the threads share out the spans: so a row's result has the same bits in any batch and with any number of threads.
   A span goes through its keys, turns the scores into weights, and goes through its values, all in float32; whoever
   finishes a row's last span merges them. Query heads that share a key head share each read of it. Only tokens that the
   row sees are read.

   A layer of the cache is [blocks][2][slots][kv heads][head size], or [blocks][2][kv heads][slots][head size] (HND). */

#include "paged.h"

enum {
    SPAN = 512,       /* tokens */
    GROUP = 4,        /* query heads of one key head that are computed together; the registers hold no more */
    SETS = 8,         /* of up to GROUP query heads, whose scores are kept at once */
    AHEAD = 24,       /* tokens between asking for memory and reading it: the best of 8, 16, 24, 32 and 40 */
};
#define LOWEST (-0x1.fffffep127f)

typedef struct {
    int32_t dtype, num_heads, num_kv_heads, head_size, block_size, hnd;
    float scale, soft_cap; /* no cap if that is 0 */
} Shape;

/* The rows to attend for. Row r sees its tokens from starts[r] on, in the spans span_indptr[r] to span_indptr[r + 1];
   span_rows says the same the other way round. `pending` holds each row's number of spans (and again after each call).
   `work` is 64-byte aligned and has kvproof_span_bytes for each span. The other arrays are a BatchPlan's. */
typedef struct {
    int32_t num_spans;
    const int32_t *span_indptr, *span_rows, *kv_indptr, *kv_indices, *starts, *seq_lens;
    int32_t *pending;
    char *work;
} Plan;

/* What a span keeps of one query head. */
typedef struct {
    vec max;    /* of the scores so far, in every lane */
    vec weight; /* sums of e^(score - max), one per lane */
    vec data[]; /* query * scale, then the sum of e^(score - max) * value, each as pairs for padded(s) elements */
} Head;

INLINE int padded(const Shape *s) { return (s->head_size + PAIR - 1) / PAIR * PAIR; }
INLINE size_t head_bytes(const Shape *s) { return sizeof(Head) + 2 * padded(s) * sizeof(float); }
INLINE Head *head_at(const Shape *s, const void *heads, int i) { return (Head *)((char *)heads + i * head_bytes(s)); }

/* ---- attention ---- */

/* The scores of LANES tokens for `group` query heads of one key head, whose `keys` are here; head g's go to
   scores + g * SPAN. Meanwhile memory is asked for the keys `ahead`: processors don't foresee the steps between tokens. */
INLINE void score(const int dtype, const int size, const int group, const Shape *s, const void *heads,
                  const char *const *keys, const char *const *ahead, float *scores) {
    const int pairs = (size + PAIR - 1) / PAIR;
    const Head *head[GROUP];
    for (int g = 0; g < group; g++) head[g] = head_at(s, heads, g);

    vec partial[GROUP][LANES], x[2];
    for (int t = 0; t < LANES; t++) {
        vec sum[GROUP] = {0};
        for (int p = 0; p < pairs; p++) {
            load_at(dtype, keys[t], p * PAIR, size, x);
            prefetch(dtype, ahead[t], p * PAIR);
            for (int i = 0; i < 2; i++)
                for (int g = 0; g < group; g++) sum[g] += x[i] * head[g]->data[2 * p + i];
        }
        for (int g = 0; g < group; g++) partial[g][t] = sum[g];
    }
    for (int g = 0; g < group; g++) {
        vec total = sums(partial[g]);
        memcpy(scores + g * SPAN, &total, sizeof total);
    }
}

/* Turns a head's `count` scores into weights, e^(score - max). */
INLINE void weigh(const Shape *s, Head *head, float *scores, int count) {
    vec x, max = fill(LOWEST), weight = fill(0);
    for (int t = 0; s->soft_cap && t < count; t += LANES) {
        memcpy(&x, scores + t, sizeof x);
        x = s->soft_cap * hyperbolic_tangent(x / s->soft_cap);
        memcpy(scores + t, &x, sizeof x);
    }
    for (int t = count; t % LANES; t++) scores[t] = -INFINITY;
    for (int t = 0; t < count; t += LANES) {
        memcpy(&x, scores + t, sizeof x);
        max = choose(x > max, x, max);
    }
    max = largest(max);
    for (int t = 0; t < count; t += LANES) {
        memcpy(&x, scores + t, sizeof x);
        x = exponential(x - max);
        weight += x;
        memcpy(scores + t, &x, sizeof x);
    }
    head->max = max;
    head->weight = weight;
}

/* Adds n tokens' values, each times its weight, for `group` query heads. */
INLINE void add_values(const int dtype, const int size, const int group, const Shape *s, void *heads,
                       const char *const *values, const char *const *ahead, const float *weights, int n) {
    const int pairs = (size + PAIR - 1) / PAIR;
    Head *head[GROUP];
    for (int g = 0; g < group; g++) head[g] = head_at(s, heads, g);
    for (int p = 0; p < pairs; p++) {
        vec sum[GROUP][2], x[2];
        for (int g = 0; g < group; g++)
            for (int i = 0; i < 2; i++) sum[g][i] = head[g]->data[2 * (pairs + p) + i];
        for (int t = 0; t < n; t++) {
            load_at(dtype, values[t], p * PAIR, size, x);
            prefetch(dtype, ahead[t], p * PAIR);
            for (int g = 0; g < group; g++)
                for (int i = 0; i < 2; i++) sum[g][i] += x[i] * weights[g * SPAN + t];
        }
        for (int g = 0; g < group; g++)
            for (int i = 0; i < 2; i++) head[g]->data[2 * (pairs + p) + i] = sum[g][i];
    }
}

/* Have the compiler make both for each group size, and for the usual head sizes. */
#define FOR_EACH_GROUP(function, size, group, ...) \
    if (group == 1) function(dtype, size, 1, __VA_ARGS__); \
    if (group == 2) function(dtype, size, 2, __VA_ARGS__); \
    if (group == 3) function(dtype, size, 3, __VA_ARGS__); \
    if (group == 4) function(dtype, size, 4, __VA_ARGS__);
#define FOR_EACH_SIZE(function, size, group, ...) \
    if (size == 64) { FOR_EACH_GROUP(function, 64, group, __VA_ARGS__) } \
    else if (size == 128) { FOR_EACH_GROUP(function, 128, group, __VA_ARGS__) } \
    else { FOR_EACH_GROUP(function, size, group, __VA_ARGS__) }

/* Query heads of one key head that are computed together: the i-th such set of a model's. */
typedef struct {
    int kv_head, first, count;
} Set;

INLINE Set set_at(const Shape *s, int i) {
    const int group = s->num_heads / s->num_kv_heads, sets = (group + GROUP - 1) / GROUP, at = i % sets * GROUP;
    return (Set){i / sets, i / sets * group + at, group - at < GROUP ? group - at : GROUP};
}

/* Tokens `first` to first + count <= SPAN of a row. */
INLINE void span(const int dtype, const Shape *s, void *heads, const char *cache, const char *q, const int32_t *blocks,
                 int first, int count) {
    const int size = s->head_size, group = s->num_heads / s->num_kv_heads;
    const int num_sets = s->num_kv_heads * ((group + GROUP - 1) / GROUP);
    const size_t vector = size * width(dtype), values = vector * s->num_kv_heads * s->block_size;
    const size_t token = s->hnd ? vector : vector * s->num_kv_heads, kv_head = s->hnd ? vector * s->block_size : vector;

    for (int h = 0; h < s->num_heads; h++) {
        Head *head = head_at(s, heads, h);
        memset(head, 0, head_bytes(s));
        for (int d = 0; d < size; d += PAIR) {
            vec *x = head->data + d / LANES;
            load_at(dtype, q + h * vector, d, size, x);
            x[0] *= s->scale, x[1] *= s->scale;
        }
    }
    const char *tokens[SPAN + AHEAD + LANES], *here[LANES], *ahead[LANES];
    int block = first / s->block_size, slot = first % s->block_size;
    for (int t = 0; t < count; t++) {
        tokens[t] = cache + (size_t)blocks[block] * 2 * values + slot * token;
        if (++slot == s->block_size) slot = 0, block++;
    }
    /* Behind the last key come the first values: to be asked for, and to fill the last tile of keys up. */
    for (int t = 0; t < AHEAD + LANES; t++) tokens[count + t] = tokens[t % count] + values;

    float scores[SETS][GROUP][SPAN] __attribute__((aligned(64)));
    for (int start = 0; start < num_sets; start += SETS) {
        const int end = num_sets - start < SETS ? num_sets : start + SETS;
        for (int t = 0; t < count; t += LANES) {
            for (int i = start; i < end; i++) {
                const Set set = set_at(s, i);
                void *mine = head_at(s, heads, set.first);
                for (int l = 0; l < LANES; l++) {
                    here[l] = tokens[t + l] + set.kv_head * kv_head;
                    ahead[l] = tokens[t + l + AHEAD] + set.kv_head * kv_head;
                }
                FOR_EACH_SIZE(score, size, set.count, s, mine, here, ahead, &scores[i - start][0][t])
            }
        }
        for (int i = start; i < end; i++) {
            const Set set = set_at(s, i);
            for (int g = 0; g < set.count; g++) weigh(s, head_at(s, heads, set.first + g), scores[i - start][g], count);
        }
        for (int t = 0; t < count; t += LANES) {
            const int n = count - t < LANES ? count - t : LANES;
            for (int i = start; i < end; i++) {
                const Set set = set_at(s, i);
                void *mine = head_at(s, heads, set.first);
                for (int l = 0; l < LANES; l++) {
                    here[l] = tokens[t + l] + set.kv_head * kv_head + values;
                    ahead[l] = tokens[t + l + AHEAD] + set.kv_head * kv_head + values;
                }
                FOR_EACH_SIZE(add_values, size, set.count, s, mine, here, ahead, &scores[i - start][0][t], n)
            }
        }
    }
}

/* A row's result from its spans, in their order; and into `lse`, if there is one, each head's log-sum-exp. */
INLINE void merge(const int dtype, const Shape *s, const char *spans, int count, char *out, float *lse) {
    const int size = s->head_size, heads = s->num_heads, pairs = padded(s) / PAIR;
    for (int h = 0; h < heads; h++) {
        Head *head = head_at(s, spans, h);
        vec top = fill(LOWEST), weight = fill(0);
        for (int i = 0; i < count; i++) {
            vec max = head_at(s, spans, i * heads + h)->max;
            top = choose(max > top, max, top);
        }
        for (int i = 0; i < count; i++) {
            const Head *part = head_at(s, spans, i * heads + h);
            vec share = exponential(part->max - top);
            weight += part->weight * share;
            for (int v = 2 * pairs; v < 4 * pairs; v++)
                head->data[v] = (i ? head->data[v] : fill(0)) + part->data[v] * share;
        }
        weight = total(weight);
        if (lse) lse[h] = top[0] + logf(weight[0]);
        weight = 1 / weight;
        for (int d = 0; d < size; d += PAIR) {
            vec *x = head->data + 2 * pairs + d / LANES;
            x[0] *= weight, x[1] *= weight;
            store_at(dtype, out + (size_t)h * size * width(dtype), d, size, x);
        }
    }
}

/* Span i of the plan, and the row's result if no other span of it is pending. */
INLINE void attend(const int dtype, const Shape *s, const Plan *plan, int i, const char *cache, const char *q,
                   size_t q_stride, char *out, float *lse) {
    const size_t bytes = s->num_heads * head_bytes(s), out_stride = (size_t)s->num_heads * s->head_size * width(dtype);
    const int row = plan->span_rows[i], row_start = plan->span_indptr[row];
    const int spans = plan->span_indptr[row + 1] - row_start, first = plan->starts[row] + (i - row_start) * SPAN;
    const int left = plan->seq_lens[row] - first, count = left < SPAN ? left : SPAN;
    const int32_t *blocks = plan->kv_indices + plan->kv_indptr[row];
    span(dtype, s, plan->work + i * bytes, cache, q + row * q_stride, blocks, first, count);
    if (__atomic_sub_fetch(&plan->pending[row], 1, __ATOMIC_ACQ_REL) == 0) {
        plan->pending[row] = spans;
        merge(dtype, s, plan->work + row_start * bytes, spans, out + row * out_stride,
              lse ? lse + (size_t)row * s->num_heads : NULL);
    }
}

/* ---- what Python calls ---- */

int kvproof_span_tokens(void) { return SPAN; }
size_t kvproof_span_bytes(const Shape *s) { return s->num_heads * head_bytes(s); }

/* Attention of the plan's rows: `out` [rows, heads, head size] from `q`, whose rows are q_stride bytes apart; and `lse`
   [rows, heads], natural logarithms, unless it is NULL. */
void kvproof_decode(const Shape *s, const Plan *plan, int threads, const char *cache, const char *q, size_t q_stride,
                    char *out, float *lse) {
    /* The types are told apart inside the loop: its body is a function to the compiler, which must know the type. */
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int i = 0; i < plan->num_spans; i++) {
        if (s->dtype == FLOAT32) attend(FLOAT32, s, plan, i, cache, q, q_stride, out, lse);
        if (s->dtype == BFLOAT16) attend(BFLOAT16, s, plan, i, cache, q, q_stride, out, lse);
        if (s->dtype == FLOAT16) attend(FLOAT16, s, plan, i, cache, q, q_stride, out, lse);
    }
}

/* Copies token t's key and value, k_stride and v_stride bytes after those before, to slot_mapping[t]. */
void kvproof_write(const Shape *s, int tokens, const int32_t *slot_mapping, char *cache, const char *k, size_t k_stride,
                   const char *v, size_t v_stride) {
    const size_t vector = s->head_size * width(s->dtype);
    for (int t = 0; t < tokens; t++)
        write_slot(cache, slot_mapping[t], vector, s->num_kv_heads, s->block_size, s->hnd, k + t * k_stride, v + t * v_stride);
}
