/*
 * Prints the plan of one rank value by value, as text or JSON: see plan_rank.h.
 */
#include "plan_rank.h"

#include "output/json_out.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/plan.h"
#include "fsdpckpt/try.h"

#include <string.h>

/* The totals of all lines. */
typedef struct sums {
    uint64_t tensors, objects;   /* held */
    uint64_t held, stored, read; /* bytes */
    uint64_t boxes, reads;       /* boxes stored, and reads that fill them */
} sums;

typedef struct rank_view {
    fc_target target;
    uint32_t rank;
    int64_t coordinate[FC_MAX_MESH_DIMS];
    text_out *out;
    json_out *json; /* NULL: text */
    sums sum;
    const fc_tensor *tensor; /* the current one */
} rank_view;

/* "[2048:2064, 0:16384]", or "scalar". */
static void print_box(text_out *out, int ndim, const int64_t *offsets, const int64_t *sizes) {
    text_puts(out, ndim ? "[" : "scalar");
    for (int d = 0; d < ndim; d++) {
        text_puts(out, d ? ", " : "");
        text_int(out, offsets[d]);
        text_puts(out, ":");
        text_int(out, offsets[d] + sizes[d]);
    }
    text_puts(out, ndim ? "]" : "");
}

static void show_read(rank_view *v, const fc_chunk *chunk, int ndim, const int64_t *offsets, const int64_t *sizes) {
    const fc_box box = {ndim, offsets, sizes};
    const fc_file *file = fc_chunk_file(v->target.source, chunk);
    uint64_t bytes = (uint64_t)fc_box_volume(&box) * fc_dtype_size(v->tensor->dtype);
    char text[TEXT_SIZE_MAX];
    v->sum.reads++;
    v->sum.read += bytes;
    if (v->json) {
        jw_open(v->json, '{');
        if (file) {
            JSON_MEMBER(v->json, string, "file", file->name);
        }
        jw_member_ints(v->json, "offsets", ndim, offsets);
        jw_member_ints(v->json, "sizes", ndim, sizes);
        JSON_MEMBER(v->json, uint, "bytes", bytes);
        jw_close(v->json, '}');
        return;
    }
    text_printf(v->out, "%12s  ", text_bytes(text, bytes));
    text_puts(v->out, file ? "from " : "computed ");
    if (file) {
        text_name(v->out, file->name);
        text_puts(v->out, " ");
    }
    print_box(v->out, ndim, offsets, sizes);
    text_puts(v->out, "\n");
}

static fc_code visit_overlap(void *context, const fc_overlap *overlap, fc_error *err) {
    rank_view *v = context;
    (void)err;
    show_read(v, &v->tensor->chunks[overlap->chunk], v->tensor->ndim, overlap->offsets, overlap->sizes);
    return FC_OK;
}

/* Prints the source chunks that the box of an item is read from. */
static fc_code show_reads(rank_view *v, const fc_target_item *item, uint64_t bytes, fc_error *err) {
    const fc_checkpoint *source = v->target.source;
    const fc_box box = {v->tensor->ndim, item->dims, item->dims + v->tensor->ndim};
    fc_coverage *coverage = NULL;
    if (!item->owned || bytes == 0 || source->format->layout_only) {
        return FC_OK;
    }
    fc_code rc;
    FC_TRY_GOTO(fc_coverage_within(source, v->tensor, &box, &coverage, err), rc, out);
    rc = fc_coverage_visit(coverage, &box, visit_overlap, v, err);
out:
    fc_coverage_free(coverage);
    return rc == FC_OK ? rc : fc_context(err, rc, "%s", source->path);
}

static void item_text(rank_view *v, const fc_target_tensor *t, const fc_target_item *item, uint64_t bytes) {
    char size[TEXT_SIZE_MAX];
    int ndim = t->source->ndim;
    /* Without printf, which is slow for 100,000 lines. */
    const char *dtype = fc_dtype_get(t->dtype)->torch_name;
    size_t width = strlen(text_bytes(size, bytes)), name = strlen(dtype);
    text_repeat(v->out, " ", width < 10 ? 10 - width : 0);
    text_puts(v->out, size);
    text_puts(v->out, "  ");
    text_puts(v->out, dtype);
    text_repeat(v->out, " ", name < 8 ? 10 - name : 2);
    text_name(v->out, t->name);
    text_puts(v->out, " ");
    print_box(v->out, ndim, item->dims, item->dims + ndim);
    if (!item->owned) {
        text_printf(v->out, " stored by rank %u", item->owner);
    }
    text_puts(v->out, "\n");
}

