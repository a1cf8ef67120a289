/*
 * The driver of diff: joins the names of two checkpoints, decides by shapes, dtypes and recorded digests what must be
 * read, compares that, and judges.
 */
#include "fsdpckpt/compare.h"

#include "checkpoint/identity.h"
#include "diff/compare_data.h"
#include "diff/values.h"
#include "fsdpckpt/digest.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/unflatten.h"
#include "plan/names.h"

#include <jansson.h>
#include <string.h>

typedef struct comparison {
    const fc_checkpoint *a, *b;
    const fc_compare_options *options;
    fc_arena *arena;
    fc_compare_report *report;
    size_t *to_read; /* indexes into report->items */
    size_t nto_read;
    bool stopped; /* at a difference: some data is unread */
} comparison;

/* ---- digests ---- */

/* Returns 1 when both sides record the same digest, -1 for different digests, and 0 when they cannot be compared. */
static int compare_digests(const comparison *c, const fc_compared *item, fc_error *err, fc_code *rc) {
    fc_digest a, b;
    *rc = fc_checkpoint_digest(c->a, item->a, FC_WHOLE_TENSOR, &a, err);
    if (*rc == FC_OK) {
        *rc = fc_checkpoint_digest(c->b, item->b, FC_WHOLE_TENSOR, &b, err);
    }
    if (*rc != FC_OK || a.kind != FC_DIGEST_CRC64 || b.kind != FC_DIGEST_CRC64 || item->a->dtype != item->b->dtype) {
        return 0;
    }
    return a.value == b.value ? 1 : -1;
}

/* With a tolerance, NaN differs from itself, so equal bits do not imply equal values. */
static bool same_bits_are_equal(const comparison *c, const fc_compared *item) {
    fc_dtype_class cls = fc_dtype_get(item->a->dtype)->cls;
    return !c->options->tolerant || c->options->equal_nan || (cls != FC_CLASS_FLOAT && cls != FC_CLASS_COMPLEX);
}

/* Different bits can be equal values: -0, NaN, or values within the tolerance. */
static bool other_bits_differ(const comparison *c) {
    return !c->options->tolerant && !c->options->equal_nan;
}

static fc_code try_digests(comparison *c, fc_compared *item, bool *decided, fc_error *err) {
    fc_code rc;
    int verdict = compare_digests(c, item, err, &rc);
    *decided = false;
    FC_TRY(rc);
    item->wrong_digest = verdict < 0; /* until the data turns out to differ */
    if (verdict > 0 && same_bits_are_equal(c, item) && !c->options->data) {
        item->result = FC_COMPARE_SAME_DIGEST;
        *decided = true;
    } else if (verdict < 0 && other_bits_differ(c) && c->options->quick && !c->options->data) {
        item->result = FC_COMPARE_DIFFERENT_DIGEST;
        item->wrong_digest = false;
        *decided = true;
    }
    return FC_OK;
}

/* ---- what must be read ---- */

static bool values_can_be_compared(const comparison *c, const fc_compared *item) {
    return item->a->dtype == item->b->dtype || (c->options->tolerant && item->numbers);
}

static fc_code classify_pair(comparison *c, size_t index, fc_error *err) {
    fc_compared *item = &c->report->items[index];
    const fc_tensor *a = item->a, *b = item->b;
    int64_t elements;
    bool decided = true;
    item->numbers = fc_values_are_numbers(a->dtype, b->dtype);
    if (!fc_numel(a->ndim, a->shape, &elements)) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %s: the shape has more than 2^63 elements", c->a->path,
                       item->name);
    }
    item->elements = (uint64_t)elements;
    if (!a->object != !b->object) {
        item->result = FC_COMPARE_KIND;
    } else if (!fc_same_sizes(a->ndim, a->shape, b->ndim, b->shape)) {
        item->result = FC_COMPARE_SHAPE; /* objects with other sizes; see compare_objects */
    } else if (!values_can_be_compared(c, item)) {
        item->result = FC_COMPARE_DTYPE;
    } else if (elements == 0 || (c->options->same && c->options->same(c->options->context, a, b))) {
        item->result = FC_COMPARE_SAME;
    } else {
        FC_TRY(try_digests(c, item, &decided, err));
    }
    if (!decided) {
        c->to_read[c->nto_read++] = index;
    }
    return FC_OK;
}

