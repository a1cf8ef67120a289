/*
 * Deltas: what changed between two versions of a model, in the form that slime, miles and SGLang exchange.
 * docs/DELTA.md describes the files.
 */
#pragma once

#include "fsdpckpt/check.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/select.h"

FC_BEGIN_DECLS

/** How the changed bytes of a tensor are stored. */
typedef enum fc_delta_encoding {
    FC_DELTA_XOR,       /**< all of its bytes, new ^ old */
    FC_DELTA_OVERWRITE, /**< the positions of the changed bytes, and their new values */
    FC_DELTA_AUTO       /**< for fc_delta_write: the one of both that makes the smaller delta */
} fc_delta_encoding;

/** The checksum of a tensor's new bytes. */
typedef enum fc_delta_checksum { FC_DELTA_XXH3_128, FC_DELTA_ADLER32, FC_DELTA_BLAKE3 } fc_delta_checksum;

/** Stands for a number that follows from another. */
#define FC_DELTA_NO_NUMBER (-1)

/** Returns the name that the files use, such as "xxh3-128". */
const char *fc_delta_encoding_name(fc_delta_encoding encoding);
const char *fc_delta_checksum_name(fc_delta_checksum checksum);

/** The highest level of zstd, whose memory fits, and the largest number of a version. */
enum { FC_DELTA_MOST_LEVEL = 9, FC_DELTA_MOST_NUMBER = 999999999 };

/** The options of fc_delta_write. Zeroed memory is not enough: set `number` and `base`. */
typedef struct fc_delta_options {
    fc_selection selection; /**< chooses, renames and casts the values of the new version; it has no mesh */
    fc_delta_encoding encoding;
    fc_delta_checksum checksum;
    int level;      /**< zstd level 1 … FC_DELTA_MOST_LEVEL; 0: 1 */
    int64_t number; /**< FC_DELTA_NO_NUMBER: from the name of the directory, weight_vNNNNNN */
    int64_t base;   /**< the version that the delta changes; FC_DELTA_NO_NUMBER: number - 1 */
    bool force;     /**< replace an existing version */
    /** Other files that are read, so the delta must not replace them; ended by NULL. NULL: none. */
    const char *const *inputs;
    fc_reporter reporter; /**< receives a line for each killed run that was cleaned up */
    fc_work_options work;
} fc_delta_options;

/** What fc_delta_write wrote. */
typedef struct fc_delta_report {
    int64_t number, base;
    fc_delta_encoding encoding; /**< never FC_DELTA_AUTO */
    size_t tensors;             /**< tensors of the new version that were compared */
    size_t changed;             /**< those of them that are in the delta */
    size_t by_digest;           /**< those that recorded digests prove to be equal, so that they were not read */
    size_t objects;             /**< objects of the new version; a delta has none */
    size_t only_old;            /**< tensors that only the old version has; they stay as they are */
    uint64_t bytes;             /**< of all tensors that were compared */
    uint64_t changed_bytes;     /**< those that differ */
    uint64_t stored_bytes;      /**< of the frames */
} fc_delta_report;

/**
 * Writes the delta from `old` to `changed` to the directory `path`. Each selected tensor of `changed` must be in `old`,
 * under the same name and with the same dtype and shape. The bytes do not depend on the number of threads.
 * A delta in a bucket has one encoding from the start, so FC_DELTA_AUTO is refused there.
 * @return FC_EUSAGE for a tensor that differs in more than its values; FC_EUNSUPPORTED without libzstd, for a checksum
 * that this build lacks, and for a tensor of 4 GiB with FC_DELTA_OVERWRITE.
 */
fc_code fc_delta_write(const fc_checkpoint *old, const fc_checkpoint *changed, const char *path,
                       const fc_delta_options *options, fc_delta_report *report, fc_error *err);

/**
 * A part of a delta that several processes write: the tensors that one of them compares. Each has one part, writes a
 * data file of it, and one writes the index at the end.
 */
typedef struct fc_delta_part fc_delta_part;

