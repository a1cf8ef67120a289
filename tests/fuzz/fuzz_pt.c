/*
 * Fuzzes the opening of torch.save files: of whole files, and of a pickle in an archive with storages, which lets the
 * fuzzer reach the code behind the pickle. DTensors and ShardedTensors are read as from a rank's file.
 */
#include "pt/ranks.h"
#include "torch/zip/write.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Checks what the reader guarantees: extents are within their files, and objects can be made. */
static void check_tensors(const fc_checkpoint *checkpoint, uint64_t file_size) {
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        fc_extent e;
        fc_error err;
        if (t->nchunks == 0) {
            continue;
        }
        if (fc_checkpoint_extent(checkpoint, t, 0, &e, &err) != FC_OK) {
            abort();
        }
        if (!t->object && (e.offset + e.length > file_size || e.first > e.decoded)) {
            abort();
        }
        if (t->object && e.decoded < 1 << 20) {
            void *bytes = malloc((size_t)e.decoded + 1);
            if (!bytes) {
                abort();
            }
            fc_torch_read(checkpoint, t, 0, bytes, &err);
            free(bytes);
        }
    }
}

static void look_into_shares(const char *path) {
    torch_file f;
    fc_error err;
    fc_pt_shard share;
    torch_leaves leaves = {.arena = fc_arena_new()};
    if (leaves.arena && fc_torch_file_open(path, 0, &f, &err) == FC_OK) {
        fc_torch_flatten(&f, NULL, &leaves, &err);
        for (size_t i = 0; i < leaves.count; i++) {
            if (leaves.items[i].kind == TORCH_DTENSOR) {
                fc_pt_dtensor_shard(&f, leaves.items[i].v, &share, &err);
            } else if (leaves.items[i].kind == TORCH_SHARDED_TENSOR) {
                size_t n = fc_pt_sharded_count(&f, leaves.items[i].v);
                for (size_t k = 0; k <= n && k < 16; k++) {
                    fc_pt_sharded_shard(&f, leaves.items[i].v, k, &share, &err);
                }
            }
        }
        fc_torch_file_close(&f);
    }
    free(leaves.items);
    fc_arena_free(leaves.arena);
}

/* Writes an archive with the pickle and eight storages of 64 bytes. */
static bool wrap(int fd, const uint8_t *pickle, size_t size, uint64_t *length) {
    fc_torch_zip zip = {0};
    fc_error err;
    uint64_t offset;
    fc_code rc = fc_torch_zip_begin(&zip, "x", pickle, size, &err);
    for (int i = 0; i < 8 && rc == FC_OK; i++) {
        rc = fc_torch_zip_add_data(&zip, 64, &offset, &err);
    }
    rc = rc == FC_OK ? fc_torch_zip_end(&zip, &err) : rc;
    rc = rc == FC_OK ? fc_torch_zip_write(&zip, fd, "x", 0, &err) : rc;
    *length = zip.length;
    fc_torch_zip_free(&zip);
    return rc == FC_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int fd = -1;
    char path[64];
    uint64_t length = size;
    fc_checkpoint *checkpoint;
    fc_error err;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    }
    bool pickle = size >= 2 && data[0] == 0x80 && !fc_torch_is_legacy(data, size);
    if (ftruncate(fd, 0) != 0 ||
        (pickle ? !wrap(fd, data, size, &length) : pwrite(fd, data, size, 0) != (ssize_t)size)) {
        return 0;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (fc_checkpoint_open(path, NULL, &checkpoint, &err) == FC_OK) {
        if (checkpoint->format == fc_format_find("pt")) {
            check_tensors(checkpoint, length);
        }
        fc_checkpoint_close(checkpoint);
    }
    look_into_shares(path);
    return 0;
}
