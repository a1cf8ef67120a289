/*
 * New names for the values of a target: first the prefix is stripped, then each rename rule is applied in turn.
 */
#pragma once

#include "fsdpckpt/select.h"

/** The compiled rules of a selection. */
typedef struct fc_rename fc_rename;

/** Compiles the rules; release them with fc_rename_free. @return FC_EUSAGE for a rule that is not
 * `s/regex/replacement/flags`. */
fc_code fc_rename_new(const fc_selection *selection, fc_rename **out, fc_error *err);
void fc_rename_free(fc_rename *rename);

/**
 * Computes the name and path of `source` in the target. They are in `arena`, or borrowed from the source.
 * @param changed set to true when they differ from the source's; otherwise left alone.
 */
fc_code fc_rename_apply(fc_rename *rename, const fc_tensor *source, fc_arena *arena, const char **name, fc_path *path,
                        bool *changed, fc_error *err);

/**
 * Call after all names. @return FC_EUSAGE when the prefix or a rule matched none of them.
 * @param example a name for the message.
 */
fc_code fc_rename_check_used(const fc_rename *rename, const char *path, const char *example, fc_error *err);
