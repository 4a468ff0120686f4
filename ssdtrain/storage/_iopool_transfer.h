/* One piece's transfer: vectored calls, bounce buffers, injected faults. See "Note: [Image]" in pieces.py for the layout;
 * python_engine.py does the same. No Python here: this runs without the GIL. */
#ifndef SSDTRAIN_IOPOOL_TRANSFER_H
#define SSDTRAIN_IOPOOL_TRANSFER_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "_iopool_digest.h"
#include "_iopool_faults.h"
#include "_iopool_memory.h"

#define ALIGNMENT 4096
#define SECTOR 512 /* a short O_DIRECT transfer ends at a multiple of this */
#define BOUNCE (1 << 20) /* bytes of a worker's bounce buffer: what is copied and digested at a time */

enum { WRITE, READ, COPY_IN, COPY_OUT };
enum { ERRNO, END_OF_FILE, NOTHING_WRITTEN, EVENT, CHANGED, CORRUPTED };
enum { QUEUED, RUNNING, CANCELLED };

struct Operation;

/* Image bytes [start, end) at `offset` of its queue's file (of memory, for a copy); `start` is block-aligned. */
typedef struct Piece {
    struct Operation *operation;
    struct Piece *next;
    int64_t offset;
    uint64_t start, end;
    int queue, index;
} Piece;

typedef struct Operation {
    atomic_int references; /* the Python object, and the pieces together while any is queued */
    atomic_int state;      /* QUEUED until a worker or a canceller takes it, once */
    atomic_int finished, failed, remaining;
    int kind, pieces;
    uint64_t address, nbytes, page_offset, event;
    uint64_t checksum; /* sample of the bytes when the write was submitted; 0: none was taken */
    int digesting;
    uint64_t expected;     /* of a read: the digest of the write */
    atomic_ullong digest;  /* of all bytes, from the pieces that workers have done; never 0 once it is complete */
    struct Operation *next; /* in the list of those that wait for an event */
    int64_t serial;
    int code, detail, error_queue; /* the first failure, under `lock` */
    int64_t error_offset, error_bytes;
    double begun, seconds; /* under `lock` until finished */
    pthread_mutex_t lock;
    pthread_cond_t ended;
    Piece piece[];
} Operation;

typedef struct {
    int code, detail;
    int64_t offset;
} Failure;

static uint64_t round_down(uint64_t x) { return x / ALIGNMENT * ALIGNMENT; }
static uint64_t round_up(uint64_t x) { return round_down(x + ALIGNMENT - 1); }

/* preadv or pwritev until everything is transferred, after EINTR and short transfers too. `unit` is the alignment of a resumed
 * call; an unaligned rest of a short call is transferred again. `vector` is modified. */
static int transfer(const Faults *f, const Operation *op, int piece, int fd, struct iovec *vector, int count, int64_t offset,
                    uint64_t unit, Failure *failure) {
    uint64_t left = 0;
    for (int i = 0; i < count; i++) left += vector[i].iov_len;
    for (int attempt = 0; left; attempt++) {
        struct iovec limited[3];
        struct iovec *call = vector;
        int parts = count, interrupted = 0;
        uint64_t odd = 0;
        if (f) {
            interrupted = f->interrupt > 0 && chance(f->seed, INTERRUPT, op->kind, op->serial, piece, attempt) < f->interrupt;
            if (f->shorten > 0 && left > unit && chance(f->seed, SHORT, op->kind, op->serial, piece, attempt) < f->shorten) {
                uint64_t units = (left - 1) / unit;
                uint64_t random = hashed(f->seed, SHORT_LENGTH, op->kind, op->serial, piece, attempt);
                uint64_t want = (1 + random % units) * unit;
                odd = random % (unit < SECTOR ? unit : SECTOR); /* as if it had stopped inside a sector */
                for (parts = 0; want && parts < count; parts++) {
                    limited[parts] = vector[parts];
                    if (limited[parts].iov_len > want) limited[parts].iov_len = want;
                    want -= limited[parts].iov_len;
                }
                call = limited;
            }
        }
        ssize_t done = -1;
        if (interrupted) errno = EINTR;
        else done = op->kind == WRITE ? pwritev(fd, call, parts, offset) : preadv(fd, call, parts, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) {
            *failure = (Failure){errno, ERRNO, offset};
            return -1;
        }
        uint64_t gone = (uint64_t)done > odd ? (uint64_t)done - odd : (uint64_t)done;
        if (gone < left && unit > 1) gone -= gone % SECTOR;
        if (!gone) {
            *failure = (Failure){EIO, op->kind == WRITE ? NOTHING_WRITTEN : END_OF_FILE, offset};
            return -1;
        }
        offset += (int64_t)gone;
        left -= gone;
        for (; count && gone >= vector->iov_len; count--) gone -= (vector++)->iov_len;
        if (count) {
            vector->iov_base = (char *)vector->iov_base + gone;
            vector->iov_len -= gone;
        }
    }
    return 0;
}

