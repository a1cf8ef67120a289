/*
 * The state that the views of inspect share: the listed values, their order, and the layout. See inspect.h.
 */
#include "inspect/inspect.h"

#include "inspect/fold.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/select.h"
#include "fsdpckpt/try.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

uint64_t inspect_add(uint64_t a, uint64_t b) {
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

uint64_t inspect_elements(const fc_tensor *tensor) {
    int64_t n;
    return fc_numel(tensor->ndim, tensor->shape, &n) ? (uint64_t)n : UINT64_MAX;
}

uint64_t inspect_bytes(const fc_tensor *tensor) {
    uint64_t bytes;
    return __builtin_mul_overflow(inspect_elements(tensor), (uint64_t)fc_dtype_size(tensor->dtype), &bytes) ? UINT64_MAX
                                                                                                            : bytes;
}

/* ---- names, objects ---- */

/* Compares two components: digits by value, then byte by byte, so that equal means identical. */
static int compare_components(const char *a, size_t alen, const char *b, size_t blen) {
    size_t i = 0, k = 0;
    while (i < alen && k < blen) {
        size_t na = strspn(a + i, "0123456789"), nb = strspn(b + k, "0123456789");
        if (na > 0 && nb > 0) {
            size_t za = strspn(a + i, "0"), zb = strspn(b + k, "0");
            size_t la = na - (za < na ? za : na), lb = nb - (zb < nb ? zb : nb);
            int order = la != lb ? (la > lb) - (la < lb) : memcmp(a + i + na - la, b + k + nb - lb, la);
            if (order != 0) {
                return order;
            }
            i += na;
            k += nb;
        } else if (a[i] != b[k]) {
            return (unsigned char)a[i] < (unsigned char)b[k] ? -1 : 1;
        } else {
            i++;
            k++;
        }
    }
    if (i < alen || k < blen) {
        return i < alen ? 1 : -1;
    }
    int order = memcmp(a, b, alen < blen ? alen : blen); /* "01" and "1" are different names */
    return order != 0 ? order : (alen > blen) - (alen < blen);
}

int inspect_compare_names(const char *a, const char *b) {
    for (;;) {
        size_t alen = fold_component(a), blen = fold_component(b);
        int order = compare_components(a, alen, b, blen);
        if (order != 0) {
            return order;
        }
        if (!a[alen] || !b[blen]) {
            return (a[alen] != 0) - (b[blen] != 0);
        }
        a += alen + 1;
        b += blen + 1;
    }
}

const char *inspect_object(inspection *in, const fc_tensor *object, fc_arena *arena, fc_error *err) {
    const char *json = NULL;
    if (in->headers_only || !in->checkpoint->format->reader.object_json) {
        err->message[0] = '\0';
        return NULL;
    }
    fc_code rc = fc_checkpoint_object_json(in->checkpoint, object, arena, &json, err);
    if (rc == FC_OK) {
        return json;
    }
    /* An unsupported object is shown as such; damage is the result of the command. */
    if (in->worst == FC_OK && rc != FC_EUNSUPPORTED) {
        in->worst = rc;
        in->first = *err;
    }
    return NULL;
}

fc_object_risk inspect_risk(const inspection *in, const fc_tensor *object, fc_object_verdict *out) {
    if (in->headers_only || fc_checkpoint_object_verdict(in->checkpoint, object, out, NULL) != FC_OK) {
        *out = (fc_object_verdict){.risk = FC_OBJECT_HARMLESS}; /* inspect_object reports the damage */
    }
    return out->risk;
}

/* ---- the layout ---- */

const fc_placement *inspect_placed(const inspection *in, const fc_tensor *tensor) {
    if (!in->recognised) {
        return in->mesh.ndim > 0 ? tensor->placements : NULL;
    }
    return in->placements + (size_t)(tensor - in->checkpoint->tensors) * (size_t)in->mesh.ndim;
}

const char *inspect_placements(const inspection *in, const fc_tensor *tensor, const fc_sharding *c, char *buf,
                               size_t size) {
    const fc_placement *placed = inspect_placed(in, tensor);
    if (placed) {
        fc_placements_format(in->mesh.ndim, placed, buf, (int)size);
    } else if (c->placed) {
        fc_placements_format(c->mesh_ndim, c->placements, buf, (int)size);
    } else {
        buf[0] = '\0';
    }
    return buf;
}

const char *inspect_layout(const inspection *in, char *buf, size_t size) {
    if (in->checkpoint->format->layout_only) {
        snprintf(buf, size, "none: there is no data");
        return buf;
    }
    size_t used = in->stages > 1 ? (size_t)snprintf(buf, size, "%" PRId64 " pipeline stages, each of ", in->stages) : 0;
    sharding_summary_layout(&in->sharding, &in->mesh, buf + used, size - used);
    used = strlen(buf);
    if (in->recognised) {
        snprintf(buf + used, size - used, ", recognised from the chunks");
    }
    return buf;
}

/* Replaces the mesh of all ranks by that of one pipeline stage: the dimension of the stages, the first, goes. */
static void take_stage(inspection *in, size_t count) {
    const size_t width = (size_t)in->mesh.ndim;
    for (size_t i = 0; i < count; i++) {
        memmove(in->placements + i * (width - 1), in->placements + i * width + 1, (width - 1) * sizeof *in->placements);
    }
    for (size_t d = 1; d < width; d++) {
        in->mesh.sizes[d - 1] = in->mesh.sizes[d];
        memcpy(in->mesh.names[d - 1], in->mesh.names[d], sizeof in->mesh.names[d]);
    }
    in->mesh.ndim--;
}

/* Finds the recorded mesh, or else a mesh of two or more dimensions that matches the chunks. */
static fc_code find_layout(inspection *in, fc_error *err) {
    const fc_checkpoint *c = in->checkpoint;
    bool ranks = false;
    in->mesh = c->mesh;
    for (size_t i = 0; i < c->ntensors; i++) {
        const fc_tensor *t = &c->tensors[i];
        ranks = ranks || (!t->object && t->nchunks > 1 && t->chunks[0].rank != FC_NO_RANK);
    }
    if (c->mesh.ndim > 0 || !ranks) {
        return FC_OK;
    }
    const fc_tensor **tensors = fc_arena_calloc(in->arena, c->ntensors, sizeof *tensors);
    FC_NEED(tensors, err, in->checkpoint->path);
    for (size_t i = 0; i < c->ntensors; i++) {
        tensors[i] = &c->tensors[i];
    }
    fc_mesh mesh = {0};
    fc_error none;
    fc_code rc;
    FC_TRY_GOTO(fc_recognise_layout(c, c->ntensors, tensors, in->arena, &mesh, &in->placements, &none), rc, out);
    if (mesh.ndim > 1) {
        in->mesh = mesh;
        in->recognised = true;
        in->stages = fc_find_stages(tensors, c->ntensors, &mesh);
    }
    if (in->stages > 1) {
        take_stage(in, c->ntensors);
    }
out:
    return rc == FC_ENOMEM ? fc_no_memory(err, in->checkpoint->path) : FC_OK;
}

/* ---- the listed values ---- */

static bool matches_glob(const char *const *globs, const char *name) {
    for (; globs && *globs; globs++) {
        if (fnmatch(*globs, name, 0) == 0) {
            return true;
        }
    }
    return false;
}

static int compare_tensor_places(const void *x, const void *y) {
    const fc_tensor *a = *(const fc_tensor *const *)x, *b = *(const fc_tensor *const *)y;
    return (a > b) - (a < b);
}

static int compare_tensor_names(const void *x, const void *y) {
    int order = inspect_compare_names((*(const fc_tensor *const *)x)->name, (*(const fc_tensor *const *)y)->name);
    return order ? order : compare_tensor_places(x, y);
}

static int compare_tensor_sizes(const void *x, const void *y) {
    uint64_t a = inspect_bytes(*(const fc_tensor *const *)x), b = inspect_bytes(*(const fc_tensor *const *)y);
    return a != b ? (a < b) - (a > b) : compare_tensor_places(x, y);
}

static fc_code select_items(inspection *in, fc_error *err) {
    const fc_checkpoint *c = in->checkpoint;
    in->items = fc_arena_calloc(in->arena, c->ntensors, sizeof *in->items);
    FC_NEED(in->items, err, in->checkpoint->path);
    FC_TRY(fc_check_includes(c, in->how.include, err));
    for (size_t i = 0; i < c->ntensors; i++) {
        const char *name = c->tensors[i].name;
        if ((!in->how.include || matches_glob(in->how.include, name)) && !matches_glob(in->how.exclude, name)) {
            in->items[in->nitems++] = &c->tensors[i];
        }
    }
    if (in->nitems == 0 && c->ntensors > 0) {
        return fc_fail(err, FC_EUSAGE, "%s: --include and --exclude leave out all %zu values", c->path, c->ntensors);
    }
    if (in->how.sort != INSPECT_BY_SOURCE) {
        fc_sort_items(in->items, in->nitems, sizeof *in->items,
                      in->how.sort == INSPECT_BY_NAME ? compare_tensor_names : compare_tensor_sizes);
    }
    return FC_OK;
}

static void add_up_values(inspection *in) {
    totals *sum = &in->sum;
    const fc_checkpoint *c = in->checkpoint;
    for (size_t i = 0; i < in->nitems; i++) {
        const fc_tensor *t = in->items[i];
        if (t->object) {
            sum->objects++;
            continue;
        }
        sum->tensors++;
        sum->chunks += t->nchunks;
        sum->elements = inspect_add(sum->elements, inspect_elements(t));
        sum->bytes = inspect_add(sum->bytes, inspect_bytes(t));
        sum->by_dtype[t->dtype]++;
        sum->elements_by_dtype[t->dtype] = inspect_add(sum->elements_by_dtype[t->dtype], inspect_elements(t));
    }
    for (size_t i = 0; i < c->nfiles && !in->headers_only; i++) {
        struct stat st;
        if (fc_stat(c->files[i].path, &st) == 0) {
            sum->file_bytes = inspect_add(sum->file_bytes, (uint64_t)st.st_size);
        }
    }
}

fc_code inspect_begin(inspection *in, const fc_checkpoint *checkpoint, const inspect_options *how, text_out *out,
                      fc_error *err) {
    *in = (inspection){.checkpoint = checkpoint, .out = out, .how = *how, .headers_only = how->headers_only};
    in->arena = fc_arena_new();
    FC_NEED(in->arena, err, in->checkpoint->path);
    FC_TRY(find_layout(in, err));
    FC_TRY(select_items(in, err));
    add_up_values(in);
    if (how->stats) {
        FC_TRY(inspect_read_stats(in, in->items, in->nitems, how->stats, err));
    }
    return inspect_list(in, err);
}

void inspect_end(inspection *in) {
    fc_sharding_scratch_free(&in->scratch);
    fc_arena_free(in->arena);
}
