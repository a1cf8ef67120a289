/*
 * What a source records of its data, compared with what is read of it: the CRC-32s of its chunks (fc_extent.crc32: the
 * records of torch's zip archives; or a CRC-64, which safetensors of ours have for each piece), and where asked for the
 * CRC-64s of its tensors (fc_checkpoint_digest). CRCs are linear, so one is put together from those of the pieces that
 * workers and ranks read of it, in any order and however it is cut. Of a record of which only parts were read, or in
 * which several chunks lie (flat parameters, DeepSpeed's partitions, views), the rest is read when all is moved
 * (record_crc.h).
 */
#ifndef FSDPCKPT_ENGINE_SOURCE_CRC_H
#define FSDPCKPT_ENGINE_SOURCE_CRC_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "base/crc.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/comm.h"

/** The sums of some of a checkpoint's tensors, and of their chunks. Shared by all workers. */
typedef struct fc_source_crc fc_source_crc;

/** @param tensors `count` of checkpoint->tensors, one behind the other: those that will be read. */
fc_code fc_source_crc_new(const fc_checkpoint *checkpoint, const fc_tensor *tensors, size_t count, fc_source_crc **out,
                          fc_error *err);
void fc_source_crc_free(fc_source_crc *crc);

/** Adds up what the ranks have read. Collective, unless `comm` is NULL. */
fc_code fc_source_crc_join(fc_source_crc *crc, fc_comm *comm, fc_error *err);

/** @return FC_ECORRUPT when a record, of which something was read, is not what its CRC-32 says, or a tensor, all of
   which was read, not what its CRC-64 says. Of those that have to be read for that, because only a part was or one more
   than once, each rank of `comm` (NULL: there are no others) takes some. */
fc_code fc_source_crc_check(const fc_source_crc *crc, const fc_comm *comm, fc_error *err);

/** @param found the CRC-64 of all of `tensor`. @return FC_ECORRUPT when another one is recorded. */
fc_code fc_source_check_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, uint64_t found, fc_error *err);

/** Whether a CRC-64 is recorded of the tensor as a whole, so that its elements are to be added. Thread-safe. */
fc_code fc_source_crc_wants(fc_source_crc *crc, const fc_tensor *tensor, bool *wants, fc_error *err);

/** Adds the elements of a box of the tensor, which lie at `bytes` in row-major order. Thread-safe. */
fc_code fc_source_crc_add(fc_source_crc *crc, const fc_tensor *tensor, const fc_box *box, const unsigned char *bytes,
                          fc_error *err);

/** How the elements of a chunk lie in their record. */
typedef enum fc_crc_layout {
    FC_CRC_NONE,      /**< it has no CRC-32 that could be compared */
    FC_CRC_WHOLE,     /**< they are all of it, each once, in whatever order of the axes */
    FC_CRC_RUN,       /**< they are a part of it, one behind the other */
    FC_CRC_SCATTERED, /**< as strides say: they are not summed up */
    FC_CRC_WIDE       /**< as FC_CRC_WHOLE, and it is a CRC-64 */
} fc_crc_layout;

enum { FC_CRC_DISTANCES = 8 };

/** A walk over some bytes of one chunk, in ascending order. One worker's, to be used again: all 0 to start with. */
typedef struct fc_crc_walk {
    uint64_t at;    /**< bytes, in the stored ones: the end of the last run */
    uint64_t bytes; /**< so far */
    uint64_t sum;   /**< bare, with nothing behind `at` */
    fc_crc_layout lies;
    bool wanted; /**< whether runs are to be added */
    struct {
        uint64_t distance;
        union {
            fc_crc32_factor of32;
            fc_crc64_factor of64; /**< FC_CRC_WIDE */
        } factor;
    } known[FC_CRC_DISTANCES]; /**< few distances occur, again and again */
} fc_crc_walk;

/** Begins with a piece of a chunk; `lies` tells whether there is anything to compare it with. */
void fc_crc_walk_begin(fc_crc_walk *walk, const fc_tensor *tensor, size_t chunk, const fc_extent *extent);

/** Adds `size` bytes, `at` bytes behind the start of the stored ones. */
void fc_crc_walk_add(fc_crc_walk *walk, uint64_t at, const unsigned char *bytes, size_t size);

/** Adds the piece to the sums. Thread-safe. */
void fc_crc_walk_end(const fc_crc_walk *walk, fc_source_crc *crc, const fc_tensor *tensor, size_t chunk,
                     const fc_extent *extent);

#endif
