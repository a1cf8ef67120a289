/*
 * Reading the tensors of a checkpoint, wherever and however their chunks are stored.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/progress.h"

FC_BEGIN_DECLS

/**
 * Remembers the chunks of the tensors that are read, so that each of many small boxes is found without a search through
 * all chunks of its tensor. Several threads may use it.
 */
typedef struct fc_chunk_lists fc_chunk_lists;

/** @return lists for the tensors of `checkpoint`, which is borrowed; NULL: out of memory. */
fc_chunk_lists *fc_chunk_lists_new(const fc_checkpoint *checkpoint);

/** Frees `lists`. NULL is allowed. */
void fc_chunk_lists_free(fc_chunk_lists *lists);

/** What a job may use that reads, compares or converts checkpoints. */
typedef struct fc_work_options {
    int threads;           /**< number of workers; 0: enough to keep processors and disk busy */
    uint64_t memory;       /**< bytes of all buffers; 0: 56 MiB */
    fc_progress *progress; /**< may be NULL */
    int processes; /**< fc_read_boxes: how many load together on this machine and share its processors; 0: one */
    bool cached;   /**< fc_read_boxes, fc_convert, fc_shards_write: what is read or written will be read again, see
                      fc_fits_cache */
} fc_work_options;

/** A box to read. */
typedef struct fc_box_request {
    const fc_tensor *tensor;
    fc_box box;
    void *buf; /**< receives the elements, row-major, in the dtype of the tensor and native byte order */
} fc_box_request;

/**
 * Reads a box of `tensor` into `buf`, row-major, in `dtype` and native byte order, with one thread.
 * @return FC_ECORRUPT also if the whole tensor is read and does not match the recorded digests and CRCs.
 */
fc_code fc_read_box(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                    void *buf, fc_error *err);

/** Like fc_read_box in the dtype of the tensor, for many boxes of one checkpoint. */
fc_code fc_read_box_listed(const fc_checkpoint *checkpoint, fc_chunk_lists *lists, const fc_box_request *request,
                           fc_error *err);

/**
 * Reads all bytes of an object.
 * @param bytes receives the object->shape[0] bytes, which the caller frees.
 */
fc_code fc_read_object(const fc_checkpoint *checkpoint, const fc_tensor *object, unsigned char **bytes, fc_error *err);

/** Receives the next `size` bytes. Any code other than FC_OK ends the reading and is returned. */
typedef fc_code fc_read_visit(void *context, const void *bytes, size_t size, fc_error *err);

/** Like fc_read_box, but passes the bytes to `visit` block by block, in constant memory. Digests are compared at the
 * end.
 */
fc_code fc_read_stream(const fc_checkpoint *checkpoint, const fc_tensor *tensor, const fc_box *box, fc_dtype dtype,
                       fc_read_visit *visit, void *context, fc_error *err);

/**
 * Whether a load or a save goes through the page cache. What a training program loads is read again: by other ranks of
 * the machine that hold the same boxes, and by the next start. What it saves is read by an evaluation, a copy or the
 * next start. So it does, unless the bytes exceed half of the available memory: then the cache would lose them before
 * they are read again.
 * @param bytes what all processes of this machine load or save of the checkpoint, at most its size.
 */
bool fc_fits_cache(uint64_t bytes);

/**
 * Reads many boxes with several threads. A box that is the whole tensor, or exactly one of its chunks, is compared with
 * the recorded CRC-64.
 * @param lists   of `checkpoint`; NULL: it makes its own.
 * @param options its `memory` is not used; may be NULL.
 */
fc_code fc_read_boxes(const fc_checkpoint *checkpoint, fc_chunk_lists *lists, const fc_box_request *requests,
                      size_t count, const fc_work_options *options, fc_error *err);

/** The stored elements of a tensor in the memory of this process. */
typedef struct fc_mapping {
    void *pages;                  /**< what is mapped; NULL: the tensor has no elements */
    size_t size;                  /**< its bytes */
    unsigned char *first;         /**< element (0, …, 0), aligned to the size of an element */
    uint64_t bytes;               /**< from there to the end of the last element */
    int64_t strides[FC_MAX_DIMS]; /**< in elements, not negative */
} fc_mapping;

/**
 * Maps the elements of `tensor` from their file, privately: what is written to them never reaches the file. They stay
 * valid when the checkpoint is closed and its file is replaced or removed. A file that is made shorter takes them away:
 * the system then ends the process with SIGBUS. No digest is compared.
 * @param out freed by fc_mapping_free.
 * @return FC_EUSAGE with the reason if the elements are not in one file as they are in memory.
 */
fc_code fc_map_tensor(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_mapping *out, fc_error *err);

/** Unmaps the elements. */
void fc_mapping_free(fc_mapping *mapping);

FC_END_DECLS
