/*
 * The rule for names of targets: what -o and --to ask for, the same for every command that writes.
 *
 * --to decides. Without it the extension of -o does: what follows the last dot of the last part of the name, if it is
 * letters and digits that start with a letter and are not a version (`step-1.5` and `run.v2` have none). A command that
 * writes one file refuses what names no format. A directory of rank files may have any name, and is HDF5 unless the
 * extension says otherwise; only a misspelt extension, or one of files that fsdpckpt does not write, is refused.
 */
#ifndef FSDPCKPT_CLI_TARGET_H
#define FSDPCKPT_CLI_TARGET_H

#include "options.h"

#include "fsdpckpt/format.h"

/** The format that the extension of a target asks for, or NULL. */
const fc_format *target_named_format(const char *target);

/** Whether `target` ends with a slash, or is a directory that exists. */
bool target_is_directory(const char *target);

/** The format of a checkpoint that is written. @param sharded it is a directory of rank files. */
fc_code target_format(const options *o, bool sharded, const fc_format **out, fc_error *err);

/** A kind of file that a command writes beside checkpoints. */
typedef struct target_kind {
    const char *what;              /**< for people: "a page of HTML" */
    const char *const *extensions; /**< with the dot, the preferred one first; NULL-terminated */
} target_kind;

extern const target_kind target_html, target_json, target_view, target_xml;

/** FC_EUSAGE where the extension of `path` promises another kind of file, or misspells one of this kind. */
fc_code target_check(const char *path, const target_kind *kind, fc_error *err);

#endif
