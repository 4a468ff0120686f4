/* The Hadamard rotation of hadamard.py, addition by addition in the same order. */

#ifndef SSDTRAIN_CODECS_ROTATION_H
#define SSDTRAIN_CODECS_ROTATION_H

#include "_native_floats.h"
#include "_native_parallel.h"

/* Every machine has vectors of this width, or of half of it; butterflies inside one are a shuffle and an addition. */
#if defined(__x86_64__)
enum { WIDE = 8 };
#define WIDE_LANES {0, 1, 2, 3, 4, 5, 6, 7}
#else
enum { WIDE = 4 };
#define WIDE_LANES {0, 1, 2, 3}
#endif
typedef float wide __attribute__((vector_size(4 * WIDE)));
typedef int32_t wide_bits __attribute__((vector_size(4 * WIDE)));

INLINE wide wide_at(const float *v) {
    wide w;
    memcpy(&w, v, sizeof w);
    return w;
}

#if defined(__clang__)
#define SHUFFLE(v, index) shuffle_lanes(v, index)
INLINE wide shuffle_lanes(wide v, wide_bits index) {
    wide w;
    for (int i = 0; i < WIDE; i++) w[i] = v[index[i]];
    return w;
}
#else
#define SHUFFLE(v, index) __builtin_shuffle(v, index)
#endif

/* a + b in the lower and a - b in the upper lane of every pair that is `half` apart. */
#define BUTTERFLY_WITHIN(v, half)                                                                            \
    (SHUFFLE(v, lane ^ (half)) + (wide)((wide_bits)(v) ^ (((lane & (half)) == (half)) & INT32_MIN)))

INLINE void hadamard(wide *restrict w, int count) {
    const wide_bits lane = WIDE_LANES;
#pragma GCC unroll 64
    for (int i = 0; i < count; i++) {
        w[i] = BUTTERFLY_WITHIN(w[i], 1);
        w[i] = BUTTERFLY_WITHIN(w[i], 2);
        if (WIDE > 4) w[i] = BUTTERFLY_WITHIN(w[i], WIDE / 2);
    }
#pragma GCC unroll 8
    for (int half = 1; half < count; half *= 2)
#pragma GCC unroll 64
        for (int i = 0; i < count; i += 2 * half)
#pragma GCC unroll 64
            for (int j = i; j < i + half; j++) {
                wide a = w[j], b = w[j + half];
                w[j] = a + b;
                w[j + half] = a - b;
            }
}

/* Rotate a block in place: signs, unit, butterflies; and back. */
INLINE void rotate_block(float *restrict v, const float *restrict signs, int size, float unit) {
    wide w[BLOCK_MAX / WIDE];
#pragma GCC unroll 64
    for (int i = 0; i < size / WIDE; i++) w[i] = wide_at(v + WIDE * i) * wide_at(signs + WIDE * i) * unit;
    hadamard(w, size / WIDE);
#pragma GCC unroll 64
    for (int i = 0; i < size / WIDE; i++) memcpy(v + WIDE * i, &w[i], sizeof w[i]);
}

INLINE void unrotate_block(float *restrict v, const float *restrict signs, int size, float unit) {
    wide w[BLOCK_MAX / WIDE];
#pragma GCC unroll 64
    for (int i = 0; i < size / WIDE; i++) w[i] = wide_at(v + WIDE * i) * unit;
    hadamard(w, size / WIDE);
#pragma GCC unroll 64
    for (int i = 0; i < size / WIDE; i++) {
        w[i] *= wide_at(signs + WIDE * i);
        memcpy(v + WIDE * i, &w[i], sizeof w[i]);
    }
}

/* `call` with the size as a constant, for which compilers unroll the butterflies. */
#define WITH_SIZE(size, call)                                                                                \
    switch (size) {                                                                                          \
    case 16:                                                                                                 \
        call(16);                                                                                            \
        break;                                                                                               \
    case 32:                                                                                                 \
        call(32);                                                                                            \
        break;                                                                                               \
    case 64:                                                                                                 \
        call(64);                                                                                            \
        break;                                                                                               \
    case 128:                                                                                                \
        call(128);                                                                                           \
        break;                                                                                               \
    default:                                                                                                 \
        call(256);                                                                                           \
    }

/* `count` values in place, in blocks of `size`, and back. Not inlined into each kind of block code: those would take
 * minutes to compile. */
EVERY_CPU static void rotate_all(float *v, int64_t count, const float *signs, int size, float unit) {
#define CALL(size) for (int64_t i = 0; i < count; i += size) rotate_block(v + i, signs, size, unit)
    WITH_SIZE(size, CALL)
#undef CALL
}

EVERY_CPU static void unrotate_all(float *v, int64_t count, const float *signs, int size, float unit) {
#define CALL(size) for (int64_t i = 0; i < count; i += size) unrotate_block(v + i, signs, size, unit)
    WITH_SIZE(size, CALL)
#undef CALL
}

typedef struct {
    const void *x;
    void *out;
    float *rotated; /* [numel, filled up to whole blocks] */
    const float *signs;
    int64_t numel;
    int size, dtype, accumulate;
    float unit;
} rotation_job;

enum { ROTATED_TOGETHER = 2048 }; /* a unit of work, a multiple of every size */

/* rotated = (x * signs) * unit, rotated, in blocks of `size`; the last one is filled up with zeros. */
EVERY_CPU static int rotate_slice(const void *job, int64_t first, int64_t last) {
    const rotation_job *r = job;
    for (int64_t at = first * ROTATED_TOGETHER; at < least(last * ROTATED_TOGETHER, r->numel); at += ROTATED_TOGETHER) {
        int count = (int)least(r->numel - at, ROTATED_TOGETHER);
        int padded = (count + r->size - 1) / r->size * r->size;
        load(r->rotated + at, r->x, r->dtype, at, count, count);
        for (int i = count; i < padded; i++) r->rotated[at + i] = 0.0f;
        rotate_all(r->rotated + at, padded, r->signs, r->size, r->unit);
    }
    return 1;
}

/* The inverse, over `rotated` in place and from there to `out`. */
EVERY_CPU static int unrotate_slice(const void *job, int64_t first, int64_t last) {
    const rotation_job *r = job;
    for (int64_t at = first * ROTATED_TOGETHER; at < least(last * ROTATED_TOGETHER, r->numel); at += ROTATED_TOGETHER) {
        int count = (int)least(r->numel - at, ROTATED_TOGETHER);
        unrotate_all(r->rotated + at, (count + r->size - 1) / r->size * r->size, r->signs, r->size, r->unit);
        store(r->rotated + at, r->out, r->dtype, at, count, r->accumulate);
    }
    return 1;
}

static void run_rotation(slice_function work, const rotation_job *r, int threads) {
    in_slices(work, r, (r->numel + ROTATED_TOGETHER - 1) / ROTATED_TOGETHER, ROTATED_TOGETHER, threads);
}

#endif
