/*
 * Takes the records of one file from a reader process. See take.h.
 */
#include "hdf5/reader_process/take.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "io/stand_in.h"

enum { RECORDS_ALLOWED = 16 << 20 };

fc_code fc_h5_take_file(fc_h5_in *in, fc_arena *arena, const char *path, uint64_t size, const fc_h5_loan *loan,
                        fc_h5_file *file, bool *broken, fc_error *reason) {
    /* The size of a file bounds its records, unless its links multiply, so this bounds the memory. */
    if (!fc_mul_u64(size, 64, &in->budget) || !fc_add_u64(in->budget, RECORDS_ALLOWED, &in->budget)) {
        in->budget = UINT64_MAX;
    }
    in->path = path;
    in->loan = loan;
    in->lent = 0;
    in->unlent.code = FC_OK;
    const fc_code rc = fc_h5_read_file(in, arena, path, size, file, reason);
    in->loan = NULL;
    if (in->unlent.code != FC_OK) { /* whatever the process made of it */
        *broken = false;
        *reason = in->unlent;
        return reason->code;
    }
    *broken = rc != FC_OK && reason->message[0] == '\0';
    if (rc == FC_ECORRUPT && !*broken) {
        FC_TRY(fc_check_stand_in(path, reason));
    }
    file->missing = (unsigned)atomic_load(&in->child->shared->missing);
    return rc;
}

fc_code fc_h5_end_taking(fc_h5_in *in, const char *path, fc_code rc, bool broken, fc_error *err) {
    fc_error death;
    fc_h5_in_free(in);
    const fc_code end = fc_h5_child_finish(in->child, path, &death);
    if (!broken) {
        return rc;
    }
    if (in->over_budget) {
        return fc_fail(
            err, FC_ECORRUPT,
            "%s: corrupt HDF5 file: it lists more than a file of its size can contain (links that multiply?)", path);
    }
    return end != FC_OK
               ? fc_fail(err, death.code, "%s", death.message)
               : fc_fail(err, FC_ECORRUPT, "%s: corrupt HDF5 file (the reader process sent invalid records)", path);
}
