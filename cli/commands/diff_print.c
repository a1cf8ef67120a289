/*
 * Prints the report of diff as a table and as JSON: see diff_print.h.
 */
#include "commands/diff_print.h"

#include "output/json_out.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { TYPE_MAX = 256, OBJECT_MAX = 48 };

static const char *const ids[] = {
    [FC_COMPARE_SAME] = "same",
    [FC_COMPARE_SAME_DIGEST] = "same-digest",
    [FC_COMPARE_SAME_VALUE] = "same-value",
    [FC_COMPARE_CLOSE] = "close",
    [FC_COMPARE_UNREAD] = "unread",
    [FC_COMPARE_DIFFERENT] = "different",
    [FC_COMPARE_DIFFERENT_DIGEST] = "different-digest",
    [FC_COMPARE_SHAPE] = "shape",
    [FC_COMPARE_DTYPE] = "dtype",
    [FC_COMPARE_KIND] = "kind",
    [FC_COMPARE_ONLY_A] = "only-a",
    [FC_COMPARE_ONLY_B] = "only-b",
};

static bool is_shown(const diff_view *d, const fc_compared *item) {
    return d->verbose || fc_compare_is_difference(item->result) || item->wrong_digest;
}

/* ---- text ---- */

/* "[2, 4]" */
static const char *index_text(char *buf, size_t size, int ndim, const int64_t *numbers) {
    size_t used = (size_t)snprintf(buf, size, "[");
    for (int i = 0; i < ndim && used < size; i++) {
        used += (size_t)snprintf(buf + used, size - used, "%s%" PRId64, i ? ", " : "", numbers[i]);
    }
    if (used < size) {
        snprintf(buf + used, size - used, "]");
    }
    return buf;
}

static const char *place_text(char *buf, size_t size, const fc_tensor *t, uint64_t at) {
    int64_t index[FC_MAX_DIMS];
    fc_unravel(t->ndim, t->shape, at, index);
    return index_text(buf, size, t->ndim, index);
}

/* "float32[10, 6]" */
static const char *type_text(char *buf, size_t size, const fc_tensor *t) {
    char shape[TYPE_MAX];
    if (t->object) {
        snprintf(buf, size, "object");
    } else {
        snprintf(buf, size, "%s%s", fc_dtype_get(t->dtype)->torch_name,
                 index_text(shape, sizeof shape, t->ndim, t->shape));
    }
    return buf;
}

static const fc_tensor *either_side(const fc_compared *item) {
    return item->a ? item->a : item->b;
}

static void print_first(text_out *out, const fc_compared *item) {
    const fc_deviation *v = &item->deviation;
    char place[TYPE_MAX], a[FC_ELEMENT_TEXT], b[FC_ELEMENT_TEXT];
    text_printf(out, "; first at %s: %s and %s", place_text(place, sizeof place, item->a, v->first),
                fc_element_text(item->a->dtype, v->first_a, a), fc_element_text(item->b->dtype, v->first_b, b));
}

static void print_error(text_out *out, const fc_compared *item, const char *what, double value, uint64_t at) {
    char place[TYPE_MAX];
    text_printf(out, ", %s %.3g", what, value);
    if (item->elements > 1 && value > 0) {
        text_printf(out, " at %s", place_text(place, sizeof place, item->a, at));
    }
}

static void print_elements(text_out *out, const diff_view *d, const fc_compared *item) {
    const fc_deviation *v = &item->deviation;
    char count[TEXT_SIZE_MAX], all[TEXT_SIZE_MAX];
    uint64_t nans = v->nan_both + v->nan_one;
    text_printf(out, "%s of %s %s", text_count(count, v->different), text_count(all, item->elements),
                v->different == 1 ? "differs" : "differ");
    if (item->numbers && v->max_abs == 0 && nans == 0 && !d->options->tolerant) {
        text_puts(out, " in the sign of zero only");
    } else if (item->numbers && v->max_abs > 0) {
        print_error(out, item, "max abs", v->max_abs, v->max_abs_at);
        print_error(out, item, "max rel", v->max_rel, v->max_rel_at);
    }
    print_first(out, item);
    if (v->nan_one) {
        text_printf(out, "; NaN on one side: %s", text_count(count, v->nan_one));
    }
    if (v->nan_both) {
        text_printf(out, "; NaN on both sides: %s (--equal-nan)", text_count(count, v->nan_both));
    }
}

/* Prints the JSON of an object, shortened if it is long. */
static void print_json_value(text_out *out, const char *json) {
    char cut[OBJECT_MAX + 4];
    size_t len = strlen(json);
    if (len > OBJECT_MAX) {
        len = OBJECT_MAX - 3;
        while (len > 0 && ((unsigned char)json[len] & 0xc0) == 0x80) { /* do not cut inside a character */
            len--;
        }
        snprintf(cut, sizeof cut, "%.*s...", (int)len, json);
        json = cut;
    }
    text_name(out, json);
}

