/*
 * The check of boxes that every device's copy_box makes.
 */
#pragma once

#include "fsdpckpt/gather/device.h"

/**
 * Checks that one box can be copied to the other: equal sizes, no negative strides, no overflow of byte offsets.
 * @param element size of an element in bytes.
 * @param empty   set to whether there is nothing to copy.
 * @return FC_EUSAGE if the check fails.
 */
fc_code fc_strided_box_check(const fc_strided_box *to, const fc_strided_box *from, uint32_t element, bool *empty,
                             fc_error *err);
