/*
 * The macros of fsdpckpt/try.h.
 */
#ifndef FSDPCKPT_BASE_TRY_H
#define FSDPCKPT_BASE_TRY_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/try.h"

#endif
