/*
 * A checkpoint, in any format, is a set of named boxes at byte extents in files.
 *
 * fc_checkpoint_open turns headers into this manifest. It is immutable and lives in one arena. fc_checkpoint_extent,
 * which is thread-safe, finds the bytes of a chunk.
 */
#pragma once

#include "fsdpckpt/arena.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/digest.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/mesh.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

FC_BEGIN_DECLS

/** Stands for an unknown rank. */
#define FC_NO_RANK UINT32_MAX

/** A checkpoint has at most this many files. */
#define FC_MOST_FILES ((1U << 30) - 1)

/** One element of the path to a value in the nested state dict: a dict key or a list index. */
typedef struct fc_path_element {
    const char *key; /**< the key; for an index or an integer key, its decimal digits */
    bool is_index;   /**< whether it is a list index */
    bool is_tuple;   /**< whether it is an index into a tuple; a format without tuples writes a list */
    bool is_number;  /**< whether it is an integer dict key; a format with string keys writes its digits */
} fc_path_element;

/** The path to a value in the nested state dict (DCP's planner_data). In a flat source it is one element, the FQN. */
typedef struct fc_path {
    const fc_path_element *elements;
    size_t count;
} fc_path;

/** A file of the checkpoint. */
typedef struct fc_file {
    const char *path; /**< can be opened from the current directory */
    const char *name; /**< relative to the checkpoint */
} fc_file;

/** What is known of the place of a chunk's bytes. Zeroed memory is FC_PLACE_NONE. */
typedef enum fc_place_kind {
    FC_PLACE_NONE, /**< none: the elements are computed, or in the memory of a program */
    FC_PLACE_FILE, /**< they are made from what `file` says in several places, e.g. an object in a pickle */
    FC_PLACE_BYTES /**< the `length` bytes from `offset` on of `file` */
} fc_place_kind;

/**
 * The place of a chunk's bytes in terms of the format, e.g. a DCP item; fc_checkpoint_extent finds the elements in it.
 * Two chunks of FC_PLACE_BYTES with equal numbers are the same bytes. Nothing else may be concluded from a place:
 * other kinds have none, and fc_chunks_share_bytes never finds them equal.
 */
typedef struct fc_place {
    uint64_t offset, length; /**< of FC_PLACE_BYTES, else 0 */
    uint32_t kind : 2;       /**< an fc_place_kind */
    uint32_t file : 30;      /**< index into fc_checkpoint.files; of FC_PLACE_NONE: 0 */
} fc_place;

/** Returns the place of `length` bytes. */
static inline fc_place fc_place_bytes(size_t file, uint64_t offset, uint64_t length) {
    const fc_place place = {offset, length, FC_PLACE_BYTES, (uint32_t)file & FC_MOST_FILES};
    return place;
}

/** A box of a tensor whose elements are in one place, or are computed together. */
typedef struct fc_chunk {
    const int64_t *dims; /**< 2 × ndim numbers: offsets in the global tensor, then sizes, in elements */
    fc_place place;
    uint32_t rank;        /**< the rank that wrote it, or FC_NO_RANK */
    union {               /* private to the format: */
        uint64_t detail;  /**< a number, */
        const void *data; /**< or something in the checkpoint's arena */
    };
} fc_chunk;

/** A value that is not a tensor. Its original bytes are the one chunk of a one-dimensional FC_OPAQUE tensor. */
typedef struct fc_object {
    const char *encoding; /**< the encoding of the bytes, e.g. "torch.save" (a zip archive with a pickle) */
    /** Why the value is unreadable, e.g. because it is a sparse tensor; NULL if it is readable. An unreadable value can
     * be listed and left out; reading it is FC_EUNSUPPORTED. */
    const char *refusal;
    fc_hint hint; /**< what makes an unreadable value readable; FC_HINT_NONE: it can only be left out */
    bool damaged; /**< fc_checkpoint_extent fails, with the reason */
} fc_object;

