/*
 * The journal of a conversion that can be resumed: what it converts, and which tiles of the staged files are finished.
 * Records are only appended, each with a CRC-64 of it and all before it. The first one that is torn or damaged ends the
 * journal, and what follows is removed before the next one is appended. A tile
 * record is written after the data of its tiles is on the disk, so whatever the journal says is true, also after a
 * power failure.
 *
 *     identity  texts that say what is converted, and how (resume_identity.h)
 *     file      a staged file was made: its inode, its size, a digest of its layout, and the ID of its upload. Forgets
 *               its tiles
 *     tiles     ranges of elements that are finished, with their digests, and what was read for them of the sources
 */
#pragma once

#include "integrity/source_crc.h"
#include "integrity/tile_digest.h"

/** Consecutive elements of an item that are written. */
typedef struct fc_done_tiles {
    uint64_t file, item;  /**< numbers of the staged file, and of the item in it */
    int64_t start, count; /**< elements, in the row-major order of the item */
    uint64_t bytes;
    fc_tile_digest digest;
    uint64_t offset; /**< bytes before them in the file; 0 in a journal that was read */
} fc_done_tiles;

/** What was added to one sum of a source (fc_source_crc_save). */
typedef struct fc_done_sum {
    uint64_t source, index;
    fc_saved_sum sum;
} fc_done_sum;

/** A file that is being written. */
typedef struct fc_written_file {
    uint64_t inode; /**< of a file in a bucket: the number of the run that began its upload */
    uint64_t size;
    uint64_t layout; /**< digest of where its items are */
    char *upload;    /**< ID of the upload of a file in a bucket; else NULL */
} fc_written_file;

typedef struct fc_tile_journal {
    char *path;
    bool remote;    /**< it is in a bucket */
    int fd;         /**< of a journal in a bucket: a copy in memory, which fc_tile_journal_sync writes there */
    uint64_t end;   /**< bytes of whole records */
    uint64_t crc;   /**< of them */
    bool torn;      /**< other bytes follow */
    char *identity; /**< NULL: there is none, and nothing else */
    size_t identity_size;
    fc_written_file *files; /**< by number */
    size_t nfiles, most_files;
    fc_done_tiles *tiles;
    size_t ntiles, most_tiles;
    fc_done_sum *sums;
    size_t nsums, most_sums;
} fc_tile_journal;

/** Opens the journal, and reads it if it is there. Each tile that it names is one of a known file, and has elements.
 *  @param journal free it also after a failure. */
fc_code fc_tile_journal_open(const char *path, fc_tile_journal *journal, fc_error *err);
void fc_tile_journal_free(fc_tile_journal *journal);

/** Empties the journal and begins it, durably, or in a bucket with the first tile record. */
fc_code fc_tile_journal_begin(fc_tile_journal *journal, const char *identity, size_t size, fc_error *err);

/** Says that the staged file `number` was made. Durable only after fc_tile_journal_sync. */
fc_code fc_tile_journal_file(fc_tile_journal *journal, uint64_t number, const fc_written_file *file, fc_error *err);

/** Adds a tile record. Durable only after fc_tile_journal_sync. */
fc_code fc_tile_journal_add(fc_tile_journal *journal, const fc_done_tiles *tiles, size_t ntiles,
                            const fc_done_sum *sums, size_t nsums, fc_error *err);

fc_code fc_tile_journal_sync(const fc_tile_journal *journal, fc_error *err);
