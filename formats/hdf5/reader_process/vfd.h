/*
 * An HDF5 file driver for a descriptor that was opened beforehand, because the confined reader process cannot open
 * paths. Runs only in the child.
 */
#pragma once

#define H5_USE_110_API
#include <hdf5.h>

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

/**
 * Information that the driver records while libhdf5 reads through it.
 *
 * The offset of a chunk: libhdf5 1.10 returns it only by walking the whole index (and ignores the user block), but
 * H5Dread_chunk finds a chunk at once and asks the driver for its bytes. While `armed`, the driver records the address
 * of raw data and reads nothing.
 *
 * Failed reads: libhdf5 treats some of them as "not stored", which would give fill values.
 */
typedef struct fc_h5_capture {
    bool armed, hit;
    uint64_t address, size;
    bool failed;                /**< a read has failed since this was last cleared, e.g. past the end */
    int errnum;                 /**< errno of the last read that the system refused; 0: none */
    struct fc_h5_names *others; /**< the other files that are read; NULL: they are not listed */
} fc_h5_capture;

/** Adds the name of another file that is read, unless the list has it. NULL does nothing. */
void fc_h5_note_other(struct fc_h5_names *others, const char *name);

/** Bytes that libhdf5 sees instead of those of the file. */
typedef struct fc_h5_patch {
    uint64_t at;
    uint32_t size;
    unsigned char bytes[4];
} fc_h5_patch;

/** The patches of headers. The user frees `items`. */
typedef struct fc_h5_patches {
    fc_h5_patch *items;
    size_t count, cap;
} fc_h5_patches;

/** Where an HDF5 file is in another file. */
typedef struct fc_h5_span {
    uint64_t offset, length; /**< in bytes; a length of 0 is the whole file */
} fc_h5_span;

/** A file for the driver. It must outlive every HDF5 file opened through it. */
typedef struct fc_h5_source {
    const char *path; /**< the name to pass to H5Fopen */
    int fd;
    const struct stat *st; /**< the attributes of fd, because the confined process cannot call fstat. Its size is that
                              of the HDF5 file */
    bool may_open;         /**< whether other names may be opened from the file system */
    fc_h5_capture *capture;
    fc_h5_patches *patches;      /**< NULL: none */
    uint64_t base;               /**< offset of the HDF5 file in the file */
    struct fc_h5_asking *asking; /**< of a file on a server: who is asked for its bytes. NULL: they are read from fd */
} fc_h5_source;

/** Reads bytes of the source as they are in the file. @return false if it has no such bytes. */
bool fc_h5_vfd_read(const fc_h5_source *source, uint64_t at, size_t size, unsigned char *bytes);

/** Registers the driver. @return its id, or a negative number. */
hid_t fc_h5_vfd_register(void);

/** @return a file access property list that reads `source` through the driver, or a negative number. */
hid_t fc_h5_vfd_fapl(hid_t driver, const fc_h5_source *source);
