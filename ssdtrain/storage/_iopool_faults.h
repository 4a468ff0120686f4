/* Injected faults. The numbers of the questions and the hash are those of faults.py, so that both engines decide alike. */
#ifndef SSDTRAIN_IOPOOL_FAULTS_H
#define SSDTRAIN_IOPOOL_FAULTS_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { DELAY = 1, DELAY_LENGTH, SHORT, SHORT_LENGTH, INTERRUPT, FAIL, FAIL_PIECE, SHUFFLE };

typedef struct {
    uint64_t seed;
    double delay, max_delay, shorten, interrupt;
    double failure[2]; /* of a write, of a read */
    int error, torn;
    int64_t *chosen[2]; /* sorted numbers of the operations that fail */
    size_t chosen_count[2];
} Faults;

/* The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). */
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static uint64_t hashed(uint64_t seed, uint64_t question, uint64_t kind, uint64_t serial, uint64_t piece, uint64_t attempt) {
    const uint64_t values[] = {question, kind, serial, piece, attempt};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        seed = mix((seed ^ values[i]) + UINT64_C(0x9E3779B97F4A7C15));
    return seed;
}

static double chance(uint64_t seed, int question, int kind, int64_t serial, int piece, int attempt) {
    return (double)(hashed(seed, question, kind, serial, piece, attempt) >> 11) * 0x1p-53;
}

static int injects_failure(const Faults *f, int kind, int64_t serial, int piece, int pieces) {
    if (!f || kind > 1) return 0;
    int fails = f->failure[kind] > 0 && chance(f->seed, FAIL, kind, serial, 0, 0) < f->failure[kind];
    for (size_t i = 0; !fails && i < f->chosen_count[kind]; i++) fails = f->chosen[kind][i] == serial;
    return fails && (uint64_t)piece == hashed(f->seed, FAIL_PIECE, kind, serial, 0, 0) % (uint64_t)pieces;
}

static void inject_delay(const Faults *f, int kind, int64_t serial, int piece) {
    if (!f || !(f->delay > 0) || chance(f->seed, DELAY, kind, serial, piece, 0) >= f->delay) return;
    double length = chance(f->seed, DELAY_LENGTH, kind, serial, piece, 0) * f->max_delay;
    struct timespec left = {(time_t)length, (long)((length - (double)(time_t)length) * 1e9)};
    while (nanosleep(&left, &left)) {}
}

#endif
