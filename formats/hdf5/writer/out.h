/*
 * One HDF5 file being written: its groups, datasets and attributes, with libhdf5's ways kept inside.
 * Every function sets `err` to one line that names the file; after a failure only fc_h5_out_close may be called.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_WRITER_OUT_H
#define FSDPCKPT_FORMATS_HDF5_WRITER_OUT_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "hdf5/writer/driver.h"
#include "hdf5/writer/headers.h"
#include "hdf5/writer/tree.h"

#include <hdf5.h>

/** What a file will hold, for setting aside the place of its headers. */
typedef struct fc_h5_estimate {
    uint64_t datasets;
    uint64_t attributes;
    uint64_t mappings; /**< of virtual datasets */
    uint64_t segments; /**< of external datasets */
    uint64_t text;     /**< bytes of names and strings */
} fc_h5_estimate;

typedef struct fc_h5_out {
    const fc_h5_tree *tree;
    const char *path;
    hid_t driver, file;
    hid_t types[FC_DTYPE_COUNT]; /* made when first used */
    hid_t text_type, scalar;
    hid_t link_props, group_props, stored_props, empty_props;
    unsigned char *made;        /* one a node: the group exists in this file */
    hid_t *stack;               /* open groups, from the root down: tree->depth + 1 */
    uint32_t *stack_nodes;      /* their nodes */
    uint32_t *chain;            /* scratch of the same size */
    uint32_t depth;             /* how many are open */
    fc_h5_channel channel;      /* to and from the driver */
    H5E_auto2_t print_errors;   /* what the caller had, put back by close */
    void *print_errors_context; /* the same */
} fc_h5_out;

/** Creates the file at `path` (borrowed) and its root group. On failure nothing is left to close. */
fc_code fc_h5_out_open(fc_h5_out *out, const fc_h5_tree *tree, const char *path, const fc_h5_estimate *estimate,
                       fc_error *err);

/** Closes everything, whatever happened. @return `rc`, or the failure to close when `rc` is FC_OK. On success
 *  fc_h5_out_finish_file must follow. */
fc_code fc_h5_out_close(fc_h5_out *out, fc_code rc, fc_error *err);

/** Puts the digests into the closed file: those of datasets, and that of the headers. Releases what `out` holds. */
fc_code fc_h5_out_finish_file(fc_h5_out *out, const fc_h5_patch *patches, size_t count, fc_error *err);

/** Releases what a closed `out` holds, without sealing; it may be zeroed, or released already. */
void fc_h5_out_release(fc_h5_out *out);

/** A dataset whose bytes come later, at `offset` of the file (0 when it has none). Close `id` with H5Dclose. */
fc_code fc_h5_out_stored(fc_h5_out *out, uint32_t node, fc_dtype dtype, int ndim, const int64_t *shape, hid_t *id,
                         uint64_t *offset, fc_error *err);

/** Bytes of another file. At most FC_H5_SEGMENT of them: libhdf5 reads a segment with one read(), which above 2 GiB
 *  gives less than was asked for, and takes the rest for zeros. */
typedef struct fc_h5_segment {
    const char *file;
    uint64_t offset, length;
} fc_h5_segment;

enum { FC_H5_SEGMENT = 1 << 30, FC_H5_SEGMENTS = 2729 /**< more do not fit into an object header */ };

/** A dataset over the bytes of other files, in order; `count` is at most FC_H5_SEGMENTS. Close `id` with H5Dclose. */
fc_code fc_h5_out_external(fc_h5_out *out, uint32_t node, fc_dtype dtype, int ndim, const int64_t *shape,
                           const fc_h5_segment *segments, size_t count, hid_t *id, fc_error *err);

/** Elements of a dataset of one dimension: `count` blocks, `stride` apart. */
typedef struct fc_h5_run {
    int64_t extent; /**< of the dataset */
    int64_t start, stride, count, block;
} fc_h5_run;

/** One box of a virtual dataset: the dataset `source` of `file`, a name beside this one ("." is this one). */
typedef struct fc_h5_mapping {
    const char *file;
    const int64_t *offsets, *sizes; /**< ndim entries each; where it lies in the virtual dataset */
    const fc_h5_run *run;           /**< of the source; NULL: all of it, which then has the box's sizes */
} fc_h5_mapping;

/** Starts the list of mappings of a virtual dataset. Close `list` with fc_h5_out_virtual, or H5Pclose. */
fc_code fc_h5_out_mappings(fc_h5_out *out, hid_t *list, fc_error *err);

/** Adds a box, mapped onto the dataset `source` (a path, unescaped) of the other file. */
fc_code fc_h5_out_map(fc_h5_out *out, hid_t list, int ndim, const int64_t *shape, const fc_h5_mapping *mapping,
                      const char *source, fc_error *err);

/** Makes the virtual dataset, with fc_h5_absent_value as its fill value. Does not close `list`. */
fc_code fc_h5_out_virtual(fc_h5_out *out, uint32_t node, fc_dtype dtype, int ndim, const int64_t *shape, hid_t list,
                          hid_t *id, fc_error *err);

/** Attributes of `object`, a dataset or the file. */
fc_code fc_h5_out_text(fc_h5_out *out, hid_t object, const char *name, const char *value, fc_error *err);
fc_code fc_h5_out_texts(fc_h5_out *out, hid_t object, const char *name, size_t count, const char *const *values,
                        fc_error *err);
fc_code fc_h5_out_int(fc_h5_out *out, hid_t object, const char *name, int64_t value, fc_error *err);
fc_code fc_h5_out_crc(fc_h5_out *out, hid_t object, const char *name, uint64_t value, fc_error *err);
fc_code fc_h5_out_ints(fc_h5_out *out, hid_t object, const char *name, size_t count, const int64_t *values,
                       fc_error *err);

#endif
