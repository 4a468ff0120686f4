/* Records of exponents in four bits (exact.py, Note: [Exact records] and Note: [Bases]), as in torch. */

#ifndef SSDTRAIN_CODECS_EXACT_H
#define SSDTRAIN_CODECS_EXACT_H

#include "_native_floats.h"
#include "_native_parallel.h"

enum { EXACT_BLOCK = 128, EXACT_GROUP = 4 * EXACT_BLOCK, EXACT_GROUPS = 32, EXACT_POOL = 352 };
enum { EXACT_LEADS = 4 * EXACT_GROUPS, EXACT_FRONT = EXACT_LEADS + EXACT_GROUPS + EXACT_POOL };
enum { EXACT_CODED = 768, EXACT_LOW = 1024 };
enum { EXACT_EXCEPTION = 14, EXACT_ZERO = 15, EXACT_FAR = 15, EXACT_ABOVE_MEAN = 8 };

typedef struct {
    const void *x; /* encode */
    void *out;     /* decode */
    uint8_t *records;
    int64_t groups;
    int dtype;
} exact_job;

INLINE unsigned exponent_of(uint16_t high) { return high >> 7 & 0xffu; }

/* The high halves of a group: the tensor's own, or those of float32 in `narrowed`. */
INLINE const uint16_t *high_halves(const exact_job *e, int64_t group, uint16_t *restrict narrowed) {
    if (e->dtype == BFLOAT16) return (const uint16_t *)e->x + group * EXACT_GROUP;
    const uint32_t *restrict x = (const uint32_t *)e->x + group * EXACT_GROUP;
    for (int i = 0; i < EXACT_GROUP; i++) narrowed[i] = (uint16_t)(x[i] >> 16);
    return narrowed;
}

typedef struct {
    uint16_t exponent, value; /* as unsigned numbers: the largest value is a negative one if there is any */
} exact_most;

/* The base of a block, whose largest exponent and value go into `most`. */
INLINE unsigned base_of(const uint16_t *restrict high, exact_most *most) {
    uint16_t magnitude = 0, value = 0, sum = 0, count = 0;
    for (int i = 0; i < EXACT_BLOCK; i++) {
        uint16_t m = high[i] & 0x7fffu;
        magnitude = m > magnitude ? m : magnitude;
        value = high[i] > value ? high[i] : value;
        sum += m >> 7;
    }
    unsigned largest = exponent_of(magnitude);
    most->exponent = largest > most->exponent ? (uint16_t)largest : most->exponent;
    most->value = value > most->value ? value : most->value;
    if (largest <= sum / (unsigned)EXACT_BLOCK + EXACT_ABOVE_MEAN) return largest; /* the mean is no smaller without zeros */
    for (int i = 0; i < EXACT_BLOCK; i++) count += (high[i] & 0x7f80u) != 0;
    unsigned highest = sum / (count ? count : 1u) + EXACT_ABOVE_MEAN;
    return largest < highest ? largest : highest;
}

/* Distance of a value from the exponent at which codes of its sign begin. */
INLINE uint16_t distance_of(uint16_t high, uint16_t base, uint16_t lead) {
    return (uint16_t)(base - (high >> 7 & 0xffu) - ((uint16_t)((int16_t)high >> 15) & lead));
}

INLINE uint16_t exponent_code(uint16_t high, uint16_t base, uint16_t lead) {
    uint16_t distance = distance_of(high, base, lead);
    uint16_t code = distance < EXACT_EXCEPTION ? distance : EXACT_EXCEPTION;
    return high & 0x7f80u ? code : EXACT_ZERO;
}

/* One in the lowest bit of each code that is an exception. */
INLINE uint64_t exceptions_of(uint64_t codes) {
    codes ^= 0x1111111111111111u;
    codes &= codes >> 1;
    return codes & codes >> 2 & 0x1111111111111111u;
}

