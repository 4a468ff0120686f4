/* Reading memory that its owner may free or unmap at any moment, and a sample of what it holds. memory.py does the same.
 *
 * A load instruction on an unmapped address raises SIGSEGV, which ends the training without a message. A system call reports the
 * same address as EFAULT, so all of the caller's memory is read by system calls: whole blocks by the write itself, the rest by
 * process_vm_readv on this process (as fast as memcpy where pages are huge, three quarters of it in pages of 4 KiB). Where that
 * call is refused (seccomp filters of old container runtimes) the bytes pass through a pipe, at a third of the speed. */
#ifndef SSDTRAIN_IOPOOL_MEMORY_H
#define SSDTRAIN_IOPOOL_MEMORY_H

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "_iopool_faults.h"

#define PIPED (64 << 10) /* bytes for one pass through a pipe */
#define SAMPLES 16 /* words sampled from a write, at least; */
#define STRIDE (256 << 10) /* in large ones, a word from each so many bytes */

static atomic_int refused; /* process_vm_readv does not work here */

/* 0, or an errno: EFAULT for memory that is not mapped. */
static int copy_through_pipe(char *target, uint64_t source, uint64_t nbytes) {
    int ends[2], code = 0;
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK)) return errno;
    while (nbytes && !code) {
        ssize_t filled = write(ends[1], (const void *)(uintptr_t)source, nbytes < PIPED ? nbytes : PIPED);
        if (filled < 0) code = errno == EINTR ? 0 : errno;
        for (ssize_t taken; filled > 0 && !code; filled -= taken) {
            taken = read(ends[0], target, (size_t)filled);
            if (taken < 0 && errno != EINTR) code = errno;
            if (taken < 0) taken = 0;
            target += taken;
            source += (uint64_t)taken;
            nbytes -= (uint64_t)taken;
        }
    }
    close(ends[0]);
    close(ends[1]);
    return code;
}

/* Copy the caller's memory to a buffer of this module. 0, or an errno: EFAULT for memory that is not mapped. */
static int copy_checked(char *target, uint64_t source, uint64_t nbytes) {
    while (nbytes) {
        if (atomic_load(&refused)) return copy_through_pipe(target, source, nbytes);
        struct iovec to = {target, nbytes}, from = {(void *)(uintptr_t)source, nbytes};
        ssize_t done = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && errno != EFAULT && errno != ENOMEM) {
            atomic_store(&refused, 1);
            continue;
        }
        if (done <= 0) return done < 0 ? errno : EFAULT;
        target += done;
        source += (uint64_t)done;
        nbytes -= (uint64_t)done;
    }
    return 0;
}

/* A number that depends on the first, the last and some other words of the bytes, at irregular offsets; never 0. The memory must be
 * mapped. */
static uint64_t sample(uint64_t address, uint64_t nbytes) {
    const char *bytes = (const char *)(uintptr_t)address;
    uint64_t stride = nbytes / SAMPLES < STRIDE ? nbytes / SAMPLES : STRIDE, sum = nbytes, word = 0;
    if (stride < sizeof word) stride = sizeof word;
    if (nbytes < sizeof word) memcpy(&word, bytes, nbytes);
    else memcpy(&word, bytes + nbytes - sizeof word, sizeof word);
    sum = mix(sum ^ mix(word));
    if (nbytes >= sizeof word) { /* the first word: allocators link their free blocks there */
        memcpy(&word, bytes, sizeof word);
        sum = mix(sum ^ mix(word));
    }
    for (uint64_t at = 0; nbytes >= sizeof word && at + stride <= nbytes; at += stride) {
        memcpy(&word, bytes + at + mix(at + 1) % (stride - sizeof word + 1), sizeof word);
        sum = mix(sum ^ mix(word));
    }
    return sum ? sum : 1;
}

#endif
