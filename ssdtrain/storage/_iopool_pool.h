/* The Python type Pool, part of _iopool.c: construction, counters, close. */
#ifndef SSDTRAIN_IOPOOL_POOL_H
#define SSDTRAIN_IOPOOL_POOL_H

static int parse_chosen(PyObject *tuple, int64_t **chosen, size_t *count) {
    Py_ssize_t size = PyTuple_Size(tuple);
    if (size < 0) return -1;
    *chosen = calloc((size_t)size + 1, sizeof **chosen);
    if (!*chosen) {
        PyErr_NoMemory();
        return -1;
    }
    *count = (size_t)size;
    for (Py_ssize_t i = 0; i < size; i++) (*chosen)[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : 0;
}

/* The tuple that `as_tuple` in pool.py makes. */
static int parse_faults(PyObject *tuple, Pool *pool) {
    if (tuple == Py_None) return 0;
    Faults *f = pool->faults = calloc(1, sizeof(Faults));
    PyObject *writes, *reads;
    unsigned long long seed;
    if (!f) {
        PyErr_NoMemory();
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "KddddddiiOO", &seed, &f->delay, &f->max_delay, &f->shorten, &f->interrupt, &f->failure[0],
                          &f->failure[1], &f->error, &f->torn, &writes, &reads))
        return -1;
    f->seed = seed;
    if (parse_chosen(writes, &f->chosen[0], &f->chosen_count[0])) return -1;
    return parse_chosen(reads, &f->chosen[1], &f->chosen_count[1]);
}

static int parse_files(PyObject *files, Pool *pool) {
    for (int i = 0; i < pool->queue_count - 1; i++) {
        PyObject *file = PyList_GetItem(files, i);
        if (!file || !PyArg_ParseTuple(file, "ip", &pool->queues[i].fd, &pool->queues[i].direct)) return -1;
    }
    pool->queues[pool->queue_count - 1].fd = -1; /* host memory */
    return 0;
}

/* 0, or -1: no memory. */
static int watch_pages(Pool *pool) {
    if (!(pool->pages = calloc(1, sizeof(Pages)))) return -1;
    pthread_mutex_init(&pool->pages->lock, NULL);
    pool->pages->began = now();
    return 0;
}

/* `threads` workers of each drive and `host_threads` of host memory for each direction, and one more, so that reads never wait for
 * writes. */
static int count_workers(Pool *pool, int threads, int host_threads) {
    int drives = pool->queue_count - 1;
    return drives * (threads + 1) + (host_threads ? host_threads + 1 : 0);
}

static void assign_workers(Pool *pool, int threads, int host_threads) {
    for (int i = 0, number = 0; i < pool->queue_count; i++) {
        Queue *queue = &pool->queues[i];
        queue->limit = i < pool->queue_count - 1 ? threads : host_threads;
        for (int worker = 0; queue->limit && worker <= queue->limit; worker++, number++)
            pool->workers[number] = (Worker){.pool = pool, .queue = queue, .bounce = pool->bounce + (size_t)number * BOUNCE};
    }
}

static int allocate(Pool *pool) {
    size_t size = (size_t)pool->worker_count * BOUNCE;
    pool->queues = calloc((size_t)pool->queue_count, sizeof(Queue));
    pool->workers = calloc((size_t)pool->worker_count, sizeof(Worker));
    if (!pool->queues || !pool->workers) return -1;
    char *bounce = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bounce == MAP_FAILED) return -1;
    pool->bounce = bounce;
    madvise(bounce, size, MADV_DONTFORK); /* a fork during a direct read must not copy the page that is being filled */
    for (int i = 0; i < pool->queue_count; i++) {
        pthread_mutex_init(&pool->queues[i].lock, NULL);
        pthread_cond_init(&pool->queues[i].ready, NULL);
    }
    pthread_mutex_init(&pool->submitting, NULL);
    pthread_mutex_init(&pool->awaiting, NULL);
    pthread_cond_init(&pool->submitted, NULL);
    pthread_mutex_init(&pool->gate, NULL);
    pthread_mutex_init(&pool->joining, NULL);
    pthread_cond_init(&pool->opened, NULL);
    return 0;
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"files",      "threads", "host_threads", "piece",      "make_error",            "event_query",
                            "set_device", "device",  "faults",       "huge_pages", "exchange_capture_mode", NULL};
    PyObject *files, *make_error, *faults = Py_None;
    int threads, host_threads, device = -1, huge_pages = 0;
    unsigned long long piece, event_query = 0, set_device = 0, exchange_capture_mode = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$iiKOKKiOpK:Pool", names, &files, &threads, &host_threads, &piece,
                                     &make_error, &event_query, &set_device, &device, &faults, &huge_pages,
                                     &exchange_capture_mode))
        return NULL;
    Py_ssize_t count = PyList_Size(files);
    if (count < 0) return NULL;
    if (threads < 1 || threads > 256 || host_threads < 0 || host_threads > 256 || piece < ALIGNMENT || piece % ALIGNMENT)
        return PyErr_Format(PyExc_ValueError, "a pool cannot have %d + %d threads and pieces of %llu bytes", threads,
                            host_threads, piece);
    PoolObject *self = (PoolObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    Pool *pool = self->pool = calloc(1, sizeof(Pool));
    self->generation = generation;
    self->make_error = make_error;
    Py_INCREF(make_error);
    if (!pool) goto no_memory;
    pool->queue_count = (int)count + 1;
    pool->worker_count = count_workers(pool, threads, host_threads);
    pool->piece = piece;
    pool->event_query = (int (*)(void *))(uintptr_t)event_query;
    pool->exchange_capture_mode = (int (*)(int *))(uintptr_t)exchange_capture_mode;
    pool->set_device = (int (*)(int))(uintptr_t)set_device;
    pool->device = device;
    if (allocate(pool) || (huge_pages && watch_pages(pool))) goto no_memory;
    assign_workers(pool, threads, host_threads);
    if (parse_files(files, pool) || parse_faults(faults, pool)) goto failed;
    int code = start_workers(pool);
    if (code) {
        PyErr_Format(PyExc_OSError, "cannot start %d I/O threads: %s; lower `threads` or raise ulimit -u", pool->worker_count,
                     strerror(code));
        goto failed;
    }
    return (PyObject *)self;
no_memory:
    PyErr_NoMemory();
failed:
    Py_DECREF((PyObject *)self);
    return NULL;
}

