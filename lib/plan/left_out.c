/*
 * Lists what a selection leaves out, in as few words as tell it from what it keeps. See left_out.h.
 */
#include "plan/left_out.h"

#include "checkpoint/parameters.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "plan/globs.h"

#include <stdlib.h>
#include <string.h>

/* A longer list (bytes) ends in "...". A name is not looked into below MOST_LEVELS. */
enum { MOST_LISTED = 200, MOST_GLOBS = 250, MOST_LEVELS = 64 };

bool fc_add_component(fc_arena *arena, const char **list, const char *name, size_t len) {
    for (const char *at = *list; *at; at += strcspn(at, ",") + (at[strcspn(at, ",")] ? 2 : 0)) {
        if (strcspn(at, ",") == len && memcmp(at, name, len) == 0) {
            return true;
        }
    }
    *list = fc_arena_printf(arena, "%s%s%.*s", *list, **list ? ", " : "", (int)len, name);
    return *list != NULL;
}

/* Whether a name of the sorted list begins with the first `len` bytes of `name`. */
static bool is_kept(const fc_name_list *kept, const char *name, size_t len) {
    size_t low = 0;
    FC_BISECT(low, kept->count, middle, strncmp(kept->names[middle], name, len) < 0);
    return low < kept->count && strncmp(kept->names[low], name, len) == 0;
}

/* @return the length of the first components of a name with which no kept name begins, or of MOST_LEVELS of them. */
static size_t distinct(const fc_name_list *kept, const char *name) {
    size_t len = strcspn(name, ".");
    for (int i = 1; i < MOST_LEVELS && name[len] && is_kept(kept, name, len + 1); i++) { /* with the dot */
        len += 1 + strcspn(name + len + 1, ".");
    }
    return len;
}

/* Adds the first components of a name, with * for those that are numbers: layers are alike. */
static bool add_layers(fc_arena *arena, const char **out, const char *name, size_t len) {
    char *text = fc_arena_alloc(arena, 2 * len + 1);
    size_t n = 0;
    for (size_t at = 0; text && at < len; at++) {
        const bool starts = at == 0 || name[at - 1] == '.';
        const size_t digits = starts ? strspn(name + at, "0123456789") : 0;
        const bool number = digits > 0 && (at + digits == len || name[at + digits] == '.');
        text[n++] = number ? '*' : name[at];
        at += number ? digits - 1 : 0;
    }
    return text && fc_add_component(arena, out, text, n);
}

fc_code fc_list_components(fc_name_list *kept, const fc_name_list *left, fc_arena *arena, const char **out,
                           fc_error *err) {
    fc_sort_texts(kept->names, kept->count);
    *out = "";
    bool full = false, added = true;
    for (int nested = 0; nested < 2; nested++) { /* single components first: they say most */
        for (size_t i = 0; added && !full && i < left->count; i++) {
            const size_t len = distinct(kept, left->names[i]);
            if ((len > strcspn(left->names[i], ".")) == nested) {
                full = strlen(*out) > MOST_LISTED;
                added = full ? fc_add_component(arena, out, "...", 3) : add_layers(arena, out, left->names[i], len);
            }
        }
    }
    return added ? FC_OK : fc_no_memory(err, NULL);
}

fc_code fc_list_globs(fc_name_list *kept, const fc_name_list *left, fc_arena *arena, const char **out, fc_error *err) {
    fc_sort_texts(kept->names, kept->count);
    *out = "";
    for (size_t i = 0; *out && i < left->count && strlen(*out) < MOST_GLOBS; i++) {
        const char *name = left->names[i];
        const size_t len = distinct(kept, name);
        if (name[strcspn(name, FC_NOT_IN_GLOBS)]) {
            *out = NULL;
            return FC_OK;
        }
        const bool whole = name[len] == '\0' || is_kept(kept, name, len);
        const char *glob = fc_arena_printf(arena, "%.*s%s", (int)(whole ? strlen(name) : len), name, whole ? "" : ".*");
        FC_NEED(glob && fc_add_component(arena, out, glob, strlen(glob)), err, NULL);
    }
    *out = strlen(*out) < MOST_GLOBS ? *out : NULL;
    return FC_OK;
}

fc_code fc_list_left_out(const fc_checkpoint *source, const fc_selection *selection, fc_arena *arena, const char **out,
                         fc_error *err) {
    fc_name_list kept = {calloc(source->ntensors + 1, sizeof *kept.names), 0};
    fc_name_list left = {calloc(source->ntensors + 1, sizeof *left.names), 0};
    fc_code rc;
    *out = "";
    FC_TRY_GOTO(kept.names && left.names ? FC_OK : fc_no_memory(err, source->path), rc, out);
    for (size_t i = 0; i < source->ntensors; i++) {
        const char *name = source->tensors[i].name;
        if (fc_selects(selection, name)) {
            kept.names[kept.count++] = name;
        } else if (!fc_is_of_optimizer(name)) {
            left.names[left.count++] = name;
        }
    }
    rc = fc_list_components(&kept, &left, arena, out, err);
out:
    free((void *)kept.names);
    free((void *)left.names);
    return rc;
}
