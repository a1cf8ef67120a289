/*
 * Flax's msgpack files (flax.serialization.to_bytes): one file, or several with an index, as save_pretrained of
 * transformers wrote them. They are read, not written.
 */
#include "fsdpckpt/format.h"

#include "base/file_name.h"
#include "base/name_table.h"
#include "checkpoint/folder.h"
#include "checkpoint/identity.h"
#include "checkpoint/path.h"
#include "checkpoint/same_name.h"
#include "flax/walk.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "registry.h"
#include "safetensors/files.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char index_end[] = ".msgpack.index.json";

/* A dict of msgpack with at least one member, whose first key is a text. */
static bool is_dict(const unsigned char *head, size_t size) {
    const size_t key = size == 0                           ? 0
                       : head[0] == 0xde                   ? 3
                       : head[0] == 0xdf                   ? 5
                       : head[0] > 0x80 && head[0] <= 0x8f ? 1
                                                           : 0;
    if (key == 0 || size < key + 3) {
        return false;
    }
    const bool is_short = head[key] > 0xa0 && head[key] <= 0xbf, is_long = head[key] == 0xd9;
    const size_t text = key + 1 + (is_long ? 1 : 0), length = is_long ? head[key + 1] : head[key] & 0x1f;
    for (size_t i = 0; i < length; i++) {
        if (text + i >= size || head[text + i] < ' ' || head[text + i] == 0x7f) {
            return false;
        }
    }
    return is_short || (is_long && length > 0);
}

static bool flax_probe(const fc_probe *probe) {
    return fc_ends_with(probe->path, index_end) || fc_ends_with(probe->path, ".msgpack") ||
           is_dict(probe->head, probe->head_size);
}

/* What save_pretrained of transformers and diffusers wrote. */
static fc_code flax_list(const char *directory, fc_listing *out, fc_error *err) {
    static const char *const names[] = {"flax_model.msgpack.index.json", "flax_model.msgpack",
                                        "diffusion_flax_model.msgpack"};
    char path[PATH_MAX];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct stat st;
        const bool found = snprintf(path, sizeof path, "%s/%s", directory, names[i]) < PATH_MAX &&
                           fc_path_exists(path, &st, err) && S_ISREG(st.st_mode);
        FC_TRY(err->code);
        FC_TRY(found ? fc_listing_add(out, names[i], names[i], FC_LISTED_COPY, err) : FC_OK);
    }
    return FC_OK;
}

/* Reads the headers of a file. The values are in w->tensors. */
static fc_code walk_file(fc_flax_walk *w) {
    int fd;
    FC_TRY(fc_open_input(w->r.path, &fd, &w->r.end, w->err));
    w->r.fd = fd;
    fc_code rc = fc_flax_walk_file(w);
    close(fd);
    return rc;
}

static fc_code check_unique(const fc_checkpoint *checkpoint, fc_error *err) {
    const char *twice = NULL;
    FC_TRY(fc_find_same_name(checkpoint->tensors, checkpoint->ntensors, &twice, err));
    return twice ? fc_fail(err, FC_ECORRUPT, "%s: two values have the name %.256s", checkpoint->path, twice) : FC_OK;
}

/* Reads all files, in order. */
static fc_code read_files(fc_checkpoint *checkpoint, size_t nfiles, const fc_open_options *options, fc_error *err) {
    fc_flax_walk w = {.arena = checkpoint->arena, .err = err};
    fc_progress_begin(options->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, nfiles);
    for (size_t f = 0; f < nfiles; f++) {
        w.file = (uint32_t)f;
        w.r = (fc_mp_reader){.path = checkpoint->files[f].path};
        FC_TRY(walk_file(&w));
        FC_TRY(fc_progress_count(options->progress, 1, err));
    }
    checkpoint->tensors = w.tensors;
    checkpoint->ntensors = w.count;
    return check_unique(checkpoint, err);
}

/* ---- an index ---- */

/* Checks that every value is in the file that the index names. It joins keys with slashes. */
static fc_code check_map(const fc_checkpoint *checkpoint, const fc_st_files *files, fc_error *err) {
    fc_name_table *names = fc_name_table_new(checkpoint->arena, checkpoint->ntensors + 1);
    FC_NEED(names, err, checkpoint->path);
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        const char *name = fc_path_spell(checkpoint->arena, &t->path, '/');
        const size_t file = t->nchunks > 0 ? t->chunks[0].place.file : files->nfiles;
        FC_NEED(name && fc_name_table_put(names, name, strlen(name), file) != FC_NO_NAME, err, checkpoint->path);
    }
    for (size_t i = 0; i < files->nmap; i++) {
        const fc_st_mapped *m = &files->map[i];
        const size_t file = fc_name_table_find(names, m->name, strlen(m->name));
        if (file != m->file && file != files->nfiles) { /* an array without elements is in no file */
            return fc_fail(err, FC_ECORRUPT, "%s: %.256s: the index says that it is in %s, but it is not",
                           files->index->path, m->name, files->files[m->file].name);
        }
    }
    return FC_OK;
}

