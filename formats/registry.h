/*
 * Declares all formats. Each is defined in its own folder.
 */
#pragma once

#include "fsdpckpt/format.h"

#define X(folder) extern const fc_format fc_format_##folder;
#include "format_list.h"
#undef X
