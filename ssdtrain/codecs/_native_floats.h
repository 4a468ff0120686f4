/* Blocks of float32, float16 and bfloat16 values to float32 and back, as torch converts them (to nearest
 * even). */

#ifndef SSDTRAIN_CODECS_FLOATS_H
#define SSDTRAIN_CODECS_FLOATS_H

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
/* None of these changes a result. Without the first two the compiler does not vectorise selects and roundings; with
 * -fwrapv, which Python's own flags bring along, it does not vectorise loops over int, several times slower.
 * Contraction to fused multiply-add would change results: -std=c11 has it off, and this keeps it off under
 * any other flag. */
#pragma GCC optimize("no-trapping-math,no-math-errno,no-wrapv,fp-contract=off")
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed to inlined functions only */
#else
#pragma STDC FP_CONTRACT OFF
#endif

/* One binary runs everywhere and uses the widest vectors there are. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && defined(__GLIBC__)
#define EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };
enum { BLOCK_MAX = 256 };

#define ABS_MASK 0x7fffffffu
#define INF_BITS 0x7f800000u

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

INLINE float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

INLINE float from_float16(uint16_t h) {
    uint32_t magnitude = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t infinite = (magnitude << 13) + (224u << 23);
    uint32_t denormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t u = magnitude < 0x400u ? denormal : normal;
    return float_of((magnitude >= 0x7c00u ? infinite : u) | sign);
}

INLINE uint16_t to_float16(float x) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u;
    u &= ABS_MASK;
    uint32_t normal = (u - (112u << 23) + 0xfffu + ((u >> 13) & 1u)) >> 13;
    /* Adding 0.5 shifts a denormal result to the low bits and rounds it there. */
    uint32_t denormal = bits_of(float_of(u) + 0.5f) - bits_of(0.5f);
    uint32_t infinite = u > INF_BITS ? 0x7e00u : 0x7c00u;
    uint32_t h = u < (113u << 23) ? denormal : normal;
    return (uint16_t)((u >= 0x47800000u ? infinite : h) | sign);
}

INLINE float from_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }

INLINE uint16_t to_bfloat16(float x) {
    uint32_t u = bits_of(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & ABS_MASK) > INF_BITS ? 0x7fc0u : rounded);
}

/* values[0..count) = x[at..at+count), repeated at the end up to `padded` values. */
INLINE void load(float *restrict values, const void *x, int dtype, int64_t at, int count, int padded) {
    if (dtype == FLOAT32) {
        memcpy(values, (const float *)x + at, 4 * (size_t)count);
    } else if (dtype == FLOAT16) {
        const uint16_t *restrict h = (const uint16_t *)x + at;
        for (int i = 0; i < count; i++) values[i] = from_float16(h[i]);
    } else {
        const uint16_t *restrict h = (const uint16_t *)x + at;
        for (int i = 0; i < count; i++) values[i] = from_bfloat16(h[i]);
    }
    for (int i = count; i < padded; i++) values[i] = values[count - 1];
}

/* out[at..at+count) = values, or += values where `accumulate` (float32 only). */
INLINE void store(const float *restrict values, void *out, int dtype, int64_t at, int count, int accumulate) {
    if (dtype == FLOAT32) {
        float *restrict f = (float *)out + at;
        if (accumulate) {
            for (int i = 0; i < count; i++) f[i] += values[i];
        } else {
            memcpy(f, values, 4 * (size_t)count);
        }
    } else if (dtype == FLOAT16) {
        uint16_t *restrict h = (uint16_t *)out + at;
        for (int i = 0; i < count; i++) h[i] = to_float16(values[i]);
    } else {
        uint16_t *restrict h = (uint16_t *)out + at;
        for (int i = 0; i < count; i++) h[i] = to_bfloat16(values[i]);
    }
}

#endif