/* Image and memory agree mod 4096: whole blocks in place, the first and the last one through the bounce buffer. */
static int transfer_aligned(const Faults *f, const Operation *op, const Piece *p, int fd, char *bounce, Failure *failure) {
    char *origin = (char *)(uintptr_t)(op->address - op->page_offset);
    uint64_t start = p->start > op->page_offset ? p->start : op->page_offset;
    uint64_t first = round_down(start), last = round_up(p->end), low = first, high = last;
    struct { uint64_t from, to; char *at; } edge[2];
    int edges = 0, count = 0;
    struct iovec vector[3];
    if (start > first) {
        edge[edges].from = start;
        edge[edges].to = p->end < first + ALIGNMENT ? p->end : first + ALIGNMENT;
        edge[edges++].at = bounce + (start - first);
        low = first + ALIGNMENT;
        vector[count++] = (struct iovec){bounce, ALIGNMENT};
    }
    int tail = p->end < last && low < last;
    if (tail) {
        high = last - ALIGNMENT;
        edge[edges].from = high;
        edge[edges].to = p->end;
        edge[edges++].at = bounce + ALIGNMENT;
    }
    if (low < high) vector[count++] = (struct iovec){origin + low, high - low};
    if (tail) vector[count++] = (struct iovec){bounce + ALIGNMENT, ALIGNMENT};
    if (op->kind == WRITE && edges) {
        memset(bounce, 0, 2 * ALIGNMENT);
        for (int i = 0; i < edges; i++) {
            int code = copy_checked(edge[i].at, (uintptr_t)origin + edge[i].from, edge[i].to - edge[i].from);
            if (code) {
                *failure = (Failure){code, ERRNO, p->offset};
                return -1;
            }
        }
    }
    if (transfer(f, op, p->index, fd, vector, count, p->offset + (int64_t)(first - p->start), ALIGNMENT, failure)) return -1;
    if (op->kind == READ)
        for (int i = 0; i < edges; i++) memcpy(origin + edge[i].from, edge[i].at, edge[i].to - edge[i].from);
    return 0;
}

/* The part of a piece in its BOUNCE bytes from image byte `at` on. */
typedef struct {
    uint64_t from, end;
} Chunk;

static Chunk chunk_at(const Operation *op, const Piece *p, uint64_t at) {
    return (Chunk){at > op->page_offset ? at : op->page_offset, p->end - at < BOUNCE ? p->end : at + BOUNCE};
}

/* Pieces end in any order: their digests are added up. */
static void add_digest(Operation *op, uint64_t digest) { atomic_fetch_add(&op->digest, digest); }

