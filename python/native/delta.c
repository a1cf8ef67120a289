/*
 * The functions of fsdpckpt._native that write deltas: `delta` as one process, the type DeltaPart and `delta_index` as
 * one of several. fsdpckpt/_delta.py and _delta_ranks.py call them.
 */
#include "native.h"
#include "opening.h"
#include "work.h"

#include "fsdpckpt/delta.h"
#include "fsdpckpt/try.h"

#include <string.h>

/* ---- what both share ---- */

static bool find_encoding(const char *name, fc_delta_encoding *out) {
    for (int i = FC_DELTA_XOR; i <= FC_DELTA_AUTO; i++) {
        if (strcmp(name, fc_delta_encoding_name((fc_delta_encoding)i)) == 0) {
            *out = (fc_delta_encoding)i;
            return true;
        }
    }
    return native_usage("no encoding is called '%s'", name), false;
}

static bool find_checksum(const char *name, fc_delta_checksum *out) {
    for (int i = FC_DELTA_XXH3_128; i <= FC_DELTA_BLAKE3; i++) {
        if (strcmp(name, fc_delta_checksum_name((fc_delta_checksum)i)) == 0) {
            *out = (fc_delta_checksum)i;
            return true;
        }
    }
    return native_usage("no checksum is called '%s'", name), false;
}

/* Reads (encoding, checksum, level, number, base, jobs, memory). @return false with an exception set. */
static bool read_how(PyObject *tuple, fc_delta_options *out) {
    const char *encoding, *checksum;
    long long number, base;
    unsigned long long memory;
    if (!PyTuple_Check(tuple) || !PyArg_ParseTuple(tuple, "ssiLLiK", &encoding, &checksum, &out->level, &number, &base,
                                                   &out->work.threads, &memory)) {
        return PyErr_Occurred() ? false : (PyErr_SetString(PyExc_TypeError, "the options are a tuple"), false);
    }
    out->number = number;
    out->base = base;
    out->work.memory = memory;
    return find_encoding(encoding, &out->encoding) && find_checksum(checksum, &out->checksum);
}

/* Two objects of the type Checkpoint, and how the values of the new one are selected. */
typedef struct sides {
    const native_opened *old, *changed;
    fc_selection selection;
} sides;

/* @param cast the dtype of floating-point tensors, or NULL. @return false with an exception set. */
static bool read_sides(PyObject *module, PyObject *old, PyObject *changed, const char *cast, sides *out) {
    out->old = native_opened_of(module, old);
    out->changed = out->old ? native_opened_of(module, changed) : NULL;
    if (!out->changed) {
        return false;
    }
    out->selection = out->changed->selection;
    out->selection.cast = cast != NULL;
    if (cast && !fc_dtype_find(cast, strlen(cast), &out->selection.dtype)) {
        return native_usage("no dtype is called '%s'", cast), false;
    }
    if (cast && fc_dtype_get(out->selection.dtype)->cls != FC_CLASS_FLOAT) {
        return native_usage("dtype=%s is not a floating-point type; only those can be converted", cast), false;
    }
    return true;
}

/* The members of the report that follow from what was found. */
static PyObject *counts(const fc_delta_report *r) {
    return Py_BuildValue("{sLsLsnsnsnsnsnsKsK}", "version", (long long)r->number, "base_version", (long long)r->base,
                         "tensors", (Py_ssize_t)r->tensors, "changed", (Py_ssize_t)r->changed, "same_digest",
                         (Py_ssize_t)r->by_digest, "objects", (Py_ssize_t)r->objects, "only_old",
                         (Py_ssize_t)r->only_old, "bytes", (unsigned long long)r->bytes, "changed_bytes",
                         (unsigned long long)r->changed_bytes);
}

/* ---- one process ---- */

typedef struct delta_request {
    const char *path;
    sides sides;
    fc_delta_options how;
    fc_delta_report report;
} delta_request;

static fc_code delta_work(void *context, fc_progress *progress, fc_error *err) {
    delta_request *r = context;
    r->how.work.progress = progress;
    r->how.selection = r->sides.selection;
    return fc_delta_write(r->sides.old->checkpoint, r->sides.changed->checkpoint, r->path, &r->how, &r->report, err);
}

