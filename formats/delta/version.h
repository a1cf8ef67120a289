/*
 * The names of versions and of the files in them, and the members of their index.
 */
#pragma once

#include "fsdpckpt/delta.h"

#define DELTA_FOLDER "weight_v"
#define DELTA_VERSION "version"
#define DELTA_BASE "base_version"
#define DELTA_ENCODING "delta_encoding"
#define DELTA_COMPRESSION "compression_format"
#define DELTA_CHECKSUM "checksum_format"
#define DELTA_ZSTD "zstd"

/**
 * Reads the number of a version from the name of its directory, such as updates/weight_v000007/.
 * @return FC_DELTA_NO_NUMBER if the name is another one.
 */
int64_t fc_delta_number_of(const char *path);

/** Sets the numbers of a new delta from the options and the name of its directory. */
fc_code fc_delta_choose_numbers(const char *path, int64_t *number, int64_t *base, fc_error *err);

/** Finds an encoding by the name that the files use. @return false if there is none of this name. */
bool fc_delta_encoding_find(const char *name, fc_delta_encoding *out);
