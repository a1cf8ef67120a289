/*
 * The type Checkpoint: an open checkpoint with a selection of its values. Several threads may read at once; the one
 * that closes it does not wait for them, the last of them frees it. All counting happens under the interpreter lock.
 */
#include "native.h"
#include "opening.h"
#include "rows.h"
#include "work.h"

#include "fsdpckpt/fsdpckpt.h"

#include <string.h>

typedef struct checkpoint_object {
    PyObject_HEAD native_opened opened; /* its checkpoint is NULL: closed */
    fc_chunk_lists *lists;              /* of the checkpoint */
    size_t users;                       /* calls that work without the interpreter lock */
    bool remote;                        /* something of it may be on a server */
    bool closed;
} checkpoint_object;

static void release(checkpoint_object *self) {
    if (self->closed && self->users == 0) {
        fc_chunk_lists_free(self->lists);
        fc_checkpoint_close(self->opened.checkpoint);
        fc_arena_free(self->opened.arena);
        self->lists = NULL;
        self->opened.checkpoint = NULL;
        self->opened.arena = NULL;
    }
}

/* Ends the use that a call began. Nothing stays open after the last one. */
static void done_with(checkpoint_object *self) {
    if (--self->users == 0) {
        fc_checkpoint_rest(self->opened.checkpoint);
    }
    release(self);
}

/* @return whether it is open; if not, an exception is set. */
static bool is_open(const checkpoint_object *self) {
    if (self->closed) {
        native_usage("I/O operation on a closed checkpoint");
    }
    return !self->closed;
}

/* @return value `index`, or NULL with an exception set. */
static const fc_target_tensor *value_at(const checkpoint_object *self, Py_ssize_t index) {
    if (!is_open(self)) {
        return NULL;
    }
    if (index < 0 || (size_t)index >= self->opened.target.ntensors) {
        PyErr_SetString(PyExc_IndexError, "no such value");
        return NULL;
    }
    return &self->opened.target.tensors[index];
}

/* ---- opening ---- */

/* Copies what the checkpoint keeps of the arguments. @return false with an exception set. */
static bool keep_arguments(native_open_request *r, fc_arena *arena, PyObject *include, PyObject *exclude,
                           PyObject *rename, PyObject *delta, PyObject *rows) {
    const char *prefix = r->selection.strip_prefix;
    if (prefix) {
        r->selection.strip_prefix = fc_arena_strndup(arena, prefix, strlen(prefix));
    }
    if (prefix && !r->selection.strip_prefix) {
        PyErr_NoMemory();
        return false;
    }
    return native_strings(include, arena, &r->selection.include) &&
           native_strings(exclude, arena, &r->selection.exclude) &&
           native_strings(rename, arena, &r->selection.rename) && native_strings(delta, arena, &r->delta) &&
           (rows == Py_None ||
            (native_rows(rows, arena, &r->rows, &r->nrows) && native_rows_have_data(r->rows, r->nrows)));
}

/* Runs without the interpreter lock. */
static fc_code open_values(const native_open_request *r, checkpoint_object *self, fc_error *err) {
    const fc_code rc = native_open(r, &self->opened, err);
    self->lists = rc == FC_OK ? fc_chunk_lists_new(self->opened.checkpoint) : NULL;
    return rc != FC_OK || self->lists ? rc : fc_no_memory(err, r->path);
}

/* What opens a checkpoint, or reads from one. */
typedef struct reading {
    checkpoint_object *self;
    const native_open_request *open; /* NULL: it is open */
    const fc_box_request *box;
} reading;

static fc_code read_work(void *context, fc_progress *progress, fc_error *err) {
    const reading *r = context;
    (void)progress;
    return r->open ? open_values(r->open, r->self, err)
                   : fc_read_box_listed(r->self->opened.checkpoint, r->self->lists, r->box, err);
}

/* Servers may be silent for minutes, so this thread answers Ctrl-C meanwhile. @return false with an exception set. */
static bool run_reading(reading *r) {
    if (r->self->remote) {
        return native_run(read_work, r, Py_None);
    }
    fc_error err = {.code = FC_OK};
    fc_code rc;
    Py_BEGIN_ALLOW_THREADS rc = read_work(r, NULL, &err);
    Py_END_ALLOW_THREADS return rc == FC_OK || native_raise(&err);
}

