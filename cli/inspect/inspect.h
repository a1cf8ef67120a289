/*
 * The views of `inspect`. Each one writes the manifest of an open checkpoint to `out`; cmd_inspect.c chooses the view.
 */
#pragma once

#include "inspect/sharding.h"
#include "output/text.h"

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/compare.h"
#include "fsdpckpt/stats.h"

/** Values that look alike: tensors of one dtype, shape and sharding, or objects of one value. */
typedef struct inspect_kind {
    const fc_tensor *example;
    size_t count;                      /**< the number of such values */
    const char *sharding, *placements; /**< text about a tensor; placements may be "" */
    const char *value;                 /**< the decoded object, if short; else NULL */
    const char *why;                   /**< why an object cannot be decoded; NULL if it was decoded or not requested */
    const char *same_as;               /**< the name of the tensor that this one is tied to; else NULL */
} inspect_kind;

/** One line of the list: a value, several folded values, or a module with all values below it. */
typedef struct inspect_line {
    const char *name;         /**< layers.{0..31}.wq.weight */
    const fc_tensor *first;   /**< the first of its values, also for a module */
    const inspect_kind *kind; /**< NULL: a module */
    size_t tensors, objects;  /**< numbers of values that the line stands for */
    size_t folded;            /**< the number of names that the line stands for */
    uint64_t bytes;           /**< total size of its tensors, or of its objects if there are no tensors */
    const fc_stats *stats;    /**< of its tensors; NULL: not requested, or no tensors */
    const size_t *members;    /**< the items that it stands for, in the order of the name; NULL: only `first` */
} inspect_line;

typedef enum inspect_sort { INSPECT_BY_SOURCE, INSPECT_BY_NAME, INSPECT_BY_SIZE } inspect_sort;

/** The values to list, and their order. */
typedef struct inspect_options {
    const char *const *include, *const *exclude; /**< globs over names, NULL-terminated; NULL: all, none */
    inspect_sort sort;
    int64_t depth; /**< components of a name to show; deeper levels are added up. 0: no limit */
    bool all;      /**< one line per value, nothing is folded */
    bool headers_only;
    const fc_stats_options *stats; /**< how to compute statistics of the listed tensors; NULL: none */
} inspect_options;

/** Totals of the listed values. */
typedef struct totals {
    size_t tensors, objects, chunks;
    uint64_t elements, bytes; /**< of the tensors, without copies; saturates */
    uint64_t file_bytes;      /**< total size of the files; 0 with headers_only */
    size_t by_dtype[FC_DTYPE_COUNT];
    uint64_t elements_by_dtype[FC_DTYPE_COUNT];
} totals;

/** The state that all views share, filled by inspect_begin. */
typedef struct inspection {
    const fc_checkpoint *checkpoint;
    text_out *out;
    inspect_options how;
    bool headers_only;       /**< do not touch the data files */
    fc_arena *arena;         /**< owns the fields below that the checkpoint does not own */
    const fc_tensor **items; /**< the listed values, in list order */
    size_t nitems;
    fc_stats *stats;     /**< by tensor of the checkpoint, only those of items are set; NULL: none */
    inspect_kind *kinds; /**< nkinds of them */
    size_t nkinds;
    inspect_line *lines;
    size_t nlines;
    totals sum;
    sharding_summary sharding;
    fc_mesh mesh;             /**< recorded, or recognised from the chunks; ndim 0: none */
    bool recognised;          /**< the mesh is not recorded */
    int64_t stages;           /**< number of pipeline stages, each with such a mesh; 0 or 1: there is no pipeline */
    fc_placement *placements; /**< mesh.ndim per tensor of the checkpoint, if recognised */
    fc_sharding_scratch scratch;
    fc_code worst; /**< the first failure to decode an object; the view continues */
    fc_error first;
} inspection;

/**
 * Selects, sorts and folds the values of `checkpoint`, which must outlive `in`, and recognises its layout.
 * @param in pass it to inspect_end, even after a failure.
 * @return FC_EUSAGE if include and exclude leave nothing.
 */
fc_code inspect_begin(inspection *in, const fc_checkpoint *checkpoint, const inspect_options *how, text_out *out,
                      fc_error *err);
void inspect_end(inspection *in);
/** A step of inspect_begin: computes the kinds and lines of the items. */
fc_code inspect_list(inspection *in, fc_error *err);

