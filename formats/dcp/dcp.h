/*
 * The DCP reader. dcp.c contains the format's table and finds the files of a checkpoint. manifest.c makes tensors and
 * chunks from `.metadata`, ranks.c merges the metadata of ranks, and storage.c locates each chunk. files.c manages the
 * data files. safetensors.c locates chunks in safetensors, misplaced.c corrects wrong boxes, classes.c finds unreadable
 * tensors, and extent.c opens the archive of one chunk.
 */
#ifndef FSDPCKPT_FORMATS_DCP_DCP_H
#define FSDPCKPT_FORMATS_DCP_DCP_H

#include "fsdpckpt/format.h"
#include "torch/pickle/pickle.h"

/** Loads the pickle of `.metadata`. The caller frees it. (dcp.c) */
fc_code fc_dcp_load_metadata(const char *path, fc_pickle **out, fc_error *err);
/** Members of fc_own_file. (own_files.c) */
fc_code fc_dcp_is_metadata(const char *path, bool *is, fc_error *err);
fc_code fc_dcp_is_data(const char *path, bool *is, fc_error *err);

/** A data file. */
typedef struct dcp_file {
    const char *name; /* relative_path in storage_data */
    uint64_t items;
    uint64_t needed; /* the largest end of an item, in bytes */
    size_t farthest; /* index of that item's tensor */
    uint32_t rank;   /* from the name, or FC_NO_RANK */
} dcp_file;

/** State that is needed only while the manifest is built. */
typedef struct dcp_builder {
    fc_checkpoint *checkpoint;
    const fc_open_options *options;
    const fc_pickle *p;
    const char *directory;     /* the checkpoint's directory */
    const char *metadata_path; /* for messages */
    fc_tensor *tensors;        /* in the arena; the tag of an FQN's string is its index here, plus 1 */
    size_t ntensors;
    uint64_t nchunks;
    dcp_file *files; /* malloc'ed; the second tag of a path's string is its index here, plus 1 */
    size_t nfiles, files_capacity;
    fc_error *err;
} dcp_builder;

/** fc_chunk.detail: the kind of the item. */
enum {
    DCP_ARCHIVE,  /* a torch.save archive. If fc_dcp_in_safetensors, an item of safetensors whose file is missing */
    DCP_IN_PLACE, /* in safetensors: the chunk's offset and length are those of its data */
    DCP_LOST      /* missing; only in a refused tensor */
};

/**
 * fc_tensor.detail of a refused tensor: all of its archives. The first one is the chunk of the object that stands for
 * it.
 */
typedef struct dcp_chunks {
    const fc_chunk *chunks; /* `file` counts from first_file, like that of the object's chunk */
    size_t count;
    uint32_t first_file;
} dcp_chunks;

/** fc_format.unverified of the formats that read DCP alone. */
#define DCP_UNVERIFIED ".metadata, and the gaps between the records of the data files, or their safetensors headers"

