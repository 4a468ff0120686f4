/* Large tensors in slices, one per thread. Slices are whole blocks with results of their own, so the bytes are the same
 * however many there are. Threads live for one call: a fork, an exit or a signal finds none. */

#ifndef SSDTRAIN_CODECS_PARALLEL_H
#define SSDTRAIN_CODECS_PARALLEL_H

#include <pthread.h>
#include <stdint.h>

enum { THREADS_MAX = 64, VALUES_PER_THREAD = 1 << 18 }; /* below that, starting a thread takes longer than it saves */

/* Works on units first .. last - 1 of a job; returns flags that hold for all of them: bit 0, all are finite. */
typedef int (*slice_function)(const void *job, int64_t first, int64_t last);

typedef struct {
    slice_function work;
    const void *job;
    int64_t first, last;
    int flags;
} slice;

static void *run_slice(void *argument) {
    slice *s = argument;
    s->flags = s->work(s->job, s->first, s->last);
    return 0;
}

/* `units` of `values` values each, by at most `threads` threads; returns the flags that hold for all. */
static int in_slices(slice_function work, const void *job, int64_t units, int64_t values, int threads) {
    int64_t most = units * values / VALUES_PER_THREAD;
    int count = threads < THREADS_MAX ? threads : THREADS_MAX, flags = ~0;
    if (count > most) count = (int)most;
    if (count <= 1) return work(job, 0, units);
    slice slices[THREADS_MAX];
    pthread_t ids[THREADS_MAX];
    int started[THREADS_MAX] = {0};
    for (int i = 0; i < count; i++) slices[i] = (slice){work, job, units * i / count, units * (i + 1) / count, 1};
    for (int i = 1; i < count; i++) started[i] = pthread_create(&ids[i], 0, run_slice, &slices[i]) == 0;
    for (int i = 0; i < count; i++)
        if (!started[i]) run_slice(&slices[i]); /* the first, and those that the system has no thread for */
    for (int i = 0; i < count; i++) {
        if (started[i]) pthread_join(ids[i], 0);
        flags &= slices[i].flags;
    }
    return flags;
}

#endif
