/* Tensors to streams of ZFP blocks and back. BATCH blocks of any number of bits end on a 64-bit word, so batches are
 * independent of each other. */

#ifndef SSDTRAIN_CODECS_ZFP_STREAM_H
#define SSDTRAIN_CODECS_ZFP_STREAM_H

#include "_native_parallel.h"
#include "_native_zfp.h"

typedef struct {
    const void *x;
    void *out;
    uint64_t *stream; /* [n_words] */
    int64_t numel, n_words;
    int dtype, block_bits, accumulate;
} zfp_job;

INLINE int64_t zfp_batches(int64_t numel) { return (numel + 4 * BATCH - 1) / (4 * BATCH); }

/* Codes of `blocks` blocks to a stream that starts at a word's first bit. */
INLINE void write_codes(const lanes *restrict code, int words, int blocks, int block_bits, uint64_t *out) {
    uint64_t word = 0;
    int fill = 0;
    for (int j = 0; j < blocks; j++)
        for (int w = 0, bits = block_bits; w < words && bits > 0; w++, bits -= 32) {
            int take = bits < 32 ? bits : 32;
            uint64_t piece = code[w][j] & (~0u >> (32 - take));
            word |= piece << fill;
            fill += take;
            if (fill >= 64) {
                *out++ = word;
                fill -= 64;
                word = piece >> (take - fill);
            }
        }
    if (fill) *out = word;
}

/* The inverse, from `n_words` words; blocks that are not there are zero. */
INLINE void read_codes(const uint64_t *in, int64_t n_words, int words, int blocks, int block_bits,
                       lanes *restrict code) {
    for (int j = 0; j < BATCH; j++) {
        int64_t bit = (int64_t)j * block_bits;
        for (int w = 0, bits = block_bits; w < words; w++, bits -= 32, bit += 32) {
            int64_t at = bit >> 6;
            int shift = (int)(bit & 63);
            uint32_t piece = 0;
            if (j < blocks && bits > 0) {
                piece = (uint32_t)(in[at] >> shift);
                if (shift > 32 && at + 1 < n_words) piece |= (uint32_t)(in[at + 1] << (64 - shift));
                if (bits < 32) piece &= (1u << bits) - 1u;
            }
            code[w][j] = piece;
        }
    }
}

INLINE int encode_batches(const zfp_job *z, int block_bits, int words, int64_t first, int64_t last) {
    block_planes planes;
    lanes code[WORDS_MAX];
    float padded[4 * BATCH];
    uint32_t spoilt = 0;
    for (int64_t b = first; b < last; b++) {
        int64_t at = b * 4 * BATCH;
        int count = (int)least(z->numel - at, 4 * BATCH), blocks = (count + 3) / 4;
        const float *values = (const float *)z->x + at;
        if (z->dtype != FLOAT32 || count < 4 * BATCH) {
            load(padded, z->x, z->dtype, at, count, count);
            /* A partial block a, ab or abc becomes aaaa, abba or abca. */
            for (int i = count; i < 4 * blocks; i++)
                padded[i] = i % 4 == 2 ? padded[i - 1] : padded[count - 1 - (count - 1) % 4];
            for (int i = 4 * blocks; i < 4 * BATCH; i++) padded[i] = 0.0f;
            values = padded;
        }
        uint32_t settled = analyse(values, &planes);
        encode_batch(&planes, settled, block_bits, words, code);
        for (int j = 0; j < BATCH; j++) spoilt |= planes.header[j] == 1u;
        uint64_t *out = z->stream + b * block_bits;
        if (block_bits == 32 * words && blocks == BATCH) {
            uint32_t *restrict to = (uint32_t *)out;
            for (int j = 0; j < BATCH; j++)
                for (int w = 0; w < words; w++) to[words * j + w] = code[w][j];
        } else {
            write_codes(code, words, blocks, block_bits, out);
        }
    }
    return !spoilt;
}

INLINE void decode_batches(const zfp_job *z, int block_bits, int words, int64_t first, int64_t last) {
    block_codes codes;
    float padded[4 * BATCH];
    for (int64_t b = first; b < last; b++) {
        int64_t at = b * 4 * BATCH;
        int count = (int)least(z->numel - at, 4 * BATCH), blocks = (count + 3) / 4;
        int in_place = count == 4 * BATCH && z->dtype == FLOAT32 && !z->accumulate;
        float *values = in_place ? (float *)z->out + at : padded;
        const uint64_t *in = z->stream + b * block_bits;
        if (block_bits == 32 * words && blocks == BATCH) {
            const uint32_t *restrict from = (const uint32_t *)in;
            for (int j = 0; j < BATCH; j++)
                for (int w = 0; w < words; w++) codes.code[w][j] = from[words * j + w];
        } else {
            read_codes(in, z->n_words - b * block_bits, words, blocks, block_bits, codes.code);
        }
        int planes = decode_batch(&codes, block_bits, words);
        synthesise(&codes, planes, words, values);
        if (!in_place) store(padded, z->out, z->dtype, at, count, z->accumulate);
    }
}

EVERY_CPU static int zfp_encode_slice(const void *job, int64_t first, int64_t last) {
    const zfp_job *z = job;
    if (z->block_bits == 32) return encode_batches(z, 32, 1, first, last);
    if (z->block_bits == 64) return encode_batches(z, 64, 2, first, last);
    if (z->block_bits < 32) return encode_batches(z, z->block_bits, 1, first, last);
    if (z->block_bits < 64) return encode_batches(z, z->block_bits, 2, first, last);
    return encode_batches(z, z->block_bits, 4, first, last);
}

EVERY_CPU static int zfp_decode_slice(const void *job, int64_t first, int64_t last) {
    const zfp_job *z = job;
    if (z->block_bits == 32)
        decode_batches(z, 32, 1, first, last);
    else if (z->block_bits == 64)
        decode_batches(z, 64, 2, first, last);
    else if (z->block_bits < 32)
        decode_batches(z, z->block_bits, 1, first, last);
    else if (z->block_bits < 64)
        decode_batches(z, z->block_bits, 2, first, last);
    else
        decode_batches(z, z->block_bits, 4, first, last);
    return 1;
}

/* `stream` takes the blocks; what lies behind them becomes zero. Returns whether all values are finite. */
static int zfp_encode(const zfp_job *z, int threads) {
    int finite = in_slices(zfp_encode_slice, z, zfp_batches(z->numel), 4 * BATCH, threads);
    int64_t used = ((z->numel + 3) / 4 * z->block_bits + 63) / 64;
    for (; used < z->n_words; used++) z->stream[used] = 0;
    return finite;
}

static void zfp_decode(const zfp_job *z, int threads) {
    in_slices(zfp_decode_slice, z, zfp_batches(z->numel), 4 * BATCH, threads);
}

#endif
