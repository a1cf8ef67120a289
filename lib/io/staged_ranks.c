/*
 * A target in a bucket that several processes make. Each sends the files that it writes, and tells the process that has
 * begun the target of them. That one then has all uploads, and makes them visible or aborts them as if they were its
 * own (staged_publish.c). See staged_objects.h.
 */
#include "base/checked.h"
#include "base/grow.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/staged_private.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What one process tells another of a file. Its name, its ticket and its bytes follow. A fc_staged_data is before each
   run of bytes. */
typedef struct told_file {
    uint64_t name, size, part, nparts, engine, run_number;
    uint64_t ticket; /* 0: it is sent as a whole */
    uint64_t runs;
} told_file;

fc_code fc_staged_join(const char *path, fc_staged_target **out, fc_error *err) {
    fc_staged_target *target;
    (void)fc_staged_find_file(path, &target);
    *out = NULL;
    if (target && !target->joined && strcmp(target->path, path) == 0) {
        return FC_OK; /* the ranks are threads */
    }
    FC_TRY(fc_staged_begin(path + strlen(FC_STAGED), true, out, err));
    (*out)->joined = true;
    return FC_OK;
}

/* ---- telling ---- */

static fc_code add(fc_notes *out, const void *bytes, size_t size, fc_error *err) {
    return fc_notes_add(out, bytes, size) ? FC_OK : fc_no_memory(err, NULL);
}

static fc_code add_run(const fc_staged_file *file, uint64_t offset, uint64_t size, fc_notes *out, fc_error *err) {
    const fc_staged_data run = {offset, size};
    unsigned char *bytes = malloc((size_t)size + 1);
    FC_NEED(bytes, err, fc_staged_final_name(file->path));
    fc_code rc = fc_pread_full(file->fd, bytes, (size_t)size, offset, fc_staged_final_name(file->path), err);
    rc = rc == FC_OK ? add(out, &run, sizeof run, err) : rc;
    rc = rc == FC_OK ? add(out, bytes, (size_t)size, err) : rc;
    free(bytes);
    return rc;
}

/* Adds what is not data of the engine. @param out NULL: only counts the runs */
static fc_code add_headers(const fc_staged_file *file, fc_notes *out, uint64_t *runs, fc_error *err) {
    uint64_t at = 0;
    *runs = 0;
    for (size_t i = 0; i <= file->count; i++) {
        const uint64_t next = i < file->count ? file->data[i].offset : file->size;
        if (next > at) {
            ++*runs;
            FC_TRY(out ? add_run(file, at, next - at, out, err) : FC_OK);
        }
        at = i < file->count ? next + file->data[i].size : next;
    }
    return FC_OK;
}

static fc_code tell_file(fc_staged_file *file, bool headers, fc_notes *out, fc_error *err) {
    const char *name = file->path + strlen(file->target->path) + 1;
    told_file told = {.name = strlen(name), .engine = file->engine, .run_number = file->run};
    char *ticket = NULL;
    size_t ticket_size = 0;
    struct stat st;
    fc_code rc;
    if (fstat(file->fd, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", fc_staged_final_name(file->path));
    }
    told.size = (uint64_t)st.st_size;
    told.runs = told.size > 0;
    if (file->upload) {
        FC_TRY(fc_staged_end(file->path, err));
        told.part = file->part;
        told.nparts = file->nparts;
        FC_TRY(fc_upload_ticket(file->upload, file->nparts, &ticket, &ticket_size, err));
        told.ticket = ticket_size;
        told.runs = 0;
        FC_TRY_GOTO(headers ? add_headers(file, NULL, &told.runs, err) : FC_OK, rc, out);
    }
    FC_TRY_GOTO(add(out, &told, sizeof told, err), rc, out);
    FC_TRY_GOTO(add(out, name, strlen(name), err), rc, out);
    FC_TRY_GOTO(add(out, ticket, ticket_size, err), rc, out);
    if (file->upload) {
        rc = headers ? add_headers(file, out, &told.runs, err) : FC_OK;
    } else {
        rc = told.runs > 0 ? add_run(file, 0, told.size, out, err) : FC_OK;
    }
    file->told = rc == FC_OK;
out:
    free(ticket);
    return rc;
}

fc_code fc_staged_tell(const char *path, bool headers, struct fc_notes *out, fc_error *err) {
    fc_staged_target *target = NULL;
    if (fc_is_staged(path)) {
        (void)fc_staged_find_file(path, &target);
    }
    for (fc_staged_file *file = target && target->joined ? target->files : NULL; file; file = file->next) {
        FC_TRY(file->told ? FC_OK : tell_file(file, headers, out, err));
    }
    return FC_OK;
}

/* ---- being told ---- */

typedef struct reader {
    const char *path; /* of the target */
    const unsigned char *at;
    size_t left;
} reader;

static fc_code fail_to_understand(const reader *r, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: what another process says of its files cannot be understood",
                   fc_staged_final_name(r->path));
}

