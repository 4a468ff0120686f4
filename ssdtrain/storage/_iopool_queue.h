/* Queues, workers and the states of an operation. No Python here: a worker never takes the GIL.
 *
 * Locks, in the order in which they are taken: Pool.submitting, Queue.lock or Pool.awaiting, Operation.lock; Pool.gate and Pages.lock
 * alone. A cancel takes none but Operation.lock, to wake waiters. */
#ifndef SSDTRAIN_IOPOOL_QUEUE_H
#define SSDTRAIN_IOPOOL_QUEUE_H

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "_iopool_pages.h"
#include "_iopool_transfer.h"

#define STACK (512 << 10) /* bytes; virtual, a worker uses a few KiB, a CUDA call more */

/* Queued bytes per active worker of a direction above which another worker is woken. Each worker that wakes takes a core from the
 * computation for a moment, and the other compute threads wait for that core at their next barrier: training was 1% slower with
 * all four woken for each tensor than with one. A drive that falls behind gets all of them. */
#define BACKLOG (16ull << 20)

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t ready;
    Piece *head[2], *tail[2]; /* writes, reads */
    int fd, direct;
    uint64_t waiting[2]; /* bytes of queued pieces */
    int working[2];      /* workers that have taken a piece */
    int limit;           /* of them in each direction; the queue has one worker more, so that reads never wait for writes */
    uint64_t bytes[2];
    double seconds[2], since[2]; /* time with a transfer under way */
    int active[2];
} Queue;

typedef struct Pool Pool;

typedef struct {
    Pool *pool;
    Queue *queue;
    char *bounce;
    pthread_t thread;
} Worker;

struct Pool {
    Queue *queues;
    Worker *workers;
    int queue_count, worker_count, started;
    char *bounce;
    uint64_t piece;
    Faults *faults;
    Pages *pages; /* NULL: leave them as they are */
    int (*event_query)(void *); /* NULL: no operation has an event */
    int (*set_device)(int);
    int (*exchange_capture_mode)(int *);
    int device;
    Operation *first, *last; /* operations that wait for their event, in order; see _iopool_events.h */
    _Atomic(Operation *) queried; /* the one whose event is being polled */
    pthread_mutex_t awaiting;
    pthread_cond_t submitted;
    pthread_t waiter;
    int waiter_started;
    pthread_mutex_t submitting; /* closed, serials */
    atomic_int closed;
    int joined;
    int64_t serials[4];
    atomic_int held[2], held_begun[2];
    pthread_mutex_t gate, joining;
    pthread_cond_t opened;
    atomic_ullong cancelled;
};

static void forget(Operation *op) {
    if (atomic_fetch_sub(&op->references, 1) != 1) return;
    pthread_mutex_destroy(&op->lock);
    pthread_cond_destroy(&op->ended);
    free(op);
}

static void finish(Operation *op) {
    pthread_mutex_lock(&op->lock);
    if (op->begun > 0) op->seconds = now() - op->begun;
    atomic_store(&op->finished, 1);
    pthread_cond_broadcast(&op->ended);
    pthread_mutex_unlock(&op->lock);
}

/* 1 if nothing of it was or will be transferred. Its pieces stay queued until a worker drops them. Its event may still be polled:
 * see `wait_for_event_query`. */
static int cancel(Pool *pool, Operation *op) {
    int expected = QUEUED;
    if (!atomic_compare_exchange_strong(&op->state, &expected, CANCELLED)) return expected == CANCELLED;
    atomic_fetch_add(&pool->cancelled, op->nbytes);
    finish(op);
    return 1;
}

static int claim(Operation *op) {
    int expected = QUEUED;
    return atomic_compare_exchange_strong(&op->state, &expected, RUNNING) || expected == RUNNING;
}

static void fail(Operation *op, const Piece *piece, Failure failure) {
    pthread_mutex_lock(&op->lock);
    if (!op->failed) {
        op->code = failure.code;
        op->detail = failure.detail;
        op->error_queue = piece->queue;
        op->error_offset = failure.offset;
        op->error_bytes = (int64_t)(piece->end - piece->start);
        atomic_store(&op->failed, 1);
    }
    pthread_mutex_unlock(&op->lock);
}

/* 1 if a worker may take a piece in this direction. Under the queue's lock. */
static int available(const Pool *pool, const Queue *queue, int direction) {
    if (!queue->head[direction] || queue->working[direction] >= queue->limit) return 0;
    return !pool->held[direction] || pool->closed;
}

/* 1 if another worker is needed for what is queued. Under the queue's lock. A direction without an active worker always needs one. */
static int wanted(const Pool *pool, const Queue *queue) {
    for (int direction = 0; direction < 2; direction++) {
        if (!available(pool, queue, direction)) continue;
        if (!queue->working[direction] || queue->waiting[direction] > BACKLOG * (uint64_t)queue->working[direction]) return 1;
    }
    return 0;
}

