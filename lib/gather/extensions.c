/*
 * DTensorExtensions: how FSDP flattens, cuts and gathers the tensors of tensor parallelism.
 * lib/sharded_tensor/dtensor.c computes the metadata, redistribute.c communicates, and this file moves the data.
 */
#include "fsdpckpt/gather/dtensor_data.h"
#include "fsdpckpt/try.h"

#include <string.h>

void fc_pre_flatten_transform(const fc_fsdp_tensor *tensor, fc_array *out, fc_param_extension *extension) {
    memset(extension, 0, sizeof *extension);
    *out = tensor->local;
    out->memory = NULL;
    if (tensor->is_dtensor) {
        out->requires_grad = true; /* the leaf that autograd sees is the local tensor */
        extension->is_dtensor = true;
        extension->spec = tensor->spec;
        extension->mesh = tensor->mesh;
    }
}

fc_code fc_post_unflatten_transform(const fc_dtensor_extensions *extensions, const fc_array *view,
                                    const fc_param_extension *extension, fc_event *produced, fc_fsdp_tensor *out,
                                    fc_error *err) {
    fc_fsdp_tensor made = {.local = *view};
    made.local.memory = NULL;
    if (extension->is_dtensor) {
        const fc_dtensor *spec = &extension->spec;
        FC_TRY(fc_dtensor_from_local(view, extension->mesh, spec->placements, spec->ndim, spec->shape, &made, err));
    }
    if (produced) {
        fc_stream *stream = extensions->has_compute_stream ? extensions->compute_stream : extensions->current_stream;
        FC_TRY(view->device->wait(view->device, stream, produced, err));
    }
    made.fsdp_flattened = true;
    *out = made;
    return FC_OK;
}

/* Finds the array to cut, and describes it for fc_chunk_tensor. */
static fc_code describe(const fc_chunk_input *input, const fc_process_group *group, fc_process_group *tp_group,
                        fc_chunk_source *source, fc_dtensor *spec, const fc_array **data, fc_error *err) {
    if (input->sharded) {
        const fc_sharded_tensor *t = input->sharded;
        if (t->nshards != 1 || t->shards[0].inner) {
            return fc_fail(err, FC_EUSAGE,
                           "a ShardedTensor with %zu local shards cannot be chunked: it must have exactly one",
                           t->nshards);
        }
        *data = &t->shards[0].tensor;
        *source = (fc_chunk_source){.kind = FC_CHUNK_SHARDED,
                                    .sharded = &t->metadata,
                                    .local_shards = &t->shards[0].metadata,
                                    .nlocal_shards = t->nshards};
    } else {
        const fc_fsdp_tensor *t = input->tensor;
        *data = &t->local;
        *source = (fc_chunk_source){.kind = t->is_dtensor ? FC_CHUNK_DTENSOR : FC_CHUNK_PLAIN};
        if (t->is_dtensor) {
            *spec = t->spec;
            spec->device = input->torch_device;
            *tp_group = *group;
            tp_group->rank = t->mesh->groups[0]->rank;
            tp_group->size = t->mesh->groups[0]->size;
            source->dtensor = spec;
            source->dtensor_group = tp_group;
        }
    }
    source->ndim = (*data)->ndim;
    source->shape = (*data)->sizes;
    source->dtype = (*data)->dtype;
    source->device = input->torch_device;
    return FC_OK;
}

static fc_sharded_tensor *new_tensor(const fc_chunked_item *from, fc_arena *arena, fc_error *err) {
    fc_sharded_tensor *t = fc_arena_calloc(arena, 1, sizeof *t);
    fc_local_shard *shard = t ? fc_arena_calloc(arena, 1, sizeof *shard) : NULL;
    if (!shard) {
        fc_fail(err, FC_ENOMEM, "a ShardedTensor: out of memory");
        return NULL;
    }
    t->metadata = from->metadata;
    t->shards = shard;
    t->nshards = from->has_local;
    shard->metadata = from->local;
    return t;
}

