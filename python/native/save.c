/*
 * fsdpckpt._native.save: writes arrays of the calling program as a checkpoint.
 */
#include "native.h"
#include "rows.h"
#include "work.h"

#include "fsdpckpt/memory.h"
#include "fsdpckpt/move.h"

typedef struct save_request {
    fc_arena *arena;
    fc_memory_tensor *tensors;
    size_t count;
    const char *path;
    fc_convert_options how;
    fc_convert_report report;
} save_request;

static fc_code save_work(void *context, fc_progress *progress, fc_error *err) {
    save_request *r = context;
    fc_checkpoint *source;
    r->how.work.progress = progress;
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
                                     &values, &force, &trust, &r.how.selection.compress, &r.how.work.threads,
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
        native_usage("no format is called '%s'", format);
    } else if (r.path && native_rows(values, r.arena, &r.tensors, &r.count) &&
               native_rows_have_data(r.tensors, r.count) && native_run(save_work, &r, update)) {
        saved = report_dict(&r);
    }
    fc_arena_free(r.arena);
    Py_DECREF(path);
    return saved;
}
