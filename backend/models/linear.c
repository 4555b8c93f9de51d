/* Linear projections in bfloat16 on the processor's matrix unit (Intel AMX), each weight read once for up to 32 rows.

   A weight [outputs, inputs] lies in panels of 32 outputs. A panel is a run of tiles, each 16 outputs by 32 inputs in the
   order that TDPBF16PS wants (pairs of inputs, each for all 16 outputs), and the two tiles of the same inputs are
   neighbours: so a thread reads its panels from the first byte to the last. Sums are float32, over the inputs in order, and
   rounded once: a row has the same bits alone and in any batch, and with any number of threads. */

#include "tiles.h"

#ifdef HAVE_TILES

enum {
    ROWS = 2 * TILE,     /* rows of x that are computed together */
    PANEL = 2 * TILE,    /* outputs that are */
    GROUP = 4,           /* panels that go through all rows before the next ones do: they stay in the cache meanwhile */
    AHEAD = 64 * 1024,   /* bytes between asking for a weight and reading it */
};

/* 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights. */
static void configure(int rows) {
    const int first = rows > TILE ? TILE : rows, second = rows > TILE ? rows - TILE : 1;
    configure_tiles((int[]){first, first, second, second, first, second, TILE, TILE}, (int[]){64, 64, 64, 64, 64, 64, 64, 64});
}

INLINE void ask_for(const char *tile) {
    for (int byte = 0; byte < TILE_BYTES; byte += 64) __builtin_prefetch(tile + byte, 0, 2);
}

INLINE vec wide(__m256i halves) { return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16); }
INLINE __m256i narrow(vec x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); } /* subnormal numbers become 0 */

/* silu(gate) * up, rounded where `silu_mul` in layers.c rounds. */
INLINE __m256i gate_times_up(vec gate, vec up) { return narrow(wide(narrow(silu(wide(narrow(gate))))) * wide(narrow(up))); }

typedef struct {
    int inputs, outputs, gated; /* gated: a panel's first tiles are gates and its second ones ups, of 16 results */
    const char *panels;
    const uint16_t *bias; /* or NULL */
} Weight;

/* Up to ROWS rows of x, `stride` bytes apart, by a panel. Weights are asked for `ahead` if they come from memory. */
INLINE void multiply(const int two, int rows, const Weight *w, int panel, const char *x, size_t stride, int ahead, uint16_t *y) {
    float sums[ROWS][2][TILE] __attribute__((aligned(64)));
    const char *weights = w->panels + (size_t)panel * w->inputs / DEPTH * 2 * TILE_BYTES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < w->inputs; k += DEPTH, weights += 2 * TILE_BYTES) {
        _tile_stream_loadd(6, weights, 64);
        _tile_loadd(4, x + 2 * k, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (ahead) ask_for(weights + AHEAD);
        _tile_stream_loadd(7, weights + TILE_BYTES, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (ahead) ask_for(weights + AHEAD + TILE_BYTES);
        if (two) {
            _tile_loadd(5, x + TILE * stride + 2 * k, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], sizeof sums[0]);
    _tile_stored(1, sums[0][1], sizeof sums[0]);
    if (two) {
        _tile_stored(2, sums[TILE][0], sizeof sums[0]);
        _tile_stored(3, sums[TILE][1], sizeof sums[0]);
    }
    vec bias[2] = {0};
    for (int half = 0; w->bias && half < 2; half++) bias[half] = wide(_mm256_loadu_si256((__m256i *)(w->bias + panel * PANEL + half * TILE)));
    for (int r = 0; r < rows; r++) {
        vec sum[2];
        memcpy(sum, sums[r], sizeof sum);
        for (int half = 0; half < 2; half++) sum[half] += bias[half];
        if (w->gated) {
            uint16_t *to = y + r * (size_t)(w->outputs / 2) + panel * TILE;
            _mm256_storeu_si256((__m256i *)to, gate_times_up(sum[0], sum[1]));
        } else {
            uint16_t *to = y + r * (size_t)w->outputs + panel * PANEL;
            _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)sum[1], (__m512)sum[0]));
        }
    }
}

/* y [rows, outputs], or [rows, outputs / 2] if gated, of x [rows, inputs], whose rows are `stride` bytes apart: by the
   `threads` of a parallel region. */
static void project(const Weight *w, int threads, int rows, const char *x, size_t stride, uint16_t *y) {
    const int panels = w->outputs / PANEL, results = w->gated ? w->outputs / 2 : w->outputs;
#pragma omp for schedule(static)
    for (int part = 0; part < threads; part++) {
        const int end = (int64_t)panels * (part + 1) / threads;
        int configured = 0;
        __asm__ volatile("" : : : "memory"); /* GCC does not know that tiles are loaded from memory: x was just written */
        for (int group = (int64_t)panels * part / threads; group < end; group += GROUP) {
            for (int r = 0; r < rows; r += ROWS) {
                const int n = rows - r < ROWS ? rows - r : ROWS;
                if (n != configured) configure(configured = n);
                for (int panel = group; panel < group + GROUP && panel < end; panel++) {
                    const char *from = x + r * stride;
                    uint16_t *to = y + (size_t)r * results;
                    if (n > TILE) multiply(1, n, w, panel, from, stride, r == 0, to);
                    else multiply(0, n, w, panel, from, stride, r == 0, to);
                }
            }
        }
        if (configured) _tile_release();
    }
}

/* ---- what Python calls ---- */

void kvproof_linear(const Weight *w, int threads, int rows, const char *x, size_t stride, uint16_t *y) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    project(w, threads, rows, x, stride, y);
}

#endif
