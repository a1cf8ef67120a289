/*
 * Listing names to compare: see names.h.
 */
#include "plan/names.h"

#include "plan/globs.h"

#include <limits.h>
#include <string.h>

/* One side's names and the prefix that they may have. */
typedef struct side {
    const fc_selection *selection;
    const char *prefix; /* "" : none */
    bool has_prefix;    /* some name has it */
    char *longer;       /* room for a name with the prefix before it */
} side;

static bool starts_with(const char *name, const char *prefix) {
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

static bool matches(const char *const *globs, const char *name, const char *other) {
    return fc_globs_match(globs, name, NULL) || fc_globs_match(globs, other, NULL);
}

/*
 * Globs speak of names with the prefix or without it, and mean the same on both sides: the names of a side where none
 * has the prefix are taken for what is left when it is stripped.
 */
static bool is_selected(const side *s, const char *name, const char *compared) {
    const fc_selection *selection = s->selection;
    const char *other = compared;
    if (!selection || (!selection->include && !selection->exclude)) {
        return true;
    }
    if (*s->prefix && !s->has_prefix) {
        strcpy(s->longer + strlen(s->prefix), name);
        other = s->longer;
    }
    return (!selection->include || matches(selection->include, name, other)) &&
           !matches(selection->exclude, name, other);
}

/* Looks through the names once: whether some have the prefix, and how long the longest is. */
static bool prepare(side *s, const fc_checkpoint *checkpoint, fc_arena *arena) {
    size_t longest = 0;
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        size_t len = strlen(checkpoint->tensors[i].name);
        longest = len > longest ? len : longest;
        s->has_prefix = s->has_prefix || starts_with(checkpoint->tensors[i].name, s->prefix);
    }
    s->longer = fc_arena_printf(arena, "%s%*s", s->prefix, (int)(longest < INT_MAX ? longest : INT_MAX), "");
    return s->longer != NULL;
}

fc_code fc_names_make(const fc_checkpoint *checkpoint, const fc_selection *selection, fc_arena *arena, fc_names *out,
                      fc_error *err) {
    size_t n = checkpoint->ntensors;
    *out = (fc_names){.items = fc_arena_calloc(arena, n ? n : 1, sizeof *out->items),
                      .table = fc_name_table_new(arena, n)};
    side s = {.selection = selection, .prefix = selection && selection->strip_prefix ? selection->strip_prefix : ""};
    if (!out->items || !out->table || !prepare(&s, checkpoint, arena)) {
        return fc_fail(err, FC_ENOMEM, "%s: out of memory", checkpoint->path);
    }
    for (size_t i = 0; i < n; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        bool strip = *s.prefix && starts_with(t->name, s.prefix);
        const char *name = t->name + (strip ? strlen(s.prefix) : 0);
        out->stripped += strip;
        if (!*name) {
            return fc_fail(err, FC_EUSAGE, "%s: --strip-prefix '%s' leaves nothing of the name '%s'", checkpoint->path,
                           s.prefix, t->name);
        }
        if (!is_selected(&s, t->name, name)) {
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