/** A named value. An object (`object` not NULL) has dtype FC_OPAQUE, ndim 1 and shape {bytes}. */
typedef struct fc_tensor {
    const char *name; /**< the FQN, unique in the checkpoint, UTF-8 without NUL */
    fc_path path;
    fc_dtype dtype;
    int ndim;
    const int64_t *shape;
    const fc_chunk *chunks; /**< boxes within the shape, none of them empty; an empty tensor has no chunks */
    size_t nchunks;
    const fc_placement *placements; /**< one per mesh dimension; NULL if the format does not record them */
    const fc_object *object;        /**< NULL for a tensor */
    const char *tied_to; /**< in a schema or in memory: the earlier tensor that this one is tied to; NULL: none. In
                            other formats, see fc_find_ties */
    const void *detail;  /**< private to the format */
    bool keeps_dtype;    /**< its dtype was chosen: fc_selection.cast leaves it alone */
} fc_tensor;

struct fc_format;

/** An open checkpoint. Immutable. */
typedef struct fc_checkpoint {
    const struct fc_format *format;
    const char *path; /**< the path that was given to fc_checkpoint_open */
    fc_arena *arena;  /**< owns everything below, and the checkpoint itself */
    const fc_file *files;
    size_t nfiles;
    const fc_tensor *tensors; /**< in the order of the source */
    size_t ntensors;
    bool
        omits_views; /**< whether FSDP1 had also saved views of the parameters in its flat parameters; they are left out
                      */
    /** Whether `tensors` are all that its files hold: a target of the same format with the same values can replace
     * them. Only a reader sets it, so what is computed from a checkpoint is never whole. */
    bool whole;
    bool keeps_order;     /**< whether the format keeps the order of the state dict; see fc_knows_model_order */
    fc_mesh mesh;         /**< ndim is 0 if the format records no mesh */
    const char *producer; /**< the program that wrote it, e.g. "torch 2.15.0"; NULL if unknown */
    const char *note;     /**< one line for people about what the format cannot guarantee; NULL: none */
    const char *risk; /**< one line for people about code that PyTorch would run when it loads one of the files; objects
                         have their own (fc_checkpoint_object_verdict). NULL: none */
    const struct fc_seal *seal; /**< its seal; NULL if there is none */
    /** The identities of `files` before their headers were read (lib/checkpoint/identity.h). NULL: unknown. */
    const struct fc_identities *identities;
    void *state; /**< private to the format, whose `close` frees it */
    /** If `path` is a directory, the name of the one of its checkpoints that is open (fc_listed.name); else NULL. */
    const char *group;
} fc_checkpoint;

struct fc_checkpoint;
struct fc_progress; /* progress.h */

/**
 * What openings share, if they are given the same session: one confined process reads the headers of all HDF5 files,
 * instead of one process for each. It is used by one thread at a time, and the thread that first opens a checkpoint
 * with it must outlive it. Checkpoints may outlive it.
 */
typedef struct fc_session fc_session;

/** @return a session, which the caller frees; NULL: out of memory. */
fc_session *fc_session_new(void);

/** Ends the process. `session` may be NULL. */
void fc_session_free(fc_session *session);

/**
 * Names a folder of plugins that decode what the program cannot: filters of HDF5, in the form of libhdf5's plugins.
 * They are code. They are loaded by the confined process before it is confined, with the rights of the user, and decode
 * in it afterwards. Without this call, no plugin is loaded, whatever the environment says.
 * @param folder borrowed for as long as the session and the checkpoints that were opened in it.
 * @return FC_EIO if it cannot be read.
 */
fc_code fc_session_set_plugins(fc_session *session, const char *folder, fc_error *err);

