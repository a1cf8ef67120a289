/*
 * The checkpoints of train_mlp. To save, each flat parameter and optimizer state is gathered in turn, and every rank
 * keeps its rows of each tensor (FSDP's sharded state dict). fc_convert writes one file per rank. To resume, a
 * checkpoint of any layout is read tensor by tensor, and flattening cuts it into shards for the present ranks.
 */
#include "train.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/memory.h"
#include "fsdpckpt/move.h"

#include <stdlib.h>
#include <string.h>

enum { KINDS = 2, STATES = 4, MAX_TENSORS = MLP_LAYERS * KINDS * STATES };

static const char *const state_names[STATES] = {NULL, "exp_avg", "exp_avg_sq", "step"};

/* Writes "model.layers.0.weight", or "optim.state.layers.0.weight.exp_avg" for a state. */
static void full_name(const mlp_layer *layer, int kind, const char *state, char *out, size_t size) {
    char param[64];
    train_name(layer, kind, param, sizeof param);
    snprintf(out, size, state ? "optim.state.%s.%s" : "model.%s", param, state);
}

static const fc_tensor *find(const fc_checkpoint *from, const char *name) {
    for (size_t i = 0; i < from->ntensors; i++) {
        if (strcmp(from->tensors[i].name, name) == 0 && !from->tensors[i].object) {
            return &from->tensors[i];
        }
    }
    return NULL;
}

static fc_code read_tensor(const fc_checkpoint *from, const char *name, int ndim, const int64_t *shape, float *out,
                           fc_error *err) {
    static const int64_t zeros[2];
    const fc_tensor *tensor = find(from, name);
    fc_box box = {ndim, zeros, shape};
    if (!tensor || tensor->ndim != ndim ||
        (ndim > 0 && memcmp(tensor->shape, shape, (size_t)ndim * sizeof *shape) != 0)) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %s is missing or has another shape than in the model", from->path,
                       name);
    }
    return fc_read_box(from, tensor, &box, FC_F32, out, err);
}

fc_code train_load_param(const fc_checkpoint *from, const mlp_layer *layer, int kind, const char *state,
                         fc_device *device, fc_array *out, fc_error *err) {
    float values[MLP_WIDEST * MLP_WIDEST];
    char name[128];
    int64_t shape[] = {layer->out, layer->in};
    int ndim = kind == 0 ? 2 : 1;
    full_name(layer, kind, state, name, sizeof name);
    FC_TRY(read_tensor(from, name, ndim, shape, values, err));
    FC_TRY(fc_array_new(device, FC_F32, ndim, shape, out, err));
    return train_store(out, values, err);
}

fc_code train_load_step(const fc_checkpoint *from, int64_t *step, fc_error *err) {
    char name[128];
    float value = 0;
    full_name(&mlp_layers[0], 0, "step", name, sizeof name);
    fc_code rc = read_tensor(from, name, 0, NULL, &value, err);
    *step = (int64_t)value;
    return rc;
}

/* The tensors of this rank's shard, for fc_checkpoint_in_memory. The arena owns their data. */
typedef struct snapshot {
    trainer *t;
    fc_arena *arena;
    fc_memory_tensor tensors[MAX_TENSORS];
    size_t count;
    float step;
} snapshot;

/* Gathers a whole flat parameter, or an optimizer state of the same layout, on the device. */
static fc_code gather(trainer *t, const fc_flat_layout *layout, const fc_array *shard, fc_array *full, fc_error *err) {
    fc_device *device = t->shard->device;
    int64_t padded = layout->shard_numel * layout->world_size;
    fc_array mine = {0};
    fc_code rc;
    FC_TRY_GOTO(fc_array_new(device, shard->dtype, 1, &layout->shard_numel, &mine, err), rc, out);
    FC_TRY_GOTO(fc_array_new(device, shard->dtype, 1, &padded, full, err), rc, out);
    FC_TRY_GOTO(fc_array_copy(&mine, shard, NULL, err), rc, out);
    if (layout->world_size > 1) {
        size_t bytes = fc_array_bytes(&mine);
        FC_TRY_GOTO(t->shard->all_gather(t->shard, mine.data, full->data, bytes, NULL, err), rc, out);
    } else {
        FC_TRY_GOTO(fc_array_copy(full, &mine, NULL, err), rc, out);
    }
    rc = device->synchronize(device, NULL, err);
out:
    fc_array_free(&mine);
    return rc;
}

/* Describes a tensor by its chunks. Only this rank's chunk has data here. */
static fc_code describe(snapshot *s, const char *name, const fc_sharded_tensor_metadata *m, const fc_local_shard *own,
                        const void *data, fc_error *err) {
    fc_memory_chunk *chunks = fc_arena_calloc(s->arena, m->nshards, sizeof *chunks);
    const char *copy = fc_arena_strndup(s->arena, name, strlen(name));
    if (!chunks || !copy) {
        return fc_no_memory(err, NULL);
    }
    for (size_t i = 0; i < m->nshards; i++) {
        const fc_box *box = &m->shards[i].box;
        bool mine = own && fc_box_equal(box, &own->metadata.box);
        chunks[i] = (fc_memory_chunk){box->offsets, box->sizes, NULL, mine ? data : NULL};
    }
    s->tensors[s->count++] = (fc_memory_tensor){.name = copy,
                                                .dtype = m->properties.dtype,
                                                .ndim = m->ndim,
                                                .shape = m->shape,
                                                .chunks = chunks,
                                                .nchunks = m->nshards};
    return FC_OK;
}

