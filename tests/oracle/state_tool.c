/*
 * state_tool saves and loads the model of support/state_model.h with ranks as threads; state_dict.py compares with
 * torch.
 *
 *   state_tool save|async|load|load-model full|sharded|local FORMAT PATH REPLICAS SHARDS TP [orig] [whole] [one] [gpu]
 * [force] [mixed] [partial]
 *
 * `summon:FLAGS` adds 64 × (rank + 1) to the full parameters that a rank has, and saves. Flags: w no writeback, 0 rank
 * 0 only, o offload to the CPU, r no recursion, 1 of layers.0 instead of the root. `load` fills a model of zeros and
 * checks every element; `load-model` loads only parameters. `async` trains three steps while it saves. `mixed` shards
 * layers.0 over all ranks, and layers.1 over the replicas of the others; with `partial`, layers.0 has no replicas.
 */
#include "fsdpckpt/cast.h"
#include "fsdpckpt/try.h"

#include "state_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct job {
    const char *action, *path;
    fc_state_dict_type type;
    fc_fsdp_save_options options;
    fc_mesh mesh;
    state_model_options model;
    bool gpu, partial;
} job;

/* Trains while the state is saved. */
static fc_code save_async(state_model *m, const job *j, fc_comm *ranks, fc_error *err) {
    fc_fsdp_saver *saver;
    FC_TRY(fc_fsdp_saver_new(ranks, &saver, err));
    fc_code rc = fc_fsdp_save_start(saver, &m->state, j->type, j->path, &j->options, err);
    for (int i = 0; rc == FC_OK && i < 3; i++) {
        rc = state_model_step(m, err);
    }
    rc = rc == FC_OK ? fc_fsdp_save_wait(saver, err) : rc;
    fc_fsdp_saver_free(saver);
    return rc == FC_OK ? state_model_check(m, 3, err) : rc;
}

static fc_code clear_params(state_model *m, fc_error *err) {
    fc_array *buffer = &m->buffer->array;
    FC_TRY(buffer->device->zero(buffer->device, buffer->data, fc_array_bytes(buffer), NULL, err));
    for (int h = 0; h < STATE_HANDLES && m->handles[h]; h++) {
        fc_array *shard = fc_fsdp_local_shard(m->handles[h]);
        FC_TRY(shard->device->zero(shard->device, shard->data, fc_array_bytes(shard), NULL, err));
    }
    return FC_OK;
}

static fc_code add_number(const fc_array *array, float number, fc_error *err) {
    float numbers[128];
    unsigned char bytes[sizeof numbers];
    const size_t count = (size_t)fc_array_numel(array);
    for (size_t i = 0; i < count; i++) {
        numbers[i] = number;
    }
    fc_cast(FC_F32, numbers, array->dtype, bytes, count);
    fc_device *device = array->device;
    fc_array other = {0};
    fc_code rc;
    FC_TRY_GOTO(fc_array_new(device, array->dtype, array->ndim, array->sizes, &other, err), rc, out);
    FC_TRY_GOTO(device->copy(device, other.data, bytes, fc_array_bytes(&other), NULL, err), rc, out);
    FC_TRY_GOTO(device->add(device, array->dtype, array->data, other.data, count, NULL, err), rc, out);
    rc = device->synchronize(device, NULL, err);
out:
    fc_array_free(&other);
    return rc;
}

static fc_code summon(state_model *m, const char *flags, fc_error *err) {
    const fc_fsdp_summon_options options = {.no_recurse = strchr(flags, 'r') != NULL,
                                            .no_writeback = strchr(flags, 'w') != NULL,
                                            .rank0_only = strchr(flags, '0') != NULL,
                                            .offload_to_cpu = strchr(flags, 'o') != NULL};
    fc_fsdp_summoned *s, *second;
    fc_code rc = FC_OK;
    FC_TRY(fc_fsdp_summon(m->units[strchr(flags, '1') ? 1 : 0], &options, &s, err));
    for (int h = 0; rc == FC_OK && h < STATE_HANDLES && m->handles[h]; h++) {
        for (size_t p = 0; rc == FC_OK && p < fc_fsdp_layout(m->handles[h])->nparams; p++) {
            fc_fsdp_tensor t;
            if (fc_fsdp_summoned_param(s, m->handles[h], p, &t, NULL) == FC_OK) {
                rc = add_number(&t.local, 64 * (float)(m->shard->rank + 1), err);
            }
        }
    }
    if (rc == FC_OK && fc_fsdp_summon(m->units[strchr(flags, '1') ? 1 : 0], &options, &second, NULL) == FC_OK) {
        rc = fc_fail(err, FC_EIO, "summoned twice");
    }
    fc_code ended = fc_fsdp_summon_end(s, err);
    return rc == FC_OK ? ended : rc;
}

