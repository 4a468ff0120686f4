/* Python bindings of the C I/O engine: types Pool and Operation with the interface of PythonPool and PythonOperation.
 *
 * Threads of the pool never touch Python. Every call here that may wait releases the GIL first. In a forked child no worker
 * exists, so every object made before the fork only raises (see forks.py). */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "_iopool_queue.h"

#define SLICE 0.1 /* seconds between two checks for pending signals while waiting */

static PyObject *io_cancelled, *store_closed;
static int generation; /* incremented in every forked child */

static void in_child(void) { generation++; }

typedef struct {
    PyObject_HEAD
    Pool *pool;
    PyObject *make_error;
    int generation;
} PoolObject;

typedef struct {
    PyObject_HEAD
    Operation *op;
    PoolObject *pool;
    Py_ssize_t nbytes;
    int generation;
} OperationObject;

static PyTypeObject *operation_type;

static int check_generation(int made_in, const char *what) {
    if (made_in == generation) return 0;
    PyErr_Format(store_closed,
                 "%s belongs to the parent process and cannot be used after a fork; build a new one in the child, or use the"
                 " 'spawn' start method", what);
    return -1;
}

static void free_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ---- Operation ---- */

static void operation_dealloc(PyObject *self) {
    OperationObject *o = (OperationObject *)self;
    if (o->op && o->generation == generation) forget(o->op);
    Py_XDECREF((PyObject *)o->pool);
    free_object(self);
}

static PyObject *operation_done(PyObject *self, PyObject *unused) {
    (void)unused;
    OperationObject *o = (OperationObject *)self;
    if (atomic_load(&o->op->finished)) Py_RETURN_TRUE;
    if (check_generation(o->generation, "this operation")) return NULL;
    Py_RETURN_FALSE;
}

static PyObject *operation_begun(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(((OperationObject *)self)->op->state == RUNNING);
}

static PyObject *operation_error(OperationObject *o) {
    Operation *op = o->op;
    if (op->state == CANCELLED)
        return PyObject_CallFunction(io_cancelled, "N", PyUnicode_FromFormat(
            "this operation of %zd bytes was cancelled: nothing was transferred", o->nbytes));
    return PyObject_CallFunction(o->pool->make_error, "iiiiLL", op->kind, op->error_queue, op->code, op->detail,
                                 (long long)op->error_offset, (long long)op->error_bytes);
}

static void wait_slice(Operation *op, double until) {
    struct timespec t = {(time_t)until, (long)((until - (double)(time_t)until) * 1e9)};
    pthread_mutex_lock(&op->lock);
    while (!op->finished && pthread_cond_timedwait(&op->ended, &op->lock, &t) != ETIMEDOUT) {}
    pthread_mutex_unlock(&op->lock);
}

static PyObject *operation_wait(PyObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"timeout", NULL};
    OperationObject *o = (OperationObject *)self;
    Operation *op = o->op;
    PyObject *timeout = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O:wait", names, &timeout)) return NULL;
    if (!atomic_load(&op->finished)) {
        if (check_generation(o->generation, "this operation")) return NULL;
        double deadline = 0;
        if (timeout != Py_None) {
            double seconds = PyFloat_AsDouble(timeout);
            if (seconds == -1.0 && PyErr_Occurred()) return NULL;
            deadline = now() + (seconds > 0 ? seconds : 0);
        }
        flush(o->pool->pool); /* also of one that has begun: its pieces on another drive may have been deferred */
        while (!atomic_load(&op->finished)) {
            double time = now();
            if (timeout != Py_None && time >= deadline) Py_RETURN_FALSE;
            double until = timeout != Py_None && deadline < time + SLICE ? deadline : time + SLICE;
            Py_BEGIN_ALLOW_THREADS
            wait_slice(op, until);
            Py_END_ALLOW_THREADS
            if (PyErr_CheckSignals()) return NULL;
        }
    }
    if (op->failed || op->state == CANCELLED) {
        PyObject *error = operation_error(o);
        if (!error) return NULL;
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
        return NULL;
    }
    Py_RETURN_TRUE;
}

