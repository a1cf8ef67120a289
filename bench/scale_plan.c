/*
 * scale_plan SCHEMA FROM TO computes the data that a change of layout and a training step move between ranks. FROM and
 * TO are meshes: "4096" is dp 4096, "512x8" is dp 512 × tp 8. It prints one JSON object, from which bench/scale.py
 * makes docs/SCALING.md. It makes the same plans as the command, but reads no data.
 *
 * A message is a box of one tensor that one rank needs from another. Tensors with equal shape, dtype, placements and
 * owners are planned once and counted several times.
 */
#include "fsdpckpt/flat_param.h"
#include "fsdpckpt/move.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/replica_owner.h"
#include "fsdpckpt/wrap_policy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

/* A layout of the model. */
typedef struct side {
    fc_mesh mesh;
    fc_target target;
    uint64_t *loads; /* bytes that each rank stores */
    uint64_t largest, smallest;
} side;

/* The transfers from one layout to the other. */
typedef struct moves {
    uint64_t messages, remote_bytes, local_bytes;
    uint64_t *received, *sent; /* bytes per rank */
    uint64_t *messages_of;     /* messages per target rank */
    unsigned char *pairs;      /* one bit for (target rank, source rank) */
    uint64_t npairs, most_partners, most_messages, most_received, most_sent;
    size_t classes;
} moves;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *allocate(size_t count, size_t size) {
    void *p = calloc(count ? count : 1, size);
    if (!p) {
        fprintf(stderr, "scale_plan: out of memory\n");
        exit(4);
    }
    return p;
}

static fc_code make_side(const fc_checkpoint *model, const char *text, fc_arena *arena, side *out, fc_error *err) {
    char *end;
    fc_layout_spec spec = {.dp = strtoll(text, &end, 10)};
    const fc_tp_plan *plan = NULL;
    fc_selected counts;
    if (*end == 'x') {
        spec.tp = strtoll(end + 1, &end, 10);
    }
    if (*end || spec.dp < 1) {
        return fc_fail(err, FC_EUSAGE, "%s: not a mesh such as 4096 or 512x8", text);
    }
    fc_code rc = fc_layout_mesh(&spec, &out->mesh, err);
    rc = rc == FC_OK ? fc_tp_plan_load(NULL, arena, &plan, err) : rc;
    const fc_selection selection = {.mesh = &out->mesh, .tp_plan = spec.tp ? plan : NULL};
    rc = rc == FC_OK ? fc_target_new(model, &selection, arena, &out->target, &counts, err) : rc;
    if (rc != FC_OK) {
        return rc;
    }
    int64_t ranks = fc_mesh_ranks(&out->mesh);
    out->loads = allocate((size_t)ranks, sizeof *out->loads);
    rc = fc_target_loads(&out->target, out->loads, err);
    out->smallest = UINT64_MAX;
    for (int64_t r = 0; r < ranks; r++) {
        out->largest = out->loads[r] > out->largest ? out->loads[r] : out->largest;
        out->smallest = out->loads[r] < out->smallest ? out->loads[r] : out->smallest;
    }
    return rc;
}

/* ---- classes of equal tensors ---- */

static int compare_side(const side *s, uint32_t a, uint32_t b) {
    const fc_target_tensor *x = &s->target.tensors[a], *y = &s->target.tensors[b];
    for (int m = 0; m < s->mesh.ndim; m++) {
        const fc_placement *p = &x->placements[m], *q = &y->placements[m];
        int64_t order[] = {(int64_t)p->kind - (int64_t)q->kind, p->dim - q->dim, p->split_factor - q->split_factor};
        for (int i = 0; i < 3; i++) {
            if (order[i]) {
                return order[i] < 0 ? -1 : 1;
            }
        }
    }
    return (x->owner_offset > y->owner_offset) - (x->owner_offset < y->owner_offset);
}