static fc_code load(state_model *m, const job *j, fc_error *err) {
    fc_checkpoint *from = NULL;
    FC_TRY(fc_checkpoint_open(j->path, NULL, &from, err));
    fc_fsdp_state state = m->state;
    fc_code rc = strcmp(j->action, "load") == 0 ? state_model_clear(m, err) : clear_params(m, err);
    if (strcmp(j->action, "load-model") == 0) {
        state.noptim = state.nvalues = 0;
    }
    rc = rc == FC_OK ? fc_fsdp_load(&state, j->type, from, err) : rc;
    fc_checkpoint_close(from);
    return rc == FC_OK ? state_model_check(m, 0, err) : rc;
}

static fc_code run(fc_comm *comm, const job *j, fc_comm *ranks, const fc_device_mesh *mesh, fc_error *err) {
    state_model m;
    state_model_options options = j->model;
    fc_device_mesh tp;
    fc_comm *all;
    if (mesh->mesh.ndim > 2) {
        FC_TRY(fc_device_mesh_slice(mesh, 2, &tp, err));
        options.tp = &tp;
    }
    options.replicate = mesh->mesh.sizes[0] > 1 ? mesh->groups[0] : NULL;
    FC_TRY(comm->split(comm, mesh->mesh.ndim > 2 ? (int)mesh->coordinate[2] : 0, &all, err));
    options.all = j->partial ? mesh->groups[1] : all;
    fc_code rc = state_model_open(&m, mesh->groups[1], &options, err);
    if (rc == FC_OK && strncmp(j->action, "summon", 6) == 0) {
        rc = summon(&m, j->action + 6, err);
    }
    if (rc == FC_OK && (strcmp(j->action, "save") == 0 || strncmp(j->action, "summon", 6) == 0)) {
        rc = fc_fsdp_save(&m.state, j->type, j->path, &j->options, ranks, err);
    } else if (rc == FC_OK) {
        rc = strncmp(j->action, "load", 4) == 0 ? load(&m, j, err) : save_async(&m, j, ranks, err);
    }
    if (rc != FC_OK) {
        fc_comm_abort(all);
    }
    state_model_close(&m);
    all->free(all);
    return rc;
}

static fc_code on_rank(fc_comm *ranks, void *context, fc_error *err) {
    const job *j = context;
    fc_device_mesh mesh;
    fc_device *gpu = NULL;
    fc_comm *nccl = NULL;
    if (j->gpu) {
        FC_TRY(fc_comm_agree(ranks, fc_device_cuda(ranks->rank, &gpu, err), err));
        FC_TRY(fc_comm_nccl(ranks, gpu, &nccl, err));
    }
    FC_TRY(fc_device_mesh_new(nccl ? nccl : ranks, &j->mesh, &mesh, err));
    fc_code rc = run(nccl ? nccl : ranks, j, ranks, &mesh, err);
    fc_device_mesh_free(&mesh);
    if (nccl) {
        nccl->free(nccl);
        gpu->destroy(gpu);
    }
    return rc;
}

int main(int argc, char **argv) {
    if (argc < 8) {
        fprintf(stderr, "state_tool: too few arguments\n");
        return 2;
    }
    job j = {.action = argv[1], .path = argv[4]};
    j.type = argv[2][0] == 'f' ? FC_FULL_STATE_DICT : argv[2][0] == 's' ? FC_SHARDED_STATE_DICT : FC_LOCAL_STATE_DICT;
    j.model.one_handle = j.type == FC_LOCAL_STATE_DICT;
    j.options.format = fc_format_find(argv[3]);
    const int tp = atoi(argv[7]);
    j.mesh = (fc_mesh){.ndim = tp > 1 ? 3 : 2, .sizes = {atoi(argv[5]), atoi(argv[6]), tp}};
    for (int i = 8; i < argc; i++) {
        j.model.one_handle |= strcmp(argv[i], "one") == 0;
        j.model.fsdp.use_orig_params |= strcmp(argv[i], "orig") == 0;
        j.options.force |= strcmp(argv[i], "force") == 0;
        j.gpu |= strcmp(argv[i], "gpu") == 0;
        j.model.mixed |= strcmp(argv[i], "mixed") == 0;
        j.partial |= strcmp(argv[i], "partial") == 0;
        if (strcmp(argv[i], "whole") == 0) {
            j.model.unit.strategy = FC_NO_SHARD;
        }
    }
    if (j.mesh.sizes[0] > 1) {
        j.model.unit.strategy = FC_HYBRID_SHARD;
    }
    fc_error err = {FC_OK, ""};
    fc_code rc = fc_device_run_local((int)fc_mesh_ranks(&j.mesh), on_rank, &j, &err);
    if (rc != FC_OK) {
        fprintf(stderr, "state_tool: %s\n", err.message);
    }
    return fc_exit_status(rc);
}
