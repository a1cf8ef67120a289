/*
 * Reads the header of one safetensors file and checks its entries. Accepts what the reference implementation
 * (safetensors 0.8) accepts, except duplicate names, which the specification forbids.
 */
#include "safetensors/header.h"

#include "base/checked.h"
#include "base/grow.h"
#include "base/little.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/stand_in.h"
#include "safetensors/json.h"
#include "safetensors/kept.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A complex32 tensor has one more dimension in the file than in torch. */
enum { MAX_RAW_DIMS = FC_MAX_DIMS + 1 };

typedef struct header_reader {
    fc_arena *arena;
    const char *path;
    int fd;
    uint64_t file_size; /* bytes; the safetensors file extends from out->start to here */
    fc_st_header *out;
    fc_st_json json;
    size_t entries_capacity, pairs_capacity;
    fc_error *err;
} header_reader;

void fc_st_header_free(fc_st_header *header) {
    free(header->entries);
    free(header->by_name);
    free(header->by_offset);
    free(header->pairs);
    *header = (fc_st_header){0};
}

static fc_code entry_fail(const header_reader *r, const char *name, const char *what) {
    return fc_fail(r->err, FC_ECORRUPT, "%s: tensor %.256s: %s", r->path, name, what);
}

/* ---- the entry of a tensor ---- */

static bool read_number(const json_t *value, int64_t *out) {
    *out = json_is_integer(value) ? (int64_t)json_integer_value(value) : -1;
    return *out >= 0;
}

static fc_code read_dtype(const header_reader *r, const json_t *value, fc_st_entry *e) {
    const char *name = json_string_value(value);
    if (!name) {
        return entry_fail(r, e->name, "its dtype is missing");
    }
    e->stored = fc_st_dtype_find(name);
    if (!e->stored || !e->stored->readable) {
        return fc_fail(r->err, FC_EUNSUPPORTED, "%s: tensor %.256s: the dtype %.32s is %s", r->path, e->name, name,
                       e->stored ? "not supported: torch has no 6-bit dtypes" : "unknown");
    }
    e->dtype = e->stored->dtype;
    return FC_OK;
}

static fc_code read_shape(const header_reader *r, const json_t *value, fc_st_entry *e) {
    size_t n = json_array_size(value);
    if (!json_is_array(value)) {
        return entry_fail(r, e->name, "its shape is missing");
    }
    if (n > MAX_RAW_DIMS) {
        return fc_fail(r->err, FC_EUNSUPPORTED, "%s: tensor %.256s: more than %d dimensions", r->path, e->name,
                       FC_MAX_DIMS);
    }
    e->shape = fc_arena_alloc(r->arena, (n + 1) * sizeof *e->shape);
    FC_NEED(e->shape, r->err, r->path);
    for (size_t i = 0; i < n; i++) {
        if (!read_number(json_array_get(value, i), &e->shape[i])) {
            return entry_fail(r, e->name, "a size in its shape is not an integer of at least 0");
        }
    }
    e->raw_ndim = (int)n;
    return FC_OK;
}

/* The shape and the dtype must require exactly the bytes between the offsets. */
static fc_code check_span(const header_reader *r, const fc_st_entry *e) {
    int64_t elements;
    uint64_t bits;
    if (!fc_numel(e->raw_ndim, e->shape, &elements) || !fc_mul_u64((uint64_t)elements, e->stored->bits, &bits)) {
        return entry_fail(r, e->name, "the product of its sizes overflows");
    }
    if (bits % 8 != 0) {
        return entry_fail(r, e->name, "its elements have half a byte each and do not fill the last byte");
    }
    if (bits / 8 != e->end - e->begin) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: tensor %.256s: its shape and dtype require %" PRIu64
                       " bytes, but its data_offsets span %" PRIu64,
                       r->path, e->name, bits / 8, e->end - e->begin);
    }
    return FC_OK;
}

static fc_code read_entry(header_reader *r, const char *name, const json_t *value) {
    fc_st_entry e = {.name = fc_arena_strndup(r->arena, name, strlen(name))};
    int64_t begin, end;
    FC_NEED(e.name, r->err, r->path);
    if (!json_is_object(value)) {
        return entry_fail(r, name, "its entry in the header is not a JSON object");
    }
    FC_TRY(read_dtype(r, json_object_get(value, "dtype"), &e));
    FC_TRY(read_shape(r, json_object_get(value, "shape"), &e));
    const json_t *offsets = json_object_get(value, "data_offsets");
    if (json_array_size(offsets) != 2 || !read_number(json_array_get(offsets, 0), &begin) ||
        !read_number(json_array_get(offsets, 1), &end) || begin > end) {
        return entry_fail(r, name, "its data_offsets are not two integers in ascending order");
    }
    e.begin = (uint64_t)begin;
    e.end = (uint64_t)end;
    FC_TRY(check_span(r, &e));
    FC_NEED(fc_grow(&r->out->entries, &r->entries_capacity, r->out->nentries + 1, sizeof e), r->err, r->path);
    r->out->entries[r->out->nentries++] = e;
    return FC_OK;
}