static int compare_alike(const void *pa, const void *pb, void *context) {
    const side *sides = context;
    uint32_t a = *(const uint32_t *)pa, b = *(const uint32_t *)pb;
    const fc_tensor *x = sides[0].target.tensors[a].source, *y = sides[0].target.tensors[b].source;
    if (x->ndim != y->ndim || x->dtype != y->dtype) {
        return x->ndim != y->ndim ? (x->ndim < y->ndim ? -1 : 1) : x->dtype < y->dtype ? -1 : 1;
    }
    for (int d = 0; d < x->ndim; d++) {
        if (x->shape[d] != y->shape[d]) {
            return x->shape[d] < y->shape[d] ? -1 : 1;
        }
    }
    int order = compare_side(&sides[0], a, b);
    return order ? order : compare_side(&sides[1], a, b);
}

/* ---- one class of tensors ---- */

/* The distinct, nonempty boxes of a tensor in a layout, with the ranks that store them. */
typedef struct boxes {
    int64_t *dims; /* 2 × ndim each */
    uint32_t *ranks;
    size_t count;
} boxes;

static bool next_box(const fc_mesh *mesh, const fc_placement *placements, int64_t *coordinate) {
    for (int m = mesh->ndim - 1; m >= 0; m--) {
        if (placements[m].kind != FC_REPLICATE && ++coordinate[m] < mesh->sizes[m]) {
            return true;
        }
        coordinate[m] = placements[m].kind == FC_REPLICATE ? coordinate[m] : 0;
    }
    return false;
}

static fc_code list_boxes(const side *s, uint32_t index, boxes *out, fc_error *err) {
    const fc_target_tensor *t = &s->target.tensors[index];
    int ndim = t->source->ndim;
    int64_t coordinate[FC_MAX_MESH_DIMS] = {0};
    fc_code rc = FC_OK;
    out->count = 0;
    do {
        int64_t *dims = out->dims + out->count * 2 * (size_t)ndim;
        const fc_box box = {ndim, dims, dims + ndim};
        rc = fc_local_box(ndim, t->source->shape, &s->mesh, t->placements, coordinate, dims, dims + ndim, err);
        if (rc == FC_OK && fc_box_volume(&box) > 0) {
            out->ranks[out->count++] = (uint32_t)fc_replica_owner(&s->mesh, t->placements, coordinate, t->owner_offset);
        }
    } while (rc == FC_OK && next_box(&s->mesh, t->placements, coordinate));
    return rc;
}

/* The state of the search for the sources of one target box. */
typedef struct lookup {
    moves *m;
    const boxes *from;
    uint32_t target;
    uint64_t times;
    uint32_t element;
    int ndim;
    int64_t source_ranks;
} lookup;

static fc_code count_overlap(void *context, const fc_overlap *overlap, fc_error *err) {
    lookup *l = context;
    moves *m = l->m;
    uint32_t source = l->from->ranks[overlap->chunk];
    uint64_t bytes = l->element * l->times;
    (void)err;
    for (int d = 0; d < l->ndim; d++) {
        bytes *= (uint64_t)overlap->sizes[d];
    }
    if (source == l->target) {
        m->local_bytes += bytes;
        return FC_OK;
    }
    uint64_t bit = (uint64_t)l->target * (uint64_t)l->source_ranks + source;
    m->npairs += !(m->pairs[bit / 8] >> bit % 8 & 1);
    m->pairs[bit / 8] |= (unsigned char)(1 << bit % 8);
    m->messages += l->times;
    m->messages_of[l->target] += l->times;
    m->remote_bytes += bytes;
    m->received[l->target] += bytes;
    m->sent[source] += bytes;
    return FC_OK;
}

static fc_code plan_class(const side *sides, uint32_t index, uint64_t times, boxes *from, boxes *to, fc_chunk *chunks,
                          moves *m, fc_error *err) {
    const fc_tensor *t = sides[0].target.tensors[index].source;
    fc_coverage *coverage = NULL;
    fc_code rc = list_boxes(&sides[0], index, from, err);
    rc = rc == FC_OK ? list_boxes(&sides[1], index, to, err) : rc;
    for (size_t i = 0; i < from->count; i++) {
        chunks[i] = (fc_chunk){.dims = from->dims + i * 2 * (size_t)t->ndim, .rank = from->ranks[i]};
    }
    fc_tensor cut = *t;
    cut.chunks = chunks;
    cut.nchunks = from->count;
    rc = rc == FC_OK ? fc_coverage_new(&cut, &coverage, err) : rc;
    lookup l = {m, from, 0, times, fc_dtype_size(t->dtype), t->ndim, fc_mesh_ranks(&sides[0].mesh)};
    for (size_t i = 0; i < to->count && rc == FC_OK; i++) {
        const int64_t *dims = to->dims + i * 2 * (size_t)t->ndim;
        const fc_box box = {t->ndim, dims, dims + t->ndim};
        l.target = to->ranks[i];
        rc = fc_coverage_visit(coverage, &box, count_overlap, &l, err);
    }
    fc_coverage_free(coverage);
    return rc;
}

