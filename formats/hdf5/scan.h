/*
 * What runs in the reader process: walks HDF5 files with libhdf5 and sends records; reads boxes that only libhdf5 can
 * decode. Nothing here is trusted by the parent.
 */
#ifndef FSDPCKPT_FORMATS_HDF5_SCAN_H
#define FSDPCKPT_FORMATS_HDF5_SCAN_H

#include "records.h"
#include "vfd.h"

/** One input file, opened by the parent. */
typedef struct fc_h5_input {
    const char *path;
    int fd;
    struct stat st; /**< set by fc_h5_scan_prepare */
} fc_h5_input;

/** A job for fc_h5_child_start: context of fc_h5_scan_run and fc_h5_box_run. */
typedef struct fc_h5_scan {
    fc_h5_input *inputs;
    size_t ninputs;
    bool follow_external;
    /* fc_h5_box_run only: the box of one dataset, or all of it when ndim is -1. */
    const char *dataset;
    int ndim;
    const int64_t *offsets, *sizes;
    uint64_t bytes; /* how many the box has */
    hid_t driver;   /* set by fc_h5_scan_prepare */
} fc_h5_scan;

void fc_h5_scan_prepare(void *context);
int fc_h5_scan_run(void *context, int out, fc_h5_shared *shared);
int fc_h5_box_run(void *context, int out, fc_h5_shared *shared);

/* ---- shared between scan.c and scan_dataset.c ---- */

/** One file being walked. */
typedef struct fc_h5_walk {
    const fc_h5_scan *scan;
    fc_h5_sink *out;
    fc_h5_shared *shared;
    fc_h5_capture *capture;
    const char *file_path;
    hid_t file;
    unsigned long fileno;
    bool ours;
    bool failed; /**< a FAILURE has been sent: stop */
} fc_h5_walk;

/** Describes the open dataset at `path` in records. */
void fc_h5_scan_dataset(fc_h5_walk *walk, hid_t dataset, const char *path, const unsigned char *lists, size_t nlists,
                        bool in_other_file);

/** Records a dataset whose bytes are not to be had, with the reason. */
void fc_h5_scan_unreadable(fc_h5_walk *walk, const char *path, const unsigned char *lists, size_t nlists, fc_code code,
                           const char *fmt, ...) __attribute__((format(printf, 6, 7)));

/** Ends everything with a reason. */
void fc_h5_scan_failure(fc_h5_walk *walk, fc_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/** The innermost message of libhdf5's error stack, into `buf`. */
void fc_h5_library_error(char *buf, size_t size);

/**
 * Opens a dataset so that external storage resolves beside its file, and checks that the files it takes bytes from
 * exist: libhdf5 reads what is missing as fill values, in silence.
 * @return a dataset, or a negative number and the reason in `why`.
 */
hid_t fc_h5_open_dataset(hid_t file, const char *file_path, const char *path, bool follow, char *why, size_t size);

/** Whether the dataset takes its bytes from other places: 0 no, 1 virtual, 2 external storage. */
int fc_h5_indirect(hid_t dcpl);

#endif
