/* Huge pages for the memory that is written from.
 *
 * For a direct write the kernel pins every page of the memory: with pages of 4 KiB that is half of a worker's CPU time, taken
 * from the computation, and ten times as much as with pages of 2 MiB. Memory that malloc hands out again and again is worth
 * collapsing into huge pages once (MADV_COLLAPSE, Linux 6.1; 1 to 5 ms of CPU time for a block of 2 MiB, which some ten
 * steps of training repay). There is no notice when malloc has returned it to the system: a block is tried again after a while,
 * and the total cost is limited to a small share of the elapsed time. A block that the kernel does not collapse, for instance
 * because it is pinned elsewhere, stays as it is. No Python here: this runs without the GIL. */
#ifndef SSDTRAIN_IOPOOL_PAGES_H
#define SSDTRAIN_IOPOOL_PAGES_H

#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define HUGE_PAGE (2ull << 20)
#define REMEMBERED 4096 /* blocks, 8 GiB together; a block replaces the one with the same remainder */
#define AGAIN 30.0      /* seconds until a block is tried again */
#define ALLOWANCE 1.0   /* seconds of CPU time that may be spent at the beginning, */
#define SHARE 0.002     /* and this part of the time since then */

typedef struct {
    pthread_mutex_t lock;
    double began, spent;
    struct {
        uint64_t block;
        double due;
    } seen[REMEMBERED];
} Pages;

static double clock_seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double now(void) { return clock_seconds(CLOCK_MONOTONIC); }
static double cpu_time(void) { return clock_seconds(CLOCK_THREAD_CPUTIME_ID); }

/* 1 if the block was not tried in the last AGAIN seconds; it counts as tried now. */
static int due(Pages *pages, uint64_t block, double time) {
    uint64_t at = block % REMEMBERED;
    if (pages->seen[at].block == block && time < pages->seen[at].due) return 0;
    pages->seen[at].block = block;
    pages->seen[at].due = time + AGAIN;
    return 1;
}

/* Collapse the blocks that overlap [start, end) into huge pages. No byte changes, so it is safe even if the memory was freed and
 * reused meanwhile. A block that is not mapped, or lies in several mappings, stays as it is: madvise reports it. */
static void collapse(Pages *pages, uint64_t start, uint64_t end) {
    if (end - start < HUGE_PAGE) return;
    uint64_t from = 0, to = 0;
    double time = now(), begun = cpu_time();
    pthread_mutex_lock(&pages->lock);
    if (pages->spent < ALLOWANCE + SHARE * (time - pages->began))
        for (uint64_t block = start / HUGE_PAGE; block * HUGE_PAGE < end; block++) {
            if (!due(pages, block, time)) continue;
            if (!to) from = block;
            to = block + 1;
        }
    pthread_mutex_unlock(&pages->lock);
    if (!to) return;
    madvise((void *)(uintptr_t)(from * HUGE_PAGE), (to - from) * HUGE_PAGE, MADV_COLLAPSE);
    pthread_mutex_lock(&pages->lock);
    pages->spent += cpu_time() - begun;
    pthread_mutex_unlock(&pages->lock);
}

#endif
