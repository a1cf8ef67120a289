/*
 * train_mlp trains a small multi-layer perceptron with FSDP and AdamW, without Python, over threads, MPI or NCCL. It
 * has mixed precision, gradient accumulation, HSDP, prefetching and offloading. It saves sharded HDF5 checkpoints while
 * it trains, resumes from checkpoints of any layout and format, and can write its results for a comparison with
 * PyTorch.
 *
 *   train_mlp --ranks 4 --steps 10 --save ckpt
 *   fsdpckpt reshard ckpt -o ckpt2 --dp 2
 *   mpirun -n 2 train_mlp --comm mpi --resume ckpt2 --steps 10
 *
 * The host computes (mlp.c). FSDP keeps parameters, gradients and optimizer state on the device.
 */
#include "train.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

void train_name(const mlp_layer *layer, int kind, char *out, size_t size) {
    snprintf(out, size, "%s.%s", layer->name, kind == 0 ? "weight" : "bias");
}

/* Makes a parameter with its initial values, which are the same on all ranks. */
static fc_code new_param(mlp_random *random, const mlp_layer *layer, int kind, fc_device *device, fc_array *out,
                         fc_error *err) {
    float values[MLP_WIDEST * MLP_WIDEST];
    int64_t shape[] = {layer->out, layer->in}, count = kind == 0 ? (int64_t)layer->out * layer->in : layer->out;
    for (int64_t i = 0; i < count; i++) {
        values[i] = mlp_random_next(random) * 0.25f;
    }
    FC_TRY(fc_array_new(device, FC_F32, kind == 0 ? 2 : 1, shape, out, err));
    return train_store(out, values, err);
}

static fc_code add_layer(trainer *t, int i, mlp_random *random, fc_error *err) {
    const mlp_layer *layer = &mlp_layers[i];
    fc_fsdp_param_init init[2];
    fc_fsdp_tensor tensors[2] = {{.is_dtensor = false}, {.is_dtensor = false}};
    char names[2][64];
    fc_code rc = FC_OK;
    for (int kind = 0; rc == FC_OK && kind < 2; kind++) {
        fc_array *local = &tensors[kind].local;
        train_name(layer, kind, names[kind], sizeof names[kind]);
        rc = new_param(random, layer, kind, t->world->device, local, err);
        init[kind] = (fc_fsdp_param_init){names[kind], &tensors[kind], true, -1};
    }
    rc = rc == FC_OK ? fc_fsdp_add_handle(t->layers[i].unit, init, 2, &t->layers[i].handle, err) : rc;
    fc_array_free(&tensors[0].local);
    fc_array_free(&tensors[1].local);
    return rc;
}

/* Makes an optimizer state of zeros. */
static fc_code add_state(trainer *t, int i, fc_array *out, fc_error *err) {
    const fc_array *shard = fc_fsdp_local_shard(t->layers[i].handle);
    fc_device *device = shard->device->is_host ? t->host->device : shard->device; /* it outlives FSDP's own */
    FC_TRY(fc_array_new(device, FC_F32, 1, shard->sizes, out, err));
    FC_TRY(out->device->zero(out->device, out->data, fc_array_bytes(out), NULL, err));
    return out->device->synchronize(out->device, NULL, err);
}

static fc_code add_layers(trainer *t, fc_error *err) {
    mlp_random random = mlp_random_new(1);
    for (int k = 0; k < MLP_LAYERS; k++) {
        int i = (k + MLP_LAYERS - 1) % MLP_LAYERS; /* the root, which holds the head, must be added first */
        fc_fsdp_unit_options unit = t->options->unit;
        unit.is_root = k == 0;
        FC_TRY(fc_fsdp_add_unit(t->fsdp, mlp_layers[i].name, &unit, &t->layers[i].unit, err));
    }
    for (int i = 0; i < MLP_LAYERS; i++) {
        FC_TRY(add_layer(t, i, &random, err));
        FC_TRY(add_state(t, i, &t->layers[i].exp_avg, err));
        FC_TRY(add_state(t, i, &t->layers[i].exp_avg_sq, err));
    }
    return FC_OK;
}

static fc_code split_mesh(trainer *t, fc_error *err) {
    int replicas = t->options->replicas;
    if (MLP_BATCH % t->world->size != 0 || t->world->size % replicas != 0) {
        return fc_fail(err, FC_EUSAGE, "%d ranks must divide the batch of %d, and %d replicas must divide the ranks",
                       t->world->size, (int)MLP_BATCH, replicas);
    }
    t->mesh = (fc_mesh){.ndim = 1, .sizes = {t->world->size}, .names = {"dp"}};
    t->shard = t->world;
    if (replicas == 1) {
        return FC_OK;
    }
    t->mesh = (fc_mesh){.ndim = 2, .sizes = {replicas, t->world->size / replicas}, .names = {"replicate", "dp"}};
    FC_TRY(fc_comm_split_mesh(t->world, &t->mesh, 0, &t->replicate, err));
    return fc_comm_split_mesh(t->world, &t->mesh, 1, &t->shard, err);
}

