/*
 * One safetensors file: eight bytes of length, a JSON header, data. header.c reads and checks the header; what this
 * program and torch keep in `__metadata__` beyond the format is put to the entries by kept.c.
 */
#ifndef FSDPCKPT_FORMATS_SAFETENSORS_HEADER_H
#define FSDPCKPT_FORMATS_SAFETENSORS_HEADER_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/checkpoint.h"
#include "safetensors/dtypes.h"
#include "safetensors/header_digest.h"

#include <jansson.h>

/** The longest header that any reader accepts, and the bytes before it. */
enum { ST_MAX_HEADER = 100000000, ST_LENGTH_BYTES = 8 };

/** A tensor in a file. Strings and arrays live in the arena. */
typedef struct st_entry {
    const char *name;
    const st_dtype *stored; /**< as the header says */
    fc_dtype dtype;         /**< ours */
    int ndim;               /**< of our tensor: `shape` has one more when st_stored.append */
    int64_t *shape;         /**< ours; while the header is read, as it stands there */
    int raw_ndim;           /**< of that */
    uint64_t begin, end;    /**< bytes, in the data */
    uint64_t crc64;         /**< of the data, where the file records it */
    int64_t *offsets;       /**< raw_ndim entries: where the piece lies in the whole; NULL: it is the whole */
    const int64_t *global;  /**< global_ndim entries: the shape of the whole, where recorded; else NULL */
    int global_ndim;
    const char *placements;      /**< text; NULL: none */
    const fc_path_element *path; /**< NULL: flat */
    size_t path_count;
    bool remembered; /**< `dtype` was named in `__metadata__` */
} st_entry;

/** One member of `__metadata__`. */
typedef struct st_pair {
    const char *key, *value;
} st_pair;

typedef struct st_header {
    st_entry *entries; /**< malloc'ed, in the order of the header */
    size_t nentries;
    uint32_t *by_name;  /**< malloc'ed: indexes of entries, sorted */
    uint32_t *by_place; /**< malloc'ed: indexes of entries, in the order of their data */
    st_pair *pairs;     /**< malloc'ed, sorted by key */
    size_t npairs;
    uint64_t start;   /**< of the header in the file: 0 where that is a safetensors file */
    uint64_t data;    /**< offset of the data in the file */
    bool has_digests; /**< the entries' crc64 are set */
    st_header_state state;
    bool is_piece; /**< torch's DCP_SHARDING_INFO is there */
    fc_mesh mesh;  /**< of the checkpoint that this file is a rank's part of; ndim 0: not recorded */
    int64_t rank;  /**< in that mesh */
} st_header;

/**
 * Reads and checks the header of the file `path`.
 * @param headers_only the data may be missing.
 * @param out to be given to fc_st_header_free, also on failure.
 */
fc_code fc_st_header_read(fc_arena *arena, const char *path, bool headers_only, st_header *out, fc_error *err);
/** The same for what stands from `start` to the end of the file, as a safetensors file would. */
fc_code fc_st_header_read_at(fc_arena *arena, const char *path, uint64_t start, bool headers_only, st_header *out,
                             fc_error *err);
void fc_st_header_free(st_header *header);

/** Finds an entry by name. @return NULL when there is none. */
st_entry *fc_st_header_find(const st_header *header, const char *name);

/** The value of a member of `__metadata__`, or NULL. */
const char *fc_st_header_value(const st_header *header, const char *key);

/** Reads what `__metadata__` says of the entries, and turns their shapes and offsets into ours. */
fc_code fc_st_header_apply_kept(fc_arena *arena, const char *path, st_header *header, fc_error *err);

/** Reads a list of keys and indexes into `out`. @return FC_ECORRUPT, without a message, when it is none. */
fc_code fc_st_object_path(fc_arena *arena, const json_t *list, fc_path *out);

#endif
