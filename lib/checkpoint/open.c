/*
 * Opens a checkpoint: asks each format whether it recognises the input, and lets the one that does read its headers.
 * Also contains the accessors that dispatch to the format.
 */
#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/seal.h"
#include "fsdpckpt/try.h"

#include "base/checked.h"
#include "base/file_name.h"
#include "checkpoint/extent.h"
#include "checkpoint/folder.h"
#include "checkpoint/identity.h"
#include "checkpoint/open.h"
#include "checkpoint/seal.h"
#include "io/commit.h"
#include "io/foreign.h"
#include "io/path.h"
#include "io/stand_in.h"
#include "net/remote.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEAD_SIZE = 4096 };

/* Fails with a hint: the checkpoints below a directory, or else the signs that the formats look for.
   @param inner NULL: the path is a file. */
static fc_code fail_unknown(const char *path, const fc_inner *inner, fc_error *err) {
    const bool is_directory = inner != NULL;
    char signs[512] = "", below[512] = "";
    for (size_t i = 0; inner && i < inner->count && i < FC_MOST_INNER; i++) {
        fc_append_name(below, sizeof below, ", ", i + 1 < FC_MOST_INNER ? inner->paths[i] + strlen(path) + 1 : "...");
    }
    if (below[0]) {
        return fc_fail(err, FC_ECORRUPT, "%s: not a checkpoint, but it contains checkpoints: %s; name one of them",
                       path, below);
    }
    FC_TRY(is_directory ? FC_OK : fc_check_stand_in(path, err));
    FC_TRY(fc_check_foreign(path, is_directory, err));
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        const char *sign = is_directory ? (*f)->directory_sign : (*f)->file_sign;
        if (sign) {
            fc_append_name(signs, sizeof signs, ", ", sign);
        }
    }
    return fc_fail(err, FC_ECORRUPT,
                   is_directory
                       ? "%s: not a checkpoint: the directory contains none of: %s"
                       : "%s: not a checkpoint: the file is none of: %s; if it is part of one, name its directory",
                   path, signs);
}

/* What a path means. */
typedef struct source {
    const fc_format *format;
    const char *path;        /* the file or directory */
    const fc_listed *chosen; /* of a directory; NULL: none was found, or the path is a file */
    fc_listing listing;      /* what is in the directory; its arena owns the members above */
    bool named;              /* the path has the name of one of the directory's checkpoints */
    const char *outer;       /* the path that was given, if `path` was found below it; else NULL */
    const char *adapter;     /* one that is next to `path` and is not read; else NULL */
} source;

/* Copies `path` without the trailing slashes that completion adds, because messages show files as PATH/NAME. */
static const char *clean_path(fc_arena *arena, const char *path) {
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/') {
        len--;
    }
    return fc_arena_strndup(arena, path, len);
}

/* Looks into a directory. @param only the format that is asked; NULL: all. */
static fc_code look_into(source *s, const char *wanted, const fc_format *only, fc_error *err) {
    if (fc_access(s->path, X_OK) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot enter the directory", s->path);
    }
    FC_TRY(wanted ? FC_OK : fc_check_disguised(s->path, err));
    s->listing.wanted = wanted;
    FC_TRY(fc_folder_list(s->path, only, &s->listing, err));
    FC_TRY(fc_folder_choose(s->path, &s->listing, wanted, &s->chosen, err));
    s->named = wanted != NULL;
    s->format = s->chosen ? s->chosen->format : only;
    return FC_OK;
}

static const char *directory_of(fc_arena *arena, const char *path) {
    const size_t n = (size_t)(fc_base_name(path) - path);
    return n == 0 ? fc_arena_strndup(arena, ".", 1) : fc_arena_strndup(arena, path, n > 1 ? n - 1 : n);
}

/* A header that several formats have, .metadata, may be that of a checkpoint with more files than it names. */
static fc_code look_around(source *s, fc_error *err) {
    const char *directory = directory_of(s->listing.arena, s->path), *name = fc_base_name(s->path);
    FC_TRY(directory ? fc_folder_list(directory, NULL, &s->listing, err) : fc_no_memory(err, s->path));
    for (size_t i = 0; i < s->listing.count; i++) {
        const fc_listed *item = &s->listing.items[i];
        if (strcmp(item->name, name) == 0 && item->format != s->format) {
            s->path = directory;
            s->format = item->format;
            s->chosen = item;
            s->named = true;
        }
    }
    return FC_OK;
}

