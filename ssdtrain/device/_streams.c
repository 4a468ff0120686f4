/* Copies and events on CUDA streams, one call of Python for each: see streams.py, which has the same in Python.
 *
 * The functions of the CUDA runtime are given by address. The GIL is released around those that may wait for the device or for room in
 * a stream. Event handles are used again: a wait that was queued has its own copy of what was recorded. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdint.h>
#include <structmember.h>
#include <unistd.h>

enum { NOT_READY = 600, EVENT_FLAGS = 3 /* blocking, without time */, TO_EVENT = 16 };

#define NONE ULLONG_MAX /* no stream */

typedef struct {
    int (*create)(void **event, unsigned flags);
    int (*destroy)(void *event);
    int (*record)(void *event, void *stream);
    int (*query)(void *event);
    int (*synchronize)(void *event);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*copy)(void *target, const void *source, size_t nbytes, int kind, void *stream);
    int (*current)(int *device);
    int (*last_error)(void);
} Functions;

typedef struct {
    PyObject_HEAD
    Functions call;
    int device;
    pid_t pid;
    void **idle; /* handles of events that no object holds */
    Py_ssize_t count, room;
} Streams;

typedef struct {
    PyObject_HEAD
    Streams *streams;
    void *handle;
    int passed;
} Event;

static PyTypeObject *event_type;

static void free_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *failure(int code) {
    PyObject *module = PyImport_ImportModule("ssdtrain.device.runtime");
    PyObject *raised = module ? PyObject_CallMethod(module, "check_cuda", "i", code) : NULL;
    Py_XDECREF(module);
    if (raised) {
        Py_DECREF(raised);
        PyErr_Format(PyExc_RuntimeError, "CUDA error %d", code);
    }
    return NULL;
}

/* ---- handles ---- */

static int give(Streams *s, void *handle) {
    if (s->count == s->room) {
        Py_ssize_t room = s->room ? 2 * s->room : 64;
        void **larger = PyMem_Realloc(s->idle, sizeof(void *) * (size_t)room);
        if (!larger) return -1;
        s->idle = larger;
        s->room = room;
    }
    s->idle[s->count++] = handle;
    return 0;
}

/* Look whether the device is current, and have `wanted` idle handles. 1: another one is, on which handles would be made and whose
 * default stream 0 would be. */
static int prepare(Streams *s, Py_ssize_t wanted, int *code) {
    int device = -1;
    if ((*code = s->call.current(&device))) return -1;
    if (device != s->device) return 1;
    while (s->count < wanted) {
        void *handle = NULL;
        if ((*code = s->call.create(&handle, EVENT_FLAGS))) return -1;
        if (give(s, handle)) {
            s->call.destroy(handle);
            PyErr_NoMemory();
            return -1;
        }
    }
    return 0;
}

static Event *new_event(Streams *s) {
    Event *event = (Event *)((allocfunc)PyType_GetSlot(event_type, Py_tp_alloc))(event_type, 0);
    if (!event) return NULL;
    event->handle = s->idle[--s->count];
    event->streams = s;
    event->passed = 0;
    Py_INCREF((PyObject *)s);
    return event;
}

/* ---- Event ---- */

static void event_dealloc(PyObject *self) {
    Event *e = (Event *)self;
    if (e->streams) {
        if (give(e->streams, e->handle) && e->streams->pid == getpid()) e->streams->call.destroy(e->handle);
        Py_DECREF((PyObject *)e->streams);
    }
    free_object(self);
}

static PyObject *event_query(PyObject *self, PyObject *unused) {
    (void)unused;
    Event *e = (Event *)self;
    if (!e->passed) {
        int code = e->streams->call.query(e->handle);
        if (code == NOT_READY) {
            e->streams->call.last_error(); /* else torch raises it at the next kernel */
            Py_RETURN_FALSE;
        }
        if (code) return failure(code);
        e->passed = 1;
    }
    Py_RETURN_TRUE;
}

