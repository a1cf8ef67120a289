/*
 * The table of the DeepSpeed format. Opens a checkpoint: finds its files, reads them rank by rank and builds the
 * manifest.
 */
#include "deepspeed/stages.h"

#include "checkpoint/identity.h"
#include "checkpoint/parameters.h"
#include "checkpoint/path.h"
#include "checkpoint/same_name.h"
#include "fsdpckpt/try.h"
#include "registry.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Whether a value is a number, such as a step, which DeepSpeed keeps for many parameters at once. */
static bool is_number_of_state(const fc_tensor *t) {
    int64_t numel = 1;
    for (int d = 0; d < t->ndim; d++) {
        numel = t->shape[d] == 1 ? numel : 0;
    }
    return numel == 1 && t->path.count == 4 && strcmp(t->path.elements[1].key, "state") == 0;
}

static fc_code set_tensor(const fc_ds_builder *b, const fc_ds_tensor *from, fc_tensor *t) {
    fc_arena *arena = b->checkpoint->arena;
    *t = (fc_tensor){.name = from->name, .path = from->path};
    if (from->object) {
        return fc_torch_object_tensor(from->object, from->object_file, arena, t, b->err);
    }
    fc_chunk *chunks = fc_arena_copy(arena, from->chunks, from->nchunks, sizeof *chunks);
    FC_NEED(chunks, b->err, b->checkpoint->path);
    t->dtype = from->dtype == FC_DTYPE_COUNT ? FC_F32 : from->dtype; /* an empty parameter has no chunk to set it */
    t->ndim = from->ndim;
    t->shape = from->shape;
    t->chunks = chunks;
    t->nchunks = from->nchunks;
    return is_number_of_state(t) && !fc_untie(t, arena) ? fc_no_memory(b->err, b->checkpoint->path) : FC_OK;
}

/* Returns a note about names without data; "" if there are none, NULL when out of memory. */
static const char *absent_note(const fc_ds_builder *b) {
    return b->nabsent == 0
               ? ""
               : fc_arena_printf(b->checkpoint->arena,
                                 "%zu name%s of the module, such as %.128s, %s no data in the files; they are other "
                                 "names of shared parameters, which DeepSpeed did not record",
                                 b->nabsent, b->nabsent == 1 ? "" : "s", b->absent, b->nabsent == 1 ? "has" : "have");
}

/* Returns a note if the files of ranks seem to be in the wrong order; otherwise like absent_note. */
static const char *disorder_note(const fc_ds_builder *b) {
    size_t rank = 0;
    if (b->stage != 3 || !b->devices || !fc_ds_devices_disorder(b->devices, b->ranks, &rank)) {
        return "";
    }
    return fc_arena_printf(b->checkpoint->arena,
                           "%s was saved from device %" PRId64
                           ", which does not fit its rank: the files of ranks may have been renamed or swapped, and "
                           "then the weights are mixed up; files of ZeRO-3 do not record their rank",
                           b->files.files[b->files.optims[rank]].name, b->devices[rank]);
}

static fc_code set_note(const fc_ds_builder *b) {
    const char *absent = absent_note(b), *disorder = disorder_note(b);
    if (absent && disorder && absent[0] != '\0' && disorder[0] != '\0') {
        absent = fc_arena_printf(b->checkpoint->arena, "%s; %s", absent, disorder);
    }
    FC_NEED(absent && disorder, b->err, b->checkpoint->path);
    const char *note = absent[0] != '\0' ? absent : disorder;
    b->checkpoint->note = note[0] != '\0' ? note : NULL;
    return FC_OK;
}

static fc_code finish_manifest(const fc_ds_builder *b) {
    fc_tensor *tensors = fc_arena_calloc(b->checkpoint->arena, b->ntensors, sizeof *tensors);
    const char *twice = NULL;
    FC_NEED(tensors, b->err, b->checkpoint->path);
    for (size_t i = 0; i < b->ntensors; i++) {
        FC_TRY(set_tensor(b, &b->tensors[i], &tensors[i]));
    }
    FC_TRY(fc_find_same_name(tensors, b->ntensors, &twice, b->err));
    if (twice) {
        return fc_fail(b->err, FC_ECORRUPT, "%s: the name %.256s appears twice", b->checkpoint->path, twice);
    }
    b->checkpoint->tensors = tensors;
    b->checkpoint->ntensors = b->ntensors;
    return set_note(b);
}

static fc_code ds_open(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    fc_ds_builder b = {.checkpoint = checkpoint, .progress = options->progress, .err = err};
    fc_code rc;
    FC_TRY_GOTO(fc_ds_find_files(checkpoint->arena, checkpoint->path, &b.files, err), rc, out);
    if (!options->follow_external) {
        FC_TRY_GOTO(fc_check_links(b.files.directory, b.files.files, b.files.nfiles, err), rc, out);
    }
    checkpoint->files = b.files.files;
    checkpoint->nfiles = b.files.nfiles;
    checkpoint->producer = "DeepSpeed";
    FC_TRY_GOTO(fc_identities_take(checkpoint, options, err), rc, out);
    fc_progress_begin(options->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, b.files.nfiles);
    FC_TRY_GOTO(fc_ds_read_stage(&b), rc, out);
    FC_TRY_GOTO(fc_ds_read_model(&b), rc, out);
    rc = finish_manifest(&b);
out:
    for (size_t i = 0; i < b.ntensors; i++) {
        free(b.tensors[i].chunks);
    }
    free(b.tensors);
    free(b.keys);
    free((void *)b.by_name);
    free(b.devices);
    return rc;
}

/* A digest covers a whole record, so only the chunk at the start of the record returns it. */
static fc_code ds_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                         fc_error *err) {
    if (tensor->object || index == FC_WHOLE_TENSOR || ((const torch_extent *)tensor->chunks[index].data)->first != 0) {
        return FC_OK;
    }
    return fc_torch_digest(checkpoint, tensor, index, out, err);
}

const fc_format fc_format_deepspeed = {
    .name = "deepspeed",
    .description = "DeepSpeed checkpoint",
    .directory_sign = "*_model_states.pt (DeepSpeed)",
    .extensions = (const char *const[]){NULL},
    .reader =
        {
            .list = fc_ds_list_steps,
            .open = ds_open,
            .check_header = fc_torch_check_header,
            .extent = fc_torch_extent,
            .read = fc_torch_read,
            .object_json = fc_torch_object_json,
            .digest = ds_digest,
        },
    .verifier = {.unverified = "the gaps between the records of zip files, and pickles"},
};