static fc_code open_trainer(trainer *t, fc_error *err) {
    const train_options *o = t->options;
    char path[1024];
    fc_code rc = split_mesh(t, err);
    if (rc == FC_OK && o->dump) {
        snprintf(path, sizeof path, "%s/rank-%d.jsonl", o->dump, t->world->rank);
        t->dump = fopen(path, "w");
        rc = t->dump ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be written", path);
    }
    rc = rc == FC_OK ? fc_fsdp_new(t->shard, t->replicate, NULL, &o->fsdp, &t->fsdp, err) : rc;
    rc = rc == FC_OK ? add_layers(t, err) : rc;
    rc = rc == FC_OK && o->resume ? train_load(t, o->resume, err) : rc;
    FC_TRY(fc_comm_agree(t->host, rc, err));
    return o->save ? fc_fsdp_saver_new(t->host, &t->saver, err) : FC_OK;
}

static void close_trainer(trainer *t) {
    fc_fsdp_saver_free(t->saver);
    fc_fsdp_free(t->fsdp);
    for (int i = 0; i < MLP_LAYERS; i++) {
        fc_array_free(&t->layers[i].exp_avg);
        fc_array_free(&t->layers[i].exp_avg_sq);
    }
    if (t->replicate) {
        t->shard->free(t->shard);
        t->replicate->free(t->replicate);
    }
    if (t->dump) {
        fclose(t->dump);
    }
}

/* The results of the forward that the backward needs. */
typedef struct activations {
    int samples;
    float x[MLP_LAYERS + 1][MLP_BATCH * MLP_WIDEST]; /* the input of each layer, and the output of the last */
    float target[MLP_BATCH * MLP_OUT];
} activations;

static fc_dtype compute_dtype(const trainer *t) {
    return t->options->unit.has_param_dtype ? t->options->unit.param_dtype : FC_F32;
}

/* Makes this rank's samples of one of four batches. The batches do not depend on the number of ranks. */
static void next_batch(const trainer *t, int micro, activations *a) {
    mlp_random random = mlp_random_new(1000 + (uint64_t)(t->step * t->options->accumulate + micro) % 4);
    a->samples = MLP_BATCH / t->world->size;
    for (int s = 0; s < MLP_BATCH; s++) {
        int mine = s - t->world->rank * a->samples;
        bool keep = mine >= 0 && mine < a->samples;
        for (int k = 0; k < MLP_IN + MLP_OUT; k++) {
            float value = mlp_random_next(&random);
            if (keep && k < MLP_IN) {
                a->x[0][mine * MLP_IN + k] = value;
            } else if (keep) {
                a->target[mine * MLP_OUT + k - MLP_IN] = value;
            }
        }
    }
}

static fc_code fetch_params(trainer *t, int i, float *w, float *b, fc_error *err) {
    fc_fsdp_tensor param;
    FC_TRY(fc_fsdp_param(t->layers[i].handle, 0, &param, err));
    FC_TRY(train_fetch(&param.local, w, err));
    FC_TRY(fc_fsdp_param(t->layers[i].handle, 1, &param, err));
    return train_fetch(&param.local, b, err);
}

static fc_code forward_layer(trainer *t, int i, activations *a, fc_error *err) {
    float w[MLP_WIDEST * MLP_WIDEST], b[MLP_WIDEST];
    const mlp_layer *layer = &mlp_layers[i];
    int64_t count = (int64_t)a->samples * layer->out;
    FC_TRY(fetch_params(t, i, w, b, err));
    mlp_linear(layer, a->samples, a->x[i], w, b, a->x[i + 1]);
    mlp_round(compute_dtype(t), a->x[i + 1], count);
    if (i + 1 < MLP_LAYERS) {
        mlp_relu(a->x[i + 1], count);
    }
    return FC_OK;
}

