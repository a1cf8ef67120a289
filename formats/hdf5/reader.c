/*
 * Reads HDF5: recognises it, opens it, and turns chunks into extents. batches.c runs the reader processes, tensors.c
 * makes the manifest of one file, sharded.c that of a directory.
 */
#include "hdf5/reader.h"

#include "base/checked.h"
#include "base/module_place.h"
#include "base/text.h"
#include "checkpoint/extent.h"
#include "checkpoint/folder.h"
#include "checkpoint/identity.h"
#include "checkpoint/session.h"
#include "codec/filter.h"
#include "fsdpckpt/try.h"
#include "hdf5/h5.h"
#include "hdf5/keras.h"
#include "hdf5/reader_process/scan.h"
#include "hdf5/tables.h"
#include "io/directory.h"
#include "io/file.h"
#include "net/remote.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- probing ---- */

static const unsigned char signature[8] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};

/* The largest user block that is skipped on servers, in bytes. The fetcher has this much of each file. */
enum { MOST_BLOCK_ON_SERVERS = 512 << 10 };

static bool file_has_signature(const fc_probe *probe) {
    unsigned char found[sizeof signature];
    int fd = -1;
    uint64_t size;
    bool yes = false;
    /* At 0, then after a user block of 512, 1024, 2048 … bytes. */
    for (uint64_t at = 0;; at = at ? 2 * at : 512) {
        if (at + sizeof signature <= probe->head_size) {
            yes = memcmp(probe->head + at, signature, sizeof signature) == 0;
        } else {
            if (fc_is_remote(probe->path) && at > MOST_BLOCK_ON_SERVERS) {
                break;
            }
            if (fd < 0 && (probe->head_size < 512 || fc_open_input(probe->path, &fd, &size, NULL) != FC_OK)) {
                break;
            }
            if (!fc_range_within(at, sizeof signature, size)) {
                break;
            }
            yes = fc_pread_full(fd, found, sizeof found, at, probe->path, NULL) == FC_OK &&
                  memcmp(found, signature, sizeof found) == 0;
        }
        if (yes || at > UINT64_MAX / 4) {
            break;
        }
    }
    if (fd >= 0) {
        close(fd);
    }
    return yes;
}

static bool is_own_name(const char *name) {
    const char *dot = strrchr(name, '.');
    return strcmp(name, "index.h5") == 0 || (strncmp(name, "shard-", 6) == 0 && dot && strcmp(dot, ".h5") == 0);
}

bool fc_h5_probe(const fc_probe *probe) {
    return file_has_signature(probe) || fc_keras_is_index(probe) || fc_keras_is_archive(probe);
}

bool fc_h5_has_signature(const char *path) {
    unsigned char head[512];
    fc_probe probe = {.path = path, .head = head, .head_size = sizeof head};
    return fc_read_head(path, head, &probe.head_size, NULL) == FC_OK && file_has_signature(&probe);
}

fc_code fc_h5_list_checkpoints(const char *directory, fc_listing *out, fc_error *err) {
    const bool found = fc_dir_find(directory, is_own_name, err);
    FC_TRY(err->code);
    return found ? fc_listing_add(out, "index.h5", "index.h5", FC_LISTED_OTHER, err) : FC_OK;
}

/* ---- opening ---- */

static bool is_named(const char *path, const char *name) {
    const char *slash = strrchr(path, '/');
    return strcmp(slash ? slash + 1 : path, name) == 0;
}

/* @return the directory of `path`, from `arena`; "." for a plain name. */
static const char *directory_of(fc_arena *arena, const char *path) {
    const char *slash = strrchr(path, '/');
    return !slash ? "." : slash == path ? "/" : fc_arena_strndup(arena, path, (size_t)(slash - path));
}

static fc_code open_any(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    bool is_directory;
    FC_TRY(fc_is_directory(checkpoint->path, &is_directory, err));
    if (is_directory) {
        return fc_h5_open_sharded(checkpoint, checkpoint->path, options, err);
    }
    unsigned char head[4096];
    fc_probe probe = {.path = checkpoint->path, .head = head, .head_size = sizeof head};
    FC_TRY(fc_read_head(checkpoint->path, head, &probe.head_size, err));
    if (fc_keras_is_index(&probe)) {
        return fc_keras_open_index(checkpoint, options, err);
    }
    if (fc_keras_is_archive(&probe)) {
        return fc_keras_open_archive(checkpoint, options, err);
    }
    if (is_named(checkpoint->path, "index.h5")) {
        const char *directory = directory_of(checkpoint->arena, checkpoint->path);
        return directory ? fc_h5_open_sharded(checkpoint, directory, options, err)
                         : fc_no_memory(err, checkpoint->path);
    }
    return fc_h5_open_full(checkpoint, options, err);
}

