/* ZFP in one dimension at a fixed rate: the stream described in zfp.py.
 *
 * Note: [Lanes]
 * BATCH blocks are coded side by side, one per vector lane, without a branch or a table: each loop over j below is
 * the same straight line for every block, which compilers turn into vector instructions. What the blocks differ in,
 * the number of bits a plane takes, is a shift count per lane.
 *
 * Note: [Planes]
 * A block's four negabinary numbers q are shifted left until the first plane has a one; each plane skipped is a zero
 * in the code. Bit i of a plane belongs to q[i]. With n coefficients significant before the plane, its code is a
 * sequence of optional bits: b0, g1, b1, g2, b2, b3, where g(i) says that some coefficient from i on has a one.
 *     g1: follows where n is 1, in the first plane where b0 is set;     g2: where n is 2 or n < 2 and b1 is set;
 *     b1, b2: where the coefficient is significant or its g is set, or would be, were it not implied by g before;
 *     b3: where b2 is set or n >= 3, else it is implied.
 * With n >= 3 a plane's code is the plane, so the rest of a block is its planes one after the other. `after1` and
 * `after2` have a bit of their own for every plane: whether n >= 2 and n >= 3 behind it. */

#ifndef SSDTRAIN_CODECS_ZFP_H
#define SSDTRAIN_CODECS_ZFP_H

#include "_native_floats.h"

enum { BATCH = 64, PLANES = 32, HEADER_BITS = 9, WORDS_MAX = 4 };
#define NEGABINARY 0xaaaaaaaau

typedef unsigned __int128 uint128;
typedef uint32_t lanes[BATCH];

INLINE int32_t half(uint32_t x) { return (int32_t)x >> 1; }

INLINE float power_of_two(int exponent) { return float_of((uint32_t)(exponent + 127) << 23); }

/* All ones where the condition holds. */
INLINE uint32_t where(int condition) { return 0u - (uint32_t)condition; }

/* Every bit at or below the highest one. */
INLINE uint32_t smear(uint32_t x) {
    x |= x >> 1;
    x |= x >> 2;
    x |= x >> 4;
    x |= x >> 8;
    return x | x >> 16;
}

/* Leading zeros of x != 0, from the exponent of a float that does not round up. */
INLINE uint32_t leading_zeros(uint32_t x) {
    uint32_t y = x >> 1;
    y &= ~(y >> 1);
    uint32_t biased = bits_of((float)(int32_t)y) >> 23;
    return 157u - (biased ? biased : 126u);
}

INLINE uint32_t trailing_zeros(uint32_t x) {
    return (bits_of((float)(int32_t)(x & (0u - x))) >> 23 & 255u) - 127u;
}

INLINE uint32_t exchange(uint32_t x, int distance, uint32_t mask) {
    uint32_t t = (x ^ x >> distance) & mask;
    return x ^ t ^ t << distance;
}

/* Bytes q1, q0, q3, q2 (lowest first) to eight planes of four bits, the top plane lowest: a permutation of the
 * bits of the address of each bit, one exchange of two of them at a time. */
INLINE uint32_t to_planes(uint32_t x) {
    x = exchange(x, 1, 0x22222222u);
    x = exchange(x, 9, 0x00550055u);
    x = exchange(x, 6, 0x03030303u);
    return exchange(x, 14, 0x0000ccccu);
}

INLINE uint32_t from_planes(uint32_t x) {
    x = exchange(x, 14, 0x0000ccccu);
    x = exchange(x, 6, 0x03030303u);
    x = exchange(x, 9, 0x00550055u);
    return exchange(x, 1, 0x22222222u);
}

/* The code [words] moved up by `count` bits, 1 to 31, and `bits` put below it; and moved down by 0 to 31. */
INLINE void prepend(uint32_t *code, int words, uint32_t bits, uint32_t count) {
    for (int w = words - 1; w > 0; w--) code[w] = code[w] << count | code[w - 1] >> (32 - count);
    code[0] = code[0] << count | bits;
}

INLINE void drop(uint32_t *code, int words, uint32_t count) {
    for (int w = 0; w < words; w++)
        code[w] = code[w] >> count | (w + 1 < words ? code[w + 1] << 1 << (31 - count) : 0u);
}

