/*
 * Builds the header of a target file. Tensors are ordered as in the reference implementation: by dtype, wider ones
 * first, which aligns them all, then by name. kept.h lists the members of `__metadata__`.
 */
#include "safetensors/header_out.h"

#include "base/base64.h"
#include "base/checked.h"
#include "base/little.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"
#include "safetensors/dtypes.h"
#include "safetensors/header.h"
#include "safetensors/header_digest.h"
#include "safetensors/kept.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The reference implementation aligns the data to 8 bytes. Large data starts at a page boundary instead: then it can
   bypass the page cache, and mapped tensors are aligned. */
enum { ALIGNMENT = 8, PAGE = 4096, MUCH = 1 << 20 };

/* The header while it is built. */
typedef struct header_builder {
    const fc_st_common *common;
    const fc_target *target;
    fc_target_file *file;
    fc_st_header_out *out;
    json_t *metadata;
    FILE *stream; /* writes to out->text */
    fc_error *err;
} header_builder;

void fc_st_header_out_free(fc_st_header_out *header) {
    free(header->text);
    free(header->order);
    *header = (fc_st_header_out){0};
}

static const fc_target_tensor *tensor_of(const header_builder *m, const fc_target_item *item) {
    return &m->target->tensors[item->tensor];
}

/* ---- __metadata__ ---- */

static fc_code out_of_memory(const header_builder *m) {
    return fc_no_memory(m->err, m->target->source->path);
}

/* Sets a member of `__metadata__`; takes ownership of `value`, which may be NULL. */
static fc_code set_text(const header_builder *m, const char *key, json_t *value) {
    return value && json_object_set_new(m->metadata, key, value) == 0 ? FC_OK : out_of_memory(m);
}

/* Like set_text, with the text of a JSON value. */
static fc_code set_json(const header_builder *m, const char *key, json_t *value) {
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    json_decref(value);
    fc_code rc = set_text(m, key, text ? json_string(text) : NULL);
    free(text);
    return rc;
}

/* Takes ownership of `value`. When out of memory, `*list` becomes NULL and stays NULL. */
static void append(json_t **list, json_t *value) {
    if (!*list) {
        json_decref(value);
    } else if (json_array_append_new(*list, value) != 0) {
        json_decref(*list);
        *list = NULL;
    }
}

static json_t *integers(const int64_t *numbers, int count, const fc_st_stored *stored, int64_t appended) {
    json_t *list = json_array();
    for (int i = 0; list && i < count; i++) {
        int64_t value = stored && i + 1 == count ? numbers[i] * stored->widen : numbers[i];
        append(&list, json_integer(value));
    }
    if (list && stored && stored->append > 0) {
        append(&list, json_integer(appended));
    }
    return list;
}

static json_t *path_json(const fc_path *path) {
    json_t *list = json_array();
    for (size_t i = 0; list && i < path->count; i++) {
        const fc_path_element *e = &path->elements[i];
        json_t *number = e->is_index || e->is_number ? json_integer(strtoll(e->key, NULL, 10)) : NULL;
        if (e->is_number || e->is_tuple) {
            number = json_pack("{s:o}", e->is_number ? "number" : "tuple", number);
        }
        append(&list, number || e->is_index || e->is_number ? number : json_string(e->key));
    }
    return list;
}

static bool is_flat(const fc_target_tensor *t) {
    return t->path.count == 0 || (t->path.count == 1 && !t->path.elements[0].is_index &&
                                  !t->path.elements[0].is_number && strcmp(t->path.elements[0].key, t->name) == 0);
}

static json_t *layout_json(const header_builder *m, const fc_target_tensor *t) {
    char text[FC_MAX_MESH_DIMS * 64];
    fc_placements_format(m->target->mesh->ndim, t->placements, text, (int)sizeof text);
    return json_pack("{s:o, s:s}", "shape", integers(t->source->shape, t->source->ndim, NULL, 0), "placements", text);
}

