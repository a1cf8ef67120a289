/*
 * Verifying what DCP stores beside the tensors' bytes: every other record of every item, by the CRC-32 of the archive.
 * (The records of tensors are read by lib/verify, with threads.) From the items of the manifest to findings.
 */
#include "dcp/dcp.h"

#include "fsdpckpt/verify.h"
#include "torch/item.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 64 << 20 }; /* a record of an object that is read as a whole */

/* An item being looked at. */
typedef struct item {
    const fc_checkpoint *checkpoint;
    const fc_tensor *tensor;
    const fc_chunk *chunk;
    struct fc_findings *findings;
    bool covered; /* every record of it that was looked at has a CRC */
} item;

static void note(item *it, uint64_t offset, const char *message) {
    const fc_defect place = {.file = it->checkpoint->files[it->chunk->file].name,
                             .tensor = it->tensor->name,
                             .has_offset = true,
                             .offset = offset};
    fc_finding(it->findings, &place, "%s", message);
    it->covered = false;
}

/* The record of a tensor's data is the one thing that is not read here. */
static bool is_tensor_data(const item *it, const fc_torch_item *archive, const fc_zip_entry *entry) {
    return !it->tensor->object && strncmp(entry->name + archive->prefix, "data/", 5) == 0;
}

static fc_code check_records(item *it, fc_torch_item *archive, fc_error *err) {
    for (size_t i = 0; i < archive->zip.nentries; i++) {
        const fc_zip_entry *entry = &archive->zip.entries[i];
        unsigned char *bytes = NULL;
        if (is_tensor_data(it, archive, entry)) {
            continue;
        }
        it->covered &= entry->crc != 0 || entry->size == 0;
        if (entry->size > MOST_BYTES) {
            it->covered = false;
            continue;
        }
        fc_code rc = fc_zip_read(&archive->zip, entry, &bytes, err); /* compares the CRC */
        free(bytes);
        if (rc == FC_ENOMEM) {
            return rc;
        }
        if (rc != FC_OK) {
            note(it, entry->data, err->message);
        }
    }
    return FC_OK;
}

static fc_code check_item(item *it, fc_error *err) {
    const fc_chunk *chunk = it->chunk;
    fc_torch_item archive;
    int fd;
    fc_code rc = fc_dcp_acquire(it->checkpoint, chunk->file, &fd, err);
    if (rc == FC_OK) {
        unsigned char *bytes = fc_dcp_read_ahead(it->checkpoint, chunk->file, chunk->offset, chunk->length);
        rc = fc_torch_item_open_read(fd, it->checkpoint->files[chunk->file].path, chunk->offset, chunk->length, bytes,
                                     &archive, err);
        if (rc == FC_OK) {
            rc = check_records(it, &archive, err);
            fc_torch_item_close(&archive);
        } else {
            it->covered = false; /* reported with the tensor's extent */
            rc = rc == FC_ENOMEM ? rc : FC_OK;
        }
        fc_dcp_release(it->checkpoint, chunk->file);
    }
    return rc == FC_OK || rc == FC_ENOMEM ? rc : (note(it, chunk->offset, err->message), FC_OK);
}

fc_code fc_dcp_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                      fc_error *err) {
    fc_error local;
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < checkpoint->ntensors; i++) {
        const fc_tensor *tensor = &checkpoint->tensors[i];
        bool covered = tensor->nchunks > 0;
        for (size_t k = 0; rc == FC_OK && k < tensor->nchunks; k++) {
            item it = {checkpoint, tensor, &tensor->chunks[k], findings, true};
            rc = check_item(&it, &local);
            covered &= it.covered;
        }
        if (tensor->object && covered) { /* counted as only read, as its bytes are no single record */
            report->digested++;
            report->undigested--;
            report->undigested_bytes -= tensor->chunks[0].length;
        }
    }
    if (rc != FC_OK && err) {
        *err = local;
    }
    return rc;
}
