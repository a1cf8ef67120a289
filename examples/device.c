/*
 * Copies arrays between the device of FSDP and the host that computes, with a cast to and from float32.
 */
#include "train.h"

#include "fsdpckpt/cast.h"
#include "fsdpckpt/move.h"

#include <stdlib.h>
#include <string.h>

fc_code train_fetch(const fc_array *array, float *out, fc_error *err) {
    fc_device *device = array->device;
    void *bytes = malloc(fc_array_bytes(array) + 1);
    if (!bytes) {
        return fc_no_memory(err, NULL);
    }
    fc_code rc = device->copy(device, bytes, array->data, fc_array_bytes(array), NULL, err);
    rc = rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
    if (rc == FC_OK) {
        fc_cast(array->dtype, bytes, FC_F32, out, (size_t)fc_array_numel(array));
    }
    free(bytes);
    return rc;
}

fc_code train_store(const fc_array *array, const float *values, fc_error *err) {
    fc_device *device = array->device;
    void *bytes = malloc(fc_array_bytes(array) + 1);
    if (!bytes) {
        return fc_no_memory(err, NULL);
    }
    fc_cast(FC_F32, values, array->dtype, bytes, (size_t)fc_array_numel(array));
    fc_code rc = device->copy(device, array->data, bytes, fc_array_bytes(array), NULL, err);
    rc = rc == FC_OK ? device->synchronize(device, NULL, err) : rc;
    free(bytes);
    return rc;
}