/* Adds one tensor to the tables of `__metadata__`. */
static bool describe_item(const header_builder *m, const fc_target_item *item, json_t *paths, json_t *dtypes,
                          json_t *offsets, json_t *layouts) {
    const fc_target_tensor *t = tensor_of(m, item);
    fc_st_stored stored = fc_st_stored_as(t->dtype, t->source->ndim);
    bool good = true;
    if (!is_flat(t)) {
        good = json_object_set_new(paths, t->name, path_json(&t->path)) == 0;
    }
    if (good && stored.remembered) {
        good = json_object_set_new(dtypes, t->name, json_string(fc_dtype_get(t->dtype)->torch_name)) == 0;
    }
    if (good && m->target->mesh->ndim > 0) {
        json_t *saved = json_pack("{s:o}", "saved_offsets", integers(item->dims, t->source->ndim, &stored, 0));
        good = json_object_set_new(offsets, t->name, saved) == 0 &&
               json_object_set_new(layouts, t->name, layout_json(m, t)) == 0;
    }
    return good;
}

static fc_code add_tables(const header_builder *m) {
    json_t *tables[4] = {json_object(), json_object(), json_object(), json_object()};
    static const char *const keys[4] = {ST_PATHS, ST_DTYPES, ST_SHARDING, ST_LAYOUT};
    bool good = tables[0] && tables[1] && tables[2] && tables[3];
    for (size_t i = 0; good && i < m->out->count; i++) {
        good = describe_item(m, &m->file->items[m->out->order[i]], tables[0], tables[1], tables[2], tables[3]);
    }
    fc_code rc;
    FC_TRY_GOTO(good ? FC_OK : out_of_memory(m), rc, out);
    for (int i = 0; i < 4; i++) {
        if (json_object_size(tables[i]) > 0 || (i >= 2 && m->target->mesh->ndim > 0)) {
            FC_TRY_GOTO(set_json(m, keys[i], json_incref(tables[i])), rc, out);
        }
    }
out:
    for (int i = 0; i < 4; i++) {
        json_decref(tables[i]);
    }
    return rc;
}

/* Reserves room for digests, which are known only after the data has been written. */
static fc_code add_digests(const header_builder *m, const char *key, size_t count) {
    size_t length = count * ST_DIGITS;
    char *zeros = malloc(length + 1);
    FC_NEED(zeros, m->err, m->target->source->path);
    memset(zeros, '0', length);
    fc_code rc = set_text(m, key, json_stringn_nocheck(zeros, length));
    free(zeros);
    return rc;
}

static fc_code add_mesh(const header_builder *m) {
    const fc_mesh *mesh = m->target->mesh;
    json_t *names = json_array();
    for (int i = 0; i < mesh->ndim; i++) {
        append(&names, json_string(mesh->names[i]));
    }
    FC_TRY(set_json(m, ST_MESH,
                    json_pack("{s:I, s:o, s:o}", "rank", (json_int_t)m->file->rank, "shape",
                              integers(mesh->sizes, mesh->ndim, NULL, 0), "names", names)));
    return set_text(m, ST_DCP_VERSION, json_string("1.0"));
}

/* ---- objects ---- */

fc_code fc_st_read_object(const fc_target *target, const fc_target_tensor *object, unsigned char **bytes, size_t *size,
                          fc_error *err) {
    *bytes = NULL;
    *size = (size_t)object->source->shape[0];
    if (object->source->shape[0] > ST_MAX_HEADER) {
        return fc_advise(err,
                         fc_fail(err, FC_EUNSUPPORTED,
                                 "%s: object %.256s: its %" PRId64
                                 " bytes exceed the %d that a safetensors header can hold; "
                                 "exclude it or choose another format",
                                 target->source->path, object->name, object->source->shape[0], ST_MAX_HEADER),
                         FC_HINT_EXCLUDE, object->name);
    }
    fc_code rc = fc_read_object(target->source, object->source, bytes, err);
    return rc == FC_OK ? rc : fc_context(err, rc, "object %.256s", object->name);
}

static json_t *base64_json(const unsigned char *bytes, size_t size) {
    size_t length = fc_base64_length(size);
    char *text = malloc(length + 1);
    if (!text) {
        return NULL;
    }
    fc_base64_encode(bytes, size, text);
    json_t *value = json_stringn_nocheck(text, length);
    free(text);
    return value;
}