/* Renames apply to both sides. A rule that changes nothing on either side is an error. */
static fc_code list_names(comparison *c, fc_names *a, fc_names *b, fc_error *err) {
    static const fc_selection everything;
    const fc_selection *s = c->options->selection ? c->options->selection : &everything;
    fc_rename *rename = NULL;
    fc_code rc;
    FC_TRY_GOTO(fc_rename_new(s, &rename, err), rc, out);
    FC_TRY_GOTO(fc_names_make(c->a, s, rename, c->arena, a, err), rc, out);
    FC_TRY_GOTO(fc_names_make(c->b, s, rename, c->arena, b, err), rc, out);
    FC_TRY_GOTO(fc_names_add_tied_head(a, c->a, c->arena, err), rc, out);
    FC_TRY_GOTO(fc_names_add_tied_head(b, c->b, c->arena, err), rc, out);
    const fc_checkpoint *any = c->a->ntensors ? c->a : c->b;
    const char *both = fc_arena_printf(c->arena, "%s and %s", c->a->path, c->b->path);
    FC_TRY_GOTO(fc_rename_check_used(rename, both ? both : c->a->path, any->ntensors ? any->tensors[0].name : "", err),
                rc, out);
    const fc_names *const sides[] = {a, b};
    FC_TRY_GOTO(fc_names_check_globs(s, sides, 2, any, c->arena, &c->report->idle_exclude, err), rc, out);
    if (a->count == 0 && b->count == 0 && a->left_out + b->left_out > 0) {
        rc = fc_fail(err, FC_EUSAGE, "nothing is left to compare: all %zu names are excluded",
                     a->left_out + b->left_out);
    }
out:
    fc_rename_free(rename);
    return rc;
}

/* Adds an item. @param a, b NULL: the name is on the other side only. */
static fc_code add_item(comparison *c, const char *name, const fc_tensor *a, const fc_tensor *b, fc_error *err) {
    fc_compare_report *r = c->report;
    r->items[r->count++] = (fc_compared){
        .name = name,
        .a = a,
        .b = b,
        .result = !b   ? FC_COMPARE_ONLY_A
                  : !a ? FC_COMPARE_ONLY_B
                       : FC_COMPARE_UNREAD,
    };
    return a && b ? classify_pair(c, r->count - 1, err) : FC_OK;
}

/* Makes the items: A's names with their partners, then the names that only B has. */
static fc_code join_names(comparison *c, fc_error *err) {
    fc_names a, b;
    fc_compare_report *r = c->report;
    FC_TRY(list_names(c, &a, &b, err));
    bool *taken = fc_arena_calloc(c->arena, b.count + 1, sizeof *taken);
    r->items = fc_arena_calloc(c->arena, a.count + b.count + 1, sizeof *r->items);
    c->to_read = fc_arena_calloc(c->arena, a.count + b.count + 1, sizeof *c->to_read);
    FC_NEED(taken && r->items && c->to_read, err, c->a->path);
    r->left_out = a.left_out + b.left_out;
    for (size_t i = 0; i < a.count; i++) {
        const size_t at = fc_names_find(&b, a.items[i].name);
        taken[at == FC_NO_NAME ? b.count : at] = true;
        FC_TRY(add_item(c, a.items[i].name, a.items[i].tensor, at == FC_NO_NAME ? NULL : b.items[at].tensor, err));
    }
    for (size_t i = 0; i < b.count; i++) {
        const size_t at = taken[i] ? FC_NO_NAME : fc_names_find(&a, b.items[i].name); /* only a tied head is found */
        if (!taken[i]) {
            FC_TRY(add_item(c, b.items[i].name, at == FC_NO_NAME ? NULL : a.items[at].tensor, b.items[i].tensor, err));
        }
    }
    return FC_OK;
}