typedef struct fc_open_options {
    bool headers_only;    /**< do not access data files; their sizes and extents stay unchecked */
    bool follow_external; /**< allow HDF5 external links, external storage and virtual datasets of other files */
    /**
     * Called for each damaged file of a checkpoint that cannot be opened, with a line that says why. NULL: only the
     * returned error, about one of the files, is needed.
     */
    void (*damaged)(void *context, const char *path, const char *message);
    void *context;        /**< passed to `damaged` */
    fc_reporter reporter; /**< receives a line if an interrupted replacement of `path` was finished */
    fc_reporter others;   /**< receives a line if the directory has other checkpoints, which are not read */
    /**
     * How tensor parallelism sharded the plain tensors of torch.save files, one per rank, which do not record it. NULL:
     * such tensors must be equal on all ranks. Borrowed for the call.
     */
    const struct fc_tp_plan *tp_plan;
    size_t *tp_joined; /**< receives the number of tensors that were joined by tp_plan, and stays as it is for formats
                            that do not use the plan; may be NULL */
    /** Counts the files that are opened, in the phase FC_PHASE_OPENING; its `cancel` ends the opening with
     *  FC_EINTERRUPTED. NULL: nothing is counted. Borrowed for the call. */
    struct fc_progress *progress;
    fc_session *session; /**< NULL: nothing is shared with other openings. Borrowed for the call */
} fc_open_options;

/**
 * Opens the checkpoint at `path`, a file or a directory. Recognises the format by content and reads headers only. If a
 * directory has several checkpoints, and no rule says which one is read (docs/FOLDERS.md), the error names them. The
 * last part of the path may be such a name, as in "ckpt/rank_*.pt".
 * @param options NULL for the defaults.
 * @param out     receives the checkpoint, which the caller closes; NULL after a failure.
 */
fc_code fc_checkpoint_open(const char *path, const fc_open_options *options, fc_checkpoint **out, fc_error *err);

/**
 * Finds tied tensors (the same tensor under several names). Files that store them once (torch.save, HDF5 hard links)
 * list the same bytes under each name; a schema records ties explicitly.
 * @param tensors `count` tensors of `source`.
 * @param same_as receives `count` indices into `tensors`: the first tensor that each is tied to, or its own index.
 * @return FC_ENOMEM.
 */
fc_code fc_find_ties(const fc_checkpoint *source, const fc_tensor *const *tensors, size_t count, size_t *same_as,
                     fc_error *err);

/**
 * Refuses (FC_EUSAGE) a target that exists and is, or contains, a file or directory of `checkpoint`. Files are compared
 * by device and inode.
 * @param holds_all the target will hold everything that the checkpoint holds: then it may be the checkpoint itself,
 *                  unless it is one file of several, or a directory with another checkpoint as well.
 */
fc_code fc_checkpoint_spare(const fc_checkpoint *checkpoint, const char *target, bool holds_all, fc_error *err);

/**
 * Checks by name that no file of the checkpoint has changed since it was opened. Call it after the last byte was read:
 * what was read before a change and after it does not belong together. fc_convert, fc_compare_paths and fc_verify do.
 * @return FC_ECORRUPT with the name of a file that was changed, replaced or removed.
 */
fc_code fc_checkpoint_unchanged(const fc_checkpoint *checkpoint, fc_error *err);

/** What tells a file from any other, and from itself after a change. Times are in nanoseconds since 1970. */
typedef struct fc_file_identity {
    const char *path; /**< NULL: the file was missing, or nothing is known of it */
    uint64_t device, inode, size;
    int64_t modified, changed;
} fc_file_identity;

/**
 * Returns the identity that a file had when the checkpoint was opened. First come its files, in order, then those that
 * describe them, such as an index. A program that opens the checkpoint again can compare them.
 * @return false if there is no file of this index.
 */
bool fc_checkpoint_identity(const fc_checkpoint *checkpoint, size_t index, fc_file_identity *out);

/**
 * Returns the permission bits (of 0777) that some file of the checkpoint does not have. What is made from it gets none
 * of them: nobody can read a copy of what he cannot read. A class that cannot enter the checkpoint's directory has
 * none.
 */
