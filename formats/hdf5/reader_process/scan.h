/*
 * The code that runs in the reader process: it walks HDF5 files with libhdf5 and sends records, and reads boxes that
 * only libhdf5 can decode. The parent trusts nothing of it.
 */
#pragma once

#include "hdf5/reader_process/newer.h"
#include "hdf5/reader_process/records.h"
#include "hdf5/reader_process/vfd.h"
#include "hdf5/schema.h"

/** One input file, opened by the parent. */
typedef struct fc_h5_input {
    const char *path;
    int fd;
    uint64_t lent;  /**< of a file on a server: its size, and fd is the socket for the answers (ask.h). Else 0 */
    struct stat st; /**< set by fc_h5_scan_prepare. Its size is that of the HDF5 file */
    fc_h5_span span;
} fc_h5_input;

/** A job for fc_h5_child_start: the context of fc_h5_scan_run and fc_h5_box_run. */
typedef struct fc_h5_scan {
    fc_h5_input *inputs;
    size_t ninputs;
    bool follow_external;
    const char *plugins; /**< a folder with filters to load; NULL: none */
    /* Only for fc_h5_box_run: the box of one dataset, or all of it if ndim is -1. */
    const char *dataset;
    int ndim;
    const int64_t *offsets, *sizes;
    uint64_t bytes; /* size of the box in bytes */
    int requests;   /* only for fc_h5_serve_run: the socket on which it receives files */
    hid_t driver;   /* set by fc_h5_scan_prepare */
} fc_h5_scan;

void fc_h5_scan_prepare(void *context);
int fc_h5_scan_run(void *context, int out, fc_h5_shared *shared);
int fc_h5_box_run(void *context, int out, fc_h5_shared *shared);
int fc_h5_serve_run(void *context, int out, fc_h5_shared *shared);

/* ---- shared between the files of the reader process ---- */

/** A file that is being walked. */
typedef struct fc_h5_walk {
    const fc_h5_scan *scan;
    fc_h5_sink *out;
    fc_h5_shared *shared;
    fc_h5_capture *capture;
    const fc_h5_source *source;
    fc_h5_newer newer; /**< of the object that is visited */
    const char *file_path;
    unsigned superblock; /**< its version */
    hid_t file;
    unsigned long fileno;
    bool ours;
    bool copies; /**< a shard file or index of ours, whose virtual datasets show data in other ranks' files */
    bool index;  /**< our index.h5 of a sharded checkpoint, which contains only mappings */
    bool failed; /**< a FAILURE was sent, so the walk must stop */
} fc_h5_walk;

/** Sends the records of one file. @return false if it cannot be read; a FAILURE was sent, unless sending failed. */
bool fc_h5_scan_file(const fc_h5_scan *scan, const fc_h5_input *input, fc_h5_sink *out, fc_h5_shared *shared);

/** Describes the open dataset at `path` in records. `present` is the set of the schema's attributes that it has. */
void fc_h5_scan_dataset(fc_h5_walk *walk, hid_t dataset, const char *path, const unsigned char *lists, size_t nlists,
                        bool in_other_file, uint32_t present);

/**
 * Reads the filter pipeline of a dataset into its record, which has its type, path and lists. The engine undoes the
 * filters; else libhdf5 does, if it has all of them.
 * @param library receives whether libhdf5 must.
 * @return false, after a report, if neither can.
 */
bool fc_h5_scan_filters(fc_h5_walk *walk, hid_t dcpl, fc_h5_dataset *d, bool *library);

/** Registers filters that libhdf5 lacks. */
void fc_h5_lend_filters(void);

/** Loads the plugins in a folder that have filters which libhdf5 still lacks. NULL: none. */
void fc_h5_load_filters(const char *folder);

/** Records an unreadable dataset and the reason. */
void fc_h5_scan_unreadable(fc_h5_walk *walk, const char *path, const unsigned char *lists, size_t nlists, fc_code code,
                           const char *fmt, ...) __attribute__((format(printf, 6, 7)));

/** Records a dataset that is unreadable without a plugin. */
void fc_h5_scan_without_plugin(fc_h5_walk *walk, const char *path, const unsigned char *lists, size_t nlists,
                               const char *message);

/** Records an object whose data is in another file, which is not followed. */
void fc_h5_scan_elsewhere(fc_h5_walk *walk, const char *path, const unsigned char *lists, size_t nlists,
                          const char *message);

/** Sends a FAILURE with a reason, which ends the walk. */
void fc_h5_scan_failure(fc_h5_walk *walk, fc_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/** Writes the innermost message of libhdf5's error stack to `buf`. */
void fc_h5_library_error(char *buf, size_t size);

/** Like fc_h5_library_error, for something in the file that libhdf5 cannot read. @return FC_EUNSUPPORTED if a newer
 * libhdf5 wrote it, else FC_ECORRUPT. */
fc_code fc_h5_library_failure(const fc_h5_walk *walk, char *buf, size_t size);

/** @return whether the bytes of the dataset are elsewhere: 0 no, 1 virtual dataset, 2 external storage. */
int fc_h5_indirect(hid_t dcpl);

/**
 * Checks that the files with the bytes of a dataset may be followed and exist.
 * @param others    receives the names of the files of external storage; may be NULL.
 * @param directory receives the prefix for external files: that of `file_path`, or "" for none.
 * @return false with the reason in `why`.
 */
bool fc_h5_sources_exist(hid_t file, const char *file_path, hid_t dcpl, bool follow, struct fc_h5_names *others,
                         char *directory, size_t size, char *why, size_t why_size);

/** A chunked dataset with elements. */
typedef struct fc_h5_chunked {
    fc_h5_walk *walk;
    hid_t dataset, space;
    int ndim;
    const hsize_t *dims, *chunk;
    const fc_h5_chunk_index *index; /**< NULL: libhdf5 reads its index */
} fc_h5_chunked;

/** How to list its chunks. */
typedef enum fc_h5_way {
    FC_H5_NO_CHUNKS, /**< no chunk is stored */
    FC_H5_BY_GRID,
    FC_H5_BY_NUMBER,
    FC_H5_BY_INDEX,   /**< libhdf5 would misread the index */
    FC_H5_TOO_SPARSE, /**< neither way is fast enough */
    FC_H5_DAMAGED
} fc_h5_way;

/** Chooses a way before the DATASET record is sent, and returns the number of stored chunks. */
fc_h5_way fc_h5_choose_way(const fc_h5_chunked *chunked, hsize_t *stored);

/** Sends the stored chunks. @return false when the index is damaged. */
bool fc_h5_send_chunks(const fc_h5_chunked *chunked, fc_h5_way way, hsize_t stored);
