/*
 * The header of one safetensors file: bytes in, checked entries out. What is accepted is what the reference
 * implementation (safetensors 0.8) accepts, less duplicate names, which the format's specification forbids.
 */
#include "safetensors/header.h"

#include "base/checked.h"
#include "base/grow.h"
#include "base/try.h"
#include "fsdpckpt/io.h"
#include "safetensors/json.h"
#include "safetensors/kept.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A complex number of two halves has a dimension more in the file than in torch. */
enum { MAX_RAW_DIMS = FC_MAX_DIMS + 1 };

typedef struct reading {
    fc_arena *arena;
    const char *path;
    int fd;
    uint64_t file_size; /* what is read starts at out->start, and ends there */
    st_header *out;
    st_json json;
    size_t entries_capacity, pairs_capacity;
    fc_error *err;
} reading;

void fc_st_header_free(st_header *header) {
    free(header->entries);
    free(header->by_name);
    free(header->by_place);
    free(header->pairs);
    *header = (st_header){0};
}

static fc_code entry_fail(const reading *r, const char *name, const char *what) {
    return fc_fail(r->err, FC_ECORRUPT, "%s: tensor %.256s: %s", r->path, name, what);
}

/* ---- the entry of a tensor ---- */

static bool read_number(const json_t *value, int64_t *out) {
    *out = json_is_integer(value) ? (int64_t)json_integer_value(value) : -1;
    return *out >= 0;
}

static fc_code read_dtype(const reading *r, const json_t *value, st_entry *e) {
    const char *name = json_string_value(value);
    if (!name) {
        return entry_fail(r, e->name, "it has no dtype");
    }
    e->stored = fc_st_dtype_find(name);
    if (!e->stored || !e->stored->readable) {
        return fc_fail(r->err, FC_EUNSUPPORTED, "%s: tensor %.256s: the dtype %.32s is %s", r->path, e->name, name,
                       e->stored ? "not supported: torch has no type of 6 bits" : "unknown");
    }
    e->dtype = e->stored->dtype;
    return FC_OK;
}

static fc_code read_shape(const reading *r, const json_t *value, st_entry *e) {
    size_t n = json_array_size(value);
    if (!json_is_array(value)) {
        return entry_fail(r, e->name, "it has no shape");
    }
    if (n > MAX_RAW_DIMS) {
        return fc_fail(r->err, FC_EUNSUPPORTED, "%s: tensor %.256s: more than %d dimensions", r->path, e->name,
                       FC_MAX_DIMS);
    }
    e->shape = fc_arena_alloc(r->arena, (n + 1) * sizeof *e->shape);
    if (!e->shape) {
        return fc_no_memory(r->err, r->path);
    }
    for (size_t i = 0; i < n; i++) {
        if (!read_number(json_array_get(value, i), &e->shape[i])) {
            return entry_fail(r, e->name, "a size in its shape is no integer from 0 on");
        }
    }
    e->raw_ndim = (int)n;
    return FC_OK;
}

/* The bytes that shape and dtype ask for must be those between the offsets. */
static fc_code check_span(const reading *r, const st_entry *e) {
    int64_t elements;
    uint64_t bits;
    if (!fc_numel(e->raw_ndim, e->shape, &elements) || !fc_mul_u64((uint64_t)elements, e->stored->bits, &bits)) {
        return entry_fail(r, e->name, "the product of its sizes overflows");
    }
    if (bits % 8 != 0) {
        return entry_fail(r, e->name, "its elements, of half a byte each, do not fill its last byte");
    }
    if (bits / 8 != e->end - e->begin) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: tensor %.256s: its shape and dtype ask for %" PRIu64
                       " bytes, its data_offsets span %" PRIu64,
                       r->path, e->name, bits / 8, e->end - e->begin);
    }
    return FC_OK;
}

