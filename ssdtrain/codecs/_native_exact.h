/* Records of exponents in four bits (exact.py, Note: [Exact records] and Note: [Bases]), as in torch. */

#ifndef SSDTRAIN_CODECS_EXACT_H
#define SSDTRAIN_CODECS_EXACT_H

#include "_native_floats.h"
#include "_native_parallel.h"

enum { EXACT_LANES = 128, EXACT_BLOCK = 4 * EXACT_LANES, EXACT_BLOCKS = 32, EXACT_POOL = 128 };
enum { EXACT_FRONT = EXACT_BLOCKS + EXACT_POOL, EXACT_CODED = 768, EXACT_LOW = 1024 };
enum { EXACT_EXCEPTION = 14, EXACT_ZERO = 15, EXACT_TYPICAL_ABOVE = 3 };

typedef struct {
    const void *x; /* encode */
    void *out;     /* decode */
    uint8_t *records;
    int64_t blocks;
    int dtype;
} exact_job;

INLINE unsigned exponent_of(uint16_t high) { return high >> 7 & 0xffu; }

/* The high halves of a block: the tensor's own, or those of float32 in `narrowed`. */
INLINE const uint16_t *high_halves(const exact_job *e, int64_t block, uint16_t *restrict narrowed) {
    if (e->dtype == BFLOAT16) return (const uint16_t *)e->x + block * EXACT_BLOCK;
    const uint32_t *restrict x = (const uint32_t *)e->x + block * EXACT_BLOCK;
    for (int i = 0; i < EXACT_BLOCK; i++) narrowed[i] = (uint16_t)(x[i] >> 16);
    return narrowed;
}

INLINE unsigned largest_exponent(const uint16_t *restrict high) {
    uint16_t most = 0;
    for (int i = 0; i < EXACT_BLOCK; i++) {
        uint16_t magnitude = high[i] & 0x7fffu;
        most = magnitude > most ? magnitude : most;
    }
    return exponent_of(most);
}

INLINE unsigned typical_base(const uint16_t *restrict high, unsigned largest) {
    unsigned smallest = 255;
    for (int i = 0; i < EXACT_LANES; i += 2) {
        uint16_t most = 0;
        for (int j = i; j < EXACT_BLOCK; j += EXACT_LANES)
            for (int k = j; k < j + 2; k++) most = (high[k] & 0x7fffu) > most ? high[k] & 0x7fffu : most;
        unsigned exponent = exponent_of(most);
        if (exponent && exponent < smallest) smallest = exponent;
    }
    return smallest + EXACT_TYPICAL_ABOVE < largest ? smallest + EXACT_TYPICAL_ABOVE : largest;
}

INLINE uint16_t exponent_code(uint16_t high, uint16_t base) {
    uint16_t exponent = high >> 7 & 0xffu, below = (uint16_t)(base - exponent);
    uint16_t code = below < EXACT_EXCEPTION ? below : EXACT_EXCEPTION;
    return exponent ? code : EXACT_ZERO;
}

/* One in the lowest bit of each code that is an exception. */
INLINE uint64_t exceptions_of(uint64_t codes) {
    codes ^= 0x1111111111111111u;
    codes &= codes >> 1;
    return codes & codes >> 2 & 0x1111111111111111u;
}

/* Writes the codes of a block and returns the number of exceptions. */
INLINE int write_exponents(const uint16_t *restrict high, unsigned base, uint16_t *restrict codes) {
    uint16_t exceptions = 0;
    for (int i = 0; i < EXACT_LANES; i++) {
        uint16_t c = 0;
        for (int q = 0; q < 4; q++)
            c |= (uint16_t)(exponent_code(high[q * EXACT_LANES + i], (uint16_t)base) << 4 * q);
        codes[i] = c;
        c ^= 0x1111u;
        c &= c >> 1;
        c &= c >> 2 & 0x1111u;
        exceptions += (uint16_t)(c * 0x1111u) >> 12;
    }
    return exceptions;
}

INLINE uint16_t kept_bits(uint16_t high) { return (high & 0x7fu) | (high >> 8 & 0x80u); }

INLINE void write_kept(const uint16_t *restrict high, uint16_t *restrict kept) {
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < EXACT_LANES; i++) {
            const uint16_t *h = high + 2 * half * EXACT_LANES + i;
            kept[half * EXACT_LANES + i] = (uint16_t)(kept_bits(h[0]) | kept_bits(h[EXACT_LANES]) << 8);
        }
}

/* Block and lane of the exceptions among 16 codes at `lane`, lowest bits first. */
#define EACH_EXCEPTION(codes, lane, place)                                                                   \
    for (uint64_t left = exceptions_of(codes), place; left; left &= left - 1)                                \
        if (place = (uint64_t)__builtin_ctzll(left) / 4,                                                     \
            place = (place % 4) * EXACT_LANES + (uint64_t)(lane) + place / 4, 1)

INLINE int64_t block_bytes(const exact_job *e) {
    return EXACT_CODED + (e->dtype == FLOAT32 ? EXACT_LOW : 0);
}

INLINE uint8_t *record_of(const exact_job *e, int64_t superblock) {
    return e->records + superblock * (EXACT_FRONT + EXACT_BLOCKS * block_bytes(e));
}

