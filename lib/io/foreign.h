/*
 * Recognises files and directories of formats that fsdpckpt does not read: one table of their first bytes and file
 * names, with what to use instead.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>

enum { FC_FOREIGN_HEAD = 512 }; /**< the bytes of a file that are looked at */

/** @return what a file with these first bytes is, and what to use instead; NULL if they are not in the table. */
const char *fc_name_foreign_content(const char *head, size_t size);

/**
 * Call it for an input that no format recognises.
 * @return FC_EUNSUPPORTED, with the name of its format, if it is a file with a name in the table or a directory that
 * contains one; otherwise FC_OK.
 */
fc_code fc_check_foreign(const char *path, bool is_directory, fc_error *err);

/**
 * Call it before any format is tried: a directory whose files look like those of a format that fsdpckpt reads.
 * @return FC_EUNSUPPORTED, with the name of its format, or FC_OK.
 */
fc_code fc_check_disguised(const char *directory, fc_error *err);
