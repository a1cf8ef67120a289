/*
 * Examines an object before it is passed on. Finds its bytes, and reads the archive's directory and its pickle.
 */
#include "fsdpckpt/format.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/try.h"

#include <unistd.h>

/* The archive is a range of a file: only its headers and its pickle are read. */
static fc_code examine_file(const fc_object_encoding *encoding, const fc_checkpoint *checkpoint,
                            const fc_extent *extent, fc_object_verdict *out, fc_error *err) {
    const char *path = checkpoint->files[extent->file].path;
    uint64_t size;
    int fd;
    FC_TRY(fc_open_input(path, &fd, &size, err));
    fc_code rc = encoding->examine(fd, path, extent->offset, extent->length, out, err);
    close(fd);
    return rc;
}

/* The archive is compressed, in several chunks, or made when it is read: all of it is read. */
static fc_code examine_memory(const fc_object_encoding *encoding, const fc_checkpoint *checkpoint,
                              const fc_tensor *object, fc_object_verdict *out, fc_error *err) {
    unsigned char *bytes;
    FC_TRY(fc_read_object(checkpoint, object, &bytes, err));
    return encoding->examine_memory(bytes, (uint64_t)object->shape[0], checkpoint->path, out, err);
}

/* Whether the object's bytes are one range of a file. */
static bool is_range(const fc_tensor *object, const fc_extent *extent) {
    return extent->codec == FC_CODEC_RAW && extent->first == 0 && extent->strides[0] == 1 &&
           extent->length == (uint64_t)object->shape[0];
}

fc_code fc_checkpoint_object_verdict(const fc_checkpoint *checkpoint, const fc_tensor *object, fc_object_verdict *out,
                                     fc_error *err) {
    fc_extent extent = {0};
    *out = (fc_object_verdict){.risk = FC_OBJECT_HARMLESS};
    if (!object->object || object->object->refusal || object->nchunks == 0) {
        return FC_OK;
    }
    const fc_object_encoding *encoding = fc_object_encoding_find(object->object->encoding);
    if (!encoding) {
        return FC_OK;
    }
    if (object->nchunks == 1) {
        FC_TRY(fc_checkpoint_extent(checkpoint, object, 0, &extent, err));
    }
    fc_code rc = object->nchunks == 1 && is_range(object, &extent)
                     ? examine_file(encoding, checkpoint, &extent, out, err)
                     : examine_memory(encoding, checkpoint, object, out, err);
    return rc == FC_OK ? rc : fc_context(err, rc, "object %.256s", object->name);
}