/*
 * If threads will read something through libhdf5, starts the process that starts readers for them, before there are
 * threads.
 */
static fc_code prepare_reading(fc_checkpoint *checkpoint, fc_error *err) {
    fc_h5_state *state = checkpoint->state;
    for (size_t i = 0; i < state->nstored; i++) {
        const fc_h5_dataset *d = state->stored[i].dataset;
        if (d->where == FC_H5_BY_LIBRARY && d->kind != FC_H5_UNREADABLE) {
            state->kept = fc_is_remote(checkpoint->path) ? fc_h5_kept_new() : NULL;
            fc_code rc = fc_h5_starter_start(&state->starter, fc_h5_make_box_job, checkpoint, err);
            return rc == FC_OK ? rc : fc_context(err, rc, "%s", checkpoint->path);
        }
    }
    return FC_OK;
}

static void free_server(void *server) {
    fc_h5_server_free(server);
}

/* @return the process of the session; NULL: each file has its own. */
static fc_h5_server *server_of(fc_session *session, const fc_format *format) {
    fc_session_part *part = session ? fc_session_part_of(session, format) : NULL;
    if (part && !part->state) {
        part->state = fc_h5_server_new(fc_session_plugins(session));
        part->release = free_server;
    }
    return part ? part->state : NULL;
}

/* Checks that only this user and root can change the folder of plugins. */
static fc_code check_plugins(const char *folder, fc_error *err) {
    char real[PATH_MAX];
    if (folder && !realpath(folder, real)) {
        return fc_fail_errno(err, errno, "%s", folder);
    }
    return folder ? fc_module_place_check(real, err) : FC_OK;
}

fc_code fc_h5_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_h5_state *state = fc_arena_calloc(checkpoint->arena, 1, sizeof *state);
    FC_NEED(state, err, checkpoint->path);
    state->follow_external = options->follow_external && !fc_is_remote(checkpoint->path);
    state->plugins = fc_session_plugins(options->session);
    FC_TRY(check_plugins(state->plugins, err));
    state->server = server_of(options->session, checkpoint->format);
    checkpoint->state = state;
    const fc_code rc = open_any(checkpoint, options, err);
    state->server = NULL;
    FC_TRY(rc);
    return prepare_reading(checkpoint, err);
}

void fc_h5_close(fc_checkpoint *checkpoint) {
    fc_h5_state *state = checkpoint->state; /* in the checkpoint's arena */
    fc_h5_starter_stop(&state->starter);
    fc_h5_kept_free(state->kept);
}

/* ---- extents ---- */

const fc_h5_stored *fc_h5_stored_of(const fc_checkpoint *checkpoint, const fc_chunk *chunk) {
    const fc_h5_state *state = checkpoint->state;
    return &state->stored[chunk->detail >> 32];
}

/* Sets how the bytes of a stored chunk are decoded: raw, or through the filters. */
static fc_code filtered_extent(const fc_h5_dataset *d, const fc_chunk *chunk, uint32_t mask, const char *path,
                               fc_extent *out, fc_error *err) {
    uint64_t whole = d->element, extra = 0, smallest = UINT64_MAX;
    bool any = false;
    for (int k = 0; k < d->ndim; k++) {
        if (!fc_mul_u64(whole, (uint64_t)d->chunk[k], &whole)) {
            whole = UINT64_MAX;
            break;
        }
    }
    for (uint32_t i = 0; i < d->nfilters; i++) {
        const fc_filter *filter = &d->filters[i];
        bool active = !(mask >> i & 1);
        any |= active;
        extra += active && filter->id == FC_FILTER_FLETCHER32 ? 4 : 0;
        if (active && fc_filter_compresses(filter)) {
            const uint32_t most = fc_filter_find(filter->id)->most_smaller;
            smallest = most ? whole / most : 0;
        }
        out->filters.items[i] = *filter;
    }
    /* Without compression the stored size is known. */
    if (whole > UINT32_MAX ||
        (smallest != UINT64_MAX ? smallest > chunk->place.length : chunk->place.length != whole + extra)) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: corrupt HDF5 file: dataset /%s: the chunk at offset %" PRIu64 " has %" PRIu64
                       " bytes, which cannot be a chunk of %" PRIu64 " bytes",
                       path, d->path, chunk->place.offset, chunk->place.length, whole);
    }
    out->codec = any ? FC_CODEC_FILTERED : FC_CODEC_RAW;
    out->filters.count = (uint8_t)d->nfilters;
    out->filters.mask = mask;
    out->decoded = whole;
    fc_row_major_strides(d->ndim, d->chunk, out->strides);
    return FC_OK;
}

