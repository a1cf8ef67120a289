/*
 * Checks whether a checkpoint fits a mesh: dimensions that do not divide evenly, ranks that get nothing, matrices that
 * no TP rule shards. Similar tensors (layers.0 …, layers.1 …) share one finding.
 */
#include "check/check.h"
#include "sharding/recorded.h"
#include "sharding/tp_plan.h"

#include <inttypes.h>
#include <string.h>

/* The mesh axes that shard tensors, and the findings so far. */
typedef struct fit {
    fc_check_run *c;
    int64_t dp, tp;
    const fc_tp_plan *plan;
    fc_name_table *seen; /* from kind, pattern and type to an index into `alike` */
    struct alike *alike;
    size_t count;
    size_t tensors, sharded;
    int64_t asked; /* the rows of the last call of torch_is_wrong, and its answer */
    bool wrong;
} fit;

/* A finding and the tensors it is about. */
typedef struct alike {
    fc_finding finding;
    const char **names;
    size_t capacity;
} alike;

/* Replaces numeric components by stars: "layers.*.wq.weight". */
static const char *pattern_of(fc_check_run *c, const char *name) {
    char *pattern = fc_check_alloc(c, strlen(name) + 1, 1);
    char *to = pattern;
    for (const char *at = name; pattern && *at;) {
        size_t n = strcspn(at, ".");
        if (n > 0 && strspn(at, "0123456789") == n) {
            *to++ = '*';
        } else {
            memcpy(to, at, n);
            to += n;
        }
        at += n;
        if (*at) {
            *to++ = *at++;
        }
    }
    return pattern ? pattern : "";
}

static bool remember(fc_check_run *c, alike *a, const char *name) {
    if (a->finding.count == a->capacity) {
        size_t capacity = a->capacity ? 2 * a->capacity : 4;
        const char **grown = fc_check_alloc(c, capacity, sizeof *grown);
        if (!grown) {
            return false;
        }
        if (a->finding.count > 0) {
            memcpy(grown, a->names, a->finding.count * sizeof *grown);
        }
        a->names = grown;
        a->capacity = capacity;
    }
    a->names[a->finding.count++] = name;
    return true;
}

/* Adds a tensor to the finding for its pattern. */
static void note(fit *f, const fc_named *named, fc_finding_kind kind, const char *detail, const char *expected) {
    fc_check_run *c = f->c;
    const char *key =
        fc_check_text(c, "%d %s %s", (int)kind, pattern_of(c, named->name), fc_check_type(c, named->tensor));
    size_t at = fc_name_table_put(f->seen, key, strlen(key), f->count);
    if (at == FC_NO_NAME) {
        c->no_memory = true;
        return;
    }
    if (at == f->count) {
        f->count++;
        f->alike[at].finding = (fc_finding){.kind = kind,
                                            .name = named->name,
                                            .found = fc_check_type(c, named->tensor),
                                            .detail = detail,
                                            .expected = expected};
    }
    remember(c, &f->alike[at], named->name);
}

static void report(fit *f) {
    for (size_t i = 0; i < f->count; i++) {
        alike *a = &f->alike[i];
        a->finding.other = fc_check_others(f->c, a->finding.count);
        a->finding.names = a->finding.count > 1 ? a->names : NULL;
        fc_check_add(f->c, &a->finding);
    }
}

/* Describes how torch.chunk divides a dimension of `size` among `ranks`: "3 ranks get 17, one gets 13". */
static const char *parts_text(fc_check_run *c, int64_t size, int64_t ranks) {
    int64_t offset, whole, last = 0, full = 0, empty = 0;
    fc_shard_range(size, ranks, 0, &offset, &whole);
    full = whole > 0 ? size / whole : 0;
    last = whole > 0 ? size % whole : 0;
    empty = ranks - full - (last > 0);
    const char *text = fc_check_text(c, "%" PRId64 " rank%s %" PRId64, full, full == 1 ? " gets" : "s get", whole);
    if (last > 0) {
        text = fc_check_text(c, "%s, one gets %" PRId64, text, last);
    }
    return empty > 0 ? fc_check_text(c, "%s, %" PRId64 " %s nothing", text, empty, empty == 1 ? "gets" : "get") : text;
}

static void check_dp(fit *f, const fc_named *named, int64_t rows, bool after_tp) {
    fc_check_run *c = f->c;
    if (f->dp < 2 || rows % f->dp == 0) {
        return;
    }
    const char *axis =
        fc_check_text(c, "dp %" PRId64 "%s", f->dp, after_tp ? fc_check_text(c, " after tp %" PRId64, f->tp) : "");
    note(f, named, rows < f->dp ? FC_FOUND_EMPTY_SHARDS : FC_FOUND_UNEVEN, axis, parts_text(c, rows, f->dp));
}

/* Whether PyTorch 2.10 and later compute other boxes for `rows` of FSDP over TP than the ranks hold. */
static bool torch_is_wrong(fit *f, int64_t rows) {
    const fc_mesh mesh = {.ndim = 2, .sizes = {f->dp, f->tp}};
    const fc_placement placements[] = {{FC_STRIDED_SHARD, 0, f->tp}, {FC_SHARD, 0, 0}};
    int64_t coordinate[FC_MAX_MESH_DIMS], held[2], computed[2];
    if (f->asked == rows) {
        return f->wrong;
    }
    f->asked = rows;
    f->wrong = false;
    for (int64_t rank = 0; !f->wrong && rank < fc_mesh_ranks(&mesh); rank++) {
        fc_mesh_coordinate(&mesh, rank, coordinate);
        f->wrong =
            fc_local_box(1, &rows, &mesh, placements, coordinate, &held[0], &held[1], NULL) == FC_OK &&
            fc_recorded_box(1, &rows, &mesh, placements, coordinate, &computed[0], &computed[1], NULL) == FC_OK &&
            memcmp(held, computed, sizeof held) != 0;
    }
    return f->wrong;
}

