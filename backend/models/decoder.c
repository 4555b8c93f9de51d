/* The two halves of a decoder layer around its attention, each in one call: what `layers.c` and `linear.c` do one by one,
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

/* From x to q, k and v. The first layer has no delta. */
void kvproof_before_attention(const Layer *l, const Step *s, int first) {
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        add_rms_norms(BFLOAT16, s->rows, s->hidden, s->x, first ? NULL : s->delta, l->attention_norm, s->eps, s->normed);
        project(&l->qkv, s->threads, s->rows, s->normed, 2 * (size_t)s->hidden, (uint16_t *)s->qkv);
        rotate_heads(BFLOAT16, s->rows, s->heads, s->turned, s->head_size, s->qkv, s->cos, s->sin);
    }
}

/* From what was attended [rows, attended] to the next delta. */
void kvproof_after_attention(const Layer *l, const Step *s, const char *attended) {
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        project(&l->output, s->threads, s->rows, attended, 2 * (size_t)l->output.inputs, (uint16_t *)s->delta);
        add_rms_norms(BFLOAT16, s->rows, s->hidden, s->x, s->delta, l->mlp_norm, s->eps, s->normed);
        project(&l->gate_up, s->threads, s->rows, s->normed, 2 * (size_t)s->hidden, (uint16_t *)s->gated);
        project(&l->down, s->threads, s->rows, s->gated, 2 * (size_t)s->inner, (uint16_t *)s->delta);
    }
}

#endif
