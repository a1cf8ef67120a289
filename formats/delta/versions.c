/*
 * Finds versions, and reads their indexes and headers. See versions.h.
 */
#include "delta/versions.h"

#include "base/checked.h"
#include "base/grow.h"
#include "delta/checksum.h"
#include "delta/version.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "safetensors/files.h"
#include "safetensors/header.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* ---- the index ---- */

/* Reads a number that is a text of digits, such as "000007". */
static fc_code read_version_number(const char *path, const json_t *metadata, const char *key, int64_t *out,
                                   fc_error *err) {
    const char *text = json_string_value(json_object_get(metadata, key));
    const size_t digits = text ? strspn(text, "0123456789") : 0;
    *out = digits > 0 && digits <= 9 && text[digits] == '\0' ? strtoll(text, NULL, 10) : -1;
    return *out >= 0 ? FC_OK
                     : fc_fail(err, FC_ECORRUPT,
                               "%s: the %s of the delta is missing, or is not a text of up to 9 digits", path, key);
}

static fc_code unknown_value(const char *path, const char *key, const char *value, fc_error *err) {
    return value ? fc_fail(err, FC_EUNSUPPORTED, "%s: the %s %.32s is unknown", path, key, value)
                 : fc_fail(err, FC_ECORRUPT, "%s: the %s of the delta is missing", path, key);
}

static fc_code read_delta_metadata(const char *path, const json_t *metadata, fc_delta_version *v, fc_error *err) {
    const char *encoding = json_string_value(json_object_get(metadata, DELTA_ENCODING));
    const char *compression = json_string_value(json_object_get(metadata, DELTA_COMPRESSION));
    const char *checksum = json_string_value(json_object_get(metadata, DELTA_CHECKSUM));
    int64_t number;
    FC_TRY(read_version_number(path, metadata, DELTA_VERSION, &number, err));
    FC_TRY(read_version_number(path, metadata, DELTA_BASE, &v->base, err));
    if (v->number != FC_DELTA_NO_NUMBER && v->number != number) {
        return fc_fail(err, FC_ECORRUPT, "%s: the index says version %" PRId64 ", but the folder is version %" PRId64,
                       path, number, v->number);
    }
    v->number = number;
    if (v->base >= number) {
        return fc_fail(err, FC_ECORRUPT, "%s: version %" PRId64 " cannot change version %" PRId64 ": a base is earlier",
                       path, number, v->base);
    }
    if (!encoding || !fc_delta_encoding_find(encoding, &v->encoding)) {
        return unknown_value(path, DELTA_ENCODING, encoding, err);
    }
    if (!compression || strcmp(compression, DELTA_ZSTD) != 0) {
        return unknown_value(path, DELTA_COMPRESSION, compression, err);
    }
    if (!checksum || !fc_delta_checksum_find(checksum, &v->checksum)) {
        return unknown_value(path, DELTA_CHECKSUM, checksum, err);
    }
    return FC_OK;
}

static fc_code read_delta_index(fc_arena *arena, const fc_delta_version *v, fc_st_files *files, fc_error *err) {
    const char *path = fc_arena_printf(arena, "%s/" ST_INDEX_NAME, v->path);
    *files = (fc_st_files){.directory = v->path, .may_be_empty = true};
    FC_NEED(path, err, v->path);
    return fc_st_index_read(arena, path, files, err);
}

