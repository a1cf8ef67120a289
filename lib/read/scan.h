/*
 * Reads every byte of many things once, with several threads and in constant memory, and shows each tile to the caller:
 * tensors of one checkpoint, pairs of tensors of two, or stored bytes.
 */
#pragma once

#include "fsdpckpt/plan.h"
#include "fsdpckpt/read.h"
#include "integrity/source_crc.h"

enum { FC_SCAN_SIDES = 2 };

/** One thing to read. */
typedef struct fc_scan_item {
    size_t index;                            /**< its number */
    void *state;                             /**< fc_scan.state bytes, zeroed at the start */
    const fc_tensor *tensors[FC_SCAN_SIDES]; /**< one per side, of the same shape; NULL: it is stored bytes */
    fc_box box;                              /**< what is read of them; outlives the item */
    bool large_tiles;                        /**< whether the tensors gain from large tiles */
    uint32_t file;                           /**< of stored bytes */
    uint64_t offset, length;                 /**< of stored bytes */
    bool failed;                             /**< set by fc_scan: some of it could not be read */
} fc_scan_item;

/** A part of an item that was read. */
typedef struct fc_scan_tile {
    fc_scan_item *item;
    fc_box box;                                /**< of tensors */
    uint64_t at;                               /**< of stored bytes: offset from the start of the item */
    const unsigned char *bytes[FC_SCAN_SIDES]; /**< one per side, in the tensor's dtype and native byte order */
    size_t size;                               /**< bytes of all sides; 0 for one element that stands for many */
    size_t count;                              /**< number of elements at `bytes` */
    uint64_t times;                            /**< each of them stands for so many equal ones */
    void *scratch;                             /**< fc_scan.scratch bytes of the worker, zeroed at the start */
} fc_scan_tile;

/** What is read, and what the caller does with it. */
typedef struct fc_scan {
    size_t count; /**< number of items */
    int sides;
    const fc_checkpoint *checkpoints[FC_SCAN_SIDES];
    fc_source_crc *crcs[FC_SCAN_SIDES]; /**< collect the CRCs of what is read; may be NULL */
    bool check_objects;                 /**< see fc_source_check_objects */
    fc_phase phase;                     /**< for the progress, which counts bytes up to `total` */
    uint64_t total;
    bool in_order; /**< one worker looks at all tiles of an item, in row-major order; equal elements are read each */
    bool counts_stored;    /**< the progress counts one of equal elements, not all */
    uint64_t *read;        /**< the size of each tile is added to it; may be NULL */
    size_t state, scratch; /**< bytes for each item, and for each worker */
    size_t extra;          /**< bytes that the caller holds for each worker in addition */
    void *context;         /**< passed to all functions */
    /** Fills the rest of an item. Only one thread at a time. */
    fc_code (*begin)(void *context, fc_scan_item *item, fc_error *err);
    /** Looks at a tile, and leaves in its scratch what `add` needs. Several threads at a time. */
    fc_code (*look)(void *context, const fc_scan_tile *tile, fc_error *err);
    /** Adds what `look` found. Only one thread at a time. @return false: the scan ends here. */
    bool (*add)(void *context, const fc_scan_tile *tile);
    /**
     * An item could not be read. Only one thread at a time. @return FC_OK: the scan continues with other items. NULL:
     * it ends.
     */
    fc_code (*fail)(void *context, const fc_scan_item *item, fc_code rc, const fc_error *found);
    /** Ends an item that was begun. Only one thread at a time. @param complete whether all of it was added. May be NULL
     */
    void (*end)(void *context, const fc_scan_item *item, bool complete);
} fc_scan;

/** Reads all items. @param options NULL: the defaults */
fc_code fc_scan_run(const fc_scan *scan, const fc_work_options *options, fc_error *err);

/** Adds the bytes of a tensor's elements to `*total`; an overflow gives the largest number. */
void fc_scan_add_bytes(uint64_t *total, const fc_tensor *tensor);