static void sum_up(moves *m, int64_t from, int64_t to) {
    for (int64_t r = 0; r < to; r++) {
        uint64_t partners = 0;
        for (int64_t s = 0; s < from; s++) {
            uint64_t bit = (uint64_t)r * (uint64_t)from + (uint64_t)s;
            partners += m->pairs[bit / 8] >> bit % 8 & 1;
        }
        m->most_partners = partners > m->most_partners ? partners : m->most_partners;
        m->most_messages = m->messages_of[r] > m->most_messages ? m->messages_of[r] : m->most_messages;
        m->most_received = m->received[r] > m->most_received ? m->received[r] : m->most_received;
    }
    for (int64_t s = 0; s < from; s++) {
        m->most_sent = m->sent[s] > m->most_sent ? m->sent[s] : m->most_sent;
    }
}

static fc_code plan_moves(const side *sides, moves *m, fc_error *err) {
    size_t from = (size_t)fc_mesh_ranks(&sides[0].mesh), to = (size_t)fc_mesh_ranks(&sides[1].mesh);
    size_t count = sides[0].target.ntensors, most = from > to ? from : to;
    uint32_t *order = allocate(count, sizeof *order);
    boxes a = {allocate(most * 2 * FC_MAX_DIMS, sizeof *a.dims), allocate(most, sizeof *a.ranks), 0};
    boxes b = {allocate(most * 2 * FC_MAX_DIMS, sizeof *b.dims), allocate(most, sizeof *b.ranks), 0};
    fc_chunk *chunks = allocate(most, sizeof *chunks);
    fc_code rc = FC_OK;
    m->received = allocate(to, sizeof *m->received);
    m->messages_of = allocate(to, sizeof *m->messages_of);
    m->sent = allocate(from, sizeof *m->sent);
    m->pairs = allocate(from * to / 8 + 1, 1);
    for (uint32_t i = 0; i < count; i++) {
        order[i] = i;
    }
    qsort_r(order, count, sizeof *order, compare_alike, (void *)(uintptr_t)sides);
    for (size_t i = 0, end; i < count && rc == FC_OK; i = end) {
        for (end = i + 1; end < count && compare_alike(&order[i], &order[end], (void *)(uintptr_t)sides) == 0; end++) {
        }
        m->classes++;
        if (!sides[0].target.tensors[order[i]].source->object) {
            rc = plan_class(sides, order[i], end - i, &a, &b, chunks, m, err);
        }
    }
    sum_up(m, (int64_t)from, (int64_t)to);
    free(order);
    free(a.dims);
    free(a.ranks);
    free(b.dims);
    free(b.ranks);
    free(chunks);
    return rc;
}

/* ---- an FSDP step ---- */

typedef struct step {
    size_t units;
    uint64_t largest, two; /* unsharded bytes of the largest unit, and of the largest two consecutive units */
    uint64_t shard;        /* elements of a rank's shards of all units, with padding */
    uint64_t numel;
} step;

