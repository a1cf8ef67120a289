/*
 * The stages in which load.c makes the manifest, in their order, and what a stage uses of earlier ones. manifest.c
 * makes tensors and chunks from `.metadata`, storage.c locates each chunk, files.c manages the data files, misplaced.c
 * corrects wrong boxes, safetensors.c locates chunks in safetensors, classes.c finds unreadable tensors, flattened.c
 * restores shapes, and items.c looks into the items of objects of other formats and of sparse tensors.
 */
#pragma once

#include "dcp/builder.h"

/** Makes tensors with shapes, paths and boxes from state_dict_metadata and planner_data. */
fc_code fc_dcp_build_tensors(fc_dcp_builder *b, fc_pv metadata);

/**
 * Sets the file, offset and length of every chunk from storage_data, then drops the empty chunks, except those of
 * tensors that may be misplaced.
 */
fc_code fc_dcp_place_chunks(fc_dcp_builder *b, fc_pv storage_data);

/** Moves the table of files into the checkpoint. Unless headers_only, checks that they exist and are long enough. */
fc_code fc_dcp_finish_files(fc_dcp_builder *b);

/**
 * Gives the chunks of such tensors the boxes that their ranks held, if the sizes of the stored tensors prove these, and
 * notes it in the checkpoint. Call it after fc_dcp_finish_files.
 */
fc_code fc_dcp_move_misplaced(fc_dcp_builder *b);

/** Sets the offsets of such chunks to those of their data. Call it after fc_dcp_finish_files. */
fc_code fc_dcp_place_in_safetensors(fc_dcp_builder *b);

/** Lists tensors of subclasses as unreadable values. Call it after fc_dcp_place_in_safetensors. */
fc_code fc_dcp_refuse_classes(fc_dcp_builder *b);

/** Gives the tensors that Megatron flattened their shapes and boxes. Call it after fc_dcp_refuse_classes. */
fc_code fc_dcp_restore_flattened(const fc_dcp_builder *b, fc_pv metadata);

/** Notes that fc_dcp_open_items looks into the item of `tensor`. */
fc_code fc_dcp_open_later(fc_dcp_builder *b, const fc_tensor *tensor);

/**
 * Makes objects of other formats what they were, and sparse tensors their parts. Items that are missing or damaged stay
 * as they are, and are reported when they are read. Call it last: tensors get other indices.
 */
fc_code fc_dcp_open_items(fc_dcp_builder *b);

/** Converts a torch.Size or tuple of exactly `ndim` numbers >= 0 into `out`. */
bool fc_dcp_read_size(const fc_pickle *p, fc_pv v, int ndim, int64_t *out);

/** Adds an item to the file that the string `path` names, after checking the name. */
fc_code fc_dcp_add_item(fc_dcp_builder *b, fc_pv path, size_t tensor, uint64_t offset, uint64_t length, uint32_t *file);

/** Lists a tensor as an unreadable value with a reason (NULL: out of memory). `chunk` is one of its located chunks. */
fc_code fc_dcp_refuse_tensor(const fc_dcp_builder *b, fc_tensor *tensor, const fc_chunk *chunk, const char *reason);

/** Whether the chunks are listed at the boxes that PyTorch 2.10 and later compute wrongly for FSDP over TP. */
bool fc_dcp_may_be_misplaced(const fc_dcp_builder *b, const fc_tensor *tensor);