/**
 * Begins a part. Frames are kept in files next to `path`, until fc_delta_part_free.
 * @param path    the directory that the delta will be; its name may tell the number.
 * @param options `selection`, `force`, `inputs` and `reporter` are ignored.
 */
fc_code fc_delta_part_new(const char *path, const fc_delta_options *options, fc_delta_part **out, fc_error *err);
void fc_delta_part_free(fc_delta_part *part);

/**
 * Compares the tensors of `changed` that `selection` chooses with those of `old`, as fc_delta_write does. It may be
 * called again with other tensors, when those of the call before are gone.
 */
fc_code fc_delta_part_add(fc_delta_part *part, const fc_checkpoint *old, const fc_checkpoint *changed,
                          const fc_selection *selection, fc_error *err);

/** Sets the progress that the next calls count in; NULL: none. */
void fc_delta_part_count(fc_delta_part *part, fc_progress *progress);

/** Returns what was found so far, without `encoding` and `stored_bytes`. */
const fc_delta_report *fc_delta_part_report(const fc_delta_part *part);

/** Returns the name of changed tensor `index`, in any order. */
const char *fc_delta_part_name(const fc_delta_part *part, size_t index);

/** Adds up the frames of an encoding. @return whether every changed tensor has one. */
bool fc_delta_part_size(const fc_delta_part *part, fc_delta_encoding encoding, uint64_t *bytes);

/** Writes data file `file` of `files`, counted from 1, to the directory `folder`, and syncs it if there are several. */
fc_code fc_delta_part_write(fc_delta_part *part, fc_delta_encoding encoding, const char *folder, unsigned file,
                            unsigned files, fc_error *err);

/** A changed tensor, and the data file that has its frame. */
typedef struct fc_delta_entry {
    const char *name;
    unsigned file; /**< counted from 1 */
} fc_delta_entry;

/** What the index of a delta says. */
typedef struct fc_delta_index {
    int64_t number, base;
    fc_delta_encoding encoding;
    fc_delta_checksum checksum;
    const fc_delta_entry *entries; /**< sorted by name */
    size_t count;
    unsigned files;
} fc_delta_index;

/** Writes the index to the directory `folder`, which the processes share. */
fc_code fc_delta_write_index(const char *folder, const fc_delta_index *index, fc_error *err);

/** For fc_commit_options.is_own_file: a delta may replace another version in a directory of its name. */
fc_code fc_delta_is_own_file(const char *path, const char *name, bool *own, fc_error *err);

/** The options of fc_delta_fold. Zeroed memory has the defaults. */
typedef struct fc_fold_options {
    int level;            /**< zstd level 1 … FC_DELTA_MOST_LEVEL; 0: 1 */
    bool force;           /**< replace an existing version */
    fc_reporter reporter; /**< receives a line for each killed run that was cleaned up */
    fc_work_options work;
} fc_fold_options;

/** What fc_delta_fold wrote. */
typedef struct fc_fold_report {
    int64_t number, base; /**< the last version, and the base of the first one */
    fc_delta_encoding encoding;
    fc_delta_checksum checksum;
    size_t deltas;          /**< that were folded */
    size_t tensors;         /**< that some of them change */
    size_t changed;         /**< those of them that differ between the base and the last version */
    uint64_t changed_bytes; /**< of them; with overwrite those that some delta stores */
    uint64_t source_bytes;  /**< of the frames that were read */
    uint64_t stored_bytes;  /**< of the frames that were written */
} fc_fold_report;

/**
 * Writes the deltas of a chain as one delta, without the model. The checksums are those of the chain.
 * @param sources the folders of the versions, in any order; or one directory of versions, where fold takes those
 *                that lead to the version that the name of `path` says, or to the newest one.
 * @param path    the directory to write. If its name says a number, it is that of the last version.
 * @return FC_EUSAGE if the versions are no chain of one encoding; FC_EUNSUPPORTED without libzstd.
 */
fc_code fc_delta_fold(const char *const *sources, size_t count, const char *path, const fc_fold_options *options,
                      fc_fold_report *report, fc_error *err);

