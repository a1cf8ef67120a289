/*
 * Writes objects that are torch.save archives anew, from their decoded values. So what PyTorch loads was made here: a
 * file that two readers understand in different ways cannot pass on what only PyTorch would find.
 */
#include "torch/pickle/copy.h"
#include "base/grow.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"
#include "torch/object/item.h"
#include "torch/object/write.h"

#include <stdlib.h>

void fc_torch_inners_free(fc_torch_inners *inners) {
    for (size_t i = 0; i < inners->count; i++) {
        free(inners->items[i].bytes);
    }
    free(inners->items);
    *inners = (fc_torch_inners){0};
}

fc_code fc_torch_inners_add(const fc_torch_inners *inners, fc_torch_zip *zip, fc_error *err) {
    for (size_t i = 0; i < inners->count; i++) {
        FC_TRY(fc_torch_zip_add_bytes(zip, inners->items[i].bytes, inners->items[i].size, err));
    }
    return FC_OK;
}

/* Keeps the storages of an object's tensors until the file is finished. */
static fc_code keep_inners(fc_torch_item *item, const fc_pickle_copy *copy, fc_torch_inners *inners, fc_error *err) {
    if (item->big_endian && copy->nstorages > 0) {
        return fc_fail(err, FC_EUNSUPPORTED, "it contains a big-endian tensor");
    }
    for (size_t i = 0; i < copy->nstorages; i++) {
        fc_torch_tensor t = {0};
        const fc_zip_entry *entry = NULL;
        fc_torch_inner in = {0};
        FC_NEED(fc_grow(&inners->items, &inners->capacity, inners->count + 1, sizeof *inners->items), err, NULL);
        FC_TRY(fc_torch_storage_decode(item->pickle, copy->storages[i], &t, err));
        FC_TRY(fc_torch_item_record(item, &t, &entry, err));
        FC_TRY(fc_zip_read(&item->zip, entry, &in.bytes, err));
        in.size = entry->size;
        inners->items[inners->count++] = in;
    }
    return FC_OK;
}

static fc_code copy_value(fc_torch_item *item, uint64_t first_storage, fc_torch_pickler *w, fc_torch_inners *inners,
                          fc_error *err) {
    fc_pickle_copy copy = {.p = item->pickle, .w = w, .first_storage = first_storage};
    fc_code rc;
    FC_TRY_GOTO(fc_pickle_copy_value(&copy, item->pickle->root, err), rc, out);
    rc = keep_inners(item, &copy, inners, err);
out:
    fc_pickle_copy_free(&copy);
    return rc;
}

/* Reads the archive of an object. */
static fc_code open_object(const fc_target *target, const fc_tensor *object, fc_torch_item *item, fc_error *err) {
    const fc_checkpoint *source = target->source;
    const bool in_file = object->nchunks > 0 && source->nfiles > 0; /* whether messages can name a file */
    unsigned char *bytes;
    FC_TRY(fc_read_object(source, object, &bytes, err));
    const char *path = in_file ? source->files[object->chunks[0].place.file].path : source->path;
    return fc_torch_item_open_memory(bytes, (uint64_t)object->shape[0], path, item, err);
}

fc_code fc_torch_copy_object(const fc_target *target, const fc_tensor *object, uint64_t first_storage,
                             fc_torch_pickler *w, fc_torch_inners *inners, bool *readable, fc_error *err) {
    fc_torch_item item = {0};
    fc_code rc = open_object(target, object, &item, err);
    *readable = rc == FC_OK && !fc_torch_is_script(&item);
    if (rc == FC_EUNSUPPORTED) {
        return FC_OK;
    }
    if (*readable) {
        rc = copy_value(&item, first_storage, w, inners, err);
    } else if (rc == FC_OK) {
        fc_fail(err, FC_EUNSUPPORTED, "it is a TorchScript program");
    }
    fc_torch_item_close(&item);
    return rc;
}
