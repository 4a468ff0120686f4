/* ZFP in one dimension at a fixed rate: the stream described in zfp.py.
 *
 * A block's 4 x 32 bits are turned into 32 planes of 4 bits, the top plane lowest in a 128-bit number. Once
 * every coefficient is significant a plane is its own code, so the rest of a block is that number, shifted;
 * tables serve the few planes before. */

#ifndef SSDTRAIN_CODECS_ZFP_H
#define SSDTRAIN_CODECS_ZFP_H

#include "_native_floats.h"

enum { BATCH = 32, HEADER_BITS = 9, NEGABINARY = 0xaaaaaaaa };

typedef unsigned __int128 uint128;

typedef struct {
    uint8_t bits, length, significant;
} plane_entry;

/* Two planes at a time, index: significant coefficients, then both planes, or the next bits of the stream. */
enum { PAIR_BITS = 11 };                      /* the longest code of two planes: 7 bits, then 4 */
static plane_entry plane_of_code[5][8][128];  /* index: significant, min(bits left, 7), next 7 bits */
static uint32_t code_of_pair[5][256];         /* code, length << 16, significant << 24 */
static uint32_t pair_of_code[5 << PAIR_BITS]; /* planes, length << 8, significant << 12 */

static plane_entry encode_plane(int significant, unsigned plane) {
    unsigned code = plane & ((1u << significant) - 1), rest = plane >> significant;
    int length = significant, n = significant;
    while (n < 4) {
        code |= (unsigned)(rest != 0) << length++;
        if (!rest) break;
        while (n < 3) {
            unsigned one = rest & 1;
            code |= one << length++;
            if (one) break;
            rest >>= 1;
            n++;
        }
        rest >>= 1;
        n++;
    }
    return (plane_entry){(uint8_t)code, (uint8_t)length, (uint8_t)n};
}

static plane_entry decode_plane(int significant, int left, unsigned bits) {
    int read = significant < left ? significant : left, n = significant;
    unsigned plane = bits & ((1u << read) - 1);
    while (read < left && n < 4) {
        if (!(bits >> read++ & 1)) break;
        while (read < left && n < 3) {
            if (bits >> read++ & 1) break;
            n++;
        }
        plane |= 1u << n++;
    }
    return (plane_entry){(uint8_t)plane, (uint8_t)read, (uint8_t)n};
}

static void zfp_tables(void) {
    for (int n = 0; n < 5; n++) {
        for (int left = 0; left < 8; left++)
            for (unsigned x = 0; x < 128; x++) plane_of_code[n][left][x] = decode_plane(n, left, x);
        for (unsigned x = 0; x < 256; x++) {
            plane_entry a = encode_plane(n, x & 15u), b = encode_plane(a.significant, x >> 4);
            code_of_pair[n][x] = (uint32_t)a.bits | (uint32_t)b.bits << a.length |
                                 (uint32_t)(a.length + b.length) << 16 | (uint32_t)b.significant << 24;
        }
        for (unsigned x = 0; x < 1u << PAIR_BITS; x++) {
            plane_entry a = decode_plane(n, PAIR_BITS, x);
            plane_entry b = decode_plane(a.significant, PAIR_BITS, x >> a.length);
            pair_of_code[(unsigned)n << PAIR_BITS | x] = a.bits | (uint32_t)b.bits << 4 |
                                                         (uint32_t)(a.length + b.length) << 8 |
                                                         (uint32_t)b.significant << 12;
        }
    }
}

/* Bit i of a 16-bit number to bit 4 i, and back. */
INLINE uint64_t spread(uint64_t x) {
    x = (x | x << 24) & 0x000000ff000000ffu;
    x = (x | x << 12) & 0x000f000f000f000fu;
    x = (x | x << 6) & 0x0303030303030303u;
    return (x | x << 3) & 0x1111111111111111u;
}

INLINE uint32_t gather(uint64_t x) {
    x &= 0x1111111111111111u;
    x = (x | x >> 3) & 0x0303030303030303u;
    x = (x | x >> 6) & 0x000f000f000f000fu;
    x = (x | x >> 12) & 0x000000ff000000ffu;
    return (uint32_t)((x | x >> 24) & 0xffffu);
}

INLINE uint64_t reverse_nibbles(uint64_t x) {
    x = __builtin_bswap64(x);
    return (x >> 4 & 0x0f0f0f0f0f0f0f0fu) | (x & 0x0f0f0f0f0f0f0f0fu) << 4;
}

INLINE double power_of_two(int exponent) {
    uint64_t u = (uint64_t)(exponent + 1023) << 52;
    double x;
    memcpy(&x, &u, 8);
    return x;
}

INLINE int32_t half(uint32_t x) { return (int32_t)x >> 1; }

/* The planes of BATCH blocks `v` [BATCH * 4], and their biased exponents: 0 for an all-zero block, -1 where
 * not finite. */
