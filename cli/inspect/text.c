/*
 * inspect as text: tables of tensors and objects with one line per pattern, then a summary.
 */
#include "inspect/stats.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"

#include <string.h>

enum { NAME_COLUMNS = 80, VALUE_COLUMNS = 100 };

static void print_dtypes(const inspection *in) {
    const totals *sum = &in->sum;
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

static void print_styles(const inspection *in) {
    const sharding_summary *summary = &in->sharding;
    const char *label = "Sharding";
    for (size_t i = 0; i < summary->nstyles; i++) {
        text_printf(in->out, "%-12s%s: %zu %s\n", label, summary->styles[i].text, summary->styles[i].tensors,
                    summary->styles[i].tensors == 1 ? "tensor" : "tensors");
        label = "";
    }
    if (summary->other > 0) {
        text_printf(in->out, "%-12sother ways: %zu tensors\n", "", summary->other);
    }
}

/* Prints what each rank stores, and what it holds if that is more, because replicas are stored once. */
static fc_code print_ranks(inspection *in, fc_error *err) {
    inspect_loads loads;
    fc_code rc = inspect_ranks(in, &loads, err);
    for (int held = 0; held < 2 && rc == FC_OK && loads.ranks > 1; held++) {
        rank_groups groups;
        const rank_load *of = held ? loads.held : loads.stored;
        const char *label = held ? "Held" : "Stored";
        if (!of || (held && memcmp(loads.held, loads.stored, loads.ranks * sizeof *of) == 0)) {
            continue;
        }
        inspect_group_ranks(of, loads.ranks, &groups);
        for (size_t i = 0; i < groups.count; i++) {
            text_printf(in->out, "%-12s%s\n", i == 0 ? label : "", groups.text[i]);
        }
    }
    return rc;
}

/* Prints "Unsafe      evil: loading it calls os.system: it may be hostile", and how many more there are. */
static bool print_risk(const inspection *in, fc_object_risk risk, const char *label) {
    fc_object_verdict verdict, first = {.risk = FC_OBJECT_HARMLESS};
    const char *name = NULL;
    size_t count = 0;
    for (size_t i = 0; i < in->nitems; i++) {
        if (in->items[i]->object && inspect_risk(in, in->items[i], &verdict) == risk && count++ == 0) {
            first = verdict;
            name = in->items[i]->name;
        }
    }
    if (count == 0) {
        return false;
    }
    text_name_in(in->out, label, name, ": ");
    text_name(in->out, first.reason);
    if (count > 1) {
        text_printf(in->out, "; and %zu more", count - 1);
    }
    text_puts(in->out, "\n");
    return true;
}

static fc_code print_summary(inspection *in, fc_error *err) {
    const fc_checkpoint *c = in->checkpoint;
    const totals *sum = &in->sum;
    char a[TEXT_SIZE_MAX], b[TEXT_SIZE_MAX], layout[256];
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
    text_name(in->out, inspect_layout(in, layout, sizeof layout));
    text_printf(in->out, "\nFiles       %zu", c->nfiles);
    if (!in->headers_only) {
        text_printf(in->out, ", %s", text_bytes(a, sum->file_bytes));
    }
    text_printf(in->out, "\nTensors     %s in %s chunks, ", text_count(a, sum->tensors), text_count(b, sum->chunks));
    text_printf(in->out, "%s elements, %s\n", text_params(a, sum->elements), text_bytes(b, sum->bytes));
    text_printf(in->out, "Objects     %zu\n", sum->objects);
    if (!print_risk(in, FC_OBJECT_RUNS, "Unsafe      ") && c->risk) {
        text_name_in(in->out, "Unsafe      ", c->risk, "\n");
    }
    print_risk(in, FC_OBJECT_UNKNOWN, "Unknown     ");
    if (in->nitems < c->ntensors) {
        text_printf(in->out, "Left out    %zu by --include and --exclude\n", c->ntensors - in->nitems);
    }
    if (in->stats) {
        stats_print_summary(in);
    }
    print_dtypes(in);
    print_styles(in);
    return print_ranks(in, err);
}

typedef struct widths {
    size_t name, shape, chunks, dtype, size, tensors;
    bool placements, folded, values; /* whether these columns exist */
    stats_widths stats;
} widths;

static size_t wider(size_t a, size_t b) {
    return a > b ? a : b;
}

static void measure_columns(const inspection *in, widths *w) {
    char text[128];
    *w = (widths){.name = sizeof "OBJECT" - 1, .shape = 5, .chunks = 6, .dtype = 5, .size = 4, .tensors = 7};
    for (size_t i = 0; i < in->nlines; i++) {
        const inspect_line *line = &in->lines[i];
        const inspect_kind *kind = line->kind;
        size_t name = text_name_width(line->name);
        w->name = wider(w->name, name < NAME_COLUMNS ? name : NAME_COLUMNS);
        if (kind && line->objects > 0) {
            continue;
        }
        w->folded = w->folded || line->tensors > 1 || !kind;
        w->size = wider(w->size, strlen(text_bytes(text, line->bytes)));
        w->tensors = wider(w->tensors, strlen(text_count(text, line->tensors)));
        if (!kind) {
            continue;
        }
        w->values = true;
        w->shape =
            wider(w->shape, text_name_width(text_shape(text, sizeof text, line->first->ndim, line->first->shape)));
        w->chunks = wider(w->chunks, text_name_width(kind->sharding));
        w->dtype = wider(w->dtype, strlen(fc_dtype_get(line->first->dtype)->torch_name));
        w->placements = w->placements || kind->placements[0];
    }
}

static void write_right(text_out *out, const char *text, size_t width) {
    text_repeat(out, " ", width - strlen(text));
    text_puts(out, text);
}

static void print_heading(const inspection *in, const widths *w) {
    text_out *out = in->out;
    text_puts(out, "NAME");
    text_repeat(out, " ", w->name - 4);
    if (w->folded) {
        text_puts(out, "  ");
        write_right(out, "TENSORS", w->tensors);
    }
    text_puts(out, "  ");
    write_right(out, "SIZE", w->size);
    if (w->values) {
        text_puts(out, "  ");
        text_name_padded(out, "DTYPE", w->dtype + 2);
        text_name_padded(out, "SHAPE", w->shape + (in->stats ? 0 : 2));
    }
    if (in->stats) {
        stats_print_heading(out, &w->stats);
    } else if (w->values) {
        text_puts(out, "CHUNKS");
    }
    if (w->placements && !in->stats) {
        text_repeat(out, " ", w->chunks - 4);
        text_puts(out, "PLACEMENTS");
    }
    text_puts(out, "\n");
}

/* Prints how a tensor is cut, or its statistics. */
static void print_columns(const inspection *in, const inspect_line *line, const widths *w) {
    text_out *out = in->out;
    const inspect_kind *kind = line->kind;
    char text[128];
    text_puts(out, "  ");
    text_name_padded(out, fc_dtype_get(line->first->dtype)->torch_name, w->dtype + 2);
    text_shape(text, sizeof text, line->first->ndim, line->first->shape);
    if (in->stats) {
        text_name_padded(out, text, w->shape);
        stats_print_line(out, line, &w->stats);
        return;
    }
    text_name_padded(out, text, w->shape + 2);
    text_puts(out, kind->sharding);
    if (kind->placements[0]) {
        text_repeat(out, " ", w->chunks + 2 - text_name_width(kind->sharding));
        text_puts(out, kind->placements);
    }
    if (kind->same_as) {
        text_puts(out, "  the same as ");
        text_name(out, kind->same_as);
    }
}

static void print_tensors(inspection *in, const widths *w) {
    text_out *out = in->out;
    char text[128];
    print_heading(in, w);
    for (size_t i = 0; i < in->nlines && out->error == 0; i++) {
        const inspect_line *line = &in->lines[i];
        const inspect_kind *kind = line->kind;
        if (kind && line->objects > 0) {
            continue;
        }
        text_name_padded(out, line->name, w->name);
        if (w->folded) {
            text_puts(out, "  ");
            write_right(out, text_count(text, line->tensors), w->tensors);
        }
        text_puts(out, "  ");
        write_right(out, text_bytes(text, line->bytes), w->size);
        if (kind) {
            print_columns(in, line, w);
        } else if (line->objects > 0) {
            text_printf(out, "  and %zu %s", line->objects, line->objects == 1 ? "object" : "objects");
        }
        text_puts(out, "\n");
    }
    text_puts(out, "\n");
}

/* Prints a value on one line, shortened to VALUE_COLUMNS characters. */
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

static fc_code print_object(inspection *in, const inspect_line *line, fc_error *err) {
    text_out *out = in->out;
    const inspect_kind *kind = line->kind;
    char size[TEXT_SIZE_MAX];
    if (kind->value) {
        print_value(out, kind->value);
    } else if (kind->why) {
        text_puts(out, "cannot be decoded: ");
        text_name(out, kind->why);
    } else if (in->headers_only) {
        text_puts(out, text_bytes(size, line->bytes / line->folded));
    } else {
        fc_error why = {FC_OK, ""};
        fc_arena *arena = fc_arena_new();
        FC_NEED(arena, err, in->checkpoint->path);
        const char *json = inspect_object(in, line->first, arena, &why);
        print_value(out, json ? json : text_bytes(size, line->bytes));
        fc_arena_free(arena);
    }
    if (line->folded > 1) {
        text_printf(out, "  (each of %zu)", line->folded);
    }
    text_puts(out, "\n");
    return FC_OK;
}

static fc_code print_objects(inspection *in, const widths *w, fc_error *err) {
    text_out *out = in->out;
    fc_code rc = FC_OK;
    text_name_padded(out, "OBJECT", w->name + 2);
    text_puts(out, in->headers_only ? "BYTES\n" : "VALUE\n");
    for (size_t i = 0; i < in->nlines && out->error == 0 && rc == FC_OK; i++) {
        const inspect_line *line = &in->lines[i];
        if (line->kind && line->objects > 0) {
            text_name_padded(out, line->name, w->name);
            text_puts(out, "  ");
            rc = print_object(in, line, err);
        }
    }
    text_puts(out, "\n");
    return rc;
}

fc_code inspect_text(inspection *in, fc_error *err) {
    widths w;
    bool tensors = false, objects = false;
    measure_columns(in, &w);
    stats_measure(in, &w.stats);
    for (size_t i = 0; i < in->nlines; i++) {
        const bool object = in->lines[i].kind && in->lines[i].objects > 0;
        tensors = tensors || !object;
        objects = objects || object;
    }
    if (tensors) {
        print_tensors(in, &w);
    }
    if (objects) {
        FC_TRY(print_objects(in, &w, err));
    }
    return print_summary(in, err);
}
