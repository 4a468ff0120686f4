/* Codes of 8, 4 or 2 bits in blocks that share a scale (block.py, Note: [Block codes], and fp8.py), operation by
 * operation as in torch.
 *
 * Note: [Groups]
 * GROUP_VALUES values are worked on at a time: first the range of each block, then the scales of all blocks side by
 * side, then the codes. So the divisions and roundings behind a scale take one vector, not one block after the other. */

#ifndef SSDTRAIN_CODECS_BLOCK_H
#define SSDTRAIN_CODECS_BLOCK_H

#include "_native_codes.h"
#include "_native_parallel.h"
#include "_native_philox.h"
#include "_native_rotation.h"

enum { GROUP_VALUES = 2048, BLOCK_MIN = 32, GROUP_MAX = GROUP_VALUES / BLOCK_MIN };

typedef struct {
    const void *x; /* encode */
    void *out;     /* decode */
    uint16_t *scales, *zeros; /* zeros: of asymmetric blocks */
    uint8_t *data;
    int64_t numel;
    int dtype, block, bits, kind, stochastic, accumulate;
    float cap;    /* SYMMETRIC and floats: the largest scale; ASYMMETRIC: the largest value of the dtype */
    float lowest; /* ASYMMETRIC: the smallest zero point */
    random_key key;
    const float *signs; /* of a Hadamard rotation of each block, or NULL */
    float unit;
} block_job;

/* The largest magnitude as bits: their order is that of the magnitudes, with Inf and NaN above every finite
 * one. */
INLINE uint32_t largest_bits(const float *restrict v, int block) {
    uint32_t most = 0;
    for (int i = 0; i < block; i++) {
        uint32_t u = bits_of(v[i]) & ABS_MASK;
        most = u > most ? u : most;
    }
    return most;
}

/* Floats as integers of the same order (with -0 below 0), and back. */
INLINE int32_t in_order(uint32_t u) { return (int32_t)(u ^ ((uint32_t)((int32_t)u >> 31) & ABS_MASK)); }

INLINE void extremes(const float *restrict v, int block, float *low, float *high) {
    int32_t lowest = INT32_MAX, most = INT32_MIN;
    for (int i = 0; i < block; i++) {
        int32_t u = in_order(bits_of(v[i]));
        lowest = u < lowest ? u : lowest;
        most = u > most ? u : most;
    }
    *low = float_of((uint32_t)in_order((uint32_t)lowest));
    *high = float_of((uint32_t)in_order((uint32_t)most));
}

INLINE float symmetric_scale(uint32_t largest, float codes, float cap) {
    return clamp(ceil_bfloat16(float_of(largest) / codes), 0x1p-126f, cap);
}

INLINE float asymmetric_scale(float zero, float high, float codes, float cap) {
    float foot = zero / codes, spread = high / codes - foot, most = cap / codes - foot;
    spread = ceil_bfloat16(spread < 0 ? 0.0f : spread);
    most = floor_bfloat16(most < 0 ? 0.0f : most);
    spread = spread < most ? spread : most;
    return spread < 0x1p-125f ? 0x1p-125f : spread;
}

/* Note: [Time to compile]
 * What encode_group and decode_group do once for a group, whatever its block and kind, stands in functions of its own:
 * inlined into each of the 40 pairs of block and kind, three times for the kinds of CPU, it takes minutes to compile. */

/* The values of a group in `values` or, where they need no work, in the tensor itself. */
EVERY_CPU static const float *group_values(const block_job *f, int64_t at, int padded, float *values) {
    int count = (int)least(f->numel - at, padded);
    if (f->dtype == FLOAT32 && count == padded && !f->signs) return (const float *)f->x + at;
    load(values, f->x, f->dtype, at, count, padded);
    if (f->signs) {
        for (int i = count; i < padded; i++) values[i] = 0.0f;
        rotate_all(values, padded, f->signs, f->block, f->unit);
    }
    return values;
}

