/*
 * What all stages of a DCP manifest use: see builder.h.
 */
#include "dcp/builder.h"

#include "fsdpckpt/try.h"
#include "io/file.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

fc_code fc_dcp_load_metadata(const char *path, fc_pickle **out, fc_error *err) {
    int fd;
    uint64_t size;
    FC_TRY(fc_open_input(path, &fd, &size, err));
    fc_pickle_source source = {path, 0, size, fd, NULL};
    fc_code rc = fc_pickle_load(&source, FC_PICKLE_STRICT, out, err);
    close(fd);
    return rc;
}

fc_code fc_dcp_fail(const fc_dcp_builder *b, fc_code code, const char *tensor, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (tensor) {
        return fc_fail(b->err, code, "%s: tensor %.256s: %s", b->metadata_path, tensor, text);
    }
    return fc_fail(b->err, code, "%s: %s", b->metadata_path, text);
}

fc_code fc_dcp_check_class(const fc_dcp_builder *b, const char *tensor, fc_pv v) {
    uint32_t aux;
    size_t n;
    if (fc_pv_typeof(v) != FC_PV_OBJECT ||
        fc_pickle_global(b->p, fc_pickle_callee(b->p, v), &aux) != FC_GLOBAL_UNKNOWN) {
        return FC_OK;
    }
    const uint64_t *cell = b->p->cells + fc_pv_payload(fc_pickle_callee(b->p, v));
    return fc_dcp_fail(b, FC_EUNSUPPORTED, tensor, "unsupported: class %.128s of %.128s",
                       fc_pickle_bytes(b->p, cell[2], &n), fc_pickle_bytes(b->p, cell[1], &n));
}

void fc_dcp_drop_empty_chunks(fc_tensor *tensor) {
    fc_chunk *chunks = (fc_chunk *)(uintptr_t)tensor->chunks; /* may be changed while the manifest is built */
    size_t kept = 0;
    for (size_t i = 0; i < tensor->nchunks; i++) {
        if (!fc_is_empty(tensor->ndim, chunks[i].dims + tensor->ndim)) {
            chunks[kept++] = chunks[i];
        }
    }
    tensor->nchunks = kept;
}
