/*
 * New names for the values of a target: --strip-prefix, then each --rename in turn.
 */
#ifndef FSDPCKPT_PLAN_RENAME_H
#define FSDPCKPT_PLAN_RENAME_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/select.h"

/** The rules of a selection, compiled. */
typedef struct fc_rename fc_rename;

/** @return FC_EUSAGE for a rule that is no `s/regex/replacement/flags`. */
fc_code fc_rename_new(const fc_selection *selection, fc_rename **out, fc_error *err);
void fc_rename_free(fc_rename *rename);

/**
 * The name and path of `source` in the target, in `arena` or borrowed from the source.
 * @param changed set when they are not the source's.
 */
fc_code fc_rename_apply(fc_rename *rename, const fc_tensor *source, fc_arena *arena, const char **name, fc_path *path,
                        bool *changed, fc_error *err);

/** After all names. @return FC_EUSAGE when the prefix or a rule matched none of them. `example`: a name. */
fc_code fc_rename_check_used(const fc_rename *rename, const char *path, const char *example, fc_error *err);

#endif
