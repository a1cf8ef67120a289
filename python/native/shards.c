/*
 * The functions of fsdpckpt._native with which the ranks of a training job write a sharded checkpoint: each its own
 * files, and one rank the index. fsdpckpt/_shards.py exchanges what they need to know of each other.
 */
#include "native.h"
#include "rows.h"
#include "work.h"

#include "fsdpckpt/delta.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/layout.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/replica_owner.h"
#include "fsdpckpt/seal.h"
#include "fsdpckpt/sharding.h"
#include "fsdpckpt/shards.h"

#include <stdlib.h>
#include <string.h>

/* ---- the layout ---- */

typedef struct layout_request {
    fc_arena *arena;
    const char *path;
    fc_memory_tensor *tensors;
    size_t count;
    long long ranks;
    fc_mesh mesh;
    fc_placement *placements;
    uint32_t *owners;
} layout_request;

static fc_code check_coverage(const fc_checkpoint *source, fc_error *err) {
    for (size_t i = 0; i < source->ntensors; i++) {
        fc_coverage *coverage = NULL;
        if (!source->tensors[i].object) {
            fc_code rc = fc_coverage_new(&source->tensors[i], &coverage, err);
            if (rc != FC_OK) {
                return fc_context(err, rc, "%s", source->path);
            }
            fc_coverage_free(coverage);
        }
    }
    return FC_OK;
}

static fc_code layout_work(void *context, fc_progress *progress, fc_error *err) {
    layout_request *r = context;
    fc_checkpoint *source = NULL;
    (void)progress;
    fc_code rc = fc_checkpoint_in_memory(r->path, r->tensors, r->count, &source, err);
    r->owners = fc_arena_calloc(r->arena, r->count + 1, sizeof *r->owners);
    rc = rc == FC_OK && !r->owners ? fc_no_memory(err, r->path) : rc;
    rc = rc == FC_OK ? check_coverage(source, err) : rc;
    rc = rc == FC_OK ? fc_recognise_layout_of(source, r->ranks, r->arena, &r->mesh, &r->placements, err) : rc;
    rc = rc == FC_OK ? fc_held_owners(source, &r->mesh, r->placements, r->owners, err) : rc;
    fc_checkpoint_close(source);
    return rc;
}

/* The indices of the chunks that the rank that holds them stores. Of replicas that is one. */
static PyObject *stored_chunks(const layout_request *r, size_t index) {
    const fc_memory_tensor *t = &r->tensors[index];
    const fc_placement *placements = r->placements + index * (size_t)r->mesh.ndim;
    int64_t coordinate[FC_MAX_MESH_DIMS];
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && !t->encoding && i < t->nchunks; i++) {
        fc_mesh_coordinate(&r->mesh, t->ranks[i], coordinate);
        if (fc_replica_owner(&r->mesh, placements, coordinate, r->owners[index]) == t->ranks[i]) {
            PyObject *number = PyLong_FromSize_t(i);
            if (!number || PyList_Append(list, number) != 0) {
                Py_DECREF(list);
                list = NULL;
            }
            Py_XDECREF(number);
        }
    }
    return list;
}

static PyObject *layout_result(const layout_request *r) {
    PyObject *list = PyList_New((Py_ssize_t)r->count);
    for (size_t i = 0; list && i < r->count; i++) {
        PyObject *item =
            Py_BuildValue("((Nk)N)", native_placements(r->mesh.ndim, r->placements + i * (size_t)r->mesh.ndim),
                          (unsigned long)r->owners[i], stored_chunks(r, i));
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) != 0) {
            Py_DECREF(list);
            list = NULL;
        }
    }
    return list ? Py_BuildValue("(NN)", native_mesh_pairs(&r->mesh), list) : NULL;
}

PyObject *native_layout(PyObject *module, PyObject *args) {
    layout_request r = {.arena = fc_arena_new()};
    PyObject *path = NULL, *rows, *result = NULL;
    (void)module;
    if (!r.arena) {
        return PyErr_NoMemory();
    }
    if (PyArg_ParseTuple(args, "O&OL", PyUnicode_FSConverter, &path, &rows, &r.ranks)) {
        r.path = PyBytes_AsString(path);
        if (r.ranks < 1 || r.ranks > (1 << 20)) {
            native_usage("there are from 1 to 1,048,576 ranks");
        } else if (r.path && native_rows(rows, r.arena, &r.tensors, &r.count) && native_run(layout_work, &r, Py_None)) {
            result = layout_result(&r);
        }
    }
    Py_XDECREF(path);
    fc_arena_free(r.arena);
    return result;
}