/* Copies this rank's rows of a whole tensor from the device. */
static fc_code keep_rows(snapshot *s, const char *name, const fc_array *whole, fc_error *err) {
    trainer *t = s->t;
    fc_fsdp_tensor plain = {.local = *whole};
    fc_process_group group = {t->shard->rank, t->shard->size, NULL, {"cpu", -1}};
    fc_chunk_input input = {.tensor = &plain, .torch_device = {"cpu", -1}};
    fc_sharded_tensor *cut = NULL;
    const fc_sharded_tensor *made;
    const fc_local_shard *shards;
    size_t count;
    fc_code rc = fc_chunk_tensor_data(&input, group.rank, group.size, 1, 1, &group, NULL, s->arena, &cut, err);
    if (rc != FC_OK) {
        return fc_context(err, rc, "%s", name);
    }
    fc_pre_load_state_dict_transform(cut, &made, &shards, &count);
    float *data = NULL;
    if (count > 0) {
        data = fc_arena_calloc(s->arena, (size_t)fc_array_numel(&shards[0].tensor) + 1, sizeof *data);
        rc = data ? train_fetch(&shards[0].tensor, data, err) : fc_no_memory(err, NULL);
    }
    rc = rc == FC_OK ? describe(s, name, &made->metadata, count > 0 ? shards : NULL, data, err) : rc;
    fc_sharded_tensor_free(cut);
    return rc;
}

static fc_code add_state(snapshot *s, int layer, int state, const fc_array *shard, fc_error *err) {
    trainer *t = s->t;
    const fc_flat_layout *layout = fc_fsdp_layout(t->layers[layer].handle);
    fc_array full = {0}, view;
    fc_code rc = gather(t, layout, shard, &full, err);
    for (int kind = 0; rc == FC_OK && kind < KINDS; kind++) {
        char name[128];
        full_name(&mlp_layers[layer], kind, state_names[state], name, sizeof name);
        rc = fc_flat_view(layout, &full, (size_t)kind, &view, err);
        rc = rc == FC_OK ? keep_rows(s, name, &view, err) : rc;
    }
    fc_array_free(&full);
    return rc;
}

static void add_step(snapshot *s, int layer) {
    for (int kind = 0; kind < KINDS; kind++) {
        static const int64_t none[1];
        fc_memory_chunk *chunk = fc_arena_calloc(s->arena, 1, sizeof *chunk);
        char *name = fc_arena_alloc(s->arena, 128);
        if (chunk && name) {
            *chunk = (fc_memory_chunk){none, none, NULL, &s->step};
            full_name(&mlp_layers[layer], kind, "step", name, 128);
            s->tensors[s->count++] = (fc_memory_tensor){.name = name, .dtype = FC_F32, .chunks = chunk, .nchunks = 1};
        }
    }
}

/* Sets the paths of the state dict: {"model": {…}, "optim": {"state": {fqn: {…}}}}. */
static fc_code nest(snapshot *s, fc_error *err) {
    for (size_t i = 0; i < s->count; i++) {
        fc_memory_tensor *tensor = &s->tensors[i];
        fc_path_element *e = fc_arena_calloc(s->arena, 4, sizeof *e);
        char *name = fc_arena_strndup(s->arena, tensor->name, strlen(tensor->name));
        if (!e || !name) {
            return fc_no_memory(err, NULL);
        }
        if (strncmp(name, "model.", 6) == 0) {
            e[0].key = "model";
            e[1].key = name + 6;
            tensor->path = (fc_path){e, 2};
            continue;
        }
        char *last = strrchr(name, '.');
        *last = 0;
        e[0].key = "optim";
        e[1].key = "state";
        e[2].key = name + strlen("optim.state.");
        e[3].key = last + 1;
        tensor->path = (fc_path){e, 4};
    }
    return FC_OK;
}

fc_code train_save(trainer *t, const char *path, fc_error *err) {
    snapshot s = {.t = t, .arena = fc_arena_new(), .step = (float)t->step};
    fc_checkpoint *source = NULL;
    fc_code rc = s.arena ? FC_OK : fc_no_memory(err, NULL);
    for (int i = 0; rc == FC_OK && i < MLP_LAYERS; i++) {
        train_layer *l = &t->layers[i];
        rc = add_state(&s, i, 0, fc_fsdp_local_shard(l->handle), err);
        rc = rc == FC_OK ? add_state(&s, i, 1, &l->exp_avg, err) : rc;
        rc = rc == FC_OK ? add_state(&s, i, 2, &l->exp_avg_sq, err) : rc;
        add_step(&s, i);
    }
    rc = rc == FC_OK ? nest(&s, err) : rc;
    rc = rc == FC_OK ? fc_checkpoint_in_memory("the training", s.tensors, s.count, &source, err) : rc;
    rc = fc_comm_agree(t->host, rc, err);
    if (rc == FC_OK) {
        fc_convert_options options = {.format = fc_format_find("h5"),
                                      .selection = {.mesh = &t->mesh},
                                      .force = true,
                                      .comm = t->host,
                                      .own_shards = true};
        rc = fc_convert(source, path, &options, NULL, err);
    }
    fc_checkpoint_close(source);
    fc_arena_free(s.arena);
    return rc;
}
