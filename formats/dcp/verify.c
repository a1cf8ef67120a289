/*
 * Verifies the records of objects by the CRC-32s of their archives. The archives of tensors are verified when they are
 * opened for their extents (extent.c).
 */
#include "dcp/builder.h"
#include "dcp/extent.h"
#include "dcp/files.h"

#include "dcp/packed.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/verify.h"
#include "torch/object/item.h"
#include "verify/report.h"

/* Opens the whole archive of an item at an open file. */
static fc_code open_whole(int fd, const fc_checkpoint *checkpoint, const fc_chunk *chunk, fc_torch_item *archive,
                          fc_error *err) {
    const char *path = checkpoint->files[chunk->place.file].path;
    uint64_t length = chunk->place.length;
    unsigned char *bytes = NULL;
    if (fc_dcp_is_packed(chunk)) {
        FC_TRY(fc_dcp_unpack(fd, path, chunk, &bytes, &length, err));
    } else {
        bytes = fc_dcp_read_ahead(checkpoint, chunk->place.file, chunk->place.offset, length);
    }
    return fc_torch_item_open_read(fd, path, chunk->place.offset, length, bytes, archive, err);
}

/* Checks the records of the item at an open file. */
static fc_code check_open_item(int fd, const fc_checkpoint *checkpoint, const fc_tensor *object, const fc_chunk *chunk,
                               struct fc_findings *findings, bool *covered, fc_error *err) {
    const fc_file *file = &checkpoint->files[chunk->place.file];
    const fc_defect place = {
        .file = file->name, .tensor = object->name, .has_offset = true, .offset = chunk->place.offset};
    fc_torch_item archive;
    fc_error found;
    fc_code rc = open_whole(fd, checkpoint, chunk, &archive, &found);
    if (rc != FC_OK) {
        *covered = false; /* already reported when the object was decoded; refused objects are not decoded */
        if (object->object->refusal && rc == FC_ECORRUPT) {
            fc_report_defect(findings, &place, "tensor %.256s: %s", object->name, found.message);
        }
        return rc == FC_ENOMEM ? fc_fail(err, rc, "%s", found.message) : FC_OK;
    }
    rc = fc_torch_check_records(&archive, true, &place, findings, covered, err);
    fc_torch_item_close(&archive);
    return rc;
}

/* Opens the item of a chunk and checks its records. */
static fc_code check_item(const fc_checkpoint *checkpoint, const fc_tensor *object, const fc_chunk *chunk,
                          struct fc_findings *findings, bool *covered, fc_error *err) {
    const fc_file *file = &checkpoint->files[chunk->place.file];
    const fc_defect place = {
        .file = file->name, .tensor = object->name, .has_offset = true, .offset = chunk->place.offset};
    fc_error found;
    int fd;
    if (fc_dcp_acquire(checkpoint, chunk->place.file, &fd, &found) != FC_OK) {
        fc_report_defect(findings, &place, "%s", found.message);
        *covered = false;
        return FC_OK;
    }
    fc_code rc = check_open_item(fd, checkpoint, object, chunk, findings, covered, err);
    fc_dcp_release(checkpoint, chunk->place.file);
    return rc;
}

fc_code fc_dcp_check_object(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err) {
    const fc_chunk *chunk = &object->chunks[0];
    fc_torch_item archive;
    fc_code rc;
    int fd;
    FC_TRY(fc_dcp_acquire(checkpoint, chunk->place.file, &fd, err));
    FC_TRY_GOTO(open_whole(fd, checkpoint, chunk, &archive, err), rc, out);
    rc = fc_torch_check_archive(&archive, err);
    fc_torch_item_close(&archive);
out:
    fc_dcp_release(checkpoint, chunk->place.file);
    if (rc == FC_EUNSUPPORTED) { /* a pickle that cannot be decoded is copied unchanged */
        return FC_OK;
    }
    return rc == FC_OK ? rc : fc_context(err, rc, "object %.256s", object->name);
}

/* Checks the other archives of a refused tensor. */
static fc_code check_chunks(const fc_checkpoint *checkpoint, const fc_tensor *object, struct fc_findings *findings,
                            bool *covered, fc_error *err) {
    const fc_dcp_chunks *all = object->detail;
    fc_code rc = FC_OK;
    for (size_t i = 1; i < all->count && rc == FC_OK; i++) {
        fc_chunk chunk = all->chunks[i];
        bool good = true;
        chunk.place.file += object->chunks[0].place.file - all->first_file;
        rc = check_item(checkpoint, object, &chunk, findings, &good, err);
        *covered = *covered && good;
    }
    return rc;
}

fc_code fc_dcp_verify_object(const fc_checkpoint *checkpoint, const fc_tensor *object, struct fc_findings *findings,
                             struct fc_verify_report *report, fc_error *err) {
    bool covered =
        object->nchunks > 0 && (object->chunks[0].detail == DCP_ARCHIVE || fc_dcp_is_packed(&object->chunks[0]));
    FC_TRY(covered ? check_item(checkpoint, object, &object->chunks[0], findings, &covered, err) : FC_OK);
    if (object->object->refusal && object->detail) {
        FC_TRY(check_chunks(checkpoint, object, findings, &covered, err));
    }
    if (covered) {
        fc_verify_covered(checkpoint, object, report);
    }
    return FC_OK;
}

fc_code fc_dcp_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                      fc_error *err) {
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *tensor = &checkpoint->tensors[i];
        FC_TRY(tensor->object ? fc_dcp_verify_object(checkpoint, tensor, findings, report, err) : FC_OK);
    }
    return FC_OK;
}