/* ---- writing ---- */

typedef struct shards_request {
    fc_arena *arena;
    PyObject *path, *staging;
    const char *label;
    fc_memory_tensor *tensors;
    size_t count;
    fc_mesh mesh;
    fc_placement *placements;
    uint32_t *owners;
    fc_shards shards;
    fc_work_options work;
    unsigned long rank;
    void *notes; /* out, of the rank */
    size_t size;
    const void **all; /* in, of all ranks */
    size_t *sizes;
    size_t ranks;
    PyObject *fetch;
    PyObject *raised[3]; /* by fetch */
} shards_request;

/* Converts the list that native_layout makes. */
static bool read_layout(shards_request *r, PyObject *list) {
    const size_t width = (size_t)r->mesh.ndim;
    r->placements = fc_arena_calloc(r->arena, r->count * width + 1, sizeof *r->placements);
    r->owners = fc_arena_calloc(r->arena, r->count + 1, sizeof *r->owners);
    if (!r->placements || !r->owners) {
        PyErr_NoMemory();
        return false;
    }
    if (PySequence_Size(list) != (Py_ssize_t)r->count) {
        PyErr_SetString(PyExc_ValueError, "the layout is that of other values");
        return false;
    }
    bool good = true;
    for (size_t i = 0; good && i < r->count; i++) {
        PyObject *item = PySequence_GetItem(list, (Py_ssize_t)i), *placements;
        unsigned long owner;
        good = item && PyArg_ParseTuple(item, "Ok", &placements, &owner) &&
               native_read_placements(placements, r->mesh.ndim, r->placements + i * width);
        r->owners[i] = good ? (uint32_t)owner : 0;
        Py_XDECREF(item);
    }
    return good;
}

/* Fills what both functions need. @return false with an exception set. */
static bool read_common(shards_request *r, const char *format, PyObject *rows, PyObject *pairs, PyObject *layout) {
    r->label = PyBytes_AsString(r->path);
    r->shards.staging = PyBytes_AsString(r->staging);
    r->shards.format = fc_format_find(format);
    r->arena = fc_arena_new();
    if (!r->shards.format || !r->arena) {
        return r->arena ? (native_usage("no format is called '%s'", format), false) : (PyErr_NoMemory(), false);
    }
    bool good = r->label && r->shards.staging && native_mesh(pairs, &r->mesh) &&
                native_rows(rows, r->arena, &r->tensors, &r->count) && read_layout(r, layout);
    r->shards.owner_offsets = r->owners;
    return good;
}

static void release(shards_request *r) {
    Py_XDECREF(r->path);
    Py_XDECREF(r->staging);
    fc_arena_free(r->arena);
    free(r->notes);
}

/* Makes the source of the request. */
static fc_code make_source(const shards_request *r, fc_checkpoint **out, fc_error *err) {
    fc_code rc = fc_checkpoint_in_memory(r->label, r->tensors, r->count, out, err);
    return rc == FC_OK ? fc_memory_set_layout(*out, &r->mesh, r->placements, err) : rc;
}

/* Asks Python for the data of values: a list of addresses. */
static bool fetch_addresses(const shards_request *r, const size_t *indices, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    bool good = list != NULL;
    for (size_t i = 0; good && i < count; i++) {
        PyObject *number = PyLong_FromSize_t(indices[i]);
        good = number && PyList_SetItem(list, (Py_ssize_t)i, number) == 0;
    }
    PyObject *addresses = good ? PyObject_CallFunctionObjArgs(r->fetch, list, NULL) : NULL;
    for (size_t i = 0; addresses && i < count; i++) {
        PyObject *item = PySequence_GetItem(addresses, (Py_ssize_t)i);
        const unsigned long long address = item ? PyLong_AsUnsignedLongLong(item) : 0;
        Py_XDECREF(item);
        if (!address) {
            if (!PyErr_Occurred()) {
                native_usage("%s: there is no memory with its elements", r->tensors[indices[i]].name);
            }
            break;
        }
        fc_memory_set_data(r->shards.source, indices[i], 0, (const void *)(uintptr_t)address);
    }
    Py_XDECREF(list);
    Py_XDECREF(addresses);
    return addresses && !PyErr_Occurred();
}