/* Writes the codes of a group and returns the number of exceptions. */
INLINE int write_exponents(const uint16_t *restrict high, const uint8_t *base, uint16_t lead, uint16_t *restrict codes) {
    uint16_t exceptions = 0;
    for (int i = 0; i < EXACT_BLOCK; i++) {
        uint16_t c = 0;
        for (int q = 0; q < 4; q++) c |= (uint16_t)(exponent_code(high[q * EXACT_BLOCK + i], base[q], lead) << 4 * q);
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
        for (int i = 0; i < EXACT_BLOCK; i++) {
            const uint16_t *h = high + 2 * half * EXACT_BLOCK + i;
            kept[half * EXACT_BLOCK + i] = (uint16_t)(kept_bits(h[0]) | kept_bits(h[EXACT_BLOCK]) << 8);
        }
}

/* Place in the group of the exceptions among 16 codes at value `i` of its blocks, lowest bits first. */
#define EACH_EXCEPTION(codes, i, place)                                                                      \
    for (uint64_t left = exceptions_of(codes), place; left; left &= left - 1)                                \
        if (place = (uint64_t)__builtin_ctzll(left) / 4,                                                     \
            place = (place % 4) * EXACT_BLOCK + (uint64_t)(i) + place / 4, 1)

INLINE int64_t group_bytes(const exact_job *e) {
    return EXACT_CODED + (e->dtype == FLOAT32 ? EXACT_LOW : 0);
}

INLINE uint8_t *record_of(const exact_job *e, int64_t superblock) {
    return e->records + superblock * (EXACT_FRONT + EXACT_GROUPS * group_bytes(e));
}

/* Returns 1 if all values are finite, plus 2 if the pool holds all exceptions. */
INLINE int encode_superblock(const exact_job *e, int64_t superblock) {
    uint16_t narrowed[EXACT_GROUP];
    uint8_t far[EXACT_POOL];
    int64_t first = superblock * EXACT_GROUPS;
    int groups = (int)least(e->groups - first, EXACT_GROUPS), exceptions = 0, fars = 0;
    exact_most most = {0, 0};
    uint8_t *record = record_of(e, superblock), *pool = record + EXACT_FRONT - EXACT_POOL;
    memset(record, 0, EXACT_FRONT);
    for (int g = 0; g < groups; g++) {
        uint16_t *data = (uint16_t *)(record + EXACT_FRONT + g * group_bytes(e)), *codes = data + 2 * EXACT_BLOCK;
        const uint16_t *high = high_halves(e, first + g, narrowed);
        uint8_t *base = record + 4 * g, *lead = record + EXACT_LEADS + g;
        /* 1. Everything but exceptions. */
        uint16_t smallest = 255;
        most.value = 0;
        for (int q = 0; q < 4; q++) {
            base[q] = (uint8_t)base_of(high + q * EXACT_BLOCK, &most);
            smallest = base[q] < smallest ? base[q] : smallest;
        }
        uint16_t of_negative = most.value >> 15 ? exponent_of(most.value) : 0;
        *lead = (uint8_t)(smallest > of_negative ? smallest - of_negative : 0);
        write_kept(high, data);
        if (e->dtype == FLOAT32) {
            const uint32_t *restrict x = (const uint32_t *)e->x + (first + g) * EXACT_GROUP;
            uint16_t *restrict low = data + 3 * EXACT_BLOCK;
            for (int i = 0; i < EXACT_GROUP; i++) low[i] = (uint16_t)x[i];
        }
        /* 2. Exceptions. */
        if (!write_exponents(high, base, *lead, codes)) continue;
        for (int i = 0; i < EXACT_BLOCK; i += 4) {
            uint64_t some;
            memcpy(&some, codes + i, 8);
            EACH_EXCEPTION(some, i, place) {
                if (exceptions++ >= 2 * EXACT_POOL) continue;
                uint16_t nibble = distance_of(high[place], base[place / EXACT_BLOCK], *lead);
                nibble = (uint16_t)(nibble - EXACT_EXCEPTION);
                nibble = nibble < EXACT_FAR ? nibble : EXACT_FAR;
                pool[(exceptions - 1) / 2] |= (uint8_t)(nibble << (exceptions - 1) % 2 * 4);
                if (nibble == EXACT_FAR && fars++ < EXACT_POOL) far[fars - 1] = (uint8_t)exponent_of(high[place]);
            }
        }
    }
    for (int i = 0; i < fars && i < EXACT_POOL; i++) pool[EXACT_POOL - 1 - i] = far[i];
    return (most.exponent < 255) | ((exceptions + 1) / 2 + fars <= EXACT_POOL) << 1;
}

EVERY_CPU static int exact_encode_slice(const void *job, int64_t first, int64_t last) {
    int flags = 3;
    for (int64_t s = first; s < last; s++) flags &= encode_superblock(job, s);
    return flags;
}

INLINE void decode_superblock(const exact_job *e, int64_t superblock) {
    uint16_t wide[EXACT_GROUP];
    int64_t first = superblock * EXACT_GROUPS;
    int groups = (int)least(e->groups - first, EXACT_GROUPS), exceptions = 0, fars = 0;
    const uint8_t *record = record_of(e, superblock), *pool = record + EXACT_FRONT - EXACT_POOL;
    for (int g = 0; g < groups; g++) {
        const uint16_t *restrict kept = (const uint16_t *)(record + EXACT_FRONT + g * group_bytes(e));
        const uint16_t *restrict codes = kept + 2 * EXACT_BLOCK, *restrict low = kept + 3 * EXACT_BLOCK;
        const uint8_t *bases = record + 4 * g;
        uint16_t *restrict high =
            e->dtype == BFLOAT16 ? (uint16_t *)e->out + (first + g) * EXACT_GROUP : wide;
        uint16_t any = 0, lead = record[EXACT_LEADS + g];
        for (int q = 0; q < 4; q++) {
            uint16_t base = bases[q];
            for (int i = 0; i < EXACT_BLOCK; i++) {
                uint16_t k = kept[q / 2 * EXACT_BLOCK + i] >> 8 * (q % 2), c = codes[i] >> 4 * q & 0xfu;
                uint16_t sign = (uint16_t)((k & 0x80u) << 8), exponent = (uint16_t)(base - c - (sign ? lead : 0));
                any |= c == EXACT_EXCEPTION;
                exponent = c < EXACT_EXCEPTION ? exponent : 0;
                high[q * EXACT_BLOCK + i] = (uint16_t)((k & 0x7fu) | sign | exponent << 7);
            }
        }
        for (int i = 0; any && i < EXACT_BLOCK; i += 4) {
            uint64_t some;
            memcpy(&some, codes + i, 8);
            EACH_EXCEPTION(some, i, place) {
                if (exceptions == 2 * EXACT_POOL || fars == EXACT_POOL) break;
                unsigned nibble = pool[exceptions / 2] >> exceptions % 2 * 4 & 0xfu;
                unsigned exponent = distance_of(high[place], bases[place / EXACT_BLOCK], lead) - EXACT_EXCEPTION - nibble;
                exceptions++;
                if (nibble == EXACT_FAR) exponent = pool[EXACT_POOL - 1 - fars++];
                high[place] |= (uint16_t)((exponent & 0xffu) << 7);
            }
        }
        if (e->dtype == FLOAT32) {
            uint32_t *restrict out = (uint32_t *)e->out + (first + g) * EXACT_GROUP;
            for (int i = 0; i < EXACT_GROUP; i++) out[i] = (uint32_t)high[i] << 16 | low[i];
        }
    }
}

EVERY_CPU static int exact_decode_slice(const void *job, int64_t first, int64_t last) {
    for (int64_t s = first; s < last; s++) decode_superblock(job, s);
    return 1;
}

static int run_exact(slice_function work, const exact_job *e, int threads) {
    return in_slices(work, e, (e->groups + EXACT_GROUPS - 1) / EXACT_GROUPS, EXACT_GROUPS * EXACT_GROUP, threads);
}

#endif