INLINE void analyse(const float *restrict v, uint64_t *restrict upper, uint64_t *restrict lower,
                    int32_t *restrict exponent) {
    uint32_t q[4][BATCH];
    double scale[BATCH];
    for (int j = 0; j < BATCH; j++) {
        uint32_t most = 0;
        for (int i = 0; i < 4; i++) {
            uint32_t u = bits_of(v[4 * j + i]) & ABS_MASK;
            most = u > most ? u : most;
        }
        int biased =
            (int)(most >> 23) + 1; /* denormal blocks share the exponent of the smallest normal ones */
        scale[j] = power_of_two(most >= INF_BITS ? -1000 : 157 - biased);
        exponent[j] = most >= INF_BITS ? -1 : most ? biased : 0;
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < BATCH; j++) {
            double x = (double)v[4 * j + i] * scale[j];
            q[i][j] = (uint32_t)(int32_t)(x < 0x1p30 && x > -0x1p30 ? x : 0.0); /* Inf and NaN only */
        }
    for (int j = 0; j < BATCH; j++) {
        uint32_t x = q[0][j], y = q[1][j], z = q[2][j], w = q[3][j];
        x = (uint32_t)half(x + w), w -= x;
        z = (uint32_t)half(z + y), y -= z;
        x = (uint32_t)half(x + z), z -= x;
        w = (uint32_t)half(w + y), y -= w;
        w += (uint32_t)half(y), y -= (uint32_t)half(w);
        q[0][j] = (x + NEGABINARY) ^ NEGABINARY;
        q[1][j] = (y + NEGABINARY) ^ NEGABINARY;
        q[2][j] = (z + NEGABINARY) ^ NEGABINARY;
        q[3][j] = (w + NEGABINARY) ^ NEGABINARY;
    }
    for (int j = 0; j < BATCH; j++) {
        uint64_t up = 0, low = 0;
        for (int i = 0; i < 4; i++) {
            up |= spread(q[i][j] >> 16) << i;
            low |= spread(q[i][j] & 0xffffu) << i;
        }
        upper[j] = reverse_nibbles(up);
        lower[j] = reverse_nibbles(low);
    }
}

INLINE void synthesise(const uint64_t *restrict upper, const uint64_t *restrict lower,
                       const int32_t *restrict exponent, float *restrict v) {
    uint32_t q[4][BATCH];
    for (int j = 0; j < BATCH; j++) {
        uint64_t up = reverse_nibbles(upper[j]), low = reverse_nibbles(lower[j]);
        for (int i = 0; i < 4; i++)
            q[i][j] = ((gather(up >> i) << 16 | gather(low >> i)) ^ NEGABINARY) - NEGABINARY;
    }
    for (int j = 0; j < BATCH; j++) {
        uint32_t x = q[0][j], y = q[1][j], z = q[2][j], w = q[3][j];
        y += (uint32_t)half(w), w -= (uint32_t)half(y);
        y += w, w = (w << 1) - y;
        z += x, x = (x << 1) - z;
        y += z, z = (z << 1) - y;
        w += x, x = (x << 1) - w;
        q[0][j] = x, q[1][j] = y, q[2][j] = z, q[3][j] = w;
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < BATCH; j++) {
            float rounded = (float)(int32_t)q[i][j];
            v[4 * j + i] = (float)((double)rounded * power_of_two((exponent[j] < 0 ? 0 : exponent[j]) - 157));
        }
    for (int j = 0; j < BATCH; j++)
        if (exponent[j] <= 0)
            for (int i = 0; i < 4; i++) v[4 * j + i] = exponent[j] < 0 ? float_of(0x7fc00000u) : 0.0f;
}

/* Eight planes have at most 44 bits: per plane n' + (n' - n) + 1 with n' <= 4 coefficients significant after
 * it. */
INLINE uint128 encode_block(uint64_t upper, uint64_t lower, int32_t exponent, int block_bits) {
    if (exponent <= 0) return exponent < 0;
    uint64_t code = (unsigned)exponent * 2u + 1u;
    int at = HEADER_BITS, n = 0;
    for (int pair = 0; pair < 4; pair++) {
        uint32_t e = code_of_pair[n][upper >> (8 * pair) & 255u];
        code |= (uint64_t)(e & 0xffffu) << at;
        at += e >> 16 & 255u;
        n = (int)(e >> 24);
    }
    uint128 all = code, planes = (uint128)lower << 32 | upper >> 32;
    for (int left = 12; n < 4 && left && at < block_bits; left--) {
        uint32_t e = code_of_pair[n][(unsigned)planes & 255u];
        all |= (uint128)(e & 0xffffu) << at;
        at += e >> 16 & 255u;
        n = (int)(e >> 24);
        planes >>= 8;
    }
    if (at < block_bits) all |= planes << at;
    return block_bits < 128 ? all & (((uint128)1 << block_bits) - 1) : all;
}

/* The planes one by one, watching the end of the block: a run that it cuts off ends in a one. */
INLINE uint128 decode_to_the_end(uint128 code, int left) {
    uint128 planes = 0;
    for (int plane = 0, n = 0; plane < 32 && left > 0; plane++) {
        plane_entry e = plane_of_code[n][left < 7 ? left : 7][(unsigned)code & 127u];
        planes |= (uint128)e.bits << (4 * plane);
        code >>= e.length;
        left -= e.length;
        n = e.significant;
    }
    return planes;
}