/* Copies the rows of the shard from `data`. */
static fc_code fill_shard(fc_local_shard *shard, const fc_array *data, fc_stream *stream, fc_error *err) {
    fc_array rows;
    const fc_box *box = &shard->metadata.box;
    FC_TRY(fc_array_narrow(data, 0, box->sizes[0] > 0 ? box->offsets[0] : 0, box->sizes[0], &rows, err));
    return fc_array_clone(&rows, stream, &shard->tensor, err);
}

fc_code fc_chunk_tensor_data(const fc_chunk_input *input, int64_t rank, int64_t world_size, int64_t devices_per_node,
                             int64_t accelerator_devices, const fc_process_group *group, fc_stream *stream,
                             fc_arena *arena, fc_sharded_tensor **out, fc_error *err) {
    fc_chunk_source source;
    fc_chunk_result result;
    fc_process_group tp_group;
    fc_dtensor spec;
    const fc_array *data = NULL;
    FC_TRY(describe(input, group, &tp_group, &source, &spec, &data, err));
    FC_TRY(
        fc_chunk_tensor(&source, rank, world_size, devices_per_node, accelerator_devices, group, arena, &result, err));
    fc_sharded_tensor *inner = new_tensor(&result.inner, arena, err), *outer = inner;
    if (inner && result.has_outer) {
        outer = new_tensor(&result.outer, arena, err);
    }
    if (!inner || !outer) {
        return FC_ENOMEM;
    }
    if (outer != inner) {
        outer->shards[0].inner = inner;
    }
    if (inner->nshards > 0) {
        FC_TRY(fill_shard(&inner->shards[0], data, stream, err));
    }
    *out = outer;
    return FC_OK;
}

void fc_sharded_tensor_free(fc_sharded_tensor *tensor) {
    for (size_t i = 0; tensor && i < tensor->nshards; i++) {
        fc_local_shard *shard = &tensor->shards[i];
        fc_array_free(&shard->tensor);
        for (size_t k = 0; shard->inner && k < shard->inner->nshards; k++) {
            fc_array_free(&shard->inner->shards[k].tensor);
        }
    }
}

void fc_pre_load_state_dict_transform(const fc_sharded_tensor *tensor, const fc_sharded_tensor **out,
                                      const fc_local_shard **shards, size_t *count) {
    if (tensor->nshards == 1 && tensor->shards[0].inner) {
        tensor = tensor->shards[0].inner;
    }
    *out = tensor;
    *shards = tensor->shards;
    *count = tensor->nshards;
}

/* Checks the mesh and computes the placements. The rules are those of the metadata, fc_chunk_dtensor. */
static fc_code plan_chunk(const fc_fsdp_tensor *tensor, const fc_device_mesh *root, fc_dtensor *wanted, fc_error *err) {
    int64_t offsets[FC_MAX_DIMS];
    static const int64_t nowhere[FC_MAX_MESH_DIMS];
    return fc_chunk_dtensor(tensor->local.ndim, tensor->local.sizes, tensor->is_dtensor ? &tensor->spec : NULL,
                            root ? &root->mesh : NULL, root ? root->coordinate : nowhere, wanted, offsets, err);
}

fc_code fc_chunk_dtensor_data(const fc_fsdp_tensor *tensor, const fc_device_mesh *mesh, fc_stream *stream,
                              fc_fsdp_tensor *out, fc_error *err) {
    const fc_device_mesh *root = mesh ? mesh->root : NULL;
    fc_dtensor wanted;
    fc_fsdp_tensor whole;
    FC_TRY(plan_chunk(tensor, root, &wanted, err));
    if (!root) { /* plan_chunk fails without a mesh */
        return FC_OK;
    }
    fc_placement replicate[FC_MAX_MESH_DIMS] = {{FC_REPLICATE, 0, 0}};
    if (tensor->is_dtensor) {
        replicate[root->mesh.ndim - 1] = tensor->spec.placements[0];
    }
    fc_array detached = tensor->local;
    detached.requires_grad = false;
    FC_TRY(fc_dtensor_from_local(&detached, root, replicate, 0, NULL, &whole, err));
    return fc_redistribute(&whole, wanted.placements, stream, out, err);
}