/* For fc_shards.fetch. An exception is kept for the thread that waits for the job. */
static fc_code fetch(void *context, const size_t *indices, size_t count, fc_error *err) {
    shards_request *r = context;
    PyGILState_STATE state = PyGILState_Ensure();
    bool good = fetch_addresses(r, indices, count);
    if (!good) {
        PyErr_Fetch(&r->raised[0], &r->raised[1], &r->raised[2]);
    }
    PyGILState_Release(state);
    return good ? FC_OK : fc_fail(err, FC_EIO, "the data could not be fetched");
}

static fc_code write_work(void *context, fc_progress *progress, fc_error *err) {
    shards_request *r = context;
    fc_checkpoint *source = NULL;
    r->work.progress = progress;
    fc_code rc = make_source(r, &source, err);
    r->shards.source = source;
    rc = rc == FC_OK ? fc_shards_write(&r->shards, (uint32_t)r->rank, &r->work, &r->notes, &r->size, err) : rc;
    fc_checkpoint_close(source);
    return rc;
}

PyObject *native_write_shard(PyObject *module, PyObject *args, PyObject *keywords) {
    static char *names[] = {"path",  "staging",     "format",        "values", "mesh",   "layout", "rank",
                            "fetch", "batch_bytes", "trust_objects", "jobs",   "cached", "update", NULL};
    shards_request r = {.arena = NULL};
    PyObject *rows, *pairs, *layout, *update = Py_None, *notes = NULL;
    const char *format;
    unsigned long long batch = 0;
    int trust = 0, cached = 0;
    (void)module;
    if (PyArg_ParseTupleAndKeywords(args, keywords, "O&O&sOOOkOK|$pipO", names, PyUnicode_FSConverter, &r.path,
                                    PyUnicode_FSConverter, &r.staging, &format, &rows, &pairs, &layout, &r.rank,
                                    &r.fetch, &batch, &trust, &r.work.threads, &cached, &update) &&
        read_common(&r, format, rows, pairs, layout)) {
        r.shards.trust_objects = trust != 0;
        r.work.cached = cached != 0;
        r.shards.fetch = fetch;
        r.shards.context = &r;
        r.shards.batch_bytes = batch;
        if ((int64_t)r.rank >= fc_mesh_ranks(&r.mesh)) {
            native_usage("rank %lu: the mesh has %lld ranks", r.rank, (long long)fc_mesh_ranks(&r.mesh));
        } else if (native_run(write_work, &r, update)) {
            notes = PyBytes_FromStringAndSize(r.notes, (Py_ssize_t)r.size);
        } else if (r.raised[0]) {
            PyErr_Clear();
            PyErr_Restore(r.raised[0], r.raised[1], r.raised[2]);
        }
    }
    release(&r);
    return notes;
}

static fc_code finish_work(void *context, fc_progress *progress, fc_error *err) {
    shards_request *r = context;
    fc_checkpoint *source = NULL;
    (void)progress;
    fc_code rc = make_source(r, &source, err);
    r->shards.source = source;
    rc = rc == FC_OK ? fc_shards_finish(&r->shards, r->all, r->sizes, r->ranks, err) : rc;
    fc_checkpoint_close(source);
    return rc;
}

/* Borrows the bytes of each rank from the tuple `notes`. */
static bool read_notes(shards_request *r, PyObject *notes) {
    r->ranks = (size_t)PyTuple_Size(notes);
    r->all = fc_arena_calloc(r->arena, r->ranks, sizeof *r->all);
    r->sizes = fc_arena_calloc(r->arena, r->ranks, sizeof *r->sizes);
    if (!r->all || !r->sizes) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < r->ranks; i++) {
        char *bytes;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(notes, (Py_ssize_t)i), &bytes, &size) != 0) {
            return false;
        }
        r->all[i] = bytes;
        r->sizes[i] = (size_t)size;
    }
    return true;
}