/* A version without an index is a checkpoint of one file. */
static fc_code read_kind(fc_arena *arena, fc_delta_version *v, fc_error *err) {
    char path[PATH_MAX];
    fc_error missing = {FC_OK};
    fc_st_files files = {0};
    json_t *metadata = NULL;
    fc_code rc = FC_OK;
    if (!fc_find_in(v->path, ST_INDEX_NAME, path, &missing)) {
        if (missing.code != FC_OK && err) {
            *err = missing;
        }
        return missing.code != FC_OK || fc_find_in(v->path, "model" ST_EXTENSION, path, &missing)
                   ? missing.code
                   : fc_fail(err, FC_ECORRUPT,
                             "%s: the version has neither " ST_INDEX_NAME " nor model" ST_EXTENSION
                             ": it is being written, or incomplete",
                             v->path);
    }
    FC_TRY_GOTO(read_delta_index(arena, v, &files, err), rc, out);
    if (files.index_metadata) {
        metadata = json_loads(files.index_metadata, 0, NULL);
        FC_TRY_GOTO(metadata ? FC_OK : fc_no_memory(err, path), rc, out);
    }
    if (json_object_get(metadata, DELTA_ENCODING) || json_object_get(metadata, DELTA_BASE)) {
        rc = read_delta_metadata(path, metadata, v, err);
    } else if (files.nmap == 0) {
        rc = fc_fail(err, FC_ECORRUPT, "%s: the weight_map is empty", path);
    }
out:
    json_decref(metadata);
    fc_st_files_free(&files);
    return rc;
}

fc_code fc_delta_version_open(fc_arena *arena, const char *path, fc_delta_version *out, fc_error *err) {
    bool is_folder;
    *out = (fc_delta_version){.number = fc_delta_number_of(path),
                              .path = fc_arena_strndup(arena, path, strlen(path)),
                              .base = FC_DELTA_NO_NUMBER};
    FC_NEED(out->path, err, path);
    FC_TRY(fc_is_directory(path, &is_folder, err));
    if (!is_folder) {
        return fc_fail(err, FC_EUSAGE, "%s: this is not the folder of a version", path);
    }
    const fc_code rc = read_kind(arena, out, err);
    if (rc != FC_OK) {
        out->base = FC_DELTA_NO_NUMBER; /* it may be any number, and those who go back over the bases rely on it */
        return rc;
    }
    return out->number != FC_DELTA_NO_NUMBER
               ? FC_OK
               : fc_fail(err, FC_EUSAGE,
                         "%s: neither its name, such as " DELTA_FOLDER "000007, nor an index says which "
                         "version this is",
                         path);
}

/* ---- the directory ---- */

static int order_versions(const void *a, const void *b) {
    const fc_delta_version *x = a, *y = b;
    FC_ORDER_BY(x->number, y->number);
    return strcmp(x->path, y->path);
}

bool fc_delta_is_failure(fc_code rc) {
    return rc == FC_ENOMEM || rc == FC_EIO || rc == FC_EINTERRUPTED;
}

fc_code fc_delta_keep_damage(const fc_delta_damage *damage, fc_delta_version *v, fc_code rc, fc_error *err) {
    if (rc == FC_OK || !damage || fc_delta_is_failure(rc)) {
        return rc;
    }
    v->damaged = true;
    damage->report(damage->context, v, err);
    return FC_OK;
}

static fc_code add_version(fc_arena *arena, const char *name, const fc_delta_damage *damage, fc_delta_versions *v,
                           size_t *capacity, fc_error *err) {
    if (fc_delta_number_of(name) == FC_DELTA_NO_NUMBER) {
        return FC_OK;
    }
    const char *path = fc_arena_printf(arena, "%s/%s", v->path, name);
    FC_NEED(path && fc_arena_grow(arena, &v->versions, capacity, v->count, v->count + 1, sizeof *v->versions), err,
            v->path);
    fc_delta_version *added = &v->versions[v->count++];
    const fc_code rc = fc_delta_version_open(arena, path, added, err);
    added->number = fc_delta_number_of(name); /* whatever its index says */
    return fc_delta_keep_damage(damage, added, rc, err);
}

/* Two folders may have one number: weight_v000001 and weight_v0000001. */
static fc_code drop_same_number(const fc_delta_damage *damage, fc_delta_versions *v, fc_error *err) {
    size_t count = v->count > 0;
    for (size_t i = 1; i < v->count; i++) {
        fc_delta_version *kept = &v->versions[count - 1], *other = &v->versions[i];
        if (kept->number != other->number) {
            v->versions[count++] = *other;
            continue;
        }
        const fc_code rc = fc_fail(err, FC_ECORRUPT, "%s: version %" PRId64 " is there twice, as %s and as %s", v->path,
                                   kept->number, strrchr(kept->path, '/') + 1, strrchr(other->path, '/') + 1);
        FC_TRY(fc_delta_keep_damage(damage, other, rc, err));
    }
    v->count = count;
    return FC_OK;
}

