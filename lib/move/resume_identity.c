/*
 * Says what a conversion converts, and how: see resume_identity.h. The first letter of a text is its kind. The source
 * is known by the names, inodes, sizes and times of its files, and the target by a digest of the plan; options are
 * texts of the caller, because two of them can give the same plan for other values.
 */
#include "move/resume_identity.h"

#include "base/crc.h"
#include "base/file_name.h"
#include "fsdpckpt/try.h"
#include "io/path.h"
#include "plan/target_file.h"

#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    KIND_VERSION = 'v',
    KIND_NAME = 'n', /* of the target; the name of the staging directory may have only its beginning */
    KIND_FORMAT = 'f',
    KIND_OPTION = 'o',
    KIND_FILE = 'p',
    KIND_STATE = 's', /* of the file before it */
    KIND_PLAN = 'l'
};

static bool add(fc_notes *out, char kind, const char *format, ...) __attribute__((format(printf, 3, 4)));

static bool add(fc_notes *out, char kind, const char *format, ...) {
    char *text = NULL;
    va_list args;
    va_start(args, format);
    const bool made = vasprintf(&text, format, args) >= 0;
    va_end(args);
    const bool added = made && fc_notes_add(out, &kind, 1) && fc_notes_add(out, text, strlen(text) + 1);
    if (made) {
        free(text);
    }
    return added;
}

static int64_t nanoseconds(const struct timespec *at) {
    return (int64_t)at->tv_sec * 1000000000 + at->tv_nsec; /* until the year 2262 */
}

/* A program can keep the size and the time of the last write, but not the time of the last change, nor the inode of
 * another file. The inode of a file on a server tells its version. A device can have another number after a restart. */
static bool add_file(fc_notes *out, const fc_file_identity *file) {
    char real[PATH_MAX];
    return add(out, KIND_FILE, "%s", realpath(file->path, real) ? real : file->path) &&
           add(out, KIND_STATE, "%" PRIu64 " %" PRIu64 " %" PRId64 " %" PRId64, file->inode, file->size, file->modified,
               file->changed);
}

/* Adds a file that an option names. The files of a directory are those of the source, or have no influence. */
static bool add_input(fc_notes *out, const char *path) {
    struct stat st;
    if (fc_stat(path, &st) != 0 || !S_ISREG(st.st_mode)) {
        return true;
    }
    return add_file(out, &(fc_file_identity){.path = path,
                                             .inode = (uint64_t)st.st_ino,
                                             .size = (uint64_t)st.st_size,
                                             .modified = nanoseconds(&st.st_mtim),
                                             .changed = nanoseconds(&st.st_ctim)});
}

static bool add_files(fc_notes *out, const fc_checkpoint *source, const char *const *inputs) {
    fc_file_identity file;
    bool good = true;
    for (size_t i = 0; good && fc_checkpoint_identity(source, i, &file); i++) {
        good = !file.path || add_file(out, &file);
    }
    for (; good && inputs && *inputs; inputs++) {
        good = add_input(out, *inputs);
    }
    return good;
}

static uint64_t sum_text(uint64_t crc, const char *text) {
    return fc_crc64(crc, text, strlen(text) + 1);
}

static uint64_t sum_number(uint64_t crc, uint64_t number) {
    return fc_crc64(crc, &number, sizeof number);
}

/* A digest of the values, their types and places. */
static uint64_t sum_plan(const fc_target *target) {
    uint64_t crc = sum_number(0, target->ntensors);
    const fc_mesh *mesh = target->mesh;
    for (int d = 0; d < mesh->ndim; d++) {
        crc = sum_text(sum_number(crc, (uint64_t)mesh->sizes[d]), mesh->names[d]);
    }
    crc = sum_number(crc, target->max_file_bytes << 2 | (uint64_t)target->flat_state << 1 | target->self_contained);
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_target_tensor *t = &target->tensors[i];
        crc = sum_text(sum_text(crc, t->name), t->source->name);
        crc = sum_number(crc, (uint64_t)t->dtype << 32 | (uint64_t)t->source->dtype);
        crc = sum_number(crc, (uint64_t)t->file << 32 | t->section);
        crc = sum_number(crc, (uint64_t)t->owner_offset << 32 | (uint32_t)t->source->ndim);
        for (int d = 0; d < t->source->ndim; d++) {
            crc = sum_number(crc, (uint64_t)t->source->shape[d]);
        }
        for (int d = 0; t->placements && d < mesh->ndim; d++) {
            const fc_placement *p = &t->placements[d];
            crc = sum_number(crc, (uint64_t)p->kind);
            crc = sum_number(crc, (uint64_t)(uint32_t)p->dim << 32 | (uint32_t)p->split_factor);
        }
    }
    return crc;
}