static fc_code write_object_entry(const header_builder *m, const fc_target_tensor *t) {
    fc_arena *arena = fc_arena_new();
    char *key = NULL;
    const char *json = NULL;
    unsigned char *bytes = NULL;
    size_t size;
    fc_code rc;
    FC_NEED(arena, m->err, m->target->source->path);
    FC_TRY_GOTO(fc_st_read_object(m->target, t, &bytes, &size, m->err), rc, out);
    FC_TRY_GOTO(fc_checkpoint_object_json(m->target->source, t->source, arena, &json, m->err), rc, out);
    if (asprintf(&key, "%s%s", ST_OBJECT, t->name) < 0) {
        key = NULL;
        rc = out_of_memory(m);
        goto out;
    }
    json_t *value = json_pack("{s:s, s:s, s:o}", "encoding", t->source->object->encoding, "json", json, "data",
                              base64_json(bytes, size));
    bool good = value && (is_flat(t) || json_object_set_new(value, "path", path_json(&t->path)) == 0);
    rc = good ? set_json(m, key, json_incref(value)) : out_of_memory(m);
    json_decref(value);
out:
    free(key);
    free(bytes);
    fc_arena_free(arena);
    return rc;
}

static fc_code add_objects(const header_builder *m, bool keep) {
    for (size_t i = 0; i < m->file->nitems; i++) {
        fc_target_item *item = &m->file->items[i];
        const fc_target_tensor *t = tensor_of(m, item);
        if (t->source->object) {
            item->owned = false; /* see fc_format.objects_note */
            if (keep && strcmp(t->source->object->encoding, ST_METADATA_ENCODING) != 0) {
                FC_TRY(write_object_entry(m, t));
            }
        }
    }
    return FC_OK;
}

static fc_code build_metadata(const header_builder *m, bool objects) {
    FC_TRY(set_text(m, ST_FRAMEWORK, json_string("pt")));
    if (m->common->foreign && json_object_update(m->metadata, m->common->foreign) != 0) {
        return out_of_memory(m);
    }
    FC_TRY(set_text(m, ST_VERSION, json_string(FSDPCKPT_VERSION)));
    FC_TRY(add_tables(m));
    if (m->out->count > 0) {
        FC_TRY(add_digests(m, ST_DIGESTS, m->out->count));
    }
    FC_TRY(add_digests(m, ST_HEADER_DIGEST, 1));
    if (m->target->mesh->ndim > 0) {
        FC_TRY(add_mesh(m));
    }
    return add_objects(m, objects);
}

/* ---- tensors ---- */

static int compare_tensor_dtypes(const void *a, const void *b, void *context) {
    const header_builder *m = context;
    const fc_target_tensor *x = tensor_of(m, &m->file->items[*(const uint32_t *)a]);
    const fc_target_tensor *y = tensor_of(m, &m->file->items[*(const uint32_t *)b]);
    int left = fc_st_dtype_order(fc_st_stored_as(x->dtype, x->source->ndim).as);
    int right = fc_st_dtype_order(fc_st_stored_as(y->dtype, y->source->ndim).as);
    return left != right ? right - left : strcmp(x->name, y->name);
}

static fc_code order_tensors(header_builder *m) {
    fc_st_header_out *out = m->out;
    out->order = calloc(m->file->nitems + 1, sizeof *out->order);
    FC_NEED(out->order, m->err, m->target->source->path);
    for (size_t i = 0; i < m->file->nitems; i++) {
        const fc_target_tensor *t = tensor_of(m, &m->file->items[i]);
        if (t->source->object) {
            continue;
        }
        if (strcmp(t->name, "__metadata__") == 0) {
            return fc_advise(m->err,
                             fc_fail(m->err, FC_EUNSUPPORTED,
                                     "%s: tensor __metadata__: safetensors reserves this name; exclude the tensor or "
                                     "choose another format",
                                     m->target->source->path),
                             FC_HINT_EXCLUDE, t->name);
        }
        out->order[out->count++] = (uint32_t)i;
    }
    fc_sort_items_by(out->order, out->count, sizeof *out->order, compare_tensor_dtypes, m);
    return FC_OK;
}

/* Sets the offsets of the items, counted from the start of the data. */
static fc_code set_offsets(header_builder *m) {
    for (size_t i = 0; i < m->out->count; i++) {
        fc_target_item *item = &m->file->items[m->out->order[i]];
        item->offset = m->out->data;
        if (!fc_add_u64(m->out->data, fc_target_item_bytes(m->target, item), &m->out->data)) {
            return fc_fail(m->err, FC_ECORRUPT, "%s: the sizes of its tensors overflow", m->target->source->path);
        }
    }
    return FC_OK;
}

