/*
 * Builds lists of names: see name_list.h.
 */
#include "torch/file/name_list.h"
#include "fsdpckpt/try.h"

void fc_torch_name_list_begin(torch_name_list *list) {
    list->f.p = NULL;
    list->pickle = NULL;
    fc_torch_pickle_begin(&list->w, 2);
    fc_torch_pickle_op(&list->w, FC_PICKLE_EMPTY_LIST);
    fc_torch_pickle_op(&list->w, FC_PICKLE_MARK);
}

void fc_torch_name_list_add(torch_name_list *list, const char *name) {
    fc_torch_pickle_str(&list->w, name);
}

fc_code fc_torch_name_list_end(torch_name_list *list, const torch_file *f, fc_error *err) {
    fc_torch_pickle_op(&list->w, FC_PICKLE_APPENDS);
    fc_code rc;
    FC_TRY_GOTO(fc_torch_pickle_end(&list->w, err), rc, out);
    const fc_pickle_source source = {f->path, 0, list->w.size, -1, list->w.bytes};
    rc = fc_pickle_load(&source, FC_PICKLE_ITEM, &list->pickle, err);
out:
    list->f = *f;
    list->f.p = list->pickle;
    return rc;
}

void fc_torch_name_list_free(torch_name_list *list) {
    fc_pickle_free(list->pickle);
    fc_torch_pickle_free(&list->w);
}