static fc_code forward(trainer *t, activations *a, fc_error *err) {
    fc_fsdp_unit *root = t->layers[MLP_LAYERS - 1].unit;
    mlp_round(compute_dtype(t), a->x[0], (int64_t)a->samples * MLP_IN); /* like the root, which casts its inputs */
    FC_TRY(fc_fsdp_root_pre_forward(t->fsdp, NULL, 0, err));
    FC_TRY(fc_fsdp_pre_forward(root, true, NULL, 0, err));
    for (int i = 0; i < MLP_LAYERS - 1; i++) {
        FC_TRY(fc_fsdp_pre_forward(t->layers[i].unit, true, NULL, 0, err));
        FC_TRY(forward_layer(t, i, a, err));
        FC_TRY(fc_fsdp_post_forward(t->layers[i].unit, err));
    }
    FC_TRY(forward_layer(t, MLP_LAYERS - 1, a, err));
    return fc_fsdp_post_forward(root, err);
}

/* Replaces g = dL/d(output) by dL/d(input), and computes the gradients of the parameters. */
static fc_code backward_layer(trainer *t, int i, const activations *a, float *g, fc_error *err) {
    float w[MLP_WIDEST * MLP_WIDEST], b[MLP_WIDEST], gw[MLP_WIDEST * MLP_WIDEST], gb[MLP_WIDEST];
    float gx[MLP_BATCH * MLP_WIDEST];
    const mlp_layer *layer = &mlp_layers[i];
    fc_array view;
    FC_TRY(fc_fsdp_pre_backward(t->layers[i].unit, err));
    FC_TRY(fetch_params(t, i, w, b, err));
    if (i + 1 < MLP_LAYERS) {
        mlp_relu_backward(a->x[i + 1], g, (int64_t)a->samples * layer->out);
    }
    mlp_linear_backward(layer, a->samples, a->x[i], w, g, gx, gw, gb);
    FC_TRY(fc_fsdp_grad(t->layers[i].handle, 0, &view, err));
    FC_TRY(train_store(&view, gw, err)); /* rounds to the param dtype */
    FC_TRY(fc_fsdp_grad(t->layers[i].handle, 1, &view, err));
    FC_TRY(train_store(&view, gb, err));
    mlp_round(compute_dtype(t), gx, (int64_t)a->samples * layer->in);
    memcpy(g, gx, (size_t)(a->samples * layer->in) * sizeof *g);
    return fc_fsdp_post_backward(t->layers[i].handle, err);
}

static fc_code backward(trainer *t, const activations *a, float *loss, fc_error *err) {
    float g[MLP_BATCH * MLP_WIDEST];
    int64_t count = (int64_t)a->samples * MLP_OUT;
    *loss = mlp_loss(a->x[MLP_LAYERS], a->target, count, g);
    mlp_round(compute_dtype(t), g, count);
    for (int i = MLP_LAYERS; i-- > 0;) {
        FC_TRY(backward_layer(t, i, a, g, err));
    }
    return fc_fsdp_post_backward_final(t->fsdp, err);
}

static void dump_array(FILE *out, const char *key, const char *name, const float *values, int64_t count) {
    fprintf(out, ", \"%s.%s\": \"", key, name);
    for (int64_t i = 0; i < count; i++) {
        unsigned char bytes[sizeof *values];
        memcpy(bytes, &values[i], sizeof bytes);
        fprintf(out, "%02x%02x%02x%02x", bytes[0], bytes[1], bytes[2], bytes[3]);
    }
    fputs("\"", out);
}