static void print_object(text_out *out, const fc_compared *item) {
    if (!item->json_a || !item->json_b) {
        text_puts(out, "different bytes, which cannot be decoded to compare their values");
        return;
    }
    print_json_value(out, item->json_a);
    text_puts(out, " and ");
    print_json_value(out, item->json_b);
}

static void print_close(text_out *out, const fc_compared *item) {
    text_puts(out, "within the tolerance");
    print_error(out, item, "max abs", item->deviation.max_abs, item->deviation.max_abs_at);
    print_error(out, item, "max rel", item->deviation.max_rel, item->deviation.max_rel_at);
}

static void print_pair(text_out *out, const char *what, const fc_compared *item, const char *advice) {
    char a[TYPE_MAX], b[TYPE_MAX];
    text_printf(out, "%s: %s and %s%s", what, type_text(a, sizeof a, item->a), type_text(b, sizeof b, item->b), advice);
}

static void print_result(text_out *out, const diff_view *d, const fc_compared *item) {
    switch (item->result) {
    case FC_COMPARE_SAME:
        text_puts(out,
                  item->wrong_digest
                      ? "same data, but the recorded digests differ; one of them is wrong, and verify finds out which"
                      : "same");
        break;
    case FC_COMPARE_SAME_DIGEST:
        text_puts(out, "same by digest");
        break;
    case FC_COMPARE_SAME_VALUE:
        text_puts(out, "same value, different bytes");
        break;
    case FC_COMPARE_CLOSE:
        print_close(out, item);
        break;
    case FC_COMPARE_UNREAD:
        text_puts(out, "not compared");
        break;
    case FC_COMPARE_DIFFERENT:
        if (item->a->object) {
            print_object(out, item);
        } else {
            print_elements(out, d, item);
        }
        break;
    case FC_COMPARE_DIFFERENT_DIGEST:
        text_puts(out, "different digests");
        break;
    case FC_COMPARE_SHAPE:
        print_pair(out, "shape", item, "");
        break;
    case FC_COMPARE_DTYPE:
        print_pair(out, "dtype", item, item->numbers ? "; --rtol or --atol compares the values" : "");
        break;
    case FC_COMPARE_KIND:
        print_pair(out, "kind", item, "");
        break;
    case FC_COMPARE_ONLY_A:
    case FC_COMPARE_ONLY_B:
        text_puts(out, "only in ");
        text_name(out, item->a ? d->a : d->b);
        break;
    }
}

static void print_count(text_out *out, size_t n, const char *text) {
    char count[TEXT_SIZE_MAX];
    if (n > 0) {
        text_printf(out, ", %s %s", text_count(count, n), text);
    }
}

static void print_summary(text_out *out, const diff_view *d) {
    const fc_compare_report *r = d->report;
    char count[TEXT_SIZE_MAX];
    bool same = r->different + r->only_a + r->only_b == 0;
    text_name(out, d->a);
    text_puts(out, " and ");
    text_name(out, d->b);
    text_printf(out, ": %s: %s the same", same ? r->close ? "equal within the tolerance" : "equal" : "different",
                text_count(count, r->same));
    if (r->by_digest) {
        text_printf(out, " (%s by digest)", text_count(count, r->by_digest));
    }
    print_count(out, r->close, "within the tolerance");
    print_count(out, r->different, r->different == 1 ? "differs" : "differ");
    print_count(out, r->only_a, "only in the first");
    print_count(out, r->only_b, "only in the second");
    print_count(out, r->left_out, "left out");
    text_puts(out, "\n");
}

/* The group of a value that only one side has, or NULL. */
static beside_group *group_of(const diff_view *d, const fc_compared *item) {
    beside *side = item->result == FC_COMPARE_ONLY_A   ? d->beside[0]
                   : item->result == FC_COMPARE_ONLY_B ? d->beside[1]
                                                       : NULL;
    return side ? beside_group_of(side, item->name) : NULL;
}

static void count_groups(const diff_view *d) {
    for (size_t i = 0; i < d->report->count; i++) {
        const fc_compared *item = &d->report->items[i];
        beside *side = item->result == FC_COMPARE_ONLY_A ? d->beside[0] : d->beside[1];
        if (side && (item->result == FC_COMPARE_ONLY_A || item->result == FC_COMPARE_ONLY_B)) {
            beside_count(side, item->name, either_side(item)->object != NULL);
        }
    }
}

static void print_group(text_out *out, const diff_view *d, const fc_compared *item, beside_group *group) {
    if (!group->printed) {
        group->printed = true;
        beside_print_name(out, group);
        text_puts(out, "  ");
        beside_print_count(out, group);
        text_name_in(out, "  only in ", item->a ? d->a : d->b, "; --model-only leaves them out (-v lists them)\n");
    }
}

