/*
 * Reads a seal: the JSON file next to a checkpoint with the digests of its files and tensors. Like the checkpoint, the
 * seal may be hostile. Its contents are only compared, and never decide what is read.
 */
#include "checkpoint/seal.h"
#include "fsdpckpt/seal.h"

#include "checkpoint/same_name.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "net/remote.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_BYTES = 256 << 20, CRC_DIGITS = 16 };

/* Removes the name of a file that stands for its directory ("ckpt/.metadata", "ckpt/index.h5"). */
static void to_directory(const fc_checkpoint *checkpoint, char *path) {
    char *slash = strrchr(path, '/');
    const char *header = checkpoint->format->header_name;
    if (slash && slash != path && (strcmp(slash + 1, "index.h5") == 0 || (header && strcmp(slash + 1, header) == 0))) {
        *slash = '\0';
    }
}

static fc_code seal_path(const fc_checkpoint *checkpoint, fc_arena *arena, const char **path, fc_error *err) {
    char real[PATH_MAX];
    if (!fc_realpath(checkpoint->path, real)) {
        return fc_fail_errno(err, errno, "%s", checkpoint->path);
    }
    to_directory(checkpoint, real);
    *path = fc_arena_printf(arena, "%s" FC_SEAL_SUFFIX, real);
    return *path ? FC_OK : fc_no_memory(err, checkpoint->path);
}

/* Names the header file, which is not among checkpoint->files; it is in the checkpoint's directory. */
static fc_code name_header(const fc_checkpoint *checkpoint, fc_arena *arena, fc_sealed_file *file, fc_error *err) {
    char real[PATH_MAX];
    if (!fc_realpath(checkpoint->path, real)) {
        return fc_fail_errno(err, errno, "%s", checkpoint->path);
    }
    to_directory(checkpoint, real);
    file->name = checkpoint->format->header_name;
    file->path = fc_arena_printf(arena, "%s/%s", real, file->name);
    return file->path ? FC_OK : fc_no_memory(err, checkpoint->path);
}

fc_code fc_seal_new(const fc_checkpoint *checkpoint, fc_arena *arena, fc_seal *out, fc_error *err) {
    const size_t header = checkpoint->format->header_name != NULL;
    memset(out, 0, sizeof *out);
    out->nfiles = checkpoint->nfiles + header;
    out->files = fc_arena_calloc(arena, out->nfiles + 1, sizeof *out->files);
    out->crc64 = fc_arena_calloc(arena, checkpoint->ntensors + 1, sizeof *out->crc64);
    out->has = fc_arena_calloc(arena, checkpoint->ntensors + 1, sizeof *out->has);
    FC_NEED(out->files && out->crc64 && out->has, err, checkpoint->path);
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        out->files[i].name = checkpoint->files[i].name;
        out->files[i].path = checkpoint->files[i].path;
    }
    FC_TRY(seal_path(checkpoint, arena, &out->path, err));
    return header ? name_header(checkpoint, arena, &out->files[checkpoint->nfiles], err) : FC_OK;
}

/* ---- reading ---- */

static bool read_crc(const json_t *entry, uint64_t *crc) {
    const char *text = json_string_value(json_object_get(entry, "crc64"));
    char *end;
    if (!text || strlen(text) != CRC_DIGITS || strspn(text, "0123456789abcdef") != CRC_DIGITS) {
        return false;
    }
    *crc = strtoull(text, &end, 16);
    return true;
}

static bool read_files(const json_t *list, fc_seal *seal) {
    size_t found = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        const char *name = json_string_value(json_object_get(entry, "name"));
        const json_t *bytes = json_object_get(entry, "bytes");
        for (size_t k = 0; name && k < seal->nfiles; k++) {
            fc_sealed_file *file = &seal->files[(i + k) % seal->nfiles]; /* usually the order is the same */
            if (strcmp(file->name, name) == 0) {
                file->bytes = (uint64_t)json_integer_value(bytes);
                found += read_crc(entry, &file->crc64);
                break;
            }
        }
    }
    return found == seal->nfiles && json_array_size(list) == found;
}

static bool same_shape(const json_t *shape, const fc_tensor *t) {
    bool same = json_is_array(shape) && json_array_size(shape) == (size_t)t->ndim;
    for (int d = 0; same && d < t->ndim; d++) {
        same = json_integer_value(json_array_get(shape, (size_t)d)) == t->shape[d];
    }
    return same;
}

