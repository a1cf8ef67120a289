/*
 * Reads parts of a large compressed chunk: see packed_stream.h. A part is decoded by the open stream that is the least
 * way before it, or by a new one. Each stream has decoded everything from the start, so the one that reaches the end of
 * the data has its CRC-32.
 */
#include "dcp/packed_stream.h"

#include "base/crc.h"
#include "dcp/extent.h"
#include "dcp/files.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_OPEN = 4 };

/* A stream and how far it is. */
typedef struct walker {
    fc_dcp_stream stream;
    uint32_t file;
    uint64_t offset;            /* of the item */
    fc_torch_item item;         /* the beginning of the archive */
    const fc_zip_entry *record; /* of the tensor */
    uint64_t done;              /* decoded bytes */
    uint32_t crc;               /* of the bytes of `record` so far */
    uint64_t last_use;
    unsigned char last[FC_DCP_LAST]; /* the last decoded bytes */
} walker;

struct fc_dcp_streams {
    pthread_mutex_t lock;
    walker *idle[MOST_OPEN];
    uint64_t clock;
};

fc_dcp_streams *fc_dcp_streams_new(void) {
    fc_dcp_streams *streams = calloc(1, sizeof *streams);
    if (streams && pthread_mutex_init(&streams->lock, NULL) != 0) {
        free(streams);
        return NULL;
    }
    return streams;
}

static void walker_free(walker *w) {
    if (w) {
        fc_dcp_stream_free(&w->stream);
        fc_torch_item_close(&w->item);
        free(w);
    }
}

void fc_dcp_streams_free(fc_dcp_streams *streams) {
    if (!streams) {
        return;
    }
    for (int i = 0; i < MOST_OPEN; i++) {
        walker_free(streams->idle[i]);
    }
    pthread_mutex_destroy(&streams->lock);
    free(streams);
}

/* Takes the open stream of the item that is the least way before byte `at`. @return NULL if there is none. */
static walker *take_idle(fc_dcp_streams *streams, const fc_chunk *chunk, uint64_t at) {
    int best = -1;
    pthread_mutex_lock(&streams->lock);
    for (int i = 0; i < MOST_OPEN; i++) {
        const walker *w = streams->idle[i];
        if (w && w->file == chunk->place.file && w->offset == chunk->place.offset && w->done <= at &&
            (best < 0 || w->done > streams->idle[best]->done)) {
            best = i;
        }
    }
    walker *found = best < 0 ? NULL : streams->idle[best];
    if (found) {
        streams->idle[best] = NULL;
    }
    pthread_mutex_unlock(&streams->lock);
    return found;
}

/* Keeps a stream for the next part, in the place of the one that was used longest ago. */
static void keep_idle(fc_dcp_streams *streams, walker *w) {
    int place = 0;
    pthread_mutex_lock(&streams->lock);
    w->last_use = ++streams->clock;
    for (int i = 0; i < MOST_OPEN && streams->idle[place]; i++) {
        if (!streams->idle[i] || streams->idle[i]->last_use < streams->idle[place]->last_use) {
            place = i;
        }
    }
    walker *old = streams->idle[place];
    streams->idle[place] = w;
    pthread_mutex_unlock(&streams->lock);
    walker_free(old);
}

static fc_code begin_walk(walker *w, int fd, const char *path, const fc_chunk *chunk, fc_error *err) {
    fc_torch_tensor t = {0};
    w->file = chunk->place.file;
    w->offset = chunk->place.offset;
    FC_TRY(fc_dcp_open_packed(fd, path, chunk, &w->item, err));
    FC_TRY(fc_torch_tensor_decode(w->item.pickle, w->item.pickle->root, &t, err));
    FC_TRY(fc_torch_item_storage(&w->item, &t, &w->record, err));
    return fc_dcp_stream_begin(&w->stream, fd, path, chunk, err);
}

/* Notes decoded bytes: their part of the CRC-32, and the last ones. */
static void note(walker *w, const unsigned char *bytes, size_t n) {
    const uint64_t data = w->record->data - w->offset;
    if (w->done + n > data) {
        const size_t before = data > w->done ? (size_t)(data - w->done) : 0;
        w->crc = fc_crc32(w->crc, bytes + before, n - before);
    }
    const size_t kept = n < FC_DCP_LAST ? FC_DCP_LAST - n : 0;
    memmove(w->last, w->last + (FC_DCP_LAST - kept), kept);
    memcpy(w->last + kept, bytes + (n - (FC_DCP_LAST - kept)), FC_DCP_LAST - kept);
    w->done += n;
}

static fc_code decode(walker *w, unsigned char *out, size_t size, fc_error *err) {
    size_t made;
    FC_TRY(fc_dcp_stream_read(&w->stream, out, size, &made, err));
    if (made < size) {
        return fc_fail(err, FC_ECORRUPT, "the zstd stream decodes to fewer bytes than its archive has");
    }
    note(w, out, size);
    return FC_OK;
}

/* Decodes what is before byte `at`, and drops it. */
static fc_code skip_to(walker *w, uint64_t at, fc_error *err) {
    unsigned char *scratch = w->done < at ? malloc(FC_DCP_BLOCK) : NULL;
    fc_code rc = w->done < at && !scratch ? fc_no_memory(err, w->stream.path) : FC_OK;
    while (rc == FC_OK && w->done < at) {
        const uint64_t left = at - w->done;
        rc = decode(w, scratch, left < FC_DCP_BLOCK ? (size_t)left : FC_DCP_BLOCK, err);
    }
    free(scratch);
    return rc;
}

static fc_code read_part(walker *w, const fc_chunk *chunk, uint64_t at, unsigned char *buf, size_t size,
                         fc_error *err) {
    const uint64_t end = w->record->data - w->offset + w->record->size;
    FC_TRY(skip_to(w, at, err));
    FC_TRY(decode(w, buf, size, err));
    if (w->done < end) {
        return FC_OK;
    }
    return fc_dcp_check_tail(&w->stream, chunk, &w->item.zip, w->record, &w->item.zip.head, w->last,
                             w->done < FC_DCP_LAST ? (size_t)w->done : FC_DCP_LAST, w->crc, err);
}

fc_code fc_dcp_read_part(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, uint64_t at, void *buf,
                         size_t size, fc_error *err) {
    const fc_dcp_listed listed = fc_dcp_find_listed(tensor, index);
    const fc_chunk *chunk = &listed.chunk;
    const char *path = checkpoint->files[chunk->place.file].path;
    fc_dcp_streams *streams = fc_dcp_streams_of(checkpoint);
    fc_code rc = FC_OK;
    int fd;
    FC_TRY(fc_dcp_acquire(checkpoint, chunk->place.file, &fd, err));
    walker *w = take_idle(streams, chunk, at);
    if (!w) {
        w = calloc(1, sizeof *w);
        rc = w ? begin_walk(w, fd, path, chunk, err) : fc_no_memory(err, path);
    }
    if (rc == FC_OK) {
        w->stream.fd = fd;
        rc = read_part(w, chunk, at, buf, size, err);
        rc = rc == FC_OK ? rc : fc_context(err, rc, "%s: offset %" PRIu64, path, chunk->place.offset);
    }
    fc_dcp_release(checkpoint, chunk->place.file);
    if (rc == FC_OK && !w->stream.finished) {
        keep_idle(streams, w);
    } else {
        walker_free(w);
    }
    return rc;
}
