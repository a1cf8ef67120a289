/*
 * Boxes in messages: "[0:8, 16:32]", as Python would slice the tensor. From a box to a line for a person.
 */
#ifndef FSDPCKPT_PLAN_BOX_TEXT_H
#define FSDPCKPT_PLAN_BOX_TEXT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/box.h"

/** Room enough for the boxes that occur; longer ones end in "...]". */
typedef struct fc_box_text {
    char s[200];
} fc_box_text;

/** @return the text of `box`: half-open ranges, "[]" for a scalar. */
fc_box_text fc_box_to_text(const fc_box *box);

#endif