static void pool_dealloc(PyObject *self) {
    PoolObject *p = (PoolObject *)self;
    if (p->pool && p->generation == generation) {
        if (p->pool->started) {
            Py_BEGIN_ALLOW_THREADS
            close_pool(p->pool);
            Py_END_ALLOW_THREADS
        }
        free_pool(p->pool);
    }
    Py_XDECREF(p->make_error);
    free_object(self);
}

static PyObject *pool_close(PyObject *self, PyObject *unused) {
    (void)unused;
    PoolObject *p = (PoolObject *)self;
    if (p->generation == generation) {
        Py_BEGIN_ALLOW_THREADS
        close_pool(p->pool);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *pool_hold(PyObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"begun", "writes", "reads", NULL};
    Pool *pool = ((PoolObject *)self)->pool;
    int begun = 0, writes = 1, reads = 1;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$ppp:hold", names, &begun, &writes, &reads)) return NULL;
    if (check_generation(((PoolObject *)self)->generation, "this I/O pool")) return NULL;
    atomic_int *held = begun ? pool->held_begun : pool->held;
    if (writes) held[0] = 1;
    if (reads) held[1] = 1;
    Py_RETURN_NONE;
}

static PyObject *pool_flush(PyObject *self, PyObject *unused) {
    (void)unused;
    if (check_generation(((PoolObject *)self)->generation, "this I/O pool")) return NULL;
    flush(((PoolObject *)self)->pool);
    Py_RETURN_NONE;
}

static PyObject *pool_release(PyObject *self, PyObject *unused) {
    (void)unused;
    if (check_generation(((PoolObject *)self)->generation, "this I/O pool")) return NULL;
    release_held(((PoolObject *)self)->pool);
    Py_RETURN_NONE;
}

static PyObject *pool_counters(PyObject *self, PyObject *unused) {
    (void)unused;
    Pool *pool = ((PoolObject *)self)->pool;
    if (check_generation(((PoolObject *)self)->generation, "this I/O pool")) return NULL;
    PyObject *queues = PyList_New(pool->queue_count);
    for (int i = 0; queues && i < pool->queue_count; i++) {
        Queue *q = &pool->queues[i];
        pthread_mutex_lock(&q->lock);
        unsigned long long bytes[2] = {q->bytes[0], q->bytes[1]};
        double seconds[2] = {q->seconds[0], q->seconds[1]};
        for (int direction = 0; direction < 2; direction++)
            if (q->active[direction]) seconds[direction] += now() - q->since[direction];
        pthread_mutex_unlock(&q->lock);
        PyObject *figures = Py_BuildValue("KKdd", bytes[0], bytes[1], seconds[0], seconds[1]);
        if (!figures || PyList_SetItem(queues, i, figures)) {
            Py_DECREF(queues);
            return NULL;
        }
    }
    return queues ? Py_BuildValue("NK", queues, (unsigned long long)pool->cancelled) : NULL;
}

static PyObject *pool_engine(PyObject *self, void *unused) {
    (void)self, (void)unused;
    return PyUnicode_FromString("c");
}

static PyMethodDef pool_methods[] = {
    {"submit", pool_submit, METH_VARARGS,
     "submit(kind, address, nbytes, page_offset, extents, event=0, defer=False, checksum=0, digest=0): queue one operation; extents is a flat tuple."},
    {"hold", (PyCFunction)(void (*)(void))pool_hold, METH_VARARGS | METH_KEYWORDS,
     "hold(*, begun=False, writes=True, reads=True): tests: let no operation begin (with begun: transfer)."},
    {"release", pool_release, METH_NOARGS, "Undo every hold."},
    {"flush", pool_flush, METH_NOARGS, "Wake a worker for what was deferred."},
    {"counters", pool_counters, METH_NOARGS, "Per queue (bytes written, read, seconds writing, reading); bytes cancelled."},
    {"close", pool_close, METH_NOARGS, "Cancel what has not begun, wait for the rest, end the workers. Idempotent."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_properties[] = {
    {"engine", pool_engine, NULL, "The engine's name.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "Worker threads for some files and for host memory; see ssdtrain.storage.pool.make_pool."},
    {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_properties},
    {0, NULL},
};

static PyType_Spec pool_spec = {
    .name = "ssdtrain.storage._iopool.Pool",
    .basicsize = sizeof(PoolObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = pool_slots,
};

#endif
