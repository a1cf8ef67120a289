/*
 * The files of a delta: one safetensors file in which each tensor is a frame, and the index. See write.h.
 */
#include "delta/write.h"

#include "base/checked.h"
#include "base/little.h"
#include "delta/version.h"
#include "fsdpckpt/try.h"
#include "io/commit.h"
#include "io/file.h"
#include "net/remote.h"
#include "read/tuning.h"
#include "safetensors/files.h"
#include "safetensors/header.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ALIGNMENT = 8, BLOCK = 256 << 10 };

/* The name of file `file` of `files`, counted from 1. */
#define DATA_NAME "model-%05u-of-%05u" ST_EXTENSION

static uint64_t frame_size(const fc_delta_content *c, size_t i) {
    return c->members[i].found->frames[c->encoding].size;
}

/* ---- JSON ---- */

/* Writes a text as a JSON string. */
static bool put_text(FILE *out, const char *text) {
    json_t *value = json_string(text);
    const bool good = value && json_dumpf(value, out, JSON_ENCODE_ANY) == 0;
    json_decref(value);
    return good;
}

static bool put_checksums(FILE *out, const fc_delta_content *c) {
    bool good = fputs("{\"__metadata__\":{", out) >= 0;
    for (size_t i = 0; good && i < c->count; i++) {
        good = (i == 0 || fputc(',', out) != EOF) && put_text(out, c->members[i].name) &&
               fprintf(out, ":\"%s\"", c->members[i].found->checksum) > 0;
    }
    return good && fputc('}', out) != EOF;
}

