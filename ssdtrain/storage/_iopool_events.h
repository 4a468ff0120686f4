/* Writes that wait for a CUDA event, part of _iopool_queue.h. One thread, the waiter, polls their events in order and queues each
 * operation for the workers when its event has completed. So no worker waits for a device: reads find a free one at all times, and
 * a write can be cancelled until its first byte is transferred.
 *
 * The waiter polls instead of synchronising, so that it can stop even if the event never completes (a collective whose peer is
 * gone). It also looks for the next operation by itself for a while: waking it would cost the training thread a system call for
 * each saved tensor. */
#ifndef SSDTRAIN_IOPOOL_EVENTS_H
#define SSDTRAIN_IOPOOL_EVENTS_H

#define NOT_READY 600 /* cudaErrorNotReady */
#define RELAXED 2     /* cudaStreamCaptureModeRelaxed: queries on this thread do not invalidate a capture on another */
#define SHORTEST 20e-6 /* seconds between two polls of an event, growing by a half each time */
#define LONGEST 500e-6
#define LOOKS 20 /* for the next operation, ever further apart, before the waiter sleeps until it is woken: 4 ms */

/* Under Pool.submitting. */
static void await_event(Pool *pool, Operation *op) {
    pthread_mutex_lock(&pool->awaiting);
    if (pool->first) pool->last->next = op;
    else pool->first = op;
    pool->last = op;
    pthread_cond_signal(&pool->submitted);
    pthread_mutex_unlock(&pool->awaiting);
}

/* The pool is closed: cancel all, and let the waiter end. Under Pool.submitting. */
static void cancel_awaiting(Pool *pool) {
    pthread_mutex_lock(&pool->awaiting);
    for (Operation *op = pool->first; op; op = op->next) cancel(pool, op);
    pthread_cond_signal(&pool->submitted);
    pthread_mutex_unlock(&pool->awaiting);
}

static void pause_for(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

/* The next operation in order; NULL: the pool is closed and there is none. */
static Operation *next_awaiting(Pool *pool) {
    pthread_mutex_lock(&pool->awaiting);
    for (int looks = 0; !pool->first && !pool->closed && looks < LOOKS; looks++) {
        pthread_mutex_unlock(&pool->awaiting);
        pause_for(SHORTEST * (looks + 1));
        pthread_mutex_lock(&pool->awaiting);
    }
    while (!pool->first && !pool->closed) pthread_cond_wait(&pool->submitted, &pool->awaiting);
    Operation *op = pool->first;
    if (op) pool->first = op->next;
    pthread_mutex_unlock(&pool->awaiting);
    return op;
}

/* After a cancel: the event may be destroyed as soon as this returns. */
static void wait_for_event_query(Pool *pool, const Operation *op) {
    while (atomic_load(&pool->queried) == op) pause_for(SHORTEST);
}

/* 1: the event has completed, or failed with `code`. 0: the operation was cancelled. */
static int poll_event(Pool *pool, Operation *op, int *code) {
    for (double pause = SHORTEST;; pause = pause * 1.5 < LONGEST ? pause * 1.5 : LONGEST) {
        if (pool->closed) cancel(pool, op);
        atomic_store(&pool->queried, op); /* before the state is read: see `wait_for_event_query` */
        int queued = atomic_load(&op->state) == QUEUED;
        if (queued) *code = pool->event_query((void *)(uintptr_t)op->event);
        atomic_store(&pool->queried, NULL);
        if (!queued || *code != NOT_READY) return queued;
        pause_for(pause);
    }
}

static void fail_event(Operation *op, int code) {
    if (!claim(op)) return;
    fail(op, &op->piece[0], (Failure){code, EVENT, op->piece[0].offset});
    finish(op);
}

static void *await_events(void *argument) {
    Pool *pool = argument;
    Operation *op;
    int ready = 0;
    while ((op = next_awaiting(pool))) {
        int code = 0, mode = RELAXED, queued = 1;
        if (!ready && pool->set_device) code = pool->set_device(pool->device);
        if (!ready && !code && pool->exchange_capture_mode) code = pool->exchange_capture_mode(&mode);
        ready = !code;
        if (ready) queued = poll_event(pool, op, &code);
        if (queued && code) fail_event(op, code);
        if (queued && !code) {
            pthread_mutex_lock(&pool->submitting); /* nothing is queued in a closed pool: its workers may be gone */
            if (pool->closed) cancel(pool, op);
            else {
                append_pieces(pool, op);
                flush(pool);
                op = NULL;
            }
            pthread_mutex_unlock(&pool->submitting);
        }
        if (op) forget(op);
    }
    return NULL;
}

#endif