static PyObject *event_synchronize(PyObject *self, PyObject *unused) {
    (void)unused;
    Event *e = (Event *)self;
    int code = 0;
    Py_BEGIN_ALLOW_THREADS
    code = e->passed ? 0 : e->streams->call.synchronize(e->handle);
    Py_END_ALLOW_THREADS
    if (code) return failure(code);
    e->passed = 1;
    Py_RETURN_NONE;
}

static PyObject *event_handle(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromVoidPtr(((Event *)self)->handle);
}

static PyMethodDef event_methods[] = {
    {"query", event_query, METH_NOARGS, "Whether the device has come to it."},
    {"synchronize", event_synchronize, METH_NOARGS, "Wait for it, without the GIL."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef event_properties[] = {
    {"cuda_event", event_handle, NULL, "The raw handle, valid while this object lives.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot event_slots[] = {
    {Py_tp_doc, "A point in the work of a stream."},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_methods, event_methods},
    {Py_tp_getset, event_properties},
    {0, NULL},
};

static PyType_Spec event_spec = {
    .name = "ssdtrain.device._streams.Event",
    .basicsize = sizeof(Event),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = event_slots,
};

/* ---- Streams ---- */

static PyObject *streams_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    unsigned long long f[9];
    int device;
    if (keywords && PyDict_Size(keywords)) return PyErr_Format(PyExc_TypeError, "Streams takes no keywords");
    if (!PyArg_ParseTuple(args, "i(KKKKKKKKK):Streams", &device, &f[0], &f[1], &f[2], &f[3], &f[4], &f[5], &f[6], &f[7], &f[8]))
        return NULL;
    Streams *s = (Streams *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!s) return NULL;
    uintptr_t addresses[9];
    for (int i = 0; i < 9; i++) addresses[i] = (uintptr_t)f[i];
    _Static_assert(sizeof(Functions) == sizeof(addresses), "one address for each function");
    __builtin_memcpy(&s->call, addresses, sizeof(addresses));
    s->device = device;
    s->pid = getpid();
    return (PyObject *)s;
}

static void streams_dealloc(PyObject *self) {
    Streams *s = (Streams *)self;
    if (s->pid == getpid())
        while (s->count) s->call.destroy(s->idle[--s->count]);
    PyMem_Free(s->idle);
    free_object(self);
}

static PyObject *streams_record(PyObject *self, PyObject *argument) {
    Streams *s = (Streams *)self;
    void *stream = PyLong_AsVoidPtr(argument);
    int code;
    if (!stream && PyErr_Occurred()) return NULL;
    int result = prepare(s, 1, &code);
    if (result < 0) return code ? failure(code) : NULL;
    if (result) Py_RETURN_NONE;
    Event *event = new_event(s);
    if (!event) return NULL;
    Py_BEGIN_ALLOW_THREADS
    code = s->call.record(event->handle, stream);
    Py_END_ALLOW_THREADS
    if (!code) return (PyObject *)event;
    Py_DECREF((PyObject *)event);
    return failure(code);
}

static PyObject *streams_wait(PyObject *self, PyObject *args) {
    Streams *s = (Streams *)self;
    unsigned long long stream;
    PyObject *event;
    if (!PyArg_ParseTuple(args, "KO!:wait", &stream, event_type, &event)) return NULL;
    if (!((Event *)event)->passed) {
        int code;
        int result = prepare(s, 0, &code);
        if (result < 0) return failure(code);
        if (result) Py_RETURN_FALSE;
        Py_BEGIN_ALLOW_THREADS
        code = s->call.wait((void *)(uintptr_t)stream, ((Event *)event)->handle, 0);
        Py_END_ALLOW_THREADS
        if (code) return failure(code);
    }
    Py_RETURN_TRUE;
}

static PyObject *streams_follow(PyObject *self, PyObject *args) {
    Streams *s = (Streams *)self;
    unsigned long long stream, other;
    int code = 0;
    if (!PyArg_ParseTuple(args, "KK:follow", &stream, &other)) return NULL;
    if (stream == other) Py_RETURN_TRUE;
    int result = prepare(s, 1, &code);
    if (result < 0) return code ? failure(code) : NULL;
    if (result) Py_RETURN_FALSE;
    void *handle = s->idle[--s->count];
    Py_BEGIN_ALLOW_THREADS
    code = s->call.record(handle, (void *)(uintptr_t)other);
    if (!code) code = s->call.wait((void *)(uintptr_t)stream, handle, 0);
    Py_END_ALLOW_THREADS
    give(s, handle);
    if (code) return failure(code);
    Py_RETURN_TRUE;
}

static PyObject *streams_copy(PyObject *self, PyObject *args) {
    Streams *s = (Streams *)self;
    unsigned long long source, target, stream, producer = NONE;
    Py_ssize_t nbytes;
    int kind, code;
    PyObject *after = NULL;
    void *handles[TO_EVENT];
    Py_ssize_t waits = 0;
    if (!PyArg_ParseTuple(args, "KKniK|KO:copy", &source, &target, &nbytes, &kind, &stream, &producer, &after)) return NULL;
    int result = prepare(s, 1, &code);
    if (result < 0) return code ? failure(code) : NULL;
    if (result) Py_RETURN_NONE;
    Py_ssize_t events = after ? PySequence_Size(after) : 0;
    if (events < 0) return NULL;
    for (Py_ssize_t i = 0; i < events; i++) {
        PyObject *event = PySequence_GetItem(after, i);
        if (!event) return NULL;
        Py_DECREF(event); /* the caller's sequence holds it */
        if (Py_TYPE(event) != event_type) {
            PyErr_SetString(PyExc_TypeError, "a copy waits for events of `Streams`");
            return NULL;
        }
        if (((Event *)event)->passed) continue;
        if (waits < TO_EVENT) {
            handles[waits++] = ((Event *)event)->handle;
        } else if ((code = s->call.wait((void *)(uintptr_t)stream, ((Event *)event)->handle, 0))) {
            return failure(code);
        }
    }
    Event *event = new_event(s);
    if (!event) return NULL;
    code = 0;
    Py_BEGIN_ALLOW_THREADS
    if (producer != NONE && producer != stream) {
        code = s->call.record(event->handle, (void *)(uintptr_t)producer);
        if (!code) code = s->call.wait((void *)(uintptr_t)stream, event->handle, 0);
    }
    for (Py_ssize_t i = 0; i < waits && !code; i++) code = s->call.wait((void *)(uintptr_t)stream, handles[i], 0);
    if (!code) code = s->call.copy((void *)(uintptr_t)target, (const void *)(uintptr_t)source, (size_t)nbytes, kind, (void *)(uintptr_t)stream);
    if (!code) code = s->call.record(event->handle, (void *)(uintptr_t)stream);
    Py_END_ALLOW_THREADS
    if (!code) return (PyObject *)event;
    Py_DECREF((PyObject *)event);
    return failure(code);
}

static PyMethodDef streams_methods[] = {
    {"record", streams_record, METH_O, "record(stream): an event behind all work of a raw stream."},
    {"wait", streams_wait, METH_VARARGS, "wait(stream, event): let the stream wait for it."},
    {"follow", streams_follow, METH_VARARGS, "follow(stream, other): let the stream wait for all work of `other`."},
    {"copy", streams_copy, METH_VARARGS, "copy(source, target, nbytes, kind, stream, producer, after): an event behind the copy."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot streams_slots[] = {
    {Py_tp_doc, "Streams(device, functions): copies and events of one device, on raw streams. None or False: another is current."},
    {Py_tp_new, streams_new},
    {Py_tp_dealloc, streams_dealloc},
    {Py_tp_methods, streams_methods},
    {0, NULL},
};

static PyType_Spec streams_spec = {
    .name = "ssdtrain.device._streams.Streams",
    .basicsize = sizeof(Streams),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = streams_slots,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_streams", "Copies and events on CUDA streams: see ssdtrain.device.streams.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__streams(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *streams_type = PyType_FromSpec(&streams_spec);
    event_type = (PyTypeObject *)PyType_FromSpec(&event_spec);
    if (!module || !streams_type || !event_type || PyModule_AddObjectRef(module, "Streams", streams_type) ||
        PyModule_AddObjectRef(module, "Event", (PyObject *)event_type)) {
        Py_XDECREF(module);
        module = NULL;
    }
    Py_XDECREF(streams_type);
    return module;
}