/* Returns 1 if all values are finite, plus 2 if the pool holds all exceptions. */
INLINE int encode_superblock(const exact_job *e, int64_t superblock) {
    uint16_t narrowed[EXACT_BLOCK], again[EXACT_LANES];
    int64_t first = superblock * EXACT_BLOCKS;
    int blocks = (int)least(e->blocks - first, EXACT_BLOCKS), found[EXACT_BLOCKS], total = 0;
    unsigned most = 0;
    uint8_t *record = record_of(e, superblock), *pool = record + EXACT_BLOCKS;
    memset(record, 0, EXACT_FRONT);
    for (int b = 0; b < blocks; b++) {
        uint16_t *data = (uint16_t *)(record + EXACT_FRONT + b * block_bytes(e));
        const uint16_t *high = high_halves(e, first + b, narrowed);
        unsigned base = largest_exponent(high);
        most = base > most ? base : most;
        record[b] = (uint8_t)base;
        write_kept(high, data);
        total += found[b] = write_exponents(high, base, data + 2 * EXACT_LANES);
        if (e->dtype == FLOAT32) {
            const uint32_t *restrict x = (const uint32_t *)e->x + (first + b) * EXACT_BLOCK;
            uint16_t *restrict low = data + 3 * EXACT_LANES;
            for (int i = 0; i < EXACT_BLOCK; i++) low[i] = (uint16_t)x[i];
        }
    }
    for (int b = 0, full = total > EXACT_POOL; b < blocks && full; b++) {
        uint8_t *codes = record + EXACT_FRONT + b * block_bytes(e) + 4 * EXACT_LANES;
        const uint16_t *high = high_halves(e, first + b, narrowed);
        unsigned base = typical_base(high, record[b]);
        int fewer = write_exponents(high, base, again);
        if (fewer >= found[b]) continue;
        total += fewer - found[b], found[b] = fewer;
        record[b] = (uint8_t)base;
        memcpy(codes, again, sizeof again);
    }
    for (int b = 0, rank = 0; b < blocks; b++) {
        const uint8_t *codes = record + EXACT_FRONT + b * block_bytes(e) + 4 * EXACT_LANES;
        if (!found[b]) continue;
        const uint16_t *high = high_halves(e, first + b, narrowed);
        for (int i = 0; i < EXACT_LANES; i += 4) {
            uint64_t some;
            memcpy(&some, codes + 2 * i, 8);
            EACH_EXCEPTION(some, i, place) {
                if (rank < EXACT_POOL) pool[rank++] = (uint8_t)exponent_of(high[place]);
            }
        }
    }
    return (most < 255) | (total <= EXACT_POOL) << 1;
}

EVERY_CPU static int exact_encode_slice(const void *job, int64_t first, int64_t last) {
    int flags = 3;
    for (int64_t s = first; s < last; s++) flags &= encode_superblock(job, s);
    return flags;
}

INLINE void decode_superblock(const exact_job *e, int64_t superblock) {
    uint16_t wide[EXACT_BLOCK];
    int64_t first = superblock * EXACT_BLOCKS;
    int blocks = (int)least(e->blocks - first, EXACT_BLOCKS), rank = 0;
    const uint8_t *record = record_of(e, superblock), *pool = record + EXACT_BLOCKS;
    for (int b = 0; b < blocks; b++) {
        const uint16_t *restrict kept = (const uint16_t *)(record + EXACT_FRONT + b * block_bytes(e));
        const uint16_t *restrict codes = kept + 2 * EXACT_LANES, *restrict low = kept + 3 * EXACT_LANES;
        uint16_t *restrict high =
            e->dtype == BFLOAT16 ? (uint16_t *)e->out + (first + b) * EXACT_BLOCK : wide;
        uint16_t base = record[b], any = 0;
        for (int q = 0; q < 4; q++)
            for (int i = 0; i < EXACT_LANES; i++) {
                uint16_t k = kept[q / 2 * EXACT_LANES + i] >> 8 * (q % 2), c = codes[i] >> 4 * q & 0xfu;
                uint16_t exponent = c < EXACT_EXCEPTION ? (uint16_t)(base - c) : 0;
                any |= c == EXACT_EXCEPTION;
                high[q * EXACT_LANES + i] = (uint16_t)((k & 0x7fu) | (k & 0x80u) << 8 | exponent << 7);
            }
        for (int i = 0; any && i < EXACT_LANES; i += 4) {
            uint64_t some;
            memcpy(&some, codes + i, 8);
            EACH_EXCEPTION(some, i, place) {
                if (rank < EXACT_POOL) high[place] |= (uint16_t)(pool[rank++] << 7);
            }
        }
        if (e->dtype == FLOAT32) {
            uint32_t *restrict out = (uint32_t *)e->out + (first + b) * EXACT_BLOCK;
            for (int i = 0; i < EXACT_BLOCK; i++) out[i] = (uint32_t)high[i] << 16 | low[i];
        }
    }
}

EVERY_CPU static int exact_decode_slice(const void *job, int64_t first, int64_t last) {
    for (int64_t s = first; s < last; s++) decode_superblock(job, s);
    return 1;
}

static int run_exact(slice_function work, const exact_job *e, int threads) {
    return in_slices(work, e, (e->blocks + EXACT_BLOCKS - 1) / EXACT_BLOCKS, EXACT_BLOCKS * EXACT_BLOCK, threads);
}

#endif
