/*
 * In the reader process: lends libhdf5 the filters that the engine undoes. It needs them for datasets that only it can
 * read: text, objects, and pipelines with two compressions.
 */
#include "codec/blosc2.h"
#include "codec/bzip2.h"
#include "codec/filter.h"
#include "codec/zstd.h"
#include "hdf5/reader_process/scan.h"

#include "base/big.h"
#include "base/little.h"

#include <stdlib.h>
#include <string.h>

/* What libhdf5 gives to a filter. */
typedef struct stored {
    fc_filter filter;
    uint32_t element;
    const unsigned *parameters;
    size_t nparameters;
    const unsigned char *bytes;
    size_t size;
} stored;

/* Counts the bytes of a zstd stream. @return 0 if it is damaged, or gives more than 4 GiB. */
static uint64_t count_zstd(const stored *s) {
    enum { BLOCK = 128 << 10 };
    fc_zstd_decoder *decoder = NULL;
    unsigned char *block = malloc(BLOCK);
    fc_zstd_step step = {0};
    uint64_t total = 0;
    size_t at = 0;
    bool good = block && fc_zstd_decoder_new(&decoder, NULL) == FC_OK;
    while (good && !step.finished) {
        good = fc_zstd_decode_step(decoder, s->bytes + at, s->size - at, block, BLOCK, &step, NULL) == FC_OK &&
               (step.taken > 0 || step.made > 0) && total <= UINT32_MAX;
        at += step.taken;
        total += step.made;
    }
    fc_zstd_decoder_free(decoder);
    free(block);
    return good ? total : 0;
}

/* The same for bzip2. */
static uint64_t count_bzip2(const stored *s) {
    uint64_t total = 0;
    return fc_bzip2_count(s->bytes, s->size, UINT32_MAX, &total, NULL) == FC_OK ? total : 0;
}

/* @return how many bytes the data says that it decodes to; 0 if it is damaged. */
static uint64_t decoded_size(const stored *s) {
    switch (s->filter.id) {
    case FC_FILTER_BZIP2:
        return count_bzip2(s);
    case FC_FILTER_LZF:
        return s->nparameters > 2 ? s->parameters[2] : 0;
    case FC_FILTER_BLOSC:
        return s->size >= 8 ? fc_load_little(s->bytes + 4, 4) : 0;
    case FC_FILTER_BLOSC2:
        return fc_blosc2_size(s->bytes, s->size);
    case FC_FILTER_LZ4:
        return s->size >= 8 ? fc_load_big(s->bytes, 8) : 0;
    case FC_FILTER_BITSHUFFLE:
        return !fc_filter_compresses(&s->filter) ? s->size : s->size >= 8 ? fc_load_big(s->bytes, 8) : 0;
    case FC_FILTER_ZSTD:
        return count_zstd(s);
    default:
        return 0;
    }
}

/* A filter of libhdf5. @return the number of bytes in `*buffer`; 0 after a failure. */
static size_t undo(uint32_t id, unsigned flags, size_t nparameters, const unsigned parameters[], size_t size,
                   size_t *room, void **buffer) {
    const bool shuffles = id == FC_FILTER_BITSHUFFLE;
    stored s = {.element = shuffles && nparameters > 2 ? parameters[2] : 1,
                .parameters = parameters,
                .nparameters = nparameters,
                .bytes = *buffer,
                .size = size};
    if (!(flags & H5Z_FLAG_REVERSE) || s.element == 0 ||
        !fc_filter_parse(id, parameters, nparameters, s.element, &s.filter)) {
        return 0;
    }
    const uint64_t decoded = decoded_size(&s);
    if (decoded == 0 || decoded > UINT32_MAX) {
        return 0;
    }
    unsigned char *out = H5allocate_memory((size_t)decoded, false);
    unsigned char *scratch = malloc((size_t)decoded * fc_filter_find(id)->scratch + 1);
    const bool good = out && scratch &&
                      fc_filter_undo(&s.filter, s.bytes, size, s.element, scratch, out, (size_t)decoded, NULL) == FC_OK;
    free(scratch);
    if (!good) {
        H5free_memory(out);
        return 0;
    }
    H5free_memory(*buffer);
    *buffer = out;
    *room = (size_t)decoded;
    return (size_t)decoded;
}

/* libhdf5 does not say which filter it calls, so each has a function. */
#define FILTER(name, id)                                                                                               \
    static size_t name(unsigned flags, size_t n, const unsigned parameters[], size_t size, size_t *room,               \
                       void **buffer) {                                                                                \
        return undo(id, flags, n, parameters, size, room, buffer);                                                     \
    }

FILTER(undo_bzip2, FC_FILTER_BZIP2)
FILTER(undo_lzf, FC_FILTER_LZF)
FILTER(undo_blosc, FC_FILTER_BLOSC)
FILTER(undo_lz4, FC_FILTER_LZ4)
FILTER(undo_bitshuffle, FC_FILTER_BITSHUFFLE)
FILTER(undo_blosc2, FC_FILTER_BLOSC2)
FILTER(undo_zstd, FC_FILTER_ZSTD)

void fc_h5_lend_filters(void) {
    static const struct {
        H5Z_filter_t id;
        H5Z_func_t undo;
    } filters[] = {
        {FC_FILTER_BZIP2, undo_bzip2},           {FC_FILTER_LZF, undo_lzf},
        {FC_FILTER_BLOSC, undo_blosc},           {FC_FILTER_LZ4, undo_lz4},
        {FC_FILTER_BITSHUFFLE, undo_bitshuffle}, {FC_FILTER_ZSTD, undo_zstd},
        {FC_FILTER_BLOSC2, undo_blosc2},
    };
    for (size_t i = 0; i < sizeof filters / sizeof *filters; i++) {
        const H5Z_class2_t class = {.version = H5Z_CLASS_T_VERS,
                                    .id = filters[i].id,
                                    .decoder_present = 1,
                                    .name = "fsdpckpt",
                                    .filter = filters[i].undo};
        const fc_filter filter = {.id = (uint16_t)filters[i].id};
        if (!fc_filter_lacking(&filter)) {
            H5Zregister(&class);
        }
    }
}
