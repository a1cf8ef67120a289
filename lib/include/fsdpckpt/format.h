/*
 * What a format gives: a reader that turns headers into a manifest, a writer that turns a target into
 * headers with reserved extents. A format never moves tensor data; lib/engine does that for all of them.
 */
#ifndef FSDPCKPT_FORMAT_H
#define FSDPCKPT_FORMAT_H

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/digest.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/target.h"

#ifdef __cplusplus
extern "C" {
#endif

struct fc_comm;     /* comm.h */
struct fc_findings; /* verify.h */
struct fc_verify_report;

/** What a probe may look at: nothing else is opened, nothing is changed. */
typedef struct fc_probe {
    const char *path;
    bool is_directory;
    const unsigned char *head; /**< the first bytes of a file; NULL for a directory */
    size_t head_size;          /**< up to 4096 */
} fc_probe;

/** What the first bytes of a file say that it is. */
typedef enum fc_content {
    FC_CONTENT_HDF5,
    FC_CONTENT_OUR_HDF5, /**< with the mark that every file of this program has */
    FC_CONTENT_ZIP,
    FC_CONTENT_PICKLE,
    FC_CONTENT_SAFETENSORS,
    FC_CONTENT_JSON
} fc_content;

/** Files of one kind in a target directory. */
typedef struct fc_own_file {
    const char *glob;
    fc_content content;
} fc_own_file;

/** A writer in progress. Made by fc_format.create, freed by `destroy`. */
typedef struct fc_writer {
    const struct fc_format *format;
    void *state;
} fc_writer;

/**
 * One format. A NULL writer group means that the format is only read. All functions are re-entrant; `extent` and
 * `read` may be called from several threads at once.
 */
typedef struct fc_format {
    const char *name;              /**< as in --to: "h5" */
    const char *description;       /**< for people: "HDF5" */
    const char *const *extensions; /**< NULL-terminated, with the dot */
    const char *file_sign;         /**< for people: what a file of it is called; NULL: it is never one file */
    const char *directory_sign;    /**< for people: what a directory of it has; NULL: it is never a directory */
    const char *header_name; /**< the file of a checkpoint's directory that is not in fc_checkpoint.files; or NULL */
    bool layout_only;        /**< describes tensors and holds none: they have no chunks; a conversion is only planned */

    /** Whether the input looks like this format. No side effects. */
    bool (*probe)(const fc_probe *probe);

    /** Reads headers, validates every number, fills `checkpoint` (arena and path are set). On failure the caller
     *  calls `close` if `state` was set, and frees the arena. */
    fc_code (*open)(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err);
    void (*close)(fc_checkpoint *checkpoint); /**< frees checkpoint->state; may be NULL */
    /** Reads the headers of file `index` by itself, where `open` has failed with one of several that it had found and
     *  put into checkpoint->files. NULL when there are never several. */
    fc_code (*check_header)(const fc_checkpoint *checkpoint, size_t index, fc_error *err);
    fc_code (*extent)(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *out,
                      fc_error *err);
    /** Decodes an FC_CODEC_FORMAT chunk into `buf` (extent.decoded bytes). NULL when the format has none. */
    fc_code (*read)(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf, fc_error *err);
    fc_code (*object_json)(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_arena *arena, const char **json,
                           fc_error *err);
    /** As fc_checkpoint_digest. NULL when the format records none. */
    fc_code (*digest)(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                      fc_error *err);

    /** Whether the bytes of an object, which are about to be copied as they are, are what they say of themselves. NULL
     *  where digest, or reading them, tells. Thread-safe. */
    fc_code (*check_object)(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_error *err);

    /** Of a checkpoint that is made of others (an average, flat parameters): when all that is wanted was read, compares
     *  what was read of those with the digests and CRCs they record. Collective over `comm`, which may be NULL. NULL:
     *  nothing is below it. */
    fc_code (*check_inputs)(const fc_checkpoint *checkpoint, struct fc_comm *comm, fc_error *err);

    /** Checks what only the format knows of: headers, records beside the tensors' bytes. Every defect goes to
     *  `findings`; fails only when it cannot go on. NULL when there is nothing. */
    fc_code (*verify)(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                      fc_error *err);
    /** Extent and digest of a chunk for verify, which looks at it once: what is wrong with other records beside its
     * bytes goes to `findings`. NULL: extent and digest are asked. */
    fc_code (*verify_chunk)(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_extent *extent,
                            fc_digest *digest, struct fc_findings *findings, fc_error *err);
    const char *unverified; /**< what no digest of this format covers, for people; NULL: nothing */

    bool wants_crc32; /**< seal needs fc_target_item.crc32 */
    /** Whether the data file `index`, which is there and long enough for the chunks, is what the checkpoint takes it
     * for: a look at its first bytes, for what was opened with headers_only and before a conversion. NULL when there is
     * nothing more to look at. */
    fc_code (*check_file)(const fc_checkpoint *checkpoint, size_t index, fc_error *err);

    bool self_contained; /**< when sharded, every rank's file holds all of its boxes, replicated ones and objects too */
    /** The format has no objects: `reserve` puts them where this says, for people, and the engine has none to write.
     *  NULL: objects are stored like tensors. */
    const char *objects_note;
    /** The files of a directory that it writes, ended by one without a glob: --force replaces what holds nothing else.
     *  NULL: it writes no directories. */
    const fc_own_file *own_files;
    /** Whether the target is a directory, and of how many files. NULL: a file without a mesh, else a directory of a
     *  file a rank and an index. */
    bool (*is_directory)(const fc_target *target);
    size_t (*files)(const fc_target *target);

    /** Starts a target below `staging` (a file path, or an existing empty directory, see is_directory): nothing outside
     *  of it is touched. */
    fc_code (*create)(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err);
    /** How many of the part's items, from `first` on, go into the next file: reserve, the data and seal are then done
     *  for these alone. At least 1. NULL: all of them. */
    size_t (*split)(fc_writer *writer, const fc_target_file *file, size_t first);
    /** Writes the headers of one part (parts come in rank order) and sets part->path and the items' offsets.
     *  When it returns, the file has its final length and no descriptor of the writer is open on it; but see seal. */
    fc_code (*reserve)(fc_writer *writer, fc_target_file *file, fc_error *err);
    /** Gives a compressed chunk of the part that was reserved last its place in the file. `start`: where the chunk
     *  starts within the item; `raw`: the bytes are the elements as they are, else shuffled (unless an element is one
     *  byte) and deflated; `*offset`: where the engine writes `size` bytes. Not re-entrant. Items come in ascending
     *  order of their `offset`. NULL when the format has no compression. */
    fc_code (*place)(fc_writer *writer, const fc_target_item *item, const int64_t *start, bool raw, uint64_t size,
                     uint64_t *offset, fc_error *err);
    /** After the data of a part: the owned items' digests are set and go where `reserve` left room for them; the file
     *  of a part with chunked items stays open until then. NULL when there is nothing to do. */
    fc_code (*finish_file)(fc_writer *writer, const fc_target_file *file, fc_error *err);
    /** After all parts: what spans them, e.g. index.h5.
     *  @param digests CRC-64 of each of wanted->tensors as a whole. */
    fc_code (*finish)(fc_writer *writer, const uint64_t *digests, fc_error *err);
    void (*destroy)(fc_writer *writer);
} fc_format;

/** The static table of formats (formats/format_list.h), NULL-terminated. */
const fc_format *const *fc_formats(void);

/** Finds a format by its name ("h5"). @return NULL when there is none. */
const fc_format *fc_format_find(const char *name);

#ifdef __cplusplus
}
#endif
#endif
