/*
 * Writing HDF5.
 */
#include "h5.h"

fc_code fc_h5_create(const fc_wanted *wanted, const char *staging, fc_writer *writer, fc_error *err) {
    (void)wanted, (void)writer;
    return fc_fail(err, FC_EUNSUPPORTED, "%s", staging);
}

fc_code fc_h5_reserve(fc_writer *writer, fc_part *part, fc_error *err) {
    (void)writer, (void)part;
    return fc_fail(err, FC_EUNSUPPORTED, "reserve");
}

fc_code fc_h5_finish(fc_writer *writer, fc_error *err) {
    (void)writer;
    return fc_fail(err, FC_EUNSUPPORTED, "finish");
}

void fc_h5_destroy(fc_writer *writer) {
    (void)writer;
}