static void item_json(rank_view *v, const fc_target_tensor *t, const fc_target_item *item, uint64_t bytes) {
    int ndim = t->source->ndim;
    JSON_MEMBER(v->json, string, "name", t->name);
    JSON_MEMBER(v->json, string, "dtype", fc_dtype_get(t->dtype)->torch_name);
    jw_member_ints(v->json, "offsets", ndim, item->dims);
    jw_member_ints(v->json, "sizes", ndim, item->dims + ndim);
    JSON_UINTS(v->json, {"bytes", bytes}, {"stored_by", item->owner});
    jw_member_open(v->json, "reads", '[');
}

static fc_code show_value(rank_view *v, uint32_t index, fc_error *err) {
    const fc_target_tensor *t = &v->target.tensors[index];
    int64_t dims[2 * FC_MAX_DIMS];
    fc_target_item item;
    if (t->source->object && v->rank != 0) {
        return FC_OK;
    }
    FC_TRY(fc_target_item_of(&v->target, index, v->rank, dims, &item, err));
    uint64_t bytes = fc_target_item_bytes(&v->target, &item);
    v->tensor = t->source;
    *(t->source->object ? &v->sum.objects : &v->sum.tensors) += 1;
    v->sum.held += bytes;
    v->sum.stored += item.owned ? bytes : 0;
    v->sum.boxes += item.owned && bytes > 0;
    if (!v->json) {
        item_text(v, t, &item, bytes);
        return show_reads(v, &item, bytes, err);
    }
    jw_open(v->json, '{');
    item_json(v, t, &item, bytes);
    FC_TRY(show_reads(v, &item, bytes, err));
    jw_close(v->json, ']');
    jw_close(v->json, '}');
    return FC_OK;
}

static void begin_plan(rank_view *v) {
    const fc_mesh *mesh = v->target.mesh;
    char ranks[TEXT_SIZE_MAX];
    if (!v->json) {
        text_printf(v->out, "rank %u of %s:", v->rank, text_count(ranks, (uint64_t)fc_mesh_ranks(mesh)));
        for (int m = 0; m < mesh->ndim; m++) {
            text_printf(v->out, "%s %s %lld", m ? "," : "", mesh->names[m], (long long)v->coordinate[m]);
        }
        text_puts(v->out, "\n");
        return;
    }
    jw_document(v->json, v->out, 2, "rank-plan");
    JSON_MEMBER(v->json, uint, "rank", v->rank);
    JSON_MEMBER(v->json, int, "ranks", fc_mesh_ranks(mesh));
    jw_member_open(v->json, "coordinate", '{');
    for (int m = 0; m < mesh->ndim; m++) {
        JSON_MEMBER(v->json, int, mesh->names[m], v->coordinate[m]);
    }
    jw_close(v->json, '}');
    jw_member_open(v->json, "values", '[');
}

static void end_plan(rank_view *v) {
    const sums *s = &v->sum;
    char held[TEXT_SIZE_MAX], stored[TEXT_SIZE_MAX], read[TEXT_SIZE_MAX];
    if (!v->json) {
        text_printf(v->out, "holds %llu tensors, %llu objects, %s; stores %llu boxes, %s, from %llu reads, %s\n",
                    (unsigned long long)s->tensors, (unsigned long long)s->objects, text_bytes(held, s->held),
                    (unsigned long long)s->boxes, text_bytes(stored, s->stored), (unsigned long long)s->reads,
                    text_bytes(read, s->read));
        return;
    }
    jw_close(v->json, ']');
    JSON_UINTS(v->json, {"tensors", s->tensors}, {"objects", s->objects}, {"held_bytes", s->held},
               {"stored_boxes", s->boxes}, {"stored_bytes", s->stored}, {"reads", s->reads}, {"read_bytes", s->read});
    jw_end_document(v->json);
}

static fc_code show_values(rank_view *v, fc_error *err) {
    fc_mesh_coordinate(v->target.mesh, v->rank, v->coordinate);
    begin_plan(v);
    for (uint32_t i = 0; i < v->target.ntensors && v->out->error == 0; i++) {
        FC_TRY(show_value(v, i, err));
    }
    end_plan(v);
    return FC_OK;
}

fc_code plan_rank(const fc_checkpoint *source, const fc_selection *selection, uint32_t rank, bool json, text_out *out,
                  fc_error *err) {
    json_out writer;
    fc_selected counts;
    rank_view v = {.rank = rank, .out = out, .json = json ? &writer : NULL};
    int64_t ranks = fc_mesh_ranks(selection->mesh);
    if (rank >= ranks) {
        return fc_fail(err, FC_EUSAGE, "--rank %u: the ranks of this mesh are 0 to %lld", rank, (long long)ranks - 1);
    }
    fc_arena *arena = fc_arena_new();
    FC_NEED(arena, err, NULL);
    fc_code rc;
    FC_TRY_GOTO(fc_target_new(source, selection, arena, &v.target, &counts, err), rc, out);
    rc = show_values(&v, err);
out:
    fc_arena_free(arena);
    return rc;
}
