/*
 * From the digests of a checkpoint to its seal, a line a file and a line a tensor. The form is in docs/SEAL_JSON.md.
 */
#include "seal_file.h"

#include "json_out.h"

#include "fsdpckpt/io.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void put_crc(json_out *j, uint64_t crc) {
    char digits[17];
    snprintf(digits, sizeof digits, "%016" PRIx64, crc);
    JSON_MEMBER(j, string, "crc64", digits);
}

static void put_files(json_out *j, const fc_seal *seal) {
    jw_key(j, "files");
    jw_open(j, '[');
    for (size_t i = 0; i < seal->nfiles; i++) {
        jw_open(j, '{');
        JSON_MEMBER(j, string, "name", seal->files[i].name);
        JSON_MEMBER(j, uint, "bytes", seal->files[i].bytes);
        put_crc(j, seal->files[i].crc64);
        jw_close(j, '}');
    }
    jw_close(j, ']');
}

static void put_tensors(json_out *j, const fc_checkpoint *checkpoint, const fc_seal *seal) {
    jw_key(j, "tensors");
    jw_open(j, '[');
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (!seal->has[i]) {
            continue;
        }
        jw_open(j, '{');
        JSON_MEMBER(j, string, "name", t->name);
        JSON_MEMBER(j, string, "dtype", fc_dtype_get(t->dtype)->torch_name);
        jw_key(j, "shape");
        jw_ints(j, t->ndim, t->shape);
        put_crc(j, seal->crc64[i]);
        jw_close(j, '}');
    }
    jw_close(j, ']');
}

static fc_code write_text(const char *path, const fc_checkpoint *checkpoint, const fc_seal *seal, fc_error *err) {
    text_out *out = malloc(sizeof *out);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (!out || fd < 0) {
        fc_code rc = out ? fc_fail_errno(err, errno, "%s", path) : fc_fail(err, FC_ENOMEM, "out of memory");
        if (fd >= 0) {
            close(fd);
        }
        free(out);
        return rc;
    }
    json_out j;
    text_out_init(out, fd);
    jw_begin(&j, out, 2);
    jw_open(&j, '{');
    JSON_MEMBER(&j, string, "fsdpckpt", "seal");
    JSON_MEMBER(&j, uint, "version", 1);
    put_files(&j, seal);
    put_tensors(&j, checkpoint, seal);
    jw_close(&j, '}');
    text_puts(out, "\n");
    int errnum = text_flush(out);
    free(out);
    if (close(fd) != 0 && errnum == 0) {
        errnum = errno;
    }
    return errnum == 0 ? FC_OK : fc_fail_errno(err, errnum, "%s: cannot be written", path);
}

fc_code seal_write(const fc_checkpoint *checkpoint, const fc_seal *seal, bool force, fc_error *err) {
    fc_commit *commit = NULL;
    fc_code rc = fc_commit_begin(seal->path, false, force, 0, &commit, err);
    if (rc != FC_OK) {
        return rc;
    }
    rc = write_text(fc_commit_path(commit), checkpoint, seal, err);
    if (rc != FC_OK) {
        fc_commit_abort(commit);
        return rc;
    }
    return fc_commit_finish(commit, err);
}
