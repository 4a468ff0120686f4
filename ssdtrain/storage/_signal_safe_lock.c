/* A lock whose holder is not interrupted by Python signal handlers. See signal_safe_lock.py.
 *
 * Python runs signal handlers on the main thread between two bytecodes, and an exception of theirs (KeyboardInterrupt) can leave
 * an update half done. While the main thread holds a lock, the C handler (`deferring`, installed in front of the interpreter's)
 * only notes the signal; it is passed on to the interpreter when the outermost lock is released, and its Python handler runs
 * right after. Nothing here allocates, waits or calls Python while a signal is noted. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#ifndef NSIG
#define NSIG 65
#endif

typedef void (*Handler)(int);

static pthread_t main_thread;
static _Thread_local int depth; /* locks that this thread holds */
static atomic_int inside;       /* the main thread's depth is not 0; for `deferring`, which runs on any thread */
static atomic_int delivering;   /* threads in `deferring` now */
static atomic_int arrived;      /* `deferring` ran since `enter` cleared this */
static atomic_int any_noted;    /* some of `noted` may be set */
static atomic_int noted[NSIG];  /* signals that are deferred */
static int unnoticed;           /* the interpreter does not notice signals by itself: see `leave` */
static Handler interpreters[NSIG];

static void deliver(int number) {
    if (atomic_exchange(&noted[number], 0)) interpreters[number](number);
}

/* The stores and loads are in one order for all threads: either this handler sees that no lock is held, or `open_up` sees the noted
 * signal. */
static void deferring(int number) {
    int error = errno;
    atomic_fetch_add(&delivering, 1);
    atomic_store(&arrived, 1);
    atomic_store(&noted[number], 1);
    atomic_store(&any_noted, 1);
    if (!atomic_load(&inside)) deliver(number);
    atomic_fetch_sub(&delivering, 1);
    errno = error;
}

static int is_main(void) { return pthread_equal(pthread_self(), main_thread); }

static void open_up(void) {
    atomic_store(&inside, 0);
    if (!atomic_exchange(&any_noted, 0)) return;
    for (int number = 1; number < NSIG; number++) deliver(number);
}

/* 0, or -1 where a Python handler raised an exception.
 *
 * The interpreter runs handlers after the next bytecode, except in a child that a thread other than the main one forked: there
 * CPython 3.13 and later mark a signal as pending for the parent's main thread, which does not exist, and its handler runs only
 * when something calls PyErr_CheckSignals. Most calls that a signal interrupts do; those made under the lock did so too early. */
static int leave(void) {
    if (--depth || !is_main()) return 0;
    open_up();
    return unnoticed ? PyErr_CheckSignals() : 0;
}

/* Defer signals from here on. Handlers of signals that the interpreter has received already run first, before the lock is taken and
 * while nothing is deferred: a handler may wait for another signal. */
static int enter(void) {
    if (depth == 0 && is_main()) {
        for (;;) {
            atomic_store(&arrived, 0);
            if (PyErr_CheckSignals()) return -1;
            atomic_store(&inside, 1);
            if (!atomic_load(&arrived) && !atomic_load(&delivering)) break;
            open_up();
        }
    }
    depth++;
    return 0;
}

/* The thread that forks is the child's main thread, and still holds the locks that it held. */
static void in_child(void) {
    if (!is_main()) unnoticed = 1;
    main_thread = pthread_self();
    atomic_store(&delivering, 0);
    atomic_store(&inside, depth > 0);
}

/* ---- SignalSafeLock ---- */

/* The holder is known by pthread_self(), which a child forked holding a lock keeps; an error-checking mutex goes by the
 * thread's number, which it does not. */
typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex;
    atomic_ulong holder; /* 0: not held */
} SignalSafeLock;

static unsigned long self_number(void) { return (unsigned long)pthread_self(); }

static PyObject *section_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "", names)) return NULL;
    SignalSafeLock *lock = (SignalSafeLock *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!lock) return NULL;
    pthread_mutex_init(&lock->mutex, NULL);
    atomic_init(&lock->holder, 0);
    return (PyObject *)lock;
}