static bool put_entries(FILE *out, const fc_delta_content *c, uint64_t *data) {
    bool good = true;
    *data = 0;
    for (size_t i = 0; good && i < c->count; i++) {
        const uint64_t size = frame_size(c, i), begin = *data;
        good = fc_add_u64(begin, size, data) && fputc(',', out) != EOF && put_text(out, c->members[i].name) &&
               fprintf(out, ":{\"dtype\":\"U8\",\"shape\":[%" PRIu64 "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                       size, begin, *data) > 0;
    }
    return good && fputc('}', out) != EOF;
}

/* Builds the header of the data file, with its length in front. @param text malloc'ed */
static fc_code make_header(const fc_delta_content *c, char **text, size_t *size, fc_error *err) {
    static const char no_length[ST_LENGTH_BYTES];
    uint64_t data;
    FILE *out = open_memstream(text, size);
    FC_NEED(out, err, NULL);
    bool good = fwrite(no_length, 1, sizeof no_length, out) == sizeof no_length && put_checksums(out, c) &&
                put_entries(out, c, &data);
    for (long end = ftell(out); good && end % ALIGNMENT != 0; end++) {
        good = fputc(' ', out) != EOF;
    }
    FC_NEED(fclose(out) == 0 && good, err, NULL);
    if (*size - ST_LENGTH_BYTES > ST_MAX_HEADER) {
        return fc_fail(err, FC_EUNSUPPORTED, "the header of the delta would have %zu bytes, but the format allows %d",
                       *size - ST_LENGTH_BYTES, ST_MAX_HEADER);
    }
    fc_store_little((unsigned char *)*text, *size - ST_LENGTH_BYTES, ST_LENGTH_BYTES);
    return FC_OK;
}

static bool put_index(FILE *out, const fc_delta_index *x) {
    bool good =
        fprintf(out,
                "{\n  \"metadata\": {\n    \"" DELTA_VERSION "\": \"%06" PRId64 "\",\n    \"" DELTA_BASE
                "\": \"%06" PRId64 "\",\n    \"" DELTA_ENCODING "\": \"%s\",\n    \"" DELTA_COMPRESSION
                "\": \"" DELTA_ZSTD "\",\n    \"" DELTA_CHECKSUM "\": \"%s\"\n  },\n  \"weight_map\": {",
                x->number, x->base, fc_delta_encoding_name(x->encoding), fc_delta_checksum_name(x->checksum)) > 0;
    for (size_t i = 0; good && i < x->count; i++) {
        good = fputs(i == 0 ? "\n    " : ",\n    ", out) >= 0 && put_text(out, x->entries[i].name) &&
               fprintf(out, ": \"" DATA_NAME "\"", x->entries[i].file, x->files) > 0;
    }
    return good && fputs(x->count > 0 ? "\n  }\n}\n" : "}\n}\n", out) >= 0;
}

/* ---- files ---- */

static fc_code create_file(const char *folder, const char *name, char **path, int *fd, fc_error *err) {
    if (asprintf(path, "%s/%s", folder, name) < 0) {
        *path = NULL;
        return fc_no_memory(err, folder);
    }
    *fd = fc_open(*path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    return *fd < 0 ? fc_fail_errno(err, errno, "%s: the file cannot be created", *path) : FC_OK;
}

static fc_code copy_frames(int fd, const char *path, uint64_t to, const fc_delta_content *c, fc_error *err) {
    unsigned char *buffer = malloc(BLOCK);
    fc_code rc;
    FC_NEED(buffer, err, path);
    for (size_t i = 0; i < c->count; i++) {
        const fc_delta_frame *frame = &c->members[i].found->frames[c->encoding];
        for (uint64_t at = 0; at < frame->size;) {
            const size_t some = frame->size - at < BLOCK ? (size_t)(frame->size - at) : BLOCK;
            FC_TRY_GOTO(fc_delta_frame_read(frame, c->encoding, at, buffer, some, err), rc, out);
            FC_TRY_GOTO(fc_pwrite_full(fd, buffer, some, to, path, err), rc, out);
            at += some;
            to += some;
        }
    }
    rc = FC_OK;
out:
    free(buffer);
    return rc;
}

/* Writes a file: its text, then frames. @param c NULL: no frames follow. @param sync whether it must be on the disk */
static fc_code write_file(const char *folder, const char *name, const char *text, size_t size,
                          const fc_delta_content *c, bool sync, fc_error *err) {
    char *path = NULL;
    int fd = -1;
    fc_code rc;
    FC_TRY_GOTO(create_file(folder, name, &path, &fd, err), rc, out);
    FC_TRY_GOTO(fc_pwrite_full(fd, text, size, 0, path, err), rc, out);
    FC_TRY_GOTO(c ? copy_frames(fd, path, size, c, err) : FC_OK, rc, out);
    rc = sync && fsync(fd) != 0 ? fc_fail_errno(err, errno, "%s: fsync", path) : FC_OK;
out:
    rc = fc_close_written(fd, rc, path, err);
    free(path);
    return rc;
}

fc_code fc_delta_write_data(const char *folder, const fc_delta_content *c, unsigned file, unsigned files,
                            fc_error *err) {
    char *header = NULL, name[sizeof "model-4294967295-of-4294967295" ST_EXTENSION];
    size_t size = 0;
    snprintf(name, sizeof name, DATA_NAME, file, files);
    fc_code rc = make_header(c, &header, &size, err);
    rc = rc == FC_OK ? write_file(folder, name, header, size, c, files > 1, err) : rc;
    free(header);
    return rc;
}

fc_code fc_delta_write_index(const char *folder, const fc_delta_index *index, fc_error *err) {
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    FC_NEED(out, err, folder);
    const bool good = put_index(out, index);
    fc_code rc = fclose(out) == 0 && good ? FC_OK : fc_no_memory(err, folder);
    rc = rc == FC_OK ? write_file(folder, ST_INDEX_NAME, text, size, NULL, false, err) : rc;
    free(text);
    return rc;
}

/* Ends the data file that a sender has made. */
static fc_code end_data(fc_delta_sender *sender, const fc_delta_content *c, fc_error *err) {
    char *header = NULL;
    size_t size = 0;
    fc_code rc = make_header(c, &header, &size, err);
    rc = rc == FC_OK ? fc_delta_sender_finish(sender, header, size, err) : rc;
    free(header);
    return rc;
}

/* Writes the data file, if there are members, and the index. */
static fc_code write_files(const char *folder, fc_delta_sender *sender, const fc_delta_content *c, fc_error *err) {
    fc_delta_entry *entries = calloc(c->count + 1, sizeof *entries);
    fc_code rc;
    FC_NEED(entries, err, folder);
    for (size_t i = 0; i < c->count; i++) {
        entries[i] = (fc_delta_entry){c->members[i].name, 1};
    }
    const fc_delta_index index = {.number = c->number,
                                  .base = c->base,
                                  .encoding = c->encoding,
                                  .checksum = c->checksum,
                                  .entries = entries,
                                  .count = c->count,
                                  .files = 1};
    if (c->count > 0) {
        rc = sender ? end_data(sender, c, err) : fc_delta_write_data(folder, c, 1, 1, err);
    } else {
        rc = FC_OK;
    }
    rc = rc == FC_OK ? fc_delta_write_index(folder, &index, err) : rc;
    free(entries);
    return rc;
}

/* ---- publishing ---- */

fc_code fc_delta_is_own_file(const char *path, const char *name, bool *own, fc_error *err) {
    (void)path, (void)err;
    *own = name && (strcmp(name, ST_INDEX_NAME) == 0 || fnmatch("model-*-of-*" ST_EXTENSION, name, FNM_PATHNAME) == 0);
    return FC_OK;
}

uint64_t fc_delta_workers_memory(const char *path, uint64_t memory) {
    if (!fc_is_remote(path)) {
        return memory;
    }
    memory = memory ? memory : FC_DEFAULT_MEMORY;
    return memory / 2 > FC_LEAST_MEMORY ? memory / 2 : FC_LEAST_MEMORY;
}

/* Makes what takes the frames: a directory for the files of encoders, or a sender. */
static fc_code begin_frames(const fc_delta_publication *p, const char *folder, fc_commit **scratch,
                            fc_delta_sender **sender, fc_error *err) {
    char path[PATH_MAX];
    if (!fc_is_remote(p->path)) {
        return fc_commit_scratch(p->path, scratch, err);
    }
    if (snprintf(path, sizeof path, "%s/" DATA_NAME, folder, 1, 1) >= (int)sizeof path) {
        return fc_fail(err, FC_EUSAGE, "%s: the path is too long", p->path);
    }
    return fc_delta_sender_new(path, p->memory ? p->memory / 2 : FC_DEFAULT_MEMORY / 2, sender, err);
}

fc_code fc_delta_publish(const fc_delta_publication *p, fc_error *err) {
    const fc_commit_options how = {.path = p->path,
                                   .is_directory = true,
                                   .force = p->force,
                                   .is_own_file = fc_delta_is_own_file,
                                   .forbidden = p->forbidden,
                                   .reporter = p->reporter};
    fc_delta_content content = {0};
    fc_commit *commit = NULL, *scratch = NULL;
    fc_delta_sender *sender = NULL;
    fc_code rc;
    FC_TRY(fc_commit_begin(&how, &commit, err));
    FC_TRY_GOTO(begin_frames(p, fc_commit_path(commit), &scratch, &sender, err), rc, out);
    FC_TRY_GOTO(p->make(p->context, scratch ? fc_commit_path(scratch) : NULL, sender, &content, err), rc, out);
    FC_TRY_GOTO(write_files(fc_commit_path(commit), sender, &content, err), rc, out);
    fc_commit_count(commit, p->progress);
    rc = fc_commit_finish(commit, err);
    commit = NULL;
out:
    fc_delta_sender_free(sender);
    fc_commit_abort(commit);
    p->release(p->context);
    fc_commit_abort(scratch);
    return rc;
}