static int checkpoint_init(PyObject *object, PyObject *args, PyObject *keywords) {
    static char *names[] = {"path",       "headers_only", "follow_external", "schema", "tp_plan", "include",
                            "exclude",    "strip_prefix", "rename",          "recipe", "reverse", "config",
                            "model_only", "delta",        "up_to",           "rows",   NULL};
    checkpoint_object *self = (checkpoint_object *)object;
    native_open_request r = {.path = NULL, .up_to = FC_DELTA_NO_NUMBER};
    PyObject *path = NULL, *schema = NULL, *recipe = NULL, *config = NULL;
    PyObject *include = Py_None, *exclude = Py_None, *rename = Py_None, *delta = Py_None, *rows = Py_None;
    if (self->opened.arena) {
        PyErr_SetString(PyExc_RuntimeError, "the checkpoint is already open");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&|$ppO&zOOzOO&pO&pOLO", names, PyUnicode_FSConverter, &path,
                                     &r.headers_only, &r.follow_external, native_optional_path, &schema, &r.tp_plan,
                                     &include, &exclude, &r.selection.strip_prefix, &rename, native_optional_path,
                                     &recipe, &r.reverse, native_optional_path, &config, &r.model_only, &delta,
                                     &r.up_to, &rows)) {
        return -1;
    }
    r.path = PyBytes_AsString(path);
    r.schema = schema ? PyBytes_AsString(schema) : NULL;
    r.recipe = recipe ? PyBytes_AsString(recipe) : NULL;
    r.config = config ? PyBytes_AsString(config) : NULL;
    self->opened.arena = fc_arena_new();
    bool ready = self->opened.arena || (PyErr_NoMemory(), false);
    ready = ready && r.path && keep_arguments(&r, self->opened.arena, include, exclude, rename, delta, rows);
    if (ready) {
        self->remote = native_open_is_remote(&r);
        ready = run_reading(&(reading){.self = self, .open = &r});
    }
    Py_XDECREF(config);
    Py_XDECREF(recipe);
    Py_XDECREF(schema);
    Py_DECREF(path);
    return ready ? 0 : -1;
}

