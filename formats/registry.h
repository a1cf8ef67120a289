/*
 * The formats there are; each is defined in its own folder.
 */
#ifndef FSDPCKPT_FORMATS_REGISTRY_H
#define FSDPCKPT_FORMATS_REGISTRY_H

#include "fsdpckpt/format.h"

extern const fc_format fc_format_dcp;
extern const fc_format fc_format_hdf5;
extern const fc_format fc_format_pt;
extern const fc_format fc_format_megatron;
extern const fc_format fc_format_schema;
extern const fc_format fc_format_deepspeed;
extern const fc_format fc_format_safetensors;
#define X(folder) extern const fc_format fc_format_##folder;
#include "format_list.h"
#undef X

#endif