fc_code fc_delta_versions_list(fc_arena *arena, const char *path, const fc_delta_damage *damage, fc_delta_versions *out,
                               fc_error *err) {
    size_t capacity = 0;
    fc_dir dir;
    *out = (fc_delta_versions){.path = path};
    fc_code rc = fc_dir_open(&dir, path, err);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        rc = add_version(arena, name, damage, out, &capacity, err);
    }
    FC_TRY(fc_dir_close(&dir, rc, err));
    if (out->count == 0) {
        return fc_fail(err, FC_ECORRUPT, "%s: there are no versions, which are folders named " DELTA_FOLDER "000001",
                       path);
    }
    fc_sort_items(out->versions, out->count, sizeof *out->versions, order_versions);
    return drop_same_number(damage, out, err);
}

fc_delta_version *fc_delta_versions_find(const fc_delta_versions *versions, int64_t number) {
    size_t low = 0;
    FC_BISECT(low, versions->count, i, versions->versions[i].number < number)
    return low < versions->count && versions->versions[low].number == number ? &versions->versions[low] : NULL;
}

static void reverse_versions(fc_delta_version **list, size_t count) {
    for (size_t i = 0; i < count / 2; i++) {
        fc_delta_version *swapped = list[i];
        list[i] = list[count - 1 - i];
        list[count - 1 - i] = swapped;
    }
}

size_t fc_delta_walk_back(const fc_delta_versions *versions, fc_delta_version *last, fc_delta_version **chain,
                          fc_delta_version **end) {
    size_t count = 0;
    fc_delta_version *v = last;
    for (; v && v->base != FC_DELTA_NO_NUMBER; v = fc_delta_versions_find(versions, v->base)) {
        chain[count++] = v;
    }
    reverse_versions(chain, count);
    *end = v;
    return count;
}

const fc_delta_version *fc_delta_next_fork(const fc_delta_versions *versions, fc_delta_version *const *chain,
                                           size_t count, size_t *at) {
    size_t member = 0;
    for (; *at < versions->count; ++*at) {
        const fc_delta_version *v = &versions->versions[*at];
        while (member + 1 < count && chain[member]->number < v->number) {
            member++;
        }
        if (v->number > chain[0]->base && v->number < chain[count - 1]->number && chain[member]->number != v->number) {
            ++*at;
            return v;
        }
    }
    return NULL;
}

bool fc_delta_is_gap(const fc_delta_versions *versions, const fc_delta_version *first) {
    return versions->versions[0].number < first->base;
}

fc_code fc_delta_versions_chain(fc_arena *arena, const fc_delta_versions *versions, int64_t from, int64_t wanted,
                                fc_delta_version ***chain, size_t *count, fc_error *err) {
    fc_delta_version **list = *chain = fc_arena_calloc(arena, versions->count + 1, sizeof(fc_delta_version *));
    int64_t at = wanted, above = FC_DELTA_NO_NUMBER;
    *count = 0;
    FC_NEED(list, err, versions->path);
    while (at > from) {
        fc_delta_version *v = fc_delta_versions_find(versions, at);
        if (!v && above == FC_DELTA_NO_NUMBER) {
            return fc_fail(err, FC_ECORRUPT, "%s: there is no version %" PRId64, versions->path, at);
        }
        if (!v) {
            return fc_fail(err, FC_ECORRUPT,
                           "%s: version %" PRId64 " changes version %" PRId64 ", which is not there: publish it, or "
                           "a full version above it",
                           versions->path, above, at);
        }
        list[(*count)++] = v;
        above = at;
        at = v->base;
        if (at == FC_DELTA_NO_NUMBER) {
            break;
        }
    }
    if (at != from && at != FC_DELTA_NO_NUMBER) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: version %" PRId64 " changes version %" PRId64 ", not version %" PRId64
                       ": the versions fork there, or the model is that of another run",
                       versions->path, above, at, from);
    }
    reverse_versions(list, *count);
    return FC_OK;
}

