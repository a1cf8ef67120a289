/*
 * A list of strings that is in no file, as a value like those of a file. Some trainers' optimizers number their
 * parameters; with this, param_groups list their names instead.
 */
#pragma once

#include "torch/file/file.h"
#include "torch/pickle/write.h"

/** A list under construction. Free it after fc_torch_name_list_begin, even after a failure. */
typedef struct torch_name_list {
    fc_torch_pickler w;
    fc_pickle *pickle;
    torch_file f; /**< a view of a file whose only value is the list, f.p->root; do not close it */
} torch_name_list;

void fc_torch_name_list_begin(torch_name_list *list);
void fc_torch_name_list_add(torch_name_list *list, const char *name);
/** Ends the list and sets `list->f`. */
fc_code fc_torch_name_list_end(torch_name_list *list, const torch_file *f, fc_error *err);
void fc_torch_name_list_free(torch_name_list *list);
