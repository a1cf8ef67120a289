/*
 * An HDF5 file driver that reads a descriptor opened beforehand: in the confined reader process no path can be opened.
 * Runs in the child only.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_READER_PROCESS_VFD_H
#define FSDPCKPT_FORMATS_HDF5_READER_PROCESS_VFD_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#define H5_USE_110_API
#include <hdf5.h>

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

/**
 * What the driver notes while libhdf5 reads through it.
 *
 * The place of a chunk: libhdf5 1.10 tells it only by walking the whole index (and without the user block), but
 * H5Dread_chunk finds a chunk at once and asks the driver for its bytes. While `armed`, the driver notes where raw data
 * was asked for and reads none.
 *
 * Failed reads: libhdf5 takes some of them for "not there", which would become fill values.
 */
typedef struct fc_h5_capture {
    bool armed, hit;
    uint64_t address, size;
    bool failed; /**< a read failed since this was last cleared, one past the end included */
    int errnum;  /**< the system's error of the last read that it refused; 0: none */
} fc_h5_capture;

/** A file for the driver. It must outlive every HDF5 file opened through it. */
typedef struct fc_h5_source {
    const char *path; /**< the name to give to H5Fopen */
    int fd;
    const struct stat *st; /**< of fd: the confined process may not even ask */
    bool may_open;         /**< other names are opened from the file system, else refused */
    fc_h5_capture *capture;
} fc_h5_source;

/** @return the driver's id, or a negative number. */
hid_t fc_h5_vfd_register(void);

/** @return a file access property list that reads `source` through the driver, or a negative number. */
hid_t fc_h5_vfd_fapl(hid_t driver, const fc_h5_source *source);

#endif
