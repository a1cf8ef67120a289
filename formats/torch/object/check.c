/*
 * Compares the records of a torch.save archive with their CRC-32s, for verify. Tensor data is left to worker threads.
 */
#include "torch/object/item.h"
#include "verify/report.h"

#include "fsdpckpt/try.h"
#include "fsdpckpt/verify.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 64 << 20 }; /* larger records are not checked here */

static bool is_data(const fc_torch_item *archive, const fc_zip_entry *entry) {
    return strlen(entry->name) > archive->prefix && strncmp(entry->name + archive->prefix, "/data/", 6) == 0;
}

/* Reads a record, which compares its CRC. @param covered set to false if the record has no CRC or is too large. */
static fc_code check_record(fc_torch_item *archive, const fc_zip_entry *entry, bool *covered, fc_error *err) {
    unsigned char *bytes = NULL;
    if (entry->size > MOST_BYTES || (entry->crc == 0 && entry->size > 0)) {
        *covered = false;
        return FC_OK;
    }
    fc_code rc = fc_zip_read(&archive->zip, entry, &bytes, err);
    free(bytes);
    return rc;
}

fc_code fc_torch_check_archive(fc_torch_item *archive, fc_error *err) {
    bool covered;
    for (size_t i = 0; i < archive->zip.nentries; i++) {
        FC_TRY(check_record(archive, &archive->zip.entries[i], &covered, err));
    }
    return FC_OK;
}

fc_code fc_torch_check_records(fc_torch_item *archive, bool read_data, const fc_defect *item,
                               struct fc_findings *findings, bool *covered, fc_error *err) {
    for (size_t i = 0; i < archive->zip.nentries; i++) {
        const fc_zip_entry *entry = &archive->zip.entries[i];
        fc_error found;
        if (!read_data && is_data(archive, entry) && entry->method == FC_ZIP_STORED) {
            continue;
        }
        fc_code rc = check_record(archive, entry, covered, &found);
        if (rc == FC_ENOMEM) {
            return fc_fail(err, rc, "%s", found.message);
        }
        if (rc != FC_OK) {
            fc_defect place = *item;
            place.has_offset = true;
            place.offset = entry->data;
            fc_report_defect(findings, &place, "%s", found.message);
            *covered = false;
        }
    }
    return FC_OK;
}