/* A read to an address of a page offset other than that of the write: every chunk is copied. */
static int read_elsewhere(const Faults *f, Operation *op, const Piece *p, int fd, char *bounce, Failure *failure) {
    char *origin = (char *)(uintptr_t)(op->address - op->page_offset);
    uint64_t digest = mix(p->start + 1);
    for (uint64_t at = p->start; at < p->end; at += BOUNCE) {
        Chunk c = chunk_at(op, p, at);
        if (c.from >= c.end) continue;
        struct iovec vector = {bounce, round_up(c.end - at)};
        if (transfer(f, op, p->index, fd, &vector, 1, p->offset + (int64_t)(at - p->start), ALIGNMENT, failure)) return -1;
        if (op->digesting) digest = digest_bytes(digest, bounce + (c.from - at), c.end - c.from);
        memcpy(origin + c.from, bounce + (c.from - at), c.end - c.from);
    }
    add_digest(op, digest);
    return 0;
}

/* Copy a piece to or from the host tier, chunk by chunk: it is digested while it is in the processor's cache. */
static int copy_piece(Operation *op, const Piece *p, Failure *failure) {
    uint64_t digest = mix(p->start + 1);
    for (uint64_t at = p->start; at < p->end; at += BOUNCE) {
        Chunk c = chunk_at(op, p, at);
        char *mine = (char *)(uintptr_t)(op->address + c.from);
        char *stored = (char *)(uintptr_t)p->offset + (c.from - p->start);
        int code = 0;
        if (op->kind == COPY_IN) code = copy_checked(stored, (uintptr_t)mine, c.end - c.from);
        else memcpy(mine, stored, c.end - c.from);
        if (code) {
            *failure = (Failure){code, ERRNO, p->offset};
            return -1;
        }
        if (op->digesting) digest = digest_bytes(digest, op->kind == COPY_IN ? stored : mine, c.end - c.from);
    }
    add_digest(op, digest);
    return 0;
}

/* Add the bytes of a piece to the digest of its operation: what is about to be written, or what was read. 0, or an errno. The
 * source of a write with an event is a buffer of the arena, which is read in place; other memory may be unmapped at any moment. */
static int digest_piece(Operation *op, const Piece *p, char *bounce) {
    const char *origin = (const char *)(uintptr_t)(op->address - op->page_offset);
    uint64_t digest = mix(p->start + 1);
    for (uint64_t at = p->start; at < p->end; at += BOUNCE) {
        Chunk c = chunk_at(op, p, at);
        if (c.from >= c.end) continue;
        const char *bytes = origin + c.from;
        if (op->kind == WRITE && !op->event) {
            int code = copy_checked(bounce, (uintptr_t)bytes, c.end - c.from);
            if (code) return code;
            bytes = bounce;
        }
        digest = digest_bytes(digest, bytes, c.end - c.from);
    }
    add_digest(op, digest);
    return 0;
}

/* Transfer a piece, and add it to the digest of its operation. */
static int transfer_piece(const Faults *f, Operation *op, const Piece *p, int fd, int direct, char *bounce, Failure *failure) {
    inject_delay(f, op->kind, op->serial, p->index);
    if (injects_failure(f, op->kind, op->serial, p->index, op->pieces)) {
        *failure = (Failure){f->error, ERRNO, p->offset};
        return -1;
    }
    if (op->kind > READ) return copy_piece(op, p, failure);
    uint64_t start = p->start > op->page_offset ? p->start : op->page_offset;
    char *source = (char *)(uintptr_t)(op->address + start - op->page_offset);
    int elsewhere = direct && ((uintptr_t)source - start) % ALIGNMENT, code = 0;
    if (elsewhere) return read_elsewhere(f, op, p, fd, bounce, failure);
    if (op->digesting && op->kind == WRITE && (code = digest_piece(op, p, bounce))) {
        *failure = (Failure){code, ERRNO, p->offset};
        return -1;
    }
    if (direct) code = transfer_aligned(f, op, p, fd, bounce, failure);
    else {
        struct iovec vector = {source, p->end - start};
        code = transfer(f, op, p->index, fd, &vector, 1, p->offset + (int64_t)(start - p->start), 1, failure);
    }
    if (!code && op->digesting && op->kind == READ) digest_piece(op, p, bounce);
    return code;
}

#endif
