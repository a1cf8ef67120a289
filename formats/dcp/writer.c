/*
 * Writes DCP: a directory with `.metadata` and one data file per rank, `__<rank>_0.distcp`; a full checkpoint has one
 * rank. Each box becomes an item: a torch.save archive around the data, which torch.load reads on its own. It is
 * written when the data is, or at once if it has none.
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
#include "io/staged_objects.h"
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

/* The archive of an item, and what it borrows. Starts with zeros. */
typedef struct archive {
    fc_torch_pickler pickler;
    fc_torch_zip zip;
    fc_torch_inners inners;
} archive;

typedef struct dcp_writer {
    const fc_target *target;
    char *staging;
    fc_dcp_item *items; /* the items of all files so far */
    size_t nitems, capacity;
    size_t file_first; /* index of the first item of the current file */
    fc_arena *scratch; /* owns the path of the current file */
    const char *path;
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

static void free_archive(archive *a) {
    fc_torch_inners_free(&a->inners);
    fc_torch_pickle_free(&a->pickler);
    fc_torch_zip_free(&a->zip);
}

static fc_code pickle_object(const dcp_writer *w, const fc_target_tensor *t, archive *a, bool *verbatim,
                             fc_error *err) {
    bool readable = true;
    fc_code rc = strcmp(t->source->object->encoding, FC_TORCH_OBJECT) == 0
                     ? fc_torch_copy_object(w->target, t->source, 0, &a->pickler, &a->inners, &readable, err)
                     : fc_torch_write_object(w->target, t, &a->pickler, err);
    *verbatim = !readable;
    return rc;
}

static fc_code pickle_tensor(const dcp_writer *w, const fc_dcp_item *item, archive *a, uint64_t *bytes, fc_error *err) {
    const fc_target_tensor *t = &w->target->tensors[item->tensor];
    int64_t dims[2 * FC_MAX_DIMS];
    FC_TRY(fc_dcp_item_box(w->target, item, dims, err));
    const fc_box box = {t->source->ndim, dims, dims + t->source->ndim};
    fc_torch_tensor_out out = {.dtype = t->dtype, .ndim = box.ndim, .sizes = box.sizes};
    out.numel = (uint64_t)fc_box_volume(&box);
    *bytes = out.numel * fc_dtype_size(t->dtype);
    fc_torch_pickle_tensor(&a->pickler, &out);
    return FC_OK;
}

/*
 * Lays out the archive of an item.
 * @param a the archive of the item before, or zeros.
 * @param verbatim receives whether the item has no archive, because the engine copies its bytes.
 * @param data receives the place of a tensor's data; 0 for an object.
 */
static fc_code lay_out(const dcp_writer *w, const fc_dcp_item *item, archive *a, bool *verbatim, uint64_t *data,
                       fc_error *err) {
    const fc_target_tensor *t = &w->target->tensors[item->tensor];
    uint64_t bytes = 0;
    *data = 0;
    *verbatim = false;
    fc_torch_inners_free(&a->inners);
    fc_torch_pickle_free(&a->pickler);
    fc_torch_pickle_begin(&a->pickler, 2);
    FC_TRY(t->source->object ? pickle_object(w, t, a, verbatim, err) : pickle_tensor(w, item, a, &bytes, err));
    if (*verbatim) {
        return FC_OK;
    }
    FC_TRY(fc_torch_pickle_end(&a->pickler, err));
    FC_TRY(fc_torch_zip_begin(&a->zip, "archive", a->pickler.bytes, a->pickler.size, err));
    FC_TRY(t->source->object ? fc_torch_inners_add(&a->inners, &a->zip, err)
                             : fc_torch_zip_add_data(&a->zip, bytes, data, err));
    return fc_torch_zip_end(&a->zip, err);
}

static bool align(uint64_t *at, uint64_t to) {
    return fc_add_u64(*at, to - 1, at) && (*at = *at / to * to, true);
}

/* Places the item at `*end` and advances it. */
static fc_code place_item(const dcp_writer *w, archive *a, fc_target_item *item, fc_dcp_item *stored, uint64_t *end,
                          fc_error *err) {
    const fc_target_tensor *t = &w->target->tensors[item->tensor];
    uint64_t data = 0, bytes = fc_target_item_bytes(w->target, item);
    FC_TRY(lay_out(w, stored, a, &stored->verbatim, &data, err));
    stored->length = stored->verbatim ? bytes : a->zip.length;
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

static fc_code add_item(dcp_writer *w, archive *a, fc_target_file *file, fc_target_item *item, uint64_t *end,
                        fc_error *err) {
    FC_NEED(fc_grow(&w->items, &w->capacity, w->nitems + 1, sizeof *w->items), err, w->staging);
    fc_dcp_item *stored = &w->items[w->nitems++];
    *stored = (fc_dcp_item){.tensor = item->tensor, .rank = file->rank};
    fc_code rc = place_item(w, a, item, stored, end, err);
    return rc == FC_OK ? rc : fc_context(err, rc, "tensor %.256s", w->target->tensors[item->tensor].name);
}

/* Places all items. `*size` receives the size of the file. */
static fc_code add_items(dcp_writer *w, archive *a, fc_target_file *file, uint64_t *size, fc_error *err) {
    *size = 0;
    for (size_t i = 0; i < file->nitems; i++) {
        file->items[i].offset = 0;
        if (is_stored(w->target, file, &file->items[i])) {
            FC_TRY(add_item(w, a, file, &file->items[i], size, err));
        }
    }
    return FC_OK;
}

/* Writes the archive around the data, whose CRC is known. */
static fc_code write_archive(const dcp_writer *w, const fc_dcp_item *stored, archive *a, uint32_t crc32, int fd,
                             fc_error *err) {
    uint64_t data;
    bool verbatim;
    FC_TRY(lay_out(w, stored, a, &verbatim, &data, err));
    if (data > 0) {
        fc_torch_zip_set_crc32(&a->zip, 0, crc32);
    }
    return fc_torch_zip_write(&a->zip, fd, w->path, stored->offset, err);
}

/* Whether the engine writes no bytes of the item. */
static bool has_no_data(const dcp_writer *w, const fc_dcp_item *stored) {
    const fc_tensor *t = w->target->tensors[stored->tensor].source;
    return !stored->verbatim && (t->object || fc_is_empty(t->ndim, t->shape));
}

/* Writes the archives of objects and of tensors without elements. */
static fc_code write_without_data(const dcp_writer *w, archive *a, fc_error *err) {
    int fd = -1;
    fc_code rc = FC_OK;
    for (size_t i = w->file_first; i < w->nitems && rc == FC_OK; i++) {
        if (!has_no_data(w, &w->items[i])) {
            continue;
        }
        if (fd < 0 && (fd = fc_open(w->path, O_WRONLY, 0)) < 0) {
            return fc_fail_errno(err, errno, "%s: cannot be reopened", w->path);
        }
        rc = write_archive(w, &w->items[i], a, 0, fd, err);
    }
    return fc_close_written(fd, rc, w->path, err);
}

/* Between archives nothing is written. */
static fc_code leave_gaps(const dcp_writer *w, fc_error *err) {
    uint64_t end = 0;
    for (size_t i = w->file_first; i < w->nitems; i++) {
        FC_TRY(fc_staged_final(w->path, end, w->items[i].offset - end, err));
        end = w->items[i].offset + w->items[i].length;
    }
    return FC_OK;
}

fc_code fc_dcp_reserve(fc_writer *writer, fc_target_file *file, fc_error *err) {
    dcp_writer *w = writer->state;
    char name[FC_DCP_FILE_NAME];
    archive a = {0};
    uint64_t size;
    fc_arena_free(w->scratch);
    w->scratch = fc_arena_new();
    fc_dcp_file_name(file->rank, name);
    w->path = file->path = w->scratch ? fc_arena_printf(w->scratch, "%s/%s", w->staging, name) : NULL;
    FC_NEED(file->path, err, w->staging);
    w->file_first = w->nitems;
    fc_code rc;
    FC_TRY_GOTO(add_items(w, &a, file, &size, err), rc, out);
    FC_TRY_GOTO(fc_create_zeros(w->path, size, err), rc, out);
    FC_TRY_GOTO(leave_gaps(w, err), rc, out);
    rc = write_without_data(w, &a, err);
out:
    free_archive(&a);
    return rc;
}

/* The item of a value in the current file, whose items are in the order of the values. */
static const fc_dcp_item *find_stored(const dcp_writer *w, uint32_t tensor) {
    size_t low = w->file_first;
    FC_BISECT(low, w->nitems, middle, w->items[middle].tensor < tensor);
    return &w->items[low];
}

fc_code fc_dcp_finish_item(fc_writer *writer, const fc_target_item *item, int fd, fc_error *err) {
    const dcp_writer *w = writer->state;
    const fc_dcp_item *stored = find_stored(w, item->tensor);
    archive a = {0};
    if (stored->verbatim) {
        return FC_OK;
    }
    fc_code rc = write_archive(w, stored, &a, item->crc32, fd, err);
    free_archive(&a);
    return rc;
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
        fc_arena_free(w->scratch);
        free(w->items);
        free(w->staging);
        free(w);
        writer->state = NULL;
    }
}
