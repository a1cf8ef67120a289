/*
 * Fails if two leaves of a state dict have the same name. Different keys can give the same name when joined by dots.
 */
#include "torch/file/file.h"

#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

static int compare_leaf_names(const void *a, const void *b) {
    const torch_leaf *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

fc_code fc_torch_check_names(const char *path, const torch_leaves *leaves, fc_error *err) {
    const torch_leaf **sorted = malloc((leaves->count + 1) * sizeof *sorted);
    FC_NEED(sorted, err, path);
    for (size_t i = 0; i < leaves->count; i++) {
        sorted[i] = &leaves->items[i];
    }
    qsort(sorted, leaves->count, sizeof *sorted, compare_leaf_names);
    fc_code rc = FC_OK;
    for (size_t i = 1; i < leaves->count && rc == FC_OK; i++) {
        if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0) {
            rc = fc_fail(err, FC_EUNSUPPORTED,
                         "%s: two values both get the name %.256s when their keys are joined by dots", path,
                         sorted[i]->name);
        }
    }
    free(sorted);
    return rc;
}
