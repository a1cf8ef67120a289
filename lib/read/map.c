/*
 * Maps a tensor from its file into memory, if the file has the elements as they are in memory. Nothing is decoded,
 * copied or compared.
 */
#include "fsdpckpt/read.h"

#include "base/checked.h"
#include "checkpoint/identity.h"
#include "codec/strided.h"
#include "fsdpckpt/try.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static bool is_whole(const fc_tensor *tensor) {
    const fc_box box = fc_chunk_box(tensor, &tensor->chunks[0]);
    for (int d = 0; d < tensor->ndim; d++) {
        if (box.offsets[d] != 0 || box.sizes[d] != tensor->shape[d]) {
            return false;
        }
    }
    return true;
}

/* Why the elements are not in the file as they are in memory; NULL: they are. */
static const char *why_not(const fc_extent *extent) {
    switch (extent->codec) {
    case FC_CODEC_RAW:
        break;
    case FC_CODEC_INLINE:
        return "its elements are part of a header";
    case FC_CODEC_FILTERED:
        return "it is stored with HDF5 filters, such as compression";
    case FC_CODEC_FORMAT:
        return "its stored bytes must be decoded";
    case FC_CODEC_COMPUTED:
        return "it is computed when it is read";
    }
    if (extent->swap) {
        return "it is stored in another byte order than that of this machine";
    }
    return extent->negate || extent->conjugate ? "it is negated or conjugated when it is read" : NULL;
}

static fc_code refuse(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const char *why, fc_error *err) {
    return fc_fail(err, FC_EUSAGE, "%s: tensor %s: cannot be mapped: %s", checkpoint->path, tensor->name, why);
}

/* Finds the one extent that has all elements, and the bytes from its first element to its last. */
static fc_code find_elements(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_extent *extent,
                             uint64_t *bytes, fc_error *err) {
    const uint32_t element = fc_dtype_size(tensor->dtype);
    int64_t strides[FC_MAX_DIMS];
    fc_strided copy;
    FC_TRY(fc_check_readable(checkpoint, tensor, err));
    if (tensor->nchunks != 1 || !is_whole(tensor)) {
        return fc_fail(err, FC_EUSAGE, "%s: tensor %s: cannot be mapped: it is stored in %zu chunks", checkpoint->path,
                       tensor->name, tensor->nchunks);
    }
    FC_TRY(fc_checkpoint_extent(checkpoint, tensor, 0, extent, err));
    const char *why = why_not(extent);
    if (why) {
        return refuse(checkpoint, tensor, why, err);
    }
    if (!fc_row_major_strides(tensor->ndim, tensor->shape, strides) ||
        !fc_strided_make(&copy, tensor->ndim, tensor->shape, extent->strides, strides, element) ||
        !fc_range_within(extent->first, (uint64_t)fc_strided_span(&copy, 0), extent->length)) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %s: offset %" PRIu64 ": the elements exceed the stored bytes",
                       checkpoint->path, tensor->name, extent->offset);
    }
    *bytes = (uint64_t)fc_strided_span(&copy, 0);
    if ((extent->offset + extent->first) % element != 0) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: tensor %s: cannot be mapped: it starts at offset %" PRIu64
                       ", which is no multiple of the %" PRIu32 " bytes of an element",
                       checkpoint->path, tensor->name, extent->offset + extent->first, element);
    }
    return FC_OK;
}

static fc_code map_bytes(const fc_checkpoint *checkpoint, uint32_t file, uint64_t start, uint64_t bytes,
                         fc_mapping *out, fc_error *err) {
    const uint64_t lead = start % (uint64_t)sysconf(_SC_PAGESIZE);
    int fd;
    FC_TRY(fc_identity_open(checkpoint, file, &fd, err));
    /* MAP_NORESERVE: a file that is larger than the memory is mapped, too; only pages that are written need any. */
    void *pages = mmap(NULL, (size_t)(lead + bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd,
                       (off_t)(start - lead));
    const int saved = errno;
    close(fd);
    if (pages == MAP_FAILED) {
        return saved == ENODEV ? fc_fail(err, FC_EUSAGE,
                                         "%s: cannot be mapped: it is on a server, or on a file system without maps",
                                         checkpoint->files[file].path)
                               : fc_fail_errno(err, saved, "%s: cannot be mapped", checkpoint->files[file].path);
    }
    out->pages = pages;
    out->size = (size_t)(lead + bytes);
    out->first = (unsigned char *)pages + lead;
    out->bytes = bytes;
    return FC_OK;
}

fc_code fc_map_tensor(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_mapping *out, fc_error *err) {
    fc_extent extent;
    uint64_t bytes = 0;
    memset(out, 0, sizeof *out);
    for (int d = 0; d < tensor->ndim; d++) {
        if (tensor->shape[d] == 0) {
            return FC_OK;
        }
    }
    FC_TRY(find_elements(checkpoint, tensor, &extent, &bytes, err));
    memcpy(out->strides, extent.strides, sizeof out->strides);
    return map_bytes(checkpoint, extent.file, extent.offset + extent.first, bytes, out, err);
}

void fc_mapping_free(fc_mapping *mapping) {
    if (mapping->pages) {
        munmap(mapping->pages, mapping->size);
    }
    mapping->pages = NULL;
}
