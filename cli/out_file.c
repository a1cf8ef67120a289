/*
 * Writes a file of a command: see out_file.h.
 */
#include "out_file.h"

#include "source.h"

#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static fc_code fill_file(const char *path, int fd, out_file_write *write_content, void *context, fc_error *err) {
    text_out *out = malloc(sizeof *out);
    FC_NEED(out, err, path);
    text_out_init(out, fd);
    fc_code rc = write_content(context, out, err);
    int errnum = text_flush(out);
    free(out);
    return rc == FC_OK && errnum != 0 ? fc_fail_errno(err, errnum, "%s: cannot be written", path) : rc;
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

static fc_code create_and_fill(const char *path, const char *staging, out_file_write *write_content, void *context,
                               fc_error *err) {
    int fd = fc_open(staging, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be created", path);
    }
    fc_code rc = fill_file(path, fd, write_content, context, err);
    return close(fd) != 0 && rc == FC_OK ? fc_fail_errno(err, errno, "%s: cannot be written", path) : rc;
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
    fc_code rc = create_and_fill(path, fc_commit_path(commit), write_content, context, err);
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