fc_code fc_resume_identify(const fc_target *target, const char *path, const fc_convert_options *options, fc_notes *out,
                           fc_error *err) {
    bool good = add(out, KIND_VERSION, "%s", FSDPCKPT_VERSION) && add(out, KIND_NAME, "%s", fc_base_name(path)) &&
                add(out, KIND_FORMAT, "%s", options->format->name);
    for (const char *const *text = options->texts; good && text && *text; text++) {
        good = add(out, KIND_OPTION, "%s", *text);
    }
    good =
        good && add_files(out, target->source, options->inputs) && add(out, KIND_PLAN, "%016" PRIx64, sum_plan(target));
    return good ? FC_OK : fc_no_memory(err, path);
}

static bool has_text(const char *texts, const char *end, const char *text) {
    while (texts < end && strcmp(texts, text) != 0) {
        texts += strlen(texts) + 1;
    }
    return texts < end;
}

/* Whether two texts are the same option with different values. */
static bool is_same_option(const char *a, const char *b) {
    const size_t n = strcspn(a, " ");
    return strncmp(a, b, n) == 0 && (b[n] == ' ' || b[n] == '\0');
}

/* An option differs. @param gone whether `then` is no longer given at all. */
static fc_code fail_option(const char *then, const char *now, bool gone, const char *folder, fc_error *err) {
    static const char what[] = "the unfinished conversion was begun";
    static const char how[] = "give the same options, or remove the directory to begin again";
    if (gone && is_same_option(then, now)) {
        return fc_fail(err, FC_EUSAGE, "%s: %s with '%s', not with '%s'; %s", folder, what, then + 1, now + 1, how);
    }
    return fc_fail(err, FC_EUSAGE, "%s: %s %s '%s'; %s", folder, what, gone ? "with" : "without",
                   gone ? then + 1 : now + 1, how);
}

/* Says what differs: the texts at the first difference, "" for the end; `file`: the one that they may be the state of.
 */
static fc_code fail_different(const char *then, const char *now, const char *file, const char *folder, fc_error *err) {
    const char kind = *then == *now ? *now : '\0';
    if (kind == KIND_STATE) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: was changed since the unfinished conversion was begun; remove %s to begin again", file,
                       folder);
    }
    if (kind == KIND_PLAN || kind == '\0') {
        return fc_fail(err, FC_EUSAGE, "%s: the unfinished conversion has %s; remove the directory to begin again",
                       folder, kind ? "other tensors, or other places for them" : "another number of files");
    }
    return fc_fail(err, FC_EUSAGE,
                   "%s: the unfinished conversion has the %s %s, not %s; remove the directory to begin again", folder,
                   kind == KIND_VERSION  ? "fsdpckpt version"
                   : kind == KIND_NAME   ? "target"
                   : kind == KIND_FORMAT ? "format"
                                         : "file",
                   then + 1, now + 1);
}

fc_code fc_resume_compare(const char *begun, size_t size, const fc_notes *now, const char *folder, fc_error *err) {
    const char *a = begun, *b = (const char *)now->data, *file = "";
    const char *const end_a = begun + size, *const end_b = b + now->size;
    while (a < end_a && b < end_b && strcmp(a, b) == 0) {
        file = *b == KIND_FILE ? b + 1 : file;
        a += strlen(a) + 1;
        b += strlen(b) + 1;
    }
    if (a >= end_a && b >= end_b) {
        return FC_OK;
    }
    a = a < end_a ? a : "";
    b = b < end_b ? b : "";
    const bool gone = *a == KIND_OPTION && !has_text((const char *)now->data, end_b, a);
    return gone || *b == KIND_OPTION ? fail_option(a, b, gone, folder, err) : fail_different(a, b, file, folder, err);
}
