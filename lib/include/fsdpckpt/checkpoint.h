/*
 * A checkpoint, in any format, is a set of named boxes at byte extents in files.
 *
 * fc_checkpoint_open turns headers into this manifest; nothing in it is changed afterwards, and all of it lives
 * in one arena. Bytes are reached through fc_checkpoint_extent, which is thread-safe.
 */
#ifndef FSDPCKPT_CHECKPOINT_H
#define FSDPCKPT_CHECKPOINT_H

#include "fsdpckpt/arena.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"
#include "fsdpckpt/mesh.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FC_NO_RANK UINT32_MAX

/** One step of the way to a value in the nested state dict: a dict key, or a list index (key is its decimal text). */
typedef struct fc_path_element {
    const char *key;
    bool is_index;
    bool is_tuple;  /**< of an index: into a tuple; a format without tuples writes a list */
    bool is_number; /**< of a dict key: an integer; a format whose keys are text writes its digits */
} fc_path_element;

/** The nesting of a value (DCP's planner_data). Flat sources have one element, the FQN. */
typedef struct fc_path {
    const fc_path_element *elements;
    size_t count;
} fc_path;

/** Whether the elements of `path` joined with "." are `name`, as DCP's flatten_state_dict makes FQNs. */
bool fc_path_spells(const fc_path *path, const char *name);

/** A file of the checkpoint. `path` can be opened from the current directory; `name` is relative to the checkpoint. */
typedef struct fc_file {
    const char *path;
    const char *name;
} fc_file;

/**
 * One stored piece of a tensor. `offset`, `length` and `detail` say where it lies in terms of the format
 * (a DCP item, an HDF5 extent); only fc_checkpoint_extent turns them into bytes.
 */
typedef struct fc_chunk {
    const int64_t *dims; /**< 2 × ndim: offsets, then sizes (elements, in the global tensor) */
    uint64_t offset;     /**< bytes from the start of the file */
    uint64_t length;     /**< bytes stored there */
    uint32_t file;       /**< index into fc_checkpoint.files */
    uint32_t rank;       /**< the rank that wrote it, or FC_NO_RANK */
    uint64_t detail;     /**< private to the format */
} fc_chunk;

/** Marks a value that is not a tensor: its original bytes are the one chunk of an FC_OPAQUE tensor of one dimension. */
typedef struct fc_object {
    const char *encoding; /**< what the bytes are: "torch.save" (a zip with a pickle), "hdf5" … */
    /** Why the value cannot be had (a sparse tensor, one of a class that only a program knows …); NULL: it can. It is
     *  there to be shown and to be left out; whoever asks for its bytes gets FC_EUNSUPPORTED. */
    const char *refusal;
} fc_object;

/** A named value. An object (`object` not NULL) has dtype FC_OPAQUE, ndim 1 and shape {bytes}. */
typedef struct fc_tensor {
    const char *name; /**< FQN, unique in the checkpoint, UTF-8, without NUL */
    fc_path path;
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    const fc_chunk *chunks; /**< boxes within shape, none of them empty (an empty tensor has no chunks) */
    size_t nchunks;
    const fc_placement *placements; /**< one a mesh dimension, where the format records them; else NULL */
    const fc_object *object;        /**< NULL for a tensor */
    const char *tied_to; /**< of a schema: the tensor that it is under another name; else the chunks tell. NULL: none */
    const void *detail;  /**< private to the format */
} fc_tensor;

struct fc_format;

/** An open checkpoint. Immutable. */
typedef struct fc_checkpoint {
    const struct fc_format *format;
    const char *path; /**< as given to fc_checkpoint_open */
    fc_arena *arena;  /**< owns everything below, and the checkpoint itself */
    const fc_file *files;
    size_t nfiles;
    const fc_tensor *tensors; /**< in the order of the source */
    size_t ntensors;
    size_t tp_joined;     /**< tensors whose parts were put together by fc_open_options.tp_plan */
    bool flat_views;      /**< flat parameters of FSDP1 had views of their parameters beside them, which are left out */
    bool keeps_order;     /**< the format keeps the order of the state dict it was given; see fc_knows_model_order */
    fc_mesh mesh;         /**< ndim 0 where the format records none */
    const char *producer; /**< what wrote it, if known; else NULL ("torch 2.15.0", "fsdpckpt 0.1.0") */
    const char *note;     /**< what the format cannot vouch for, a line for a person; NULL: nothing */
    const char *risk; /**< a line for people: which code PyTorch would run while it loads one of the files, apart from
                           that of objects (fc_checkpoint_object_verdict); NULL: none is known */
    const struct fc_seal *seal; /**< digests beside it (seal.h); NULL: none */
    void *state;                /**< private to the format; its close frees it */
} fc_checkpoint;

struct fc_checkpoint;

typedef struct fc_open_options {
    bool headers_only;    /**< do not ask for the data files: sizes and extents stay unchecked */
    bool follow_external; /**< allow external links, external storage and foreign virtual datasets (HDF5) */
    /** The model whose parameters are in FSDP1's flat parameters, if there are any (unflatten.h); need not outlive the
     *  call. NULL: they stay as they are. */
    const struct fc_checkpoint *model;
    /** Where it cannot be opened: called for each of its files that cannot be read by itself, with the line that says
     *  why. NULL: the error, which is about one of them, is enough. */
    void (*damaged)(void *context, const char *path, const char *message);
    void *context; /**< of `damaged` */
    /** How tensor parallelism cut the plain tensors of torch.save files of ranks, which do not say it themselves. NULL:
     *  such tensors are copies, or they are refused. Need not outlive the call. */
    const struct fc_tp_plan *tp_plan;
} fc_open_options;