/** The options of fc_delta_apply. Zeroed memory is not enough: set `up_to` and `base`. */
typedef struct fc_delta_apply_options {
    int64_t up_to;        /**< the version that the model gets; FC_DELTA_NO_NUMBER: the newest */
    int64_t base;         /**< the version of a model that does not say its own; FC_DELTA_NO_NUMBER: 0 */
    bool dry_run;         /**< reads headers only, and writes nothing */
    fc_reporter reporter; /**< receives a line when another process has the lock */
    fc_work_options work;
} fc_delta_apply_options;

/** What fc_delta_apply did, or with `dry_run` what it would do. */
typedef struct fc_delta_apply_report {
    int64_t from, to;       /**< the version that the model had and the one that it has; equal: nothing to do */
    int64_t replayed;       /**< the version that an earlier run had not put in place; FC_DELTA_NO_NUMBER: none */
    int64_t full;           /**< the full version that replaced the model first; FC_DELTA_NO_NUMBER: none */
    size_t deltas;          /**< how many were applied */
    size_t tensors;         /**< how many changed in them */
    uint64_t stored_bytes;  /**< of the frames */
    uint64_t bytes;         /**< of the tensors that changed, each of which is read once */
    uint64_t changed_bytes; /**< of the model; not known with dry_run, and of a full version */
} fc_delta_apply_report;

/**
 * Brings the model in the folder `model` to another version, in place, with the versions in the directory `updates`.
 * The checksum of every changed tensor is compared before anything of the model is written. A run that is killed, or
 * whose machine loses power, leaves the old version, or a journal with which the next call completes the new one.
 * @return FC_ECORRUPT for a version that is missing or damaged, or does not fit the model, which then stays as it was;
 * FC_EUSAGE for a model that is newer, or whose files are links.
 */
fc_code fc_delta_apply(const char *updates, const char *model, const fc_delta_apply_options *options,
                       fc_delta_apply_report *report, fc_error *err);

/**
 * Makes the checkpoint that `source` is with the deltas of a chain applied. They are applied while it is read, block by
 * block. The checksum of a tensor is compared when all of it was read, at the latest by fc_convert before it commits.
 * @param source belongs to the new checkpoint after success; after a failure it remains the caller's. If its folder has
 * the state that fc_delta_apply writes, the deltas that it has already are left out.
 * @param paths  the folders of the versions, or one directory of versions; see fc_delta_fold.
 * @param up_to  the last version of that directory; FC_DELTA_NO_NUMBER: the newest.
 * @return FC_EUSAGE if the versions are no chain; FC_ECORRUPT if they do not fit `source`.
 */
fc_code fc_delta_patch(fc_checkpoint *source, const char *const *paths, size_t count, int64_t up_to,
                       fc_checkpoint **out, fc_error *err);

/* ---- looking at versions ---- */

/** What a path is. */
typedef enum fc_delta_place {
    FC_DELTA_NOWHERE, /**< no delta; it may be a checkpoint, such as a full version */
    FC_DELTA_VERSION, /**< a delta */
    FC_DELTA_VERSIONS /**< a directory of versions */
} fc_delta_place;

/** Finds out whether a path is a delta or a directory of versions. */
fc_code fc_delta_recognise(const char *path, fc_delta_place *out, fc_error *err);

/** Stands for a size that no header says. */
#define FC_DELTA_UNKNOWN UINT64_MAX

/** Whether the checksum of a tensor was compared, and if not why. */
typedef enum fc_delta_compared {
    FC_DELTA_NOT_COMPARED, /**< it was not to be, or could not because of damage */
    FC_DELTA_COMPARED,
    FC_DELTA_NEEDS_MODEL,  /**< no full version leads to the delta, so only the model has the bytes */
    FC_DELTA_NEEDS_MEMORY, /**< too many deltas follow the full version */
    FC_DELTA_NEEDS_BLAKE3, /**< this build cannot compute the checksum */
    FC_DELTA_COMPARED_COUNT
} fc_delta_compared;