/* Takes ownership of `value`, which may be NULL. */
static fc_code write_member(const header_builder *m, const char *name, json_t *value, size_t flags, bool first) {
    json_t *key = json_string(name);
    bool good = key && value && (first || fputc(',', m->stream) != EOF) &&
                json_dumpf(key, m->stream, JSON_ENCODE_ANY) == 0 && fputc(':', m->stream) != EOF &&
                json_dumpf(value, m->stream, JSON_COMPACT | flags) == 0;
    json_decref(key);
    json_decref(value);
    return good ? FC_OK : out_of_memory(m);
}

static fc_code write_tensors(const header_builder *m) {
    for (size_t i = 0; i < m->out->count; i++) {
        const fc_target_item *item = &m->file->items[m->out->order[i]];
        const fc_target_tensor *t = tensor_of(m, item);
        fc_st_stored stored = fc_st_stored_as(t->dtype, t->source->ndim);
        json_int_t begin = (json_int_t)item->offset, bytes = (json_int_t)fc_target_item_bytes(m->target, item);
        FC_TRY(write_member(m, t->name,
                            json_pack("{s:s, s:o, s:[I, I]}", "dtype", stored.as->name, "shape",
                                      integers(item->dims + t->source->ndim, t->source->ndim, &stored, stored.append),
                                      "data_offsets", begin, begin + bytes),
                            0, false));
    }
    return FC_OK;
}

/* Writes zeros for the length, and the JSON, padded with spaces so that the data is aligned. */
static fc_code write_text(header_builder *m) {
    static const char no_length[ST_LENGTH_BYTES];
    const long alignment = m->out->data >= MUCH ? PAGE : ALIGNMENT;
    if (fwrite(no_length, 1, sizeof no_length, m->stream) != sizeof no_length || fputc('{', m->stream) == EOF) {
        return out_of_memory(m);
    }
    FC_TRY(write_member(m, "__metadata__", json_incref(m->metadata), JSON_SORT_KEYS, true));
    FC_TRY(write_tensors(m));
    long end = fputc('}', m->stream) != EOF ? ftell(m->stream) : -1;
    for (; end >= 0 && end % alignment != 0; end++) {
        fputc(' ', m->stream);
    }
    return end < 0 || ferror(m->stream) ? out_of_memory(m) : FC_OK;
}

static fc_code print_text(header_builder *m) {
    m->stream = open_memstream(&m->out->text, &m->out->size);
    FC_NEED(m->stream, m->err, m->target->source->path);
    fc_code rc = write_text(m);
    if (fclose(m->stream) != 0 && rc == FC_OK) {
        rc = out_of_memory(m);
    }
    return rc;
}

/* Sets the length and finds the offsets of the digests. */
static fc_code finish_header(const header_builder *m) {
    static const char mark[] = "\"" ST_DIGESTS "\":\""; /* within a text the quotation marks would be escaped */
    fc_st_header_out *out = m->out;
    uint64_t length = out->size - ST_LENGTH_BYTES;
    if (length > ST_MAX_HEADER) {
        return fc_advise(m->err,
                         fc_fail(m->err, FC_EUNSUPPORTED,
                                 "%s: the header would have %" PRIu64 " bytes, but the format allows only %d; exclude "
                                 "objects or choose another format",
                                 m->target->source->path, length, ST_MAX_HEADER),
                         FC_HINT_EXCLUDE, NULL);
    }
    fc_store_little((unsigned char *)out->text, length, ST_LENGTH_BYTES);
    const char *found = memmem(out->text, out->size, mark, sizeof mark - 1);
    out->digests = found ? (uint64_t)(found - out->text) + sizeof mark - 1 : 0;
    out->digest = fc_st_digest_offset(out->text, out->size);
    for (size_t i = 0; i < out->count; i++) {
        m->file->items[out->order[i]].offset += out->size;
    }
    return FC_OK;
}

fc_code fc_st_header_make(const fc_st_common *common, fc_target_file *file, bool objects, fc_st_header_out *out,
                          fc_error *err) {
    header_builder m = {.common = common, .target = common->target, .file = file, .out = out, .err = err};
    fc_code rc;
    *out = (fc_st_header_out){0};
    m.metadata = json_object();
    FC_NEED(m.metadata, err, m.target->source->path);
    FC_TRY_GOTO(order_tensors(&m), rc, out);
    FC_TRY_GOTO(set_offsets(&m), rc, out);
    FC_TRY_GOTO(build_metadata(&m, objects), rc, out);
    FC_TRY_GOTO(print_text(&m), rc, out);
    rc = finish_header(&m);
out:
    json_decref(m.metadata);
    return rc;
}
