/* The codecs for tensors in host memory, with the results of the torch reference bit for bit.
 *
 * Arguments are addresses and sizes that native.py has checked; nothing here knows torch. Every function
 * releases the interpreter lock while it works and keeps no state, so any number of threads may call it. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_native_block.h"
#include "_native_exact.h"
#include "_native_floats.h"
#include "_native_zfp_stream.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little endian"
#endif

typedef unsigned long long address;

#define AT(a) ((void *)(uintptr_t)(a))

static PyObject *py_block_encode(PyObject *self, PyObject *args) {
    (void)self;
    address x, scales, data, signs;
    long long numel;
    int finite, threads;
    block_job f = {0};
    if (!PyArg_ParseTuple(args, "KiLiiipKKffKIIIKfi", &x, &f.dtype, &numel, &f.block, &f.bits, &f.kind,
                          &f.stochastic, &scales, &data, &f.cap, &f.lowest, &f.key.seed, &f.key.step,
                          &f.key.tensor, &f.key.rank, &signs, &f.unit, &threads))
        return NULL;
    f.x = AT(x), f.numel = numel, f.signs = AT(signs), f.data = AT(data);
    f.scales = AT(scales), f.zeros = f.scales + (numel + f.block - 1) / f.block;
    Py_BEGIN_ALLOW_THREADS;
    finite = block_encode(&f, threads);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(finite);
}

static PyObject *py_block_decode(PyObject *self, PyObject *args) {
    (void)self;
    address scales, data, out, signs;
    long long numel;
    int threads;
    block_job f = {0};
    if (!PyArg_ParseTuple(args, "KKLiiiKipKfi", &scales, &data, &numel, &f.block, &f.bits, &f.kind, &out,
                          &f.dtype, &f.accumulate, &signs, &f.unit, &threads))
        return NULL;
    f.out = AT(out), f.numel = numel, f.signs = AT(signs), f.data = AT(data);
    f.scales = AT(scales), f.zeros = f.scales + (numel + f.block - 1) / f.block;
    Py_BEGIN_ALLOW_THREADS;
    block_decode(&f, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

enum { CHUNK = 256 };

typedef struct {
    const void *x;
    void *out;
    uint16_t *data;
    int64_t numel;
    int dtype, accumulate;
} bf16_job;

EVERY_CPU static int bf16_encode_slice(const void *job, int64_t first, int64_t last) {
    const bf16_job *b = job;
    float v[CHUNK];
    uint16_t most = 0;
    for (int64_t at = first * CHUNK; at < last * CHUNK && at < b->numel; at += CHUNK) {
        int count = (int)least(b->numel - at, CHUNK);
        const float *values = (const float *)b->x + at;
        if (b->dtype != FLOAT32) {
            load(v, b->x, b->dtype, at, count, count);
            values = v;
        }
        uint16_t *restrict h = b->data + at;
        for (int i = 0; i < count; i++) {
            h[i] = to_bfloat16(values[i]);
            uint16_t magnitude = h[i] & 0x7fffu;
            most = magnitude > most ? magnitude : most;
        }
    }
    return most < 0x7f80u;
}

EVERY_CPU static int bf16_decode_slice(const void *job, int64_t first, int64_t last) {
    const bf16_job *b = job;
    float v[CHUNK];
    for (int64_t at = first * CHUNK; at < last * CHUNK && at < b->numel; at += CHUNK) {
        int count = (int)least(b->numel - at, CHUNK);
        const uint16_t *restrict h = b->data + at;
        float *values = b->dtype == FLOAT32 && !b->accumulate ? (float *)b->out + at : v;
        for (int i = 0; i < count; i++) values[i] = from_bfloat16(h[i]);
        if (values == v) store(v, b->out, b->dtype, at, count, b->accumulate);
    }
    return 1;
}

static int run_bf16(slice_function work, const bf16_job *b, int threads) {
    return in_slices(work, b, (b->numel + CHUNK - 1) / CHUNK, CHUNK, threads);
}

/* 1 if no value has the exponent of Inf and NaN. */
EVERY_CPU static int all_finite(const void *x, int dtype, int64_t numel) {
    uint32_t most = 0;
    uint16_t most_half = 0, special = dtype == FLOAT16 ? 0x7c00u : 0x7f80u;
    for (int64_t i = 0; i < numel && dtype == FLOAT32; i++) {
        uint32_t u = ((const uint32_t *)x)[i] & ABS_MASK;
        most = u > most ? u : most;
    }
    for (int64_t i = 0; i < numel && dtype != FLOAT32; i++) {
        uint16_t u = ((const uint16_t *)x)[i] & 0x7fffu;
        most_half = u > most_half ? u : most_half;
    }
    return most < INF_BITS && most_half < special;
}

