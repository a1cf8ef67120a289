/*
 * Decides from paths and param_groups whether the numbers in an optimizer's state_dict() can refer to flat parameters.
 */
#include "derived/flat_units.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

bool fc_same_prefix(const fc_tensor *a, const fc_tensor *b, size_t count) {
    bool same = a->path.count >= count && b->path.count >= count;
    for (size_t i = 0; same && i < count; i++) {
        same = strcmp(a->path.elements[i].key, b->path.elements[i].key) == 0;
    }
    return same;
}

size_t fc_state_number(const fc_tensor *t, size_t *number) {
    for (size_t i = 1; i + 1 < t->path.count; i++) {
        const fc_path_element *e = &t->path.elements[i];
        if ((e->is_number || e->is_index) && strcmp(e[-1].key, "state") == 0) {
            *number = strtoull(e->key, NULL, 10);
            return i;
        }
    }
    return 0;
}

fc_code fc_groups_fit(const fc_checkpoint *source, const fc_tensor *state, size_t at, size_t nunits, fc_arena *scratch,
                      bool *fit, fc_error *err) {
    const fc_tensor *params = NULL;
    const char *json = NULL;
    size_t groups = 0;
    for (size_t i = 0; i < source->ntensors; i++) {
        const fc_tensor *t = &source->tensors[i];
        const fc_path_element *e = t->path.elements;
        bool in = t->object && t->path.count == at + 2 && strcmp(e[at - 1].key, "param_groups") == 0 &&
                  strcmp(e[at + 1].key, "params") == 0;
        in = in && fc_same_prefix(t, state, at - 1);
        groups += in;
        params = in ? t : params;
    }
    *fit = false;
    fc_code rc = groups == 1 ? fc_checkpoint_object_json(source, params, scratch, &json, err) : FC_OK;
    json_t *list = rc == FC_OK && json ? json_loads(json, 0, NULL) : NULL;
    *fit = json_is_array(list) && json_array_size(list) == nunits;
    json_decref(list);
    return rc;
}