static bool read_tensor(const fc_checkpoint *checkpoint, const json_t *entry, const fc_name_table *names, fc_seal *seal,
                        fc_arena *arena) {
    const char *name = json_string_value(json_object_get(entry, "name"));
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    uint64_t crc;
    if (!name || !dtype || !read_crc(entry, &crc)) {
        return false;
    }
    const size_t at = fc_name_table_find(names, name, strlen(name));
    if (at == FC_NO_NAME || strcmp(fc_dtype_get(checkpoint->tensors[at].dtype)->torch_name, dtype) != 0 ||
        !same_shape(json_object_get(entry, "shape"), &checkpoint->tensors[at])) {
        if (seal->missing++ == 0) {
            seal->missed = fc_arena_strndup(arena, name, strlen(name));
        }
        return true;
    }
    seal->crc64[at] = crc;
    seal->has[at] = true;
    return true;
}

/* `*no_memory` receives whether memory was missing. */
static bool read_tensors(const fc_checkpoint *checkpoint, const json_t *list, fc_seal *seal, bool *no_memory) {
    fc_arena *scratch = fc_arena_new();
    const fc_name_table *names = scratch ? fc_names_of(checkpoint, scratch) : NULL;
    bool ok = names != NULL && json_is_array(list);
    *no_memory = !names;
    for (size_t i = 0; ok && i < json_array_size(list); i++) {
        ok = read_tensor(checkpoint, json_array_get(list, i), names, seal, checkpoint->arena);
    }
    fc_arena_free(scratch);
    return ok;
}

/* Earlier builds wrote "version" instead of "schema". */
static json_int_t seal_version(const json_t *root) {
    const json_t *version = json_object_get(root, "schema");
    return json_integer_value(version ? version : json_object_get(root, "version"));
}

static fc_code parse(fc_checkpoint *checkpoint, fc_seal *seal, const char *text, size_t size, fc_error *err) {
    json_error_t mistake;
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &mistake);
    const char *kind = json_string_value(json_object_get(root, "fsdpckpt"));
    fc_code rc = FC_OK;
    bool no_memory = false;
    if (!root) {
        rc = fc_fail(err, FC_ECORRUPT, "%s: line %d: damaged seal: %s; remove it, or seal the checkpoint again",
                     seal->path, mistake.line, mistake.text);
    } else if (!kind || strcmp(kind, "seal") != 0 || seal_version(root) != 1) {
        rc = fc_fail(err, FC_ECORRUPT, "%s: not a seal of version 1; remove it, or seal the checkpoint again",
                     seal->path);
    } else if (!read_files(json_object_get(root, "files"), seal) ||
               !read_tensors(checkpoint, json_object_get(root, "tensors"), seal, &no_memory)) {
        rc = no_memory
                 ? fc_no_memory(err, seal->path)
                 : fc_fail(err, FC_ECORRUPT,
                           "%s: damaged, or the seal of another checkpoint: its files are not those of %s; remove it, "
                           "or seal the checkpoint again",
                           seal->path, checkpoint->path);
    }
    json_decref(root);
    return rc;
}

/* Whether there is a seal. A server may refuse access to what is not there, or say that it has everything. */
static fc_code find_seal(const fc_checkpoint *checkpoint, const char *path, bool *found, fc_error *err) {
    struct stat st;
    *found = false;
    if (fc_is_remote(path)) {
        fc_remote_info info;
        *found = !fc_remote_is_root(checkpoint->path) && fc_remote_stat(path, false, &info, NULL) == FC_OK &&
                 info.found && !info.is_folder && info.size <= MOST_BYTES;
        return FC_OK;
    }
    if (stat(path, &st) != 0) {
        return errno == ENOENT ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be examined", path);
    }
    if (S_ISREG(st.st_mode) && st.st_size > MOST_BYTES) {
        return fc_fail(err, FC_ECORRUPT, "%s: too large for a seal; remove it, or seal the checkpoint again", path);
    }
    *found = S_ISREG(st.st_mode);
    return FC_OK;
}

fc_code fc_seal_load(fc_checkpoint *checkpoint, fc_error *err) {
    const char *path;
    char *text = NULL;
    size_t size;
    bool found;
    FC_TRY(seal_path(checkpoint, checkpoint->arena, &path, err));
    FC_TRY(find_seal(checkpoint, path, &found, err));
    if (!found) {
        return FC_OK;
    }
    fc_seal *seal = fc_arena_calloc(checkpoint->arena, 1, sizeof *seal);
    FC_TRY(seal ? fc_seal_new(checkpoint, checkpoint->arena, seal, err) : fc_no_memory(err, checkpoint->path));
    FC_TRY(fc_read_whole(path, "a seal", MOST_BYTES, &text, &size, err));
    fc_code rc = parse(checkpoint, seal, text, size, err);
    free(text);
    checkpoint->seal = rc == FC_OK ? seal : NULL;
    return rc;
}

void fc_seal_forget(const char *path) {
    char real[PATH_MAX + sizeof FC_SEAL_SUFFIX];
    if (fc_realpath(path, real)) {
        strcat(real, FC_SEAL_SUFFIX);
        (void)unlink(real);
    }
}