/** A step of inspect_begin, and for one tensor: computes the statistics of `count` tensors; objects are skipped. */
fc_code inspect_read_stats(inspection *in, const fc_tensor *const *tensors, size_t count,
                           const fc_stats_options *options, fc_error *err);
/** @return the statistics of a tensor, or NULL without any. */
const fc_stats *inspect_stats_of(const inspection *in, const fc_tensor *tensor);

enum { INSPECT_NUMBER = FC_ELEMENT_TEXT };
/** Compares names component by component, numbers by value. */
int inspect_compare_names(const char *a, const char *b);

/** Elements and bytes of a tensor. */
uint64_t inspect_elements(const fc_tensor *tensor);
uint64_t inspect_bytes(const fc_tensor *tensor);
uint64_t inspect_add(uint64_t a, uint64_t b); /**< saturates */

/** @return the placements of a tensor on in->mesh, or NULL if unknown. */
const fc_placement *inspect_placed(const inspection *in, const fc_tensor *tensor);
/** Placements of a tensor, recorded or recognised: "Shard(0)", "[_StridedShard(0, 2), Shard(0)]" or "". @return buf. */
const char *inspect_placements(const inspection *in, const fc_tensor *tensor, const fc_sharding *c, char *buf,
                               size_t size);
/** "8 ranks, mesh dp 4 × tp 2 (recognised)", "full: no tensor is sharded" …, into `buf`. @return buf. */
const char *inspect_layout(const inspection *in, char *buf, size_t size);
/**
 * @return the decoded object from `arena`; NULL if decoding was not requested or failed, with the message in `err`. A
 * failure other than FC_EUNSUPPORTED is kept in in->worst.
 */
const char *inspect_object(inspection *in, const fc_tensor *object, fc_arena *arena, fc_error *err);
/** The risk of loading an object, and why. Harmless where the data files are not read, or the object is damaged. */
fc_object_risk inspect_risk(const inspection *in, const fc_tensor *object, fc_object_verdict *out);

/** The load of one rank. */
typedef struct rank_load {
    uint64_t bytes;
    uint64_t tensors;
} rank_load;

/** The loads of all ranks. */
typedef struct inspect_loads {
    rank_load *stored; /**< by rank: the chunks that it wrote */
    rank_load *held;   /**< by rank: its local boxes; NULL if placements are unknown */
    size_t ranks;      /**< 0: the chunks record no ranks */
} inspect_loads;

/** Adds up the listed tensors by rank, in in->arena. */
fc_code inspect_ranks(inspection *in, inspect_loads *out, fc_error *err);

enum { RANK_GROUPS = 6, RANK_GROUP_TEXT = 192 };

/** "ranks 0-7: 1.21 GB, 291 tensors each", one text per group of equal ranks, or one range if there are too many
 * groups. */
typedef struct rank_groups {
    char text[RANK_GROUPS][RANK_GROUP_TEXT];
    size_t count;
} rank_groups;

void inspect_group_ranks(const rank_load *loads, size_t ranks, rank_groups *out);

/** Ranks in ascending order. */
typedef struct rank_span {
    const uint32_t *ranks;
    size_t count; /**< 0: unknown */
} rank_span;

/** Which ranks hold each chunk of a tensor: the one that wrote it and its replicas. */
typedef struct inspect_holders {
    rank_span *spans; /**< by chunk */
} inspect_holders;

/**
 * Finds the ranks that hold each chunk of a tensor, in `arena`. Uses the placements if every chunk is the local box of
 * the rank that wrote it, otherwise the ranks that stored the same box.
 */
fc_code inspect_find_holders(const inspection *in, const fc_tensor *tensor, fc_arena *arena, inspect_holders *out,
                             fc_error *err);
/** "rank 3", "ranks 0, 4", "ranks 0-3, 8-11" of `count` ascending ranks, shortened with "…". @return buf. */
const char *inspect_rank_list(const uint32_t *ranks, size_t count, char *buf, size_t size);

fc_code inspect_text(inspection *in, fc_error *err);
fc_code inspect_tree(inspection *in, fc_error *err);
fc_code inspect_json(inspection *in, fc_error *err);
/** Prints one tensor or object as text. */
fc_code inspect_tensor(inspection *in, const fc_tensor *tensor, fc_error *err);
fc_code inspect_tensor_json(inspection *in, const fc_tensor *tensor, fc_error *err);
fc_code inspect_html(inspection *in, fc_error *err);