static fc_code read_entry(reading *r, const char *name, const json_t *value) {
    st_entry e = {.name = fc_arena_strndup(r->arena, name, strlen(name))};
    int64_t begin, end;
    if (!e.name) {
        return fc_no_memory(r->err, r->path);
    }
    if (!json_is_object(value)) {
        return entry_fail(r, name, "its entry in the header is no JSON object");
    }
    fc_code rc = read_dtype(r, json_object_get(value, "dtype"), &e);
    rc = rc == FC_OK ? read_shape(r, json_object_get(value, "shape"), &e) : rc;
    if (rc != FC_OK) {
        return rc;
    }
    const json_t *offsets = json_object_get(value, "data_offsets");
    if (json_array_size(offsets) != 2 || !read_number(json_array_get(offsets, 0), &begin) ||
        !read_number(json_array_get(offsets, 1), &end) || begin > end) {
        return entry_fail(r, name, "its data_offsets are not two numbers, the first one not larger");
    }
    e.begin = (uint64_t)begin;
    e.end = (uint64_t)end;
    rc = check_span(r, &e);
    if (rc == FC_OK && !fc_grow(&r->out->entries, &r->entries_capacity, r->out->nentries + 1, sizeof e)) {
        rc = fc_no_memory(r->err, r->path);
    }
    if (rc == FC_OK) {
        r->out->entries[r->out->nentries++] = e;
    }
    return rc;
}

/* ---- __metadata__ ---- */

static fc_code read_pair(reading *r, const char *key, const json_t *value) {
    if (!json_is_string(value)) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: __metadata__: the value of %.128s is no text", r->path, key);
    }
    st_pair pair = {fc_arena_strndup(r->arena, key, strlen(key)),
                    fc_arena_strndup(r->arena, json_string_value(value), json_string_length(value))};
    if (!pair.key || !pair.value || !fc_grow(&r->out->pairs, &r->pairs_capacity, r->out->npairs + 1, sizeof pair)) {
        return fc_no_memory(r->err, r->path);
    }
    r->out->pairs[r->out->npairs++] = pair;
    return FC_OK;
}

static fc_code read_metadata(reading *r) {
    if (!fc_st_json_at_object(&r->json)) { /* the reference implementation takes null for none */
        json_t *value = NULL;
        size_t at = r->json.at;
        fc_code rc = fc_st_json_value(&r->json, &value, r->err);
        if (rc == FC_OK && !json_is_null(value)) {
            rc = fc_st_json_fail(&r->json, at, "__metadata__ is no JSON object", r->err);
        }
        json_decref(value);
        return rc;
    }
    fc_code rc = fc_st_json_enter(&r->json, r->err);
    for (bool first = true; rc == FC_OK; first = false) {
        json_t *key = NULL, *value = NULL;
        rc = fc_st_json_key(&r->json, first, &key, r->err);
        if (rc == FC_OK && !key) {
            return FC_OK;
        }
        rc = rc == FC_OK ? fc_st_json_value(&r->json, &value, r->err) : rc;
        rc = rc == FC_OK ? read_pair(r, json_string_value(key), value) : rc;
        json_decref(key);
        json_decref(value);
    }
    return rc;
}

static int by_key(const void *a, const void *b) {
    return strcmp(((const st_pair *)a)->key, ((const st_pair *)b)->key);
}

static fc_code sort_pairs(reading *r) {
    st_header *h = r->out;
    if (h->npairs > 1) {
        qsort(h->pairs, h->npairs, sizeof *h->pairs, by_key);
    }
    for (size_t i = 1; i < h->npairs; i++) {
        if (strcmp(h->pairs[i - 1].key, h->pairs[i].key) == 0) {
            return fc_fail(r->err, FC_ECORRUPT, "%s: __metadata__: the key %.128s is there twice", r->path,
                           h->pairs[i].key);
        }
    }
    return FC_OK;
}

const char *fc_st_header_value(const st_header *header, const char *key) {
    st_pair wanted = {key, NULL};
    const st_pair *found =
        header->npairs ? bsearch(&wanted, header->pairs, header->npairs, sizeof wanted, by_key) : NULL;
    return found ? found->value : NULL;
}

