/*
 * Boxes as text for messages: "[0:8, 16:32]", the way Python would slice the tensor.
 */
#pragma once

#include "fsdpckpt/box.h"

/** The text of a box. It has room for every realistic box; longer ones end in "...]". */
typedef struct fc_box_text {
    char s[200];
} fc_box_text;

/** @return the box as half-open ranges; "[]" for a scalar. */
fc_box_text fc_box_to_text(const fc_box *box);
