/*
 * Checks the boxes given to fc_device.copy_box.
 */
#include "gather/boxes.h"

#include "base/checked.h"

/* Computes the end of the last element in bytes. Every offset in the box is below it. */
static bool span_fits(const fc_strided_box *box, uint32_t element) {
    int64_t last = box->first, reach;
    for (int d = 0; d < box->ndim; d++) {
        if (box->strides[d] < 0 || !fc_mul_i64(box->strides[d], box->sizes[d] > 0 ? box->sizes[d] - 1 : 0, &reach) ||
            !fc_add_i64(last, reach, &last)) {
            return false;
        }
    }
    return box->first >= 0 && fc_add_i64(last, 1, &last) && fc_mul_i64(last, element, &last);
}

fc_code fc_strided_box_check(const fc_strided_box *to, const fc_strided_box *from, uint32_t element, bool *empty,
                             fc_error *err) {
    *empty = false;
    if (to->ndim != from->ndim || to->ndim < 0 || to->ndim > FC_MAX_DIMS || element == 0) {
        return fc_fail(err, FC_EUSAGE, "elements of %u bytes cannot be copied from a box of %d dimensions to one of %d",
                       (unsigned)element, from->ndim, to->ndim);
    }
    for (int d = 0; d < to->ndim; d++) {
        if (to->sizes[d] != from->sizes[d] || to->sizes[d] < 0) {
            return fc_fail(err, FC_EUSAGE,
                           "boxes of different sizes cannot be copied: dimension %d has %lld and %lld elements", d,
                           (long long)from->sizes[d], (long long)to->sizes[d]);
        }
        *empty |= to->sizes[d] == 0;
    }
    if (!span_fits(to, element) || !span_fits(from, element)) {
        return fc_fail(err, FC_EUSAGE, "a box has a negative stride, or its bytes do not fit in 64 bits");
    }
    return FC_OK;
}
