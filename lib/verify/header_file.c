/*
 * Digests a header file that the manifest does not list, such as an index, for a seal.
 */
#include "verify/regions.h"

#include "base/crc.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "verify/report.h"

#include <stdlib.h>
#include <unistd.h>

static fc_code digest_open(int fd, const char *path, uint64_t size, uint64_t *crc, fc_error *err) {
    enum { BUFFER = 64 << 10 };
    unsigned char *buffer = malloc(BUFFER);
    fc_code rc;
    *crc = 0;
    FC_TRY_GOTO(buffer ? FC_OK : fc_no_memory(err, path), rc, out);
    for (uint64_t at = 0; at < size; at += BUFFER) {
        size_t n = size - at < BUFFER ? (size_t)(size - at) : BUFFER;
        FC_TRY_GOTO(fc_pread_full(fd, buffer, n, at, path, err), rc, out);
        *crc = fc_crc64(*crc, buffer, n);
    }
out:
    free(buffer);
    return rc;
}

static fc_code digest_or_compare(fc_sealed_file *file, bool compare, fc_error *err) {
    uint64_t size, crc;
    int fd;
    FC_TRY(fc_open_input(file->path, &fd, &size, err));
    fc_code rc = digest_open(fd, file->path, size, &crc, err);
    close(fd);
    FC_TRY(rc);
    if (!compare) {
        file->bytes = size;
        file->crc64 = crc;
        return FC_OK;
    }
    return size == file->bytes && crc == file->crc64
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT, "%s: changed since it was sealed, or damaged", file->path);
}

fc_code fc_digest_header_file(fc_sealed_file *file, bool compare, fc_findings *findings, fc_error *err) {
    const fc_defect place = {.file = file->name};
    fc_error found;
    fc_code rc = digest_or_compare(file, compare, &found);
    if (rc == FC_ENOMEM) {
        return fc_fail(err, rc, "%s", found.message);
    }
    if (rc != FC_OK) {
        fc_report_defect(findings, &place, "%s", found.message);
    }
    return FC_OK;
}