PyObject *native_delta(PyObject *module, PyObject *args, PyObject *keywords) {
    static char *names[] = {"old", "new", "path", "how", "force", "cast", "update", NULL};
    delta_request r = {.how = {.reporter = native_reporter()}};
    PyObject *old, *changed, *path = NULL, *how, *update = Py_None, *made = NULL;
    const char *cast = NULL;
    int force = 0;
    if (PyArg_ParseTupleAndKeywords(args, keywords, "OOO&O|$pzO", names, &old, &changed, PyUnicode_FSConverter, &path,
                                    &how, &force, &cast, &update)) {
        r.path = PyBytes_AsString(path);
        r.how.force = force != 0;
        if (r.path && read_how(how, &r.how) && read_sides(module, old, changed, cast, &r.sides) &&
            native_run(delta_work, &r, update)) {
            made = Py_BuildValue("(NsK)", counts(&r.report), fc_delta_encoding_name(r.report.encoding),
                                 (unsigned long long)r.report.stored_bytes);
        }
    }
    Py_XDECREF(path);
    return made;
}

/* ---- one of several processes ---- */

typedef struct part_object {
    PyObject_HEAD fc_delta_part *part; /* NULL: closed */
} part_object;

static int part_init(PyObject *object, PyObject *args, PyObject *keywords) {
    part_object *self = (part_object *)object;
    PyObject *path = NULL, *how;
    fc_delta_options options = {.level = 0};
    fc_error err = {.code = FC_OK};
    if (keywords || self->part) {
        PyErr_SetString(PyExc_TypeError, "DeltaPart(path, how)");
        return -1;
    }
    if (!PyArg_ParseTuple(args, "O&O", PyUnicode_FSConverter, &path, &how)) {
        return -1;
    }
    const char *text = PyBytes_AsString(path);
    fc_code rc = FC_EUSAGE;
    if (text && read_how(how, &options)) {
        Py_BEGIN_ALLOW_THREADS rc = fc_delta_part_new(text, &options, &self->part, &err);
        Py_END_ALLOW_THREADS if (rc != FC_OK) {
            native_raise(&err);
        }
    }
    Py_DECREF(path);
    return rc == FC_OK ? 0 : -1;
}

/* @return NULL with an exception set. */
static fc_delta_part *part_of(PyObject *object) {
    fc_delta_part *part = ((part_object *)object)->part;
    if (!part) {
        native_usage("the part of the delta is closed");
    }
    return part;
}

typedef struct add_request {
    fc_delta_part *part;
    sides sides;
} add_request;

static fc_code add_work(void *context, fc_progress *progress, fc_error *err) {
    const add_request *r = context;
    fc_delta_part_count(r->part, progress);
    const fc_code rc =
        fc_delta_part_add(r->part, r->sides.old->checkpoint, r->sides.changed->checkpoint, &r->sides.selection, err);
    fc_delta_part_count(r->part, NULL);
    return rc;
}

static PyObject *part_add(PyObject *object, PyObject *args) {
    add_request r = {.part = part_of(object)};
    PyObject *module, *old, *changed, *update;
    const char *cast;
    return r.part && PyArg_ParseTuple(args, "OOOzO", &module, &old, &changed, &cast, &update) &&
                   read_sides(module, old, changed, cast, &r.sides) && native_run(add_work, &r, update)
               ? Py_NewRef(Py_None)
               : NULL;
}

static PyObject *part_found(PyObject *object, PyObject *unused) {
    const fc_delta_part *part = part_of(object);
    const fc_delta_report *r = part ? fc_delta_part_report(part) : NULL;
    PyObject *list = part ? PyList_New((Py_ssize_t)r->changed) : NULL;
    (void)unused;
    for (size_t i = 0; list && i < r->changed; i++) {
        PyObject *name = native_text(fc_delta_part_name(part, i));
        if (!name || PyList_SetItem(list, (Py_ssize_t)i, name) != 0) {
            Py_DECREF(list);
            list = NULL;
        }
    }
    if (!list) {
        return NULL;
    }
    uint64_t xor_bytes, overwrite_bytes;
    fc_delta_part_size(part, FC_DELTA_XOR, &xor_bytes);
    const bool complete = fc_delta_part_size(part, FC_DELTA_OVERWRITE, &overwrite_bytes);
    return Py_BuildValue("(NNKKN)", counts(r), list, (unsigned long long)xor_bytes, (unsigned long long)overwrite_bytes,
                         PyBool_FromLong(complete));
}

