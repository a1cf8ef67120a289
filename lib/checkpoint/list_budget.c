/*
 * The budget of lists: see list_budget.h.
 */
#include "checkpoint/list_budget.h"

#include "base/checked.h"

static const uint64_t always = UINT64_C(192) << 20;

void fc_list_budget_begin(fc_list_budget *budget, fc_checkpoint *const *sources, size_t count) {
    *budget = (fc_list_budget){.sources = sources, .count = count, .most = always};
}

/* Adds the sizes of all files. */
static void measure(fc_list_budget *b) {
    b->measured = true;
    for (size_t i = 0; i < b->count; i++) {
        fc_file_identity file;
        for (size_t k = 0; fc_checkpoint_identity(b->sources[i], k, &file); k++) {
            if (!fc_add_u64(b->most, file.size, &b->most)) {
                b->most = UINT64_MAX;
                return;
            }
        }
    }
}

fc_code fc_list_budget_take(fc_list_budget *b, uint64_t count, size_t size, fc_error *err) {
    if (!b) {
        return FC_OK;
    }
    if (!b->measured && count > (b->most - b->used) / size) {
        measure(b);
    }
    if (count > (b->most - b->used) / size) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: the lists of what would be made need more than %llu MiB, which is more than a model of its "
                       "size has",
                       b->sources[0]->path, (unsigned long long)(b->most >> 20));
    }
    b->used += count * size;
    return FC_OK;
}

void fc_list_budget_give(fc_list_budget *b, uint64_t count, size_t size) {
    if (b) {
        b->used -= count * size < b->used ? count * size : b->used;
    }
}
