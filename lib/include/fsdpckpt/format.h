/*
 * The interface of a format: a reader that turns headers into a manifest, and a writer that turns a target into headers
 * with reserved extents. A format never moves tensor data; lib/move does that for all of them.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/digest.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/progress.h"
#include "fsdpckpt/target.h"

FC_BEGIN_DECLS

struct fc_comm;       /* comm.h */
struct fc_source_crc; /* lib/integrity/source_crc.h */
struct fc_read_state; /* the same */
struct fc_findings;   /* verify.h */
struct fc_selection;  /* select.h */
struct fc_verify_report;

/** The file that a probe examines. It opens and changes nothing else. */
typedef struct fc_probe {
    const char *path;
    const unsigned char *head; /**< the first bytes of the file */
    size_t head_size;          /**< up to 4096 */
} fc_probe;

/** The largest alignment of a compressed HDF5 chunk, in bytes. */
enum { FC_PLACE_ALIGN = 4096 };

/** Decides which of two checkpoints in one directory is read; lower ones come first (lib/checkpoint/folder.h). */
typedef enum fc_listed_role {
    FC_LISTED_TRAINING, /**< what a trainer saved to continue from */
    FC_LISTED_MODEL,    /**< the file names that transformers and diffusers load first */
    FC_LISTED_MODEL_PT, /**< those that they load next */
    FC_LISTED_COPY,     /**< other weights, such as a variant of the model, or an optimizer alone */
    FC_LISTED_OTHER,    /**< something else: only a training goes before it, and it goes before FC_LISTED_STATE only */
    FC_LISTED_STATE     /**< a part of the state of a training without tensors of the model, such as random numbers */
} fc_listed_role;

/** One of the checkpoints in a directory. Only files that say that they belong together are one checkpoint. */
typedef struct fc_listed {
    const struct fc_format *format;
    const char *name; /**< a file, a folder, or a glob that says which files belong to it, such as "rank_*.pt" */
    const char *file; /**< one of its files or folders, in the directory itself */
    fc_listed_role role;
} fc_listed;

/** The checkpoints in a directory, in the order of the formats. */
typedef struct fc_listing {
    fc_arena *arena;
    const struct fc_format *format; /**< the format that is asked */
    const char *wanted; /**< the name that the caller gave, such as "model_*.pt"; NULL: the directory was given */
    fc_listed *items;
    size_t count, capacity;
} fc_listing;

/** A writer in progress. fc_format_writer.create makes it, `destroy` frees it. */
typedef struct fc_writer {
    const struct fc_format *format;
    void *state; /**< private to the format */
} fc_writer;

/**
 * Turns headers into a manifest. All functions are re-entrant; several threads may call `extent`, `read`, `read_part`,
 * `digest` and `check_object` at once.
 */