/* Random words of a group: word j of counter i at words[j * GROUP_VALUES / 4 + i]. */
EVERY_CPU static void group_words(uint32_t *words, int64_t at, const random_key *key) {
    philox(words, (uint32_t)(at / 4), GROUP_VALUES / 4, key);
}

/* `values` of a group, rotated back, to the tensor unless they are there already. */
EVERY_CPU static void store_group(const block_job *f, int64_t at, int padded, float *values, int in_place) {
    if (f->signs) unrotate_all(values, padded, f->signs, f->block, f->unit);
    if (!in_place) store(values, f->out, f->dtype, at, (int)least(f->numel - at, padded), f->accumulate);
}

INLINE int encode_group(const block_job *f, int block, int kind, int stochastic, int64_t first, int blocks) {
    float values[GROUP_VALUES], low[GROUP_MAX], high[GROUP_MAX], scale[GROUP_MAX], zero[GROUP_MAX];
    uint32_t largest[GROUP_MAX], words[GROUP_VALUES], most = 0;
    uint8_t codes[BLOCK_MAX];
    int bits = kind == E4M3 || kind == E5M2 ? 8 : f->bits;
    float reach = largest_code(kind, bits);
    const float *v = group_values(f, first * block, blocks * block, values);
    for (int b = 0; b < blocks; b++) {
        largest[b] = largest_bits(v + b * block, block);
        if (kind == ASYMMETRIC) extremes(v + b * block, block, &low[b], &high[b]);
    }
    for (int b = 0; b < blocks; b++) {
        uint32_t nan = 0u - (uint32_t)(largest[b] >= INF_BITS);
        most = largest[b] > most ? largest[b] : most;
        zero[b] = 0.0f;
        if (kind == ASYMMETRIC) {
            zero[b] = floor_bfloat16((low[b] < f->lowest ? f->lowest : low[b]) + 0.0f);
            scale[b] = asymmetric_scale(zero[b], high[b], reach, f->cap);
            f->zeros[first + b] = (uint16_t)((bits_of(zero[b]) >> 16 & ~nan) | (0x7fc0u & nan));
        } else {
            scale[b] = symmetric_scale(largest[b], reach, f->cap);
        }
        f->scales[first + b] = (uint16_t)((bits_of(scale[b]) >> 16 & ~nan) | (0x7fc0u & nan));
    }
    int quarter = block / 4, counters = GROUP_VALUES / 4;
    if (stochastic) group_words(words, first * block, &f->key);
    for (int b = 0; b < blocks; b++) {
        uint32_t drawn[BLOCK_MAX];
        for (int part = 0; part < 4 && stochastic; part++)
            memcpy(drawn + part * quarter, words + part * counters + b * quarter, 4 * (size_t)quarter);
        if (largest[b] >= INF_BITS)
            memset(codes, code_of_zero(kind, bits), (size_t)block);
        else
            quantise(codes, v + b * block, block, kind, bits, scale[b], zero[b], stochastic ? drawn : 0);
        pack(f->data + (first + b) * (block * bits / 8), codes, block, bits);
    }
    return most < INF_BITS;
}

/* Groups first .. last - 1; returns whether all blocks are finite. */
INLINE int encode_groups(const block_job *f, int block, int kind, int stochastic, int64_t first, int64_t last) {
    int64_t blocks = (f->numel + block - 1) / block;
    int group = GROUP_VALUES / block, finite = 1;
    for (int64_t g = first; g < last; g++)
        finite &= encode_group(f, block, kind, stochastic, g * group, (int)least(group, blocks - g * group));
    return finite;
}

