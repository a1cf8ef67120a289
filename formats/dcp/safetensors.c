/*
 * Data files of FileSystemWriter(serialization_format=SerializationFormat.SAFETENSORS). After the archives of objects
 * comes one safetensors file, up to the end of the data file, with all of its tensors. For each of them `.metadata`
 * gives the offset of that safetensors file and the length of the tensor's own data. (torch 2.15 itself cannot read
 * tensors of such a checkpoint.) The headers are read here, and each chunk gets the offset of its bytes, so that chunks
 * with equal offsets have equal bytes.
 */
#include "dcp/extent.h"
#include "dcp/stages.h"

#include "base/checked.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/try.h"
#include "io/path.h"
#include "safetensors/header.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct placing {
    fc_dcp_builder *b;
    fc_arena *arena;       /* of the headers */
    fc_st_header *headers; /* one per data file */
    bool *missing;         /* per data file: whether it is missing, which headers_only allows */
} placing;

/* Only in a safetensors file is an item exactly as long as its elements. An archive also has other records. */
bool fc_dcp_in_safetensors(const fc_tensor *tensor, const fc_chunk *chunk) {
    int64_t elements;
    uint64_t bytes;
    return !tensor->object && chunk->detail != DCP_PACKED &&
           fc_numel(tensor->ndim, chunk->dims + tensor->ndim, &elements) &&
           fc_mul_u64((uint64_t)elements, fc_dtype_size(tensor->dtype), &bytes) && bytes == chunk->place.length;
}

fc_code fc_dcp_safetensors_extent(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_chunk *chunk,
                                  fc_extent *out, fc_error *err) {
    const char *path = checkpoint->files[chunk->place.file].path;
    if (chunk->detail != DCP_IN_PLACE) {
        return fc_fail(err, FC_ECORRUPT, "%s: the file was missing when the checkpoint was opened", path);
    }
    out->offset = chunk->place.offset;
    out->length = out->decoded = chunk->place.length;
    return fc_row_major_strides(tensor->ndim, chunk->dims + tensor->ndim, out->strides)
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": its size overflows", path, chunk->place.offset);
}

