/*
 * Checks of the boxes given to fc_device.copy_box, the same for every device.
 */
#ifndef FSDPCKPT_COMM_BOXES_H
#define FSDPCKPT_COMM_BOXES_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/device.h"

/**
 * Whether two boxes can be copied to each other: equal sizes, nothing negative, bytes that do not overflow.
 * @param empty receives whether there is nothing to copy.
 * @return FC_EUSAGE when they cannot.
 */
fc_code fc_strided_box_check(const fc_strided_box *to, const fc_strided_box *from, uint32_t element, bool *empty,
                             fc_error *err);

#endif