unsigned fc_checkpoint_forbidden(const fc_checkpoint *checkpoint);

/**
 * Closes files that stay open between two reads, for a program that keeps the checkpoint and reads now and then. The
 * next read opens them again. Thread-safe: files that another thread reads stay open.
 */
void fc_checkpoint_rest(const fc_checkpoint *checkpoint);

/** Frees the checkpoint. NULL is allowed. */
void fc_checkpoint_close(fc_checkpoint *checkpoint);

/** Returns the file that a chunk is stored in or made from. @return NULL: it is computed, or in memory. */
static inline const fc_file *fc_chunk_file(const fc_checkpoint *checkpoint, const fc_chunk *chunk) {
    const bool known = chunk->place.kind != FC_PLACE_NONE && chunk->place.file < checkpoint->nfiles;
    return known ? &checkpoint->files[chunk->place.file] : NULL;
}

/** Returns the box of a chunk of `tensor`. */
static inline fc_box fc_chunk_box(const fc_tensor *tensor, const fc_chunk *chunk) {
    fc_box box = {tensor->ndim, chunk->dims, chunk->dims + tensor->ndim};
    return box;
}

/** Returns the bytes of the elements of a chunk, whose tensor is known to fit into memory or a file. */
static inline uint64_t fc_chunk_data_bytes(const fc_tensor *tensor, const fc_chunk *chunk) {
    const fc_box box = fc_chunk_box(tensor, chunk);
    return (uint64_t)fc_box_volume(&box) * fc_dtype_size(tensor->dtype);
}

/** How the bytes of an extent become elements. */
typedef enum fc_codec {
    FC_CODEC_RAW,      /**< the file contains the elements */
    FC_CODEC_INLINE,   /**< like RAW, but in memory at `bytes` */
    FC_CODEC_FILTERED, /**< HDF5 filter pipeline: compression, shuffle, fletcher32 (see fc_filters) */
    FC_CODEC_FORMAT,   /**< only the format can decode it: fc_format_reader.read */
    FC_CODEC_COMPUTED  /**< computed from other values by fc_format_reader.read: there are no stored bytes */
} fc_codec;

/** Whether the elements of an extent come from fc_format_reader.read. */
static inline bool fc_codec_is_read_by_format(fc_codec codec) {
    return codec == FC_CODEC_FORMAT || codec == FC_CODEC_COMPUTED;
}

/** One HDF5 filter, with the parameters that its result does not say itself. */
typedef struct fc_filter {
    uint16_t id;    /**< in The HDF Group's registry: 1 deflate, 2 shuffle, 3 fletcher32, 32000 lzf … */
    uint16_t inner; /**< bitshuffle: how its blocks are compressed, as in its parameters; 0: not, or another filter */
    uint32_t block; /**< bitshuffle that does not compress: elements per block; 0: the default, or another filter */
} fc_filter;

/** An HDF5 filter pipeline that the engine decodes itself, in the order of writing. */
typedef struct fc_filters {
    fc_filter items[4]; /**< decoding goes from the last to the first */
    uint8_t count;      /**< number of filters in items */
    uint32_t mask;      /**< HDF5's filter mask: if bit i is set, items[i] was skipped for this chunk */
} fc_filters;

/**
 * Where the elements of a chunk are. The element with index (i0, i1, …) in the chunk's box is at byte
 * `first` + (i0 × strides[0] + i1 × strides[1] + …) × element size of the decoded bytes. For RAW these are the `length`
 * bytes at `offset` of the file.
 */
