/* Block integers (block.py, Note: [Block codes]) and the Hadamard rotation (hadamard.py), operation by
 * operation as in torch. */

#ifndef SSDTRAIN_CODECS_BLOCK_H
#define SSDTRAIN_CODECS_BLOCK_H

#include "_native_floats.h"

enum { LANES = 32 }; /* every block size is a multiple */

typedef struct {
    uint64_t seed;
    uint32_t step, tensor, rank;
} random_key;

typedef struct {
    int block, bits, symmetric, stochastic;
    float cap;    /* symmetric: the largest scale; asymmetric: the largest value of the dtype */
    float lowest; /* asymmetric: the smallest zero point */
    random_key key;
    const float *signs; /* of a Hadamard rotation of each block, or NULL */
    float unit;
} block_format;

/* The smallest bfloat16 >= x for finite x >= 0, and the largest <= x for finite x. */
INLINE float ceil_bfloat16(float x) { return float_of((bits_of(x) + 0xffffu) & 0xffff0000u); }

INLINE float floor_bfloat16(float x) {
    uint32_t u = bits_of(x);
    return float_of((u >> 31 ? u + 0xffffu : u) & 0xffff0000u);
}

enum { PHILOX_LANES = 8 }; /* a quarter of the smallest block */

/* 32-bit words in 64-bit lanes: the form in which compilers multiply them on vector units. */
typedef uint64_t word_lanes __attribute__((vector_size(8 * PHILOX_LANES)));

/* Philox4x32-10 for counters first .. first + count - 1; word j of counter i goes to words[j * count + i]. */
INLINE void philox(uint32_t *restrict words, uint32_t first, int count, const random_key *key) {
    const word_lanes low = (word_lanes){0} + 0xffffffffu;
    for (int base = 0; base < count; base += PHILOX_LANES) {
        word_lanes c0, c1 = (word_lanes){0} + key->step, c2 = (word_lanes){0} + key->tensor;
        word_lanes c3 = (word_lanes){0} + key->rank;
        uint32_t k0 = (uint32_t)key->seed, k1 = (uint32_t)(key->seed >> 32);
        for (int i = 0; i < PHILOX_LANES; i++) c0[i] = first + (uint32_t)(base + i);
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
            word_lanes p0 = c0 * 0xD2511F53u, p2 = c2 * 0xCD9E8D57u;
            c0 = (p2 >> 32) ^ c1 ^ k0;
            c1 = p2 & low;
            c2 = (p0 >> 32) ^ c3 ^ k1;
            c3 = p0 & low;
        }
        for (int i = 0; i < PHILOX_LANES; i++) {
            words[base + i] = (uint32_t)c0[i];
            words[count + base + i] = (uint32_t)c1[i];
            words[2 * count + base + i] = (uint32_t)c2[i];
            words[3 * count + base + i] = (uint32_t)c3[i];
        }
    }
}

/* The largest magnitude as bits: their order is that of the magnitudes, with Inf and NaN above every finite
 * one. */
INLINE uint32_t largest_bits(const float *restrict v, int block) {
    uint32_t most[LANES] = {0}, all = 0;
    for (int i = 0; i < block; i += LANES)
        for (int j = 0; j < LANES; j++) {
            uint32_t u = bits_of(v[i + j]) & ABS_MASK;
            most[j] = u > most[j] ? u : most[j];
        }
    for (int j = 0; j < LANES; j++) all = most[j] > all ? most[j] : all;
    return all;
}

INLINE void extremes(const float *restrict v, int block, float *low, float *high) {
    float least[LANES], most[LANES];
    for (int j = 0; j < LANES; j++) least[j] = most[j] = v[j];
    for (int i = LANES; i < block; i += LANES)
        for (int j = 0; j < LANES; j++) {
            least[j] = v[i + j] < least[j] ? v[i + j] : least[j];
            most[j] = v[i + j] > most[j] ? v[i + j] : most[j];
        }
    *low = least[0];
    *high = most[0];
    for (int j = 1; j < LANES; j++) {
        *low = least[j] < *low ? least[j] : *low;
        *high = most[j] > *high ? most[j] : *high;
    }
}

