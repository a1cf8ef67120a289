/*
 * inspect for people: the summary and the table of tensors.
 */
#include "inspect.h"

#include "fsdpckpt/format.h"

#include <string.h>

enum { NAME_COLUMNS = 64, VALUE_COLUMNS = 100 };

static void print_dtypes(const inspection *in, const totals *sum) {
    char a[TEXT_SIZE_MAX], b[TEXT_SIZE_MAX];
    const char *label = "Types";
    for (int d = 0; d < FC_DTYPE_COUNT; d++) {
        if (sum->by_dtype[d] == 0) {
            continue;
        }
        uint64_t elements = sum->elements_by_dtype[d], size = fc_dtype_size((fc_dtype)d);
        uint64_t bytes = elements > UINT64_MAX / size ? UINT64_MAX : elements * size;
        text_printf(in->out, "%-12s%s: %zu %s, %s elements, %s\n", label, fc_dtype_get((fc_dtype)d)->torch_name,
                    sum->by_dtype[d], sum->by_dtype[d] == 1 ? "tensor" : "tensors", text_params(a, elements),
                    text_bytes(b, bytes));
        label = "";
    }
}

static void print_styles(const inspection *in, const cut_summary *summary) {
    const char *label = "Cuts";
    for (size_t i = 0; i < summary->nstyles; i++) {
        text_printf(in->out, "%-12s%s: %zu %s\n", label, summary->styles[i].text, summary->styles[i].tensors,
                    summary->styles[i].tensors == 1 ? "tensor" : "tensors");
        label = "";
    }
    if (summary->other > 0) {
        text_printf(in->out, "%-12sother ways: %zu tensors\n", "", summary->other);
    }
}

static void print_summary(const inspection *in, const totals *sum, const cut_summary *cuts) {
    const fc_checkpoint *c = in->checkpoint;
    char a[TEXT_SIZE_MAX], b[TEXT_SIZE_MAX], layout[192];
    text_puts(in->out, "Checkpoint  ");
    text_name(in->out, c->path);
    text_printf(in->out, "\nFormat      %s", c->format->description);
    if (c->producer) {
        text_puts(in->out, ", written by ");
        text_name(in->out, c->producer);
    }
    if (c->note) {
        text_puts(in->out, "\nNote        ");
        text_name(in->out, c->note);
    }
    text_puts(in->out, "\nLayout      ");
    text_name(in->out, c->format->layout_only ? "none: there is no data to be cut"
                                              : cut_summary_layout(cuts, &c->mesh, layout, sizeof layout));
    text_printf(in->out, "\nFiles       %zu", c->nfiles);
    if (!in->headers_only) {
        text_printf(in->out, ", %s", text_bytes(a, sum->file_bytes));
    }
    text_printf(in->out, "\nTensors     %s in %s pieces, ", text_count(a, sum->tensors), text_count(b, sum->chunks));
    text_printf(in->out, "%s elements, %s\n", text_params(a, sum->elements), text_bytes(b, sum->bytes));
    text_printf(in->out, "Objects     %zu\n", sum->objects);
    print_dtypes(in, sum);
    print_styles(in, cuts);
}

typedef struct widths {
    size_t name, shape, cut, dtype;
    bool placements;
} widths;

static size_t wider(size_t a, size_t b) {
    return a > b ? a : b;
}

/* One pass over everything: the column widths and what the tensors have in common. */
static fc_code measure(inspection *in, widths *w, cut_summary *cuts, fc_error *err) {
    char text[128];
    memset(cuts, 0, sizeof *cuts);
    *w = (widths){.name = sizeof "OBJECT" - 1, .shape = 5, .cut = 3, .dtype = 5};
    for (size_t i = 0; i < in->checkpoint->ntensors; i++) {
        const fc_tensor *t = &in->checkpoint->tensors[i];
        size_t name = text_name_width(t->name);
        w->name = wider(w->name, name < NAME_COLUMNS ? name : NAME_COLUMNS);
        if (t->object) {
            continue;
        }
        fc_cut c;
        if (!fc_cut_recognise(t, &in->scratch, &c)) {
            return inspect_no_memory(in, err);
        }
        cut_summary_add(cuts, &in->checkpoint->mesh, t, &c);
        w->shape = wider(w->shape, text_name_width(text_shape(text, sizeof text, t->ndim, t->shape)));
        w->cut = wider(w->cut, text_name_width(cut_describe(t, &c, text, sizeof text)));
        w->dtype = wider(w->dtype, strlen(fc_dtype_get(t->dtype)->torch_name));
        w->placements = w->placements || inspect_placements(in, t, &c, text, sizeof text)[0];
    }
    return FC_OK;
}