typedef struct {
    lanes q[4], header, skipped, after1, after2;
} block_planes;

/* Planes of BATCH blocks `v` [BATCH * 4]. Returns a bit for every plane: whether n >= 3 behind it in all blocks. */
INLINE uint32_t analyse(const float *restrict v, block_planes *restrict p) {
    uint32_t settled = ~0u;
    for (int j = 0; j < BATCH; j++) {
        uint32_t most = 0, q[4];
        for (int i = 0; i < 4; i++) {
            uint32_t u = bits_of(v[4 * j + i]) & ABS_MASK;
            most = u > most ? u : most;
        }
        int infinite = most >= INF_BITS;
        int biased = (int)(most >> 23) + 1; /* denormal blocks share the exponent of the smallest normal ones */
        int scale = infinite ? -126 : 157 - biased, scale_most = scale < 127 ? scale : 127;
        for (int i = 0; i < 4; i++) {
            float x = v[4 * j + i] * power_of_two(scale_most) * power_of_two(scale - scale_most);
            q[i] = (uint32_t)(int32_t)(x < 0x1p30f && x > -0x1p30f ? x : 0.0f); /* Inf and NaN only */
        }
        uint32_t x = q[0], y = q[1], z = q[2], w = q[3];
        x = (uint32_t)half(x + w), w -= x;
        z = (uint32_t)half(z + y), y -= z;
        x = (uint32_t)half(x + z), z -= x;
        w = (uint32_t)half(w + y), y -= w;
        w += (uint32_t)half(y), y -= (uint32_t)half(w);
        x = (x + NEGABINARY) ^ NEGABINARY, y = (y + NEGABINARY) ^ NEGABINARY;
        z = (z + NEGABINARY) ^ NEGABINARY, w = (w + NEGABINARY) ^ NEGABINARY;
        uint32_t skip = leading_zeros(x | y | z | w | 1u);
        p->q[0][j] = x << skip, p->q[1][j] = y << skip, p->q[2][j] = z << skip, p->q[3][j] = w << skip;
        p->after1[j] = smear((y | z | w) << skip);
        p->after2[j] = smear((z | w) << skip);
        p->skipped[j] = skip;
        /* "Not all zero" and the exponent; exponent 0 marks a block with Inf or NaN. */
        p->header[j] = infinite ? 1u : ((uint32_t)biased << 1 | 1u) & where(most != 0);
        settled &= p->after2[j] | where(infinite || most == 0);
    }
    return settled;
}

typedef struct {
    uint32_t bits, length;
} plane_code;

/* Note: [Planes], from the last bit to the first. */
INLINE plane_code encode_plane(uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3, int first, uint32_t n2,
                               uint32_t n3) {
    uint32_t g2 = b2 | b3, g1 = b1 | g2;
    uint32_t has_g1 = first ? b0 : n2 ^ 1u, has_b1 = n2 | g1;
    uint32_t has_g2 = (n2 | b1) & (n3 ^ 1u), has_b2 = n3 | g2, has_b3 = n3 | b2;
    uint32_t bits = b3 & has_b3;
    bits = bits << has_b2 | b2;
    bits = bits << has_g2 | (g2 & has_g2);
    bits = bits << has_b1 | b1;
    bits = bits << has_g1 | (g1 & has_g1);
    return (plane_code){bits << 1 | b0, 1u + has_g1 + has_b1 + has_g2 + has_b2 + has_b3};
}

