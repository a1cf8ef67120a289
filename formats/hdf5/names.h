/*
 * Keys of a state dict as HDF5 link names and back; the rules are in docs/HDF5_SCHEMA.md, "Names".
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/error.h"

#include <stddef.h>

/** @return the link name for a key of `len` bytes (any bytes), from `arena`, or NULL when out of memory. */
char *fc_h5_name_encode(fc_arena *arena, const char *key, size_t len);

/**
 * Decodes a link name into `key`, from `arena`. The exact inverse of fc_h5_name_encode.
 * @return FC_ECORRUPT for a link name that fc_h5_name_encode never writes, FC_EUNSUPPORTED for a key with NUL.
 */
fc_code fc_h5_name_decode(fc_arena *arena, const char *link, const char **key, fc_error *err);
