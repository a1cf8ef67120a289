/*
 * A DCP checkpoint while its manifest is built, and what all stages (stages.h) use.
 */
#pragma once

#include "fsdpckpt/format.h"
#include "torch/pickle/pickle.h"

/** A data file. */
typedef struct fc_dcp_file {
    const char *name; /* relative_path in storage_data */
    uint64_t items;
    uint64_t needed; /* the largest end of an item, in bytes */
    size_t farthest; /* index of that item's tensor */
    uint32_t rank;   /* from the name, or FC_NO_RANK */
} fc_dcp_file;

/** State that is needed only while the manifest is built. */
typedef struct fc_dcp_builder {
    fc_checkpoint *checkpoint;
    const fc_open_options *options;
    const fc_pickle *p;
    const char *directory;     /* the checkpoint's directory */
    const char *metadata_path; /* for messages */
    fc_tensor *tensors;        /* in the arena; the tag of an FQN's string is its index here, plus 1 */
    size_t ntensors;
    uint64_t nchunks;
    fc_dcp_file *files; /* malloc'ed; the second tag of a path's string is its index here, plus 1 */
    size_t nfiles, files_capacity;
    size_t *to_open; /* malloc'ed: the indices of the values that fc_dcp_open_items looks into, ascending */
    size_t nto_open, to_open_capacity;
    fc_error *err;
} fc_dcp_builder;

/** fc_chunk.detail: the kind of the item. */
enum {
    DCP_ARCHIVE,  /* a torch.save archive. If fc_dcp_in_safetensors, an item of safetensors whose file is missing */
    DCP_IN_PLACE, /* in safetensors: the chunk's offset and length are those of its data */
    DCP_LOST,     /* missing; only in a refused tensor */
    DCP_PACKED    /* a zstd stream of a torch.save archive: see packed.h. The last one: see fc_dcp_is_opened */
};

/**
 * fc_tensor.detail of a refused tensor: all of its archives. The first one is the chunk of the object that stands for
 * it.
 */
typedef struct fc_dcp_chunks {
    const fc_chunk *chunks; /* `file` counts from first_file, like that of the object's chunk */
    size_t count;
    uint32_t first_file;
} fc_dcp_chunks;

/** Whether the item of a chunk was opened with the checkpoint: fc_tensor.detail and fc_chunk.data are those of
 *  torch/file/file.h. */
static inline bool fc_dcp_is_opened(const fc_tensor *tensor, size_t index) {
    return tensor->object ? tensor->detail && !tensor->object->refusal : tensor->chunks[index].detail > DCP_PACKED;
}

/** Loads the pickle of `.metadata`. The caller frees it. */
fc_code fc_dcp_load_metadata(const char *path, fc_pickle **out, fc_error *err);

/** Fails with a message that begins with the metadata file and, unless it is NULL, the tensor. */
fc_code fc_dcp_fail(const fc_dcp_builder *b, fc_code code, const char *tensor, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/** @return FC_EUNSUPPORTED, with the name of the class, if `v` is an instance of an unknown class. */
fc_code fc_dcp_check_class(const fc_dcp_builder *b, const char *tensor, fc_pv v);

/** Drops the chunks without elements. */
void fc_dcp_drop_empty_chunks(fc_tensor *tensor);