static fc_code plan_step(const side *s, fc_arena *arena, step *out, fc_error *err) {
    const fc_unit_options options = {.use_orig_params = true};
    fc_module_tree tree;
    fc_wrap_targets targets;
    fc_units units;
    uint64_t before = 0;
    fc_code rc = fc_module_tree_of(&s->target, NULL, arena, &tree, err);
    rc = rc == FC_OK ? fc_wrap_targets_new(&tree, &options, arena, &targets, err) : rc;
    if (rc == FC_OK) {
        fc_wrap_blocks(&targets);
        rc = fc_wrap_units(&targets, arena, &units, err);
    }
    for (size_t u = 0; rc == FC_OK && u < units.count; u++) {
        const fc_flat_desc *descs;
        fc_flat_layout flat;
        rc = fc_unit_flat_descs(&tree, &units.units[u], arena, &descs, err);
        rc = rc == FC_OK ? fc_flat_layout_new(descs, units.units[u].nnames, fc_mesh_ranks(&s->mesh), true,
                                              descs[0].dtype, arena, &flat, err)
                         : rc;
        if (rc == FC_OK) {
            uint64_t bytes = (uint64_t)flat.shard_numel * (uint64_t)flat.world_size * fc_dtype_size(flat.dtype);
            out->units++;
            out->shard += (uint64_t)flat.shard_numel;
            out->numel += (uint64_t)units.units[u].numel;
            out->largest = bytes > out->largest ? bytes : out->largest;
            out->two = before + bytes > out->two ? before + bytes : out->two;
            before = bytes;
        }
    }
    return rc;
}

static void print_number(const char *key, uint64_t n) {
    printf("\"%s\": %" PRIu64 ", ", key, n);
}

static fc_code run(char **argv, fc_error *err) {
    fc_checkpoint *model = NULL;
    fc_arena *arena = fc_arena_new();
    side sides[2] = {0};
    moves m = {0};
    step steps = {0};
    struct rusage usage;
    double start = now();
    fc_code rc = arena ? fc_checkpoint_open(argv[1], NULL, &model, err) : fc_fail(err, FC_ENOMEM, "out of memory");
    rc = rc == FC_OK ? make_side(model, argv[2], arena, &sides[0], err) : rc;
    rc = rc == FC_OK ? make_side(model, argv[3], arena, &sides[1], err) : rc;
    rc = rc == FC_OK ? plan_moves(sides, &m, err) : rc;
    rc = rc == FC_OK ? plan_step(&sides[0], arena, &steps, err) : rc;
    if (rc == FC_OK) {
        getrusage(RUSAGE_SELF, &usage);
        printf("{");
        print_number("from_ranks", (uint64_t)fc_mesh_ranks(&sides[0].mesh));
        print_number("to_ranks", (uint64_t)fc_mesh_ranks(&sides[1].mesh));
        print_number("tensors", sides[0].target.ntensors);
        print_number("classes", m.classes);
        print_number("from_largest", sides[0].largest);
        print_number("from_smallest", sides[0].smallest);
        print_number("to_largest", sides[1].largest);
        print_number("to_smallest", sides[1].smallest);
        print_number("boxes", fc_target_boxes(&sides[1].target));
        print_number("messages", m.messages);
        print_number("most_messages", m.most_messages);
        print_number("pairs", m.npairs);
        print_number("most_partners", m.most_partners);
        print_number("remote_bytes", m.remote_bytes);
        print_number("local_bytes", m.local_bytes);
        print_number("most_received", m.most_received);
        print_number("most_sent", m.most_sent);
        print_number("units", steps.units);
        print_number("numel", steps.numel);
        print_number("shard_numel", steps.shard);
        print_number("largest_unit", steps.largest);
        print_number("two_units", steps.two);
        print_number("peak_kib", (uint64_t)usage.ru_maxrss);
        printf("\"seconds\": %.3f}\n", now() - start);
    }
    for (int i = 0; i < 2; i++) {
        free(sides[i].loads);
    }
    free(m.received);
    free(m.messages_of);
    free(m.sent);
    free(m.pairs);
    fc_checkpoint_close(model);
    fc_arena_free(arena);
    return rc;
}

int main(int argc, char **argv) {
    fc_error err;
    if (argc != 4) {
        fprintf(stderr, "usage: scale_plan SCHEMA FROM TO        meshes: 4096, 512x8\n");
        return 2;
    }
    fc_code rc = run(argv, &err);
    if (rc != FC_OK) {
        fprintf(stderr, "scale_plan: %s\n", err.message);
    }
    return fc_exit_status(rc);
}
