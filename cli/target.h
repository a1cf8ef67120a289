/*
 * The rule for names of targets, which is the same for every command that writes: the format that -o and --to select.
 *
 * --to decides if it is given, otherwise the extension of -o. The extension is the text after the last dot of the last
 * path component, if it consists of letters and digits, starts with a letter and is not a version (`step-1.5` and
 * `run.v2` have none). A command that writes one file refuses a name without a known extension. A directory of rank
 * files may have any name, and is HDF5 unless its extension names another format; only a misspelt extension, or that of
 * a kind of file that fsdpckpt does not write, is refused. Under a name with the extension of a format, fc_convert
 * makes no directory, unless the name ends with a slash or there is one.
 */
#pragma once

#include "options/options.h"

#include "fsdpckpt/format.h"

/** @return the format that the extension of a target names, or NULL. */
const fc_format *target_named_format(const char *target);

/** Whether `target` ends with a slash or is an existing directory. */
bool target_is_directory(const char *target);

/** Chooses the format of a target. @param sharded the target is a directory of rank files. */
fc_code target_format(const options *o, bool sharded, const fc_format **out, fc_error *err);

/** A kind of file, other than a checkpoint, that a command writes. */
typedef struct target_kind {
    const char *what;              /**< for messages: "an HTML page" */
    const char *const *extensions; /**< with the dot, the preferred one first; NULL-terminated */
} target_kind;

extern const target_kind target_html, target_json, target_view, target_xml;

/** @return FC_EUSAGE if the extension of `path` belongs to another kind of file, or is misspelt. */
fc_code target_check(const char *path, const target_kind *kind, fc_error *err);
