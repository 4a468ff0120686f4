/* Philox4x32-10, the generator of philox.py. */

#ifndef SSDTRAIN_CODECS_PHILOX_H
#define SSDTRAIN_CODECS_PHILOX_H

#include "_native_floats.h"

typedef struct {
    uint64_t seed;
    uint32_t step, tensor, rank;
} random_key;

enum { PHILOX_LANES = 8, PHILOX_TOGETHER = 4, PHILOX_BATCH = PHILOX_LANES * PHILOX_TOGETHER };

/* 32-bit words in 64-bit lanes: the form in which compilers multiply them on vector units. */
typedef uint64_t word_lanes __attribute__((vector_size(8 * PHILOX_LANES)));
typedef uint32_t narrow_lanes __attribute__((vector_size(4 * PHILOX_LANES)));

INLINE void narrow(uint32_t *words, word_lanes wide_words) {
    narrow_lanes low = __builtin_convertvector(wide_words, narrow_lanes);
    memcpy(words, &low, sizeof low);
}

/* Counters first .. first + count - 1, `count` a multiple of PHILOX_BATCH; word j of counter i goes to
 * words[j * count + i]. Several vectors at a time, because each round waits for the product of the one before. */
INLINE void philox(uint32_t *restrict words, uint32_t first, int count, const random_key *key) {
    const word_lanes low = (word_lanes){0} + 0xffffffffu, lane = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int base = 0; base < count; base += PHILOX_BATCH) {
        word_lanes c0[PHILOX_TOGETHER] = {{0}}, c1[PHILOX_TOGETHER] = {{0}}, c2[PHILOX_TOGETHER] = {{0}},
                   c3[PHILOX_TOGETHER] = {{0}};
        uint32_t k0 = (uint32_t)key->seed, k1 = (uint32_t)(key->seed >> 32);
#pragma GCC unroll 4
        for (int v = 0; v < PHILOX_TOGETHER; v++) {
            c0[v] = (lane + (uint64_t)(first + (uint32_t)(base + v * PHILOX_LANES))) & low;
            c1[v] = (word_lanes){0} + key->step;
            c2[v] = (word_lanes){0} + key->tensor;
            c3[v] = (word_lanes){0} + key->rank;
        }
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
#pragma GCC unroll 4
            for (int v = 0; v < PHILOX_TOGETHER; v++) {
                word_lanes p0 = c0[v] * 0xD2511F53u, p2 = c2[v] * 0xCD9E8D57u;
                c0[v] = (p2 >> 32) ^ c1[v] ^ k0;
                c1[v] = p2 & low;
                c2[v] = (p0 >> 32) ^ c3[v] ^ k1;
                c3[v] = p0 & low;
            }
#pragma GCC unroll 4
        for (int v = 0; v < PHILOX_TOGETHER; v++) {
            uint32_t *to = words + base + v * PHILOX_LANES;
            narrow(to, c0[v]);
            narrow(to + count, c1[v]);
            narrow(to + 2 * count, c2[v]);
            narrow(to + 3 * count, c3[v]);
        }
    }
}

#endif
