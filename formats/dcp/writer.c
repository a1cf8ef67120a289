/*
 * Writes DCP: a directory with `.metadata` and one data file per rank, `__<rank>_0.distcp`; a full checkpoint has one
 * rank. Each box becomes an item: a torch.save archive around the data, which torch.load reads on its own.
 *
 * An object becomes an archive of its decoded value. Only an object that cannot be decoded, and that the user trusts,
 * is copied unchanged.
 */
#include "dcp/writer.h"

#include "base/checked.h"
#include "base/grow.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "torch/object/write.h"
#include "torch/zip/write.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    PAGE = 4096,       /* data at multiples of this can be written past the page cache */
    PAGED = 16 * PAGE, /* data of at least this size is aligned to a page, which wastes less than a tenth */
};

typedef struct dcp_writer {
    const fc_target *target;
    char *staging;
    fc_dcp_item *items; /* the items of all files so far */
    size_t nitems, capacity;
    size_t file_first; /* index of the first item of the current file */
    fc_arena *scratch; /* owns the path of the current file */
    fc_torch_pickler pickler;
    fc_torch_zip zip;
    fc_torch_inners inners; /* of the object that is laid out */
} dcp_writer;

bool fc_dcp_is_directory(const fc_target *target) {
    (void)target;
    return true;
}

size_t fc_dcp_files(const fc_target *target) {
    return (size_t)fc_mesh_ranks(target->mesh);
}

const char *fc_dcp_index(const fc_target *target) {
    (void)target;
    return ".metadata";
}

fc_code fc_dcp_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err) {
    dcp_writer *w = calloc(1, sizeof *w);
    writer->state = w;
    FC_NEED(w && (w->staging = strdup(staging)), err, staging);
    w->target = target;
    return FC_OK;
}

/* A tensor without elements is stored once, as by torch; empty shards of other tensors are not stored. */
static bool is_stored(const fc_target *target, const fc_target_file *file, const fc_target_item *item) {
    const fc_tensor *t = target->tensors[item->tensor].source;
    if (fc_is_empty(t->ndim, t->shape)) {
        return file->rank == 0;
    }
    return item->owned && !fc_is_empty(t->ndim, item->dims + t->ndim);
}

static fc_code pickle_object(dcp_writer *w, const fc_target_tensor *t, bool *verbatim, fc_error *err) {
    bool readable = true;
    fc_code rc = strcmp(t->source->object->encoding, FC_TORCH_OBJECT) == 0
                     ? fc_torch_copy_object(w->target, t->source, 0, &w->pickler, &w->inners, &readable, err)
                     : fc_torch_write_object(w->target, t, &w->pickler, err);
    *verbatim = !readable;
    return rc;
}

static fc_code pickle_tensor(dcp_writer *w, const fc_dcp_item *item, uint64_t *bytes, fc_error *err) {
    const fc_target_tensor *t = &w->target->tensors[item->tensor];
    int64_t dims[2 * FC_MAX_DIMS];
    FC_TRY(fc_dcp_item_box(w->target, item, dims, err));
    const fc_box box = {t->source->ndim, dims, dims + t->source->ndim};
    fc_torch_tensor_out out = {.dtype = t->dtype, .ndim = box.ndim, .sizes = box.sizes};
    out.numel = (uint64_t)fc_box_volume(&box);
    *bytes = out.numel * fc_dtype_size(t->dtype);
    fc_torch_pickle_tensor(&w->pickler, &out);
    return FC_OK;
}

/*
 * Lays out the archive of an item in w->zip, its pickle in w->pickler.
 * @param data receives the place of a tensor's data; 0 for an object.
 */
static fc_code lay_out(dcp_writer *w, fc_dcp_item *item, uint64_t *data, fc_error *err) {
    const fc_target_tensor *t = &w->target->tensors[item->tensor];
    uint64_t bytes = 0;
    *data = 0;
    fc_torch_inners_free(&w->inners);
    fc_torch_pickle_free(&w->pickler);
    fc_torch_pickle_begin(&w->pickler, 2);
    FC_TRY(t->source->object ? pickle_object(w, t, &item->verbatim, err) : pickle_tensor(w, item, &bytes, err));
    if (item->verbatim) {
        return FC_OK;
    }
    FC_TRY(fc_torch_pickle_end(&w->pickler, err));
    FC_TRY(fc_torch_zip_begin(&w->zip, "archive", w->pickler.bytes, w->pickler.size, err));
    FC_TRY(t->source->object ? fc_torch_inners_add(&w->inners, &w->zip, err)
                             : fc_torch_zip_add_data(&w->zip, bytes, data, err));
    return fc_torch_zip_end(&w->zip, err);
}

static bool align(uint64_t *at, uint64_t to) {
    return fc_add_u64(*at, to - 1, at) && (*at = *at / to * to, true);
}

