/*
 * Compressed datasets while their chunks come: the engine compresses a chunk, here it gets its place in the file and
 * its entry in the index of the dataset, then the engine writes it there. See fc_format.place.
 *
 * The index is HDF5 1.8's (a B-tree of version 1), so that any stock HDF5 reads it.
 */
#include "base/try.h"
#include "hdf5/h5.h"
#include "hdf5/writer/writer.h"

#include <pthread.h>

static pthread_mutex_t library = PTHREAD_MUTEX_INITIALIZER;

void fc_h5_lock(void) {
    pthread_mutex_lock(&library);
}

void fc_h5_unlock(void) {
    pthread_mutex_unlock(&library);
}

void fc_h5_estimate_chunks(const fc_h5_writer *w, fc_h5_estimate *estimate, const fc_target_item *item) {
    enum { CHILDREN = 64, LEAST_FILLED = 32, NODE = 24, ADDRESS = 8, KEY = 8 };
    const int ndim = w->target->tensors[item->tensor].source->ndim;
    const int64_t *sizes = item->dims + ndim;
    uint64_t chunks = 1;
    for (int d = 0; d < ndim; d++) {
        chunks *= (uint64_t)((sizes[d] - 1) / item->chunk[d] + 1);
    }
    const uint64_t node = NODE + CHILDREN * ADDRESS + (CHILDREN + 1) * (KEY + 8 * ((uint64_t)ndim + 1));
    estimate->indexes += node * (1 + (chunks > CHILDREN ? chunks / (LEAST_FILLED - 1) + 1 : 0));
}

static void close_dataset(fc_h5_writer *w) {
    if (w->dataset >= 0) {
        H5Dclose(w->dataset);
        w->dataset = H5I_INVALID_HID;
    }
}

static fc_code place(fc_h5_writer *w, const fc_target_item *item, const int64_t *start, bool raw, uint64_t size,
                     uint64_t *offset, fc_error *err) {
    const fc_target_tensor *tensor = &w->target->tensors[item->tensor];
    if (w->dataset < 0 || w->placing != item->tensor) {
        close_dataset(w);
        FC_TRY(fc_h5_out_reopen(&w->out, w->tree.leaves[item->tensor], &w->dataset, err));
        w->placing = item->tensor;
    }
    const uint32_t all = (1u << fc_h5_filters(fc_dtype_size(tensor->dtype))) - 1;
    return fc_h5_out_place(&w->out, w->dataset, tensor->source->ndim, start, raw ? all : 0, size, offset, err);
}

fc_code fc_h5_place(fc_writer *writer, const fc_target_item *item, const int64_t *start, bool raw, uint64_t size,
                    uint64_t *offset, fc_error *err) {
    fc_h5_lock();
    fc_code rc = place(writer->state, item, start, raw, size, offset, err);
    fc_h5_unlock();
    return rc;
}

fc_code fc_h5_end_chunks(fc_h5_writer *w, fc_code rc, fc_error *err) {
    if (!w->open) {
        return rc;
    }
    w->open = false;
    close_dataset(w);
    return fc_h5_out_close(&w->out, rc, err);
}