typedef struct fc_format_reader {
    /** Returns whether the file looks like this format. Has no side effects. NULL: no file does. */
    bool (*probe)(const fc_probe *probe);
    /** Lists the checkpoints of this format in `directory`. NULL: a checkpoint is never a directory. @param err has no
     *  error; never NULL */
    fc_code (*list)(const char *directory, fc_listing *out, fc_error *err);
    /** Reads the headers, validates every number and fills `checkpoint`, whose arena and path are set. If the path is a
     *  directory, `group` is the one of the listed checkpoints that is read; NULL if none is listed. After a failure
     *  the caller calls `close` if `state` was set, and frees the arena. @param err never NULL */
    fc_code (*open)(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);
    /** Frees checkpoint->state. NULL: there is nothing to free. */
    void (*close)(fc_checkpoint *checkpoint);
    /** Implements fc_checkpoint_rest. NULL: nothing stays open. */
    void (*rest)(const fc_checkpoint *checkpoint);
    /** Reads the headers of file `index` alone. Called after `open` has failed, for each file that `open` had put into
     *  checkpoint->files, so that every damaged one is reported. NULL: checkpoints of this format are single files. */
    fc_code (*check_header)(const fc_checkpoint *checkpoint, size_t index, fc_error *err);
    /** Implements fc_checkpoint_extent. */
    fc_code (*extent)(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                      fc_error *err);
    /** Decodes an FC_CODEC_FORMAT chunk into `buf`, which has room for fc_extent.decoded bytes. NULL: the format has no
     *  such chunks. */
    fc_code (*read)(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf, fc_error *err);
    /** Decodes `size` bytes from byte `at` on of those that `read` would give, for chunks that are larger than the
     *  memory for decoding. A part that begins where another one ended is cheap. NULL: such chunks are refused. */
    fc_code (*read_part)(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, uint64_t at, void *buf,
                         size_t size, fc_error *err);
    /** Decodes an object for fc_checkpoint_object_json. NULL: the format has no objects. */
    fc_code (*object_json)(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                           fc_error *err);
    /** Whether `object_json` returns text that the headers record next to the bytes. It may say anything, so values are
     *  decoded from the bytes, and `check` and `verify` compare the two. */
    bool records_json;
    /** Implements fc_checkpoint_digest. NULL: the format records no digests. */
    fc_code (*digest)(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                      fc_error *err);
    /** Checks the bytes of an object before they are copied verbatim. NULL: `digest` covers them. */
    fc_code (*check_object)(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err);
    /**
     * For derived checkpoints: after all data was read, compares what was read of the inputs with their recorded
     * digests and CRCs. Collective over `comm`, which may be NULL. NULL: the checkpoint is not derived.
     */
    fc_code (*check_inputs)(const fc_checkpoint *checkpoint, struct fc_comm *comm, fc_error *err);
    /** For derived checkpoints: calls `visit` with the sums of what was read of each input, and with what else must
     *  be known to go on; one of the two is NULL. Always in the same order. NULL: there are none. */
    fc_code (*visit_sums)(const fc_checkpoint *checkpoint,
                          fc_code (*visit)(void *context, struct fc_source_crc *sums, const struct fc_read_state *state,
                                           fc_error *err),
                          void *context, fc_error *err);
    /** Checks the first bytes of data file `index`, which exists and is long enough for its chunks. Called before a
     *  conversion, and for checkpoints opened with headers_only. NULL: there is nothing to check. */
    fc_code (*check_file)(const fc_checkpoint *checkpoint, size_t index, fc_error *err);
} fc_format_reader;

/** Checks what only the format knows. All members may be NULL. */
typedef struct fc_format_verifier {
    /** Checks headers and the records next to the tensors' bytes. Reports every defect to `findings`; fails only when
     * it cannot continue. NULL: there is nothing to check. */
    fc_code (*verify)(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                      fc_error *err);
    /** Returns the extent and the digest of a chunk in one pass, and reports defects of records next to its bytes to
     *  `findings`. NULL: fc_format_reader.extent and digest are called. */
    fc_code (*verify_chunk)(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *extent,
                            fc_digest *digest, struct fc_findings *findings, fc_error *err);
    const char
        *unverified; /**< the parts that no digest of this format covers, for people; NULL: every part is covered */
} fc_format_verifier;