static fc_code read_header(placing *p, const fc_tensor *tensor, const fc_chunk *chunk) {
    const char *path = p->b->checkpoint->files[chunk->place.file].path;
    const bool headers_only = p->b->options->headers_only;
    if (headers_only && fc_access(path, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
        p->missing[chunk->place.file] = true;
        return FC_OK;
    }
    fc_progress_begin(p->b->options->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, 1);
    fc_code rc;
    FC_TRY_GOTO(fc_st_header_read_at(p->arena, path, chunk->place.offset, headers_only, &p->headers[chunk->place.file],
                                     p->b->err),
                rc, out);
    rc = fc_progress_count(p->b->options->progress, 1, p->b->err);
out:
    return rc == FC_OK ? rc
                       : fc_context(p->b->err, rc, "the safetensors part with tensor %.256s, at offset %" PRIu64,
                                    tensor->name, chunk->place.offset);
}

/* Finds the header that starts at the offset that `.metadata` gives for the chunk; NULL if the file is missing. */
static fc_code find_header(placing *p, const fc_tensor *tensor, const fc_chunk *chunk, const fc_st_header **out) {
    const fc_st_header *h = &p->headers[chunk->place.file];
    *out = NULL;
    if (h->data == 0 && !p->missing[chunk->place.file]) {
        FC_TRY(read_header(p, tensor, chunk));
    }
    if (p->missing[chunk->place.file]) {
        return FC_OK;
    }
    if (h->start != chunk->place.offset) {
        return fc_dcp_fail(p->b, FC_ECORRUPT, tensor->name,
                           "storage_data places it in the safetensors part of %s at byte %" PRIu64 ", but another "
                           "tensor in one at byte %" PRIu64 "; a file has only one such part",
                           p->b->checkpoint->files[chunk->place.file].name, chunk->place.offset, h->start);
    }
    *out = h;
    return FC_OK;
}

static bool same_numbers(const int64_t *a, const int64_t *b, int n) {
    return n == 0 || memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

/* Checks the entry against the chunk in `.metadata`. */
static fc_code check_entry(const placing *p, const fc_tensor *tensor, const fc_chunk *chunk, const fc_st_entry *e) {
    const char *path = p->b->checkpoint->files[chunk->place.file].path, *what = NULL;
    if (!e) {
        what = "has no tensor of that name";
    } else if (e->dtype != tensor->dtype) {
        return fc_fail(p->b->err, FC_ECORRUPT,
                       "tensor %.256s: %s: offset %" PRIu64 ": the safetensors header says %s, but .metadata says %s",
                       tensor->name, path, chunk->place.offset, fc_dtype_get(e->dtype)->torch_name,
                       fc_dtype_get(tensor->dtype)->torch_name);
    } else if (e->ndim != tensor->ndim || !same_numbers(e->shape, chunk->dims + tensor->ndim, e->ndim)) {
        what = "has other sizes for it than .metadata";
    } else if (!e->offsets) {
        what = "lacks the offsets of this chunk in DCP_SHARDING_INFO";
    }
    return !what ? FC_OK
                 : fc_fail(p->b->err, FC_ECORRUPT, "tensor %.256s: %s: offset %" PRIu64 ": the safetensors header %s",
                           tensor->name, path, chunk->place.offset, what);
}

static fc_code place_chunk(placing *p, fc_tensor *tensor, fc_chunk *chunk) {
    const fc_st_header *header;
    FC_TRY(find_header(p, tensor, chunk, &header));
    if (!header) {
        return FC_OK;
    }
    const fc_st_entry *e = fc_st_header_find(header, tensor->name);
    /* torch collects the tensors of a file by name, so of several chunks of one tensor it writes only the last. */
    if (e && e->offsets && e->ndim == tensor->ndim && !same_numbers(e->offsets, chunk->dims, e->ndim)) {
        const char *name = p->b->checkpoint->files[chunk->place.file].name;
        chunk->detail = DCP_LOST;
        return fc_dcp_refuse_tensor(
            p->b, tensor, chunk,
            fc_arena_printf(p->b->checkpoint->arena,
                            "a chunk of it was lost when it was saved, because torch keeps one of "
                            "several that a rank had, in %.128s; save it again without "
                            "SerializationFormat.SAFETENSORS",
                            name));
    }
    FC_TRY(check_entry(p, tensor, chunk, e));
    chunk->place.offset = header->data + e->begin;
    chunk->detail = DCP_IN_PLACE;
    return FC_OK;
}

static fc_code place_all(placing *p) {
    for (size_t i = 0; i < p->b->ntensors; i++) {
        fc_tensor *t = &p->b->tensors[i];
        for (size_t c = 0; c < t->nchunks && !t->object; c++) {
            fc_chunk *chunk = (fc_chunk *)(uintptr_t)&t->chunks[c]; /* may be changed while the manifest is built */
            FC_TRY(fc_dcp_in_safetensors(t, chunk) ? place_chunk(p, t, chunk) : FC_OK);
        }
    }
    return FC_OK;
}

fc_code fc_dcp_place_in_safetensors(fc_dcp_builder *b) {
    const size_t n = b->checkpoint->nfiles;
    placing p = {.b = b, .arena = fc_arena_new()};
    p.headers = calloc(n + 1, sizeof *p.headers);
    p.missing = calloc(n + 1, sizeof *p.missing);
    fc_code rc = p.arena && p.headers && p.missing ? place_all(&p) : fc_no_memory(b->err, b->metadata_path);
    for (size_t i = 0; p.headers && i < n; i++) { /* files without a safetensors part have no header */
        if (p.headers[i].data != 0) {
            fc_st_header_free(&p.headers[i]);
        }
    }
    free(p.headers);
    free(p.missing);
    fc_arena_free(p.arena);
    return rc;
}
