/*
 * Converts rows of Python into values in memory. See rows.h.
 */
#include "rows.h"

#include <string.h>

/* Copies the text of `item` into the arena. @return NULL with an exception set. */
static const char *keep(fc_arena *arena, PyObject *item) {
    const char *const *texts;
    PyObject *one = PyTuple_Pack(1, item);
    bool kept = one && native_strings(one, arena, &texts);
    Py_XDECREF(one);
    return kept ? texts[0] : NULL;
}

/* Allocates in the arena. @return NULL with an exception set. */
static void *room(fc_arena *arena, Py_ssize_t count, size_t size) {
    void *made = count < 0 ? NULL : fc_arena_calloc(arena, (size_t)count, size);
    if (!made && count >= 0) {
        PyErr_NoMemory();
    }
    return made;
}

/* Calls `read` for each item of a sequence. @return false with an exception set. */
static bool each(PyObject *sequence, Py_ssize_t count, bool (*read)(void *context, PyObject *item, Py_ssize_t index),
                 void *context) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        bool done = item && read(context, item, i);
        Py_XDECREF(item);
        if (!done) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_TypeError, "a row of another shape");
            }
            return false;
        }
    }
    return true;
}

typedef struct path_reader {
    fc_arena *arena;
    fc_path_element *elements;
} path_reader;

/* An element of a path: a key, or the index into a list as ("0", is_tuple). */
static bool read_element(void *context, PyObject *item, Py_ssize_t index) {
    const path_reader *r = context;
    fc_path_element *out = &r->elements[index];
    PyObject *text = item;
    int is_tuple = 0;
    if (PyTuple_Check(item)) {
        if (!PyArg_ParseTuple(item, "Up", &text, &is_tuple)) {
            return false;
        }
        out->is_index = true;
        out->is_tuple = is_tuple != 0;
    }
    out->key = keep(r->arena, text);
    return out->key != NULL;
}

static bool read_path(fc_arena *arena, PyObject *path, fc_path *out) {
    Py_ssize_t count = PySequence_Size(path);
    path_reader r = {arena, room(arena, count, sizeof *r.elements)};
    *out = (fc_path){r.elements, (size_t)count};
    return r.elements && each(path, count, read_element, &r);
}

/* Copies integers into the arena; None becomes `absent`. @return NULL with an exception set. */
static const int64_t *integers(fc_arena *arena, PyObject *sequence, int ndim, const int64_t *absent, bool *good) {
    int64_t values[FC_MAX_DIMS];
    if (sequence == Py_None) {
        return absent;
    }
    int count = native_integers(sequence, FC_MAX_DIMS, values);
    int64_t *kept = room(arena, count, sizeof *kept);
    if (kept && count != ndim) {
        PyErr_SetString(PyExc_ValueError, "offsets, sizes or strides differ from the shape in length");
    } else if (kept && count > 0) {
        memcpy(kept, values, (size_t)count * sizeof *kept);
    }
    *good = *good && kept && count == ndim;
    return kept;
}

typedef struct chunk_reader {
    fc_arena *arena;
    const fc_memory_tensor *tensor;
    fc_memory_chunk *chunks;
    uint32_t *ranks;
    const int64_t *origin;
} chunk_reader;

static bool read_chunk(void *context, PyObject *item, Py_ssize_t index) {
    const chunk_reader *r = context;
    const fc_memory_tensor *t = r->tensor;
    PyObject *offsets, *sizes, *strides, *rank;
    unsigned long long address;
    bool good = true;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "OOOKO", &offsets, &sizes, &strides, &address, &rank)) {
        return false;
    }
    r->chunks[index] = (fc_memory_chunk){.offsets = integers(r->arena, offsets, t->ndim, r->origin, &good),
                                         .sizes = integers(r->arena, sizes, t->ndim, t->shape, &good),
                                         .strides = integers(r->arena, strides, t->ndim, NULL, &good),
                                         .data = (const void *)(uintptr_t)address};
    r->ranks[index] = rank == Py_None ? FC_NO_RANK : (uint32_t)PyLong_AsUnsignedLong(rank);
    return good && !PyErr_Occurred();
}

static bool read_chunks(fc_arena *arena, PyObject *chunks, fc_memory_tensor *out) {
    Py_ssize_t count = PySequence_Size(chunks);
    chunk_reader r = {.arena = arena, .tensor = out};
    r.chunks = room(arena, count, sizeof *r.chunks);
    r.ranks = r.chunks ? room(arena, count, sizeof *r.ranks) : NULL;
    r.origin = r.ranks ? room(arena, out->ndim, sizeof *r.origin) : NULL;
    out->chunks = r.chunks;
    out->ranks = r.ranks;
    out->nchunks = (size_t)count;
    return r.origin && each(chunks, count, read_chunk, &r);
}

static bool read_dtype(fc_arena *arena, const char *dtype, const char *encoding, fc_memory_tensor *out) {
    out->dtype = FC_OPAQUE;
    out->encoding = encoding ? fc_arena_strndup(arena, encoding, strlen(encoding)) : NULL;
    if (encoding && !out->encoding) {
        PyErr_NoMemory();
        return false;
    }
    if (dtype && !fc_dtype_find(dtype, strlen(dtype), &out->dtype)) {
        native_usage("no dtype is called '%s'", dtype);
        return false;
    }
    return true;
}

typedef struct row_reader {
    fc_arena *arena;
    fc_memory_tensor *tensors;
} row_reader;

static bool read_row(void *context, PyObject *row, Py_ssize_t index) {
    const row_reader *r = context;
    fc_memory_tensor *out = &r->tensors[index];
    PyObject *name, *path, *shape, *chunks;
    const char *dtype, *encoding, *tied_to = NULL;
    bool good = true;
    if (!PyTuple_Check(row) ||
        !PyArg_ParseTuple(row, "UOzzOO|z", &name, &path, &dtype, &encoding, &shape, &chunks, &tied_to)) {
        return false;
    }
    Py_ssize_t ndim = PySequence_Size(shape);
    if (ndim < 0 || ndim > FC_MAX_DIMS) {
        return ndim < 0 ? false : (native_usage("%zd dimensions, at most %d are supported", ndim, FC_MAX_DIMS), false);
    }
    out->ndim = (int)ndim;
    out->name = keep(r->arena, name);
    out->tied_to = tied_to ? fc_arena_strndup(r->arena, tied_to, strlen(tied_to)) : NULL;
    if (tied_to && !out->tied_to) {
        PyErr_NoMemory();
        return false;
    }
    out->shape = out->name ? integers(r->arena, shape, out->ndim, NULL, &good) : NULL;
    return out->shape && good && read_path(r->arena, path, &out->path) && read_dtype(r->arena, dtype, encoding, out) &&
           read_chunks(r->arena, chunks, out);
}

bool native_rows(PyObject *rows, fc_arena *arena, fc_memory_tensor **out, size_t *count) {
    Py_ssize_t n = PySequence_Size(rows);
    row_reader r = {arena, n < 0 ? NULL : room(arena, n + 1, sizeof *r.tensors)};
    *out = r.tensors;
    *count = (size_t)n;
    return r.tensors && each(rows, n, read_row, &r);
}

bool native_rows_have_data(const fc_memory_tensor *tensors, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const fc_memory_tensor *t = &tensors[i];
        for (size_t c = 0; c < t->nchunks; c++) {
            if (!t->chunks[c].data && !fc_is_empty(t->ndim, t->chunks[c].sizes)) {
                native_usage("%s: there is no memory with its elements", t->name);
                return false;
            }
        }
    }
    return true;
}
