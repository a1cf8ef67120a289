/*
 * Builds the manifest of one torch.save file: its leaves become tensors of one chunk each, and objects.
 */
#include "torch/file/file.h"

#include "base/file_name.h"
#include "checkpoint/identity.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>

/* Adds the chunk of a tensor; a tensor without elements has no chunks. */
static fc_code add_chunk(const torch_extent *extent, const fc_torch_tensor *t, fc_arena *arena, fc_tensor *out) {
    int64_t *dims = fc_arena_calloc(arena, 2 * (size_t)t->ndim, sizeof *dims);
    fc_chunk *chunk = fc_arena_calloc(arena, 1, sizeof *chunk);
    if (!dims || !chunk) {
        return FC_ENOMEM;
    }
    out->dtype = t->dtype;
    out->ndim = t->ndim;
    out->shape = dims + t->ndim;
    out->nchunks = 1;
    for (int i = 0; i < t->ndim; i++) {
        dims[t->ndim + i] = t->sizes[i];
        out->nchunks = t->sizes[i] == 0 ? 0 : out->nchunks;
    }
    *chunk = fc_torch_chunk(dims, extent, FC_NO_RANK);
    out->chunks = chunk;
    return FC_OK;
}

static fc_code read_leaf(const fc_checkpoint *checkpoint, const torch_file *f, const torch_leaf *leaf, fc_tensor *out,
                         fc_error *err) {
    fc_torch_tensor t;
    torch_extent *extent = NULL;
    torch_object *object = NULL;
    fc_code rc;
    if (leaf->kind == TORCH_OBJECT) {
        rc = fc_torch_object_new(f, leaf->v, checkpoint->arena, &object, err);
        return rc == FC_OK ? fc_torch_object_tensor(object, f->index, checkpoint->arena, out, err) : rc;
    }
    rc = fc_torch_find_extent(f, leaf->v, &t, checkpoint->arena, &extent, err);
    return rc == FC_OK && add_chunk(extent, &t, checkpoint->arena, out) != FC_OK ? fc_no_memory(err, checkpoint->path)
                                                                                 : rc;
}

static bool is_shard(const torch_leaf *leaf) {
    return leaf->kind == TORCH_DTENSOR || leaf->kind == TORCH_SHARDED_TENSOR;
}

static bool has_shards(const torch_leaves *leaves) {
    bool found = false;
    for (size_t i = 0; i < leaves->count && !found; i++) {
        found = is_shard(&leaves->items[i]);
    }
    return found;
}

fc_code fc_torch_fail_shard(const char *path, const char *leaf, fc_error *err) {
    return fc_fail(err, FC_EUNSUPPORTED,
                   "%s: %.256s: it is one rank's shard: give the path of the directory with the files of all ranks, "
                   "which must be called <name>_<r>.pt, <name>_rank_<r>.pt or <name>_world_size_<N>_rank_<r>.pt",
                   path, leaf);
}

/* A value that is not supported is listed with the reason, so that the others can be read. */
static fc_code make_tensor(const fc_checkpoint *checkpoint, const torch_file *f, const torch_leaf *leaf, fc_tensor *out,
                           fc_error *err) {
    fc_error why;
    out->name = leaf->name;
    out->path = leaf->path;
    if (is_shard(leaf)) {
        return fc_torch_fail_shard(f->path, leaf->name, err);
    }
    fc_code rc = read_leaf(checkpoint, f, leaf, out, &why);
    if (rc == FC_EUNSUPPORTED) {
        return fc_torch_refused_tensor(why.message, why.hint, f->index, checkpoint->arena, out, err);
    }
    return rc == FC_OK ? rc : fc_fail(err, rc, "%s: %.256s: %s", f->path, leaf->name, why.message);
}

static fc_code make_tensors(const fc_checkpoint *checkpoint, const torch_file *f, const torch_leaves *leaves,
                            fc_tensor *tensors, fc_error *err) {
    for (size_t i = 0; i < leaves->count; i++) {
        FC_TRY(make_tensor(checkpoint, f, &leaves->items[i], &tensors[i], err));
    }
    return FC_OK;
}

