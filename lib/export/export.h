/*
 * What the files of this room share.
 */
#pragma once

#include "base/name_table.h"
#include "fsdpckpt/export.h"

/** Returns a table of the tensors' names and their indexes, or NULL when out of memory. */
fc_name_table *fc_export_names(const fc_checkpoint *checkpoint, fc_arena *arena);

/** @return the index of `name`, or FC_NO_NAME. */
size_t fc_export_find(const fc_name_table *names, const char *name);

/** Returns whether a tensor of one dtype is written in another one: both are plain numbers of at least 16 bits. */
bool fc_export_casts(fc_dtype from, fc_dtype to);

/** Tensors of a checkpoint by dtype and shape: those that can be the twin of another tensor. */
typedef struct fc_export_shapes fc_export_shapes;

/** Returns the shapes of the tensors whose names `wanted` has, too, in `arena`; or NULL when out of memory. */
fc_export_shapes *fc_export_shapes_new(const fc_checkpoint *checkpoint, const fc_name_table *wanted, fc_arena *arena);

/**
 * Finds a tensor with the data of `tensor`, a tensor of the same checkpoint that is not in `shapes`. Only the few
 * tensors with its shape are read.
 * @param out receives it, or NULL.
 */
fc_code fc_export_find_twin(const fc_export_shapes *shapes, const fc_tensor *tensor, const fc_tensor **out,
                            fc_error *err);

/** Removes `prefix`, which all names have, from the names of a target. Its tensors are replaced by new ones in `arena`.
 */
fc_code fc_model_strip(fc_target *target, const char *prefix, fc_arena *arena, fc_error *err);

/** Returns the first `components` components of the names with their dots if all names share them, else NULL. */
const char *fc_model_prefix(const fc_target *target, int components, fc_arena *arena);

/**
 * Fits a model to a reference: tied tensors are stored as many times as there, and the vocabulary is trimmed to its
 * size. Then names and shapes are compared.
 * @param model  the checkpoint of the model alone; replaced by a derived one, which owns it.
 * @param arena  owns the report.
 */
fc_code fc_export_fit(fc_checkpoint **model, const fc_export_reference *reference, fc_arena *arena,
                      fc_export_fit_report *out, fc_error *err);
