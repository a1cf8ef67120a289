/*
 * Fuzzes the zip reader and the opening of torch.save archives, through a file in memory.
 */
#include "torch/object/item.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Checks what the reader guarantees: every record is within the archive, and none overlaps the directory. */
static void check_records(fc_zip *zip) {
    for (size_t i = 0; i < zip->nentries; i++) {
        const fc_zip_entry *e = &zip->entries[i];
        unsigned char *bytes;
        fc_error err;
        if (e->data < zip->offset || e->data + e->stored > zip->records_end ||
            zip->records_end > zip->offset + zip->length || fc_zip_find(zip, e->name) != e) {
            abort();
        }
        fc_zip_read(zip, e, &bytes, &err);
        free(bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int fd = -1;
    fc_error err;
    fc_zip zip;
    fc_torch_item item;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 5) != (ssize_t)size) {
        return 0;
    }
    if (fc_zip_open(fd, "fuzz", 5, size, &zip, &err) == FC_OK) {
        check_records(&zip);
        fc_zip_close(&zip);
    }
    if (fc_torch_item_open(fd, "fuzz", 5, size, &item, &err) == FC_OK) {
        fc_torch_tensor tensor = {0};
        const fc_zip_entry *entry;
        if (fc_torch_tensor_decode(item.pickle, item.pickle->root, &tensor, &err) == FC_OK) {
            fc_torch_item_storage(&item, &tensor, &entry, &err);
        }
        fc_torch_item_close(&item);
    }
    return 0;
}