static fc_code print_tensors(inspection *in, const widths *w, fc_error *err) {
    text_out *out = in->out;
    char text[128];
    text_puts(out, "\n");
    text_name_padded(out, "NAME", w->name + 2);
    text_name_padded(out, "DTYPE", w->dtype + 2);
    text_name_padded(out, "SHAPE", w->shape + 2);
    text_puts(out, "CUT");
    if (w->placements) {
        text_repeat(out, " ", w->cut - 1);
        text_puts(out, "PLACEMENTS");
    }
    text_puts(out, "\n");
    for (size_t i = 0; i < in->checkpoint->ntensors && out->error == 0; i++) {
        const fc_tensor *t = &in->checkpoint->tensors[i];
        fc_cut c;
        if (t->object) {
            continue;
        }
        if (!fc_cut_recognise(t, &in->scratch, &c)) {
            return inspect_no_memory(in, err);
        }
        text_name_padded(out, t->name, w->name);
        text_puts(out, "  ");
        text_name_padded(out, fc_dtype_get(t->dtype)->torch_name, w->dtype + 2);
        text_name_padded(out, text_shape(text, sizeof text, t->ndim, t->shape), w->shape);
        text_puts(out, "  ");
        cut_describe(t, &c, text, sizeof text);
        const size_t used = text_name_width(text);
        text_puts(out, text);
        inspect_placements(in, t, &c, text, sizeof text);
        if (text[0]) {
            text_repeat(out, " ", w->cut + 2 - used);
            text_puts(out, text);
        }
        text_puts(out, "\n");
    }
    return FC_OK;
}

/* A value on one line: cut after VALUE_COLUMNS characters, never within one. */
static void print_value(text_out *out, const char *json) {
    size_t bytes = 0, count = 0;
    while (json[bytes] && count < VALUE_COLUMNS) {
        uint32_t code;
        size_t len = text_utf8(json + bytes, &code);
        bytes += len ? len : 1;
        count++;
    }
    if (!json[bytes]) {
        text_name(out, json);
        return;
    }
    char shown[VALUE_COLUMNS * 4 + 1];
    memcpy(shown, json, bytes);
    shown[bytes] = '\0';
    text_name(out, shown);
    text_puts(out, "…");
}

static fc_code print_objects(inspection *in, const widths *w, fc_error *err) {
    text_out *out = in->out;
    text_puts(out, "\n");
    text_name_padded(out, "OBJECT", w->name + 2);
    text_puts(out, in->headers_only ? "BYTES\n" : "VALUE\n");
    for (size_t i = 0; i < in->checkpoint->ntensors && out->error == 0; i++) {
        const fc_tensor *t = &in->checkpoint->tensors[i];
        char size[TEXT_SIZE_MAX];
        fc_error why = {FC_OK, ""};
        if (!t->object) {
            continue;
        }
        fc_arena *arena = fc_arena_new();
        if (!arena) {
            return inspect_no_memory(in, err);
        }
        const char *json = inspect_object(in, t, arena, &why);
        text_name_padded(out, t->name, w->name);
        text_puts(out, "  ");
        if (json) {
            print_value(out, json);
        } else if (why.message[0]) {
            text_puts(out, "cannot be decoded: ");
            text_name(out, why.message);
        } else {
            text_puts(out, text_bytes(size, inspect_bytes(t)));
        }
        text_puts(out, "\n");
        fc_arena_free(arena);
    }
    return FC_OK;
}

fc_code inspect_text(inspection *in, fc_error *err) {
    widths w;
    cut_summary cuts;
    totals sum;
    fc_code rc = measure(in, &w, &cuts, err);
    if (rc != FC_OK) {
        return rc;
    }
    inspect_totals(in, &sum);
    print_summary(in, &sum, &cuts);
    if (sum.tensors > 0) {
        rc = print_tensors(in, &w, err);
    }
    if (rc == FC_OK && sum.objects > 0) {
        rc = print_objects(in, &w, err);
    }
    return rc;
}