/* ---- judging ---- */

static void judge_pair(const comparison *c, fc_compared *item) {
    if (!item->read) {
        return;
    }
    bool same = item->deviation.different == 0;
    if (same && c->stopped) {
        return; /* this tensor may be only partly read */
    }
    item->wrong_digest = item->wrong_digest && same && other_bits_differ(c);
    if (!same) {
        item->result = FC_COMPARE_DIFFERENT;
    } else {
        item->result = item->deviation.max_abs > 0 ? FC_COMPARE_CLOSE : FC_COMPARE_SAME;
    }
}

/* Decodes an object. Returns NULL when that is impossible; then only its bytes are compared. */
static const char *decode_object_json(const comparison *c, const fc_checkpoint *checkpoint, const fc_tensor *object) {
    const char *json = NULL;
    return checkpoint->format->reader.object_json &&
                   fc_checkpoint_object_json(checkpoint, object, c->arena, &json, NULL) == FC_OK
               ? json
               : NULL;
}

static bool same_json(const char *a, const char *b) {
    if (strcmp(a, b) == 0) {
        return true;
    }
    json_t *x = json_loads(a, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    json_t *y = json_loads(b, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    bool same = x && y && json_equal(x, y);
    json_decref(x);
    json_decref(y);
    return same;
}

/* Different bytes can hold the same value: every torch.save adds its own id. */
static void compare_objects(const comparison *c, fc_compared *item) {
    bool bytes_differ = item->result == FC_COMPARE_DIFFERENT || item->result == FC_COMPARE_SHAPE ||
                        item->result == FC_COMPARE_DIFFERENT_DIGEST;
    if (!item->a || !item->b || !item->a->object || !item->b->object || !bytes_differ) {
        return;
    }
    item->json_a = decode_object_json(c, c->a, item->a);
    item->json_b = decode_object_json(c, c->b, item->b);
    bool same = item->json_a && item->json_b && same_json(item->json_a, item->json_b);
    item->result = same ? FC_COMPARE_SAME_VALUE : FC_COMPARE_DIFFERENT;
}

static void count_result(fc_compare_report *r, const fc_compared *item) {
    switch (item->result) {
    case FC_COMPARE_ONLY_A:
        r->only_a++;
        break;
    case FC_COMPARE_ONLY_B:
        r->only_b++;
        break;
    case FC_COMPARE_CLOSE:
        r->close++;
        break;
    case FC_COMPARE_UNREAD:
        r->unread++;
        break;
    default:
        r->different += fc_compare_is_difference(item->result);
        r->same += !fc_compare_is_difference(item->result);
        r->by_digest += item->result == FC_COMPARE_SAME_DIGEST;
    }
}

static bool differs_already(const comparison *c) {
    for (size_t i = 0; i < c->report->count; i++) {
        const fc_compared *item = &c->report->items[i];
        bool object = item->a && item->b && item->a->object;
        if (fc_compare_is_difference(item->result) && !object) {
            return true;
        }
    }
    return false;
}

static fc_code begin_comparison(comparison *c, fc_error *err) {
    const fc_checkpoint *sides[] = {c->a, c->b};
    for (int i = 0; i < 2; i++) {
        if (sides[i]->format->layout_only) {
            return fc_advise(err, fc_fail(err, FC_EUSAGE, "%s: a schema has no data to compare", sides[i]->path),
                             FC_HINT_CHECK, sides[i]->path);
        }
    }
    *c->report = (fc_compare_report){0};
    return join_names(c, err);
}

static fc_code finish_comparison(comparison *c, fc_error *err) {
    fc_compare_report *r = c->report;
    if (c->nto_read > 0 && !(c->options->quick && differs_already(c))) {
        FC_TRY(fc_compare_data(c->a, c->b, c->options, r, c->to_read, c->nto_read, &c->stopped, err));
    }
    for (size_t i = 0; i < r->count; i++) {
        judge_pair(c, &r->items[i]);
        compare_objects(c, &r->items[i]);
        count_result(r, &r->items[i]);
    }
    if (!c->stopped) {
        FC_TRY(fc_checkpoint_check_inputs(c->a, NULL, err));
        FC_TRY(fc_checkpoint_check_inputs(c->b, NULL, err));
    }
    FC_TRY(fc_checkpoint_unchanged(c->a, err));
    return fc_checkpoint_unchanged(c->b, err);
}

fc_code fc_compare(const fc_checkpoint *a, const fc_checkpoint *b, const fc_compare_options *options, fc_arena *arena,
                   fc_compare_report *report, fc_error *err) {
    comparison c = {.a = a, .b = b, .options = options, .arena = arena, .report = report};
    FC_TRY(begin_comparison(&c, err));
    return finish_comparison(&c, err);
}

/* Objects whose digests differ are decoded, which needs their data. */
static bool needs_data(const comparison *c) {
    bool needs = c->nto_read > 0 && !(c->options->quick && differs_already(c));
    for (size_t i = 0; i < c->report->count && !needs; i++) {
        const fc_compared *item = &c->report->items[i];
        needs = item->a && item->b && item->a->object && fc_compare_is_difference(item->result);
    }
    return needs;
}

/*
 * Returns whether reading only the headers first is worthwhile. Usable digests are recorded for all tensors or for
 * none.
 */
static bool has_digests(const fc_checkpoint *checkpoint) {
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        fc_digest digest;
        if (!checkpoint->tensors[i].object) {
            return fc_checkpoint_digest(checkpoint, &checkpoint->tensors[i], FC_WHOLE_TENSOR, &digest, NULL) == FC_OK &&
                   digest.kind == FC_DIGEST_CRC64;
        }
    }
    return true;
}

static fc_code reopen_side(const char *path, const fc_open_options *how, const fc_checkpoint *model,
                           fc_checkpoint **checkpoint, fc_error *err) {
    fc_checkpoint_close(*checkpoint);
    *checkpoint = NULL;
    return fc_checkpoint_open_model(path, how, model, checkpoint, err);
}

/*
 * Compares by headers alone. Clears `*answered` when data must be read; then both checkpoints, one or none may be open.
 */
static fc_code compare_headers(const char *path_a, const char *path_b, comparison *c, fc_checkpoint **a,
                               fc_checkpoint **b, bool *answered, fc_error *err) {
    fc_open_options how = c->options->open;
    how.headers_only = true;
    *answered = false;
    FC_TRY(reopen_side(path_a, &how, c->options->model, a, err));
    if (!has_digests(*a)) {
        return FC_OK;
    }
    FC_TRY(reopen_side(path_b, &how, c->options->model, b, err));
    if (!has_digests(*b)) {
        return FC_OK;
    }
    c->a = *a;
    c->b = *b;
    FC_TRY(begin_comparison(c, err));
    *answered = !needs_data(c);
    return *answered ? finish_comparison(c, err) : FC_OK;
}

fc_code fc_compare_paths(const char *path_a, const char *path_b, const fc_compare_options *options, fc_arena *arena,
                         fc_checkpoint **a, fc_checkpoint **b, fc_compare_report *report, fc_error *err) {
    comparison c = {.options = options, .arena = arena, .report = report};
    bool answered = false;
    *a = *b = NULL;
    *report = (fc_compare_report){0};
    if (!options->data) {
        FC_TRY(compare_headers(path_a, path_b, &c, a, b, &answered, err));
    }
    if (answered) {
        return FC_OK;
    }
    FC_TRY(reopen_side(path_a, &options->open, options->model, a, err));
    FC_TRY(reopen_side(path_b, &options->open, options->model, b, err));
    return fc_compare(*a, *b, options, arena, report, err);
}
