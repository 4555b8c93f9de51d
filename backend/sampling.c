/* The largest logit of each row: one pass over memory, at a vector's speed. */

#include "vectors.h"

enum { BLOCK = 8 * PAIR };

/* Elements d to d + PAIR as floats, in their order. */
INLINE void in_order(const int dtype, const char *row, int d, float out[PAIR]) {
    vec pair[2];
    load(dtype, row + d * width(dtype), pair);
    for (int i = 0; i < PAIR; i++) out[i] = dtype == FLOAT32 ? pair[i / LANES][i % LANES] : pair[i % 2][i / 2];
}

/* The first largest of a row's `size` elements, which are whole PAIRs; any NaN is larger than all else. */
INLINE int64_t first_largest(const int dtype, int size, const char *row) {
    float largest_so_far = -INFINITY;
    int block = 0, is_nan = 0;
    for (int start = 0; start < size && !is_nan; start += BLOCK) {
        vec max = fill(-INFINITY), pair[2];
        ints nan = {0};
        for (int d = start; d < start + BLOCK && d < size; d += PAIR) {
            load(dtype, row + d * width(dtype), pair);
            for (int i = 0; i < 2; i++) {
                max = choose(pair[i] > max, pair[i], max);
                nan |= pair[i] != pair[i];
            }
        }
        for (int i = 0; i < LANES; i++) is_nan |= nan[i];
        const float here = largest(max)[0];
        if (is_nan || here > largest_so_far) largest_so_far = here, block = start;
    }
    for (int d = block; d < size; d += PAIR) {
        float x[PAIR];
        in_order(dtype, row, d, x);
        for (int i = 0; i < PAIR; i++)
            if (is_nan ? x[i] != x[i] : x[i] == largest_so_far) return d + i;
    }
    return 0;
}

/* ---- what Python calls ---- */

/* out [rows], of contiguous x [rows, size]. */
void kvproof_first_largest(int dtype, int threads, int rows, int size, const char *x, int64_t *out) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int r = 0; r < rows; r++) {
        const char *row = x + (size_t)r * size * width(dtype);
        if (dtype == FLOAT32) out[r] = first_largest(FLOAT32, size, row);
        if (dtype == BFLOAT16) out[r] = first_largest(BFLOAT16, size, row);
        if (dtype == FLOAT16) out[r] = first_largest(FLOAT16, size, row);
    }
}