INLINE float clamp(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

INLINE float symmetric_scale(uint32_t largest, const block_format *f, float codes) {
    return clamp(ceil_bfloat16(float_of(largest) / codes), 0x1p-126f, f->cap);
}

INLINE float asymmetric_scale(const float *v, const block_format *f, float codes, float *zero) {
    float low, high;
    extremes(v, f->block, &low, &high);
    low = (low < f->lowest ? f->lowest : low) + 0.0f;
    *zero = floor_bfloat16(low);
    float foot = *zero / codes, spread = high / codes - foot, most = f->cap / codes - foot;
    spread = ceil_bfloat16(spread < 0 ? 0.0f : spread);
    most = floor_bfloat16(most < 0 ? 0.0f : most);
    spread = spread < most ? spread : most;
    return spread < 0x1p-125f ? 0x1p-125f : spread;
}

/* codes[0..block) of values v, 0.5 * (v - zero) / (0.5 * scale) in the asymmetric case and v / scale
 * otherwise. */
INLINE void quantise(uint8_t *restrict codes, const float *restrict v, const block_format *f, int symmetric,
                     int stochastic, float scale, float zero, const uint32_t *restrict words) {
    int block = f->block, reach = symmetric ? (1 << (f->bits - 1)) - 1 : (1 << f->bits) - 1;
    float high = (float)reach, low = symmetric ? -high : 0.0f, half_scale = scale * 0.5f,
          half_zero = zero * 0.5f;
    int offset = symmetric ? reach + 1 : 0;
    for (int i = 0; i < block; i++) {
        float y = symmetric ? v[i] / scale : (v[i] * 0.5f - half_zero) / half_scale;
        y = clamp(y, low, high); /* the ends are whole, so clamping before rounding is clamping after it */
        int32_t q;
        if (stochastic) {
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

INLINE void butterflies(float *restrict v, int size, int half) {
    for (int i = 0; i < size; i += 2 * half)
        for (int j = 0; j < half; j++) {
            float a = v[i + j], b = v[i + half + j];
            v[i + j] = a + b;
            v[i + half + j] = a - b;
        }
}

INLINE void hadamard(float *v, int size) {
    butterflies(v, size, 1);
    butterflies(v, size, 2);
    butterflies(v, size, 4);
    butterflies(v, size, 8);
    for (int half = 16; half < size; half *= 2) butterflies(v, size, half);
}

/* Rotate a block in place: signs, unit, butterflies; and back. */
INLINE void rotate_block(float *restrict v, const float *restrict signs, int size, float unit) {
    for (int i = 0; i < size; i++) v[i] = v[i] * signs[i] * unit;
    hadamard(v, size);
}

INLINE void unrotate_block(float *restrict v, const float *restrict signs, int size, float unit) {
    for (int i = 0; i < size; i++) v[i] = v[i] * unit;
    hadamard(v, size);
    for (int i = 0; i < size; i++) v[i] = v[i] * signs[i];
}

/* `scales` holds the scales of all blocks, behind them the zero points of asymmetric ones. Returns whether
 * all are finite. */
INLINE int encode_blocks(const void *x, int dtype, int64_t numel, const block_format *f, int symmetric,
                         int stochastic, uint16_t *scales, uint8_t *data) {
    int64_t blocks = (numel + f->block - 1) / f->block;
    int block = f->block, finite = 1, bytes = block * f->bits / 8;
    float values[BLOCK_MAX], reach = (float)(symmetric ? (1 << (f->bits - 1)) - 1 : (1 << f->bits) - 1);
    uint8_t codes[BLOCK_MAX];
    uint32_t words[BLOCK_MAX];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t at = b * block;
        const float *v = (const float *)x + at;
        if (dtype != FLOAT32 || numel - at < block || f->signs) {
            int count = numel - at < block ? (int)(numel - at) : block;
            load(values, x, dtype, at, count, block);
            v = values;
        }
        if (f->signs) {
            for (int64_t i = numel - at; i < block; i++) values[i] = 0.0f;
            rotate_block(values, f->signs, block, f->unit);
        }
        uint32_t largest = largest_bits(v, block);
        if (largest >= INF_BITS) {
            finite = 0;
            scales[b] = 0x7fc0;
            if (!symmetric) scales[blocks + b] = 0x7fc0;
            memset(codes, symmetric ? 1 << (f->bits - 1) : 0, (size_t)block);
        } else {
            float zero = 0.0f;
            float scale =
                symmetric ? symmetric_scale(largest, f, reach) : asymmetric_scale(v, f, reach, &zero);
            if (stochastic) philox(words, (uint32_t)(b * (block / 4)), block / 4, &f->key);
            quantise(codes, v, f, symmetric, stochastic, scale, zero, words);
            scales[b] = (uint16_t)(bits_of(scale) >> 16);
            if (!symmetric) scales[blocks + b] = (uint16_t)(bits_of(zero) >> 16);
        }
        pack(data + b * bytes, codes, block, f->bits);
    }
    return finite;
}

EVERY_CPU static int block_encode(const void *x, int dtype, int64_t numel, const block_format *f,
                                  uint16_t *scales, uint8_t *data) {
    if (f->symmetric)
        return f->stochastic ? encode_blocks(x, dtype, numel, f, 1, 1, scales, data)
                             : encode_blocks(x, dtype, numel, f, 1, 0, scales, data);
    return f->stochastic ? encode_blocks(x, dtype, numel, f, 0, 1, scales, data)
                         : encode_blocks(x, dtype, numel, f, 0, 0, scales, data);
}

/* `count` values of codes at `shift` of each byte; base + code * step in the halved or plain form of
 * block.py. */
INLINE void dequantise(float *restrict v, const uint8_t *restrict data, int count, int shift, int mask,
                       int symmetric, int offset, float scale, float zero) {
    for (int i = 0; i < count; i++) {
        float q = (float)(((data[i] >> shift) & mask) - offset);
        v[i] = symmetric ? q * scale : (zero * 0.5f + q * (scale * 0.5f)) * 2.0f;
    }
}

INLINE void decode_blocks(const uint16_t *scales, const uint8_t *data, int64_t numel, const block_format *f,
                          int symmetric, void *out, int dtype, int accumulate) {
    int64_t blocks = (numel + f->block - 1) / f->block;
    int block = f->block, bits = f->bits, bytes = block * bits / 8, offset = symmetric ? 1 << (bits - 1) : 0;
    float values[BLOCK_MAX];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t at = b * block;
        int whole = numel - at >= block, in_place = whole && dtype == FLOAT32 && !accumulate;
        float *v = in_place ? (float *)out + at : values;
        float scale = from_bfloat16(scales[b]), zero = symmetric ? 0.0f : from_bfloat16(scales[blocks + b]);
        const uint8_t *codes = data + b * bytes;
        if (bits == 8) {
            dequantise(v, codes, block, 0, 255, symmetric, offset, scale, zero);
        } else if (bits == 4) {
            for (int part = 0; part < 2; part++)
                dequantise(v + part * bytes, codes, bytes, 4 * part, 15, symmetric, offset, scale, zero);
        } else {
            for (int part = 0; part < 4; part++)
                dequantise(v + part * bytes, codes, bytes, 2 * part, 3, symmetric, offset, scale, zero);
        }
        if (f->signs) unrotate_block(v, f->signs, block, f->unit);
        if (!in_place) store(values, out, dtype, at, whole ? block : (int)(numel - at), accumulate);
    }
}

EVERY_CPU static void block_decode(const uint16_t *scales, const uint8_t *data, int64_t numel,
                                   const block_format *f, void *out, int dtype, int accumulate) {
    if (f->symmetric)
        decode_blocks(scales, data, numel, f, 1, out, dtype, accumulate);
    else
        decode_blocks(scales, data, numel, f, 0, out, dtype, accumulate);
}

/* out[padded] = (x * signs) * unit, rotated, in blocks of `size`; the last block is filled up with zeros. */
EVERY_CPU static void rotate(const void *x, int dtype, int64_t numel, const float *signs, int size,
                             float unit, float *out) {
    for (int64_t at = 0; at < numel; at += size) {
        float *v = out + at;
        int count = numel - at < size ? (int)(numel - at) : size;
        load(v, x, dtype, at, count, count);
        for (int i = count; i < size; i++) v[i] = 0.0f;
        rotate_block(v, signs, size, unit);
    }
}

/* The inverse, over `rotated` in place and from there to `out`. */
EVERY_CPU static void unrotate(float *rotated, int64_t numel, const float *signs, int size, float unit,
                               void *out, int dtype, int accumulate) {
    for (int64_t at = 0; at < numel; at += size) {
        float *v = rotated + at;
        unrotate_block(v, signs, size, unit);
        store(v, out, dtype, at, numel - at < size ? (int)(numel - at) : size, accumulate);
    }
}

#endif
