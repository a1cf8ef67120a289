/*
 * Fails if two leaves of a state dict have the same name. Different keys can give the same name when joined by dots.
 */
#include "torch/file/file.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

fc_code fc_torch_check_names(const char *path, const torch_leaves *leaves, fc_error *err) {
    const torch_leaf **sorted = fc_list_named(leaves->items, leaves->count, sizeof *leaves->items);
    FC_NEED(sorted, err, path);
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
