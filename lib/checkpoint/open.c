/*
 * Opens a checkpoint: asks each format whether it recognises the input, and lets the one that does read its headers.
 * Also contains the accessors that dispatch to the format.
 */
#include "fsdpckpt/format.h"
#include "fsdpckpt/seal.h"
#include "fsdpckpt/try.h"

#include "base/checked.h"
#include "base/file_name.h"
#include "checkpoint/identity.h"
#include "checkpoint/other_files.h"
#include "io/stand_in.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEAD_SIZE = 4096, MOST_BELOW = 9 };

static fc_code read_head(const char *path, unsigned char *head, size_t *size, fc_error *err) {
    int fd;
    uint64_t total;
    FC_TRY(fc_open_input(path, &fd, &total, err));
    *size = total < HEAD_SIZE ? (size_t)total : HEAD_SIZE;
    fc_code rc = fc_pread_full(fd, head, *size, 0, path, err);
    close(fd);
    return rc;
}

/* @return the format that recognises the input, or NULL. */
static const fc_format *recognise(const fc_probe *probe) {
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        if ((*f)->reader.probe(probe)) {
            return *f;
        }
        if (probe->err->code != FC_OK) {
            return NULL; /* the probe failed, so another format might misidentify the input */
        }
    }
    return NULL;
}

/* Appends to a text in `size` bytes; truncates what does not fit. */
static void append(char *text, size_t size, const char *separator, const char *more) {
    size_t used = strlen(text);
    snprintf(text + used, size - used, "%s%s", used ? separator : "", more);
}

/* Whether `path`, a directory entry called `name`, is a checkpoint on its own. */
static bool is_checkpoint(const char *path, const char *name) {
    unsigned char head[HEAD_SIZE];
    fc_error ignored = {FC_OK, ""}; /* it is only a hint */
    fc_probe probe = {path, true, NULL, 0, &ignored};
    struct stat st;
    if (stat(path, &st) != 0) {
        return false;
    }
    if (S_ISREG(st.st_mode) && (fc_holds_data(name) || fc_ends_with(name, ".h5"))) {
        if (read_head(path, head, &probe.head_size, NULL) != FC_OK) {
            return false;
        }
        probe.is_directory = false;
        probe.head = head;
        return recognise(&probe) != NULL;
    }
    return S_ISDIR(st.st_mode) && recognise(&probe);
}

/* Lists the checkpoints one level below `directory`: trainers put the model and the optimizer in folders of their own.
 */
static void list_below(const char *directory, char *text, size_t size) {
    struct dirent **entries = NULL;
    int n = scandir(directory, &entries, NULL, alphasort), found = 0; /* an error: no hint */
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        char *path = NULL;
        if (name[0] != '.' && found < MOST_BELOW && asprintf(&path, "%s/%s", directory, name) >= 0) {
            if (is_checkpoint(path, name)) {
                append(text, size, ", ", ++found == MOST_BELOW ? "..." : name);
            }
            free(path);
        }
        free(entries[i]);
    }
    free(entries);
}

/* Fails with a hint: the checkpoints one level below, or else the signs that the formats look for. */
static fc_code fail_unknown(const fc_probe *probe, fc_error *err) {
    char signs[512] = "", below[512] = "";
    if (probe->is_directory) {
        list_below(probe->path, below, sizeof below);
    }
    if (below[0]) {
        return fc_fail(err, FC_ECORRUPT, "%s: not a checkpoint, but it contains checkpoints: %s; name one of them",
                       probe->path, below);
    }
    FC_TRY(probe->is_directory ? FC_OK : fc_check_stand_in(probe->path, err));
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        const char *sign = probe->is_directory ? (*f)->directory_sign : (*f)->file_sign;
        if (sign) {
            append(signs, sizeof signs, ", ", sign);
        }
    }
    return fc_fail(err, FC_ECORRUPT,
                   probe->is_directory
                       ? "%s: not a checkpoint: the directory contains none of: %s"
                       : "%s: not a checkpoint: the file is none of: %s; if it is part of one, name its directory",
                   probe->path, signs);
}

