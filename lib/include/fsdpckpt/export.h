/*
 * Exporting a model: finding it in a checkpoint of a training run, giving it the names and layouts of another program,
 * and fitting it to a reference, a directory of the model as downloaded from the Hugging Face hub.
 */
#pragma once

#include "fsdpckpt/recipe.h"
#include "fsdpckpt/select.h"

FC_BEGIN_DECLS

/** Where the model was found in a checkpoint. The texts are in the caller's arena. */
typedef struct fc_model_place {
    const char *branch;   /**< the keys of the state dict that lead to it, joined with "."; "": all of the checkpoint */
    const char *wrappers; /**< the components that wrappers had added to names, such as "module., _orig_mod."; "" */
    const char *others;   /**< what was left out, such as "optimizer, app.step"; "" */
    const char *besides;  /**< what of that is not the optimizer's, such as "app.step"; "" */
    size_t left_out;      /**< number of values that were left out */
} fc_model_place;

/**
 * Reduces `target` to the tensors of the model, under the names that they have in it: leaves out objects, the optimizer
 * and other branches of the state dict, and removes what FSDP, DDP and torch.compile add to names.
 * @param target its tensors are replaced by new ones in `arena`.
 * @return FC_EUSAGE if it has no model, or several branches could be the model.
 */
fc_code fc_model_find(fc_target *target, fc_arena *arena, fc_model_place *out, fc_error *err);

/** Returns whether trainers keep something other than the model under such a name: an optimizer, a scheduler, a random
 * generator. */
bool fc_is_beside_model(const char *name);

/**
 * Replaces a checkpoint by its model, as fc_model_find finds it. Meshes and placements stay. A checkpoint that is the
 * model and nothing else stays as it is.
 * @param source the caller closes it, also after a failure.
 * @param arena  owns `place`.
 * @return FC_EUSAGE as fc_model_find.
 */
fc_code fc_model_only(fc_checkpoint **source, fc_arena *arena, fc_model_place *place, fc_error *err);

/** The model as it should become. */
typedef struct fc_export_reference {
    const fc_checkpoint *weights;     /**< opened with its data; NULL: only the configuration is known */
    const char *config;               /**< its config.json; NULL: none */
    bool dequantized;                 /**< what its configuration says of quantization does not hold */
    bool other_files;                 /**< its files need not hold the same tensors as those of the export */
    const char *const *setting_names; /**< as in fc_check_options */
} fc_export_reference;

/** A tensor that was changed to fit the reference. */
typedef struct fc_export_change {
    const char *name, *other; /**< `other`: the tensor that it repeats, or NULL */
    int64_t from, to;         /**< of a trimmed tensor: its rows before and after */
} fc_export_change;

/** What fc_export_fit has done. In the caller's arena. */
typedef struct fc_export_fit_report {
    fc_export_change *tied;    /**< tensors that were left out because they repeat another one */
    fc_export_change *copied;  /**< tensors that were written a second time, as the reference has them */
    fc_export_change *trimmed; /**< tensors whose vocabulary was trimmed */
    size_t ntied, ncopied, ntrimmed;
    size_t cast;                    /**< number of tensors whose dtype changes */
    const char *const *differences; /**< what remains different, one line each */
    size_t ndifferences;
    const char *const *checked; /**< without weights: the keys of config.json that the model was compared with */
    size_t nchecked;
} fc_export_fit_report;

typedef struct fc_export_options {
    const fc_selection *selection; /**< only include, exclude, strip_prefix and rename are used */
    const char *recipe; /**< a name or a file; "none": names and layouts stay; "auto": the shipped one that fits, which
                           is an error if none does; NULL: the shipped one that fits, if there is one */
    bool reverse;       /**< as in fc_recipe_options */
    const char *config; /**< as in fc_recipe_options */
    const fc_export_reference *reference; /**< NULL: none */
    const char *adapter_config; /**< adapter_config.json of the LoRA adapter that the model has inside, or its folder:
                                   it is merged. NULL: such a model is an error */
    bool adapter_optional;      /**< adapter_config was found, not named: a model without an adapter is no error */
} fc_export_options;

/** What fc_export_open has done. In the caller's arena. */
typedef struct fc_export_report {
    fc_model_place place;
    const char *prefix;      /**< what was removed from all names besides wrappers; "" */
    const char *recipe;      /**< the name of the recipe, or NULL */
    fc_recipe_matches found; /**< why this recipe: its count is 0 if the recipe was not found by itself */
    fc_export_fit_report fit;
    size_t merged; /**< number of weights into which the adapter was merged */
} fc_export_report;

/**
 * Replaces a checkpoint by its model: finds it, gives its tensors the names and layouts of a recipe, and fits them to
 * the reference.
 * @param source the caller closes it, also after a failure.
 * @param arena  owns the report.
 * @return FC_EUSAGE if there is no model, or several could be the model; or as fc_recipe_apply.
 */
fc_code fc_export_open(fc_checkpoint **source, const fc_export_options *options, fc_arena *arena, fc_export_report *out,
                       fc_error *err);

/**
 * The fc_selection.arrange of an export to a reference with weights: each tensor gets the dtype of its namesake in the
 * reference, and the files get the same tensors as the reference's files.
 * @param context an fc_export_reference.
 */
fc_code fc_export_arrange(void *context, fc_target_tensor *tensors, size_t count, fc_error *err);

/** Stores whether the directory `path` has weights, so that they can be opened, or be found to be damaged. */
fc_code fc_has_weights(const char *path, bool *has, fc_error *err);

/**
 * Lists the files of the directory `path` that are not weights, relative to it, ended by NULL.
 * @param follow_external whether links may lead out of it: see fc_check_link.
 * @param dequantized     leave out files that only say how weights are quantized, such as hf_quant_config.json.
 */
fc_code fc_side_files(const char *path, bool follow_external, bool dequantized, fc_arena *arena,
                      const char *const **out, fc_error *err);

/** Copies these files from one directory to another one. */
fc_code fc_side_files_copy(const char *from, const char *const *names, const char *to, fc_error *err);

/**
 * Changes config.json in `folder`, if it is there: what says how weights are quantized is removed, and the dtype of the
 * model becomes `dtype`, if config.json has one. All other bytes stay.
 * @param dtype   FC_OPAQUE: it stays.
 * @param removed receives whether there was something about quantization.
 */
fc_code fc_side_config_dequantize(const char *folder, fc_dtype dtype, bool *removed, fc_error *err);

FC_END_DECLS