static fc_code unreadable(const fc_tensor *tensor, const fc_h5_dataset *d, const char *path, fc_error *err) {
    if (d->where == FC_H5_ELSEWHERE && fc_is_remote(path)) {
        return fc_fail(err, d->code, "%s: dataset /%s: %s on a server: download all of the files first", path, d->path,
                       d->message);
    }
    const fc_hint hint = d->where == FC_H5_ELSEWHERE    ? FC_HINT_FOLLOW_EXTERNAL
                         : d->where == FC_H5_BY_LIBRARY ? FC_HINT_PLUGINS
                                                        : FC_HINT_EXCLUDE;
    return fc_advise(err, fc_fail(err, d->code, "%s: dataset /%s: %s", path, d->path, d->message), hint, tensor->name);
}

/* @return the row of the box to which a chunk belongs, in a checkpoint that was opened from tables. */
static uint64_t box_of(const fc_chunk *chunk) {
    return chunk->detail & FC_H5_COMPRESSED ? (chunk->detail & ~FC_H5_COMPRESSED) >> FC_H5_MASK_BITS : chunk->detail;
}

/* @return a dataset of the shard file, as its headers would describe it. */
static fc_h5_dataset listed_dataset(const fc_h5_state *state, const fc_tensor *tensor, const fc_chunk *chunk) {
    const fc_h5_grid_row *grid = &state->grids[state->boxes[box_of(chunk)].grid];
    fc_h5_dataset d = *(const fc_h5_dataset *)tensor->detail;
    d.chunk = state->dims + grid->dims;
    for (d.nfilters = 0; d.nfilters < sizeof grid->filters && grid->filters[d.nfilters]; d.nfilters++) {
        d.filters[d.nfilters] = (fc_filter){.id = grid->filters[d.nfilters]};
    }
    return d;
}

/*
 * For a checkpoint that was opened from tables: everything about a box was checked, except that its file is the one
 * that the tables describe.
 */
static fc_code listed_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_chunk *chunk,
                             fc_extent *out, fc_error *err) {
    FC_TRY(fc_h5_check_identity(checkpoint, chunk->place.file, err));
    *out = fc_raw_extent(&chunk->place);
    if (chunk->detail & FC_H5_COMPRESSED) {
        const fc_h5_dataset d = listed_dataset(checkpoint->state, tensor, chunk);
        const uint32_t mask = chunk->detail & ((1u << FC_H5_MASK_BITS) - 1);
        return filtered_extent(&d, chunk, mask, checkpoint->files[chunk->place.file].path, out, err);
    }
    fc_row_major_strides(tensor->ndim, chunk->dims + tensor->ndim, out->strides);
    return FC_OK;
}

fc_code fc_h5_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                     fc_error *err) {
    const fc_h5_state *state = checkpoint->state;
    const fc_chunk *chunk = &tensor->chunks[index];
    if (state->files) {
        return listed_extent(checkpoint, tensor, chunk, out, err);
    }
    const fc_h5_stored *stored = fc_h5_stored_of(checkpoint, chunk);
    const fc_h5_dataset *d = stored->dataset;
    const char *path = checkpoint->files[stored->file].path;
    const int64_t *sizes = chunk->dims + tensor->ndim;
    uint64_t bytes = d->element;
    if (d->kind == FC_H5_UNREADABLE) {
        return unreadable(tensor, d, path, err);
    }
    for (int k = 0; k < tensor->ndim; k++) {
        bytes *= (uint64_t)sizes[k]; /* at most the size of the dataset, which was checked */
    }
    *out = fc_raw_extent(&chunk->place);
    out->decoded = bytes;
    out->swap = d->swap;
    fc_row_major_strides(tensor->ndim, sizes, out->strides);
    switch (d->where) {
    case FC_H5_IN_CHUNKS:
    case FC_H5_NOWHERE:
    case FC_H5_IN_RECORD:
        if (d->where == FC_H5_IN_CHUNKS && chunk->place.kind == FC_PLACE_BYTES) {
            return filtered_extent(d, chunk, (uint32_t)chunk->detail, path, out, err);
        }
        if (d->where != FC_H5_IN_RECORD) { /* all elements are the fill value */
            memset(out->strides, 0, sizeof out->strides);
        }
        out->codec = FC_CODEC_INLINE;
        out->bytes = d->bytes.data;
        out->length = out->decoded = d->bytes.size;
        return FC_OK;
    case FC_H5_BY_LIBRARY:
        out->codec = FC_CODEC_FORMAT;
        out->length = bytes;
        return FC_OK;
    case FC_H5_ELSEWHERE:
        return fc_fail(err, FC_EUSAGE, "%s: dataset /%s: only the headers were opened", path, d->path);
    case FC_H5_AT_OFFSET:
        break;
    }
    return FC_OK;
}

