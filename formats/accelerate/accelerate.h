/*
 * Folders of Hugging Face's accelerate. accelerate.c reads them and has the format's table; writer.c writes them;
 * names.c knows which values are in which folder, and what they are called there.
 *
 * The folder of model i is pytorch_model_fsdp_<i>, that of its optimizer optimizer_<i>. Each is a DCP checkpoint whose
 * names begin with "model." or "optimizer.", whatever i is. In the joint checkpoint those of the models after the first
 * begin with "model_<i>." and "optimizer_<i>.".
 */
#pragma once

#include "fsdpckpt/format.h"

/** fc_target_tensor.section: twice the number of the model, plus 1 for its optimizer. */
enum {
    ACCELERATE_OPTIMIZER = 1,
    ACCELERATE_KINDS = 2,
    ACCELERATE_MODELS = 100,
    ACCELERATE_SECTIONS = ACCELERATE_MODELS * ACCELERATE_KINDS,
    ACCELERATE_NAME = 48,
};

/**
 * Finds the section that the value `name` belongs to: "model.…", "model_1.…", "optimizer.…", "optim_1.…".
 * @param length receives the length of the name before its first dot.
 * @return false if it belongs to none.
 */
bool fc_accelerate_section(const char *name, uint32_t *section, size_t *length);

/** The folder of a section. */
void fc_accelerate_folder(uint32_t section, char folder[ACCELERATE_NAME]);

/** What the names in the folder of a section begin with: "model" or "optimizer". */
const char *fc_accelerate_head(uint32_t section);

/** What they begin with in the whole checkpoint: "model", "optimizer", "model_1", … NULL: out of memory. */
const char *fc_accelerate_own_head(fc_arena *arena, uint32_t section);

/**
 * Puts `head` in the place of the first `length` bytes of a name and of its path.
 * @return false: out of memory.
 */
bool fc_accelerate_rename(fc_arena *arena, size_t length, const char *head, const char **name, fc_path *path);

fc_code fc_accelerate_set_sections(fc_target_tensor *tensors, size_t count, fc_error *err);
const char *fc_accelerate_name_as_read(const fc_target_tensor *tensor, fc_arena *arena);
bool fc_accelerate_is_directory(const fc_target *target);
size_t fc_accelerate_files(const fc_target *target);
const char *fc_accelerate_index(const fc_target *target);
fc_code fc_accelerate_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err);
fc_code fc_accelerate_reserve(fc_writer *writer, fc_target_file *file, fc_error *err);
fc_code fc_accelerate_finish_item(fc_writer *writer, const fc_target_item *item, int fd, fc_error *err);
fc_code fc_accelerate_finish(fc_writer *writer, const uint64_t *digests, fc_error *err);
void fc_accelerate_destroy(fc_writer *writer);
