/*
 * The CRC-32s of a torch.save archive, for verifying: every record but the tensors' data, which is read elsewhere, by
 * threads. From an open archive to findings.
 */
#include "torch/item.h"

#include "fsdpckpt/verify.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 64 << 20 }; /* of a record that is read as a whole */

static bool is_data(const fc_torch_item *archive, const fc_zip_entry *entry) {
    return strlen(entry->name) > archive->prefix && strncmp(entry->name + archive->prefix, "/data/", 6) == 0;
}

fc_code fc_torch_check_records(fc_torch_item *archive, bool read_data, const fc_defect *item,
                               struct fc_findings *findings, bool *covered, fc_error *err) {
    for (size_t i = 0; i < archive->zip.nentries; i++) {
        const fc_zip_entry *entry = &archive->zip.entries[i];
        unsigned char *bytes = NULL;
        fc_error found;
        if (!read_data && is_data(archive, entry) && entry->method == FC_ZIP_STORED) {
            continue;
        }
        if (entry->size > MOST_BYTES || (entry->crc == 0 && entry->size > 0)) {
            *covered = false;
            continue;
        }
        fc_code rc = fc_zip_read(&archive->zip, entry, &bytes, &found); /* compares the CRC */
        free(bytes);
        if (rc == FC_ENOMEM) {
            return fc_fail(err, rc, "%s", found.message);
        }
        if (rc != FC_OK) {
            fc_defect place = *item;
            place.has_offset = true;
            place.offset = entry->data;
            fc_finding(findings, &place, "%s", found.message);
            *covered = false;
        }
    }
    return FC_OK;
}
