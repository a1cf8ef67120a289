/*
 * Reading HDF5.
 */
#include "h5.h"

bool fc_h5_probe(const fc_probe *probe) {
    (void)probe;
    return false;
}

fc_code fc_h5_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    (void)options;
    return fc_fail(err, FC_EUNSUPPORTED, "%s", checkpoint->path);
}

void fc_h5_close(fc_checkpoint *checkpoint) {
    (void)checkpoint;
}

fc_code fc_h5_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                     fc_error *err) {
    (void)tensor, (void)index, (void)out;
    return fc_fail(err, FC_EUNSUPPORTED, "%s", checkpoint->path);
}

fc_code fc_h5_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf, fc_error *err) {
    (void)tensor, (void)index, (void)buf;
    return fc_fail(err, FC_EUNSUPPORTED, "%s", checkpoint->path);
}

fc_code fc_h5_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                          fc_error *err) {
    (void)object, (void)arena, (void)json;
    return fc_fail(err, FC_EUNSUPPORTED, "%s", checkpoint->path);
}