static fc_code find_format(const char *path, const fc_format **out, fc_error *err) {
    unsigned char head[HEAD_SIZE];
    fc_error failed = {FC_OK, ""};
    fc_probe probe = {path, false, NULL, 0, &failed};
    struct stat st;
    if (stat(path, &st) != 0) {
        return errno == ENOENT || errno == ENOTDIR ? fc_fail(err, FC_ECORRUPT, "%s: no such file or directory%s", path,
                                                             strstr(path, "://") ? "; copy or mount it first" : "")
                                                   : fc_fail_errno(err, errno, "%s: cannot open", path);
    }
    probe.is_directory = S_ISDIR(st.st_mode);
    if (probe.is_directory && access(path, X_OK) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot enter the directory", path);
    }
    if (!probe.is_directory) {
        FC_TRY(read_head(path, head, &probe.head_size, err));
        probe.head = head;
    }
    *out = recognise(&probe);
    if (*out) {
        return FC_OK;
    }
    return failed.code != FC_OK ? fc_fail(err, failed.code, "%s", failed.message) : fail_unknown(&probe, err);
}

/* Copies `path` without the trailing slashes that completion adds, because messages show files as PATH/NAME. */
static const char *clean_path(fc_arena *arena, const char *path) {
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/') {
        len--;
    }
    return fc_arena_strndup(arena, path, len);
}

/* Reports every damaged file of a checkpoint that cannot be opened, because all of them must be restored. */
static void report_damaged(const fc_checkpoint *checkpoint, const fc_open_options *options) {
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        fc_error why;
        if (checkpoint->format->reader.check_header(checkpoint, i, &why) == FC_ECORRUPT) {
            options->damaged(options->context, checkpoint->files[i].path, why.message);
        }
    }
}

static fc_code new_checkpoint(const fc_format *format, const char *path, fc_checkpoint **out, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    fc_checkpoint *checkpoint = arena ? fc_arena_calloc(arena, 1, sizeof *checkpoint) : NULL;
    const char *copy = checkpoint ? clean_path(arena, path) : NULL;
    if (!copy) {
        fc_arena_free(arena);
        return fc_no_memory(err, path);
    }
    checkpoint->format = format;
    checkpoint->path = copy;
    checkpoint->arena = arena;
    *out = checkpoint;
    return FC_OK;
}

static uint64_t object_bytes(const fc_checkpoint *checkpoint) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (t->object && !fc_add_u64(bytes, (uint64_t)t->shape[0], &bytes)) {
            return UINT64_MAX;
        }
    }
    return bytes;
}

/* @return the bytes of all files, or UINT64_MAX if one cannot be examined. Opening it, if it is needed, says why. */
static uint64_t file_bytes(const fc_checkpoint *checkpoint) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        struct stat st;
        if (stat(checkpoint->files[i].path, &st) != 0 || !fc_add_u64(bytes, (uint64_t)st.st_size, &bytes)) {
            return UINT64_MAX;
        }
    }
    return bytes;
}

/*
 * Each object is examined and written on its own. If many share their bytes (one storage in a pickle, one place in a
 * file), a small checkpoint would take hours and any memory.
 */
static fc_code check_object_bytes(const fc_checkpoint *checkpoint, fc_error *err) {
    enum { RATIO = 8, SPARE = 16 << 20 };
    const uint64_t objects = object_bytes(checkpoint);
    const uint64_t files = objects > SPARE ? file_bytes(checkpoint) : 0;
    uint64_t most;
    if (objects <= SPARE || !fc_mul_u64(files, RATIO, &most) || !fc_add_u64(most, SPARE, &most) || objects <= most) {
        return FC_OK;
    }
    return fc_fail(err, FC_EUNSUPPORTED,
                   "%s: its files have %" PRIu64 " bytes, but its objects would take %" PRIu64
                   ": too many of them share their bytes",
                   checkpoint->path, files, objects);
}

