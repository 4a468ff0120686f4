/* Huge pages under the memory that is written from.
 *
 * For a direct write the kernel pins every page of the memory: in pages of 4 KiB that is half of a worker's CPU time, taken
 * from the computation, and ten times what it is in pages of 2 MiB. Memory that malloc gives out again and again is worth
 * being put into huge pages once (MADV_COLLAPSE, Linux 6.1; 1 to 5 ms of CPU time for a block of 2 MiB, which some ten
 * steps of training pay back). Whether malloc gave it back since, nobody tells: so a block is looked at again after a while,
 * and what all of it costs is a small part of the time at most. A block that the kernel does not want to collapse, because
 * somebody else pins it or for any other reason, stays as it is. No Python here: this runs without the GIL. */
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
#define REMEMBERED 4096 /* blocks, of 8 GiB; others take the place of what shares their remainder */
#define AGAIN 30.0      /* seconds until a block is looked at again */
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

/* 1, once, for a block that was not looked at lately. */
static int due(Pages *pages, uint64_t block, double time) {
    uint64_t at = block % REMEMBERED;
    if (pages->seen[at].block == block && time < pages->seen[at].due) return 0;
    pages->seen[at].block = block;
    pages->seen[at].due = time + AGAIN;
    return 1;
}

/* Put the blocks that [start, end) touches into huge pages. Every byte in them keeps its content, whoever owns it now: the owner may
 * have freed the memory meanwhile. A block that is not mapped, or not all of one map, stays as it is: madvise reports an error. */
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
