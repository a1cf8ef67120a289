/*
 * Items that DCP's extension ZStandard compressed: each is a zstd stream of a torch.save archive. A stream can only be
 * decoded from its start. The first bytes of an archive say where its tensor is, so a few blocks are enough for an
 * extent. A chunk is decoded as a whole, or if it does not fit the memory, part by part.
 */
#pragma once

#include "dcp/builder.h"
#include "torch/object/item.h"

/** @return whether the chunk's item is a zstd stream. */
static inline bool fc_dcp_is_packed(const fc_chunk *chunk) {
    return chunk->detail == DCP_PACKED;
}

/** The most bytes that an object may decode to. */
enum { FC_DCP_MOST_OBJECT = 64 << 20 };

/** Sets the sizes of compressed objects, which `.metadata` does not have. Call it after fc_dcp_finish_files. */
fc_code fc_dcp_measure_objects(fc_dcp_builder *b);

/**
 * Decodes the archive of an object into malloc'ed memory.
 * @param fd the open data file. @param size receives its size.
 */
fc_code fc_dcp_unpack(int fd, const char *path, const fc_chunk *chunk, unsigned char **bytes, uint64_t *size,
                      fc_error *err);

/**
 * Opens the beginning of a tensor's archive: its pickle, and the records up to that of the tensor. Places in it count
 * from chunk->place.offset, as if the item were not compressed.
 */
fc_code fc_dcp_open_packed(int fd, const char *path, const fc_chunk *chunk, fc_torch_item *item, fc_error *err);

/** Opens the archive of a tensor, compressed or not. */
fc_code fc_dcp_open_item(int fd, const char *path, const fc_chunk *chunk, fc_torch_item *item, fc_error *err);

/** fc_format_reader.read. */
fc_code fc_dcp_read(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, void *buf, fc_error *err);

/** fc_format_reader.read_part. (packed_stream.c) */
fc_code fc_dcp_read_part(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, uint64_t at, void *buf,
                         size_t size, fc_error *err);