/* ---- the files of a delta ---- */

static fc_code read_frame_entry(const fc_file *file, const fc_st_header *header, const fc_st_entry *e,
                                fc_delta_tensor *out, fc_error *err) {
    *out = (fc_delta_tensor){.name = e->name,
                             .path = file->path,
                             .offset = header->data + e->begin,
                             .size = e->end - e->begin,
                             .checksum = fc_st_header_value(header, e->name)};
    if (e->dtype != FC_U8 || e->ndim != 1) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: the frame of a delta is one-dimensional and of dtype U8",
                       file->path, e->name);
    }
    return out->checksum ? FC_OK
                         : fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: __metadata__ has no checksum of it",
                                   file->path, e->name);
}

/* Adds the tensors of one file. The arena keeps their names and checksums. */
static fc_code read_delta_file(fc_arena *arena, const fc_st_files *files, uint32_t index, fc_delta_tensor *tensors,
                               fc_delta_version *v, fc_error *err) {
    const fc_file *file = &files->files[index];
    fc_st_header header;
    fc_code rc;
    FC_TRY_GOTO(fc_st_header_read(arena, file->path, false, &header, err), rc, out);
    for (size_t i = 0; i < header.nentries; i++) {
        const fc_st_entry *e = &header.entries[i];
        const fc_st_mapped *mapped = fc_find_struct(files->map, files->nmap, sizeof *files->map, e->name);
        if (!mapped || mapped->file != index || v->ntensors == files->nmap) {
            rc = fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: the index does not say that this file has it",
                         file->path, e->name);
            goto out;
        }
        FC_TRY_GOTO(read_frame_entry(file, &header, e, &tensors[v->ntensors], err), rc, out);
        v->stored_bytes += tensors[v->ntensors++].size; /* within a file */
    }
out:
    fc_st_header_free(&header);
    return rc;
}

/* Other programs read all files of a version, so one that the index leaves out must not be skipped in silence. */
static fc_code check_no_others(const fc_delta_version *v, const fc_st_files *files, fc_error *err) {
    fc_dir dir;
    fc_code rc = fc_dir_open(&dir, v->path, err);
    for (const char *name; rc == FC_OK && (name = fc_dir_next(&dir)) != NULL;) {
        bool known = fnmatch("*" ST_EXTENSION, name, FNM_PERIOD) != 0;
        for (size_t i = 0; !known && i < files->nfiles; i++) {
            known = strcmp(files->files[i].name, name) == 0;
        }
        if (!known) {
            rc = fc_fail(err, FC_ECORRUPT, "%s/%.256s: the index of the delta does not name this file", v->path, name);
        }
    }
    return fc_dir_close(&dir, rc, err);
}

fc_code fc_delta_version_read(fc_arena *arena, fc_delta_version *v, fc_error *err) {
    fc_st_files files;
    fc_delta_tensor *tensors;
    fc_code rc;
    FC_TRY_GOTO(read_delta_index(arena, v, &files, err), rc, out);
    tensors = fc_arena_calloc(arena, files.nmap + 1, sizeof *tensors);
    FC_TRY_GOTO(tensors ? FC_OK : fc_no_memory(err, v->path), rc, out);
    FC_TRY_GOTO(check_no_others(v, &files, err), rc, out);
    v->tensors = tensors;
    v->nfiles = files.nfiles;
    v->ntensors = 0;
    v->stored_bytes = 0;
    for (uint32_t i = 0; i < files.nfiles; i++) {
        FC_TRY_GOTO(read_delta_file(arena, &files, i, tensors, v, err), rc, out);
    }
    if (v->ntensors != files.nmap) {
        rc = fc_fail(err, FC_ECORRUPT, "%s: the index maps %zu tensors, but the files have %zu of them", v->path,
                     files.nmap, v->ntensors);
        goto out;
    }
    fc_sort_items(tensors, v->ntensors, sizeof *tensors, fc_order_texts);
out:
    fc_st_files_free(&files);
    return rc;
}
