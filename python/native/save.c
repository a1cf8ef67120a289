/*
 * fsdpckpt._native.save: writes arrays of the calling program as a checkpoint.
 */
#include "native.h"
#include "work.h"

#include "fsdpckpt/memory.h"
#include "fsdpckpt/move.h"

#include <string.h>

typedef struct save_request {
    fc_arena *arena;
    fc_memory_tensor *tensors;
    size_t count;
    const char *path;
    fc_convert_options how;
    fc_convert_report report;
} save_request;

/* Copies the text of `item` into the arena. @return NULL with an exception set. */
static const char *keep(const save_request *r, PyObject *item) {
    const char *const *texts;
    PyObject *one = PyTuple_Pack(1, item);
    bool kept = one && native_strings(one, r->arena, &texts);
    Py_XDECREF(one);
    return kept ? texts[0] : NULL;
}

/* An element of a path: a key, or the index into a list as ("0", is_tuple). */
static bool read_element(const save_request *r, PyObject *item, fc_path_element *out) {
    PyObject *text = item;
    int is_tuple = 0;
    if (PyTuple_Check(item)) {
        if (!PyArg_ParseTuple(item, "Up", &text, &is_tuple)) {
            return false;
        }
        out->is_index = true;
        out->is_tuple = is_tuple != 0;
    }
    out->key = keep(r, text);
    return out->key != NULL;
}

static bool read_path(const save_request *r, PyObject *path, fc_path *out) {
    Py_ssize_t count = PySequence_Size(path);
    fc_path_element *elements = count < 0 ? NULL : fc_arena_calloc(r->arena, (size_t)count, sizeof *elements);
    if (!elements) {
        return count < 0 ? false : (PyErr_NoMemory(), false);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(path, i);
        bool read = item && read_element(r, item, &elements[i]);
        Py_XDECREF(item);
        if (!read) {
            return false;
        }
    }
    *out = (fc_path){elements, (size_t)count};
    return true;
}

/* Copies integers into the arena. @return NULL with an exception set. */
static int64_t *keep_integers(const save_request *r, PyObject *sequence, int *count) {
    int64_t values[FC_MAX_DIMS];
    *count = native_integers(sequence, FC_MAX_DIMS, values);
    int64_t *kept = *count < 0 ? NULL : fc_arena_calloc(r->arena, (size_t)*count, sizeof *kept);
    if (kept && *count > 0) {
        memcpy(kept, values, (size_t)*count * sizeof *kept);
    } else if (!kept && *count >= 0) {
        PyErr_NoMemory();
    }
    return kept;
}

/* Makes the one chunk of a tensor that is whole in memory. */
static bool whole(const save_request *r, const void *data, const int64_t *strides, fc_memory_tensor *out) {
    fc_memory_chunk *chunk = fc_arena_calloc(r->arena, 1, sizeof *chunk);
    int64_t *origin = fc_arena_calloc(r->arena, (size_t)out->ndim, sizeof *origin);
    if (!chunk || !origin) {
        PyErr_NoMemory();
        return false;
    }
    *chunk = (fc_memory_chunk){.offsets = origin, .sizes = out->shape, .strides = strides, .data = data};
    out->chunks = chunk;
    out->nchunks = 1;
    return true;
}

/* (name, path, dtype or None, encoding or None, shape, strides or None, address) */
static bool read_value(const save_request *r, PyObject *value, fc_memory_tensor *out) {
    PyObject *name, *path, *shape, *strides;
    const char *dtype, *encoding;
    unsigned long long address;
    int count;
    if (!PyTuple_Check(value) ||
        !PyArg_ParseTuple(value, "UOzzOOK", &name, &path, &dtype, &encoding, &shape, &strides, &address)) {
        return false;
    }
    out->name = keep(r, name);
    out->shape = keep_integers(r, shape, &out->ndim);
    if (!out->name || !out->shape || !read_path(r, path, &out->path)) {
        return false;
    }
    int64_t *steps = strides == Py_None ? NULL : keep_integers(r, strides, &count);
    if (strides != Py_None && (!steps || count != out->ndim)) {
        return PyErr_Occurred() ? false : (PyErr_SetString(PyExc_ValueError, "strides and shape differ"), false);
    }
    out->dtype = FC_OPAQUE;
    out->encoding = encoding ? fc_arena_strndup(r->arena, encoding, strlen(encoding)) : NULL;
    if (encoding && !out->encoding) {
        return PyErr_NoMemory() != NULL;
    }
    if (dtype && !fc_dtype_find(dtype, strlen(dtype), &out->dtype)) {
        PyErr_Format(PyExc_ValueError, "no dtype is called '%s'", dtype);
        return false;
    }
    return whole(r, (const void *)(uintptr_t)address, steps, out);
}

static bool read_values(save_request *r, PyObject *values) {
    Py_ssize_t count = PySequence_Size(values);
    r->tensors = count < 0 ? NULL : fc_arena_calloc(r->arena, (size_t)count + 1, sizeof *r->tensors);
    if (!r->tensors) {
        return count < 0 ? false : (PyErr_NoMemory(), false);
    }
    r->count = (size_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value = PySequence_GetItem(values, i);
        bool read = value && read_value(r, value, &r->tensors[i]);
        Py_XDECREF(value);
        if (!read) {
            return PyErr_Occurred() ? false : (PyErr_SetString(PyExc_TypeError, "a value is a tuple of seven"), false);
        }
    }
    return true;
}

static fc_code save_work(void *context, fc_progress *progress, fc_error *err) {
    save_request *r = context;
    fc_checkpoint *source;
    r->how.move.progress = progress;
    fc_code rc = fc_checkpoint_in_memory(r->path, r->tensors, r->count, &source, err);
    if (rc == FC_OK) {
        rc = fc_convert(source, r->path, &r->how, &r->report, err);
        fc_checkpoint_close(source);
    }
    return rc;
}

static PyObject *report_dict(const save_request *r) {
    const fc_convert_report *report = &r->report;
    return Py_BuildValue("{sssssnsnsnsKsK}", "target", r->path, "format", r->how.format->name, "tensors",
                         (Py_ssize_t)report->selected.tensors, "objects", (Py_ssize_t)report->selected.objects, "files",
                         (Py_ssize_t)report->files, "data_bytes", (unsigned long long)report->data_bytes,
                         "stored_bytes", (unsigned long long)report->stored_bytes);
}

PyObject *native_save(PyObject *module, PyObject *args, PyObject *keywords) {
    static char *names[] = {"path", "format", "values", "force", "trust_objects", "compress", "jobs", "update", NULL};
    save_request r = {.how = {.selection = {.include = NULL}, .reporter = native_reporter()}};
    PyObject *path = NULL, *values, *update = Py_None, *saved = NULL;
    const char *format;
    int force = 0, trust = 0;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&sO|$ppiiO", names, PyUnicode_FSConverter, &path, &format,
                                     &values, &force, &trust, &r.how.selection.compress, &r.how.move.threads,
                                     &update)) {
        return NULL;
    }
    r.path = PyBytes_AsString(path);
    r.how.force = force != 0;
    r.how.trust_objects = trust != 0;
    r.how.format = fc_format_find(format);
    r.arena = fc_arena_new();
    if (!r.arena) {
        PyErr_NoMemory();
    } else if (!r.how.format) {
        PyErr_Format(PyExc_ValueError, "no format is called '%s'", format);
    } else if (r.path && read_values(&r, values) && native_run(save_work, &r, update)) {
        saved = report_dict(&r);
    }
    fc_arena_free(r.arena);
    Py_DECREF(path);
    return saved;
}