static void section_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    pthread_mutex_destroy(&((SignalSafeLock *)self)->mutex);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* 1: acquired; 0: another thread holds it (only without `blocking`); -1: an exception is set. */
static int take(SignalSafeLock *lock, int blocking) {
    if (blocking && atomic_load(&lock->holder) == self_number()) {
        PyErr_SetString(PyExc_RuntimeError, "this thread is already holding this lock");
        return -1;
    }
    if (enter()) return -1;
    int error = pthread_mutex_trylock(&lock->mutex);
    if (error && blocking) {
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&lock->mutex);
        Py_END_ALLOW_THREADS
        error = 0;
    }
    if (error) return leave();
    atomic_store(&lock->holder, self_number());
    return 1;
}

static PyObject *section_acquire(PyObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"blocking", NULL};
    int blocking = 1;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|p", names, &blocking)) return NULL;
    int taken = take((SignalSafeLock *)self, blocking);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *section_enter(PyObject *self, PyObject *unused) {
    (void)unused;
    if (take((SignalSafeLock *)self, 1) < 0) return NULL;
    Py_INCREF(self);
    return self;
}

static PyObject *section_release(PyObject *self, PyObject *unused) {
    (void)unused;
    SignalSafeLock *lock = (SignalSafeLock *)self;
    if (atomic_load(&lock->holder) != self_number()) {
        PyErr_SetString(PyExc_RuntimeError, "this thread is not holding this lock");
        return NULL;
    }
    atomic_store(&lock->holder, 0);
    pthread_mutex_unlock(&lock->mutex);
    if (leave()) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef section_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))section_acquire, METH_VARARGS | METH_KEYWORDS,
     "acquire(blocking=True): enter. False: another thread is inside, and blocking is False."},
    {"release", section_release, METH_NOARGS, "Leave; the thread that entered does."},
    {"__enter__", section_enter, METH_NOARGS, NULL},
    {"__exit__", section_release, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot section_slots[] = {
    {Py_tp_new, section_new},
    {Py_tp_dealloc, section_dealloc},
    {Py_tp_methods, section_methods},
    {Py_tp_doc, "A lock whose holder, where it is the main thread, hears of signals when it lets go."},
    {0, NULL},
};

static PyType_Spec section_spec = {
    .name = "ssdtrain.storage._signal_safe_lock.SignalSafeLock",
    .basicsize = sizeof(SignalSafeLock),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = section_slots,
};

/* ---- The module ---- */

static PyObject *defer(PyObject *module, PyObject *argument) {
    (void)module;
    long number = PyLong_AsLong(argument);
    if (number == -1 && PyErr_Occurred()) return NULL;
    if (number < 1 || number >= NSIG) return PyErr_Format(PyExc_ValueError, "%ld is no signal", number);
    struct sigaction action;
    if (sigaction((int)number, NULL, &action)) return PyErr_SetFromErrno(PyExc_OSError);
    /* A handler with SA_SIGINFO is not the interpreter's, and its arguments cannot be passed on later. */
    if ((action.sa_flags & SA_SIGINFO) || action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) Py_RETURN_FALSE;
    if (action.sa_handler != deferring) {
        /* A library installed its handler in front of `deferring` and calls it: each would call the other. */
        if (interpreters[number] && interpreters[number] != action.sa_handler) Py_RETURN_FALSE;
        interpreters[number] = action.sa_handler;
        action.sa_handler = deferring;
        if (sigaction((int)number, &action, NULL)) return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_TRUE;
}

static PyObject *inside_any(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(depth > 0);
}

static PyMethodDef methods[] = {
    {"inside", inside_any, METH_NOARGS, "inside(): whether this thread is holding any lock."},
    {"defer", defer, METH_O, "defer(signalnum): let this signal, which Python handles, wait until no lock is held. False: nobody handles it, or a library came in "
     "front."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_signal_safe_lock", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__signal_safe_lock(void) {
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread = threading ? PyObject_CallMethod(threading, "main_thread", NULL) : NULL;
    PyObject *ident = thread ? PyObject_GetAttrString(thread, "ident") : NULL;
    if (ident) main_thread = (pthread_t)PyLong_AsUnsignedLong(ident);
    Py_XDECREF(threading);
    Py_XDECREF(thread);
    Py_XDECREF(ident);
    if (PyErr_Occurred()) return NULL;
    pthread_atfork(NULL, NULL, in_child);
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module ? PyType_FromSpec(&section_spec) : NULL;
    if (!type || PyModule_AddObject(module, "SignalSafeLock", type)) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
