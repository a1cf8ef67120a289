/*
 * Reads the arguments of the run that saved a file, the argparse.Namespace `args`, and checks the files against them.
 * Files that belong to another checkpoint or that the rank of their directory cannot have saved are rejected.
 */
#include "megatron/stages.h"

#include "fsdpckpt/order.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static int64_t number_of(const fc_pickle *p, fc_pv state, const char *name) {
    int64_t value;
    fc_pv v = fc_torch_dict_get(p, state, name);
    if (fc_pv_typeof(v) == FC_PV_BOOL) {
        return fc_pv_is_true(v);
    }
    return v && fc_pickle_int(p, v, &value) && value >= 0 ? value : -1;
}

void fc_mg_read_args(const torch_file *f, fc_mg_args *out) {
    static const char *const gates[] = {"swiglu", "gated_linear_unit", "geglu", "quick_geglu"};
    *out = (fc_mg_args){-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    fc_pv root = f->p->root, args = fc_pv_typeof(root) == FC_PV_DICT ? fc_torch_dict_get(f->p, root, "args") : 0;
    out->iteration = args ? number_of(f->p, root, "iteration") : -1;
    fc_pv state = fc_pv_typeof(args) == FC_PV_CALL ? fc_pickle_state(f->p, args) : args;
    if (fc_pv_typeof(state) != FC_PV_DICT) {
        return;
    }
    out->tp = number_of(f->p, state, "tensor_model_parallel_size");
    out->stages = number_of(f->p, state, "pipeline_model_parallel_size");
    out->context = number_of(f->p, state, "context_parallel_size");
    out->ep = number_of(f->p, state, "expert_model_parallel_size");
    out->expert_tp = number_of(f->p, state, "expert_tensor_parallel_size");
    out->experts = number_of(f->p, state, "num_experts");
    out->layers = number_of(f->p, state, "num_layers");
    out->untied = number_of(f->p, state, "untie_embeddings_and_output_weights");
    out->rank = number_of(f->p, state, "rank");
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        int64_t gated = number_of(f->p, state, gates[i]);
        out->gated = gated > out->gated ? gated : out->gated;
    }
}

fc_code fc_mg_check_alike(const fc_mg_reader *r, const fc_mg_args *b) {
    const fc_mg_args *a = &r->args;
    const struct {
        const char *name;
        int64_t first, own;
    } numbers[] = {
        {"iteration", a->iteration, b->iteration},
        {"num_layers", a->layers, b->layers},
        {"num_experts", a->experts, b->experts},
        {"tensor_model_parallel_size", a->tp, b->tp},
        {"pipeline_model_parallel_size", a->stages, b->stages},
        {"expert_model_parallel_size", a->ep, b->ep},
        {"expert_tensor_parallel_size", a->expert_tp, b->expert_tp},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (numbers[i].first >= 0 && numbers[i].own >= 0 && numbers[i].first != numbers[i].own) {
            return fc_fail(r->err, FC_ECORRUPT,
                           "%s: the file belongs to another checkpoint than %s: %s is %" PRId64 " here and %" PRId64
                           " there; copy the whole directory again",
                           r->f.path, fc_mg_file(r, 0), numbers[i].name, numbers[i].own, numbers[i].first);
        }
    }
    return FC_OK;
}

fc_code fc_mg_check_args(const fc_checkpoint *checkpoint, const fc_mg_args *args, const fc_mg_grid *grid,
                         fc_error *err) {
    if ((args->tp > 0 && args->tp != grid->tp) || (args->stages > 0 && args->stages != grid->stages)) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: according to args, %" PRId64 " tensor-parallel ranks in %" PRId64
                       " pipeline stages saved it, but there are files of %" PRId64 " in %" PRId64
                       "; copy the whole directory, or give the path of one rank's file",
                       checkpoint->path, args->tp, args->stages, grid->tp, grid->stages);
    }
    if (args->ep > 0 && args->ep != grid->ep) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: according to args, %" PRId64
                       " expert-parallel ranks saved it, but there are files of %" PRId64
                       "; copy the whole directory, or give the path of one rank's file",
                       checkpoint->path, args->ep, grid->ep);
    }
    if (grid->expert_tp > grid->tp || grid->tp % grid->expert_tp != 0) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: according to args, experts are sharded over %" PRId64 " ranks and the rest over %" PRId64
                       ", so ranks with different shards overwrote each other's files; save with Megatron's "
                       "--ckpt-format torch_dist",
                       checkpoint->path, grid->expert_tp, grid->tp);
    }
    return FC_OK;
}

/* Whether the files record different ranks. Tools that convert checkpoints write the same rank into all. */
static bool are_distinct(const fc_mg_reader *r, const int64_t *wrote, int64_t *sorted) {
    size_t n = r->grid.count;
    memcpy(sorted, wrote, n * sizeof *sorted);
    fc_sort_items(sorted, n, sizeof *sorted, fc_order_numbers);
    for (size_t i = 1; i < n; i++) {
        if (sorted[i] == sorted[i - 1]) {
            return false;
        }
    }
    return sorted[0] >= 0;
}

/* Whether the rank that wrote file `i` can have the coordinates of its directory: Megatron counts tensor-parallel ranks
 * first and stages last. */
static bool fits(const fc_mg_reader *r, const int64_t *wrote, size_t i) {
    const fc_mg_grid *g = &r->grid;
    const fc_mg_place *p = &g->places[i];
    size_t stage = g->count / (size_t)g->stages;
    bool alike = i >= stage && g->places[i - stage].tensor == p->tensor && g->places[i - stage].expert == p->expert;
    return wrote[i] % g->tp == p->tensor && (r->args.context > 1 || wrote[i] / g->expert_tp % g->ep == p->expert) &&
           (!alike || wrote[i] > wrote[i - stage]);
}

fc_code fc_mg_check_writers(const fc_mg_reader *r, const int64_t *wrote) {
    int64_t *sorted = malloc(r->grid.count * sizeof *sorted);
    fc_code rc = sorted ? FC_OK : fc_mg_no_memory(r);
    bool known = rc == FC_OK && are_distinct(r, wrote, sorted);
    for (size_t i = 0; known && rc == FC_OK && i < r->grid.count; i++) {
        if (!fits(r, wrote, i)) {
            rc =
                fc_fail(r->err, FC_ECORRUPT,
                        "%s: according to args, rank %" PRId64 " wrote the file, but it is in the directory of another "
                        "rank: directories were renamed or swapped; restore their names",
                        fc_mg_file(r, (uint32_t)i), wrote[i]);
        }
    }
    free(sorted);
    return rc;
}
