/*
 * Writes a file of a command: see out_file.h.
 */
#include "out_file.h"

#include "source.h"

#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

/* A file that is being written, and its first error. */
typedef struct filling {
    fc_appender *file;
    fc_code code;
    fc_error error;
} filling;

static bool put_bytes(void *context, const void *bytes, size_t size) {
    filling *f = context;
    f->code = fc_appender_add(f->file, bytes, size, &f->error);
    return f->code == FC_OK;
}

static fc_code fill_file(fc_appender *file, out_file_write *write_content, void *context, fc_error *err) {
    text_out *out = malloc(sizeof *out);
    filling f = {.file = file};
    FC_NEED(out, err, NULL);
    text_out_init(out, -1);
    out->put = put_bytes;
    out->context = &f;
    fc_code rc = write_content(context, out, err);
    text_flush(out);
    free(out);
    if (rc == FC_OK && f.code != FC_OK) {
        *err = f.error;
        rc = f.code;
    }
    return rc == FC_OK ? fc_appender_finish(file, err) : rc;
}

/* Nothing that is read may be overwritten. */
static fc_code check_target(const options *o, const fc_checkpoint *source, const char *path, fc_error *err) {
    if (strcmp(path, "-") == 0) {
        return fc_fail(err, FC_EUSAGE,
                       "-: this file cannot be written to standard output; give a file name (./- for a file called -)");
    }
    if (source) {
        FC_TRY(fc_checkpoint_spare(source, path, false, err));
    }
    return source_spare(o, path, err);
}

static fc_code create_and_fill(const char *staging, out_file_write *write_content, void *context, fc_error *err) {
    fc_appender *file = NULL;
    fc_code rc = fc_appender_new(staging, &file, err);
    rc = rc == FC_OK ? fill_file(file, write_content, context, err) : rc;
    fc_appender_free(file);
    return rc;
}

fc_code out_file(const options *o, const fc_checkpoint *source, const char *path, bool force, uint64_t bytes,
                 out_file_write *write_content, void *context, fc_error *err) {
    fc_commit *commit = NULL;
    const fc_commit_options how = {.path = path,
                                   .force = force,
                                   .any_content = true,
                                   .bytes = bytes,
                                   .forbidden = source ? fc_checkpoint_forbidden(source) : 0,
                                   .reporter = {source_note}};
    FC_TRY(check_target(o, source, path, err));
    FC_TRY(fc_commit_begin(&how, &commit, err));
    fc_code rc = create_and_fill(fc_commit_path(commit), write_content, context, err);
    if (rc != FC_OK) {
        fc_commit_abort(commit);
        return rc;
    }
    return fc_commit_finish(commit, err);
}

fc_code out_result(const cli_call *call, const fc_checkpoint *source, uint64_t bytes, out_file_write *write_content,
                   void *context, fc_error *err) {
    const options *o = call->options;
    if (!o->output || strcmp(o->output, "-") == 0) {
        return write_content(context, call->out, err);
    }
    return out_file(o, source, o->output, o->force, bytes, write_content, context, err);
}