static fc_code update_layer(trainer *t, int i, fc_error *err) {
    static const mlp_adamw adamw = {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
    train_layer *l = &t->layers[i];
    fc_array *shard = fc_fsdp_local_shard(l->handle), *grad = fc_fsdp_sharded_grad(l->handle);
    const fc_array *arrays[] = {shard, grad, &l->exp_avg, &l->exp_avg_sq};
    size_t n = (size_t)shard->sizes[0];
    float *values = calloc(4 * n, sizeof *values);
    fc_code rc = values ? FC_OK : fc_no_memory(err, NULL);
    for (size_t k = 0; rc == FC_OK && k < 4; k++) {
        rc = train_fetch(arrays[k], values + k * n, err);
    }
    if (rc == FC_OK && t->dump) {
        dump_array(t->dump, "grad", mlp_layers[i].name, values + n, (int64_t)n);
    }
    if (rc == FC_OK) {
        mlp_adamw_step(&adamw, t->step, values, values + n, values + 2 * n, values + 3 * n, (int64_t)n);
    }
    rc = rc == FC_OK ? train_store(shard, values, err) : rc;
    rc = rc == FC_OK ? train_store(&l->exp_avg, values + 2 * n, err) : rc;
    rc = rc == FC_OK ? train_store(&l->exp_avg_sq, values + 3 * n, err) : rc;
    if (rc == FC_OK && t->dump) {
        dump_array(t->dump, "param", mlp_layers[i].name, values, (int64_t)n);
    }
    free(values);
    return rc;
}

/* Prints the loss of the whole batch. All ranks have the same number of samples. */
static fc_code print_loss(trainer *t, float loss, fc_error *err) {
    fc_code rc = t->host->all_reduce(t->host, &loss, 1, FC_F32, FC_REDUCE_AVG, err);
    if (rc == FC_OK && t->host->rank == 0) {
        printf("step %lld: loss %.6f\n", (long long)t->step, (double)loss);
    }
    return rc;
}

static fc_code train_step(trainer *t, fc_error *err) {
    float losses[64];
    int micros = t->options->accumulate;
    for (int micro = 0; micro < micros; micro++) {
        activations a;
        next_batch(t, micro, &a);
        fc_fsdp_set_sync_gradients(t->fsdp, micro + 1 == micros);
        FC_TRY(forward(t, &a, err));
        FC_TRY(backward(t, &a, &losses[micro], err));
    }
    t->step++;
    if (t->dump) {
        fprintf(t->dump, "{\"step\": %lld", (long long)t->step);
        dump_array(t->dump, "loss", "all", losses, micros);
    }
    fc_code rc = FC_OK; /* the line of the dump is closed even after a failure */
    for (int i = 0; rc == FC_OK && i < MLP_LAYERS; i++) {
        rc = update_layer(t, i, err);
    }
    if (t->dump) {
        fputs("}\n", t->dump);
    }
    if (rc != FC_OK) {
        return rc;
    }
    FC_TRY(print_loss(t, losses[micros - 1], err));
    return fc_fsdp_zero_grad(t->fsdp, err);
}

/* Trains on one rank. `host` has the same ranks as `world`, with buffers in host memory. */
static fc_code train(const train_options *o, fc_comm *world, fc_comm *host, fc_error *err) {
    trainer *t = calloc(1, sizeof *t);
    if (!t) {
        return fc_no_memory(err, NULL);
    }
    t->options = o;
    t->world = world;
    t->host = host;
    fc_code rc = open_trainer(t, err);
    for (int i = 0; rc == FC_OK && i < o->steps; i++) {
        rc = train_step(t, err);
        bool saves = o->save && (i + 1 == o->steps || (o->save_every > 0 && (i + 1) % o->save_every == 0));
        rc = rc == FC_OK && saves ? train_save(t, o->save, err) : rc;
    }
    if (rc == FC_OK && t->saver) {
        rc = fc_fsdp_save_wait(t->saver, err);
    }
    close_trainer(t);
    free(t);
    return rc;
}

static fc_code train_thread(fc_comm *comm, void *context, fc_error *err) {
    return train(context, comm, comm, err);
}

static fc_code train_processes(const train_options *o, fc_error *err) {
    fc_device *cpu = NULL, *gpu = NULL;
    fc_comm *mpi = NULL, *nccl = NULL;
    fc_code rc;
    FC_TRY_GOTO(fc_device_cpu(&cpu, err), rc, out);
    FC_TRY_GOTO(fc_device_mpi(cpu, &mpi, err), rc, out);
    if (strcmp(o->comm, "nccl") == 0) {
        FC_TRY_GOTO(fc_comm_agree(mpi, fc_device_cuda(mpi->rank, &gpu, err), err), rc, out);
        FC_TRY_GOTO(fc_comm_nccl(mpi, gpu, &nccl, err), rc, out);
    }
    rc = train(o, nccl ? nccl : mpi, mpi, err);
out:
    if (nccl) {
        nccl->free(nccl);
    }
    if (mpi) {
        mpi->broken = mpi->broken || rc != FC_OK;
        mpi->free(mpi);
    }
    if (gpu) {
        gpu->destroy(gpu);
    }
    if (cpu) {
        cpu->destroy(cpu);
    }
    return rc;
}

static const struct option long_options[] = {
    {"comm", 1, NULL, 'c'},
    {"ranks", 1, NULL, 'n'},
    {"steps", 1, NULL, 's'},
    {"accumulate", 1, NULL, 'a'},
    {"replicas", 1, NULL, 'r'},
    {"strategy", 1, NULL, 't'},
    {"param-dtype", 1, NULL, 'p'},
    {"reduce-dtype", 1, NULL, 'q'},
    {"prefetch", 0, NULL, 'f'},
    {"offload", 0, NULL, 'o'},
    {"orig-params", 0, NULL, 'g'},
    {"save", 1, NULL, 'w'},
    {"save-every", 1, NULL, 'e'},
    {"resume", 1, NULL, 'l'},
    {"dump", 1, NULL, 'd'},
    {"help", 0, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static const char usage[] =
    "usage: train_mlp [--comm local|mpi|nccl] [--ranks N] [--steps N] [--accumulate N] [--replicas N]\n"
    "                 [--strategy full|grad-op|no] [--param-dtype TYPE] [--reduce-dtype TYPE] [--prefetch]\n"
    "                 [--offload] [--orig-params] [--save DIR] [--save-every N] [--resume CHECKPOINT] [--dump DIR]\n";

static const char options_help[] =
    "\n"
    "Trains a small model with FSDP and AdamW on generated data, which is the same in every run.\n"
    "\n"
    "  --comm HOW           local: ranks are threads (the default); mpi, nccl: under mpirun\n"
    "  --ranks N            number of threads, a divisor of the batch of 8 (default: 2)\n"
    "  --steps N            number of steps to train (default: 10)\n"
    "  --accumulate N       micro batches per step (default: 1)\n"
    "  --replicas N         HSDP: N groups of ranks that each hold the whole model (default: 1)\n"
    "  --strategy S         full, grad-op or no: what is sharded (default: full)\n"
    "  --param-dtype TYPE   dtype of the parameters in the computation, such as bf16\n"
    "  --reduce-dtype TYPE  dtype in which gradients are reduced\n"
    "  --prefetch           gather the parameters of the next unit ahead in the forward too\n"
    "  --offload            keep parameters and gradients on the host\n"
    "  --orig-params        like use_orig_params in PyTorch\n"
    "  --save DIR           write the final state, one file per rank\n"
    "  --save-every N       write it every N steps too, in the background\n"
    "  --resume CHECKPOINT  continue from a checkpoint of any layout\n"
    "  --dump DIR           write losses, gradients and parameters, for comparisons\n";

static bool parse_number(const char *text, int most, int *out) {
    char *end;
    long value = strtol(text, &end, 10);
    *out = (int)value;
    return *text && !*end && value >= 1 && value <= most;
}

static bool parse_strategy(const char *name, fc_sharding_strategy *out) {
    static const char *const names[] = {"full", "grad-op", "no"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (fc_sharding_strategy)i;
            return true;
        }
    }
    return false;
}

static bool parse_option(train_options *o, int option) {
    switch (option) {
    case 'c':
        o->comm = optarg;
        return strcmp(optarg, "local") == 0 || strcmp(optarg, "mpi") == 0 || strcmp(optarg, "nccl") == 0;
    case 'n':
        return parse_number(optarg, MLP_BATCH, &o->ranks);
    case 's':
        return parse_number(optarg, 1 << 30, &o->steps);
    case 'a':
        return parse_number(optarg, 64, &o->accumulate);
    case 'r':
        return parse_number(optarg, MLP_BATCH, &o->replicas);
    case 't':
        return parse_strategy(optarg, &o->unit.strategy);
    case 'p':
        o->unit.has_param_dtype = true;
        return fc_dtype_find(optarg, strlen(optarg), &o->unit.param_dtype);
    case 'q':
        o->unit.has_reduce_dtype = true;
        return fc_dtype_find(optarg, strlen(optarg), &o->unit.reduce_dtype);
    case 'f':
        o->fsdp.forward_prefetch = true;
        return true;
    case 'o':
        o->unit.offload_params = true;
        return true;
    case 'g':
        o->fsdp.use_orig_params = true;
        return true;
    case 'w':
        o->save = optarg;
        return true;
    case 'e':
        return parse_number(optarg, 1 << 30, &o->save_every);
    case 'l':
        o->resume = optarg;
        return true;
    case 'd':
        o->dump = optarg;
        return true;
    default:
        return false;
    }
}

int main(int argc, char **argv) {
    train_options o = {.comm = "local", .ranks = 2, .steps = 10, .accumulate = 1, .replicas = 1};
    fc_error err = {FC_OK, ""};
    int option;
    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (option == 'h') {
            fputs(usage, stdout);
            fputs(options_help, stdout);
            return 0;
        }
        if (!parse_option(&o, option)) {
            fputs(usage, stderr);
            return 2;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "train_mlp: unexpected argument '%s'\n%s", argv[optind], usage);
        return 2;
    }
    if (o.replicas > 1) {
        o.unit.strategy = o.unit.strategy == FC_SHARD_GRAD_OP ? FC_HYBRID_SHARD_ZERO2 : FC_HYBRID_SHARD;
    }
    fc_code rc =
        strcmp(o.comm, "local") == 0 ? fc_device_run_local(o.ranks, train_thread, &o, &err) : train_processes(&o, &err);
    if (rc != FC_OK) {
        fprintf(stderr, "train_mlp: %s\n", err.message);
    }
    return fc_exit_status(rc);
}
