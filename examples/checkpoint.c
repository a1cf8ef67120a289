/*
 * The checkpoints of train_mlp: parameters, the states of AdamW and the number of steps, under the names of
 * torch.distributed.checkpoint.state_dict.get_state_dict. Each rank writes and reads only its shards.
 */
#include "train.h"

enum { KINDS = 2 };

/* Everything to save or load, and what it refers to. */
typedef struct state {
    fc_fsdp_optim_state optim[2 * MLP_LAYERS];
    fc_array step; /* of one parameter, in host memory; torch has one for each, so it is listed for each */
    float steps;
    char names[MLP_LAYERS][KINDS][64];
    fc_path_element paths[MLP_LAYERS][KINDS][4];
    fc_fsdp_value values[MLP_LAYERS * KINDS];
    fc_fsdp_state all;
} state;

static fc_code describe(trainer *t, state *s, fc_error *err) {
    size_t count = 0;
    s->steps = (float)t->step;
    FC_TRY(fc_array_over(t->host->device, FC_F32, 0, NULL, &s->steps, &s->step, err));
    for (int i = 0; i < MLP_LAYERS; i++) {
        train_layer *l = &t->layers[i];
        s->optim[2 * i] = (fc_fsdp_optim_state){l->handle, "exp_avg", &l->exp_avg};
        s->optim[2 * i + 1] = (fc_fsdp_optim_state){l->handle, "exp_avg_sq", &l->exp_avg_sq};
        for (int kind = 0; kind < KINDS; kind++) {
            fc_path_element *e = s->paths[i][kind];
            train_name(&mlp_layers[i], kind, s->names[i][kind], sizeof s->names[i][kind]);
            e[0].key = "optim";
            e[1].key = "state";
            e[2].key = s->names[i][kind];
            e[3].key = "step";
            s->values[count++] = (fc_fsdp_value){{e, 4}, &s->step};
        }
    }
    s->all = (fc_fsdp_state){
        .fsdp = t->fsdp, .optim = s->optim, .noptim = 2 * MLP_LAYERS, .values = s->values, .nvalues = count};
    return FC_OK;
}

fc_code train_load(trainer *t, const char *path, fc_error *err) {
    state s = {.all = {0}};
    fc_checkpoint *from = NULL;
    FC_TRY(describe(t, &s, err));
    FC_TRY(fc_checkpoint_open(path, NULL, &from, err));
    fc_code rc = fc_fsdp_load(&s.all, FC_SHARDED_STATE_DICT, from, err);
    fc_checkpoint_close(from);
    t->step = (int64_t)s.steps;
    return rc;
}

fc_code train_save(trainer *t, const char *path, fc_error *err) {
    const fc_fsdp_save_options options = {.format = fc_format_find("h5"), .force = true};
    state s = {.all = {0}};
    FC_TRY(fc_comm_agree(t->host, describe(t, &s, err), err));
    return fc_fsdp_save_start(t->saver, &s.all, FC_SHARDED_STATE_DICT, path, &options, err);
}