void diff_print_text(text_out *out, const diff_view *d) {
    size_t name_width = 0, type_width = 0;
    char type[TYPE_MAX];
    count_groups(d);
    for (size_t i = 0; i < d->report->count; i++) {
        const fc_compared *item = &d->report->items[i];
        if (is_shown(d, item) && !group_of(d, item)) {
            size_t name = text_name_width(item->name), width = strlen(type_text(type, sizeof type, either_side(item)));
            name_width = name > name_width ? name : name_width;
            type_width = width > type_width ? width : type_width;
        }
    }
    for (size_t i = 0; i < d->report->count; i++) {
        const fc_compared *item = &d->report->items[i];
        beside_group *group = group_of(d, item);
        if (group) {
            print_group(out, d, item, group);
        } else if (is_shown(d, item)) {
            text_name_padded(out, item->name, name_width);
            text_printf(out, "  %-*s  ", (int)type_width, type_text(type, sizeof type, either_side(item)));
            print_result(out, d, item);
            text_puts(out, "\n");
        }
    }
    print_summary(out, d);
}

/* ---- JSON ---- */

/* JSON has no infinity and no NaN: they are written as the text that Python prints. */
static void write_real(json_out *j, double value) {
    char text[32];
    if (value - value == 0) {
        snprintf(text, sizeof text, "%.17g", value);
        jw_raw(j, text);
    } else {
        jw_string(j, value > 0 ? "inf" : "nan");
    }
}

static void write_place(json_out *j, const char *key, const fc_tensor *t, uint64_t at) {
    int64_t index[FC_MAX_DIMS];
    fc_unravel(t->ndim, t->shape, at, index);
    jw_member_ints(j, key, t->ndim, index);
}

static void write_side(json_out *j, const char *key, const fc_tensor *t) {
    jw_key(j, key);
    if (!t) {
        jw_string(j, NULL);
        return;
    }
    jw_open(j, '{');
    if (t->object) {
        JSON_MEMBER(j, bool, "object", true);
    } else {
        JSON_MEMBER(j, string, "dtype", fc_dtype_get(t->dtype)->torch_name);
        jw_member_ints(j, "shape", t->ndim, t->shape);
    }
    jw_close(j, '}');
}

static void write_deviation(json_out *j, const fc_compared *item) {
    const fc_deviation *v = &item->deviation;
    char text[FC_ELEMENT_TEXT];
    JSON_UINTS(j, {"elements", item->elements}, {"different", v->different});
    if (v->different > 0) {
        jw_member_open(j, "first", '{');
        write_place(j, "index", item->a, v->first);
        JSON_MEMBER(j, string, "a", fc_element_text(item->a->dtype, v->first_a, text));
        JSON_MEMBER(j, string, "b", fc_element_text(item->b->dtype, v->first_b, text));
        jw_close(j, '}');
    }
    if (item->numbers) {
        jw_key(j, "max_abs");
        write_real(j, v->max_abs);
        write_place(j, "max_abs_index", item->a, v->max_abs_at);
        jw_key(j, "max_rel");
        write_real(j, v->max_rel);
        write_place(j, "max_rel_index", item->a, v->max_rel_at);
        JSON_UINTS(j, {"nan_both", v->nan_both}, {"nan_one", v->nan_one});
    }
}

static void write_item(json_out *j, const fc_compared *item) {
    jw_open(j, '{');
    JSON_MEMBER(j, string, "name", item->name);
    JSON_MEMBER(j, string, "result", ids[item->result]);
    write_side(j, "a", item->a);
    write_side(j, "b", item->b);
    if (item->read && !item->a->object) {
        write_deviation(j, item);
    }
    if (item->json_a && item->json_b) {
        JSON_MEMBER(j, raw, "value_a", item->json_a);
        JSON_MEMBER(j, raw, "value_b", item->json_b);
    }
    if (item->wrong_digest) {
        JSON_MEMBER(j, bool, "wrong_digest", true);
    }
    jw_close(j, '}');
}

void diff_print_json(text_out *out, const diff_view *d) {
    const fc_compare_report *r = d->report;
    json_out j;
    jw_document(&j, out, 2, "diff");
    JSON_MEMBER(&j, string, "a", d->a);
    JSON_MEMBER(&j, string, "b", d->b);
    JSON_MEMBER(&j, bool, "equal", r->different + r->only_a + r->only_b == 0);
    jw_key(&j, "rtol");
    d->options->tolerant ? write_real(&j, d->options->rtol) : jw_string(&j, NULL);
    jw_key(&j, "atol");
    d->options->tolerant ? write_real(&j, d->options->atol) : jw_string(&j, NULL);
    JSON_MEMBER(&j, bool, "equal_nan", d->options->equal_nan);
    JSON_UINTS(&j, {"same", r->same}, {"by_digest", r->by_digest}, {"close", r->close}, {"different", r->different},
               {"only_a", r->only_a}, {"only_b", r->only_b}, {"left_out", r->left_out}, {"bytes_read", r->bytes});
    JSON_MEMBER(&j, string, "damage", r->damage != FC_OK ? r->damaged.message : NULL);
    jw_member_open(&j, "items", '[');
    for (size_t i = 0; i < r->count; i++) {
        bool close = r->items[i].result == FC_COMPARE_CLOSE;
        if (close || is_shown(d, &r->items[i])) {
            write_item(&j, &r->items[i]);
        }
    }
    jw_close(&j, ']');
    jw_end_document(&j);
}
