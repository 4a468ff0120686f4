/* Types of records with fixed fields: see records.py, which has the same in Python.
 *
 * A record is one block of memory with a reference for each field. The cyclic collector looks at it only if its type says so: a hook
 * that makes several records for each saved tensor would have it run every few dozen tensors. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

enum { TYPES = 32, TOLD = 8 };

typedef struct {
    PyObject_HEAD
    PyObject *fields[1];
} Record;

typedef struct {
    PyTypeObject *type;
    Py_ssize_t count, needed; /* fields, and how many of them, the first ones, have no default */
    PyObject **defaults;
    Py_ssize_t told[TOLD]; /* fields: the queue that is told of a death, and what it is told, */
    Py_ssize_t telling;    /* so many; 0: nobody is told; */
    PyTypeObject *tells;   /* in a record of this type */
} Kind;

static Kind kinds[TYPES];
static int known;
static PyObject *put;

static Kind *kind_of(PyTypeObject *type) {
    for (int i = 0; i < known; i++)
        if (kinds[i].type == type) return &kinds[i];
    return NULL;
}

static PyObject *record_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    Kind *kind = kind_of(type);
    Py_ssize_t given = PyTuple_Size(args);
    if (!kind || given < kind->needed || given > kind->count || (keywords && PyDict_Size(keywords)))
        return PyErr_Format(PyExc_TypeError, "a record takes %zd to %zd values by place", kind ? kind->needed : 0, kind ? kind->count : 0);
    Record *record = (Record *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!record) return NULL;
    for (Py_ssize_t i = 0; i < kind->count; i++) {
        PyObject *value = i < given ? PyTuple_GetItem(args, i) : kind->defaults[i];
        Py_INCREF(value);
        record->fields[i] = value;
    }
    return (PyObject *)record;
}

static int record_traverse(PyObject *self, visitproc visit, void *arg) {
    Kind *kind = kind_of(Py_TYPE(self));
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t i = 0; kind && i < kind->count; i++) Py_VISIT(((Record *)self)->fields[i]);
    return 0;
}

static int record_clear(PyObject *self) {
    Kind *kind = kind_of(Py_TYPE(self));
    for (Py_ssize_t i = 0; kind && i < kind->count; i++) Py_CLEAR(((Record *)self)->fields[i]);
    return 0;
}

/* What dies anywhere says so to a queue, in C: no Python runs in which the exception of a signal handler could be lost. So it is told
 * in a record that the cyclic collector does not look at: making a tuple may have that run, and finalizers in it. */
static void tell(Kind *kind, PyObject **fields) {
    PyObject *kind_of_error, *error, *trace, *queue = fields[kind->told[0]];
    if (!queue) return;
    PyErr_Fetch(&kind_of_error, &error, &trace);
    PyObject *values = ((allocfunc)PyType_GetSlot(kind->tells, Py_tp_alloc))(kind->tells, 0);
    PyObject *call = values ? PyObject_GetAttr(queue, put) : NULL;
    for (Py_ssize_t i = 1; call && i < kind->telling; i++) {
        PyObject *value = fields[kind->told[i]] ? fields[kind->told[i]] : Py_None;
        Py_INCREF(value);
        ((Record *)values)->fields[i - 1] = value;
    }
    PyObject *done = call ? PyObject_CallFunctionObjArgs(call, values, NULL) : NULL;
    if (!done) PyErr_WriteUnraisable(queue);
    Py_XDECREF(done);
    Py_XDECREF(call);
    Py_XDECREF(values);
    PyErr_Restore(kind_of_error, error, trace);
}

static void record_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Kind *kind = kind_of(type);
    if (PyType_GetFlags(type) & Py_TPFLAGS_HAVE_GC) PyObject_GC_UnTrack(self);
    if (kind && kind->telling) tell(kind, ((Record *)self)->fields);
    record_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* make(name, fields, defaults, collected, told, tells) */
static PyObject *make(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *name, *fields, *defaults, *told, *tells;
    int collected;
    if (!PyArg_ParseTuple(args, "UO!O!pO!O:make", &name, &PyTuple_Type, &fields, &PyTuple_Type, &defaults, &collected, &PyTuple_Type, &told, &tells))
        return NULL;
    Py_ssize_t count = PyTuple_Size(fields), given = PyTuple_Size(defaults), telling = PyTuple_Size(told);
    if (known == TYPES || given > count || telling > TOLD) return PyErr_Format(PyExc_ValueError, "too many types, defaults or fields");
    Kind *in = telling ? kind_of((PyTypeObject *)tells) : NULL;
    if (telling && (!in || in->count != telling - 1 || PyType_GetFlags(in->type) & Py_TPFLAGS_HAVE_GC))
        return PyErr_Format(PyExc_ValueError, "a death is told in a record of as many fields, which is not collected");
    /* The type and its descriptors refer to these as long as the process lives. */
    PyMemberDef *members = PyMem_Calloc((size_t)count + 1, sizeof(PyMemberDef));
    Kind kind = {NULL, count, count - given, PyMem_Calloc((size_t)count + 1, sizeof(PyObject *)), {0}, telling, in ? in->type : NULL};
    const char *type_name = PyUnicode_AsUTF8AndSize(name, NULL);
    if (!members || !kind.defaults || !type_name) return PyErr_NoMemory();
    Py_INCREF(name);
    Py_INCREF(fields);
    Py_INCREF(defaults);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *field = PyTuple_GetItem(fields, i);
        members[i].name = PyUnicode_AsUTF8AndSize(field, NULL);
        if (!members[i].name) return NULL;
        members[i].type = T_OBJECT_EX;
        members[i].offset = (Py_ssize_t)(offsetof(Record, fields) + sizeof(PyObject *) * (size_t)i);
        if (i >= kind.needed) kind.defaults[i] = PyTuple_GetItem(defaults, i - kind.needed);
        for (Py_ssize_t j = 0; j < telling; j++)
            if (!PyUnicode_Compare(field, PyTuple_GetItem(told, j))) kind.told[j] = i;
    }
    PyType_Slot slots[] = {
        {Py_tp_new, record_new}, {Py_tp_dealloc, record_dealloc}, {Py_tp_members, members}, {0, NULL}, {0, NULL}, {0, NULL},
    };
    if (collected) {
        slots[3] = (PyType_Slot){Py_tp_traverse, record_traverse};
        slots[4] = (PyType_Slot){Py_tp_clear, record_clear};
    }
    PyType_Spec spec = {
        .name = type_name,
        .basicsize = (int)(offsetof(Record, fields) + sizeof(PyObject *) * (size_t)count),
        .flags = Py_TPFLAGS_DEFAULT | (collected ? Py_TPFLAGS_HAVE_GC : 0),
        .slots = slots,
    };
    kind.type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (!kind.type) return NULL;
    Py_INCREF((PyObject *)kind.type);
    kinds[known++] = kind;
    return (PyObject *)kind.type;
}

static PyMethodDef methods[] = {
    {"make", make, METH_VARARGS, "make(name, fields, defaults, collected, told, tells): a type of records; `defaults` are those of the last fields."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_records", "See ssdtrain.storage.records.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__records(void) {
    put = PyUnicode_InternFromString("put");
    return put ? PyModule_Create(&definition) : NULL;
}