static PyObject *operation_cancel(PyObject *self, PyObject *unused) {
    (void)unused;
    OperationObject *o = (OperationObject *)self;
    if (check_generation(o->generation, "this operation")) return NULL;
    int cancelled = cancel(o->pool->pool, o->op);
    if (atomic_load(&o->pool->pool->queried) == o->op) {
        Py_BEGIN_ALLOW_THREADS
        wait_for_event_query(o->pool->pool, o->op);
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(cancelled);
}

static PyObject *operation_failed(PyObject *self, PyObject *unused) {
    (void)unused;
    OperationObject *o = (OperationObject *)self;
    if (!atomic_load(&o->op->finished)) {
        if (check_generation(o->generation, "this operation")) return NULL;
        Py_RETURN_NONE;
    }
    if (o->op->failed || o->op->state == CANCELLED) return operation_error(o);
    Py_RETURN_NONE;
}

static PyObject *operation_seconds(PyObject *self, void *unused) {
    (void)unused;
    Operation *op = ((OperationObject *)self)->op;
    return PyFloat_FromDouble(atomic_load(&op->finished) ? op->seconds : 0.0);
}

static PyObject *operation_began(PyObject *self, void *unused) {
    (void)unused;
    Operation *op = ((OperationObject *)self)->op;
    return PyFloat_FromDouble(atomic_load(&op->finished) ? op->begun : 0.0);
}

static PyMethodDef operation_methods[] = {
    {"done", operation_done, METH_NOARGS, "Whether it finished: succeeded, failed or was cancelled."},
    {"begun", operation_begun, METH_NOARGS, "Whether a worker took it, so that it can no longer be cancelled."},
    {"wait", (PyCFunction)(void (*)(void))operation_wait, METH_VARARGS | METH_KEYWORDS,
     "wait(timeout=None): wait without the GIL; True when it succeeded, False when time ran out."},
    {"cancel", operation_cancel, METH_NOARGS, "True: none of its bytes was or will be transferred. False: too late."},
    {"failed", operation_failed, METH_NOARGS, "What `wait` would raise, or None where it has succeeded or is not done."},
    {NULL, NULL, 0, NULL},
};

static PyObject *operation_checksum(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(((OperationObject *)self)->op->checksum);
}

static PyObject *operation_digest(PyObject *self, void *unused) {
    (void)unused;
    Operation *op = ((OperationObject *)self)->op;
    return PyLong_FromUnsignedLongLong(op->digesting && atomic_load(&op->finished) ? atomic_load(&op->digest) : 0);
}

static PyMemberDef operation_members[] = {
    {"nbytes", T_PYSSIZET, offsetof(OperationObject, nbytes), READONLY, "Size, bytes."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef operation_properties[] = {
    {"began", operation_began, NULL, "When its first piece began (CLOCK_MONOTONIC, seconds), once done.", NULL},
    {"seconds", operation_seconds, NULL, "Time from its first piece's beginning to its last one's end, once done.", NULL},
    {"checksum", operation_checksum, NULL, "Sample of the bytes that a write was given; 0: none was taken.", NULL},
    {"digest", operation_digest, NULL, "Checksum of all bytes, once done; 0: none was taken.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot operation_slots[] = {
    {Py_tp_doc, "One write, read or copy. Thread-safe; may be dropped while in flight."},
    {Py_tp_dealloc, operation_dealloc},
    {Py_tp_methods, operation_methods},
    {Py_tp_members, operation_members},
    {Py_tp_getset, operation_properties},
    {0, NULL},
};

static PyType_Spec operation_spec = {
    .name = "ssdtrain.storage._iopool.Operation",
    .basicsize = sizeof(OperationObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = operation_slots,
};

/* ---- Pool.submit ---- */

typedef struct {
    int64_t queue, offset, length;
} Extent;

static int parse_extents(PyObject *tuple, Extent **extents, Py_ssize_t *count) {
    Py_ssize_t size = PyTuple_Size(tuple);
    if (size < 0) return -1;
    if (size % 3) {
        PyErr_SetString(PyExc_ValueError, "extents are a flat tuple of (queue, offset, length)");
        return -1;
    }
    *count = size / 3;
    *extents = PyMem_Malloc(sizeof(Extent) * (size_t)(size ? size : 1));
    if (!*extents) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < size; i++) ((int64_t *)*extents)[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    if (!PyErr_Occurred()) return 0;
    PyMem_Free(*extents);
    return -1;
}

/* Cut the image into pieces as `cut` in pieces.py does; with `op` NULL only count them. -1: an extent names no queue. */
static int64_t cut(const Pool *pool, const Extent *extents, Py_ssize_t count, uint64_t page_offset, uint64_t nbytes, Operation *op) {
    uint64_t end = page_offset + nbytes, start = 0;
    int64_t pieces = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (extents[i].queue < 0 || extents[i].queue >= pool->queue_count || extents[i].length < 0) return -1;
        uint64_t limit = start + (uint64_t)extents[i].length < end ? start + (uint64_t)extents[i].length : end;
        for (uint64_t first = start; first < limit; first += pool->piece) {
            uint64_t last = limit - first < pool->piece ? limit : first + pool->piece;
            if (last <= page_offset) continue;
            if (op)
                op->piece[pieces] = (Piece){op, NULL, extents[i].offset + (int64_t)(first - start), first, last,
                                            (int)extents[i].queue, (int)pieces};
            pieces++;
        }
        start += (uint64_t)extents[i].length;
    }
    return pieces;
}

static Operation *make_operation(int64_t pieces) {
    Operation *op = calloc(1, sizeof(Operation) + sizeof(Piece) * (size_t)pieces);
    if (!op) return NULL;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&op->lock, NULL);
    pthread_cond_init(&op->ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    op->pieces = (int)pieces;
    op->remaining = (int)pieces;
    op->references = pieces ? 2 : 1;
    op->state = pieces ? QUEUED : RUNNING;
    op->finished = !pieces;
    return op;
}

static PyObject *pool_submit(PyObject *self, PyObject *args) {
    PoolObject *p = (PoolObject *)self;
    int kind, defer = 0;
    unsigned long long address, event = 0, checksum = 0, digest = 0;
    long long nbytes, page_offset;
    PyObject *tuple;
    Extent *extents;
    Py_ssize_t count;
    if (check_generation(p->generation, "this I/O pool")) return NULL;
    if (!PyArg_ParseTuple(args, "iKLLO|KpKK:submit", &kind, &address, &nbytes, &page_offset, &tuple, &event, &defer, &checksum, &digest))
        return NULL;
    if (kind < WRITE || kind > COPY_OUT || nbytes < 0 || page_offset < 0 || page_offset >= ALIGNMENT)
        return PyErr_Format(PyExc_ValueError, "cannot submit kind %d, %lld bytes, page_offset %lld", kind, nbytes, page_offset);
    if (event && !p->pool->event_query) {
        PyErr_SetString(PyExc_ValueError, "an operation with an event needs a pool with event_query");
        return NULL;
    }
    if (parse_extents(tuple, &extents, &count)) return NULL;
    int64_t pieces = nbytes ? cut(p->pool, extents, count, (uint64_t)page_offset, (uint64_t)nbytes, NULL) : 0;
    if (pieces < 0) {
        PyMem_Free(extents);
        PyErr_SetString(PyExc_ValueError, "an extent names a queue that the pool does not have");
        return NULL;
    }
    Operation *op = make_operation(pieces);
    OperationObject *o = op ? (OperationObject *)((allocfunc)PyType_GetSlot(operation_type, Py_tp_alloc))(operation_type, 0) : NULL;
    if (!o) {
        PyMem_Free(extents);
        if (op) {
            op->references = 1;
            forget(op);
        }
        return PyErr_NoMemory();
    }
    if (pieces) cut(p->pool, extents, count, (uint64_t)page_offset, (uint64_t)nbytes, op);
    PyMem_Free(extents);
    op->kind = kind;
    op->address = address;
    op->nbytes = (uint64_t)nbytes;
    op->page_offset = (uint64_t)page_offset;
    op->event = event;
    /* Before the event completes the bytes are not final: no sample. */
    op->checksum = checksum || (kind & 1) || event || !nbytes ? checksum : sample(address, (uint64_t)nbytes);
    op->digesting = digest != 0;
    op->expected = digest;
    o->op = op;
    o->nbytes = (Py_ssize_t)nbytes;
    o->generation = generation;
    o->pool = p;
    Py_INCREF(self);
    if (enqueue(p->pool, op, defer)) {
        op->references = 1; /* no piece was queued */
        Py_DECREF((PyObject *)o);
        PyErr_SetString(store_closed, "this I/O pool is closed");
        return NULL;
    }
    return (PyObject *)o;
}

/* ---- Pool ---- */

#include "_iopool_pool.h"

/* ---- module ---- */

static PyObject *fault_hash(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long v[6];
    if (!PyArg_ParseTuple(args, "KKKKKK:fault_hash", &v[0], &v[1], &v[2], &v[3], &v[4], &v[5])) return NULL;
    return PyLong_FromUnsignedLongLong(hashed(v[0], v[1], v[2], v[3], v[4], v[5]));
}

static PyObject *refuse_direct_reads(PyObject *module, PyObject *argument) {
    (void)module;
    int value = PyObject_IsTrue(argument);
    if (value < 0) return NULL;
    atomic_store(&refused, value);
    Py_RETURN_NONE;
}

static PyObject *digest(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long address, nbytes, before, digest;
    if (!PyArg_ParseTuple(args, "KKK:digest", &address, &nbytes, &before)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    digest = digest_bytes(before, (const char *)(uintptr_t)address, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(digest);
}

static PyObject *refuse_instruction(PyObject *module, PyObject *argument) {
    (void)module;
    int value = PyObject_IsTrue(argument);
    if (value < 0) return NULL;
    atomic_store(&by_instruction, !value && has_instruction());
    return PyBool_FromLong(has_instruction());
}

static PyMethodDef functions[] = {
    {"digest", digest, METH_VARARGS, "digest(address, nbytes, before): of mapped memory, after the digest of the bytes before."},
    {"refuse_instruction", refuse_instruction, METH_O, "Tests: as if the processor had no CRC instruction, or not; whether it has."},
    {"refuse_direct_reads", refuse_direct_reads, METH_O, "Tests: as if process_vm_readv were refused, or not."},
    {"fault_hash", fault_hash, METH_VARARGS, "The hash of faults.py, for the test that both are equal."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_iopool", "The C I/O engine: see ssdtrain.storage.pool.", -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__iopool(void) {
    prepare_digests();
    PyObject *module = PyModule_Create(&definition);
    PyObject *errors = PyImport_ImportModule("ssdtrain.storage.errors");
    PyObject *pool_type = PyType_FromSpec(&pool_spec);
    operation_type = (PyTypeObject *)PyType_FromSpec(&operation_spec);
    if (!module || !errors || !pool_type || !operation_type) goto failed;
    io_cancelled = PyObject_GetAttrString(errors, "IOCancelled");
    store_closed = PyObject_GetAttrString(errors, "StoreClosed");
    if (!io_cancelled || !store_closed) goto failed;
    if (PyModule_AddObjectRef(module, "Pool", pool_type)) goto failed;
    if (PyModule_AddObjectRef(module, "Operation", (PyObject *)operation_type)) goto failed;
    if (pthread_atfork(NULL, NULL, in_child)) {
        PyErr_SetString(PyExc_ImportError, "cannot register a fork handler");
        goto failed;
    }
    Py_DECREF(errors);
    Py_DECREF(pool_type);
    return module;
failed:
    Py_XDECREF(errors);
    Py_XDECREF(pool_type);
    Py_XDECREF(module);
    return NULL;
}
