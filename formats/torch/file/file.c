/*
 * Opens one torch.save file: recognises its kind, loads its pickle and finds its storages. The resulting torch_file
 * lives while headers are read.
 */
#include "torch/file/file.h"

#include "base/checked.h"
#include "checkpoint/own_files.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/stand_in.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool fc_torch_is_zip(const unsigned char *head, size_t size) {
    return size >= 4 && memcmp(head, "PK\x03\x04", 4) == 0;
}

bool fc_torch_is_legacy(const unsigned char *head, size_t size) {
    /* PROTO, then LONG1 with the ten bytes of the magic number. */
    static const unsigned char magic[] = {0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19};
    return size >= 2 + sizeof magic && head[0] == 0x80 && memcmp(head + 2, magic, sizeof magic) == 0;
}

bool fc_torch_is_tar(const unsigned char *head, size_t size) {
    static const char *const first[] = {"sys_info", "pickle", "storages", "tensors", "./sys_info", "./storages"};
    bool known = false;
    for (size_t i = 0; i < sizeof first / sizeof *first && size >= 512; i++) {
        known = known || strncmp((const char *)head, first[i], strlen(first[i])) == 0;
    }
    return known && memcmp(head + 257, "ustar", 5) == 0;
}

/* A zip file may be anything, so the error says what it probably is. */
static fc_code open_zip(torch_file *f, fc_error *err) {
    FC_TRY(fc_torch_item_open_file(f->fd, f->path, f->size, &f->item, err));
    for (size_t i = 0; i < f->item.zip.nentries; i++) {
        const char *slash = strchr(f->item.zip.entries[i].name, '/');
        if (slash && strcmp(slash, "/constants.pkl") == 0) {
            return fc_fail(err, FC_EUNSUPPORTED,
                           "%s: a TorchScript archive (torch.jit.save), which contains a program; save the module's "
                           "state_dict() with torch.save",
                           f->path);
        }
    }
    f->p = f->item.pickle;
    f->swap = f->item.big_endian;
    return FC_OK;
}

/* The shortest value takes 4 bytes of a pickle, but about 500 bytes with its name and path. */
static uint64_t most_unfolded(const torch_file *f) {
    enum { RATIO = 128, SPARE = 16 << 20 };
    return SPARE + RATIO * f->p->size;
}

static fc_code allow_unfolding(torch_file *f, fc_error *err) {
    f->left = malloc(sizeof *f->left);
    FC_NEED(f->left, err, f->path);
    *f->left = most_unfolded(f);
    return FC_OK;
}

/* Reads the manifest of the open file, whose first bytes say which kind of file it is. */
static fc_code read_contents(torch_file *f, fc_error *err) {
    unsigned char head[512];
    size_t n = f->size < sizeof head ? (size_t)f->size : sizeof head;
    FC_TRY(fc_pread_full(f->fd, head, n, 0, f->path, err));
    if (fc_torch_is_zip(head, n)) {
        return open_zip(f, err);
    }
    if (fc_torch_is_legacy(head, n)) {
        return fc_torch_legacy_open(f, err);
    }
    if (fc_torch_is_tar(head, n)) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: a tar file of torch before 0.1.10 (2017), which is not supported nor examined, so it may "
                       "be hostile; load it and save it "
                       "again with a newer PyTorch",
                       f->path);
    }
    FC_TRY(fc_check_stand_in(f->path, err));
    return fc_fail(err, FC_ECORRUPT, "%s: not a torch.save file: it begins neither like a zip file nor like a pickle",
                   f->path);
}

fc_code fc_torch_file_open(const char *path, uint32_t index, torch_file *f, fc_error *err) {
    *f = (torch_file){.path = path, .index = index, .fd = -1};
    int fd;
    FC_TRY(fc_open_input(path, &fd, &f->size, err));
    f->fd = fd;
    fc_code rc;
    FC_TRY_GOTO(read_contents(f, err), rc, failed);
    FC_TRY_GOTO(allow_unfolding(f, err), rc, failed);
    return FC_OK;
failed:
    fc_torch_file_close(f);
    return rc;
}

fc_code fc_torch_file_describe(const char *path, uint32_t index, const unsigned char *bytes, size_t size, torch_file *f,
                               fc_error *err) {
    const fc_pickle_source source = {path, 0, size, -1, bytes};
    int fd;
    fc_code rc;
    *f = (torch_file){.path = path, .index = index, .fd = -1, .described = true};
    FC_TRY(fc_open_input(path, &fd, &f->size, err));
    f->fd = fd;
    FC_TRY_GOTO(fc_pickle_load(&source, FC_PICKLE_ITEM, &f->pickle, err), rc, failed);
    f->p = f->pickle;
    FC_TRY_GOTO(allow_unfolding(f, err), rc, failed);
    return FC_OK;
failed:
    fc_torch_file_close(f);
    return rc;
}