/* The code is built from its end: the raw planes behind the first `count`, then plane after plane in front of them. */
INLINE void encode_batch(const block_planes *restrict p, uint32_t settled, int block_bits, int words,
                         lanes *restrict code) {
    int count = settled ? __builtin_clz(settled) + 1 : PLANES;
    int reached = (block_bits - HEADER_BITS + 1) / 2; /* every plane has two bits, the last may be cut off */
    count = reached < 1 ? 1 : count < reached ? count : reached;
    for (int j = 0; j < BATCH; j++) {
        uint32_t q[4];
        for (int i = 0; i < 4; i++) q[i] = p->q[i][j] << (count - 1) << 1;
        for (int w = 0; w < words; w++) {
            int at = 8 * w;
            code[w][j] = to_planes(q[1] << at >> 24 | q[0] << at >> 24 << 8 | q[3] << at >> 24 << 16 |
                                   q[2] << at >> 24 << 24);
        }
    }
    for (int k = count - 1; k > 0; k--)
        for (int j = 0; j < BATCH; j++) {
            uint32_t c[WORDS_MAX];
            int at = 31 - k;
            plane_code plane =
                encode_plane(p->q[0][j] >> at & 1u, p->q[1][j] >> at & 1u, p->q[2][j] >> at & 1u,
                             p->q[3][j] >> at & 1u, 0, p->after1[j] >> (at + 1) & 1u, p->after2[j] >> (at + 1) & 1u);
            for (int w = 0; w < words; w++) c[w] = code[w][j];
            prepend(c, words, plane.bits, plane.length);
            for (int w = 0; w < words; w++) code[w][j] = c[w];
        }
    for (int j = 0; j < BATCH; j++) {
        uint32_t c[WORDS_MAX], skip = p->skipped[j], keep = where(p->header[j] > 1u);
        plane_code plane =
            encode_plane(p->q[0][j] >> 31, p->q[1][j] >> 31, p->q[2][j] >> 31, p->q[3][j] >> 31, 1, 0, 0);
        for (int w = 0; w < words; w++) c[w] = code[w][j];
        prepend(c, words, plane.bits << 1 | 1u, plane.length + 1u);
        for (int w = words - 1; w > 0; w--) c[w] = c[w] << skip | c[w - 1] >> 1 >> (31 - skip);
        c[0] <<= skip;
        prepend(c, words, 0, HEADER_BITS);
        for (int w = 0; w < words; w++) code[w][j] = (c[w] & keep) | (w ? 0u : p->header[j]);
    }
}

typedef struct {
    lanes q[4], header, skipped, code[WORDS_MAX], n2, n3;
    int32_t left[BATCH]; /* bits not yet read, minus one: negative behind the end of the block */
} block_codes;

/* Read one plane of one block; returns whether the rest of the block is raw planes or nothing.
 *
 * Behind the end every bit reads as zero, but a run of b that the end cuts off ends in a one. */
INLINE uint32_t decode_plane(uint32_t *code, int words, int first, uint32_t *q, uint32_t *after1, uint32_t *after2,
                             int32_t *left) {
    uint32_t bits = code[0], n2 = first ? 0u : *after1, n3 = first ? 0u : *after2;
    int32_t rest = *left;
    uint32_t b0 = (bits & 1u) | (first ? (uint32_t)rest >> 31 : 0u);
    bits >>= 1, rest -= 1;
    uint32_t has_g1 = first ? b0 : n2 ^ 1u, g1 = bits & has_g1;
    bits >>= has_g1, rest -= (int32_t)has_g1;
    uint32_t has_b1 = g1 | (has_g1 ^ 1u), b1 = (bits | ((uint32_t)rest >> 31 & ~n2)) & has_b1;
    bits >>= has_b1, rest -= (int32_t)has_b1;
    uint32_t has_g2 = (n2 | b1) & (n3 ^ 1u), g2 = bits & has_g2;
    bits >>= has_g2, rest -= (int32_t)has_g2;
    uint32_t has_b2 = g2 | (has_b1 & ~has_g2), b2 = (bits | ((uint32_t)rest >> 31 & ~n3)) & has_b2;
    bits >>= has_b2, rest -= (int32_t)has_b2;
    uint32_t has_b3 = n3 | b2, b3 = (bits & has_b3) | (has_b2 & ~has_b3);
    bits >>= has_b3, rest -= (int32_t)has_b3;
    if (words == 1)
        code[0] = bits;
    else
        drop(code, words, (uint32_t)(*left - rest));
    q[0] = (first ? 0u : q[0] << 1) | b0;
    q[1] = (first ? 0u : q[1] << 1) | b1;
    q[2] = (first ? 0u : q[2] << 1) | b2;
    q[3] = (first ? 0u : q[3] << 1) | b3;
    *left = rest;
    *after2 = n3 | b2 | b3;
    *after1 = n2 | b1 | *after2;
    return *after2 | (uint32_t)rest >> 31;
}

