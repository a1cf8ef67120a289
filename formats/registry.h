/*
 * Declares all formats. Each is defined in its own folder.
 */
#ifndef FSDPCKPT_FORMATS_REGISTRY_H
#define FSDPCKPT_FORMATS_REGISTRY_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/format.h"

#define X(folder) extern const fc_format fc_format_##folder;
#include "format_list.h"
#undef X

#endif
