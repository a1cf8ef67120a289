/*
 * A zstd stream of an item that is decoded part by part, and the streams that stay open between two reads of a large
 * chunk.
 */
#pragma once

#include "codec/zstd.h"
#include "dcp/packed.h"

enum { FC_DCP_BLOCK = 128 << 10 /* bytes; the most that a block of a frame decodes to */ };

typedef struct fc_dcp_stream {
    int fd; /* borrowed */
    const char *path;
    uint64_t at, end; /* the compressed bytes that were not read yet */
    fc_zstd_decoder *decoder;
    unsigned char *in; /* FC_DCP_BLOCK bytes */
    size_t taken, filled;
    bool finished;
} fc_dcp_stream;

/** Begins the stream of an item. The caller frees it, also after a failure. */
fc_code fc_dcp_stream_begin(fc_dcp_stream *stream, int fd, const char *path, const fc_chunk *chunk, fc_error *err);
void fc_dcp_stream_free(fc_dcp_stream *stream);

/** Decodes up to `size` bytes. `*made` is less only at the end of the stream. Messages do not name the file. */
fc_code fc_dcp_stream_read(fc_dcp_stream *stream, unsigned char *out, size_t size, size_t *made, fc_error *err);

/**
 * Reads what follows the data of a tensor, and checks the whole archive: its directory, its end, and the CRC-32.
 * @param head  the open beginning of the archive. @param start its bytes, which are borrowed.
 * @param last  the decoded bytes before this place, at least 4096 unless there are fewer. @param nlast their number
 * @param crc   the CRC-32 of the data of `record`.
 */
fc_code fc_dcp_check_tail(fc_dcp_stream *stream, const fc_chunk *chunk, const fc_zip *head, const fc_zip_entry *record,
                          const fc_zip_window *start, const unsigned char *last, size_t nlast, uint32_t crc,
                          fc_error *err);

enum { FC_DCP_LAST = 4096 /* bytes before the tail, so that the last bytes of the archive are in one place */ };

/** Streams that are open: at most a few. */
typedef struct fc_dcp_streams fc_dcp_streams;
fc_dcp_streams *fc_dcp_streams_new(void);
void fc_dcp_streams_free(fc_dcp_streams *streams);
