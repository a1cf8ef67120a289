/*
 * Values that cross the border between Python and the library: strings, integers, meshes, placements, errors.
 */
#include "native.h"

#include <string.h>

PyObject *native_text(const char *text) {
    return text ? PyUnicode_DecodeFSDefault(text) : Py_NewRef(Py_None);
}

/* ---- errors ---- */

/* fc_error.hint as the word that fsdpckpt._errors knows. */
static const char *const hint_words[FC_HINT_COUNT] = {
    [FC_HINT_NONE] = "",
    [FC_HINT_EXCLUDE] = "exclude",
    [FC_HINT_PLUGINS] = "exclude",
    [FC_HINT_EXCLUDE_EACH] = "exclude_each",
    [FC_HINT_TRUST_OBJECTS] = "trust_objects",
    [FC_HINT_FORCE] = "force",
    [FC_HINT_FOLLOW_EXTERNAL] = "follow_external",
    [FC_HINT_MEMORY] = "memory",
    [FC_HINT_TP_PLAN] = "tp_plan",
    [FC_HINT_POLICY] = "policy",
    [FC_HINT_BUFFERS] = "buffers",
    [FC_HINT_TAKE_FIRST] = "take_first",
    [FC_HINT_LAYOUT] = "layout",
    [FC_HINT_DRY_RUN] = "dry_run",
    [FC_HINT_CHECK] = "check",
    [FC_HINT_ONE_FILE] = "one_file",
    [FC_HINT_UNSPLIT] = "unsplit",
};

PyObject *native_raise(const fc_error *err) {
    const char *hint = (unsigned)err->hint < FC_HINT_COUNT && hint_words[err->hint] ? hint_words[err->hint] : "";
    PyObject *errors = PyImport_ImportModule("fsdpckpt._errors");
    PyObject *made = errors ? PyObject_CallMethod(errors, "make", "iNsN", (int)err->code, native_text(err->message),
                                                  hint, native_text(err->about))
                            : NULL;
    if (made) {
        PyErr_SetObject((PyObject *)Py_TYPE(made), made);
    }
    Py_XDECREF(made);
    Py_XDECREF(errors);
    return NULL;
}

PyObject *native_usage(const char *format, ...) {
    va_list values;
    va_start(values, format);
    PyObject *text = PyUnicode_FromFormatV(format, values);
    va_end(values);
    PyObject *errors = text ? PyImport_ImportModule("fsdpckpt._errors") : NULL;
    PyObject *kind = errors ? PyObject_GetAttrString(errors, "UsageError") : NULL;
    if (kind) {
        PyErr_SetObject(kind, text);
    }
    Py_XDECREF(kind);
    Py_XDECREF(errors);
    Py_XDECREF(text);
    return NULL;
}

static void tell(void *context, const char *line) {
    (void)context;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *errors = PyImport_ImportModule("fsdpckpt._errors");
    PyObject *done = errors ? PyObject_CallMethod(errors, "tell", "N", native_text(line)) : NULL;
    if (!done) {
        PyErr_Clear(); /* warnings as errors: there is no call to end with it */
    }
    Py_XDECREF(done);
    Py_XDECREF(errors);
    PyGILState_Release(state);
}

fc_reporter native_reporter(void) {
    const fc_reporter reporter = {.report = tell};
    return reporter;
}

/* ---- paths ---- */

int native_optional_path(PyObject *value, void *out) {
    PyObject **path = out;
    if (!value) { /* the call fails: releases what was converted */
        Py_CLEAR(*path);
        return 1;
    }
    return value == Py_None ? 1 : PyUnicode_FSConverter(value, out);
}

/* ---- sequences ---- */

static bool copy_string(PyObject *item, fc_arena *arena, const char **out) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(item, &size);
    if (!text) {
        if (PyErr_ExceptionMatches(PyExc_UnicodeError)) {
            PyErr_Clear();
            native_usage("%A is no text: it has a surrogate, which UTF-8 cannot encode", item);
        }
        return false;
    }
    if (strlen(text) != (size_t)size) {
        native_usage("%A has a null character", item);
        return false;
    }
    *out = fc_arena_strndup(arena, text, (size_t)size);
    if (!*out) {
        PyErr_NoMemory();
    }
    return *out != NULL;
}

bool native_strings(PyObject *sequence, fc_arena *arena, const char *const **out) {
    *out = NULL;
    if (sequence == Py_None) {
        return true;
    }
    Py_ssize_t count = PySequence_Size(sequence);
    const char **items = count < 0 ? NULL : fc_arena_calloc(arena, (size_t)count + 1, sizeof *items);
    if (!items) {
        return count < 0 ? false : (PyErr_NoMemory(), false);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        bool copied = item && copy_string(item, arena, &items[i]);
        Py_XDECREF(item);
        if (!copied) {
            return false;
        }
    }
    *out = items;
    return true;
}