static const char *tp_parts_text(fit *f, int64_t size, int d) {
    const char *text = parts_text(f->c, size, f->tp);
    return d > 0 || f->dp < 2 || !torch_is_wrong(f, size)
               ? text
               : fc_check_text(f->c,
                               "%s; on dp %" PRId64
                               " dcp.load of PyTorch 2.10 and later gets wrong rows without fsdpckpt.torch.LoadPlanner",
                               text, f->dp);
}

/*
 * Checks the TP dimension. Returns the rows that FSDP then divides: those of the first TP rank if TP shards dimension
 * 0.
 */
static int64_t check_tp(fit *f, const fc_named *named) {
    const fc_tensor *t = named->tensor;
    fc_check_run *c = f->c;
    fc_tp_style style;
    int d = fc_tp_plan_dim(f->plan, named->name, t->ndim, &style);
    if (style == FC_TP_NONE && t->ndim >= 2) {
        note(f, named, FC_FOUND_TP_NO_RULE, fc_tp_plan_name(f->plan), NULL);
    }
    if (d < 0 || d >= t->ndim) {
        return t->shape[0];
    }
    f->sharded++;
    int64_t size = t->shape[d], offset, length = size;
    if (size % f->tp != 0) {
        bool empty = size < f->tp;
        note(f, named, empty ? FC_FOUND_TP_EMPTY_SHARDS : FC_FOUND_TP_UNEVEN,
             fc_check_text(c, "dimension %d %s tp %" PRId64, d, empty ? "is shorter than" : "does not divide evenly by",
                           f->tp),
             tp_parts_text(f, size, d));
    }
    if (d == 0) {
        fc_shard_range(size, f->tp, 0, &offset, &length);
        return length;
    }
    return t->shape[0];
}

static void check_rules(fit *f) {
    if (strcmp(fc_tp_plan_name(f->plan), "auto") == 0) {
        return; /* its rules are for many models, so most of them cover nothing */
    }
    size_t rules = fc_tp_plan_rules(f->plan);
    bool *used = fc_check_alloc(f->c, rules, sizeof *used);
    for (size_t i = 0; used && i < f->c->names.count; i++) {
        const fc_named *named = &f->c->names.items[i];
        int64_t rule = named->tensor->object ? -1 : fc_tp_plan_rule_of(f->plan, named->name);
        if (rule >= 0) {
            used[rule] = true;
        }
    }
    for (size_t r = 0; used && r < rules; r++) {
        if (!used[r]) {
            fc_check_add(f->c, &(fc_finding){.kind = FC_FOUND_TP_IDLE_RULE,
                                             .name = fc_tp_plan_name(f->plan),
                                             .detail = fc_tp_plan_pattern(f->plan, r)});
        }
    }
}

static bool is_state(const fc_named *named) {
    return fc_check_after_section(named->name, "state") != NULL;
}

/* Optimizer state is sharded like its parameter, so it is reported only when there are no parameters. */
static bool is_reported(const fc_named *named, bool only_state) {
    int64_t elements;
    const fc_tensor *t = named->tensor;
    return !t->object && t->ndim > 0 && fc_numel(t->ndim, t->shape, &elements) && elements > 0 &&
           (only_state || !is_state(named));
}

void fc_check_fit(fc_check_run *c) {
    const fc_check_options *o = c->options;
    fit f = {.c = c,
             .dp = fc_mesh_size(o->mesh, "dp"),
             .tp = fc_mesh_size(o->mesh, "tp"),
             .plan = o->tp_plan,
             .seen = fc_name_table_new(c->arena, 3 * c->names.count + 1),
             .alike = fc_check_alloc(c, 3 * c->names.count + 1, sizeof *f.alike)};
    if (!f.seen || !f.alike) {
        c->no_memory = true;
        return;
    }
    bool tp = f.tp > 1 && f.plan, only_state = true;
    for (size_t i = 0; i < c->names.count; i++) {
        only_state = only_state && (c->names.items[i].tensor->object || is_state(&c->names.items[i]));
    }
    for (size_t i = 0; i < c->names.count; i++) {
        const fc_named *named = &c->names.items[i];
        if (!is_reported(named, only_state)) {
            continue;
        }
        f.tensors++;
        size_t before = f.sharded;
        int64_t rows = tp ? check_tp(&f, named) : named->tensor->shape[0];
        check_dp(&f, named, rows, f.sharded > before && rows != named->tensor->shape[0]);
    }
    report(&f);
    if (tp && f.sharded == 0) {
        fc_check_add(c, &(fc_finding){.kind = FC_FOUND_TP_SHARDS_NONE,
                                      .name = c->path,
                                      .detail = fc_tp_plan_name(f.plan),
                                      .count = f.tensors});
    }
    if (tp) {
        check_rules(&f);
    }
}