/** The frame of one tensor in a delta. */
typedef struct fc_delta_changed {
    const char *name;
    uint64_t stored_bytes;
    uint64_t bytes;            /**< of the tensor, which a frame of xor or a full version says; FC_DELTA_UNKNOWN */
    uint32_t element_bytes;    /**< which a full version says; 0: unknown */
    bool decoded;              /**< all of it, without a defect; what follows is set then */
    uint64_t changed_bytes;    /**< with overwrite those that are stored */
    uint64_t changed_elements; /**< if element_bytes is not 0 */
    fc_delta_compared compared;
} fc_delta_changed;

/** One version. */
typedef struct fc_delta_seen {
    const char *path;
    int64_t number;
    int64_t base; /**< FC_DELTA_NO_NUMBER: a full version, or one whose index cannot be read */
    bool full;    /**< a full version */
    bool damaged; /**< its headers cannot be read; what follows is not set then */
    fc_delta_encoding encoding;
    fc_delta_checksum checksum;
    fc_delta_changed *frames; /**< sorted by name; NULL: a full version */
    size_t tensors, files;
    uint64_t stored_bytes; /**< of the frames, or of the tensors of a full version */
} fc_delta_seen;

typedef struct fc_delta_survey {
    fc_delta_seen *versions; /**< by number, in the arena of the caller */
    size_t count;
    uint64_t bytes_read;
} fc_delta_survey;

typedef enum fc_delta_fault_kind {
    FC_DELTA_DAMAGED,   /**< the headers of a version cannot be read, or its files do not fit its index */
    FC_DELTA_GAP,       /**< its base is not there */
    FC_DELTA_FORK,      /**< it is not part of the chain of a later version */
    FC_DELTA_BAD_FRAME, /**< a frame is damaged, or does not fit its tensor */
    FC_DELTA_BAD_SUM    /**< the checksum is not that of the new bytes */
} fc_delta_fault_kind;

/** Something that is wrong. Its strings are valid during the call only. */
typedef struct fc_delta_fault {
    fc_delta_fault_kind kind;
    fc_code code;        /**< FC_EUNSUPPORTED, or FC_ECORRUPT */
    const char *path;    /**< of the version; of the file for a frame */
    int64_t number;      /**< of the version */
    int64_t other;       /**< FC_DELTA_GAP: the base; FC_DELTA_FORK: the later version */
    const char *tensor;  /**< of a frame; else NULL */
    uint64_t offset;     /**< of a frame in its file */
    const char *message; /**< one line */
} fc_delta_fault;

/** How much fc_delta_look reads. */
typedef enum fc_delta_depth {
    FC_DELTA_HEADERS,  /**< the headers of all files */
    FC_DELTA_SIZES,    /**< and the first bytes of each frame */
    FC_DELTA_FRAMES,   /**< and all frames */
    FC_DELTA_CHECKSUMS /**< and the full versions, to compare what the deltas make of them with the checksums */
} fc_delta_depth;

typedef struct fc_delta_look_options {
    fc_delta_depth depth;
    void (*report)(void *context, const fc_delta_fault *fault); /**< called by one thread at a time */
    void *context;
    fc_work_options work;
} fc_delta_look_options;

/**
 * Looks at a delta or at all versions of a directory, as far as that is possible without the model. What is wrong with
 * them is reported and is no error. The data of full versions are not verified.
 * @return FC_ECORRUPT if `path` has no versions; FC_EUNSUPPORTED without libzstd.
 */
fc_code fc_delta_look(const char *path, const fc_delta_look_options *options, fc_arena *arena, fc_delta_survey *out,
                      fc_error *err);

/**
 * Checks a delta or a directory of versions by headers, like fc_check_path: gaps, forks, and what is damaged or
 * missing.
 * @param options `setting_names` and `open` are used.
 */
fc_code fc_delta_check(const char *path, const fc_check_options *options, fc_arena *arena, fc_report *out,
                       fc_error *err);

FC_END_DECLS