/* The next piece: reads first, because an unpack waits for them. NULL when the pool is closed and nothing is left.
 * `done` is the direction of the piece that this worker has just finished, or -1. */
static Piece *take(Pool *pool, Queue *queue, int done) {
    Piece *piece = NULL;
    pthread_mutex_lock(&queue->lock);
    if (done >= 0) queue->working[done]--;
    while (!piece) {
        for (int direction = 1; direction >= 0 && !piece; direction--) {
            if (!available(pool, queue, direction)) continue;
            piece = queue->head[direction];
            queue->head[direction] = piece->next;
            queue->waiting[direction] -= piece->end - piece->start;
            queue->working[direction]++;
        }
        if (piece || pool->closed) break;
        pthread_cond_wait(&queue->ready, &queue->lock);
    }
    int more = piece && wanted(pool, queue);
    pthread_mutex_unlock(&queue->lock);
    if (more) pthread_cond_signal(&queue->ready);
    return piece;
}

static void run(Worker *w, Operation *op, Piece *piece) {
    Queue *queue = w->queue;
    Failure failure;
    int direction = op->kind & 1, moved = 0;
    if (w->pool->held_begun[direction]) {
        pthread_mutex_lock(&w->pool->gate);
        while (w->pool->held_begun[direction]) pthread_cond_wait(&w->pool->opened, &w->pool->gate);
        pthread_mutex_unlock(&w->pool->gate);
    }
    if (w->pool->pages && op->kind == WRITE && queue->direct && !op->failed) {
        uint64_t start = piece->start > op->page_offset ? piece->start : op->page_offset;
        collapse(w->pool->pages, op->address + start - op->page_offset, op->address + piece->end - op->page_offset);
    }
    double begun = now();
    pthread_mutex_lock(&op->lock);
    if (!(op->begun > 0)) op->begun = begun;
    pthread_mutex_unlock(&op->lock);
    pthread_mutex_lock(&queue->lock);
    if (!queue->active[direction]++) queue->since[direction] = begun;
    pthread_mutex_unlock(&queue->lock);
    if (!op->failed) {
        moved = !transfer_piece(w->pool->faults, op, piece, queue->fd, queue->direct, w->bounce, &failure);
        if (!moved) fail(op, piece, failure);
    }
    pthread_mutex_lock(&queue->lock);
    if (moved) queue->bytes[direction] += piece->end - (piece->start > op->page_offset ? piece->start : op->page_offset);
    if (!--queue->active[direction]) queue->seconds[direction] += now() - queue->since[direction];
    pthread_mutex_unlock(&queue->lock);
}

/* Fail a read whose bytes are not those that were submitted. The digest was computed during the write: if it differs, the drive
 * returned other bytes. The sample was taken at submission: if it differs, the memory changed before a worker wrote it. */
static void verify(Operation *op) {
    if (op->digesting && !op->digest) op->digest = 1;
    if (!(op->kind & 1) || op->failed) return;
    int detail = ERRNO;
    if (op->digesting && op->digest != op->expected) detail = CORRUPTED;
    else if (op->checksum && sample(op->address, op->nbytes) != op->checksum) detail = CHANGED;
    if (detail == ERRNO) return;
    Piece whole = op->piece[0];
    for (int i = 1; i < op->pieces; i++) /* their order may be shuffled */
        if (op->piece[i].index == 0) whole = op->piece[i];
    whole.end = whole.start + op->nbytes;
    fail(op, &whole, (Failure){EIO, detail, whole.offset});
}

static void *work(void *argument) {
    Worker *w = argument;
    Piece *piece;
    int direction = -1;
    while ((piece = take(w->pool, w->queue, direction))) {
        Operation *op = piece->operation;
        direction = op->kind & 1;
        int mine = claim(op);
        if (mine) run(w, op, piece);
        if (atomic_fetch_sub(&op->remaining, 1) == 1) {
            if (mine) {
                verify(op);
                finish(op);
            }
            forget(op);
        }
    }
    return NULL;
}

static void append(Queue *queue, Piece *piece) {
    int direction = piece->operation->kind & 1;
    pthread_mutex_lock(&queue->lock);
    piece->next = NULL;
    if (queue->head[direction]) queue->tail[direction]->next = piece;
    else queue->head[direction] = piece;
    queue->tail[direction] = piece;
    queue->waiting[direction] += piece->end - piece->start;
    pthread_mutex_unlock(&queue->lock);
}

/* Wake a worker on every queue that needs one: an operation that was deferred may have pieces on several. One signal per queue,
 * sent without its lock: a worker that takes a piece wakes the next one if more are needed. The thread that submits is the
 * training thread, and each wake-up costs it a system call. */
