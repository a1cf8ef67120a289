/*
 * The ways `inspect` shows an open checkpoint. Each takes the manifest and writes to `out`; cmd_inspect.c chooses.
 */
#ifndef FSDPCKPT_CLI_INSPECT_H
#define FSDPCKPT_CLI_INSPECT_H

#include "cut.h"
#include "text.h"

#include "fsdpckpt/checkpoint.h"

/** Values that look alike: of one dtype, shape and cut, or objects of one value. */
typedef struct inspect_kind {
    const fc_tensor *example;
    size_t count;                 /**< how many values are of it */
    const char *cut, *placements; /**< of a tensor, in words; placements may be "" */
    const char *value;            /**< of an object: its decoding, if that is short; else NULL */
    const char *why;              /**< of an object: why it has no value; NULL where it has one or none was asked for */
    const char *same_as;          /**< of a tied tensor: the name of the one that it is; else NULL */
} inspect_kind;

/** One line of a list: a value, several that are folded together, or a module with what is below it. */
typedef struct inspect_line {
    const char *name;         /**< layers.{0..31}.wq.weight */
    const fc_tensor *first;   /**< of its values; of a module too */
    const inspect_kind *kind; /**< NULL: a module */
    size_t tensors, objects;  /**< of all that it stands for */
    size_t folded;            /**< how many names it stands for */
    uint64_t bytes;           /**< of its tensors; of objects where there are no tensors */
} inspect_line;

typedef enum inspect_sort { INSPECT_BY_SOURCE, INSPECT_BY_NAME, INSPECT_BY_SIZE } inspect_sort;

/** What to list. */
typedef struct inspect_options {
    const char *const *include, *const *exclude; /**< globs over names, NULL-terminated; NULL: all, none */
    inspect_sort sort;
    int64_t depth; /**< components of a name; what is below is summed up. 0: no limit */
    bool all;      /**< a line for each value, nothing folded */
    bool headers_only;
} inspect_options;

/** Totals of the values that are listed. */
typedef struct totals {
    size_t tensors, objects, chunks;
    uint64_t elements, bytes; /**< of the tensors, each stored once; saturate */
    uint64_t file_bytes;      /**< of the files on disk; 0 with headers_only */
    size_t by_dtype[FC_DTYPE_COUNT];
    uint64_t elements_by_dtype[FC_DTYPE_COUNT];
} totals;

/** What all views share: made by inspect_begin. */
typedef struct inspection {
    const fc_checkpoint *checkpoint;
    text_out *out;
    inspect_options how;
    bool headers_only;       /**< do not touch the data files */
    fc_arena *arena;         /**< owns what follows, as far as it is not the checkpoint's */
    const fc_tensor **items; /**< the values that are listed, in the order of the list */
    size_t nitems;
    inspect_kind *kinds; /**< nkinds of them */
    size_t nkinds;
    inspect_line *lines;
    size_t nlines;
    totals sum;
    cut_summary cuts;
    fc_mesh mesh;             /**< recorded, or recognised from the chunks; ndim 0: none */
    bool recognised;          /**< the mesh is not recorded */
    fc_placement *placements; /**< mesh.ndim of them for each tensor of the checkpoint, if recognised */
    fc_cut_scratch scratch;
    fc_code worst; /**< of the objects that could not be decoded; the view goes on */
    fc_error first;
} inspection;

/**
 * Selects, sorts and folds the values of `checkpoint`, which must outlive `in`, and recognises its layout.
 * @param in to be given to inspect_end, also after a failure.
 * @return FC_EUSAGE when include and exclude leave nothing.
 */
fc_code inspect_begin(inspection *in, const fc_checkpoint *checkpoint, const inspect_options *how, text_out *out,
                      fc_error *err);
void inspect_end(inspection *in);
/** A step of inspect_begin: kinds and lines of the items. */
fc_code inspect_list(inspection *in, fc_error *err);

/** Compares names component by component, numbers by value. */
int inspect_compare_names(const char *a, const char *b);

