/*
 * Reads the zip archive that torch.save writes, at a range of a file: an item of a DCP `.distcp`, or a whole `.pt`.
 *
 * It finds the records and the location of their bytes in the file, so that tensor data is never copied here. It
 * refuses everything that could make two readers see different bytes: bytes before the first record, names that differ
 * only in case, overlaps, local headers that disagree with the central directory, directory bits, encryption.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stddef.h>
#include <stdint.h>

enum { FC_ZIP_STORED = 0, FC_ZIP_DEFLATED = 8 };

/** Deflate compresses at most 1032 to 1. A larger declared size must be wrong, and is not allocated. */
enum { FC_ZIP_MAX_RATIO = 1040 };

/** The size of a record that is only known when the archive was read to its end. */
#define FC_ZIP_UNKNOWN (UINT64_MAX / 2)

/** One record. */
typedef struct fc_zip_entry {
    const char *name; /**< NUL-terminated; contains no other NUL */
    uint64_t data;    /**< offset of the stored bytes in the file */
    uint64_t stored;  /**< number of stored bytes */
    uint64_t size;    /**< bytes after inflating; equals `stored` for FC_ZIP_STORED */
    uint64_t header;  /**< offset of the local header in the file, in bytes */
    uint32_t crc;     /**< CRC-32 of the inflated bytes; 0 if torch was told not to compute it */
    uint16_t method;  /**< FC_ZIP_STORED or FC_ZIP_DEFLATED */
    uint16_t flags;
} fc_zip_entry;

/** A range of the archive in memory. */
typedef struct fc_zip_window {
    unsigned char *bytes;
    uint64_t offset; /* offset in the file, in bytes */
    size_t size;
} fc_zip_window;

/** An open archive; owned by the caller. The descriptor stays the caller's. */
typedef struct fc_zip {
    const char *path; /* borrowed */
    int fd;
    uint64_t offset, length; /* the range in the file, in bytes */
    fc_zip_entry *entries;   /* in the order of the central directory */
    size_t nentries;
    fc_zip_entry **sorted; /* by name */
    char *names;
    uint64_t records_end;            /* offset of the central directory in the file, in bytes */
    fc_zip_window head, tail, other; /* `other` is a range that the first two do not cover */
} fc_zip;

/**
 * Reads the directory and checks every local header against it. Small archives take one pread, items with a large
 * tensor two.
 * @param path for messages; borrowed until fc_zip_close.
 */
fc_code fc_zip_open(int fd, const char *path, uint64_t offset, uint64_t length, fc_zip *zip, fc_error *err);

/**
 * Like fc_zip_open, for a range whose bytes were already read: `length` malloc'ed bytes, freed by fc_zip_close, or here
 * after a failure. NULL: reads them like fc_zip_open.
 */
fc_code fc_zip_open_read(int fd, const char *path, uint64_t offset, uint64_t length, unsigned char *bytes, fc_zip *zip,
                         fc_error *err);

/**
 * Like fc_zip_open, for an archive of which only its beginning and its end are in memory. Both are borrowed, and may
 * overlap. Close it with fc_zip_close_windows.
 */
fc_code fc_zip_open_windows(const char *path, uint64_t offset, uint64_t length, fc_zip_window head, fc_zip_window tail,
                            fc_zip *zip, fc_error *err);
void fc_zip_close_windows(fc_zip *zip);

/**
 * Reads the local headers in the first `size` bytes of an archive whose end was not read: those of all records that
 * begin there, the last of which may end after them. A record with the data of a tensor is the last if its header does
 * not say its size, which is FC_ZIP_UNKNOWN then. Nothing is compared with the directory.
 * @param bytes malloc'ed; freed by fc_zip_close, or here after a failure.
 */
fc_code fc_zip_open_head(const char *path, uint64_t offset, unsigned char *bytes, size_t size, fc_zip *zip,
                         fc_error *err);

/** Frees the content of `zip`, which may be zeroed. */
void fc_zip_close(fc_zip *zip);

/** @return the record called `name`, or NULL. */
const fc_zip_entry *fc_zip_find(const fc_zip *zip, const char *name);

/**
 * Reads a record into memory. Inflates it if it is compressed, and checks its CRC if it has one.
 * @param bytes receives malloc'ed memory of entry->size bytes, owned by the caller.
 */
fc_code fc_zip_read(fc_zip *zip, const fc_zip_entry *entry, unsigned char **bytes, fc_error *err);
