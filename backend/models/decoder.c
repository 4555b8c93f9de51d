/* A decoder's layers, all in one call or what is between two attentions in one: what `layers.c` and `linear.c` do one by one,
   with the same bits. A decode step of a small model has hundreds of such operations, of microseconds each. */

#include "layers.c"
#include "linear.c"

#ifdef HAVE_TILES

typedef struct {
    const char *attention_norm, *mlp_norm;
    Weight qkv, output, gate_up, down;
} Layer;

/* A step's rows of `hidden` elements, and what the layers write and read in turn: `normed` [rows, hidden], `qkv` [rows,
   heads, head_size], of which the first `turned` heads are rotated, `gated` [rows, inner], and `delta` [rows, hidden], which
   is to be added to `x` before anything else. */
typedef struct {
    int threads, rows, hidden, heads, turned, head_size, inner;
    float eps;
    const char *cos, *sin;
    char *x, *normed, *qkv, *gated, *delta;
} Step;

/* From x to q, k and v, by the threads of a parallel region. The first layer has no delta. */
static void before_attention(const Layer *l, const Step *s, int first) {
    add_rms_norms(BFLOAT16, s->rows, s->hidden, s->x, first ? NULL : s->delta, l->attention_norm, s->eps, s->normed);
    project(&l->qkv, s->threads, s->rows, s->normed, 2 * (size_t)s->hidden, (uint16_t *)s->qkv);
    rotate_heads(BFLOAT16, s->rows, s->heads, s->turned, s->head_size, s->qkv, s->cos, s->sin);
}

/* From what was attended [rows, attended] to the next delta, likewise. */
static void after_attention(const Layer *l, const Step *s, const char *attended) {
    project(&l->output, s->threads, s->rows, attended, 2 * (size_t)l->output.inputs, (uint16_t *)s->delta);
    add_rms_norms(BFLOAT16, s->rows, s->hidden, s->x, s->delta, l->mlp_norm, s->eps, s->normed);
    project(&l->gate_up, s->threads, s->rows, s->normed, 2 * (size_t)s->hidden, (uint16_t *)s->gated);
    project(&l->down, s->threads, s->rows, s->gated, 2 * (size_t)s->inner, (uint16_t *)s->delta);
}

/* ---- what Python calls ---- */

/* From what was attended in layer `done` to q, k and v of layer `next`. The first layer comes after none, and none after the
   last. */
void kvproof_between_attention(const Layer *done, const Layer *next, const Step *s, const char *attended) {
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        if (done) after_attention(done, s, attended);
        if (next) before_attention(next, s, !done);
    }
}

/* `CompiledAttention` of Python. */
typedef void (*Attend)(void *context, int layer, const char *q, const char *k, const char *v, size_t stride, char *out);

/* All layers. `attended` [rows, query heads, head_size] is memory for what `attend` returns. */
void kvproof_decoder(const Layer *layers, int count, const Step *s, Attend attend, void *context, char *attended) {
    const size_t head = 2 * (size_t)s->head_size;
    const int kv_heads = s->heads - s->turned;
    const char *k = s->qkv + (s->turned - kv_heads) * head, *v = k + kv_heads * head;
    kvproof_between_attention(NULL, layers, s, NULL);
    for (int i = 0; i < count; i++) {
        attend(context, i, s->qkv, k, v, s->heads * head, attended);
        kvproof_between_attention(layers + i, i + 1 < count ? layers + i + 1 : NULL, s, attended);
    }
}

#endif