typedef struct fc_extent {
    fc_codec codec;
    uint32_t file;                /**< RAW, FILTERED and FORMAT only */
    uint64_t offset;              /**< place in the file, in bytes; RAW, FILTERED and FORMAT only */
    uint64_t length;              /**< number of bytes stored there, or INLINE; every access is within them. COMPUTED:
                                     about how many bytes of its sources are read */
    uint64_t first;               /**< place of element (0, …, 0) in the decoded bytes */
    uint64_t decoded;             /**< number of bytes after decoding; equals length for RAW and INLINE */
    const unsigned char *bytes;   /**< INLINE only; valid as long as the checkpoint is open */
    fc_filters filters;           /**< FILTERED only */
    bool negate;                  /**< the stored values must be negated (torch's lazy negative views) */
    bool conjugate;               /**< the stored complex values must be conjugated (lazy conjugate views) */
    bool swap;                    /**< the byte order must be changed, in units of fc_dtype_info.swap_size bytes */
    uint32_t crc32;               /**< RAW only: the recorded CRC-32 of the stored bytes; 0 for none */
    bool has_crc64;               /**< RAW only: whether a CRC-64 of the stored bytes is recorded */
    uint64_t crc64;               /**< that CRC-64 */
    int64_t strides[FC_MAX_DIMS]; /**< in elements, not negative; 0 repeats an element */
} fc_extent;

/** Whether two places are equal in every number. */
static inline bool fc_same_place(const fc_place *a, const fc_place *b) {
    return a->kind == b->kind && a->file == b->file && a->offset == b->offset && a->length == b->length;
}

/** Whether two chunks are the same stored bytes. Chunks without stored bytes never are. */
static inline bool fc_chunks_share_bytes(const fc_chunk *a, const fc_chunk *b) {
    return a->place.kind == FC_PLACE_BYTES && fc_same_place(&a->place, &b->place);
}

/**
 * Finds the bytes of chunk `index` of `tensor`, and checks every number against the file. Thread-safe.
 */
fc_code fc_checkpoint_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                             fc_error *err);

/** Returns FC_EUNSUPPORTED with the reason if the value is unreadable, else FC_OK. */
fc_code fc_check_readable(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_error *err);

/**
 * Decodes an object to JSON text (docs/HDF5_SCHEMA.md, "Objects"), which `arena` owns. Nothing in it is executed. The
 * value is that of the bytes, which conversions copy, even where headers record another one.
 */
fc_code fc_checkpoint_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                  const char **json, fc_error *err);

/**
 * Compares the readable form that the headers of some formats record of an object with its bytes. A form that is less
 * detailed, as older versions wrote it, is accepted.
 * @return FC_ECORRUPT with both values if they differ.
 */
fc_code fc_checkpoint_check_object_json(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena,
                                        fc_error *err);

/** What loading an object in PyTorch would do besides creating data. */
typedef enum fc_object_risk {
    FC_OBJECT_HARMLESS,
    FC_OBJECT_UNKNOWN, /**< it needs a class or function that is not known to be harmless */
    FC_OBJECT_RUNS     /**< it calls something that runs code or commands, or it cannot be examined */
} fc_object_risk;

typedef struct fc_object_verdict {
    fc_object_risk risk;
    char global[256]; /**< the class or function, e.g. "os.system"; empty if it has no name or the object is harmless */
    char reason[512]; /**< a clause for people that follows the object's name; empty for a harmless object */
} fc_object_verdict;

/**
 * Examines the pickle of an object without running it. Objects of encodings that are not pickles are harmless.
 * @return FC_ECORRUPT if PyTorch could not load it, or an error of reading it.
 */
fc_code fc_checkpoint_object_verdict(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_object_verdict *out,
                                     fc_error *err);

/** As `index` of fc_checkpoint_digest: the whole tensor. */
#define FC_WHOLE_TENSOR SIZE_MAX

/**
 * Returns the digest that the checkpoint records for chunk `index` of `tensor`, or for the whole tensor. The kind is
 * FC_DIGEST_NONE if none is recorded. Thread-safe.
 */
fc_code fc_checkpoint_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                             fc_error *err);

FC_END_DECLS