/* ---- digests ---- */

static bool same_dataset(const fc_checkpoint *checkpoint, const fc_chunk *a, const fc_chunk *b) {
    const fc_h5_state *state = checkpoint->state;
    return state->boxes ? box_of(a) == box_of(b) : fc_h5_stored_of(checkpoint, a) == fc_h5_stored_of(checkpoint, b);
}

/* Finds the chunks of `tensor` in the same dataset as chunk `index`, which are adjacent. */
static void find_group(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out) {
    const fc_chunk *chunks = tensor->chunks;
    size_t first = index, end = index + 1;
    while (first > 0 && same_dataset(checkpoint, &chunks[first - 1], &chunks[index])) {
        first--;
    }
    while (end < tensor->nchunks && same_dataset(checkpoint, &chunks[end], &chunks[index])) {
        end++;
    }
    out->kind = FC_DIGEST_GROUP;
    out->first = first;
    out->count = end - first;
}

static void listed_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out) {
    const fc_h5_state *state = checkpoint->state;
    const fc_chunk *chunk = &tensor->chunks[index];
    out->kind = FC_DIGEST_CRC64;
    out->value = state->boxes[box_of(chunk)].crc64;
    if (chunk->detail & FC_H5_COMPRESSED) {
        find_group(checkpoint, tensor, index, out);
        out->offsets = state->box_dims[box_of(chunk)];
        out->sizes = out->offsets + tensor->ndim;
    }
}

fc_code fc_h5_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                     fc_error *err) {
    const bool whole = index == FC_WHOLE_TENSOR;
    const fc_h5_state *state = checkpoint->state;
    (void)err;
    if (!whole && state->boxes) {
        listed_digest(checkpoint, tensor, index, out);
        return FC_OK;
    }
    const fc_h5_stored *stored = whole ? NULL : fc_h5_stored_of(checkpoint, &tensor->chunks[index]);
    const fc_h5_dataset *d = whole ? tensor->detail : stored->dataset;
    if (!d->has_crc64 || d->kind == FC_H5_UNREADABLE) {
        return FC_OK;
    }
    out->kind = FC_DIGEST_CRC64;
    out->value = d->crc64;
    if (!whole && d->where == FC_H5_IN_CHUNKS) {
        find_group(checkpoint, tensor, index, out);
        out->offsets = stored->base;
        out->sizes = d->shape;
    }
    return FC_OK;
}

/* ---- objects ---- */

fc_code fc_h5_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                          fc_error *err) {
    const fc_h5_dataset *d = object->detail;
    const char *path = checkpoint->files[0].path;
    if (object->nchunks > 0) {
        path = checkpoint->files[object->chunks[0].place.file].path;
    }
    if (d->kind == FC_H5_UNREADABLE) {
        return unreadable(object, d, path, err);
    }
    const char *text = d->json;
    size_t len = text ? strlen(text) : 0;
    if (!text && d->where == FC_H5_IN_RECORD) { /* the bytes of strings and attributes are JSON text */
        text = (const char *)d->bytes.data;
        len = d->bytes.size;
    }
    if (!text || !fc_is_json(text, len)) {
        return fc_fail(err, FC_ECORRUPT, "%s: dataset /%s: the attribute json is missing or damaged", path, d->path);
    }
    *json = fc_arena_strndup(arena, text, len);
    return *json ? FC_OK : fc_no_memory(err, path);
}