/* ---- the whole ---- */

static int by_name(const void *a, const void *b, void *entries) {
    const st_entry *e = entries;
    return strcmp(e[*(const uint32_t *)a].name, e[*(const uint32_t *)b].name);
}

static int by_place(const void *a, const void *b, void *entries) {
    const st_entry *e = entries, *x = &e[*(const uint32_t *)a], *y = &e[*(const uint32_t *)b];
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    return x->end != y->end ? (x->end < y->end ? -1 : 1) : strcmp(x->name, y->name);
}

st_entry *fc_st_header_find(const st_header *header, const char *name) {
    size_t low = 0, high = header->nentries;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(header->entries[header->by_name[middle]].name, name);
        if (order == 0) {
            return &header->entries[header->by_name[middle]];
        }
        *(order < 0 ? &low : &high) = order < 0 ? middle + 1 : middle;
    }
    return NULL;
}

static fc_code sort_entries(reading *r) {
    st_header *h = r->out;
    h->by_name = calloc(h->nentries + 1, sizeof *h->by_name);
    h->by_place = calloc(h->nentries + 1, sizeof *h->by_place);
    if (!h->by_name || !h->by_place || h->nentries > UINT32_MAX) {
        return fc_no_memory(r->err, r->path);
    }
    for (size_t i = 0; i < h->nentries; i++) {
        h->by_name[i] = h->by_place[i] = (uint32_t)i;
    }
    qsort_r(h->by_name, h->nentries, sizeof *h->by_name, by_name, h->entries);
    qsort_r(h->by_place, h->nentries, sizeof *h->by_place, by_place, h->entries);
    for (size_t i = 1; i < h->nentries; i++) {
        const char *name = h->entries[h->by_name[i]].name;
        if (strcmp(h->entries[h->by_name[i - 1]].name, name) == 0) {
            return entry_fail(r, name, "the name is there twice in the header");
        }
    }
    return FC_OK;
}

/* The data starts at 0, has no holes and no overlaps, and ends with the file. */
static fc_code check_places(const reading *r, bool headers_only) {
    const st_header *h = r->out;
    uint64_t end = 0;
    const char *last = NULL;
    for (size_t i = 0; i < h->nentries; i++) {
        const st_entry *e = &h->entries[h->by_place[i]];
        if (e->begin != end) {
            return fc_fail(r->err, FC_ECORRUPT,
                           "%s: tensor %.256s: its data starts at byte %" PRIu64 " of the data, %s ends at %" PRIu64
                           ": data may neither overlap nor leave holes",
                           r->path, e->name, e->begin, last ? "what is before it" : "the header", end);
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
                       "%s: truncated: it has %" PRIu64 " bytes, the header places data up to byte %" PRIu64
                       ", the last of it of tensor %.256s",
                       r->path, r->file_size, h->data + end, last);
    }
    return size == end ? FC_OK
                       : fc_fail(r->err, FC_ECORRUPT,
                                 "%s: %" PRIu64 " bytes follow the data of the last tensor, which no entry of the "
                                 "header describes",
                                 r->path, size - end);
}

static fc_code parse(reading *r) {
    fc_code rc = fc_st_json_enter(&r->json, r->err);
    bool metadata = false;
    for (bool first = true; rc == FC_OK; first = false) {
        json_t *key = NULL, *value = NULL;
        rc = fc_st_json_key(&r->json, first, &key, r->err);
        if (rc != FC_OK || !key) {
            break;
        }
        const char *name = json_string_value(key);
        if (strcmp(name, "__metadata__") == 0) {
            rc = metadata ? fc_st_json_fail(&r->json, r->json.at, "__metadata__ is there twice", r->err)
                          : read_metadata(r);
            metadata = true;
        } else {
            rc = fc_st_json_value(&r->json, &value, r->err);
            rc = rc == FC_OK ? read_entry(r, name, value) : rc;
        }
        json_decref(key);
        json_decref(value);
    }
    return rc == FC_OK ? fc_st_json_end(&r->json, r->err) : rc;
}

