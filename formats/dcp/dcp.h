/*
 * The DCP reader. dcp.c finds the checkpoint and has the format's table; manifest.c makes tensors and chunks from
 * `.metadata`; ranks.c merges the metadata of ranks; storage.c places each chunk; files.c has the data files;
 * safetensors.c finds chunks in safetensors; classes.c finds unreadable tensors; extent.c opens the archive of one
 * chunk.
 */
#ifndef FSDPCKPT_FORMATS_DCP_DCP_H
#define FSDPCKPT_FORMATS_DCP_DCP_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/format.h"
#include "torch/pickle.h"

/** A data file, while and after the manifest is built. */
typedef struct dcp_file {
    const char *name; /* relative_path of storage_data */
    uint64_t items;
    uint64_t needed; /* bytes: the farthest end of an item */
    size_t farthest; /* tensor of that item */
    uint32_t rank;   /* from the name, or FC_NO_RANK */
} dcp_file;

/** What is needed only while the manifest is built. */
typedef struct dcp_builder {
    fc_checkpoint *checkpoint;
    const fc_open_options *options;
    const fc_pickle *p;
    const char *directory;     /* the checkpoint's folder */
    const char *metadata_path; /* for messages */
    fc_tensor *tensors;        /* in the arena; tags of FQN strings hold index + 1 */
    size_t ntensors;
    uint64_t nchunks;
    dcp_file *files; /* malloc'ed; second tags of path strings hold index + 1 */
    size_t nfiles, files_capacity;
    fc_error *err;
} dcp_builder;

/** fc_chunk.detail: what the item is. */
enum {
    DCP_ARCHIVE,  /* of torch.save; in safetensors where fc_dcp_in_safetensors says so: not placed, its file is missing
                   */
    DCP_IN_PLACE, /* the chunk's offset and length are those of its data, which is in safetensors */
    DCP_LOST      /* of a refused tensor: not there */
};

/** fc_tensor.detail of a refused tensor: all of its archives. The object's chunk is the first of them. */
typedef struct dcp_pieces {
    const fc_chunk *chunks; /* their `file` counts from first_file as the object's from its own, wherever that is put */
    size_t count;
    uint32_t first_file;
} dcp_pieces;

/** fc_format.unverified of the formats that read DCP alone. */
#define DCP_UNVERIFIED ".metadata, and the gaps between the records of the data files, or their safetensors headers"

/** Marks a chunk that storage_data has not placed yet. */
#define DCP_UNPLACED UINT32_MAX

/** Fails with the metadata file, and the tensor where there is one (NULL else), before the message. */
fc_code fc_dcp_fail(const dcp_builder *b, fc_code code, const char *tensor, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/** FC_EUNSUPPORTED with the name of its class if `v` is an instance of a class that is neither DCP's nor like one. */
fc_code fc_dcp_check_class(const dcp_builder *b, const char *tensor, fc_pv v);

/** state_dict_metadata and planner_data → tensors with shapes, paths and boxes. */
fc_code fc_dcp_build_tensors(dcp_builder *b, fc_pv metadata);

/** storage_data → file, offset and length of every chunk; then drops the empty chunks. */
fc_code fc_dcp_place_chunks(dcp_builder *b, fc_pv storage_data);

/** Converts a torch.Size or tuple of exactly `ndim` numbers >= 0 into `out`. */
bool fc_dcp_read_size(const fc_pickle *p, fc_pv v, int ndim, int64_t *out);

/** Adds an item to the file called by the string `path`, which is checked. */
fc_code fc_dcp_add_item(dcp_builder *b, fc_pv path, size_t tensor, uint64_t offset, uint64_t length, uint32_t *file);

/** Lists a tensor as an unreadable value with its reason (NULL: out of memory). `chunk` is one of its placed chunks. */
fc_code fc_dcp_refuse_tensor(const dcp_builder *b, fc_tensor *tensor, const fc_chunk *chunk, const char *reason);

/** Moves the table of files into the checkpoint; unless headers_only, checks that they are there and long enough. */
fc_code fc_dcp_finish_files(dcp_builder *b);

/** Whether the chunk's item is no archive, but one tensor among those of the data file's safetensors part. */
bool fc_dcp_in_safetensors(const fc_tensor *tensor, const fc_chunk *chunk);

/** Gives such chunks the offsets of their data; called after fc_dcp_finish_files. */
fc_code fc_dcp_place_in_safetensors(dcp_builder *b);

/** Lists quantized tensors and the like as unreadable values; called after fc_dcp_place_in_safetensors. */
fc_code fc_dcp_refuse_classes(dcp_builder *b);

/** The place and strides of a chunk in safetensors. Thread-safe. */
fc_code fc_dcp_safetensors_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_chunk *chunk,
                                  fc_extent *out, fc_error *err);

/** As fc_format.open, without the note, so that a caller can add files. @param directory receives the directory. */
fc_code fc_dcp_open(fc_checkpoint *checkpoint, const fc_open_options *options, const char **directory, fc_error *err);

/** Reads the metadata file `metadata_path` of the folder `directory`: all of `checkpoint` but its state. */
fc_code fc_dcp_load(fc_checkpoint *checkpoint, const fc_open_options *options, const char *directory,
                    const char *metadata_path, fc_error *err);

/** One more than the highest rank that has a `__<rank>.metadata` in the folder. */
fc_code fc_dcp_count_ranks(const char *directory, size_t *ranks, fc_error *err);

/** Puts a checkpoint together from the metadata that every rank left. */
fc_code fc_dcp_open_ranks(fc_checkpoint *checkpoint, const fc_open_options *options, const char *directory,
                          fc_error *err);

/** The cache of descriptors: checkpoint->state. */
typedef struct dcp_state dcp_state;
dcp_state *fc_dcp_state_new(size_t nfiles);
void fc_dcp_state_free(dcp_state *state);

/** Opens `file` or takes it from the cache; it stays open until fc_dcp_release. Thread-safe. */
fc_code fc_dcp_acquire(const fc_checkpoint *checkpoint, uint32_t file, int *fd, fc_error *err);
void fc_dcp_release(const fc_checkpoint *checkpoint, uint32_t file);

/**
 * The bytes of a small item of an acquired file that is read in order, from one pread for many items. Thread-safe.
 * @return malloc'ed memory of `length` bytes, or NULL if the caller must read the item on its own.
 */
unsigned char *fc_dcp_read_ahead(const fc_checkpoint *checkpoint, uint32_t file, uint64_t offset, uint64_t length);

fc_code fc_dcp_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                      fc_error *err);
fc_code fc_dcp_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                      fc_error *err);
/** As fc_format.verify_chunk: the archive is opened once. */
fc_code fc_dcp_verify_chunk(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *extent,
                            fc_digest *digest, struct fc_findings *findings, fc_error *err);
/** Every record of an object's archive; and of all objects, as fc_format.verify. */
fc_code fc_dcp_verify_object(const fc_checkpoint *checkpoint, const fc_tensor *object, struct fc_findings *findings,
                             struct fc_verify_report *report, fc_error *err);
fc_code fc_dcp_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                      fc_error *err);
fc_code fc_dcp_check_object(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err);
fc_code fc_dcp_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                           fc_error *err);

#endif
