/*
 * Reads the files of torch.save before 1.6, and of _use_new_zipfile_serialization=False since then. They are five
 * pickles in a row (magic number, protocol, system, the value, the keys of its storages), then for each key the number
 * of elements (8 bytes) and the elements, little-endian on every system. Only the value's pickle gives the size of an
 * element.
 */
#include "torch/file/file.h"

#include "base/checked.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/file.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { PROTOCOL = 1001, MAX_SMALL = 1 << 20 };

static fc_code damaged_file(const torch_file *f, uint64_t at, const char *what, fc_error *err) {
    return fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": the torch.save file is damaged: %s", f->path, at, what);
}

/* Loads the pickle at `*at` and advances to its end. */
static fc_code next_pickle(const torch_file *f, uint64_t *at, uint64_t most, fc_pickle_mode mode, fc_pickle **out,
                           fc_error *err) {
    uint64_t left = f->size - *at;
    fc_pickle_source source = {f->path, *at, left < most ? left : most, f->fd, NULL};
    FC_TRY(fc_pickle_load(&source, mode, out, err));
    *at += (*out)->size;
    return FC_OK;
}

/*
 * Reads one of the three small pickles before the value; the second one is the protocol's number. They are numbers and
 * a dict, so a call in one is refused, although nothing would be made of it: torch.load executes all five pickles.
 */
static fc_code read_small(torch_file *f, bool is_protocol, uint64_t *at, fc_error *err) {
    fc_pickle *p;
    int64_t number;
    uint64_t start = *at;
    fc_code rc = FC_OK;
    FC_TRY(next_pickle(f, at, MAX_SMALL, FC_PICKLE_STRICT, &p, err));
    if (is_protocol && (!fc_pickle_int(p, p->root, &number) || number != PROTOCOL)) {
        rc = fc_fail(err, FC_EUNSUPPORTED, "%s: offset %" PRIu64 ": the protocol of torch.save is not %d", f->path,
                     start, PROTOCOL);
    }
    fc_pickle_free(p);
    return rc;
}

/* Reads the three small pickles before the value. */
static fc_code read_head(torch_file *f, uint64_t *at, fc_error *err) {
    for (int i = 0; i < 3; i++) {
        FC_TRY(read_small(f, i == 1, at, err));
    }
    return FC_OK;
}

static const char *text_of_key(const fc_pickle *p, fc_pv v) {
    size_t n;
    return fc_pickle_bytes(p, v, &n);
}

static int compare_storage_keys(const void *a, const void *b, void *pickle) {
    const torch_legacy_storage *x = a, *y = b;
    return strcmp(text_of_key(pickle, x->key), text_of_key(pickle, y->key));
}

/* Collects the storages from the value's persistent ids: ('storage', class, key, location, elements, view). */
static fc_code collect_storages(torch_file *f, uint64_t start, fc_error *err) {
    size_t n = 0, kept = 0;
    const fc_pv *ids = f->p->persids ? fc_pickle_items(f->p, f->p->persids, &n) : NULL;
    f->storages = calloc(n + 1, sizeof *f->storages);
    FC_NEED(f->storages, err, f->path);
    for (size_t i = 0; i < n; i++) {
        fc_pv id = fc_pickle_persid(f->p, ids[i]);
        size_t nitems = 0;
        const fc_pv *item = fc_pv_typeof(id) == FC_PV_TUPLE ? fc_pickle_tuple(f->p, id, &nitems) : NULL;
        int64_t elements;
        uint32_t dtype;
        if (nitems > 0 && fc_pickle_is_str(f->p, item[0], "module")) {
            continue; /* the source text of a pickled module's class */
        }
        if (nitems < 5 || fc_pv_typeof(item[2]) != FC_PV_STR || fc_pv_typeof(item[1]) != FC_PV_GLOBAL ||
            fc_pickle_global(f->p, item[1], &dtype) != FC_GLOBAL_STORAGE || !fc_pickle_int(f->p, item[4], &elements) ||
            elements < 0) {
            return damaged_file(f, start, "its pickle refers to something that is not a storage", err);
        }
        if (nitems > 5 && fc_pv_typeof(item[5]) != FC_PV_NONE) {
            return fc_fail(err, FC_EUNSUPPORTED,
                           "%s: a file of torch before 0.4 with views of storages, which is not supported", f->path);
        }
        uint64_t size = dtype < FC_DTYPE_COUNT ? fc_dtype_size((fc_dtype)dtype) : 0;
        f->storages[kept++] = (torch_legacy_storage){item[2], (uint64_t)elements, size, 0};
    }
    fc_sort_items_by(f->storages, kept, sizeof *f->storages, compare_storage_keys, f->pickle);
    for (size_t i = 0; i < kept; i++) { /* keeps each storage once */
        torch_legacy_storage *last = f->nstorages ? &f->storages[f->nstorages - 1] : NULL;
        if (!last || last->key != f->storages[i].key) {
            f->storages[f->nstorages++] = f->storages[i];
        } else if (last->elements != f->storages[i].elements || last->element_size != f->storages[i].element_size) {
            return damaged_file(f, start, "its pickle gives two sizes for one storage", err);
        }
    }
    return FC_OK;
}

