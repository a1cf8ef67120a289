/*
 * The records that the reader process sends about HDF5 files, and the structs that they become.
 *
 * A record is a u32 tag, a u32 length, and `length` bytes of fields. Integers have 8 bytes; strings and byte arrays are
 * their length and their bytes, all in native byte order, because both ends are the same program. The child encodes.
 * The parent decodes and trusts nothing: lengths, counts, ranges and text are checked before they become structs.
 *
 * A file is: ROOT, then for each dataset DATASET and any number of CHUNKS, any number of ATTRIBUTES, an OTHER for each
 * other file that is read, then END. FAILURE
 * may come anywhere and ends the stream.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "hdf5/reader_process/child.h"

enum {
    FC_H5_CHUNKS_PER_RECORD = 4096,
    FC_H5_MAX_FILTERS = 4,
    FC_H5_MAX_RECORD = 256 << 20,
    FC_H5_PIPE_SIZE = 1 << 20,
    FC_H5_MOST_LENT = 16 << 20,
    FC_H5_MOST_PARTS = 256
};

typedef enum fc_h5_tag {
    FC_H5_ROOT = 1,
    FC_H5_DATASET,
    FC_H5_CHUNKS,
    FC_H5_ATTRIBUTES,
    FC_H5_END,
    FC_H5_FAILURE,
    FC_H5_DATA,
    FC_H5_OTHER,
    FC_H5_WANT /**< bytes of a file on a server, that the parent answers (lend.h); may come between any others */
} fc_h5_tag;

/** The kinds of datasets. */
typedef enum fc_h5_kind {
    FC_H5_TENSOR,
    FC_H5_OBJECT,    /**< `encoding` names the encoding of its bytes */
    FC_H5_UNREADABLE /**< unreadable, but listed, so that nothing is lost silently; `message` is the reason */
} fc_h5_kind;

/** Where a dataset's bytes are. */
typedef enum fc_h5_where {
    FC_H5_AT_OFFSET,  /**< contiguous: `offset`, `length` */
    FC_H5_IN_RECORD,  /**< compact or decoded by the child: `bytes` */
    FC_H5_IN_CHUNKS,  /**< allocated chunks follow; the rest is the fill value in `bytes` */
    FC_H5_NOWHERE,    /**< never written: the fill value in `bytes` */
    FC_H5_BY_LIBRARY, /**< only libhdf5 can decode it, box by box in a child; UNREADABLE: it would need a plugin */
    FC_H5_ELSEWHERE   /**< in another file: in the sharded layout the owner's; UNREADABLE: one that is not followed */
} fc_h5_where;

typedef struct fc_h5_bytes {
    const unsigned char *data;
    size_t size;
} fc_h5_bytes;

typedef struct fc_h5_stored_chunk {
    uint64_t offset, size;
    uint32_t mask;
    const int64_t *at; /**< ndim offsets in the dataset, in elements */
} fc_h5_stored_chunk;

/** One dataset as read from the file. All pointers are into the decoder's arena. */
typedef struct fc_h5_dataset {
    const char *path;  /**< HDF5 path without the leading "/" */
    fc_h5_bytes lists; /**< one byte per path element: the fc_h5_group_kind of the group that contains it */
    fc_h5_kind kind;
    fc_h5_where where;
    fc_code code; /**< UNREADABLE: the error */
    const char *message;
    fc_dtype dtype;
    bool swap;
    uint32_t element; /**< bytes per element */
    int ndim;
    const int64_t *shape;
    uint64_t offset, length;
    fc_h5_bytes bytes;
    const int64_t *chunk; /**< ndim entries for IN_CHUNKS; for BY_LIBRARY the unit of decoding */
    uint8_t nfilters;     /**< IN_CHUNKS: the filters that the engine decodes */
    fc_filter filters[FC_H5_MAX_FILTERS];
    fc_h5_stored_chunk *chunks; /**< IN_CHUNKS, in the order of the file */
    size_t nchunks, chunks_cap;
    /* Our own attributes (docs/HDF5_SCHEMA.md); NULL, or a count of -1, for those that the dataset lacks. */
    const char *dtype_name, *placements, *encoding, *json, *fqn;
    bool has_crc64;
    uint64_t crc64; /**< CRC-64 of the row-major bytes of the whole dataset */
    int64_t owner;  /**< -1: none */
    int64_t nglobal_shape, noffsets;
    const int64_t *global_shape, *offsets;
} fc_h5_dataset;