/* Adds a note about modules that were pickled as a whole: only their state dicts are read. */
static fc_code note_modules(fc_checkpoint *checkpoint, const torch_leaves *leaves, fc_error *err) {
    if (leaves->modules == 0 || checkpoint->note) {
        return FC_OK;
    }
    checkpoint->note = fc_arena_printf(
        checkpoint->arena, "%zu %s pickled as a whole (%.128s of %s): %s read, other attributes are not",
        leaves->modules, leaves->modules == 1 ? "module was" : "modules were", leaves->of_module, leaves->module_class,
        leaves->modules == 1 ? "its state_dict() is" : "their state dicts are");
    return checkpoint->note ? FC_OK : fc_no_memory(err, checkpoint->path);
}

fc_code fc_torch_note_risk(fc_checkpoint *checkpoint, const torch_file *f, fc_error *err) {
    char name[256];
    if (f->p->risk != FC_RISK_RUNS || checkpoint->risk) {
        return FC_OK;
    }
    checkpoint->risk = fc_arena_printf(checkpoint->arena, "%s: loading it with torch.load calls %s: it may be hostile",
                                       f->path, fc_pickle_risky_name(f->p, name, sizeof name));
    return checkpoint->risk ? FC_OK : fc_no_memory(err, checkpoint->path);
}

fc_code fc_torch_open_one(fc_checkpoint *checkpoint, uint32_t index, torch_file *f, fc_error *err) {
    FC_TRY(fc_torch_file_open(checkpoint->files[index].path, index, f, err));
    fc_code rc = fc_torch_note_risk(checkpoint, f, err);
    if (rc != FC_OK) {
        fc_torch_file_close(f);
    }
    return rc;
}

fc_code fc_torch_read_file(fc_checkpoint *checkpoint, const char *path, uint32_t index, fc_tensor **tensors,
                           size_t *count, bool *sharded, fc_error *err) {
    torch_file f;
    torch_leaves leaves = {.arena = checkpoint->arena, .alone = true};
    fc_tensor *made = NULL;
    fc_code rc;
    *tensors = NULL;
    *count = 0;
    FC_TRY(fc_torch_file_open(path, index, &f, err));
    FC_TRY_GOTO(fc_torch_flatten(&f, NULL, &leaves, err), rc, out);
    if (sharded && (*sharded = has_shards(&leaves))) {
        goto out;
    }
    FC_TRY_GOTO(fc_torch_check_names(path, &leaves, err), rc, out);
    FC_TRY_GOTO(note_modules(checkpoint, &leaves, err), rc, out);
    FC_TRY_GOTO(fc_torch_note_risk(checkpoint, &f, err), rc, out);
    made = fc_arena_calloc(checkpoint->arena, leaves.count, sizeof *made);
    FC_TRY_GOTO(made ? make_tensors(checkpoint, &f, &leaves, made, err) : fc_no_memory(err, checkpoint->path), rc, out);
    *tensors = made;
    *count = leaves.count;
out:
    fc_torch_file_close(&f);
    free(leaves.items);
    return rc;
}

fc_code fc_torch_open_file(fc_checkpoint *checkpoint, const fc_open_options *options, bool *sharded, fc_error *err) {
    fc_file *file = fc_arena_calloc(checkpoint->arena, 1, sizeof *file);
    fc_tensor *tensors = NULL;
    FC_NEED(file, err, checkpoint->path);
    *file = (fc_file){checkpoint->path, fc_base_name(checkpoint->path)};
    checkpoint->files = file;
    checkpoint->nfiles = 1;
    checkpoint->producer = "torch.save";
    checkpoint->keeps_order = true;
    FC_TRY(fc_identities_take(checkpoint, options, err));
    fc_code rc = fc_torch_read_file(checkpoint, checkpoint->path, 0, &tensors, &checkpoint->ntensors, sharded, err);
    checkpoint->tensors = tensors;
    return rc;
}