/* The planes of BATCH codes [low, high], which are zero behind `left` bits. The first eight planes are read
 * pair by pair for all blocks at once, as if no block ended in them; a block that does is read again. */
INLINE void decode_planes(const uint64_t *restrict low, const uint64_t *restrict high, int left,
                          uint64_t *restrict upper, uint64_t *restrict lower) {
    uint32_t first[BATCH], at[BATCH], n[BATCH], again[BATCH];
    for (int j = 0; j < BATCH; j++) first[j] = at[j] = n[j] = again[j] = 0;
    for (int pair = 0; pair < 4; pair++)
        for (int j = 0; j < BATCH; j++) {
            uint32_t e = pair_of_code[n[j] << PAIR_BITS | (low[j] >> at[j] & ((1u << PAIR_BITS) - 1))];
            first[j] |= (e & 255u) << (8 * pair);
            at[j] += e >> 8 & 15u;
            /* Planes of all four coefficients end in zeros; a run does not. */
            again[j] |= (uint32_t)(n[j] < 4) & (uint32_t)((int32_t)at[j] > left);
            n[j] = e >> 12;
        }
    for (int j = 0; j < BATCH; j++) {
        uint128 code = (uint128)high[j] << 64 | low[j];
        uint128 planes =
            again[j] || n[j] < 4 ? decode_to_the_end(code, left) : (code >> at[j]) << 32 | first[j];
        upper[j] = (uint64_t)planes;
        lower[j] = (uint64_t)(planes >> 64);
    }
}

/* `words` [n_words] takes the stream; what lies behind it becomes zero. Returns whether all values are
 * finite. */
EVERY_CPU static int zfp_encode(const void *x, int dtype, int64_t numel, int block_bits, uint64_t *words,
                                int64_t n_words) {
    float v[4 * BATCH];
    uint64_t upper[BATCH], lower[BATCH], word = 0;
    int32_t exponent[BATCH];
    int64_t used = 0;
    int finite = 1, fill = 0;
    for (int64_t at = 0; at < numel; at += 4 * BATCH) {
        int count = numel - at < 4 * BATCH ? (int)(numel - at) : 4 * BATCH, blocks = (count + 3) / 4;
        const float *values = (const float *)x + at;
        if (dtype != FLOAT32 || count < 4 * BATCH) {
            load(v, x, dtype, at, count, count);
            /* A partial block a, ab or abc becomes aaaa, abba or abca. */
            for (int i = count; i < 4 * blocks; i++)
                v[i] = i % 4 == 2 ? v[i - 1] : v[count - 1 - (count - 1) % 4];
            for (int i = 4 * blocks; i < 4 * BATCH; i++) v[i] = 0.0f;
            values = v;
        }
        analyse(values, upper, lower, exponent);
        for (int j = 0; j < blocks; j++) {
            uint128 code = encode_block(upper[j], lower[j], exponent[j], block_bits);
            finite &= exponent[j] >= 0;
            for (int bits = block_bits; bits > 0; bits -= 64, code >>= 64) {
                int take = bits < 64 ? bits : 64;
                word |= (uint64_t)code << fill;
                if (fill + take >= 64) {
                    words[used++] = word;
                    word = fill ? (uint64_t)code >> (64 - fill) : 0;
                    fill -= 64;
                }
                fill += take;
            }
        }
    }
    if (fill) words[used++] = word;
    while (used < n_words) words[used++] = 0;
    return finite;
}

EVERY_CPU static void zfp_decode(const uint64_t *words, int64_t n_words, int block_bits, int64_t numel,
                                 void *out, int dtype, int accumulate) {
    float v[4 * BATCH];
    uint64_t low[BATCH], high[BATCH], upper[BATCH], lower[BATCH];
    int32_t exponent[BATCH];
    uint128 mask = block_bits < 128 ? ((uint128)1 << block_bits) - 1 : ~(uint128)0;
    int64_t bit = 0;
    for (int64_t at = 0; at < numel; at += 4 * BATCH) {
        int count = numel - at < 4 * BATCH ? (int)(numel - at) : 4 * BATCH, blocks = (count + 3) / 4;
        for (int j = 0; j < BATCH; j++) {
            int64_t w = bit >> 6;
            int shift = (int)(bit & 63);
            uint128 code = 0;
            if (j < blocks) {
                code = words[w] | (uint128)(w + 1 < n_words ? words[w + 1] : 0) << 64;
                code >>= shift;
                if (shift && w + 2 < n_words) code |= (uint128)words[w + 2] << (128 - shift);
                code &= mask;
            }
            int32_t biased = (int32_t)(code >> 1 & 255);
            exponent[j] = !(code & 1) ? 0 : biased ? biased : -1;
            code >>= HEADER_BITS;
            low[j] = (uint64_t)code;
            high[j] = (uint64_t)(code >> 64);
            bit += block_bits;
        }
        decode_planes(low, high, block_bits - HEADER_BITS, upper, lower);
        synthesise(upper, lower, exponent, v);
        store(v, out, dtype, at, count, accumulate);
    }
}

#endif
