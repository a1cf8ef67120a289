/*
 * Finds the deltas of a chain, and the tensors that they change. See chain.h.
 */
#include "delta/chain.h"

#include "delta/version.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "safetensors/files.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- a directory of versions ---- */

/* A directory of versions is neither named like a version, nor has it an index. */
static fc_code is_directory_of_versions(const char *path, bool *is, fc_error *err) {
    char index[PATH_MAX];
    fc_error missing = {FC_OK};
    *is = false;
    if (fc_delta_number_of(path) != FC_DELTA_NO_NUMBER) {
        return FC_OK;
    }
    *is = !fc_find_in(path, ST_INDEX_NAME, index, &missing);
    if (missing.code != FC_OK && err) {
        *err = missing;
    }
    return missing.code;
}

/* Leaves out the deltas that the model has already; the next one must change what it has. */
static fc_code leave_out(fc_delta_links *links, const char *path, int64_t last, int64_t have, fc_error *err) {
    while (links->count > 0 && links->versions[0]->number <= have) {
        links->versions++;
        links->count--;
    }
    if (last < have) {
        return fc_fail(err, FC_EUSAGE, "%s: the model has version %" PRId64 ", which is later than version %" PRId64,
                       path, have, last);
    }
    const fc_delta_version *first = links->count > 0 ? links->versions[0] : NULL;
    return !first || first->base == have
               ? FC_OK
               : fc_fail(err, FC_EUSAGE,
                         "%s: it changes version %" PRId64 ", but the model has version %" PRId64
                         "; name the versions that follow %" PRId64 ", or read a full version with the deltas after it",
                         first->path, first->base, have, have);
}

/* Goes back over the bases, to a full version or to one that is not there. */
static fc_code find_in_directory(fc_arena *arena, const char *path, int64_t wanted, int64_t have, fc_delta_links *out,
                                 fc_error *err) {
    fc_delta_versions all;
    FC_TRY(fc_delta_versions_list(arena, path, NULL, &all, err));
    if (wanted == FC_DELTA_NO_NUMBER) {
        wanted = all.versions[all.count - 1].number;
    }
    out->versions = fc_arena_calloc(arena, all.count, sizeof *out->versions);
    FC_NEED(out->versions, err, path);
    fc_delta_version *last = fc_delta_versions_find(&all, wanted), *end;
    if (!last) {
        return fc_fail(err, FC_EUSAGE, "%s: there is no version %" PRId64, path, wanted);
    }
    out->count = fc_delta_walk_back(&all, last, out->versions, &end);
    FC_TRY(have == FC_DELTA_NO_NUMBER ? FC_OK : leave_out(out, path, wanted, have, err));
    if (out->count == 0) {
        return wanted == have
                   ? FC_OK
                   : fc_fail(err, FC_EUSAGE, "%s: version %" PRId64 " is a full version, so no delta leads to it", path,
                             wanted);
    }
    const fc_delta_version *first = out->versions[0];
    if (have == FC_DELTA_NO_NUMBER && !end && fc_delta_is_gap(&all, first)) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: version %" PRId64 " changes version %" PRId64
                       ", which is not there; name the versions to fold, from %" PRId64 " on or up to %" PRId64,
                       path, first->number, first->base, first->number, first->base - 1);
    }
    size_t at = 0;
    const fc_delta_version *fork = fc_delta_next_fork(&all, out->versions, out->count, &at);
    return fork ? fc_fail(err, FC_EUSAGE,
                          "%s: version %" PRId64 " does not lead to version %" PRId64
                          ": the versions fork there; name those to fold",
                          path, fork->number, wanted)
                : FC_OK;
}

/* ---- versions that are named ---- */

static int order_links(const void *a, const void *b) {
    const fc_delta_version *x = *(fc_delta_version *const *)a, *y = *(fc_delta_version *const *)b;
    FC_ORDER_BY(x->number, y->number);
    return strcmp(x->path, y->path);
}

static fc_code open_named(fc_arena *arena, const char *const *sources, size_t count, fc_delta_links *out,
                          fc_error *err) {
    fc_delta_version *versions = fc_arena_calloc(arena, count, sizeof *versions);
    out->versions = fc_arena_calloc(arena, count, sizeof *out->versions);
    FC_NEED(versions && out->versions, err, sources[0]);
    for (size_t i = 0; i < count; i++) {
        FC_TRY(fc_delta_version_open(arena, sources[i], &versions[i], err));
        out->versions[out->count++] = &versions[i];
    }
    fc_sort_items(out->versions, count, sizeof *out->versions, order_links);
    return FC_OK;
}