static PyObject *part_write(PyObject *object, PyObject *args) {
    fc_delta_part *part = part_of(object);
    PyObject *folder = NULL;
    const char *name;
    unsigned file, files;
    fc_delta_encoding encoding;
    fc_error err = {.code = FC_OK};
    if (!part || !PyArg_ParseTuple(args, "sO&II", &name, PyUnicode_FSConverter, &folder, &file, &files)) {
        return NULL;
    }
    const char *path = PyBytes_AsString(folder);
    bool written = false;
    if (path && find_encoding(name, &encoding)) {
        fc_code rc;
        Py_BEGIN_ALLOW_THREADS rc = fc_delta_part_write(part, encoding, path, file, files, &err);
        Py_END_ALLOW_THREADS written = rc == FC_OK || native_raise(&err);
    }
    Py_DECREF(folder);
    return written ? Py_NewRef(Py_None) : NULL;
}

static PyObject *part_close(PyObject *object, PyObject *unused) {
    part_object *self = (part_object *)object;
    (void)unused;
    fc_delta_part_free(self->part);
    self->part = NULL;
    Py_RETURN_NONE;
}

static void part_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    fc_delta_part_free(((part_object *)object)->part);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"add", part_add, METH_VARARGS, "Compares tensors: _native, old, new, dtype or None, update."},
    {"found", part_found, METH_NOARGS,
     "(counts, names of changed tensors, bytes as xor, bytes as overwrite, whether all have overwrite)"},
    {"write", part_write, METH_VARARGS, "Writes the data file: encoding, folder, number of the file, number of files."},
    {"close", part_close, METH_NOARGS, "Removes the frames."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "What one of several processes writes of a delta."},
    {Py_tp_init, part_init},
    {Py_tp_dealloc, part_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "fsdpckpt._native.DeltaPart",
    .basicsize = sizeof(part_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

int native_add_delta_part(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int rc = type ? PyModule_AddObjectRef(module, "DeltaPart", type) : -1;
    Py_XDECREF(type);
    return rc;
}

/* ---- the index ---- */

/* Converts [(name, file), ...]. @return false with an exception set. */
static bool read_entries(PyObject *list, fc_arena *arena, fc_delta_index *out) {
    const Py_ssize_t count = PyList_Size(list);
    fc_delta_entry *entries = count < 0 ? NULL : fc_arena_calloc(arena, (size_t)count + 1, sizeof *entries);
    if (!entries) {
        return count < 0 ? false : (PyErr_NoMemory(), false);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i);
        if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "sI", &entries[i].name, &entries[i].file)) {
            return PyErr_Occurred() ? false : (PyErr_SetString(PyExc_TypeError, "an entry is a pair"), false);
        }
    }
    out->entries = entries;
    out->count = (size_t)count;
    return true;
}

PyObject *native_delta_index(PyObject *module, PyObject *args) {
    fc_delta_index index = {.files = 0};
    PyObject *folder = NULL, *list;
    const char *encoding, *checksum;
    long long number, base;
    bool written = false;
    (void)module;
    if (!PyArg_ParseTuple(args, "O&LLssO!I", PyUnicode_FSConverter, &folder, &number, &base, &encoding, &checksum,
                          &PyList_Type, &list, &index.files)) {
        return NULL;
    }
    const char *path = PyBytes_AsString(folder);
    index.number = number;
    index.base = base;
    fc_arena *arena = fc_arena_new();
    if (!arena) {
        PyErr_NoMemory();
    } else if (path && find_encoding(encoding, &index.encoding) && find_checksum(checksum, &index.checksum) &&
               read_entries(list, arena, &index)) {
        fc_error err = {.code = FC_OK};
        written = fc_delta_write_index(path, &index, &err) == FC_OK || native_raise(&err);
    }
    fc_arena_free(arena);
    Py_DECREF(folder);
    return written ? Py_NewRef(Py_None) : NULL;
}