static torch_legacy_storage *find_storage(const torch_file *f, const char *key) {
    size_t at = 0;
    FC_BISECT(at, f->nstorages, middle, strcmp(text_of_key(f->p, f->storages[middle].key), key) < 0);
    const bool found = at < f->nstorages && strcmp(text_of_key(f->p, f->storages[at].key), key) == 0;
    return found ? &f->storages[at] : NULL;
}

/* Finds the bytes of each storage, in the order of the list of keys. */
static fc_code place_storages(torch_file *f, const fc_pickle *keys, uint64_t at, fc_error *err) {
    size_t n;
    if (fc_pv_typeof(keys->root) != FC_PV_LIST) {
        return damaged_file(f, at, "the list of storages is missing", err);
    }
    const fc_pv *items = fc_pickle_items(keys, keys->root, &n);
    for (size_t i = 0; i < n; i++) {
        unsigned char count[8];
        uint64_t stated, bytes;
        torch_legacy_storage *s =
            fc_pv_typeof(items[i]) == FC_PV_STR ? find_storage(f, text_of_key(keys, items[i])) : NULL;
        if (!s || s->offset != 0) {
            return damaged_file(f, at, "its list of storages does not match its pickle", err);
        }
        FC_TRY(fc_pread_full(f->fd, count, sizeof count, at, f->path, err));
        memcpy(&stated, count, sizeof stated);
        stated = le64toh(stated);
        if (stated != s->elements || !fc_mul_u64(s->elements, s->element_size, &bytes) ||
            !fc_range_within(at + sizeof count, bytes, f->size)) {
            return damaged_file(
                f, at, "the size of a storage differs from the one in its pickle, or it ends after the end of the file",
                err);
        }
        s->offset = at + sizeof count;
        at = s->offset + bytes;
    }
    return FC_OK;
}

fc_code fc_torch_legacy_open(torch_file *f, fc_error *err) {
    uint64_t at = 0;
    fc_pickle *keys = NULL;
    FC_TRY(read_head(f, &at, err));
    const uint64_t start = at;
    FC_TRY(next_pickle(f, &at, FC_TORCH_MAX_FILE_PICKLE, FC_PICKLE_ITEM, &f->pickle, err));
    f->p = f->pickle;
    FC_TRY(collect_storages(f, start, err));
    FC_TRY(next_pickle(f, &at, FC_TORCH_MAX_FILE_PICKLE, FC_PICKLE_STRICT, &keys, err));
    fc_code rc = place_storages(f, keys, at, err);
    fc_pickle_free(keys);
    return rc;
}

fc_code fc_torch_legacy_storage(const torch_file *f, const fc_torch_tensor *tensor, torch_record *out, fc_error *err) {
    const torch_legacy_storage *s = find_storage(f, text_of_key(f->p, tensor->storage_key));
    if (!s || s->offset == 0) {
        return fc_fail(err, FC_ECORRUPT, "%s: the torch.save file is damaged: storage %s is missing", f->path,
                       text_of_key(f->p, tensor->storage_key));
    }
    uint64_t bytes = s->elements * s->element_size; /* checked by place_storages() */
    if (bytes != tensor->storage_bytes) {
        return damaged_file(f, s->offset, "its pickle gives two sizes for one storage", err);
    }
    *out = (torch_record){s->offset, bytes, bytes, 0, FC_ZIP_STORED, f->index};
    return FC_OK;
}