static fc_code check_link(const fc_delta_version *v, const fc_delta_version *before, fc_error *err) {
    if (v->base == FC_DELTA_NO_NUMBER) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: this is a full version, which needs none before it; fold only the versions after it",
                       v->path);
    }
    if (!before) {
        return FC_OK;
    }
    if (v->number == before->number) {
        return fc_fail(err, FC_EUSAGE, "%s and %s: both are version %" PRId64 "; name one of them", before->path,
                       v->path, v->number);
    }
    if (v->base == before->base) {
        return fc_fail(err, FC_EUSAGE, "%s and %s: both change version %" PRId64 "; name those of one chain",
                       before->path, v->path, v->base);
    }
    if (v->base != before->number) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: it changes version %" PRId64 ", but the version before it is %" PRId64
                       "; name the versions between them too, or fold up to version %" PRId64,
                       v->path, v->base, before->number, before->number);
    }
    return FC_OK;
}

fc_code fc_delta_links_find(fc_arena *arena, const char *const *sources, size_t count, int64_t wanted, int64_t have,
                            fc_delta_links *out, fc_error *err) {
    bool directory = false;
    *out = (fc_delta_links){NULL, 0};
    for (size_t i = 0; i < count; i++) {
        FC_TRY(fc_check_given(sources[i], "a delta", err));
    }
    FC_TRY(count == 1 ? is_directory_of_versions(sources[0], &directory, err) : FC_OK);
    FC_TRY(directory ? find_in_directory(arena, sources[0], wanted, have, out, err)
                     : open_named(arena, sources, count, out, err));
    for (size_t i = 0; i < out->count; i++) {
        FC_TRY(check_link(out->versions[i], i > 0 ? out->versions[i - 1] : NULL, err));
    }
    if (!directory && have != FC_DELTA_NO_NUMBER) {
        FC_TRY(leave_out(out, sources[0], out->versions[out->count - 1]->number, have, err));
    }
    for (size_t i = 0; i < out->count; i++) {
        FC_TRY(fc_delta_version_read(arena, out->versions[i], err));
    }
    return FC_OK;
}

/* ---- tensors ---- */

/* A frame, sorted by the name of its tensor and by its version. */
typedef struct frame {
    const char *name;
    size_t version;
    const fc_delta_tensor *tensor;
} frame;

static int order_frames(const void *a, const void *b) {
    const frame *x = a, *y = b;
    const int order = strcmp(x->name, y->name);
    return order != 0 ? order : FC_ORDER(x->version, y->version);
}

fc_code fc_delta_links_tensors(fc_arena *arena, const fc_delta_links *links, fc_delta_link **out, size_t *count,
                               fc_error *err) {
    size_t total = 0, at = 0;
    for (size_t i = 0; i < links->count; i++) {
        total += links->versions[i]->ntensors;
    }
    frame *frames = fc_arena_calloc(arena, total + 1, sizeof *frames);
    const fc_delta_version **versions = fc_arena_calloc(arena, total + 1, sizeof *versions);
    const fc_delta_tensor **tensors = fc_arena_calloc(arena, total + 1, sizeof *tensors);
    *out = fc_arena_calloc(arena, total + 1, sizeof **out);
    *count = 0;
    FC_NEED(frames && versions && tensors && *out, err, NULL);
    for (size_t i = 0; i < links->count; i++) {
        for (size_t k = 0; k < links->versions[i]->ntensors; k++) {
            const fc_delta_tensor *t = &links->versions[i]->tensors[k];
            frames[at++] = (frame){t->name, i, t};
        }
    }
    fc_sort_items(frames, total, sizeof *frames, order_frames);
    for (size_t i = 0; i < total; i++) {
        versions[i] = links->versions[frames[i].version];
        tensors[i] = frames[i].tensor;
        if (i == 0 || strcmp(frames[i].name, frames[i - 1].name) != 0) {
            (*out)[(*count)++] = (fc_delta_link){frames[i].name, versions + i, tensors + i, 0};
        }
        (*out)[*count - 1].count++;
    }
    return FC_OK;
}
