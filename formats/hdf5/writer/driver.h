/*
 * The file driver under the HDF5 files that we write.
 *
 * Why not HDF5's own (sec2): when the disk fills up, closing its file fails half way, leaves the library in a state in
 * which the next H5Fclose crashes (1.10.8, measured), and locking makes it refuse file systems without locks. This
 * driver remembers the first error, lets the library believe that all is well, and the caller asks afterwards.
 * It also decides where things lie: headers together, data aligned.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_WRITER_DRIVER_H
#define FSDPCKPT_FORMATS_HDF5_WRITER_DRIVER_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include <hdf5.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    FC_H5_LARGE = 65536,      /**< data of this many bytes … */
    FC_H5_LARGE_ALIGN = 4096, /**< … starts at a multiple of this: O_DIRECT, reflinks, huge pages */
    FC_H5_SMALL_ALIGN = 64    /**< smaller data at a multiple of this: a cache line, as torch.save does */
};

/** Where the headers of a file are: in ascending order, with data or nothing between them. */
typedef struct fc_h5_block {
    uint64_t at, size;
} fc_h5_block;
typedef struct fc_h5_blocks {
    fc_h5_block *items; /**< malloc'ed */
    size_t count, capacity;
} fc_h5_blocks;

/** What passes between a file's writer and its driver. */
typedef struct fc_h5_channel {
    bool reserving;    /**< in: space asked for now is for tensor data. libhdf5 says "data" for heaps of strings too */
    bool shared;       /**< in: others write into the file while it is open, so no copy of a part of it is kept */
    bool placing;      /**< in: a chunk is given its place; its bytes come later, so that they are not written here */
    uint64_t place;    /**< out: where that is */
    int errnum;        /**< out: of the first system call that failed; 0: none */
    const char *doing; /**< out: what it was for, "writing" … */
    uint64_t offset;   /**< out: bytes, in the file */
    fc_h5_blocks blocks; /**< out: to be freed by the caller when the file is closed */
} fc_h5_channel;

/** @return a new driver id, to be given to H5FDunregister, or a negative number. */
hid_t fc_h5_driver_register(void);

/**
 * Makes `fapl` create files (O_EXCL) through `driver`.
 * @param headers bytes that the headers will take, about: so much is set aside for them in one place.
 * @param channel in use while the file is open.
 */
herr_t fc_h5_driver_use(hid_t fapl, hid_t driver, uint64_t headers, fc_h5_channel *channel);

#endif
