/*
 * The header of one safetensors file. A file is eight bytes of length, a JSON header, and data. header.c reads and
 * checks the header. kept.c adds to the entries what fsdpckpt and torch store in `__metadata__`.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "safetensors/dtypes.h"
#include "safetensors/header_digest.h"

#include <jansson.h>

/** The longest header that readers accept, and the size of the length before it. Bytes. */
enum { ST_MAX_HEADER = 100000000, ST_LENGTH_BYTES = 8 };

/** One tensor, or one box of a sharded tensor, in a file. Strings and arrays are in the arena. */
typedef struct fc_st_entry {
    const char *name;
    const fc_st_dtype *stored; /**< The dtype that the header names. */
    fc_dtype dtype;            /**< The dtype in torch. */
    int ndim;                  /**< Dimensions in torch. `shape` has one more where fc_st_stored.append is set. */
    int64_t *shape;            /**< The shape in torch. Until kept.c has run, the shape in the header. */
    int raw_ndim;              /**< Dimensions in the header. */
    uint64_t begin, end;       /**< Bytes, from the start of the data. */
    uint64_t crc64;            /**< Digest of the data. Valid if fc_st_header.has_digests. */
    int64_t *offsets;          /**< raw_ndim offsets of the box in the whole tensor; NULL if the entry is the whole. */
    const int64_t *global;     /**< global_ndim sizes of the whole tensor; NULL if not recorded. */
    int global_ndim;
    const char *placements;      /**< As text; NULL if not recorded. */
    const fc_path_element *path; /**< path_count elements; NULL if the path is the name. */
    size_t path_count;
    bool remembered; /**< `__metadata__` names `dtype`. */
} fc_st_entry;

/** One member of `__metadata__`. */
typedef struct fc_st_pair {
    const char *key, *value;
} fc_st_pair;

/** The checked header of one file. Its owner calls fc_st_header_free. */
typedef struct fc_st_header {
    fc_st_entry *entries; /**< malloc'ed, in the order of the header */
    size_t nentries;
    fc_st_entry **by_name; /**< malloc'ed: the entries, sorted by name */
    uint32_t *by_offset;   /**< malloc'ed: indexes of entries, in the order of their data */
    fc_st_pair *pairs;     /**< malloc'ed, sorted by key */
    size_t npairs;
    uint64_t start;   /**< Offset of the header in the file: 0 in a safetensors file. */
    uint64_t data;    /**< Offset of the data in the file. */
    bool has_digests; /**< The entries' crc64 are set. */
    fc_st_header_state state;
    bool is_shard; /**< The file has torch's DCP_SHARDING_INFO. */
    fc_mesh mesh;  /**< The mesh of the checkpoint that this shard file belongs to; ndim is 0 if not recorded. */
    int64_t rank;  /**< The rank in that mesh, -1 if not recorded. */
} fc_st_header;

/**
 * Reads and checks the header of the file `path`.
 * @param headers_only accepts a file whose data is missing.
 * @param out the caller frees it with fc_st_header_free, also on failure.
 */
fc_code fc_st_header_read(fc_arena *arena, const char *path, bool headers_only, fc_st_header *out, fc_error *err);
/** Does the same for a safetensors file that is embedded in `path` from offset `start` to the end. */
fc_code fc_st_header_read_at(fc_arena *arena, const char *path, uint64_t start, bool headers_only, fc_st_header *out,
                             fc_error *err);
void fc_st_header_free(fc_st_header *header);

/**
 * Copies the strings and arrays of a header to another arena, and drops the members of `__metadata__` that have been
 * applied to the entries.
 * @param before a header that `arena` has already, with which equal strings are shared; may be NULL.
 * @return false when out of memory. (header_keep.c)
 */
bool fc_st_header_keep(fc_arena *arena, fc_st_header *header, const fc_st_header *before);

/** Finds an entry by name. @return NULL if there is none. */
fc_st_entry *fc_st_header_find(const fc_st_header *header, const char *name);

/** Returns the value of a member of `__metadata__`, or NULL. */
const char *fc_st_header_value(const fc_st_header *header, const char *key);

/** Applies `__metadata__` to the entries and converts their shapes and offsets to those of torch. (kept.c) */
fc_code fc_st_header_apply_kept(fc_arena *arena, const char *path, fc_st_header *header, fc_error *err);

/** Reads a path, a list of keys and indexes. `out->elements` is NULL if `list` is not one. @param path of the file */
fc_code fc_st_object_path(fc_arena *arena, const char *path, const json_t *list, fc_path *out, fc_error *err);