static fc_code look_at_file(source *s, const fc_format *only, fc_error *err) {
    unsigned char head[HEAD_SIZE];
    size_t size = sizeof head;
    s->format = only;
    if (!only) {
        FC_TRY(fc_read_head(s->path, head, &size, err));
        s->format = fc_recognise_file(s->path, head, size);
    }
    if (!s->format) {
        return fail_unknown(s->path, NULL, err);
    }
    const char *header = only ? NULL : s->format->header_name;
    return header && strcmp(header, fc_base_name(s->path)) == 0 ? look_around(s, err) : FC_OK;
}

/* The directory of a path such as "ckpt/rank_*.pt", which names one of its checkpoints. */
static const char *directory_of_glob(fc_arena *arena, const char *path, const char **glob) {
    *glob = fc_base_name(path);
    return strchr(*glob, '*') ? directory_of(arena, path) : NULL;
}

/* Enters the only checkpoint with a model below a directory that is none itself. */
static fc_code look_below(source *s, fc_error *err) {
    fc_inner inner;
    struct stat st;
    FC_TRY(fc_folder_look_below(s->path, s->listing.arena, &inner, err));
    if (inner.models != 1 || inner.links > 0 || !inner.all || fc_check_foreign(s->path, true, err) != FC_OK) {
        return fail_unknown(s->path, &inner, err);
    }
    s->outer = s->outer ? s->outer : s->path;
    s->path = inner.model;
    s->adapter = inner.adapter;
    if (fc_stat(s->path, &st) != 0 || !S_ISDIR(st.st_mode)) {
        return look_at_file(s, NULL, err);
    }
    FC_TRY(look_into(s, NULL, NULL, err));
    return s->format ? FC_OK : fail_unknown(s->path, &inner, err);
}

/* Looks into the snapshot of a model in the cache of huggingface_hub, or into any other directory. */
static fc_code look_into_given(source *s, const fc_format *only, fc_error *err) {
    const char *snapshot;
    FC_TRY(fc_hub_snapshot(s->path, s->listing.arena, &snapshot, err));
    if (snapshot) {
        s->outer = s->path;
        s->path = snapshot;
    }
    FC_TRY(look_into(s, NULL, only, err));
    return s->format ? FC_OK : look_below(s, err);
}