/** Fails with a message that begins with the metadata file and, unless it is NULL, the tensor. */
fc_code fc_dcp_fail(const dcp_builder *b, fc_code code, const char *tensor, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/** @return FC_EUNSUPPORTED, with the name of the class, if `v` is an instance of an unknown class. */
fc_code fc_dcp_check_class(const dcp_builder *b, const char *tensor, fc_pv v);

/** Makes tensors with shapes, paths and boxes from state_dict_metadata and planner_data. */
fc_code fc_dcp_build_tensors(dcp_builder *b, fc_pv metadata);

/**
 * Sets the file, offset and length of every chunk from storage_data, then drops the empty chunks, except those of
 * tensors that may be misplaced.
 */
fc_code fc_dcp_place_chunks(dcp_builder *b, fc_pv storage_data);

/** Drops the chunks without elements. */
void fc_dcp_drop_empty_chunks(fc_tensor *tensor);

/** Whether the chunks are listed at the boxes that PyTorch 2.10 and later compute wrongly for FSDP over TP. */
bool fc_dcp_may_be_misplaced(const dcp_builder *b, const fc_tensor *tensor);

/**
 * Gives the chunks of such tensors the boxes that their ranks held, if the sizes of the stored tensors prove these, and
 * notes it in the checkpoint. Call it after fc_dcp_finish_files.
 */
fc_code fc_dcp_move_misplaced(dcp_builder *b);

/** Converts a torch.Size or tuple of exactly `ndim` numbers >= 0 into `out`. */
bool fc_dcp_read_size(const fc_pickle *p, fc_pv v, int ndim, int64_t *out);

/** Adds an item to the file that the string `path` names, after checking the name. */
fc_code fc_dcp_add_item(dcp_builder *b, fc_pv path, size_t tensor, uint64_t offset, uint64_t length, uint32_t *file);

/** Lists a tensor as an unreadable value with a reason (NULL: out of memory). `chunk` is one of its located chunks. */
fc_code fc_dcp_refuse_tensor(const dcp_builder *b, fc_tensor *tensor, const fc_chunk *chunk, const char *reason);

/** Moves the table of files into the checkpoint. Unless headers_only, checks that they exist and are long enough. */
fc_code fc_dcp_finish_files(dcp_builder *b);

/** Whether the chunk's item is a tensor in the safetensors part of the data file, not an archive. */
bool fc_dcp_in_safetensors(const fc_tensor *tensor, const fc_chunk *chunk);

/** Sets the offsets of such chunks to those of their data. Call it after fc_dcp_finish_files. */
fc_code fc_dcp_place_in_safetensors(dcp_builder *b);

/** Lists tensors of subclasses as unreadable values. Call it after fc_dcp_place_in_safetensors. */
fc_code fc_dcp_refuse_classes(dcp_builder *b);

/** Gives the tensors that Megatron flattened their shapes and boxes. Call it last. */
fc_code fc_dcp_restore_flattened(const dcp_builder *b, fc_pv metadata);

/** A chunk as `.metadata` lists it. Unless the tensor was flattened, this is the chunk itself. */
typedef struct dcp_listed {
    const fc_tensor *tensor; /* of a flattened tensor: as it is listed; its last dimension has the elements */
    fc_chunk chunk;          /* the run of elements that contains the box */
    int64_t at;              /* the box's first element in the run; the box is row-major there */
    bool is_first;           /* whether no earlier chunk of the tensor is in this run */
} dcp_listed;

/** Finds what `.metadata` lists for chunk number `index`. */
dcp_listed fc_dcp_find_listed(const fc_tensor *tensor, size_t index);

/** Finds the extent of a chunk in safetensors. Thread-safe. */
fc_code fc_dcp_safetensors_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_chunk *chunk,
                                  fc_extent *out, fc_error *err);

/**
 * Like fc_format_reader.open, but without the note, so that the caller can add files. @param directory receives the
 * directory.
 */
fc_code fc_dcp_open(fc_checkpoint *checkpoint, const fc_open_options *options, const char **directory, fc_error *err);

/** Reads the metadata file `metadata_path` of `directory` and sets all of `checkpoint` except its state. */
fc_code fc_dcp_load(fc_checkpoint *checkpoint, const fc_open_options *options, const char *directory,
                    const char *metadata_path, fc_error *err);

/** Finds the highest rank with a `__<rank>.metadata` in the directory, plus 1. */
fc_code fc_dcp_count_ranks(const char *directory, size_t *ranks, fc_error *err);

/** Opens a checkpoint in which each rank wrote its own metadata. */
fc_code fc_dcp_open_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, const char *directory,
                          fc_error *err);

/** checkpoint->state: a cache of descriptors. */
typedef struct dcp_state dcp_state;
dcp_state *fc_dcp_state_new(size_t nfiles);
void fc_dcp_state_free(dcp_state *state);

/** Opens `file`, or finds it in the cache. It stays open until fc_dcp_release. Thread-safe. */
fc_code fc_dcp_acquire(const fc_checkpoint *checkpoint, uint32_t file, int *fd, fc_error *err);
void fc_dcp_release(const fc_checkpoint *checkpoint, uint32_t file);

/**
 * Reads a small item of an acquired file. If items are read in order, one pread serves many of them. Thread-safe.
 * @return malloc'ed memory of `length` bytes, or NULL if the caller must read the item itself.
 */
unsigned char *fc_dcp_read_ahead(const fc_checkpoint *checkpoint, uint32_t file, uint64_t offset, uint64_t length);

fc_code fc_dcp_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                      fc_error *err);
fc_code fc_dcp_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                      fc_error *err);
/** fc_format_verifier.verify_chunk: opens the archive only once. */
fc_code fc_dcp_verify_chunk(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *extent,
                            fc_digest *digest, struct fc_findings *findings, fc_error *err);
/** Verifies the records of an object's archive, and those of all objects (fc_format_verifier.verify). */
fc_code fc_dcp_verify_object(const fc_checkpoint *checkpoint, const fc_tensor *object, struct fc_findings *findings,
                             struct fc_verify_report *report, fc_error *err);
fc_code fc_dcp_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                      fc_error *err);
fc_code fc_dcp_check_object(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err);
fc_code fc_dcp_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                           fc_error *err);

#endif