static void flush(Pool *pool) {
    for (int i = 0; i < pool->queue_count; i++) {
        Queue *queue = &pool->queues[i];
        pthread_mutex_lock(&queue->lock);
        int wake = wanted(pool, queue);
        pthread_mutex_unlock(&queue->lock);
        if (wake) pthread_cond_signal(&queue->ready);
    }
}

static void await_event(Pool *pool, Operation *op); /* _iopool_events.h */

static void append_pieces(Pool *pool, Operation *op) {
    for (int i = 0; i < op->pieces; i++) append(&pool->queues[op->piece[i].queue], &op->piece[i]);
}

/* Queue an operation: its pieces, in the order of `op->piece`, or behind its event. The caller holds a reference. 0, or -1 when the
 * pool is closed. `defer`: wake no worker for it; see `flush`. */
static int enqueue(Pool *pool, Operation *op, int defer) {
    pthread_mutex_lock(&pool->submitting);
    if (pool->closed) {
        pthread_mutex_unlock(&pool->submitting);
        return -1;
    }
    op->serial = pool->serials[op->kind]++;
    if (pool->faults && pool->faults->torn)
        for (int last = op->pieces - 1; last > 0; last--) {
            uint64_t at = hashed(pool->faults->seed, SHUFFLE, op->kind, op->serial, last, 0) % (uint64_t)(last + 1);
            Piece other = op->piece[last];
            op->piece[last] = op->piece[at];
            op->piece[at] = other;
        }
    if (op->event && op->pieces) await_event(pool, op);
    else {
        append_pieces(pool, op);
        if (!defer) flush(pool);
    }
    pthread_mutex_unlock(&pool->submitting);
    return 0;
}

#include "_iopool_events.h"

static void wake(Pool *pool) {
    for (int i = 0; i < pool->queue_count; i++) {
        pthread_mutex_lock(&pool->queues[i].lock);
        pthread_cond_broadcast(&pool->queues[i].ready);
        pthread_mutex_unlock(&pool->queues[i].lock);
    }
}

static void release_held(Pool *pool) {
    pthread_mutex_lock(&pool->gate);
    for (int i = 0; i < 2; i++) pool->held[i] = pool->held_begun[i] = 0;
    pthread_cond_broadcast(&pool->opened);
    pthread_mutex_unlock(&pool->gate);
    wake(pool);
}

/* Cancel what has not begun, wait for the rest, end the workers. A second caller waits for the first. */
static void close_pool(Pool *pool) {
    pthread_mutex_lock(&pool->submitting);
    for (int i = 0; i < pool->queue_count; i++) {
        Queue *queue = &pool->queues[i];
        pthread_mutex_lock(&queue->lock);
        pool->closed = 1;
        for (int direction = 0; direction < 2; direction++)
            for (Piece *p = queue->head[direction]; p; p = p->next) cancel(pool, p->operation);
        pthread_mutex_unlock(&queue->lock);
    }
    pool->closed = 1;
    cancel_awaiting(pool);
    pthread_mutex_unlock(&pool->submitting);
    release_held(pool);
    pthread_mutex_lock(&pool->joining);
    if (!pool->joined && pool->waiter_started) pthread_join(pool->waiter, NULL);
    if (!pool->joined)
        for (int i = 0; i < pool->started; i++) pthread_join(pool->workers[i].thread, NULL);
    pool->joined = 1;
    pthread_mutex_unlock(&pool->joining);
}

/* Start the workers, and the waiter where operations may have events, with every signal blocked: signals are the interpreter's. 0 or
 * an errno. */
static int start_workers(Pool *pool) {
    sigset_t all, before;
    pthread_attr_t attributes;
    struct sched_param batch = {.sched_priority = 0};
    int code = pthread_attr_init(&attributes);
    if (code) return code;
    pthread_attr_setstacksize(&attributes, STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < pool->worker_count && !code; i++) {
        code = pthread_create(&pool->workers[i].thread, &attributes, work, &pool->workers[i]);
        if (code) break;
        pthread_setname_np(pool->workers[i].thread, "ssdtrain-io");
        /* A woken worker must not preempt the thread that submitted: on busy cores the caller, and the compute threads that wait
         * for it, would stand still for the whole transfer. Only a preference: an error is ignored. */
        pthread_setschedparam(pool->workers[i].thread, SCHED_BATCH, &batch);
        pool->started++;
    }
    if (!code && pool->event_query) {
        code = pthread_create(&pool->waiter, &attributes, await_events, pool);
        pool->waiter_started = !code;
        if (!code) pthread_setname_np(pool->waiter, "ssdtrain-event");
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return code;
}

static void free_pool(Pool *pool) {
    if (pool->bounce) munmap(pool->bounce, (size_t)pool->worker_count * BOUNCE);
    if (pool->faults) {
        free(pool->faults->chosen[0]);
        free(pool->faults->chosen[1]);
        free(pool->faults);
    }
    free(pool->pages);
    free(pool->queues);
    free(pool->workers);
    free(pool);
}

#endif