/** The attributes of a group or dataset that are not ours, as a JSON object. */
typedef struct fc_h5_attributes {
    const char *path;
    fc_h5_bytes json;
} fc_h5_attributes;

/** The attributes of a file's root group. `schema` is 0 if fsdpckpt did not write the file. */
typedef struct fc_h5_root {
    int64_t schema;
    const char *layout, *producer;
    const char *mesh_names;          /**< joined with newlines */
    int64_t nmesh, rank, world_size; /**< -1: none */
    const int64_t *mesh_shape;
} fc_h5_root;

/* ---- encoding, in the child ---- */

typedef struct fc_h5_sink {
    int fd;
    unsigned char *buf;
    size_t used, cap, start;
    bool open;   /**< a record is unfinished */
    bool failed; /**< out of memory, or the parent has exited */
} fc_h5_sink;

void fc_h5_begin(fc_h5_sink *out, fc_h5_tag tag);
void fc_h5_put_u64(fc_h5_sink *out, uint64_t value);
void fc_h5_put_bytes(fc_h5_sink *out, const void *data, size_t size);
void fc_h5_put_text(fc_h5_sink *out, const char *text); /**< NULL and "" stay different */
void fc_h5_end(fc_h5_sink *out);
void fc_h5_flush(fc_h5_sink *out);

/** Bytes of a file. */
typedef struct fc_h5_part {
    uint64_t at, size;
} fc_h5_part;

/** Sends all finished records, then an FC_H5_WANT for up to FC_H5_MOST_PARTS parts of FC_H5_MOST_LENT bytes in all. */
void fc_h5_put_want(fc_h5_sink *out, const fc_h5_part *parts, size_t count);

/** Encodes everything except the chunks, which follow in separate records. */
void fc_h5_put_dataset(fc_h5_sink *out, const fc_h5_dataset *dataset);
void fc_h5_put_root(fc_h5_sink *out, const fc_h5_root *root);

/* ---- decoding, in the parent ---- */

typedef struct fc_h5_in {
    fc_h5_child *child;
    uint64_t budget; /**< remaining bytes of records that a file of this size may cause */
    unsigned char *buf;
    size_t cap, have, at;
    bool over_budget, no_memory;
    /* Of a file on a server. */
    const char *path;
    const struct fc_h5_loan *loan; /**< NULL: none */
    struct fc_h5_kept *kept;       /**< parts that other processes asked for; NULL: none */
    uint64_t lent;                 /**< bytes */
    fc_error unlent;               /**< why bytes could not be read; code FC_OK: all could */
} fc_h5_in;

/** The payload of one record while it is read; `bad` is set when something does not fit. */
typedef struct fc_h5_record {
    fc_h5_tag tag;
    const unsigned char *data;
    size_t size, at;
    bool bad, no_memory;
} fc_h5_record;

/** @return whether a dataset's path has as many elements as `lists`, none of them empty. */
bool fc_h5_path_is_sane(const fc_h5_dataset *d);

/** The content of all records about one file. */
typedef struct fc_h5_file {
    fc_h5_root root;
    fc_h5_dataset *datasets;
    size_t ndatasets, datasets_cap;
    fc_h5_attributes *attributes;
    size_t nattributes, attributes_cap;
    const char **others; /**< paths of the other files that its data is in, if these are followed */
    size_t nothers, others_cap;
    unsigned missing; /**< set of fc_h5_missing, of the process that read it */
} fc_h5_file;

/** Answers FC_H5_WANT. @return 1 and the next other record (valid until the next call), 0 at the end of the stream, -1
 * for an invalid record. */
int fc_h5_next(fc_h5_in *in, fc_h5_record *record);
void fc_h5_in_free(fc_h5_in *in);

uint64_t fc_h5_get_u64(fc_h5_record *record);
fc_h5_bytes fc_h5_get_bytes(fc_h5_record *record); /**< within the record, not a copy */

/** Turns a FAILURE record into an error about the file `path`. */
fc_code fc_h5_child_failure(fc_h5_record *record, const char *path, fc_error *err);

/**
 * Reads the records of one file up to END.
 * @param size the file's size: offsets and budgets are checked against it.
 * @return FC_OK; the child's own FAILURE; or FC_ECORRUPT with an empty err->message if the stream ended early or was
 * invalid: then fc_h5_child_finish knows more.
 */
fc_code fc_h5_read_file(fc_h5_in *in, fc_arena *arena, const char *path, uint64_t size, fc_h5_file *file,
                        fc_error *err);