static fc_code open_index(fc_checkpoint *checkpoint, const char *path, const fc_open_options *options, fc_error *err) {
    const char *name = fc_base_name(path);
    fc_st_files files = {0};
    files.directory = name == path ? "." : fc_arena_strndup(checkpoint->arena, path, (size_t)(name - path));
    FC_NEED(files.directory, err, path);
    fc_code rc;
    FC_TRY_GOTO(fc_identities_add_header(checkpoint, path, options, err), rc, out);
    FC_TRY_GOTO(fc_st_index_read(checkpoint->arena, path, &files, err), rc, out);
    if (!options->follow_external) {
        FC_TRY_GOTO(fc_check_links(files.directory, files.files, files.nfiles, err), rc, out);
    }
    checkpoint->files = files.files;
    checkpoint->nfiles = files.nfiles;
    FC_TRY_GOTO(fc_identities_take(checkpoint, options, err), rc, out);
    FC_TRY_GOTO(read_files(checkpoint, files.nfiles, options, err), rc, out);
    FC_TRY_GOTO(check_map(checkpoint, &files, err), rc, out);
    checkpoint->nfiles++; /* the index */
out:
    fc_st_files_free(&files);
    return rc;
}

/* ---- the format ---- */

static fc_code open_file(fc_checkpoint *checkpoint, const char *path, const fc_open_options *options, fc_error *err) {
    fc_file *file = fc_arena_calloc(checkpoint->arena, 1, sizeof *file);
    FC_NEED(file, err, path);
    *file = (fc_file){path, fc_base_name(path)};
    checkpoint->files = file;
    checkpoint->nfiles = 1;
    FC_TRY(fc_identities_take(checkpoint, options, err));
    return read_files(checkpoint, 1, options, err);
}

static fc_code flax_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    const char *path = checkpoint->path;
    bool is_directory;
    FC_TRY(fc_is_directory(path, &is_directory, err));
    if (is_directory) {
        path = checkpoint->group ? fc_arena_printf(checkpoint->arena, "%s/%s", path, checkpoint->group) : NULL;
        FC_NEED(path, err, checkpoint->path);
    }
    checkpoint->producer = "Flax";
    return fc_ends_with(path, index_end) ? open_index(checkpoint, path, options, err)
                                         : open_file(checkpoint, path, options, err);
}

static fc_code flax_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    fc_flax_walk w = {.arena = fc_arena_new(), .err = err};
    FC_NEED(w.arena, err, checkpoint->path);
    w.r = (fc_mp_reader){.path = checkpoint->files[index].path};
    fc_code rc = walk_file(&w);
    fc_arena_free(w.arena);
    return rc;
}

static fc_code flax_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                           fc_error *err) {
    const fc_chunk *chunk = &tensor->chunks[index];
    const fc_flax_object *object = tensor->object ? tensor->detail : NULL;
    *out = (fc_extent){.codec = FC_CODEC_RAW, .file = chunk->place.file};
    if (object) {
        *out = (fc_extent){.codec = FC_CODEC_INLINE, .bytes = (const unsigned char *)object->text};
        out->length = out->decoded = object->size;
        out->strides[0] = 1;
        return FC_OK;
    }
    out->offset = chunk->place.offset;
    out->length = out->decoded = chunk->place.length;
    return fc_row_major_strides(tensor->ndim, chunk->dims + tensor->ndim, out->strides)
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: it is too large", checkpoint->path, tensor->name);
}

static fc_code flax_object_json(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_arena *arena,
                                const char **json, fc_error *err) {
    const fc_flax_object *object = tensor->detail;
    (void)checkpoint;
    (void)arena;
    (void)err;
    *json = object->text; /* in the arena of the checkpoint */
    return FC_OK;
}

const fc_format fc_format_flax = {
    .name = "flax",
    .description = "Flax (msgpack)",
    .extensions = (const char *const[]){NULL},
    .file_sign = "Flax msgpack",
    .directory_sign = "flax_model.msgpack or its .index.json (Flax)",
    .reader =
        {
            .probe = flax_probe,
            .list = flax_list,
            .open = flax_open,
            .check_header = flax_check_header,
            .extent = flax_extent,
            .object_json = flax_object_json,
        },
    .verifier = {.unverified = "everything, because Flax records no digests"},
};