/** Elements and bytes of a tensor. */
uint64_t inspect_elements(const fc_tensor *tensor);
uint64_t inspect_bytes(const fc_tensor *tensor);
uint64_t inspect_add(uint64_t a, uint64_t b); /**< saturates */

/** The placements of a tensor of the checkpoint on in->mesh, or NULL where they are not known. */
const fc_placement *inspect_placed(const inspection *in, const fc_tensor *tensor);
/** Placements of a tensor, recorded or recognised: "Shard(0)", "[_StridedShard(0, 2), Shard(0)]" or "". @return buf. */
const char *inspect_placements(const inspection *in, const fc_tensor *tensor, const fc_cut *c, char *buf, size_t size);
/** "8 ranks, mesh dp 4 × tp 2 (recognised)", "full: no tensor is cut" …, into `buf`. @return buf. */
const char *inspect_layout(const inspection *in, char *buf, size_t size);
/**
 * The decoding of an object from `arena`, or NULL: remembered in in->worst (its message in `err`), or not asked for.
 */
const char *inspect_object(inspection *in, const fc_tensor *object, fc_arena *arena, fc_error *err);
/** The risk of loading an object, and why. Harmless where the data files are not read, or the object is damaged. */
fc_object_risk inspect_risk(const inspection *in, const fc_tensor *object, fc_object_verdict *out);

/** What one rank has. */
typedef struct rank_load {
    uint64_t bytes;
    uint64_t tensors;
} rank_load;

/** What all ranks have. */
typedef struct inspect_loads {
    rank_load *stored; /**< by rank: the chunks that it wrote */
    rank_load *held;   /**< by rank: its local boxes; NULL where placements are not known */
    size_t ranks;      /**< 0: the chunks name none */
} inspect_loads;

/** Adds up what each rank has of the listed tensors, in in->arena. */
fc_code inspect_ranks(inspection *in, inspect_loads *out, fc_error *err);

enum { RANK_GROUPS = 6, RANK_GROUP_TEXT = 192 };

/** "ranks 0-7: 1.21 GB, 291 tensors each", or a span where they differ in many ways: one text for each group. */
typedef struct rank_groups {
    char text[RANK_GROUPS][RANK_GROUP_TEXT];
    size_t count;
} rank_groups;

void inspect_group_ranks(const rank_load *loads, size_t ranks, rank_groups *out);

/** Ranks in ascending order. */
typedef struct rank_span {
    const uint32_t *ranks;
    size_t count; /**< 0: not known */
} rank_span;

/** Which ranks hold each chunk of a tensor: the one that wrote it and its replicas. */
typedef struct inspect_holders {
    rank_span *spans; /**< by chunk */
} inspect_holders;

/**
 * Finds who holds the chunks of a tensor, in `arena`: by the placements, where each chunk is the box of the rank that
 * wrote it, else who stored the same box.
 */
fc_code inspect_find_holders(const inspection *in, const fc_tensor *tensor, fc_arena *arena, inspect_holders *out,
                             fc_error *err);
/** "rank 3", "ranks 0, 4", "ranks 0-3, 8-11" of `count` ascending ranks, cut with "…" when longer. @return buf. */
const char *inspect_rank_list(const uint32_t *ranks, size_t count, char *buf, size_t size);

fc_code inspect_text(inspection *in, fc_error *err);
fc_code inspect_tree(inspection *in, fc_error *err);
fc_code inspect_json(inspection *in, fc_error *err);
/** One tensor or object, for people. */
fc_code inspect_tensor(inspection *in, const fc_tensor *tensor, fc_error *err);
fc_code inspect_tensor_json(inspection *in, const fc_tensor *tensor, fc_error *err);
fc_code inspect_html(inspection *in, fc_error *err);

/** FC_ENOMEM with the checkpoint's path. */
static inline fc_code inspect_no_memory(const inspection *in, fc_error *err) {
    fc_fail(err, FC_ENOMEM, "%s: out of memory", in->checkpoint->path);
    return FC_ENOMEM;
}

#endif
