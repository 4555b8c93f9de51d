/* Vectors of float32 as wide as the processor's, and how elements of any type get into them and out. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined __AVX512F__
#include <immintrin.h>
#define LANES 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined __AVX2__
#define LANES 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define LANES 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32, BFLOAT16, FLOAT16 }; /* types of elements */
enum { PAIR = 2 * LANES };           /* elements that are loaded together */

INLINE size_t width(const int dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE vec fill(float x) { return x - (vec){0}; }
INLINE words fill_words(uint32_t x) { return x - (words){0}; }
INLINE vec choose(ints condition, vec yes, vec no) { return (vec)((condition & (ints)yes) | (~condition & (ints)no)); }

/* Between float32 and what fits into the lower half of each lane, rounding to nearest, ties to even. */
INLINE vec from_bfloat16(words h) { return (vec)(h << 16); }

INLINE words to_bfloat16(vec x) {
    words bits = (words)x;
    return (words)choose(x != x, (vec)fill_words(0x7fc0), (vec)((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

INLINE vec from_float16(words h) {
    words magnitude = (h & 0x7fff) << 13;
    vec finite = (vec)magnitude * 0x1p112f, special = (vec)(magnitude | 0x7f800000); /* infinity or NaN */
    return (vec)((h & 0x8000) << 16 | (words)choose(magnitude >= 0x0f800000, special, finite));
}

INLINE words to_float16(vec x) {
    words magnitude = (words)x & 0x7fffffff;
    vec result = (vec)((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
    vec subnormal = (vec)((words)((vec)magnitude + 0.5f) - 0x3f000000);
    result = choose(magnitude < 0x38800000, subnormal, result);
    result = choose(magnitude >= 0x477ff000, (vec)fill_words(0x7c00), result);
    result = choose(magnitude > 0x7f800000, (vec)fill_words(0x7e00), result);
    return (words)result | ((words)x >> 16 & 0x8000);
}

/* PAIR elements. Those of two bytes go even ones first, then odd ones: no lane has to move. */
INLINE void load(const int dtype, const char *from, vec pair[2]) {
    if (dtype == FLOAT32) {
        memcpy(pair, from, 2 * sizeof(vec));
    } else {
        words both;
        memcpy(&both, from, sizeof both);
        pair[0] = dtype == BFLOAT16 ? from_bfloat16(both) : from_float16(both & 0xffff);
        pair[1] = dtype == BFLOAT16 ? (vec)(both & 0xffff0000) : from_float16(both >> 16);
    }
}

/* What storing x and loading it again would make of it. */
INLINE vec rounded(const int dtype, vec x) {
    if (dtype == BFLOAT16) return from_bfloat16(to_bfloat16(x));
    if (dtype == FLOAT16) return from_float16(to_float16(x));
    return x;
}

INLINE void store(const int dtype, char *to, const vec pair[2]) {
    if (dtype == FLOAT32) {
        memcpy(to, pair, 2 * sizeof(vec));
    } else {
        words even = dtype == BFLOAT16 ? to_bfloat16(pair[0]) : to_float16(pair[0]);
        words odd = dtype == BFLOAT16 ? to_bfloat16(pair[1]) : to_float16(pair[1]);
        words both = even | odd << 16;
        memcpy(to, &both, sizeof both);
    }
}

/* Elements d to d + PAIR of a head's `size`; past its end nothing is read or written, and zeros are loaded. */
INLINE void load_at(const int dtype, const char *from, int d, int size, vec pair[2]) {
    from += d * width(dtype);
    if (d + PAIR > size) {
        char some[4 * PAIR] __attribute__((aligned(64))) = {0};
        memcpy(some, from, (size - d) * width(dtype));
        load(dtype, some, pair);
    } else {
        load(dtype, from, pair);
    }
}

INLINE void store_at(const int dtype, char *to, int d, int size, const vec pair[2]) {
    char some[4 * PAIR] __attribute__((aligned(64)));
    to += d * width(dtype);
    if (d + PAIR > size) {
        store(dtype, some, pair);
        memcpy(to, some, (size - d) * width(dtype));
    } else {
        store(dtype, to, pair);
    }
}

/* Elements d to d + PAIR from here are about to be loaded. */
INLINE void prefetch(const int dtype, const char *from, int d) {
    for (size_t byte = 0; byte < PAIR * width(dtype); byte += 64) __builtin_prefetch(from + d * width(dtype) + byte, 0, 3);
}

/* The largest of x, in every lane. */
INLINE vec largest(vec x) {
    for (int n = LANES; n > 1; n /= 2) {
        vec even = SHUFFLE(x, x, EVEN), odd = SHUFFLE(x, x, ODD);
        x = choose(even > odd, even, odd);
    }
    return x;
}

/* The sum of x, in every lane. */
INLINE vec total(vec x) {
    for (int n = LANES; n > 1; n /= 2) x = SHUFFLE(x, x, EVEN) + SHUFFLE(x, x, ODD);
    return x;
}

/* Lane t of the result is the sum of x[t]. */
INLINE vec sums(vec x[LANES]) {
#pragma GCC unroll 4
    for (int n = LANES / 2; n; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) x[i] = SHUFFLE(x[2 * i], x[2 * i + 1], EVEN) + SHUFFLE(x[2 * i], x[2 * i + 1], ODD);
    return x[0];
}

/* e^x for x <= 0 (as in Cephes' expf), to a few units in the last place; 0 below the normal numbers, NaN for NaN. */
INLINE vec exponential(vec x) {
    const vec magic = fill(0x1.8p23f); /* adding it rounds to an integer, which is then in the low bits */
    vec shifted = x * 1.44269504f + magic, n = shifted - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts, the first exact in few bits */
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vec result = (vec)((ints)p + ((ints)shifted << 23));
    return choose(x != x, x, choose(x < -87.0f, fill(0), result));
}

/* 1 / x for x from 1 to 2, to a few units in the last place; NaN for NaN. */
INLINE vec reciprocal(vec x) {
#if defined __AVX512F__
    const vec r = (vec)_mm512_rcp14_ps((__m512)x);
    return r * (2 - x * r);
#else
    return 1 / x;
#endif
}

/* x / (1 + e^-x). */
INLINE vec silu(vec x) {
    const vec e = exponential(choose(x > 0, -x, x));
    return x * choose(x > 0, fill(1), e) * reciprocal(1 + e);
}

/* tanh x (as in Cephes' tanhf), to a few units in the last place; NaN for NaN. */
INLINE vec hyperbolic_tangent(vec x) {
    vec square = x * x, e = exponential(choose(x > 0, -2 * x, 2 * x)), large = (1 - e) / (1 + e);
    vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    return choose(square < 0.390625f, p * square * x + x, choose(x > 0, large, -large));
}
