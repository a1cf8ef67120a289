/*
 * Makes the values of a recipe's result: see builder.h.
 */
#include "base/grow.h"
#include "checkpoint/parameters.h"
#include "checkpoint/path.h"
#include "fsdpckpt/flatten.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "recipe/builder.h"

#include <string.h>

fc_code fc_recipe_no_memory(const fc_recipe_builder *b) {
    return fc_no_memory(b->err, b->source->path);
}

/* Bytes of a value in lists, besides its chunks: about as many as its name, path, shape and origin have. */
enum { VALUE_BYTES = 512 };

fc_code fc_recipe_add(fc_recipe_builder *b, const fc_tensor *t) {
    FC_TRY(fc_list_budget_take(&b->lists, 1, sizeof *t + VALUE_BYTES, b->err));
    FC_NEED(fc_grow(&b->tensors, &b->capacity, b->count + 1, sizeof *b->tensors), b->err, b->source->path);
    b->tensors[b->count++] = *t;
    return FC_OK;
}

/* ---- names ---- */

fc_code fc_recipe_set_name(const fc_recipe_builder *b, const char *name, fc_tensor *t) {
    return fc_recipe_set_path(b, &(fc_path_element){.key = name}, 1, t);
}

fc_code fc_recipe_set_path(const fc_recipe_builder *b, const fc_path_element *elements, size_t count, fc_tensor *t) {
    fc_arena *arena = b->out->arena;
    t->name = NULL;
    const bool copied = fc_path_copy(arena, &(fc_path){elements, count}, &t->path);
    if (copied) {
        t->name = count == 1 ? t->path.elements[0].key : fc_path_spell(arena, &t->path, '.');
    }
    return t->name ? FC_OK : fc_recipe_no_memory(b);
}

const char *fc_recipe_output_name(const fc_recipe_builder *b, const fc_group *g, const fc_group_output *o) {
    fc_recipe_bindings bindings = g->bindings;
    fc_recipe_variable inner[FC_RECIPE_VARIABLES];
    const size_t count = fc_recipe_only(g->rule->to, g->rule->nto, g->rule->from, g->rule->nfrom, inner);
    for (size_t i = 0; i < count && bindings.count < FC_RECIPE_VARIABLES; i++) {
        const char *digits = fc_arena_printf(b->scratch, "%llu", (unsigned long long)o->numbers[i]);
        if (!digits) {
            return NULL;
        }
        bindings.all[bindings.count++] = (fc_recipe_binding){inner[i].name, digits, inner[i].len, strlen(digits), 0};
    }
    return fc_recipe_spell(g->rule->to[o->pattern], &bindings, b->scratch);
}

/* ---- values ---- */

static fc_recipe_origin *new_origin(const fc_recipe_builder *b, fc_tensor *t) {
    fc_recipe_origin *origin = fc_arena_calloc(b->out->arena, 1, sizeof *origin);
    t->detail = origin;
    t->placements = NULL; /* they refer to a mesh that other tensors do not have, unless the recipe keeps it */
    return origin;
}

fc_code fc_recipe_same_tensor(const fc_recipe_builder *b, const fc_tensor *source, fc_tensor *t) {
    *t = *source;
    fc_recipe_origin *origin = new_origin(b, t);
    FC_NEED(origin, b->err, b->source->path);
    origin->from.tensor = source;
    t->placements = b->recipe->keeps_mesh ? source->placements : NULL;
    return FC_OK;
}

fc_code fc_recipe_made_tensor(fc_recipe_builder *b, const fc_parted *parted, fc_tensor *t) {
    int64_t *shape = fc_arena_copy(b->out->arena, parted->shape, (size_t)parted->ndim, sizeof *shape);
    *t = (fc_tensor){.dtype = parted->dtype, .ndim = parted->ndim, .shape = shape};
    fc_recipe_origin *origin = new_origin(b, t);
    FC_NEED(origin && shape, b->err, b->source->path);
    if (fc_gather_pays(parted) && !b->source->format->layout_only) {
        origin->from.kind = FC_ORIGIN_COMPUTED;
        FC_TRY(fc_gather_new(parted, b->out->arena, t, &origin->gathered, b->err));
        return fc_derived_record_reads(b->out, t, &origin->from, b->err);
    }
    origin->from.kind = FC_ORIGIN_PLACED;
    return fc_recipe_chunks(b->source, parted, b->out->arena, t, &origin->places, b->err);
}

/* Sets the one chunk of a value that has no stored bytes of its own. */
static fc_code one_chunk(fc_recipe_builder *b, fc_tensor *t) {
    const size_t ndim = (size_t)t->ndim;
    fc_chunk *chunk = fc_arena_calloc(b->out->arena, 1, sizeof *chunk);
    int64_t *dims = fc_arena_calloc(b->out->arena, 2 * ndim + 1, sizeof *dims);
    FC_NEED(chunk && dims, b->err, b->source->path);
    for (size_t d = 0; d < ndim; d++) {
        dims[ndim + d] = t->shape[d];
    }
    *chunk = (fc_chunk){.dims = dims, .rank = FC_NO_RANK};
    t->chunks = chunk;
    t->nchunks = b->source->format->layout_only ? 0 : 1;
    return FC_OK;
}

fc_code fc_recipe_second_tensor(fc_recipe_builder *b, const fc_tensor *source, fc_tensor *t) {
    FC_TRY(fc_recipe_same_tensor(b, source, t));
    return fc_untie(t, b->out->arena) ? FC_OK : fc_recipe_no_memory(b);
}

fc_code fc_recipe_object(fc_recipe_builder *b, const char *json, fc_tensor *t) {
    static const fc_object object = {.encoding = FC_OBJECT_VALUE};
    int64_t *shape = fc_arena_calloc(b->out->arena, 1, sizeof *shape);
    *t = (fc_tensor){.dtype = FC_OPAQUE, .ndim = 1, .shape = shape, .object = &object};
    fc_recipe_origin *origin = new_origin(b, t);
    FC_NEED(shape && origin, b->err, b->source->path);
    origin->from = (fc_origin){.kind = FC_ORIGIN_TEXT, .text = json};
    shape[0] = (int64_t)strlen(json);
    return one_chunk(b, t);
}

fc_code fc_recipe_keep(fc_recipe_builder *b, const fc_target_tensor *w) {
    fc_tensor t;
    FC_TRY(fc_recipe_same_tensor(b, w->source, &t));
    FC_TRY(fc_recipe_set_path(b, w->path.elements, w->path.count, &t));
    t.name = fc_arena_strndup(b->out->arena, w->name, strlen(w->name));
    return t.name ? fc_recipe_add(b, &t) : fc_recipe_no_memory(b);
}