/** What the targets of a format are. All members may be NULL or false. */
typedef struct fc_format_target {
    bool wants_crc32; /**< finish_item or finish_file needs fc_target_item.crc32 */
    bool
        holds_pickles; /**< loading an object of the target executes its pickle, so only harmless objects are written */
    bool self_contained; /**< each shard file holds all boxes of its rank, replicated ones and objects too */
    /** Where objects go, for people, when the format has no objects: `reserve` puts them there and the engine writes
     *  none. NULL: objects are stored like tensors. */
    const char *objects_note;
    /** Returns whether other programs see tensors of a dtype with another dtype and shape. NULL: they never do. */
    bool (*reshapes)(fc_dtype dtype, int ndim);
    /** How they see these tensors, for people. */
    const char *reshaped_note;
    /** What a program that loads the target needs apart from it, for people. NULL: nothing. */
    const char *also_needed;
    /**
     * The files that this format writes into a directory, ended by one without a glob. A directory that contains
     * nothing else may be replaced. NULL: the format writes no directories.
     */
    const fc_own_file *own_files;
    /** Stores whether the regular file `path`, which is not empty, is a checkpoint of this format that a target may
     *  replace. NULL: a target is never one file. */
    fc_code (*is_checkpoint)(const char *path, bool *is, fc_error *err);
    /** Returns whether the target is a directory. NULL: a target is a directory when it has a mesh. */
    bool (*is_directory)(const fc_target *target);
    /**
     * Makes a checkpoint of the values that `selection` chooses, under the names and with the shapes that the format
     * wants. It reads `source`, which must outlive it. fc_target_adapt calls it. NULL: any names and shapes are good.
     * @param left_out adds the number of values that the selection leaves out.
     */
    fc_code (*adapt)(const fc_checkpoint *source, const struct fc_selection *selection, size_t *left_out,
                     fc_checkpoint **out, fc_error *err);
    /** Sets the `section` of each value. A section is a checkpoint of its own within the target: values of two sections
     * are never in one file, and each section has its own index. Refuses values that the format has no place for. NULL:
     * a target has one section. */
    fc_code (*set_sections)(fc_target_tensor *tensors, size_t count, fc_error *err);
    /** Returns the name that the format's reader gives to a value of the target, in `arena`; NULL: out of memory. A
     * NULL member means that it is the value's own. */
    const char *(*name_as_read)(const fc_target_tensor *tensor, fc_arena *arena);
    /** Returns the number of files with data. NULL: one file, or with a mesh one file per rank. */
    size_t (*files)(const fc_target *target);
    /** Returns the name of the file that `finish` writes over the others of each section, or NULL. A NULL member means
     * that there is none. */
    const char *(*index)(const fc_target *target);
} fc_format_target;

/**
 * For a sharded target whose files several writers make, each in a process of its own. One of them gets the notes of
 * all files, and finishes.
 */
typedef struct fc_format_notes {
    /** Hands out what the writer keeps of its finished files for `finish`, as bytes without pointers, and forgets it.
     *  NULL: nothing is kept.
     *  @param bytes receives memory that the caller frees; NULL when `size` is 0. */
    fc_code (*take)(fc_writer *writer, unsigned char **bytes, size_t *size, fc_error *err);
    /** Adds what `take` handed out for the files of one rank. Ranks come in order. */
    fc_code (*add)(fc_writer *writer, const void *bytes, size_t size, fc_error *err);
} fc_format_notes;

/** Turns a target into headers with reserved extents. `create` is NULL for formats that are only read. */
typedef struct fc_format_writer {
    /** Starts a target at `staging`, a file path, or an existing empty directory if is_directory. Writes nothing
     * outside of it. */
    fc_code (*create)(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err);
    /** Returns how many items of `shard`, counted from `first`, go into the next file; at least 1. The engine then
     * calls `reserve` and `finish_file` with these items only. NULL: each shard is one file. */
    size_t (*split)(fc_writer *writer, const fc_target_file *shard, size_t first);
    /** Writes the headers of one file and sets file->path and the items' offsets. Files come in rank order. When it
     *  returns, the file has its final length, unless items are chunked, and the writer has no descriptor open on it.
     */
    fc_code (*reserve)(fc_writer *writer, fc_target_file *file, fc_error *err);
    /**
     * Reserves the extent of one compressed HDF5 chunk in the file that was reserved last. Items come in ascending
     * order of their `offset`. Not re-entrant. NULL: the format has no compression.
     * @param start  where the chunk starts in the item, in elements.
     * @param raw    whether the bytes are the elements unchanged; else they are shuffled (elements of one byte are not)
     *               and deflated.
     * @param offset receives where in the file the engine writes `size` bytes: less than FC_PLACE_ALIGN after the chunk
     *               before it, or after the end of the file that was reserved.
     */
    fc_code (*place)(fc_writer *writer, const fc_target_item *item, const int64_t *start, bool raw, uint64_t size,
                     uint64_t *offset, fc_error *err);
    /**
     * Writes the headers that depend on the digests of one item, whose data is written and whose crc64 and crc32 are
     * set. The engine calls it once for each owned item that has bytes and no chunks, in any order, after `reserve` and
     * before `finish_file`; in a conversion that fails, not for all. Several threads may call it at once, while others
     * write the data of other items. NULL: no header depends on one item alone.
     * @param item one of those that `reserve` got last.
     * @param fd   the file, open for writing.
     */
    fc_code (*finish_item)(fc_writer *writer, const fc_target_item *item, int fd, fc_error *err);
    /** Writes the digests of the owned items into the room that `reserve` left for them, and all other headers that are
     *  left, after all data of the file was written. A file with chunked items gets its final length. NULL:
     *  there is nothing to write. */
    fc_code (*finish_file)(fc_writer *writer, const fc_target_file *file, fc_error *err);
    /** Writes what spans all files, e.g. index.h5, after they are finished.
     *  @param digests CRC-64 of each of target->tensors as a whole. */
    fc_code (*finish)(fc_writer *writer, const uint64_t *digests, fc_error *err);
    void (*destroy)(fc_writer *writer);
    /** NULL: only one process writes the files of a target. */
    const fc_format_notes *notes;
} fc_format_writer;