/* ---- __metadata__ ---- */

static fc_code read_pair(header_reader *r, const char *key, const json_t *value) {
    if (!json_is_string(value)) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: __metadata__: the value of %.128s is not a string", r->path, key);
    }
    fc_st_pair pair = {fc_arena_strndup(r->arena, key, strlen(key)),
                       fc_arena_strndup(r->arena, json_string_value(value), json_string_length(value))};
    FC_NEED(pair.key && pair.value && fc_grow(&r->out->pairs, &r->pairs_capacity, r->out->npairs + 1, sizeof pair),
            r->err, r->path);
    r->out->pairs[r->out->npairs++] = pair;
    return FC_OK;
}

static fc_code read_pair_member(void *context, const char *key, json_t *value, fc_error *err) {
    (void)err;
    return read_pair(context, key, value);
}

/* The reference implementation accepts null for an empty object. */
static fc_code read_null(header_reader *r) {
    json_t *value = NULL;
    size_t at = r->json.at;
    FC_TRY(fc_st_json_value(&r->json, &value, r->err));
    bool null = json_is_null(value);
    json_decref(value);
    return null ? FC_OK : fc_st_json_fail(&r->json, at, "__metadata__ is not a JSON object", r->err);
}

static fc_code read_metadata(header_reader *r) {
    return fc_st_json_at_object(&r->json) ? fc_st_json_object(&r->json, read_pair_member, r, r->err) : read_null(r);
}

static fc_code sort_pairs(header_reader *r) {
    fc_st_header *h = r->out;
    fc_sort_items(h->pairs, h->npairs, sizeof *h->pairs, fc_order_texts);
    for (size_t i = 1; i < h->npairs; i++) {
        if (strcmp(h->pairs[i - 1].key, h->pairs[i].key) == 0) {
            return fc_fail(r->err, FC_ECORRUPT, "%s: __metadata__: the key %.128s appears twice", r->path,
                           h->pairs[i].key);
        }
    }
    return FC_OK;
}

const char *fc_st_header_value(const fc_st_header *header, const char *key) {
    const fc_st_pair *found = fc_find_struct(header->pairs, header->npairs, sizeof *header->pairs, key);
    return found ? found->value : NULL;
}

/* ---- the whole ---- */

static int compare_entry_offsets(const void *a, const void *b, void *entries) {
    const fc_st_entry *e = entries, *x = &e[*(const uint32_t *)a], *y = &e[*(const uint32_t *)b];
    FC_ORDER_BY(x->begin, y->begin);
    FC_ORDER_BY(x->end, y->end);
    return strcmp(x->name, y->name);
}

fc_st_entry *fc_st_header_find(const fc_st_header *header, const char *name) {
    return fc_find_named(header->by_name, header->nentries, name);
}

static fc_code sort_entries(header_reader *r) {
    fc_st_header *h = r->out;
    h->by_name = fc_list_named(h->entries, h->nentries, sizeof *h->entries);
    h->by_offset = calloc(h->nentries + 1, sizeof *h->by_offset);
    FC_NEED(h->by_name && h->by_offset && h->nentries <= UINT32_MAX, r->err, r->path);
    for (size_t i = 0; i < h->nentries; i++) {
        h->by_offset[i] = (uint32_t)i;
    }
    fc_sort_items_by(h->by_offset, h->nentries, sizeof *h->by_offset, compare_entry_offsets, h->entries);
    for (size_t i = 1; i < h->nentries; i++) {
        const char *name = h->by_name[i]->name;
        if (strcmp(h->by_name[i - 1]->name, name) == 0) {
            return entry_fail(r, name, "the name appears twice in the header");
        }
    }
    return FC_OK;
}

/* The data must start at 0, have no gaps and no overlaps, and end with the file. */
static fc_code check_offsets(const header_reader *r, bool headers_only) {
    const fc_st_header *h = r->out;
    uint64_t end = 0;
    const char *last = NULL;
    for (size_t i = 0; i < h->nentries; i++) {
        const fc_st_entry *e = &h->entries[h->by_offset[i]];
        if (e->begin != end) {
            return fc_fail(r->err, FC_ECORRUPT,
                           "%s: tensor %.256s: its data starts at byte %" PRIu64 " instead of %" PRIu64
                           ": the data of tensors must neither overlap nor leave gaps",
                           r->path, e->name, e->begin, end);
        }
        end = e->end;
        last = e->name;
    }
    uint64_t size = r->file_size - h->data;
    if (headers_only && size < end) {
        return FC_OK;
    }
    if (size < end) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: truncated: the file has %" PRIu64 " bytes, but tensor %.256s ends at byte %" PRIu64,
                       r->path, r->file_size, last, h->data + end);
    }
    if (size > end) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: offset %" PRIu64 ": %" PRIu64 " bytes follow the data of the last tensor", r->path,
                       h->data + end, size - end);
    }
    return FC_OK;
}

static fc_code read_tensor(header_reader *r, const char *name) {
    json_t *value = NULL;
    FC_TRY(fc_st_json_value(&r->json, &value, r->err));
    fc_code rc = read_entry(r, name, value);
    json_decref(value);
    return rc;
}

