/*
 * Globs over the names of a checkpoint: what they select, and what to say of one that matches nothing.
 */
#include "plan/globs.h"

#include "fsdpckpt/try.h"

#include <stdio.h>
#include <string.h>

bool fc_selects(const fc_selection *selection, const char *name) {
    bool included = !selection->include || fc_globs_match(selection->include, name, NULL);
    return included && !fc_globs_match(selection->exclude, name, NULL);
}

static const fc_tensor *first_match(const fc_checkpoint *source, const char *glob) {
    for (size_t i = 0; i < source->ntensors; i++) {
        if (fnmatch(glob, source->tensors[i].name, 0) == 0) {
            return &source->tensors[i];
        }
    }
    return NULL;
}

/* How many bytes of a name and of a glob's plain beginning are the same. */
static size_t same_beginning(const char *glob, const char *name) {
    size_t n = 0;
    while (name[n] && name[n] == glob[n] && !strchr("*?[", glob[n])) {
        n++;
    }
    return n;
}

/* The name that begins most like the glob. */
static const char *nearest(const fc_checkpoint *source, const char *glob) {
    const char *best = "";
    size_t most = 0;
    glob += strspn(glob, "*");
    for (size_t i = 0; i < source->ntensors; i++) {
        const char *name = source->tensors[i].name;
        const size_t same = same_beginning(glob, name);
        if (i == 0 || same > most) {
            best = name;
            most = same;
        }
    }
    return best;
}

/* A glob matches whole names. If it is only a part of one, the text suggests a glob that matches. */
const char *fc_glob_misses(const fc_checkpoint *source, const char *glob, const char *purpose, fc_arena *arena) {
    const char *wider = fc_arena_printf(arena, "*%s*", glob);
    const fc_tensor *near = wider ? first_match(source, wider) : NULL;
    return near ? fc_arena_printf(arena, "the glob '%s' to %s matches none of the %zu names; '%s' matches '%s'", glob,
                                  purpose, source->ntensors, wider, near->name)
                : fc_arena_printf(arena, "the glob '%s' to %s matches none of the %zu names; the nearest is '%s'", glob,
                                  purpose, source->ntensors, nearest(source, glob));
}

fc_code fc_check_includes(const fc_checkpoint *source, const char *const *include, fc_error *err) {
    for (; include && *include; include++) {
        if (!first_match(source, *include)) {
            fc_arena *arena = fc_arena_new();
            const char *text = arena ? fc_glob_misses(source, *include, "include", arena) : NULL;
            fc_code rc = text ? fc_fail(err, FC_EUSAGE, "%s: %s", source->path, text) : fc_no_memory(err, source->path);
            fc_arena_free(arena);
            return rc;
        }
    }
    return FC_OK;
}

fc_code fc_find_idle_exclude(const fc_checkpoint *source, const char *const *exclude, fc_arena *arena, const char **out,
                             fc_error *err) {
    *out = NULL;
    for (; exclude && *exclude; exclude++) {
        if (!first_match(source, *exclude)) {
            *out = fc_glob_misses(source, *exclude, "exclude", arena);
            return *out ? FC_OK : fc_no_memory(err, source->path);
        }
    }
    return FC_OK;
}