static PyObject *py_all_finite(PyObject *self, PyObject *args) {
    (void)self;
    address x;
    long long numel;
    int dtype, finite;
    if (!PyArg_ParseTuple(args, "KiL", &x, &dtype, &numel)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    finite = all_finite(AT(x), dtype, numel);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(finite);
}

static PyObject *py_bf16_encode(PyObject *self, PyObject *args) {
    (void)self;
    address x, data;
    long long numel;
    int finite, threads;
    bf16_job b = {0};
    if (!PyArg_ParseTuple(args, "KiLKi", &x, &b.dtype, &numel, &data, &threads)) return NULL;
    b.x = AT(x), b.numel = numel, b.data = AT(data);
    Py_BEGIN_ALLOW_THREADS;
    finite = run_bf16(bf16_encode_slice, &b, threads);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(finite);
}

static PyObject *py_bf16_decode(PyObject *self, PyObject *args) {
    (void)self;
    address data, out;
    long long numel;
    int threads;
    bf16_job b = {0};
    if (!PyArg_ParseTuple(args, "KLKipi", &data, &numel, &out, &b.dtype, &b.accumulate, &threads)) return NULL;
    b.out = AT(out), b.numel = numel, b.data = AT(data);
    Py_BEGIN_ALLOW_THREADS;
    run_bf16(bf16_decode_slice, &b, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_rotate(PyObject *self, PyObject *args) {
    (void)self;
    address x, signs, rotated;
    long long numel;
    int threads;
    rotation_job r = {0};
    if (!PyArg_ParseTuple(args, "KiLKifKi", &x, &r.dtype, &numel, &signs, &r.size, &r.unit, &rotated, &threads))
        return NULL;
    r.x = AT(x), r.numel = numel, r.signs = AT(signs), r.rotated = AT(rotated);
    Py_BEGIN_ALLOW_THREADS;
    run_rotation(rotate_slice, &r, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_unrotate(PyObject *self, PyObject *args) {
    (void)self;
    address rotated, signs, out;
    long long numel;
    int threads;
    rotation_job r = {0};
    if (!PyArg_ParseTuple(args, "KLKifKipi", &rotated, &numel, &signs, &r.size, &r.unit, &out, &r.dtype,
                          &r.accumulate, &threads))
        return NULL;
    r.out = AT(out), r.numel = numel, r.signs = AT(signs), r.rotated = AT(rotated);
    Py_BEGIN_ALLOW_THREADS;
    run_rotation(unrotate_slice, &r, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_zfp_encode(PyObject *self, PyObject *args) {
    (void)self;
    address x, body;
    long long numel, body_bytes;
    int finite, threads;
    zfp_job job = {0};
    if (!PyArg_ParseTuple(args, "KiLiKLi", &x, &job.dtype, &numel, &job.block_bits, &body, &body_bytes, &threads))
        return NULL;
    job.x = AT(x), job.numel = numel, job.stream = AT(body), job.n_words = body_bytes / 8;
    Py_BEGIN_ALLOW_THREADS;
    finite = zfp_encode(&job, threads);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(finite);
}

static PyObject *py_zfp_decode(PyObject *self, PyObject *args) {
    (void)self;
    address body, out;
    long long numel, body_bytes;
    int threads;
    zfp_job job = {0};
    if (!PyArg_ParseTuple(args, "KLiLKipi", &body, &body_bytes, &job.block_bits, &numel, &out, &job.dtype,
                          &job.accumulate, &threads))
        return NULL;
    job.out = AT(out), job.numel = numel, job.stream = AT(body), job.n_words = body_bytes / 8;
    Py_BEGIN_ALLOW_THREADS;
    zfp_decode(&job, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* Eight bytes to eight bits by one multiplication, and back. A byte is true as torch reads it: if it is not zero. */
static void mask_pack(const uint8_t *x, int64_t numel, uint8_t *out) {
    int64_t at = 0;
    for (; at + 8 <= numel; at += 8) {
        uint64_t w;
        memcpy(&w, x + at, 8);
        w = ((w & 0x7f7f7f7f7f7f7f7fu) + 0x7f7f7f7f7f7f7f7fu) | w;
        out[at / 8] = (uint8_t)((w >> 7 & 0x0101010101010101u) * 0x0102040810204080u >> 56);
    }
    if (at < numel) {
        unsigned byte = 0;
        for (int i = 0; at + i < numel; i++) byte |= (unsigned)(x[at + i] != 0) << i;
        out[at / 8] = (uint8_t)byte;
    }
}

static void mask_unpack(const uint8_t *data, int64_t numel, uint8_t *out) {
    int64_t at = 0;
    for (; at + 8 <= numel; at += 8) {
        uint64_t w = (data[at / 8] * 0x0101010101010101u & 0x8040201008040201u) + 0x7f7f7f7f7f7f7f7fu;
        w = w >> 7 & 0x0101010101010101u;
        memcpy(out + at, &w, 8);
    }
    for (int i = 0; at + i < numel; i++) out[at + i] = data[at / 8] >> i & 1;
}

/* Byte planes of values of 2 or 4 bytes, rotated left by one bit where `turn` is 1; plane j of value i at j *
 * numel + i. */
EVERY_CPU static void split_planes(const void *x, int64_t numel, int size, int turn,
                                   uint8_t *restrict planes) {
    for (int64_t i = 0; i < numel && size == 2; i++) {
        uint16_t u = ((const uint16_t *)x)[i];
        u = turn ? (uint16_t)(u << 1 | u >> 15) : u;
        planes[i] = (uint8_t)u;
        planes[numel + i] = (uint8_t)(u >> 8);
    }
    for (int64_t i = 0; i < numel && size == 4; i++) {
        uint32_t u = ((const uint32_t *)x)[i];
        u = turn ? u << 1 | u >> 31 : u;
        planes[i] = (uint8_t)u;
        planes[numel + i] = (uint8_t)(u >> 8);
        planes[2 * numel + i] = (uint8_t)(u >> 16);
        planes[3 * numel + i] = (uint8_t)(u >> 24);
    }
}

EVERY_CPU static void merge_planes(const uint8_t *restrict planes, int64_t numel, int size, int turn,
                                   void *out) {
    uint16_t *restrict two = out;
    uint32_t *restrict four = out;
    for (int64_t i = 0; i < numel && size == 2; i++) {
        uint16_t u = (uint16_t)(planes[i] | planes[numel + i] << 8);
        two[i] = turn ? (uint16_t)(u >> 1 | u << 15) : u;
    }
    for (int64_t i = 0; i < numel && size == 4; i++) {
        uint32_t u = planes[i] | (uint32_t)planes[numel + i] << 8 | (uint32_t)planes[2 * numel + i] << 16 |
                     (uint32_t)planes[3 * numel + i] << 24;
        four[i] = turn ? u >> 1 | u << 31 : u;
    }
}

static PyObject *py_split_planes(PyObject *self, PyObject *args) {
    (void)self;
    address x, planes;
    long long numel;
    int size, turn;
    if (!PyArg_ParseTuple(args, "KLipK", &x, &numel, &size, &turn, &planes)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    split_planes(AT(x), numel, size, turn, AT(planes));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_merge_planes(PyObject *self, PyObject *args) {
    (void)self;
    address planes, out;
    long long numel;
    int size, turn;
    if (!PyArg_ParseTuple(args, "KLipK", &planes, &numel, &size, &turn, &out)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    merge_planes(AT(planes), numel, size, turn, AT(out));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_mask_pack(PyObject *self, PyObject *args) {
    (void)self;
    address x, out;
    long long numel;
    if (!PyArg_ParseTuple(args, "KLK", &x, &numel, &out)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    mask_pack(AT(x), numel, AT(out));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_mask_unpack(PyObject *self, PyObject *args) {
    (void)self;
    address data, out;
    long long numel;
    if (!PyArg_ParseTuple(args, "KLK", &data, &numel, &out)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    mask_unpack(AT(data), numel, AT(out));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *py_exact_encode(PyObject *self, PyObject *args) {
    (void)self;
    address x, records;
    long long numel;
    int flags, threads;
    exact_job e = {0};
    if (!PyArg_ParseTuple(args, "KiLKi", &x, &e.dtype, &numel, &records, &threads)) return NULL;
    e.x = AT(x), e.blocks = numel / EXACT_BLOCK, e.records = AT(records);
    Py_BEGIN_ALLOW_THREADS;
    flags = run_exact(exact_encode_slice, &e, threads);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(flags);
}

static PyObject *py_exact_decode(PyObject *self, PyObject *args) {
    (void)self;
    address records, out;
    long long numel;
    int threads;
    exact_job e = {0};
    if (!PyArg_ParseTuple(args, "KKiLi", &records, &out, &e.dtype, &numel, &threads)) return NULL;
    e.out = AT(out), e.blocks = numel / EXACT_BLOCK, e.records = AT(records);
    Py_BEGIN_ALLOW_THREADS;
    run_exact(exact_decode_slice, &e, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"block_encode", py_block_encode, METH_VARARGS, NULL},
    {"block_decode", py_block_decode, METH_VARARGS, NULL},
    {"bf16_encode", py_bf16_encode, METH_VARARGS, NULL},
    {"bf16_decode", py_bf16_decode, METH_VARARGS, NULL},
    {"rotate", py_rotate, METH_VARARGS, NULL},
    {"unrotate", py_unrotate, METH_VARARGS, NULL},
    {"zfp_encode", py_zfp_encode, METH_VARARGS, NULL},
    {"zfp_decode", py_zfp_decode, METH_VARARGS, NULL},
    {"exact_encode", py_exact_encode, METH_VARARGS, NULL},
    {"exact_decode", py_exact_decode, METH_VARARGS, NULL},
    {"mask_pack", py_mask_pack, METH_VARARGS, NULL},
    {"mask_unpack", py_mask_unpack, METH_VARARGS, NULL},
    {"all_finite", py_all_finite, METH_VARARGS, NULL},
    {"split_planes", py_split_planes, METH_VARARGS, NULL},
    {"merge_planes", py_merge_planes, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "ssdtrain.codecs._native",
    "The codecs for host memory; reached through native.py.",
    0,
    methods,
    NULL,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    return PyModule_Create(&definition);
}
