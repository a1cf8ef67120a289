/*
 * Keeps the files next to the weights when --force replaces a directory of a model: see kept.h.
 */
#include "kept.h"

#include "fsdpckpt/order.h"
#include "target.h"

#include "fsdpckpt/export.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static fc_code copy_kept(void *context, const char *staging, fc_error *err) {
    const kept_files *kept = context;
    bool removed;
    FC_TRY(kept->add_files ? kept->add_files(kept->add_context, staging, err) : FC_OK);
    FC_TRY(fc_side_files_copy(kept->from, kept->names, staging, err));
    return kept->dequantized && fc_has_text(kept->names, "config.json")
               ? fc_side_config_dequantize(staging, kept->dtype, &removed, err)
               : FC_OK;
}

/* Lists the files of the old directory that the new one lacks. The hub puts .gitattributes into each. */
static fc_code list_kept(const kept_files *kept, const fc_convert_options *how, fc_arena *arena,
                         const char *const **out, fc_error *err) {
    const char *from = kept->from;
    static const char hub[] = ".gitattributes";
    const char *const *found;
    size_t n = 0;
    FC_TRY(fc_side_files(from, true, kept->dequantized, arena, &found, err));
    const char **names = fc_arena_calloc(arena, fc_count_texts(found) + 2, sizeof *names);
    const char *attributes = fc_arena_printf(arena, "%s/%s", from, hub);
    FC_NEED(names && attributes, err, from);
    for (; *found; found++) {
        if (!fc_has_text(how->added, *found)) {
            names[n++] = *found;
        }
    }
    if (fc_access(attributes, F_OK) == 0) {
        names[n++] = hub;
    }
    *out = n > 0 ? names : NULL;
    return FC_OK;
}

fc_code kept_prepare(const options *o, fc_convert_options *how, fc_arena *arena, kept_files *kept, fc_error *err) {
    *kept = (kept_files){.from = o->output,
                         .dequantized = option_given(o, OPT_DEQUANTIZE),
                         .dtype = o->dequantize,
                         .add_files = how->add_files,
                         .add_context = how->add_context};
    if (!o->force || !o->output || !how->format->writer.split || !target_is_directory(o->output)) {
        return FC_OK;
    }
    if (fc_access(o->output, F_OK) != 0) {
        return FC_OK; /* a name that ends with "/" */
    }
    size_t length = strlen(o->output);
    while (length > 1 && o->output[length - 1] == '/') {
        length--;
    }
    kept->from = fc_arena_strndup(arena, o->output, length);
    FC_NEED(kept->from, err, o->output);
    FC_TRY(list_kept(kept, how, arena, &kept->names, err));
    if (!kept->names) {
        return FC_OK;
    }
    const size_t added = fc_count_texts(how->added), more = fc_count_texts(kept->names);
    const char **all = fc_arena_calloc(arena, added + more + 1, sizeof *all);
    FC_NEED(all, err, o->output);
    for (size_t i = 0; i < added + more; i++) {
        all[i] = i < added ? how->added[i] : kept->names[i - added];
    }
    how->added = all;
    how->add_files = copy_kept;
    how->add_context = kept;
    return FC_OK;
}