PyObject *native_write_index(PyObject *module, PyObject *args) {
    shards_request r = {.arena = NULL};
    PyObject *rows, *pairs, *layout, *notes, *done = NULL;
    const char *format;
    int trust;
    (void)module;
    if (PyArg_ParseTuple(args, "O&O&sOOOO!p", PyUnicode_FSConverter, &r.path, PyUnicode_FSConverter, &r.staging,
                         &format, &rows, &pairs, &layout, &PyTuple_Type, &notes, &trust) &&
        read_common(&r, format, rows, pairs, layout) && read_notes(&r, notes)) {
        r.shards.trust_objects = trust != 0;
        if (native_run(finish_work, &r, Py_None)) {
            done = Py_NewRef(Py_None);
        }
    }
    release(&r);
    return done;
}

/* ---- the staging directory ---- */

typedef struct staging_object {
    PyObject_HEAD fc_commit *commit; /* NULL: ended */
    PyObject *target;                /* the path as bytes */
} staging_object;

static int staging_init(PyObject *object, PyObject *args, PyObject *keywords) {
    static char *names[] = {"path", "format", "force", "bytes", "joined", NULL};
    staging_object *self = (staging_object *)object;
    fc_commit_options how = {
        .is_directory = true, .keep_others = true, .is_own_file = fc_is_own_file, .reporter = native_reporter()};
    PyObject *path = NULL;
    const char *name, *joined = NULL;
    unsigned long long bytes = 0;
    int force = 0;
    fc_error err = {.code = FC_OK};
    if (self->commit) {
        PyErr_SetString(PyExc_RuntimeError, "the staging directory exists already");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&s|$pKz", names, PyUnicode_FSConverter, &path, &name, &force,
                                     &bytes, &joined)) {
        return -1;
    }
    const fc_format *format = fc_format_find(name);
    if (strcmp(name, "delta") == 0) {
        how.keep_others = false;
        how.is_own_file = fc_delta_is_own_file;
    }
    self->target = path;
    how.path = PyBytes_AsString(path);
    how.names = format ? format->target.own_files : NULL; /* another function refuses an unknown format */
    how.force = force != 0;
    how.bytes = bytes;
    fc_code rc;
    Py_BEGIN_ALLOW_THREADS rc =
        joined ? fc_commit_join(joined, &self->commit, &err) : fc_commit_begin(&how, &self->commit, &err);
    Py_END_ALLOW_THREADS return rc == FC_OK ? 0 : (native_raise(&err), -1);
}

static PyObject *staging_path(PyObject *object, PyObject *unused) {
    const staging_object *self = (const staging_object *)object;
    (void)unused;
    return native_text(self->commit ? fc_commit_path(self->commit) : NULL);
}

static PyObject *staging_finish(PyObject *object, PyObject *unused) {
    staging_object *self = (staging_object *)object;
    fc_commit *commit = self->commit;
    fc_error err = {.code = FC_OK};
    fc_code rc = FC_OK;
    (void)unused;
    self->commit = NULL;
    if (commit) {
        Py_BEGIN_ALLOW_THREADS rc = fc_commit_finish(commit, &err);
        Py_END_ALLOW_THREADS
    }
    if (commit && rc == FC_OK) {
        fc_seal_forget(PyBytes_AsString(self->target));
    }
    return rc == FC_OK ? Py_NewRef(Py_None) : native_raise(&err);
}

static PyObject *staging_abort(PyObject *object, PyObject *unused) {
    staging_object *self = (staging_object *)object;
    (void)unused;
    fc_commit_abort(self->commit);
    self->commit = NULL;
    Py_RETURN_NONE;
}

static void staging_dealloc(PyObject *object) {
    staging_object *self = (staging_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    fc_commit_abort(self->commit);
    Py_XDECREF(self->target);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"path", staging_path, METH_NOARGS, "The directory to write to; None after the end."},
    {"finish", staging_finish, METH_NOARGS, "Syncs everything and renames it to the target."},
    {"abort", staging_abort, METH_NOARGS, "Removes it, or ends what `joined` has begun."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "The directory in which a sharded checkpoint is made. It is removed unless it is finished. `joined` is the "
     "path() of another process, if that one has begun it."},
    {Py_tp_init, staging_init},
    {Py_tp_dealloc, staging_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "fsdpckpt._native.Staging",
    .basicsize = sizeof(staging_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

int native_add_staging(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int rc = type ? PyModule_AddObjectRef(module, "Staging", type) : -1;
    Py_XDECREF(type);
    return rc;
}