static const void *take(reader *r, uint64_t size) {
    const unsigned char *at = r->at;
    if (size > r->left) {
        return NULL;
    }
    r->at += size;
    r->left -= (size_t)size;
    return at;
}

static bool fits(const told_file *told) {
    uint64_t most = 0;
    return told->size <= INT64_MAX &&
           (told->ticket > 0 ? told->nparts > 0 && told->nparts <= FC_STAGED_MOST_PARTS && told->part > 0 &&
                                   fc_mul_u64(told->nparts, told->part, &most) && most >= told->size &&
                                   most - told->part < told->size
                             : told->nparts == 0);
}

/* All parts were sent by the other process. */
static fc_code adopt_upload(fc_staged_file *file, const told_file *told, const char *ticket, fc_error *err) {
    file->parts = calloc((size_t)told->nparts, sizeof *file->parts);
    FC_NEED(file->parts, err, fc_staged_final_name(file->path));
    for (uint64_t i = 0; i < told->nparts; i++) {
        file->parts[i].sent = true;
    }
    file->part = told->part;
    file->nparts = (unsigned)told->nparts;
    return fc_upload_adopt(fc_staged_final_name(file->path), file->run, ticket, (size_t)told->ticket, file->nparts,
                           &file->upload, err);
}

static fc_code write_runs(reader *r, const fc_staged_file *file, uint64_t runs, fc_error *err) {
    for (uint64_t i = 0; i < runs; i++) {
        fc_staged_data run;
        const void *head = take(r, sizeof run);
        if (!head) {
            return fail_to_understand(r, err);
        }
        memcpy(&run, head, sizeof run);
        const void *bytes = take(r, run.size);
        if (!bytes || !fc_range_within(run.offset, run.size, file->size)) {
            return fail_to_understand(r, err);
        }
        FC_TRY(fc_pwrite_full(file->fd, bytes, (size_t)run.size, run.offset, fc_staged_final_name(file->path), err));
    }
    return FC_OK;
}

/* @return the new file in `file` */
static fc_code make_file(const reader *r, const char *name, size_t length, fc_staged_file **file, fc_error *err) {
    char path[PATH_MAX], own[PATH_MAX];
    fc_staged_target *target;
    if (length >= sizeof own || memchr(name, '\0', length)) {
        return fail_to_understand(r, err);
    }
    memcpy(own, name, length);
    own[length] = '\0';
    if (!fc_path_is_safe(own) || snprintf(path, sizeof path, "%s/%s", r->path, own) >= (int)sizeof path) {
        return fail_to_understand(r, err);
    }
    const int fd = fc_staged_open(path, O_RDWR | O_CREAT | O_EXCL);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be created", path);
    }
    close(fd);
    *file = fc_staged_find_file(path, &target);
    return FC_OK;
}

static fc_code adopt_file(reader *r, fc_error *err) {
    told_file told;
    fc_staged_file *file = NULL;
    const void *head = take(r, sizeof told);
    if (!head) {
        return fail_to_understand(r, err);
    }
    memcpy(&told, head, sizeof told);
    const char *name = take(r, told.name), *ticket = name ? take(r, told.ticket) : NULL;
    if (!ticket || !fits(&told)) {
        return fail_to_understand(r, err);
    }
    FC_TRY(make_file(r, name, (size_t)told.name, &file, err));
    file->engine = told.engine != 0;
    file->run = told.run_number;
    file->size = told.size;
    if (ftruncate(file->fd, (off_t)told.size) != 0) {
        return fc_fail_errno(err, errno, "%s: no memory", fc_staged_final_name(file->path));
    }
    FC_TRY(told.ticket > 0 ? adopt_upload(file, &told, ticket, err) : FC_OK);
    return write_runs(r, file, told.runs, err);
}

fc_code fc_staged_adopt(const char *path, const void *bytes, size_t size, fc_error *err) {
    reader r = {path, bytes, size};
    while (r.left > 0) {
        FC_TRY(adopt_file(&r, err));
    }
    return FC_OK;
}