fc_code fc_torch_is_file(const char *path, bool *is, fc_error *err) {
    torch_file f;
    const fc_code rc = fc_own_if_read(fc_torch_file_open(path, 0, &f, err), is);
    fc_torch_file_close(&f);
    return rc;
}

fc_code fc_torch_unfold(const torch_file *f, uint64_t bytes, fc_error *err) {
    if (bytes <= *f->left) {
        *f->left -= bytes;
        return FC_OK;
    }
    *f->left = 0;
    return fc_fail(err, FC_EUNSUPPORTED,
                   "%s: its pickle has %" PRIu64 " bytes, but its names and objects would take more than %" PRIu64
                   ": too many of them share values",
                   f->path, f->p->size, most_unfolded(f));
}

fc_code fc_torch_check_header(const fc_checkpoint *checkpoint, size_t index, fc_error *err) {
    torch_file f;
    fc_code rc = fc_torch_file_open(checkpoint->files[index].path, (uint32_t)index, &f, err);
    fc_torch_file_close(&f);
    return rc;
}

void fc_torch_file_close(torch_file *f) {
    fc_torch_item_close(&f->item);
    fc_pickle_free(f->pickle);
    free(f->storages);
    free(f->left);
    if (f->fd >= 0) {
        close(f->fd);
    }
    *f = (torch_file){.fd = -1};
}

/* The storage of a file that a pickle describes. */
static fc_code described_storage(const torch_file *f, const fc_torch_tensor *tensor, torch_record *out, fc_error *err) {
    size_t n;
    const uint64_t offset = strtoull(fc_pickle_bytes(f->p, tensor->storage_key, &n), NULL, 10);
    if (!fc_range_within(offset, tensor->storage_bytes, f->size)) {
        return fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": the data of a tensor ends after the end of the file",
                       f->path, offset);
    }
    *out = (torch_record){offset, tensor->storage_bytes, tensor->storage_bytes, 0, FC_ZIP_STORED, f->index};
    return FC_OK;
}

fc_code fc_torch_file_storage(const torch_file *f, const fc_torch_tensor *tensor, torch_record *out, fc_error *err) {
    const fc_zip_entry *entry;
    if (f->described) {
        return described_storage(f, tensor, out, err);
    }
    if (f->pickle) {
        return fc_torch_legacy_storage(f, tensor, out, err);
    }
    FC_TRY(fc_torch_item_record(&f->item, tensor, &entry, err));
    if (entry->method != FC_ZIP_STORED && entry->size / FC_ZIP_MAX_RATIO > entry->stored) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: offset %" PRIu64 ": record %s: %" PRIu64 " bytes cannot deflate to %" PRIu64, f->path,
                       entry->data, entry->name, entry->size, entry->stored);
    }
    *out = (torch_record){entry->data, entry->stored, entry->size, entry->crc, entry->method, f->index};
    return FC_OK;
}

fc_code fc_torch_find_extent(const torch_file *f, fc_pv v, fc_torch_tensor *t, fc_arena *arena, torch_extent **out,
                             fc_error *err) {
    FC_TRY(fc_torch_tensor_decode(f->p, v, t, err));
    if (!fc_torch_shape_fits(t->dtype, t->ndim, t->sizes)) {
        return fc_fail(err, FC_ECORRUPT, "the pickled tensor is damaged: its size is invalid");
    }
    torch_extent *extent = fc_arena_calloc(arena, 1, sizeof *extent + (size_t)t->ndim * sizeof *extent->strides);
    FC_NEED(extent, err, f->path);
    extent->first = t->first;
    extent->negate = t->negate;
    extent->conjugate = t->conjugate;
    extent->swap = f->swap && fc_dtype_get(t->dtype)->swap_size > 1;
    for (int i = 0; i < t->ndim; i++) {
        extent->strides[i] = t->strides[i];
    }
    *out = extent;
    return fc_torch_file_storage(f, t, &extent->record, err);
}

bool fc_torch_shape_fits(fc_dtype dtype, int ndim, const int64_t *shape) {
    int64_t bytes = fc_dtype_size(dtype);
    for (int i = 0; i < ndim; i++) { /* the other sizes of an empty tensor must not overflow, either */
        if (shape[i] != 0 && !fc_mul_i64(bytes, shape[i], &bytes)) {
            return false;
        }
    }
    return true;
}
