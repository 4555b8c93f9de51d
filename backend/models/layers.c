/* What a decoder layer does between its matrix products, one pass over memory each. Results are rounded where PyTorch's
   operators would round them. Rows are contiguous; `threads` share them out. */

#include "vectors.h"

/* x += delta (unless that is NULL), then out = x / sqrt(mean(x^2) + eps) * weight. */
INLINE void add_rms_norm(const int dtype, int size, char *x, const char *delta, const char *weight, float eps, char *out) {
    vec a[2], b[2], squares = fill(0);
    for (int d = 0; d < size; d += PAIR) {
        load_at(dtype, x, d, size, a);
        if (delta) {
            load_at(dtype, delta, d, size, b);
            for (int i = 0; i < 2; i++) a[i] = rounded(dtype, a[i] + b[i]);
            store_at(dtype, x, d, size, a);
        }
        squares += a[0] * a[0] + a[1] * a[1];
    }
    const float scale = 1 / sqrtf(total(squares)[0] / size + eps);
    for (int d = 0; d < size; d += PAIR) {
        load_at(dtype, x, d, size, a);
        load_at(dtype, weight, d, size, b);
        for (int i = 0; i < 2; i++) a[i] = a[i] * scale * b[i];
        store_at(dtype, out, d, size, a);
    }
}

/* Turns a head, in place: its halves x and y become x * cos + y * sin, each half with factors of its own. */
INLINE void rotate(const int dtype, int half, char *head, const char *cos, const char *sin) {
    const size_t other = half * width(dtype);
    vec x[2], y[2], cos_x[2], cos_y[2], sin_x[2], sin_y[2];
    for (int d = 0; d < half; d += PAIR) {
        load_at(dtype, head, d, half, x);
        load_at(dtype, head + other, d, half, y);
        load_at(dtype, cos, d, half, cos_x);
        load_at(dtype, cos + other, d, half, cos_y);
        load_at(dtype, sin, d, half, sin_x);
        load_at(dtype, sin + other, d, half, sin_y);
        for (int i = 0; i < 2; i++) {
            const vec before = x[i];
            x[i] = rounded(dtype, x[i] * cos_x[i]) + y[i] * sin_x[i];
            y[i] = rounded(dtype, y[i] * cos_y[i]) + before * sin_y[i];
        }
        store_at(dtype, head, d, half, x);
        store_at(dtype, head + other, d, half, y);
    }
}

/* out = silu(gate) * up. */
INLINE void silu_mul(const int dtype, int size, const char *gate, const char *up, char *out) {
    vec x[2], y[2];
    for (int d = 0; d < size; d += PAIR) {
        load_at(dtype, gate, d, size, x);
        load_at(dtype, up, d, size, y);
        for (int i = 0; i < 2; i++) x[i] = rounded(dtype, silu(x[i])) * y[i];
        store_at(dtype, out, d, size, x);
    }
}

/* A loop's body is a function to the compiler when threads share it out: it is there that the type must be known. Outside
   of a parallel region, one thread does all of it. */
#define EACH_ROW(dtype, call_for) \
    _Pragma("omp for") \
    for (int r = 0; r < rows; r++) { \
        if (dtype == FLOAT32) call_for(FLOAT32); \
        if (dtype == BFLOAT16) call_for(BFLOAT16); \
        if (dtype == FLOAT16) call_for(FLOAT16); \
    }

static void add_rms_norms(int dtype, int rows, int size, char *x, const char *delta, const char *weight, float eps, char *out) {
    const size_t row = size * width(dtype);
#define CALL(dtype) add_rms_norm(dtype, size, x + r * row, delta ? delta + r * row : NULL, weight, eps, out + r * row)
    EACH_ROW(dtype, CALL)
#undef CALL
}

static void rotate_heads(int dtype, int rows, int heads, int turned, int size, char *x, const char *cos, const char *sin) {
    const size_t head = size * width(dtype);
#define CALL(dtype) \
    for (int h = 0; h < turned; h++) \
        rotate(dtype, size / 2, x + (r * (size_t)heads + h) * head, cos + r * head, sin + r * head)
    EACH_ROW(dtype, CALL)
#undef CALL
}

static void silu_muls(int dtype, int rows, int size, const char *gate_up, char *out) {
    const size_t row = size * width(dtype);
#define CALL(dtype) silu_mul(dtype, size, gate_up + 2 * r * row, gate_up + (2 * r + 1) * row, out + r * row)
    EACH_ROW(dtype, CALL)
#undef CALL
}

/* ---- what Python calls ---- */

#define SHARED _Pragma("omp parallel num_threads(threads) if (threads > 1)")

/* x, delta and out [rows, size], weight [size]. */
void kvproof_add_rms_norm(int dtype, int threads, int rows, int size, char *x, const char *delta, const char *weight,
                          float eps, char *out) {
    SHARED add_rms_norms(dtype, rows, size, x, delta, weight, eps, out);
}

/* The first `turned` heads of x [rows, heads, size]; cos and sin [rows, size]. */
void kvproof_rotate(int dtype, int threads, int rows, int heads, int turned, int size, char *x, const char *cos,
                    const char *sin) {
    SHARED rotate_heads(dtype, rows, heads, turned, size, x, cos, sin);
}

/* gate_up [rows, 2 * size], a row's gates before its ups; out [rows, size]. */
void kvproof_silu_mul(int dtype, int threads, int rows, int size, const char *gate_up, char *out) {
    SHARED silu_muls(dtype, rows, size, gate_up, out);
}