/**
 * Opens the checkpoint at `path` (a file or a directory), its format found by content. Reads headers only.
 * @param options NULL for the defaults.
 * @param out     receives the checkpoint, to be given to fc_checkpoint_close; NULL on failure.
 */
fc_code fc_checkpoint_open(const char *path, const fc_open_options *options, fc_checkpoint **out, fc_error *err);

/**
 * Whether the existing file `path` is one of several that `checkpoint` consists of, so that replacing it would destroy
 * the rest. A checkpoint that is one file may be replaced by what was made of it. False where `path` does not exist.
 */
bool fc_checkpoint_needs(const fc_checkpoint *checkpoint, const char *path);

/** Frees the checkpoint. NULL is allowed. */
void fc_checkpoint_close(fc_checkpoint *checkpoint);

/** The box of a chunk of `tensor`. */
static inline fc_box fc_chunk_box(const fc_tensor *tensor, const fc_chunk *chunk) {
    fc_box box = {tensor->ndim, chunk->dims, chunk->dims + tensor->ndim};
    return box;
}

/** How the bytes of an extent become elements. */
typedef enum fc_codec {
    FC_CODEC_RAW,      /**< elements at `offset` + strides */
    FC_CODEC_INLINE,   /**< like RAW, in memory at `bytes` instead of the file */
    FC_CODEC_FILTERED, /**< HDF5 filter pipeline: deflate, shuffle, fletcher32 (see fc_filters) */
    FC_CODEC_FORMAT    /**< only the format can decode it: fc_format.read */
} fc_codec;

/** An HDF5 filter pipeline as far as the engine decodes it itself, in HDF5's order: that of writing. */
typedef struct fc_filters {
    uint8_t
        ids[4];    /**< HDF5 filter ids: 1 deflate, 2 shuffle, 3 fletcher32; decoding goes from the last to the first */
    uint8_t count; /**< how many of ids */
    uint32_t mask; /**< HDF5's filter mask: bit i set: ids[i] was skipped for this chunk */
} fc_filters;

/**
 * Where the elements of a chunk lie, in full. The element at local index (i0, i1, …) of the chunk's box is at
 * byte `first` + (i0·strides[0] + i1·strides[1] + …) · element size of the decoded bytes.
 * For RAW the decoded bytes are the file from `offset` on, `length` bytes of it.
 */
typedef struct fc_extent {
    fc_codec codec;
    uint32_t file;
    uint64_t offset;            /**< bytes, in the file */
    uint64_t length;            /**< bytes stored from there; every access stays within */
    uint64_t first;             /**< bytes, within the decoded bytes */
    uint64_t decoded;           /**< bytes after decoding (= length for RAW and INLINE) */
    const unsigned char *bytes; /**< INLINE only; lives as long as the checkpoint */
    fc_filters filters;         /**< FILTERED only */
    bool negate;                /**< the values are the stored ones negated (torch's lazy negative views) */
    bool conjugate;             /**< the values are the stored ones conjugated (lazy conjugate views; complex only) */
    bool swap;                  /**< the other byte order: reverse every fc_dtype_info.swap_size bytes */
    uint32_t crc32;             /**< RAW only: the CRC-32 that is recorded for the stored bytes; 0: none is */
    bool has_crc64;             /**< RAW only: a CRC-64 is recorded for the stored bytes, which are this chunk: */
    uint64_t crc64;
    int64_t strides[FC_MAX_DIMS]; /**< elements, >= 0; 0 repeats an element */
} fc_extent;

/**
 * Resolves the bytes of chunk `index` of `tensor`, checking every number against the file. Thread-safe.
 */
fc_code fc_checkpoint_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                             fc_error *err);

/** FC_EUNSUPPORTED, with the reason and how to leave it out, if the value is one that cannot be had; else FC_OK. */
fc_code fc_check_readable(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_error *err);

/**
 * The safe decoding of an object as JSON text (see docs/HDF5_SCHEMA.md, "Objects"), allocated from `arena`.
 */
fc_code fc_checkpoint_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                  const char **json, fc_error *err);

/** What PyTorch would do while it loads an object, beyond making data. */
typedef enum fc_object_risk {
    FC_OBJECT_HARMLESS,
    FC_OBJECT_UNKNOWN, /**< it needs a class or function that is not known to be harmless, or cannot be examined */
    FC_OBJECT_RUNS     /**< it calls something that runs code or commands */
} fc_object_risk;

typedef struct fc_object_verdict {
    fc_object_risk risk;
    char global[256]; /**< the class or function: "os.system"; empty if it has no name, or for a harmless object */
    char reason[512]; /**< a clause for people that follows the object's name; empty for a harmless object */
} fc_object_verdict;

/**
 * Examines the pickle of an object without running it. Objects of encodings that are not pickles are harmless.
 * @return FC_ECORRUPT if PyTorch could not load it, or an error of reading it.
 */
fc_code fc_checkpoint_object_verdict(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_object_verdict *out,
                                     fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
