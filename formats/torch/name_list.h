/*
 * A list of strings that no file holds, as a value like those of a file. Trainers whose optimizers number parameters
 * get the parameters' names in param_groups through it.
 */
#ifndef FSDPCKPT_FORMATS_TORCH_NAME_LIST_H
#define FSDPCKPT_FORMATS_TORCH_NAME_LIST_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "torch/pickle_write.h"
#include "torch/torch_file.h"

/** The caller frees it after fc_torch_name_list_begin, also after a failure. */
typedef struct torch_name_list {
    fc_torch_pickler w;
    fc_pickle *pickle;
    torch_file
        f; /**< the file that the list stands in, seen as if the list, f.p->root, were all of it; not to be closed */
} torch_name_list;

void fc_torch_name_list_begin(torch_name_list *list);
void fc_torch_name_list_add(torch_name_list *list, const char *name);
/** Makes `list->f`. */
fc_code fc_torch_name_list_end(torch_name_list *list, const torch_file *f, fc_error *err);
void fc_torch_name_list_free(torch_name_list *list);

#endif
