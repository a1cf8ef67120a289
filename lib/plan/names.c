/*
 * Listing names to compare: see names.h.
 */
#include "plan/names.h"

#include "plan/globs.h"

#include <string.h>

static bool is_selected(const fc_selection *selection, const char *name) {
    return !selection || ((!selection->include || fc_globs_match(selection->include, name, NULL)) &&
                          !fc_globs_match(selection->exclude, name, NULL));
}

/* @return the name without the prefix; "" when nothing is left. */
static const char *compared_name(const fc_selection *selection, const char *name, size_t *stripped) {
    const char *prefix = selection ? selection->strip_prefix : NULL;
    size_t len = prefix ? strlen(prefix) : 0;
    if (len == 0 || strncmp(name, prefix, len) != 0) {
        return name;
    }
    ++*stripped;
    return name + len;
}

fc_code fc_names_make(const fc_checkpoint *checkpoint, const fc_selection *selection, fc_arena *arena, fc_names *out,
                      fc_error *err) {
    size_t n = checkpoint->ntensors;
    *out = (fc_names){.items = fc_arena_calloc(arena, n ? n : 1, sizeof *out->items),
                      .table = fc_name_table_new(arena, n)};
    if (!out->items || !out->table) {
        return fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
    }
    for (size_t i = 0; i < n; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        const char *name = compared_name(selection, t->name, &out->stripped);
        if (!*name) {
            return fc_fail(err, FC_EUSAGE, "%s: --strip-prefix '%s' leaves nothing of the name '%s'", checkpoint->path,
                           selection->strip_prefix, t->name);
        }
        if (!is_selected(selection, name)) {
            out->left_out++;
            continue;
        }
        size_t at = fc_name_table_put(out->table, name, strlen(name), out->count);
        if (at != out->count) {
            return fc_fail(err, FC_EUSAGE, "%s: --strip-prefix gives '%s' and '%s' the same name '%s'",
                           checkpoint->path, out->items[at].tensor->name, t->name, name);
        }
        out->items[out->count++] = (fc_named){name, t};
    }
    return FC_OK;
}

size_t fc_names_find(const fc_names *names, const char *name) {
    return fc_name_table_find(names->table, name, strlen(name));
}
