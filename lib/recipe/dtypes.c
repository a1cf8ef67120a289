/*
 * The dtypes of a recipe: tensors of its result are converted while they are read. So every command sees them, and a
 * conversion to another dtype leaves them alone.
 */
#include "fsdpckpt/try.h"
#include "plan/quantized_values.h"
#include "read/box.h"
#include "recipe/builder.h"
#include "weights/computed.h"

#include <fnmatch.h>

static fc_code compute_cast(const fc_computed_block *block, fc_error *err) {
    return fc_read_box_crc(block->sources[0], block->what, &block->box, block->tensor->dtype, block->out,
                           block->crcs[0], err);
}

/* The dtype of the last glob that matches, or the tensor's own. */
static fc_dtype dtype_of(const fc_recipe *recipe, const fc_tensor *t) {
    fc_dtype dtype = t->dtype;
    for (size_t i = 0; i < recipe->ndtypes && !t->object && fc_dtype_get(t->dtype)->cls == FC_CLASS_FLOAT; i++) {
        dtype = fnmatch(recipe->dtypes[i].glob, t->name, 0) == 0 ? recipe->dtypes[i].dtype : dtype;
    }
    return dtype;
}

/* Neither codes nor scales are values of a weight, so a recipe must not change their dtypes. */
static fc_code refuse_codes(const fc_checkpoint *made, const fc_recipe *recipe, fc_error *err) {
    fc_quantized_values values;
    FC_TRY(fc_quantized_values_find(made, made->arena, &values, err));
    for (size_t i = 0; i < made->ntensors; i++) {
        const fc_tensor *t = &made->tensors[i];
        if (values.of[i].codes != FC_NO_NAME && dtype_of(recipe, t) != t->dtype) {
            return fc_quantized_refuse_undequantized(
                made, &values, i, "the dtypes of the recipe would change the weights", made->arena, err);
        }
    }
    return FC_OK;
}

static fc_code add_tensor(fc_checkpoint *out, const fc_tensor *t, fc_dtype dtype, fc_error *err) {
    int64_t block[FC_MAX_DIMS];
    fc_tensor cast = *t;
    if (dtype == t->dtype) {
        return fc_computed_keep(out, t, err);
    }
    cast.dtype = dtype;
    fc_computed_run(&cast, block);
    return fc_computed_add(out, &cast, NULL, block, compute_cast, t, err);
}

static fc_code cast_tensors(const fc_checkpoint *made, const fc_recipe *recipe, fc_checkpoint *out, fc_error *err) {
    for (size_t i = 0; i < made->ntensors; i++) {
        FC_TRY(add_tensor(out, &made->tensors[i], dtype_of(recipe, &made->tensors[i]), err));
    }
    return fc_computed_own(out, err);
}

/* Marks the tensors that a glob matches, whether or not their dtype changes. */
static fc_code mark(const fc_recipe *recipe, fc_checkpoint *made, fc_error *err) {
    fc_tensor *tensors = fc_arena_calloc(made->arena, made->ntensors + 1, sizeof *tensors);
    FC_NEED(tensors, err, made->path);
    for (size_t i = 0; i < made->ntensors; i++) {
        tensors[i] = made->tensors[i];
        for (size_t k = 0; k < recipe->ndtypes; k++) {
            tensors[i].keeps_dtype = tensors[i].keeps_dtype || fnmatch(recipe->dtypes[k].glob, tensors[i].name, 0) == 0;
        }
    }
    made->tensors = tensors;
    return FC_OK;
}

fc_code fc_recipe_cast(const fc_recipe *recipe, fc_checkpoint **made, fc_error *err) {
    fc_checkpoint *out = NULL;
    if (recipe->ndtypes == 0) {
        return FC_OK;
    }
    FC_TRY(refuse_codes(*made, recipe, err));
    FC_TRY(mark(recipe, *made, err));
    FC_TRY(fc_computed_new(made, 1, (*made)->ntensors, &out, err));
    return fc_derived_finish(out, cast_tensors(*made, recipe, out, err), made);
}
