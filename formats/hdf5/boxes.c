/*
 * Reads boxes that only libhdf5 can decode, each in a process of its own (reader_process/scan_box.c).
 */
#include "hdf5/reader.h"

#include "checkpoint/identity.h"
#include "fsdpckpt/try.h"
#include "hdf5/h5.h"
#include "hdf5/reader_process/lend.h"
#include "hdf5/reader_process/scan.h"
#include "io/path.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static fc_code receive_box(fc_h5_in *in, const char *path, unsigned char *buf, uint64_t size, fc_error *err) {
    fc_h5_record r;
    uint64_t at = 0;
    while (at < size) {
        if (fc_h5_next(in, &r) != 1) {
            return in->no_memory ? fc_no_memory(err, path) : fc_fail(err, FC_ECORRUPT, "%s", "");
        }
        if (r.tag == FC_H5_FAILURE) {
            return fc_h5_child_failure(&r, path, err);
        }
        fc_h5_bytes bytes = fc_h5_get_bytes(&r);
        if (r.bad || r.tag != FC_H5_DATA || bytes.size == 0 || bytes.size > size - at) {
            return fc_fail(err, FC_ECORRUPT, "%s", "");
        }
        memcpy(buf + at, bytes.data, bytes.size);
        at += bytes.size;
    }
    return FC_OK;
}

/* Everything that is needed to read a box. It lives as long as its process. */
typedef struct box_job {
    fc_h5_input input;
    fc_h5_scan scan;
    int64_t offsets[FC_MAX_DIMS];
    int keep;
} box_job;

/* fc_h5_make_job, runs in the process that will read. `request` has a chunk, and the size and dimensions of its box. */
void fc_h5_make_box_job(void *context, const fc_h5_request *request, int input, fc_h5_job *job) {
    box_job *box = calloc(1, sizeof *box);
    if (!box) {
        return; /* without a job the process ends */
    }
    const fc_checkpoint *checkpoint = context;
    const fc_h5_state *state = checkpoint->state;
    const fc_chunk *chunk = request->what;
    const fc_h5_stored *stored = fc_h5_stored_of(checkpoint, chunk);
    const int ndim = request->number;
    for (int k = 0; k < ndim; k++) {
        box->offsets[k] = chunk->dims[k] - (stored->base ? stored->base[k] : 0);
    }
    box->keep = input;
    box->input = (fc_h5_input){
        .path = checkpoint->files[stored->file].path, .fd = input, .lent = request->lent, .span = state->span};
    box->scan = (fc_h5_scan){.inputs = &box->input,
                             .ninputs = 1,
                             .follow_external = state->follow_external,
                             .plugins = state->plugins,
                             .dataset = stored->dataset->path,
                             .ndim = stored->dataset->kind == FC_H5_OBJECT ? -1 : ndim,
                             .offsets = box->offsets,
                             .sizes = chunk->dims + ndim,
                             .bytes = request->bytes};
    *job = (fc_h5_job){.prepare = fc_h5_scan_prepare,
                       .run = fc_h5_box_run,
                       .context = &box->scan,
                       .keep = &box->keep,
                       .nkeep = 1,
                       .memory = request->bytes < UINT64_MAX / 8 ? 4 * request->bytes + (UINT64_C(1) << 30) : 0,
                       .may_open = state->follow_external};
}

/* Starts the process that reads and decodes a chunk of the open file `fd`. */
static fc_code start_reading(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, uint64_t bytes,
                             int fd, fc_h5_loan *loan, fc_h5_child *child, fc_error *err) {
    fc_h5_state *state = checkpoint->state;
    const fc_h5_job like = {.timeout_ms = 0};
    fc_h5_request request = {&tensor->chunks[index], bytes, 0, tensor->ndim};
    const char *path = checkpoint->files[fc_h5_stored_of(checkpoint, &tensor->chunks[index])->file].path;
    struct stat st;
    int given;
    if (fc_fstat(fd, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", path);
    }
    FC_TRY(fc_h5_loan_begin(loan, path, fd, (uint64_t)st.st_size, &given, err));
    request.lent = loan->to >= 0 ? loan->size : 0;
    fc_code rc = fc_h5_child_start_by(&state->starter, child, &request, given, &like, err);
    fc_h5_loan_given(loan, given);
    return rc;
}

fc_code fc_h5_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf, fc_error *err) {
    const fc_h5_state *state = checkpoint->state;
    const size_t file = fc_h5_stored_of(checkpoint, &tensor->chunks[index])->file;
    const char *path = checkpoint->files[file].path;
    fc_extent extent = {.decoded = 0};
    fc_error end, death, *reason = err ? err : &death;
    fc_h5_child child;
    fc_h5_loan loan = {.to = -1};
    fc_h5_in in = {.child = &child, .budget = UINT64_MAX, .path = path, .loan = &loan, .kept = state->kept};
    int fd;
    FC_TRY(fc_h5_extent(checkpoint, tensor, index, &extent, err));
    FC_TRY(fc_identity_open(checkpoint, file, &fd, err));
    fc_code rc = start_reading(checkpoint, tensor, index, extent.decoded, fd, &loan, &child, err);
    FC_TRY_GOTO(rc, rc, out);
    rc = receive_box(&in, path, buf, extent.decoded, reason);
    fc_h5_loan_end(&loan);
    const bool broken = rc != FC_OK && reason->message[0] == '\0';
    fc_h5_in_free(&in);
    const fc_code ended = fc_h5_child_finish(&child, path, &end);
    if (in.unlent.code != FC_OK) { /* whatever the process made of it */
        rc = fc_fail(err, in.unlent.code, "%s", in.unlent.message);
    } else if (broken) {
        rc = ended != FC_OK
                 ? fc_fail(err, end.code, "%s", end.message)
                 : fc_fail(err, FC_ECORRUPT, "%s: corrupt HDF5 file (the reader process sent invalid records)", path);
    }
out:
    fc_h5_loan_end(&loan);
    close(fd);
    return rc;
}