INLINE void decode_group(const block_job *f, int block, int kind, int64_t first, int blocks) {
    float values[GROUP_VALUES];
    int64_t at = first * block;
    int padded = blocks * block, count = (int)least(f->numel - at, padded);
    int in_place = count == padded && f->dtype == FLOAT32 && !f->accumulate;
    int bits = kind == E4M3 || kind == E5M2 ? 8 : f->bits;
    float *v = in_place ? (float *)f->out + at : values;
    for (int b = 0; b < blocks; b++) {
        float scale = from_bfloat16(f->scales[first + b]);
        float zero = kind == ASYMMETRIC ? from_bfloat16(f->zeros[first + b]) : 0.0f;
        unpack(v + b * block, f->data + (first + b) * (block * bits / 8), block, kind, bits, scale, zero);
    }
    store_group(f, at, padded, v, in_place);
}

INLINE void decode_groups(const block_job *f, int block, int kind, int64_t first, int64_t last) {
    int64_t blocks = (f->numel + block - 1) / block;
    int group = GROUP_VALUES / block;
    for (int64_t g = first; g < last; g++)
        decode_group(f, block, kind, g * group, (int)least(group, blocks - g * group));
}

/* Block and kind as constants: compilers unroll and vectorise what they know. */
INLINE int encode_kind(const block_job *f, int block, int64_t first, int64_t last) {
    switch (f->kind) {
    case SYMMETRIC:
        return f->stochastic ? encode_groups(f, block, SYMMETRIC, 1, first, last)
                             : encode_groups(f, block, SYMMETRIC, 0, first, last);
    case ASYMMETRIC:
        return f->stochastic ? encode_groups(f, block, ASYMMETRIC, 1, first, last)
                             : encode_groups(f, block, ASYMMETRIC, 0, first, last);
    case E4M3:
        return encode_groups(f, block, E4M3, 0, first, last);
    default:
        return encode_groups(f, block, E5M2, 0, first, last);
    }
}

INLINE void decode_kind(const block_job *f, int block, int64_t first, int64_t last) {
    switch (f->kind) {
    case SYMMETRIC:
        decode_groups(f, block, SYMMETRIC, first, last);
        break;
    case ASYMMETRIC:
        decode_groups(f, block, ASYMMETRIC, first, last);
        break;
    case E4M3:
        decode_groups(f, block, E4M3, first, last);
        break;
    default:
        decode_groups(f, block, E5M2, first, last);
    }
}

/* A function for each block: optimising one function takes longer than optimising its parts. */
#define OF_BLOCK(block)                                                                                      \
    EVERY_CPU static int encode_slice_##block(const void *job, int64_t first, int64_t last) {                \
        return encode_kind(job, block, first, last);                                                         \
    }                                                                                                        \
    EVERY_CPU static int decode_slice_##block(const void *job, int64_t first, int64_t last) {                \
        decode_kind(job, block, first, last);                                                                \
        return 1;                                                                                            \
    }
OF_BLOCK(32)
OF_BLOCK(64)
OF_BLOCK(128)
OF_BLOCK(256)
#undef OF_BLOCK

static int block_encode_slice(const void *job, int64_t first, int64_t last) {
    switch (((const block_job *)job)->block) {
    case 32:
        return encode_slice_32(job, first, last);
    case 64:
        return encode_slice_64(job, first, last);
    case 128:
        return encode_slice_128(job, first, last);
    default:
        return encode_slice_256(job, first, last);
    }
}

static int block_decode_slice(const void *job, int64_t first, int64_t last) {
    switch (((const block_job *)job)->block) {
    case 32:
        return decode_slice_32(job, first, last);
    case 64:
        return decode_slice_64(job, first, last);
    case 128:
        return decode_slice_128(job, first, last);
    default:
        return decode_slice_256(job, first, last);
    }
}

static int64_t block_groups(const block_job *f) { return (f->numel + GROUP_VALUES - 1) / GROUP_VALUES; }

/* Returns whether all blocks are finite. */
static int block_encode(const block_job *f, int threads) {
    return in_slices(block_encode_slice, f, block_groups(f), GROUP_VALUES, threads);
}

static void block_decode(const block_job *f, int threads) {
    in_slices(block_decode_slice, f, block_groups(f), GROUP_VALUES, threads);
}

#endif