/** One format: its identity, its capabilities, and the functions that read, verify and write it. */
typedef struct fc_format {
    const char *name;              /**< as in --to: "h5" */
    const char *description;       /**< for people: "HDF5" */
    const char *const *extensions; /**< NULL-terminated, with the dot */
    const char *file_sign;         /**< how a file is recognised, for people; NULL: a checkpoint is never one file */
    const char *directory_sign;    /**< how a directory is recognised, for people; NULL: it is never a directory */
    const char *header_name;       /**< the header file that is not in fc_checkpoint.files; NULL: there is none */
    bool layout_only; /**< describes tensors without data: they have no chunks, and a conversion is only planned */
    fc_format_reader reader;
    fc_format_verifier verifier;
    fc_format_target target;
    fc_format_writer writer;
} fc_format;

/** Returns whether `format` can be written. */
static inline bool fc_format_writes(const fc_format *format) {
    return format->writer.create != NULL;
}

/**
 * Stores whether the regular file `path` is a checkpoint of some format, or with a `name`, whether some format writes
 * files of this name and content into a directory. Nothing is lost with an empty file. For
 * fc_commit_options.is_own_file.
 */
fc_code fc_is_own_file(const char *path, const char *name, bool *own, fc_error *err);

/**
 * How objects of one fc_object.encoding are decoded, and examined for code that loading them would execute. `examine`
 * and `examine_memory` are NULL for encodings that cannot execute anything, `json` and `json_memory` for bytes that
 * nothing here decodes.
 */
typedef struct fc_object_encoding {
    const char *name; /**< fc_object.encoding */
    /** Examines the `length` bytes from `offset` of the open file `fd`. */
    fc_code (*examine)(int fd, const char *path, uint64_t offset, uint64_t length, fc_object_verdict *out,
                       fc_error *err);
    /** Examines `length` bytes in memory, and frees `bytes`, which is malloc'ed. */
    fc_code (*examine_memory)(unsigned char *bytes, uint64_t length, const char *path, fc_object_verdict *out,
                              fc_error *err);
    /** Decodes the `length` bytes from `offset` of the open file `fd` as fc_checkpoint_object_json does. */
    fc_code (*json)(int fd, const char *path, uint64_t offset, uint64_t length, fc_arena *arena, const char **json,
                    fc_error *err);
    /** Likewise decodes `length` bytes in memory, and frees `bytes`, which is malloc'ed. */
    fc_code (*json_memory)(unsigned char *bytes, uint64_t length, const char *path, fc_arena *arena, const char **json,
                           fc_error *err);
} fc_object_encoding;

/** Finds the encoding of objects called `name`. @return NULL: its objects are not decoded, and cannot execute anything.
 */
const fc_object_encoding *fc_object_encoding_find(const char *name);

/** The static table of formats (formats/format_list.h), NULL-terminated. */
const fc_format *const *fc_formats(void);

/** Finds a format by its name ("h5"). @return NULL when there is none. */
const fc_format *fc_format_find(const char *name);

/** Finds the format whose targets have this extension (".h5", in any case). @return NULL: no format that can be written
 * has it. */
const fc_format *fc_format_of_extension(const char *extension);

FC_END_DECLS