static void checkpoint_dealloc(PyObject *object) {
    checkpoint_object *self = (checkpoint_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    self->closed = true;
    release(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *checkpoint_close(PyObject *object, PyObject *unused) {
    checkpoint_object *self = (checkpoint_object *)object;
    (void)unused;
    self->closed = true;
    release(self);
    Py_RETURN_NONE;
}

const native_opened *native_opened_of(PyObject *module, PyObject *object) {
    PyObject *type = PyObject_GetAttrString(module, "Checkpoint");
    const int is_one = type ? PyObject_IsInstance(object, type) : -1;
    Py_XDECREF(type);
    if (is_one != 1) {
        return is_one == 0 ? (PyErr_SetString(PyExc_TypeError, "not a Checkpoint"), NULL) : NULL;
    }
    const checkpoint_object *self = (const checkpoint_object *)object;
    return is_open(self) ? &self->opened : NULL;
}

/* ---- what the headers say ---- */

static PyObject *entry(const checkpoint_object *self, const void *unused, size_t index) {
    const fc_target_tensor *value = &self->opened.target.tensors[index];
    const fc_tensor *t = value->source;
    (void)unused;
    /* A key of a state dict may be any Python string, with lone surrogates, too. */
    PyObject *name = PyUnicode_DecodeUTF8(value->name, (Py_ssize_t)strlen(value->name), "surrogatepass");
    return Py_BuildValue("(NzNn)", name, t->object ? NULL : fc_dtype_get(t->dtype)->torch_name,
                         native_tuple(t->ndim, t->shape), (Py_ssize_t)t->nchunks);
}

/* Makes item `index` of a list. */
typedef PyObject *make_item(const checkpoint_object *self, const void *context, size_t index);

/* Makes a list. Making objects may run Python code, which may close the checkpoint. */
static PyObject *list_of(checkpoint_object *self, size_t count, make_item *make, const void *context) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    self->users++;
    for (size_t i = 0; list && i < count; i++) {
        PyObject *made = make(self, context, i);
        if (!made || PyList_SetItem(list, (Py_ssize_t)i, made) != 0) {
            Py_DECREF(list);
            list = NULL;
        }
    }
    done_with(self);
    return list;
}

static PyObject *checkpoint_entries(PyObject *object, PyObject *unused) {
    checkpoint_object *self = (checkpoint_object *)object;
    (void)unused;
    return is_open(self) ? list_of(self, self->opened.target.ntensors, entry, NULL) : NULL;
}

static PyObject *checkpoint_about(PyObject *object, PyObject *unused) {
    const checkpoint_object *self = (const checkpoint_object *)object;
    (void)unused;
    if (!is_open(self)) {
        return NULL;
    }
    const fc_checkpoint *c = self->opened.checkpoint;
    return Py_BuildValue("(sNN)", c->format->name, native_text(c->producer), native_text(c->note));
}

/* What tells the files from others: see fc_checkpoint_identity. */
static PyObject *checkpoint_identity(PyObject *object, PyObject *unused) {
    const checkpoint_object *self = (const checkpoint_object *)object;
    PyObject *list = is_open(self) ? PyList_New(0) : NULL;
    fc_file_identity file;
    (void)unused;
    for (size_t i = 0; list && fc_checkpoint_identity(self->opened.checkpoint, i, &file); i++) {
        PyObject *row = Py_BuildValue("(NKKKLL)", native_text(file.path), (unsigned long long)file.device,
                                      (unsigned long long)file.inode, (unsigned long long)file.size,
                                      (long long)file.modified, (long long)file.changed);
        if (!row || PyList_Append(list, row) != 0) {
            Py_DECREF(list);
            list = NULL;
        }
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *chunk_tuple(const checkpoint_object *self, const void *context, size_t index) {
    const fc_tensor *tensor = context;
    const fc_chunk *chunk = &tensor->chunks[index];
    const fc_checkpoint *c = self->opened.checkpoint;
    fc_box box = fc_chunk_box(tensor, chunk);
    const fc_file *file = fc_chunk_file(c, chunk);
    PyObject *rank = chunk->rank == FC_NO_RANK ? Py_NewRef(Py_None) : PyLong_FromUnsignedLong(chunk->rank);
    return Py_BuildValue("(NNNNK)", native_tuple(box.ndim, box.offsets), native_tuple(box.ndim, box.sizes),
                         native_text(file ? file->name : NULL), rank, (unsigned long long)chunk->place.length);
}

static PyObject *checkpoint_chunks(PyObject *object, PyObject *args) {
    checkpoint_object *self = (checkpoint_object *)object;
    Py_ssize_t index;
    const fc_target_tensor *value = PyArg_ParseTuple(args, "n", &index) ? value_at(self, index) : NULL;
    return value ? list_of(self, value->source->nchunks, chunk_tuple, value->source) : NULL;
}

/* ---- how it is sharded ---- */

static fc_code find_layout(checkpoint_object *self, fc_mesh *mesh, fc_placement **placements, fc_error *err) {
    size_t count = self->opened.target.ntensors;
    const fc_tensor **tensors = fc_arena_calloc(self->opened.arena, count + 1, sizeof *tensors);
    if (!tensors) {
        return fc_no_memory(err, self->opened.checkpoint->path);
    }
    for (size_t i = 0; i < count; i++) {
        tensors[i] = self->opened.target.tensors[i].source;
    }
    return fc_recognise_layout(self->opened.checkpoint, count, tensors, self->opened.arena, mesh, placements, err);
}

typedef struct layout {
    fc_mesh mesh;
    fc_placement *placements; /* mesh.ndim for each value; NULL for a full checkpoint */
} layout;

static PyObject *placements_of(const checkpoint_object *self, const void *context, size_t index) {
    const layout *l = context;
    (void)self;
    return l->placements ? native_placements(l->mesh.ndim, l->placements + index * (size_t)l->mesh.ndim)
                         : PyTuple_New(0);
}

static PyObject *checkpoint_layout(PyObject *object, PyObject *unused) {
    checkpoint_object *self = (checkpoint_object *)object;
    layout l = {.placements = NULL};
    fc_error err = {.code = FC_OK};
    (void)unused;
    if (!is_open(self)) {
        return NULL;
    }
    fc_code rc = self->opened.target.ntensors > 0 ? find_layout(self, &l.mesh, &l.placements, &err) : FC_OK;
    if (rc != FC_OK) {
        return native_raise(&err);
    }
    PyObject *list = list_of(self, self->opened.target.ntensors, placements_of, &l);
    return list ? Py_BuildValue("(NN)", native_mesh_pairs(&l.mesh), list) : NULL;
}

/* ---- reading ---- */

/* Fills `out` with a box of value `index` and the memory that receives it. `dims` has room for 2 × FC_MAX_DIMS numbers.
   The caller says how much memory there is: that is compared with the box, because the address tells nothing.
   @return false with an exception set. */
static bool read_request(const checkpoint_object *self, PyObject *tuple, int64_t *dims, fc_box_request *out) {
    Py_ssize_t index;
    PyObject *offsets, *sizes;
    unsigned long long address, bytes;
    if (!PyTuple_Check(tuple) || !PyArg_ParseTuple(tuple, "nOOKK", &index, &offsets, &sizes, &address, &bytes)) {
        return PyErr_Occurred() ? false : (PyErr_SetString(PyExc_TypeError, "a request is a tuple of five"), false);
    }
    const int ndim = native_integers(offsets, FC_MAX_DIMS, dims);
    if (ndim < 0 || native_integers(sizes, FC_MAX_DIMS, dims + FC_MAX_DIMS) != ndim) {
        return PyErr_Occurred() ? false : (PyErr_SetString(PyExc_ValueError, "offsets and sizes differ"), false);
    }
    const fc_target_tensor *value = value_at(self, index);
    if (!value) {
        return false;
    }
    *out = (fc_box_request){value->source, {ndim, dims, dims + FC_MAX_DIMS}, (void *)(uintptr_t)address};
    if (ndim != value->source->ndim || !fc_box_within(&out->box, value->source->shape)) {
        PyErr_SetString(PyExc_IndexError, "the box is outside of the tensor");
        return false;
    }
    unsigned long long needed;
    if (__builtin_mul_overflow((uint64_t)fc_box_volume(&out->box), fc_dtype_size(value->source->dtype), &needed) ||
        bytes != needed || (needed > 0 && !address)) {
        PyErr_SetString(PyExc_ValueError, "the memory for the box has another size");
        return false;
    }
    return true;
}

static PyObject *checkpoint_read(PyObject *object, PyObject *args) {
    checkpoint_object *self = (checkpoint_object *)object;
    int64_t dims[2 * FC_MAX_DIMS];
    fc_box_request r;
    if (!read_request(self, args, dims, &r)) {
        return NULL;
    }
    self->users++;
    const bool done = run_reading(&(reading){.self = self, .box = &r});
    done_with(self);
    return done ? Py_NewRef(Py_None) : NULL;
}

/* The boxes that read_many reads. */
typedef struct many {
    checkpoint_object *checkpoint;
    fc_box_request *requests;
    size_t count;
    fc_work_options how;
} many;

static bool read_requests(many *m, fc_arena *arena, PyObject *list) {
    Py_ssize_t count = PySequence_Size(list);
    m->requests = count < 0 ? NULL : fc_arena_calloc(arena, (size_t)count, sizeof *m->requests);
    m->count = (size_t)count;
    if (!m->requests) {
        return count < 0 ? false : (PyErr_NoMemory(), false);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        int64_t *dims = fc_arena_calloc(arena, (size_t)2 * FC_MAX_DIMS, sizeof *dims);
        bool read = item && dims && read_request(m->checkpoint, item, dims, &m->requests[i]);
        Py_XDECREF(item);
        if (!read) {
            return PyErr_Occurred() ? false : (PyErr_NoMemory(), false);
        }
    }
    return true;
}

static fc_code read_many_work(void *context, fc_progress *progress, fc_error *err) {
    many *m = context;
    m->how.progress = progress;
    return fc_read_boxes(m->checkpoint->opened.checkpoint, m->checkpoint->lists, m->requests, m->count, &m->how, err);
}

static PyObject *checkpoint_read_many(PyObject *object, PyObject *args) {
    checkpoint_object *self = (checkpoint_object *)object;
    many m = {.checkpoint = self};
    PyObject *list;
    int cached;
    if (!PyArg_ParseTuple(args, "Oiip", &list, &m.how.threads, &m.how.processes, &cached) || !is_open(self)) {
        return NULL;
    }
    fc_arena *arena = fc_arena_new();
    if (!arena) {
        return PyErr_NoMemory();
    }
    self->users++, m.how.cached = cached != 0;
    bool done = read_requests(&m, arena, list) && (m.count == 0 || native_run(read_many_work, &m, Py_None));
    done_with(self);
    fc_arena_free(arena);
    return done ? Py_NewRef(Py_None) : NULL;
}

static PyObject *checkpoint_map(PyObject *object, PyObject *args) {
    checkpoint_object *self = (checkpoint_object *)object;
    Py_ssize_t index;
    const fc_target_tensor *value = PyArg_ParseTuple(args, "n", &index) ? value_at(self, index) : NULL;
    if (!value) {
        return NULL;
    }
    self->users++;
    PyObject *mapped = native_map(self->opened.checkpoint, value->source);
    done_with(self);
    return mapped;
}

static PyObject *path_of(const checkpoint_object *self, const void *unused, size_t index) {
    (void)unused;
    return native_path(&self->opened.target.tensors[index].path);
}

static PyObject *checkpoint_paths(PyObject *object, PyObject *unused) {
    checkpoint_object *self = (checkpoint_object *)object;
    (void)unused;
    return is_open(self) ? list_of(self, self->opened.target.ntensors, path_of, NULL) : NULL;
}

static PyObject *checkpoint_object_json(PyObject *object, PyObject *args) {
    checkpoint_object *self = (checkpoint_object *)object;
    Py_ssize_t index;
    const fc_target_tensor *value = PyArg_ParseTuple(args, "n", &index) ? value_at(self, index) : NULL;
    if (!value || !value->source->object) {
        return value ? (PyErr_SetString(PyExc_TypeError, "not an object"), NULL) : NULL;
    }
    fc_arena *arena = fc_arena_new();
    if (!arena) {
        return PyErr_NoMemory();
    }
    const char *json = NULL;
    fc_error err = {.code = FC_OK};
    fc_code rc;
    self->users++;
    Py_BEGIN_ALLOW_THREADS rc = fc_checkpoint_object_json(self->opened.checkpoint, value->source, arena, &json, &err);
    Py_END_ALLOW_THREADS done_with(self);
    PyObject *text = rc == FC_OK ? PyUnicode_FromString(json) : native_raise(&err);
    fc_arena_free(arena);
    return text;
}

static PyMethodDef methods[] = {
    {"close", checkpoint_close, METH_NOARGS, "Closes it; calls that are reading finish first."},
    {"about", checkpoint_about, METH_NOARGS, "(format, producer, note)"},
    {"entries", checkpoint_entries, METH_NOARGS, "[(name, dtype or None for an object, shape, number of chunks), ...]"},
    {"identity", checkpoint_identity, METH_NOARGS,
     "[(path or None, device, inode, size, modified, changed), ...] of the files when they were opened"},
    {"chunks", checkpoint_chunks, METH_VARARGS, "[(offsets, sizes, file, rank, bytes), ...] of value i"},
    {"layout", checkpoint_layout, METH_NOARGS, "(((name, size), ...), [((kind, dim, split_factor), ...), ...])"},
    {"read", checkpoint_read, METH_VARARGS,
     "Reads the box (offsets, sizes) of value i to an address with so many bytes."},
    {"read_many", checkpoint_read_many, METH_VARARGS,
     "Reads boxes, [(i, offsets, sizes, address, bytes), ...]: threads or 0, processes on the machine, whether "
     "cached."},
    {"map", checkpoint_map, METH_VARARGS,
     "Maps value i from its file. Returns (what keeps it, address, bytes, strides in elements); None if it is empty."},
    {"paths", checkpoint_paths, METH_NOARGS, "[[key or index, ...], ...] in the nested state dict"},
    {"object_json", checkpoint_object_json, METH_VARARGS, "Object i as JSON text."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "An open checkpoint."},
    {Py_tp_init, checkpoint_init},
    {Py_tp_dealloc, checkpoint_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "fsdpckpt._native.Checkpoint",
    .basicsize = sizeof(checkpoint_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

int native_add_checkpoint(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int rc = type ? PyModule_AddObjectRef(module, "Checkpoint", type) : -1;
    Py_XDECREF(type);
    return rc;
}
