/*
 * A checkpoint that is made from others while it is read. It passes everything through to its first source. A user
 * embeds fc_derived in its own state, says for each value where it comes from, and writes the functions for values that
 * are not kept as they are. To the engine the result is a checkpoint of another format.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/format.h"
#include "integrity/source_crc.h"

#include <stdatomic.h>

typedef enum fc_origin_kind {
    FC_ORIGIN_KEPT,   /**< `tensor` of the first source, unchanged: each chunk is one of its chunks, with its digests */
    FC_ORIGIN_PLACED, /**< each chunk is some of the stored bytes of a chunk of the first source */
    FC_ORIGIN_TEXT,   /**< an object that no source has: `text` */
    FC_ORIGIN_COMPUTED /**< each chunk is computed when it is read. An object has the value of `tensor` */
} fc_origin_kind;

/** Where a value comes from. fc_tensor.detail points to a structure that begins with it. */
typedef struct fc_origin {
    fc_origin_kind kind;
    const fc_tensor *tensor; /**< of the first source; see fc_origin_kind */
    const char *text;        /**< JSON */
    uint64_t *progress;      /**< how far a checksum of a computed value is; NULL: it has none */
    size_t nprogress;        /**< the numbers of it */
    atomic_bool *read;       /**< one per chunk of a computed value: whether it was read before. NULL: not recorded */
    uint32_t reads; /**< about how many bytes of the sources are read for each byte of a computed value; 0: one */
} fc_origin;

typedef struct fc_derived fc_derived;

/** What one kind of derived checkpoint does by itself. Members that no value of it needs may be NULL. */
typedef struct fc_derived_kind {
    /** The format's name and description; NULL: those of the first source, which can then be written like it. */
    const char *name;
    /** The derived checkpoint's path is the first of its files: messages about a chunk name it. */
    bool lists_path;
    size_t size; /**< of its state, which begins with fc_derived */
    /** Stores the chunk of the first source that has the bytes of chunk `index` of a placed value. @return its tensor;
     *  NULL: the chunk is zeros. */
    const fc_tensor *(*locate)(const fc_tensor *tensor, size_t index, size_t *chunk);
    /** Turns the extent of that chunk into the extent of chunk `index`. */
    void (*place)(const fc_tensor *tensor, size_t index, fc_extent *extent);
    bool placed_has_digest; /**< the digests of that chunk are those of chunk `index`; else it has none */
    /** Computes chunk `index` of a computed value. @param crcs one per source: receives what was read of it. The
     *  members are NULL if CRCs are not collected, or if the chunk was read before. */
    fc_code (*compute)(fc_derived *derived, const fc_tensor *tensor, size_t index, fc_source_crc *const *crcs,
                       void *buf, fc_error *err);
    bool checks_computed; /**< check_inputs compares every computed value that was read with a checksum of its own */
    /** Compares with their digests what the collected CRCs do not cover. The ranks divide the work. */
    fc_code (*check_inputs)(const fc_checkpoint *checkpoint, const fc_comm *comm, fc_error *err);
    void (*free)(fc_derived *derived); /**< frees what is not in the arena */
} fc_derived_kind;

/** fc_checkpoint.state of a derived checkpoint begins with it. */
struct fc_derived {
    const fc_derived_kind *kind;
    fc_checkpoint **sources;
    size_t count;
    fc_source_crc **crcs;          /**< one per source; see fc_derived_collect_crcs */
    fc_source_crc *const *no_crcs; /**< as many NULLs */
    bool owned;                    /**< closing the derived checkpoint closes the sources */
    fc_format format;
};

/**
 * Makes a checkpoint without values. It has the path, files and notes of the first source, and the files of all.
 * @param sources copied. They belong to the caller until fc_derived_own.
 * @param out     closed by fc_checkpoint_close; NULL after a failure.
 * @return FC_ENOMEM.
 */
fc_code fc_derived_new(const fc_derived_kind *kind, fc_checkpoint *const *sources, size_t count, fc_checkpoint **out,
                       fc_error *err);

/** Adds a file to those that describe the sources, such as a configuration that decides on values. @return FC_ENOMEM.
 */
fc_code fc_derived_add_header(fc_checkpoint *derived, const char *path, fc_error *err);

/** Lets fc_checkpoint_close of `derived` close its sources. */
void fc_derived_own(fc_checkpoint *derived);

/** Lets fc_checkpoint_close of `derived`, which was made of `source` in one or more steps, not close `source`. */
void fc_derived_lend(fc_checkpoint *derived, const fc_checkpoint *source);

/** @return the tensor of `source` that a value of `derived`, which was made of `source` in one or more steps, is
 * without a change; NULL: it is changed. */
const fc_tensor *fc_derived_kept(const fc_checkpoint *derived, const fc_tensor *tensor, const fc_checkpoint *source);

/** Gives `derived` a copy of a list of values that were made. */
fc_code fc_derived_set_tensors(fc_checkpoint *derived, const fc_tensor *tensors, size_t count, fc_error *err);

/** Completes `derived`, which then owns its sources, and sets `*out`; if making it failed with `rc`, closes it.
 *  @return rc. */
fc_code fc_derived_finish(fc_checkpoint *derived, fc_code rc, fc_checkpoint **out);

/** Collects the CRCs of what computed values read, which are compared after the last byte. @return FC_ENOMEM. */
fc_code fc_derived_collect_crcs(fc_checkpoint *derived, fc_error *err);

/** Gives a computed value a flag per chunk, so that a chunk that is read again adds no CRCs. @return FC_ENOMEM. */
fc_code fc_derived_record_reads(const fc_checkpoint *derived, const fc_tensor *tensor, fc_origin *origin,
                                fc_error *err);

/** Cuts a tensor with elements into `count` blocks of the sizes `block`, fewer at the edges, which become its chunks.
 *  @return false when out of memory. */
bool fc_derived_cut(fc_tensor *tensor, const int64_t *block, size_t count, fc_arena *arena);

/** Returns whether a value has a checksum that only fc_checkpoint_check_inputs compares. */
bool fc_derived_checks(const fc_checkpoint *checkpoint, const fc_tensor *tensor);

/** @return the state of a checkpoint that is derived and of this kind, else NULL. */
fc_derived *fc_derived_of(const fc_checkpoint *checkpoint, const fc_derived_kind *kind);
