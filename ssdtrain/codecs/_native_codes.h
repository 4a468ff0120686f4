/* One block's values to codes and back, given its scale. */

#ifndef SSDTRAIN_CODECS_CODES_H
#define SSDTRAIN_CODECS_CODES_H

#include "_native_floats.h"

enum { SYMMETRIC = 0, ASYMMETRIC = 1, E4M3 = 2, E5M2 = 3 };

INLINE float largest_code(int kind, int bits) {
    if (kind == E4M3) return 448.0f;
    if (kind == E5M2) return 57344.0f;
    return (float)((1 << (kind == SYMMETRIC ? bits - 1 : bits)) - 1);
}

INLINE int code_of_zero(int kind, int bits) { return kind == SYMMETRIC ? 1 << (bits - 1) : 0; }

/* The smallest bfloat16 >= x for finite x >= 0, and the largest <= x for finite x. */
INLINE float ceil_bfloat16(float x) { return float_of((bits_of(x) + 0xffffu) & 0xffff0000u); }

INLINE float floor_bfloat16(float x) {
    uint32_t u = bits_of(x);
    return float_of((u >> 31 ? u + 0xffffu : u) & 0xffff0000u);
}

INLINE float clamp(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

/* Floats of 8 bits of which `mantissa` are the mantissa, to nearest even, for magnitudes up to the largest. */
INLINE uint8_t to_float8(float x, int mantissa) {
    int dropped = 23 - mantissa, bias = mantissa == 3 ? 7 : 15;
    uint32_t u = bits_of(x), sign = (u >> 24) & 0x80u;
    u &= ABS_MASK;
    uint32_t shift = (uint32_t)(127 - bias) << 23;
    uint32_t normal = (u - shift + (1u << (dropped - 1)) - 1u + ((u >> dropped) & 1u)) >> dropped;
    /* Adding a number whose last bit is the smallest denormal rounds to multiples of that. */
    float magic = mantissa == 3 ? 0x1p14f : 0x1p7f;
    uint32_t denormal = bits_of(float_of(u) + magic) - bits_of(magic);
    return (uint8_t)((u < shift + (1u << 23) ? denormal : normal) | sign);
}

INLINE float from_float8(uint8_t code, int mantissa) {
    int dropped = 23 - mantissa, bias = mantissa == 3 ? 7 : 15;
    uint32_t magnitude = code & 0x7fu, sign = (uint32_t)(code & 0x80u) << 24;
    uint32_t normal = (magnitude << dropped) + ((uint32_t)(127 - bias) << 23);
    uint32_t denormal = bits_of((float)(int32_t)magnitude * (mantissa == 3 ? 0x1p-9f : 0x1p-16f));
    uint32_t special = magnitude == 0x7cu && mantissa == 2 ? INF_BITS : 0x7fc00000u;
    uint32_t u = magnitude < 1u << mantissa ? denormal : normal;
    return float_of((magnitude >= (mantissa == 3 ? 0x7fu : 0x7cu) ? special : u) | sign);
}

/* codes[0..count) of values v: 0.5 * (v - zero) / (0.5 * scale) in the asymmetric case and v / scale otherwise.
 * `words` are random, or NULL to round to nearest. */
INLINE void quantise(uint8_t *restrict codes, const float *restrict v, int count, int kind, int bits, float scale,
                     float zero, const uint32_t *restrict words) {
    float high = largest_code(kind, bits), low = kind == ASYMMETRIC ? 0.0f : -high;
    float half_scale = scale * 0.5f, half_zero = zero * 0.5f;
    int offset = code_of_zero(kind, bits);
    for (int i = 0; i < count; i++) {
        float y = kind == ASYMMETRIC ? (v[i] * 0.5f - half_zero) / half_scale : v[i] / scale;
        y = clamp(y, low, high); /* the ends are codes, so clamping before rounding is clamping after it */
        if (kind == E4M3 || kind == E5M2) {
            codes[i] = to_float8(y, kind == E4M3 ? 3 : 2);
            continue;
        }
        int32_t q;
        if (words) {
            int32_t whole = (int32_t)y;
            whole -= (float)whole > y;
            float u = (float)(int32_t)(words[i] >> 8) * 0x1p-24f;
            q = whole + (u < y - (float)whole);
        } else {
            q = (int32_t)((y + 0x1.8p23f) - 0x1.8p23f); /* to nearest even below 2^22 */
        }
        codes[i] = (uint8_t)(q + offset);
    }
}

INLINE void pack(uint8_t *restrict data, const uint8_t *restrict codes, int block, int bits) {
    int half = block / 2, quarter = block / 4;
    if (bits == 8) {
        memcpy(data, codes, (size_t)block);
    } else if (bits == 4) {
        for (int i = 0; i < half; i++) data[i] = (uint8_t)(codes[i] | codes[half + i] << 4);
    } else {
        for (int i = 0; i < quarter; i++)
            data[i] = (uint8_t)(codes[i] | codes[quarter + i] << 2 | codes[2 * quarter + i] << 4 |
                                codes[3 * quarter + i] << 6);
    }
}

/* `count` values of the codes of `bits` bits at `shift` of each byte. */
INLINE void dequantise(float *restrict v, const uint8_t *restrict data, int count, int kind, int bits, int shift,
                       float scale, float zero) {
    for (int i = 0; i < count; i++) {
        if (kind == E4M3 || kind == E5M2) {
            v[i] = from_float8(data[i], kind == E4M3 ? 3 : 2) * scale;
            continue;
        }
        float q = (float)(((data[i] >> shift) & ((1 << bits) - 1)) - code_of_zero(kind, bits));
        v[i] = kind == SYMMETRIC ? q * scale : (zero * 0.5f + q * (scale * 0.5f)) * 2.0f;
    }
}

INLINE void unpack(float *restrict v, const uint8_t *restrict data, int block, int kind, int bits, float scale,
                   float zero) {
    if (bits == 8) {
        dequantise(v, data, block, kind, 8, 0, scale, zero);
    } else if (bits == 4) {
        for (int part = 0; part < 2; part++)
            dequantise(v + part * (block / 2), data, block / 2, kind, 4, 4 * part, scale, zero);
    } else {
        for (int part = 0; part < 4; part++)
            dequantise(v + part * (block / 4), data, block / 4, kind, 2, 2 * part, scale, zero);
    }
}

#endif