static fc_code read_member(header_reader *r, const char *name, bool *metadata) {
    if (strcmp(name, "__metadata__") != 0) {
        return read_tensor(r, name);
    }
    if (*metadata) {
        return fc_st_json_fail(&r->json, r->json.at, "__metadata__ appears twice", r->err);
    }
    *metadata = true;
    return read_metadata(r);
}

static fc_code parse(header_reader *r) {
    bool metadata = false;
    FC_TRY(fc_st_json_enter(&r->json, r->err));
    for (bool first = true;; first = false) {
        json_t *key = NULL;
        FC_TRY(fc_st_json_key(&r->json, first, &key, r->err));
        if (!key) {
            return fc_st_json_end(&r->json, r->err);
        }
        fc_code rc = read_member(r, json_string_value(key), &metadata);
        json_decref(key);
        FC_TRY(rc);
    }
}

/* @param size bytes from the start of the file to the data. */
static fc_st_header_state compare_digest(const fc_st_header *h, const char *text, size_t size) {
    size_t place = fc_st_digest_offset(text, size);
    if (place == 0) {
        bool bare = fc_st_header_value(h, ST_VERSION) && !fc_st_header_value(h, ST_HEADER_DIGEST);
        return bare ? ST_HEADER_BARE : ST_HEADER_UNKNOWN;
    }
    return fc_st_digest_compare(text, size, place);
}

/* Reads the file up to its data. @param text malloc'ed; owned by the caller, also after a failure. */
static fc_code read_text(const header_reader *r, char **text, uint64_t *size) {
    unsigned char length[ST_LENGTH_BYTES];
    const uint64_t left = r->file_size - r->out->start;
    const bool alone = r->out->start == 0;
    FC_TRY(alone && left < sizeof length ? fc_check_stand_in(r->path, r->err) : FC_OK);
    FC_TRY(fc_pread_full(r->fd, length, sizeof length, r->out->start, r->path, r->err));
    *size = fc_load_little(length, ST_LENGTH_BYTES);
    FC_TRY(alone && (*size > ST_MAX_HEADER || *size == 0) ? fc_check_stand_in(r->path, r->err) : FC_OK);
    if (*size > ST_MAX_HEADER) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: offset %" PRIu64 ": the header has %" PRIu64 " bytes, but the format allows only %d: the "
                       "file is damaged or not a safetensors file",
                       r->path, r->out->start, *size, ST_MAX_HEADER);
    }
    if (*size > left - ST_LENGTH_BYTES) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: truncated: the file has %" PRIu64 " bytes, but the header ends at byte %" PRIu64, r->path,
                       r->file_size, r->out->start + *size + ST_LENGTH_BYTES);
    }
    *size += ST_LENGTH_BYTES;
    *text = malloc((size_t)*size + 1);
    FC_NEED(*text, r->err, r->path);
    return fc_pread_full(r->fd, *text, (size_t)*size, r->out->start, r->path, r->err);
}

static fc_code read_header(header_reader *r, bool headers_only) {
    fc_st_header *header = r->out;
    uint64_t size = 0;
    char *text = NULL;
    fc_code rc;
    FC_TRY_GOTO(read_text(r, &text, &size), rc, out);
    r->json = (fc_st_json){.text = text + ST_LENGTH_BYTES,
                           .size = (size_t)size - ST_LENGTH_BYTES,
                           .path = r->path,
                           .offset = r->out->start + ST_LENGTH_BYTES};
    header->data = r->out->start + size;
    FC_TRY_GOTO(parse(r), rc, out);
    FC_TRY_GOTO(sort_pairs(r), rc, out);
    header->state = compare_digest(header, text, (size_t)size);
    FC_TRY_GOTO(sort_entries(r), rc, out);
    FC_TRY_GOTO(check_offsets(r, headers_only), rc, out);
    FC_TRY_GOTO(fc_st_header_apply_kept(r->arena, r->path, header, r->err), rc, out);
    if (header->state == ST_HEADER_REWRITTEN) {
        header->has_digests = false; /* the other program may have changed the data as well */
    }
out:
    free(text);
    return rc;
}

fc_code fc_st_header_read_at(fc_arena *arena, const char *path, uint64_t start, bool headers_only, fc_st_header *out,
                             fc_error *err) {
    header_reader r = {.arena = arena, .path = path, .out = out, .err = err};
    *out = (fc_st_header){.rank = -1, .start = start};
    FC_TRY(fc_open_input(path, &r.fd, &r.file_size, err));
    fc_code rc;
    if (start <= r.file_size) {
        rc = read_header(&r, headers_only);
    } else {
        rc = fc_fail(err, FC_ECORRUPT,
                     "%s: truncated: the file has %" PRIu64 " bytes, but a header starts at byte %" PRIu64, path,
                     r.file_size, start);
    }
    close(r.fd);
    return rc;
}

fc_code fc_st_header_read(fc_arena *arena, const char *path, bool headers_only, fc_st_header *out, fc_error *err) {
    return fc_st_header_read_at(arena, path, 0, headers_only, out, err);
}