static fc_code read_manifest(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_progress_begin(options->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, 0);
    FC_TRY(checkpoint->format->reader.open(checkpoint, options, err));
    FC_TRY(fc_identities_take(checkpoint, options, err));
    FC_TRY(check_object_bytes(checkpoint, err));
    return fc_seal_load(checkpoint, err);
}

fc_code fc_format_open(const fc_format *format, const char *path, const fc_open_options *options, fc_checkpoint **out,
                       fc_error *err) {
    static const fc_open_options defaults = {0};
    const fc_open_options *how = options ? options : &defaults;
    fc_checkpoint *checkpoint = NULL;
    fc_error own;
    err = err ? err : &own; /* so readers can rely on it */
    *out = NULL;
    FC_TRY(new_checkpoint(format, path, &checkpoint, err));
    fc_code rc = read_manifest(checkpoint, how, err);
    if (rc == FC_ECORRUPT && how->damaged && format->reader.check_header && checkpoint->nfiles > 1) {
        report_damaged(checkpoint, how);
    }
    if (rc != FC_OK) {
        fc_checkpoint_close(checkpoint);
        return rc;
    }
    *out = checkpoint;
    return FC_OK;
}

fc_code fc_checkpoint_open(const char *path, const fc_open_options *options, fc_checkpoint **out, fc_error *err) {
    const fc_format *format = NULL;
    *out = NULL;
    FC_TRY(fc_commit_recover(path, options ? &options->reporter : NULL, err));
    FC_TRY(find_format(path, &format, err));
    return fc_format_open(format, path, options, out, err);
}

void fc_checkpoint_close(fc_checkpoint *checkpoint) {
    if (!checkpoint) {
        return;
    }
    if (checkpoint->state && checkpoint->format->reader.close) {
        checkpoint->format->reader.close(checkpoint);
    }
    fc_arena_free(checkpoint->arena);
}

fc_code fc_check_readable(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_error *err) {
    if (!tensor->object || !tensor->object->refusal) {
        return FC_OK;
    }
    fc_code rc =
        fc_fail(err, FC_EUNSUPPORTED, "%s: %.256s: %s", checkpoint->path, tensor->name, tensor->object->refusal);
    return fc_advise(err, rc, FC_HINT_EXCLUDE, tensor->name);
}

fc_code fc_checkpoint_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                             fc_error *err) {
    FC_TRY(fc_check_readable(checkpoint, tensor, err));
    return checkpoint->format->reader.extent(checkpoint, tensor, index, out, err);
}

fc_extent fc_computed_extent(const fc_tensor *tensor, size_t index) {
    const fc_chunk *chunk = &tensor->chunks[index];
    fc_extent extent = {.codec = FC_CODEC_COMPUTED, .decoded = fc_chunk_data_bytes(tensor, chunk)};
    fc_row_major_strides(tensor->ndim, chunk->dims + tensor->ndim, extent.strides); /* a computed chunk fits a buffer */
    return extent;
}

fc_code fc_checkpoint_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                  const char **json, fc_error *err) {
    FC_TRY(fc_check_readable(checkpoint, object, err));
    return checkpoint->format->reader.object_json(checkpoint, object, arena, json, err);
}

/* A format's own digest describes the bytes as written, a seal's the bytes when they were sealed. */
fc_code fc_checkpoint_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                             fc_error *err) {
    *out = (fc_digest){.kind = FC_DIGEST_NONE};
    FC_TRY(checkpoint->format->reader.digest ? checkpoint->format->reader.digest(checkpoint, tensor, index, out, err)
                                             : FC_OK);
    const fc_seal *seal = checkpoint->seal;
    if (out->kind == FC_DIGEST_NONE && index == FC_WHOLE_TENSOR && seal && seal->has[tensor - checkpoint->tensors]) {
        *out = (fc_digest){.kind = FC_DIGEST_CRC64, .value = seal->crc64[tensor - checkpoint->tensors]};
    }
    return FC_OK;
}
