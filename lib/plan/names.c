/*
 * Lists the names of a checkpoint for a comparison. See names.h.
 */
#include "plan/names.h"

#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "plan/globs.h"

#include <string.h>

/* The names of one side of a comparison, and the prefix that they may have. */
typedef struct side {
    const fc_selection *selection;
    const char *prefix; /* "" when no prefix is stripped */
    char *longer;       /* room for the prefix, a dot and the longest name; NULL when some names have the prefix */
} side;

static bool starts_with(const char *name, const char *prefix) {
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

/* Adds the prefix and its dot to a name that lacks it. */
static const char *with_prefix(const side *s, const char *name) {
    char *end = stpcpy(s->longer, s->prefix);
    if (end > s->longer && end[-1] != '.') {
        *end++ = '.';
    }
    strcpy(end, name);
    return s->longer;
}

static bool matches(const side *s, const char *glob, const char *name, const char *compared) {
    return fnmatch(glob, name, 0) == 0 || fnmatch(glob, compared, 0) == 0 ||
           (s->longer && fnmatch(glob, with_prefix(s, name), 0) == 0);
}

/* Whether one of the globs matches. Notes in `used` which ones ever do. */
static bool any_matches(const side *s, const char *const *globs, bool *used, const char *name, const char *compared) {
    bool any = false;
    for (size_t i = 0; globs[i]; i++) {
        if ((!any || !used[i]) && matches(s, globs[i], name, compared)) {
            used[i] = any = true;
        }
    }
    return any;
}

/*
 * Globs match names before or after they are changed, and mean the same on both sides. If no name of a side has the
 * prefix, its names count as already stripped.
 */
static bool is_selected(const side *s, const fc_names *names, const char *name, const char *compared) {
    const fc_selection *selection = s->selection;
    const bool included =
        !selection || !selection->include || any_matches(s, selection->include, names->includes, name, compared);
    const bool excluded =
        selection && selection->exclude && any_matches(s, selection->exclude, names->excludes, name, compared);
    return included && !excluded;
}

/* Finds out whether some names have the prefix, and allocates room for prefixed names if not. */
static bool prepare(side *s, const fc_selection *selection, const fc_checkpoint *checkpoint, fc_arena *arena) {
    size_t longest = 0;
    bool has_prefix = false;
    *s = (side){selection, selection && selection->strip_prefix ? selection->strip_prefix : "", NULL};
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        size_t len = strlen(checkpoint->tensors[i].name);
        longest = len > longest ? len : longest;
        has_prefix = has_prefix || starts_with(checkpoint->tensors[i].name, s->prefix);
    }
    if (!*s->prefix || has_prefix) {
        return true;
    }
    s->longer = fc_arena_calloc(arena, strlen(s->prefix) + 1 + longest + 1, 1);
    return s->longer != NULL;
}

static fc_code add_name(const side *s, const fc_checkpoint *checkpoint, const fc_tensor *t, const char *name,
                        fc_names *out, fc_error *err) {
    if (!is_selected(s, out, t->name, name)) {
        out->left_out++;
        return FC_OK;
    }
    size_t at = fc_name_table_put(out->table, name, strlen(name), out->count);
    if (at != out->count) {
        return fc_fail(err, FC_EUSAGE, "%s: '%s' and '%s' would both be renamed to '%s'", checkpoint->path,
                       out->items[at].tensor->name, t->name, name);
    }
    out->items[out->count++] = (fc_named){name, t};
    return FC_OK;
}

fc_code fc_names_make(const fc_checkpoint *checkpoint, const fc_selection *selection, fc_rename *rename,
                      fc_arena *arena, fc_names *out, fc_error *err) {
    size_t n = checkpoint->ntensors;
    side s;
    *out = (fc_names){.items = fc_arena_calloc(arena, n ? n : 1, sizeof *out->items),
                      .table = fc_name_table_new(arena, n + FC_TIED_NAMES)};
    out->includes = fc_arena_calloc(arena, fc_count_texts(selection ? selection->include : NULL) + 1, sizeof(bool));
    out->excludes = fc_arena_calloc(arena, fc_count_texts(selection ? selection->exclude : NULL) + 1, sizeof(bool));
    FC_NEED(out->items && out->table && out->includes && out->excludes && prepare(&s, selection, checkpoint, arena),
            err, checkpoint->path);
    for (size_t i = 0; i < n; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        const char *name = t->name;
        fc_path path;
        bool changed;
        if (rename) {
            FC_TRY_CONTEXT(fc_rename_apply(rename, t, arena, &name, &path, &changed, err), err, "%s", checkpoint->path);
        }
        FC_TRY(add_name(&s, checkpoint, t, name, out, err));
    }
    return FC_OK;
}

static const char *find_idle(const char *const *globs, const fc_names *const *names, size_t count, bool exclude) {
    for (size_t i = 0; globs && globs[i]; i++) {
        bool used = false;
        for (size_t n = 0; n < count; n++) {
            used = used || (exclude ? names[n]->excludes : names[n]->includes)[i];
        }
        if (!used) {
            return globs[i];
        }
    }
    return NULL;
}

fc_code fc_names_check_globs(const fc_selection *selection, const fc_names *const *names, size_t count,
                             const fc_checkpoint *source, fc_arena *arena, const char **idle, fc_error *err) {
    *idle = NULL;
    const char *include = selection ? find_idle(selection->include, names, count, false) : NULL;
    const char *exclude = selection ? find_idle(selection->exclude, names, count, true) : NULL;
    const char *glob = include ? include : exclude;
    if (!glob) {
        return FC_OK;
    }
    const char *text = fc_glob_misses(source, glob, include ? "include" : "exclude", arena);
    if (include && text) {
        return fc_fail(err, FC_EUSAGE, "%s: %s", source->path, text);
    }
    *idle = text;
    return text ? FC_OK : fc_no_memory(err, source->path);
}

size_t fc_names_find(const fc_names *names, const char *name) {
    return fc_name_table_find(names->table, name, strlen(name));
}