enum { SURE = 3 }; /* planes that are read before asking whether any block needs more */

/* Reads the planes up to n >= 3 in every block; returns their number. */
INLINE int decode_batch(block_codes *restrict b, int block_bits, int words) {
    uint32_t settled = 1;
    for (int j = 0; j < BATCH; j++) {
        uint32_t c[WORDS_MAX], q[4], n2, n3;
        for (int w = 0; w < words; w++) c[w] = b->code[w][j];
        uint32_t header = c[0] & ((1u << HEADER_BITS) - 1u);
        drop(c, words, HEADER_BITS);
        /* A block without its "not all zero", or with every plane skipped, is zero. */
        header &= where((header & 1u) & ((header == 1u) | (c[0] != 0u)));
        uint32_t skip = trailing_zeros(c[0] | 0x80000000u);
        drop(c, words, skip);
        drop(c, words, 1);
        int32_t left = block_bits - HEADER_BITS - 2 - (int32_t)skip;
        uint32_t done = decode_plane(c, words, 1, q, &n2, &n3, &left);
        for (int k = 1; k < SURE; k++) done = decode_plane(c, words, 0, q, &n2, &n3, &left);
        settled &= done | (header < 2u);
        for (int i = 0; i < 4; i++) b->q[i][j] = q[i];
        for (int w = 0; w < words; w++) b->code[w][j] = c[w];
        b->header[j] = header, b->skipped[j] = skip;
        b->n2[j] = n2, b->n3[j] = n3, b->left[j] = left;
    }
    int count = SURE;
    for (; !settled && count < PLANES; count++) {
        settled = 1;
        for (int j = 0; j < BATCH; j++) {
            uint32_t c[WORDS_MAX], q[4];
            for (int w = 0; w < words; w++) c[w] = b->code[w][j];
            for (int i = 0; i < 4; i++) q[i] = b->q[i][j];
            settled &= decode_plane(c, words, 0, q, &b->n2[j], &b->n3[j], &b->left[j]) | (b->header[j] < 2u);
            for (int i = 0; i < 4; i++) b->q[i][j] = q[i];
            for (int w = 0; w < words; w++) b->code[w][j] = c[w];
        }
    }
    return count;
}

/* Values `v` [BATCH * 4] of `count` planes read and the raw ones behind them. */
INLINE void synthesise(const block_codes *restrict b, int count, int words, float *restrict v) {
    for (int j = 0; j < BATCH; j++) {
        uint32_t q[4], header = b->header[j];
        for (int i = 0; i < 4; i++) q[i] = b->q[i][j] << (PLANES - count);
        for (int w = 0; w < words; w++) {
            uint32_t bytes = from_planes(b->code[w][j]);
            int down = 8 * w;
            q[1] |= bytes << 24 >> down >> 1 >> (count - 1);
            q[0] |= bytes >> 8 << 24 >> down >> 1 >> (count - 1);
            q[3] |= bytes >> 16 << 24 >> down >> 1 >> (count - 1);
            q[2] |= bytes >> 24 << 24 >> down >> 1 >> (count - 1);
        }
        for (int i = 0; i < 4; i++) q[i] = ((q[i] >> b->skipped[j]) ^ NEGABINARY) - NEGABINARY;
        uint32_t x = q[0], y = q[1], z = q[2], w = q[3];
        y += (uint32_t)half(w), w -= (uint32_t)half(y);
        y += w, w = (w << 1) - y;
        z += x, x = (x << 1) - z;
        y += z, z = (z << 1) - y;
        w += x, x = (x << 1) - w;
        q[0] = x, q[1] = y, q[2] = z, q[3] = w;
        int scale = (int)(header >> 1) - 157, scale_least = scale > -126 ? scale : -126;
        uint32_t keep = where(header > 1u), spoilt = where(header == 1u) & 0x7fc00000u;
        for (int i = 0; i < 4; i++) {
            float rounded = (float)(int32_t)q[i];
            float x = rounded * power_of_two(scale - scale_least) * power_of_two(scale_least);
            v[4 * j + i] = float_of((bits_of(x) & keep) | spoilt);
        }
    }
}

#endif
