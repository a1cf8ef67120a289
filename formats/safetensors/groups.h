/*
 * The safetensors files of a directory, and which of them are one checkpoint.
 */
#pragma once

#include "fsdpckpt/format.h"
#include "safetensors/files.h"

/** The files and indexes of a directory, in an arena. */
typedef struct fc_st_names {
    const char **names;  /**< *.safetensors, sorted */
    const char **groups; /**< of each name, the fc_listed.name of the checkpoint that its name puts it into */
    size_t count;
    const char **indexes; /**< *.safetensors.index.json, and those of variants, sorted */
    size_t nindexes;
} fc_st_names;

/** Lists a directory. */
fc_code fc_st_list_names(fc_arena *arena, const char *directory, fc_st_names *out, fc_error *err);

/** fc_format_reader.list. */
fc_code fc_st_list(const char *directory, fc_listing *out, fc_error *err);

/** Parses "shard-00001-model-00001-of-00001.safetensors". The numbers are valid if the name is a shard file's. */
bool fc_st_parse_shard_name(const char *name, uint32_t *shard, uint32_t *model, uint32_t *models);

/** Parses "model-rank-0-part-1.safetensors" of vLLM, and "rank0.safetensors" of TensorRT-LLM, whose part is 0. */
bool fc_st_parse_rank_name(const char *name, uint32_t *rank, uint32_t *part);

/** Parses "<stem>-00002-of-00005.safetensors"; `*stem` is the stem's length. */
bool fc_st_parse_numbered_name(const char *name, size_t *stem, uint32_t *number, uint32_t *count);