/* Whether the header, `size` bytes from the start of the file, is as it was written. */
static st_header_state compare_digest(const st_header *h, const char *text, size_t size) {
    size_t place = fc_st_digest_place(text, size);
    if (place == 0) {
        bool bare = fc_st_header_value(h, ST_VERSION) && !fc_st_header_value(h, ST_HEADER_DIGEST);
        return bare ? ST_HEADER_BARE : ST_HEADER_UNKNOWN;
    }
    return fc_st_digest_compare(text, size, place);
}

/* What is before the data. @param text malloc'ed; owned by the caller, also after a failure. */
static fc_code read_text(const reading *r, char **text, uint64_t *size) {
    unsigned char length[ST_LENGTH_BYTES];
    const uint64_t left = r->file_size - r->out->start;
    FC_TRY(fc_pread_full(r->fd, length, sizeof length, r->out->start, r->path, r->err));
    *size = 0;
    for (int i = ST_LENGTH_BYTES - 1; i >= 0; i--) {
        *size = *size << 8 | length[i];
    }
    if (*size > ST_MAX_HEADER) {
        return fc_fail(r->err, FC_ECORRUPT,
                       "%s: offset %" PRIu64 ": a header of %" PRIu64 " bytes, more than the %d that the format "
                       "allows: not a safetensors file, or damaged",
                       r->path, r->out->start, *size, ST_MAX_HEADER);
    }
    if (*size > left - ST_LENGTH_BYTES) {
        return fc_fail(r->err, FC_ECORRUPT, "%s: truncated: it has %" PRIu64 " bytes, the header alone takes %" PRIu64,
                       r->path, r->file_size, r->out->start + *size + ST_LENGTH_BYTES);
    }
    *size += ST_LENGTH_BYTES;
    *text = malloc((size_t)*size + 1);
    return *text ? fc_pread_full(r->fd, *text, (size_t)*size, r->out->start, r->path, r->err)
                 : fc_no_memory(r->err, r->path);
}

static fc_code read_header(reading *r, bool headers_only) {
    st_header *out = r->out;
    uint64_t size = 0;
    char *text = NULL;
    fc_code rc = read_text(r, &text, &size);
    if (rc == FC_OK) {
        r->json = (st_json){.text = text + ST_LENGTH_BYTES,
                            .size = (size_t)size - ST_LENGTH_BYTES,
                            .path = r->path,
                            .offset = r->out->start + ST_LENGTH_BYTES};
        out->data = r->out->start + size;
        rc = parse(r);
    }
    rc = rc == FC_OK ? sort_pairs(r) : rc;
    if (rc == FC_OK) {
        out->state = compare_digest(out, text, (size_t)size);
    }
    free(text);
    rc = rc == FC_OK ? sort_entries(r) : rc;
    rc = rc == FC_OK ? check_places(r, headers_only) : rc;
    rc = rc == FC_OK ? fc_st_header_apply_kept(r->arena, r->path, out, r->err) : rc;
    out->has_digests = out->has_digests && out->state != ST_HEADER_REWRITTEN; /* they are of what was there before */
    return rc;
}

fc_code fc_st_header_read_at(fc_arena *arena, const char *path, uint64_t start, bool headers_only, st_header *out,
                             fc_error *err) {
    reading r = {.arena = arena, .path = path, .out = out, .err = err};
    *out = (st_header){.rank = -1, .start = start};
    FC_TRY(fc_open_input(path, &r.fd, &r.file_size, err));
    fc_code rc = start <= r.file_size
                     ? read_header(&r, headers_only)
                     : fc_fail(err, FC_ECORRUPT, "%s: truncated: it has %" PRIu64 " bytes, a header starts at %" PRIu64,
                               path, r.file_size, start);
    close(r.fd);
    return rc;
}

fc_code fc_st_header_read(fc_arena *arena, const char *path, bool headers_only, st_header *out, fc_error *err) {
    return fc_st_header_read_at(arena, path, 0, headers_only, out, err);
}
