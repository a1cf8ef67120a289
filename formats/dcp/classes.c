/*
 * Tensor subclasses, such as torchao's quantized weights. `.metadata` lists them as dense tensors of the dtype that
 * they represent; only their archives name the class. A quantized archive is shorter than the elements that it
 * represents. So an archive that is too short for a plain tensor is opened together with the checkpoint. If it contains
 * a subclass, small tensors may be of one, too, and the archive of each tensor's first chunk is opened. These tensors
 * are listed as unreadable values. If no archive is short, none is opened, and a subclass is refused when its bytes are
 * read, for the same reason.
 */
#include "dcp/extent.h"
#include "dcp/packed.h"
#include "dcp/stages.h"

#include "base/checked.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "torch/object/item.h"

#include <string.h>
#include <unistd.h>

enum {
    LEAST_ARCHIVE = 1024, /* about the size of a plain tensor's archive without its elements, in bytes */
    ENOUGH_PLAIN = 16 /* after this many short archives of plain tensors (deflated, strides of 0), no more are opened */
};

static bool is_short(const fc_tensor *tensor) {
    const fc_chunk *chunk = &tensor->chunks[0];
    int64_t elements;
    uint64_t bytes, least;
    return fc_dcp_is_packed(chunk) || (fc_numel(tensor->ndim, chunk->dims + tensor->ndim, &elements) &&
                                       fc_mul_u64((uint64_t)elements, fc_dtype_size(tensor->dtype), &bytes) &&
                                       fc_add_u64(bytes, LEAST_ARCHIVE, &least) && chunk->place.length < least);
}

static bool is_in_archive(const fc_tensor *tensor) {
    return !tensor->object && tensor->nchunks > 0 && !fc_dcp_in_safetensors(tensor, &tensor->chunks[0]);
}

/* Whether the tensor of an archive is refused. A damaged or missing archive is reported when it is read. */
static bool is_refused(int fd, const char *path, const fc_chunk *chunk, fc_error *why) {
    fc_torch_item item;
    fc_torch_tensor ignored;
    if (fc_dcp_open_item(fd, path, chunk, &item, NULL) != FC_OK) {
        return false;
    }
    fc_code rc = fc_torch_tensor_decode(item.pickle, item.pickle->root, &ignored, why);
    fc_torch_item_close(&item);
    return rc == FC_EUNSUPPORTED;
}

/* @return whether the archive contains a subclass. A damaged or missing archive is reported when it is read. */
static bool is_of_a_class(const fc_checkpoint *checkpoint, const fc_tensor *tensor, fc_error *why) {
    const fc_chunk *chunk = &tensor->chunks[0];
    const char *path = checkpoint->files[chunk->place.file].path;
    uint64_t size;
    int fd;
    if (fc_open_input(path, &fd, &size, NULL) != FC_OK) {
        return false;
    }
    bool refused = is_refused(fd, path, chunk, why);
    close(fd);
    return refused;
}

/* A class of torchao whose parts are listed, too. */
static fc_code open_parts(fc_dcp_builder *b, fc_tensor *tensor) {
    fc_object *object = fc_arena_copy(b->checkpoint->arena, tensor->object, 1, sizeof *object);
    FC_NEED(object, b->err, b->metadata_path);
    object->hint = FC_HINT_DEQUANTIZE;
    tensor->object = object;
    return fc_dcp_open_later(b, tensor);
}

/* Keeps the locations of all chunks for verify. */
static fc_code refuse_class(fc_dcp_builder *b, fc_tensor *tensor, const fc_error *why) {
    fc_arena *arena = b->checkpoint->arena;
    fc_dcp_chunks *chunks = fc_arena_alloc(arena, sizeof *chunks);
    FC_NEED(chunks, b->err, b->metadata_path);
    *chunks = (fc_dcp_chunks){tensor->chunks, tensor->nchunks, tensor->chunks[0].place.file};
    tensor->detail = chunks;
    FC_TRY(fc_dcp_refuse_tensor(b, tensor, &chunks->chunks[0],
                                fc_arena_strndup(arena, why->message, strlen(why->message))));
    return why->hint == FC_HINT_DEQUANTIZE && chunks->count == 1 ? open_parts(b, tensor) : FC_OK;
}

/* Whether some short archive contains a subclass. */
static bool has_one(const fc_dcp_builder *b) {
    fc_error why;
    int plain = 0;
    for (size_t i = 0; i < b->ntensors && plain < ENOUGH_PLAIN; i++) {
        const fc_tensor *t = &b->tensors[i];
        if (is_in_archive(t) && is_short(t)) {
            if (is_of_a_class(b->checkpoint, t, &why)) {
                return true;
            }
            plain++;
        }
    }
    return false;
}

fc_code fc_dcp_refuse_classes(fc_dcp_builder *b) {
    fc_error why;
    fc_code rc = FC_OK;
    bool any = has_one(b);
    for (size_t i = 0; any && rc == FC_OK && i < b->ntensors; i++) {
        fc_tensor *t = &b->tensors[i];
        if (is_in_archive(t) && is_of_a_class(b->checkpoint, t, &why)) {
            rc = refuse_class(b, t, &why);
        }
    }
    return rc;
}