int native_integers(PyObject *sequence, int most, int64_t *out) {
    Py_ssize_t count = PySequence_Size(sequence);
    if (count > most) {
        native_usage("%zd dimensions, at most %d are supported", count, most);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        out[i] = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (out[i] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return (int)count;
}

/*
 * Puts `item` into `tuple`, and takes ownership of it. @return `tuple`, or NULL after releasing it if there is no item.
 */
static PyObject *put(PyObject *tuple, Py_ssize_t at, PyObject *item) {
    if (tuple && (!item || PyTuple_SetItem(tuple, at, item) != 0)) {
        Py_DECREF(tuple);
        return NULL;
    }
    return tuple;
}

PyObject *native_tuple(int count, const int64_t *values) {
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        tuple = put(tuple, i, PyLong_FromLongLong(values[i]));
    }
    return tuple;
}

/* ---- meshes and placements ---- */

static bool read_dimension(PyObject *pair, fc_mesh *mesh, int d) {
    const char *name;
    long long size;
    if (!PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "sL", &name, &size)) {
        PyErr_SetString(PyExc_TypeError, "a mesh is a tuple of pairs (name, size)");
        return false;
    }
    if (size < 1 || strlen(name) >= sizeof mesh->names[d]) {
        native_usage("mesh dimension '%s' of size %lld: a size is at least 1, a name at most %d bytes", name, size,
                     (int)sizeof mesh->names[d] - 1);
        return false;
    }
    mesh->sizes[d] = size;
    memcpy(mesh->names[d], name, strlen(name) + 1);
    return true;
}

bool native_mesh(PyObject *pairs, fc_mesh *out) {
    *out = (fc_mesh){.ndim = 0};
    Py_ssize_t count = PySequence_Size(pairs);
    if (count < 0 || count > FC_MAX_MESH_DIMS) {
        if (count >= 0) {
            native_usage("a mesh has at most %d dimensions", FC_MAX_MESH_DIMS);
        }
        return false;
    }
    for (int d = 0; d < (int)count; d++) {
        PyObject *pair = PySequence_GetItem(pairs, d);
        bool read = pair && read_dimension(pair, out, d);
        Py_XDECREF(pair);
        if (!read) {
            return false;
        }
    }
    out->ndim = (int)count;
    return true;
}

PyObject *native_mesh_pairs(const fc_mesh *mesh) {
    PyObject *pairs = PyTuple_New(mesh->ndim);
    for (int d = 0; pairs && d < mesh->ndim; d++) {
        pairs = put(pairs, d, Py_BuildValue("(sL)", mesh->names[d], (long long)mesh->sizes[d]));
    }
    return pairs;
}

PyObject *native_placements(int count, const fc_placement *placements) {
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        const fc_placement *p = &placements[i];
        tuple = put(tuple, i, Py_BuildValue("(iiL)", (int)p->kind, p->dim, (long long)p->split_factor));
    }
    return tuple;
}

bool native_read_placements(PyObject *tuples, int count, fc_placement *out) {
    if (PySequence_Size(tuples) != count) {
        native_usage("a mesh of %d dimensions needs as many placements", count);
        return false;
    }
    for (int i = 0; i < count; i++) {
        int kind = 0, dim = 0;
        long long split_factor = 0;
        PyObject *item = PySequence_GetItem(tuples, i);
        bool read = item && PyTuple_Check(item) && PyArg_ParseTuple(item, "iiL", &kind, &dim, &split_factor);
        Py_XDECREF(item);
        if (!read || kind < FC_REPLICATE || kind > FC_PARTIAL) {
            PyErr_SetString(PyExc_TypeError, "a placement is a tuple (kind, dim, split_factor)");
            return false;
        }
        out[i] = (fc_placement){.kind = (fc_placement_kind)kind, .dim = dim, .split_factor = split_factor};
    }
    return true;
}

PyObject *native_path(const fc_path *path) {
    PyObject *list = PyList_New((Py_ssize_t)path->count);
    for (size_t i = 0; list && i < path->count; i++) {
        const fc_path_element *e = &path->elements[i];
        PyObject *key = e->is_index ? PyLong_FromString(e->key, NULL, 10)
                                    : PyUnicode_DecodeUTF8(e->key, (Py_ssize_t)strlen(e->key), "surrogatepass");
        if (!key || PyList_SetItem(list, (Py_ssize_t)i, key) != 0) {
            Py_DECREF(list);
            list = NULL;
        }
    }
    return list;
}