/* Places the item at `*end` and advances it. */
static fc_code place_item(dcp_writer *w, fc_target_item *item, fc_dcp_item *stored, uint64_t *end, fc_error *err) {
    const fc_target_tensor *t = &w->target->tensors[item->tensor];
    uint64_t data = 0, bytes = fc_target_item_bytes(w->target, item);
    FC_TRY(lay_out(w, stored, &data, err));
    stored->length = stored->verbatim ? bytes : w->zip.length;
    stored->offset = *end;
    bool ok = true;
    if (data > 0 && bytes >= PAGED) { /* `data` is a multiple of FC_TORCH_ALIGNMENT, so the item's offset is one, too */
        ok = fc_add_u64(stored->offset, data, &stored->offset) && align(&stored->offset, PAGE);
        stored->offset -= data;
    } else {
        ok = align(&stored->offset, FC_TORCH_ALIGNMENT);
    }
    ok = ok && fc_add_u64(stored->offset, stored->length, end) && *end <= INT64_MAX;
    item->offset = stored->offset + data;
    item->owned = item->owned && (stored->verbatim || !t->source->object); /* the engine leaves the others to us */
    return ok ? FC_OK : fc_fail(err, FC_EUNSUPPORTED, "the file of rank %u would be too large", (unsigned)stored->rank);
}

static fc_code add_item(dcp_writer *w, fc_target_file *file, fc_target_item *item, uint64_t *end, fc_error *err) {
    FC_NEED(fc_grow(&w->items, &w->capacity, w->nitems + 1, sizeof *w->items), err, w->staging);
    fc_dcp_item *stored = &w->items[w->nitems++];
    *stored = (fc_dcp_item){.tensor = item->tensor, .rank = file->rank};
    fc_code rc = place_item(w, item, stored, end, err);
    return rc == FC_OK ? rc : fc_context(err, rc, "tensor %.256s", w->target->tensors[item->tensor].name);
}

fc_code fc_dcp_reserve(fc_writer *writer, fc_target_file *file, fc_error *err) {
    dcp_writer *w = writer->state;
    char name[FC_DCP_FILE_NAME];
    uint64_t end = 0;
    fc_arena_free(w->scratch);
    w->scratch = fc_arena_new();
    fc_dcp_file_name(file->rank, name);
    file->path = w->scratch ? fc_arena_printf(w->scratch, "%s/%s", w->staging, name) : NULL;
    FC_NEED(file->path, err, w->staging);
    w->file_first = w->nitems;
    for (size_t i = 0; i < file->nitems; i++) {
        file->items[i].offset = 0;
        if (is_stored(w->target, file, &file->items[i])) {
            FC_TRY(add_item(w, file, &file->items[i], &end, err));
        }
    }
    return fc_create_zeros(file->path, end, err);
}

/* Writes the archive around the data, now that its CRC is known. */
static fc_code seal_item(dcp_writer *w, fc_dcp_item *stored, uint32_t crc32, int fd, const char *path, fc_error *err) {
    const fc_target_tensor *t = &w->target->tensors[stored->tensor];
    uint64_t data;
    if (stored->verbatim) {
        return FC_OK;
    }
    FC_TRY(lay_out(w, stored, &data, err));
    if (!t->source->object) {
        fc_torch_zip_set_crc32(&w->zip, 0, crc32);
    }
    return fc_torch_zip_write(&w->zip, fd, path, stored->offset, err);
}

fc_code fc_dcp_finish_file(fc_writer *writer, const fc_target_file *file, fc_error *err) {
    dcp_writer *w = writer->state;
    fc_dcp_item *stored = w->items + w->file_first, *last = w->items + w->nitems;
    int fd = fc_open(file->path, O_WRONLY, 0);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: cannot be reopened", file->path);
    }
    fc_code rc = FC_OK;
    for (size_t i = 0; i < file->nitems && stored < last; i++) {
        if (file->items[i].tensor == stored->tensor) {
            FC_TRY_GOTO(seal_item(w, stored++, file->items[i].crc32, fd, file->path, err), rc, out);
        }
    }
out:
    return fc_close_written(fd, rc, file->path, err);
}

static int compare_item_tensors(const void *a, const void *b) {
    const fc_dcp_item *x = a, *y = b;
    return x->tensor != y->tensor ? (x->tensor < y->tensor ? -1 : 1) : (x->rank > y->rank) - (x->rank < y->rank);
}

fc_code fc_dcp_finish(fc_writer *writer, const uint64_t *digests, fc_error *err) {
    dcp_writer *w = writer->state;
    (void)digests;
    fc_sort_items(w->items, w->nitems, sizeof *w->items, compare_item_tensors);
    return fc_dcp_write_metadata(w->target, w->staging, w->items, w->nitems, err);
}

fc_code fc_dcp_take_notes(fc_writer *writer, unsigned char **bytes, size_t *size, fc_error *err) {
    dcp_writer *w = writer->state;
    (void)err;
    *bytes = (unsigned char *)w->items;
    *size = w->nitems * sizeof *w->items;
    w->items = NULL;
    w->nitems = w->capacity = 0;
    return FC_OK;
}

fc_code fc_dcp_add_notes(fc_writer *writer, const void *notes, size_t size, fc_error *err) {
    dcp_writer *w = writer->state;
    const size_t n = size / sizeof *w->items;
    FC_NEED(fc_grow(&w->items, &w->capacity, w->nitems + n, sizeof *w->items), err, w->staging);
    if (n > 0) {
        memcpy(w->items + w->nitems, notes, n * sizeof *w->items);
    }
    w->nitems += n;
    return FC_OK;
}

void fc_dcp_destroy(fc_writer *writer) {
    dcp_writer *w = writer->state;
    if (w) {
        fc_torch_inners_free(&w->inners);
        fc_torch_pickle_free(&w->pickler);
        fc_torch_zip_free(&w->zip);
        fc_arena_free(w->scratch);
        free(w->items);
        free(w->staging);
        free(w);
        writer->state = NULL;
    }
}
