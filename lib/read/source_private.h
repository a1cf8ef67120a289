/*
 * What the files of a source share: see source.h.
 */
#pragma once

#include "io/input.h"
#include "read/source.h"
#include "read/tuning.h"

enum { MOST_EXPECTED = 2 }; /* ranges of the bytes that a worker reads next */

typedef struct cached_extent {
    const fc_tensor *tensor; /* NULL: unused */
    size_t chunk;
    fc_extent extent;
} cached_extent;

typedef struct open_file {
    uint32_t file;
    fc_input input; /* fd -1: unused */
    uint64_t last_use;
} open_file;

/* Bytes that will be read in ascending order. */
typedef struct expected {
    uint32_t file;
    uint64_t offset, size;
} expected;

struct fc_source {
    const fc_checkpoint *checkpoint;
    fc_decoded *decoded;
    unsigned char *scratch;
    size_t scratch_size;
    cached_extent extents[FC_EXTENT_CACHE];
    open_file files[FC_OPEN_FILES];
    int nfiles; /* number of elements of `files` that may be used */
    uint64_t clock;
    expected expected[MOST_EXPECTED];
    int nexpected;
    fc_source_crc *crc;  /* NULL: nothing is compared */
    bool elements;       /* with `crc`: also adds the CRC-64s of the elements */
    fc_crc_walk walk;    /* of the overlap being read */
    bool checks_objects; /* whether the format checks objects before they are read */
    bool cached;         /* whether all reads go through the page cache */
};

/* Opens file `index`, or finds it among the open ones. It replaces the file that was used longest ago. */
fc_code fc_source_open(fc_source *source, uint32_t index, fc_input **out, fc_error *err);

/* Finds where a chunk is stored. */
fc_code fc_source_extent(fc_source *source, const fc_tensor *tensor, size_t chunk, const fc_extent **out,
                         fc_error *err);

/* Computes the byte of the overlap's first element within the decoded bytes. Returns false on overflow. */
bool fc_source_first_byte(const fc_extent *extent, const int64_t *dims, const fc_overlap *overlap, int ndim,
                          int64_t element, uint64_t *start);
