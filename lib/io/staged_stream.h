/*
 * A file in a bucket that is made from its first byte of data to its last one, and whose header, which stands before
 * them, is known last. The first part is in memory until then. Each of the others is sent when it is full, so nothing
 * of the file need be known before.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stddef.h>
#include <stdint.h>

enum {
    FC_STREAM_PART = 5 << 20, /**< bytes of a part; the last ones of more than 20 GiB are larger */
    FC_STREAM_MEMORY = 2 * FC_STREAM_PART
};

typedef struct fc_staged_stream fc_staged_stream;

/**
 * @param path the file, in the folder of fc_staged_path (staged_objects.h). It exists when it is finished.
 * @param most_header the most bytes that its header may have
 */
fc_code fc_staged_stream_new(const char *path, uint64_t most_header, fc_staged_stream **out, fc_error *err);

/** Appends data, and sends the part that it fills. One thread at a time. */
fc_code fc_staged_stream_add(fc_staged_stream *stream, const unsigned char *bytes, size_t size, fc_error *err);

/** Puts the header in front, and leaves the file to fc_staged_publish. */
fc_code fc_staged_stream_finish(fc_staged_stream *stream, const char *header, size_t size, fc_error *err);

/** Aborts what is not finished. NULL is allowed. */
void fc_staged_stream_free(fc_staged_stream *stream);