/* Finds out what `path` means. @param s zeroed; the caller frees the arena of the listing. */
static fc_code locate(const char *path, const fc_format *only, source *s, fc_error *err) {
    const char *glob = NULL;
    struct stat st;
    s->listing.arena = fc_arena_new();
    s->path = s->listing.arena ? clean_path(s->listing.arena, path) : NULL;
    FC_NEED(s->path, err, path);
    if (fc_is_remote(path)) {
        const char *cached;
        fc_remote_info info;
        FC_TRY(fc_hub_snapshot(s->path, s->listing.arena, &cached, err));
        FC_TRY(cached ? FC_OK : fc_remote_stat(path, true, &info, err)); /* says more than errno */
        s->outer = cached ? s->path : NULL;
        s->path = path = cached ? cached : path;
    }
    if (fc_stat(path, &st) == 0) {
        return S_ISDIR(st.st_mode) ? look_into_given(s, only, err) : look_at_file(s, only, err);
    }
    const int errnum = errno;
    const char *directory = directory_of_glob(s->listing.arena, s->path, &glob);
    if (errnum == ENOENT && directory && fc_stat(directory, &st) == 0 && S_ISDIR(st.st_mode)) {
        s->path = directory;
        return look_into(s, glob, only, err); /* finds it, or fails */
    }
    return errnum == ENOENT || errnum == ENOTDIR
               ? fc_fail(err, FC_ECORRUPT, "%s: no such file or directory%s", path,
                         strstr(path, "://") && !fc_is_remote(path) ? "; copy or mount it first" : "")
               : fc_fail_errno(err, errnum, "%s: cannot open", path);
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

static fc_code new_checkpoint(const source *s, fc_checkpoint **out, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    const char *group = s->chosen ? s->chosen->name : "";
    fc_checkpoint *checkpoint = arena ? fc_arena_calloc(arena, 1, sizeof *checkpoint) : NULL;
    const char *path = checkpoint ? fc_arena_strndup(arena, s->path, strlen(s->path)) : NULL;
    const char *own_group = path ? fc_arena_strndup(arena, group, strlen(group)) : NULL;
    if (!own_group) {
        fc_arena_free(arena);
        return fc_no_memory(err, s->path);
    }
    checkpoint->format = s->format;
    checkpoint->path = path;
    checkpoint->arena = arena;
    checkpoint->group = s->chosen ? own_group : NULL;
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
        if (fc_stat(checkpoint->files[i].path, &st) != 0 || !fc_add_u64(bytes, (uint64_t)st.st_size, &bytes)) {
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

static fc_code open_source(const source *s, const fc_open_options *how, fc_checkpoint **out, fc_error *err) {
    fc_checkpoint *checkpoint = NULL;
    FC_TRY(new_checkpoint(s, &checkpoint, err));
    fc_code rc = read_manifest(checkpoint, how, err);
    if (rc == FC_ECORRUPT && how->damaged && s->format->reader.check_header && checkpoint->nfiles > 1) {
        report_damaged(checkpoint, how);
    }
    if (rc == FC_OK && s->chosen && !s->named && how->others.report) {
        rc = fc_folder_report(checkpoint, s->path, &s->listing, s->chosen, &how->others, err);
    }
    if (rc == FC_OK && s->outer && how->others.report) {
        fc_error line;
        fc_fail(&line, FC_OK, "%s: reads %s%s%s", s->outer, s->path, s->adapter ? ", and not the adapter " : "",
                s->adapter ? fc_base_name(s->adapter) : "");
        how->others.report(how->others.context, line.message);
    }
    if (rc != FC_OK) {
        fc_checkpoint_close(checkpoint);
        return rc;
    }
    *out = checkpoint;
    return FC_OK;
}

fc_code fc_format_open(const fc_format *format, const char *path, const fc_open_options *options, fc_checkpoint **out,
                       fc_error *err) {
    static const fc_open_options defaults = {0};
    source s = {.format = NULL};
    fc_error own;
    err = err ? err : &own; /* so readers can rely on it */
    *out = NULL;
    fc_code rc;
    FC_TRY_GOTO(locate(path, format, &s, err), rc, out);
    rc = s.format ? open_source(&s, options ? options : &defaults, out, err)
                  : fc_fail(err, FC_ECORRUPT, "%s: not a checkpoint", path);
out:
    fc_arena_free(s.listing.arena);
    return rc;
}

fc_code fc_checkpoint_open(const char *path, const fc_open_options *options, fc_checkpoint **out, fc_error *err) {
    char *hidden = NULL;
    fc_code rc = FC_OK;
    *out = NULL;
    FC_TRY(fc_hide_query(path, &hidden, err));
    path = hidden ? hidden : path;
    FC_TRY_GOTO(fc_commit_recover(path, options ? &options->reporter : NULL, err), rc, out);
    rc = fc_format_open(NULL, path, options, out, err);
out:
    free(hidden);
    return rc;
}

void fc_checkpoint_rest(const fc_checkpoint *checkpoint) {
    if (checkpoint->state && checkpoint->format->reader.rest) {
        checkpoint->format->reader.rest(checkpoint);
    }
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
    const fc_hint hint = tensor->object->hint;
    return hint == FC_HINT_NONE ? fc_advise(err, rc, FC_HINT_EXCLUDE, tensor->name) : fc_advise(err, rc, hint, NULL);
}

fc_code fc_checkpoint_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                             fc_error *err) {
    FC_TRY(fc_check_readable(checkpoint, tensor, err));
    return checkpoint->format->reader.extent(checkpoint, tensor, index, out, err);
}

fc_extent fc_raw_extent(const fc_place *place) {
    return (fc_extent){.codec = FC_CODEC_RAW,
                       .file = place->file,
                       .offset = place->offset,
                       .length = place->length,
                       .decoded = place->length};
}

fc_extent fc_inline_extent(const void *bytes, uint64_t size) {
    return (fc_extent){.codec = FC_CODEC_INLINE, .bytes = bytes, .length = size, .decoded = size, .strides = {1}};
}

fc_extent fc_computed_extent(const fc_tensor *tensor, size_t index, uint32_t reads) {
    const fc_chunk *chunk = &tensor->chunks[index];
    fc_extent extent = {.codec = FC_CODEC_COMPUTED, .decoded = fc_chunk_data_bytes(tensor, chunk)};
    extent.length = extent.decoded;
    if (reads > 1 && !fc_mul_u64(extent.decoded, reads, &extent.length)) {
        extent.length = UINT64_MAX;
    }
    fc_row_major_strides(tensor->ndim, chunk->dims + tensor->ndim, extent.strides); /* a computed chunk fits a buffer */
    return extent;
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
