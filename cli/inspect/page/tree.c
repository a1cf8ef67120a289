/*
 * inspect --html: the tree of modules, and the numbers for its pictures.
 */
#include "inspect/tree.h"
#include "inspect/page/page.h"

#include <stdlib.h>
#include <string.h>

#include "fsdpckpt/try.h"

enum {
    OPEN_LINES = 60,  /* a tree with at most this many lines starts open */
    MAX_CELLS = 2048, /* of a picture */
    MAX_BOXES = 256   /* of a tensor whose chunks form no grid */
};

typedef struct page_tree {
    inspection *in;
    bool open; /* all modules start open */
} page_tree;

static void write_label(text_out *out, const tree_node *node) {
    char *label = strndup(node->label, node->length);
    text_html(out, node->itself ? "(itself)" : !label ? "?" : label[0] ? label : "(empty name)");
    free(label);
}

/* @return the bytes as a percentage of all bytes. */
static double share_of_bytes(const inspection *in, uint64_t bytes) {
    return in->sum.bytes ? 100.0 * (double)bytes / (double)in->sum.bytes : 0;
}

static fc_code open_module(void *context, const tree_node *node, fc_error *err) {
    (void)err;
    const page_tree *tree = context;
    inspection *in = tree->in;
    text_out *out = in->out;
    char size[TEXT_SIZE_MAX], count[TEXT_SIZE_MAX];
    const bool open = tree->open || node->depth == 0;
    text_printf(out, "<details%s><summary style=\"--w:%.1f\"><span><span class=\"name mod\">", open ? " open" : "",
                share_of_bytes(in, node->bytes));
    write_label(out, node);
    text_printf(out, "</span> <span class=\"meta\">%s %s</span></span><span class=\"num\">%s</span></summary>\n",
                text_count(count, node->tensors), node->tensors == 1 ? "tensor" : "tensors",
                text_bytes(size, node->bytes));
    return FC_OK;
}

static void close_module(void *context, const tree_node *node) {
    (void)node;
    text_puts(((page_tree *)context)->in->out, "</details>\n");
}

static void write_term(text_out *out, const char *term, const char *text) {
    if (text && text[0]) {
        text_printf(out, "%s: ", term);
        text_html(out, text);
        text_puts(out, "\n");
    }
}

/*
 * Writes the details below an open line, one per line of text: a page may have 10,000 of them, and a browser needs long
 * for as many lists. The script makes a list of them when the line is opened.
 */
static void write_detail(inspection *in, const inspect_line *line) {
    text_out *out = in->out;
    char each[TEXT_SIZE_MAX], all[TEXT_SIZE_MAX], elements[TEXT_SIZE_MAX];
    text_puts(out, "<div class=\"detail\"><p>");
    write_term(out, "Chunks", line->kind->sharding);
    write_term(out, "Placements", line->kind->placements);
    write_term(out, "Same as", line->kind->same_as);
    text_printf(out, "Size: %s elements, %s", text_params(elements, inspect_elements(line->first)),
                text_bytes(each, inspect_bytes(line->first)));
    if (line->folded > 1) {
        text_printf(out, " each; %s in all", text_bytes(all, line->bytes));
    }
    text_puts(out, "</p>");
    html_stats_terms(in, line);
    text_puts(out, "</div>");
}

static fc_code write_leaf(void *context, const tree_node *node, fc_error *err) {
    (void)err;
    inspection *in = ((page_tree *)context)->in;
    text_out *out = in->out;
    const inspect_line *line = node->line;
    char text[128], size[TEXT_SIZE_MAX];
    text_printf(out, "<details class=\"leaf\" data-k=\"%zu\" data-s=\"%zu\" data-name=\"",
                (size_t)(line->kind - in->kinds), (size_t)(line - in->lines));
    text_html(out, line->name);
    text_printf(out, "\"><summary style=\"--w:%.1f\"><span class=\"name\">", share_of_bytes(in, line->bytes));
    write_label(out, node);
    text_puts(out, "</span>");
    if (line->folded > 1) {
        text_printf(out, "<span class=\"meta cnt num\">%zu ×</span>", line->folded);
    }
    text_printf(out, "<span class=\"meta dt\">%s</span><span class=\"meta sh\">%s",
                fc_dtype_get(line->first->dtype)->torch_name,
                text_shape(text, sizeof text, line->first->ndim, line->first->shape));
    html_stats_badge(in, line);
    text_printf(out, "</span><span class=\"num\">%s</span></summary>", text_bytes(size, line->bytes));
    write_detail(in, line);
    text_puts(out, "</details>\n");
    return FC_OK;
}

fc_code inspect_html_tree(inspection *in, fc_error *err) {
    page_tree tree = {.in = in};
    const tree_visitor visitor = {.enter = open_module, .leaf = write_leaf, .leave = close_module, .context = &tree};
    size_t lines = 0;
    for (size_t i = 0; i < in->nlines; i++) {
        lines += in->lines[i].tensors > 0;
    }
    tree.open = lines <= OPEN_LINES;
    return inspect_walk(in, true, false, &visitor, err);
}

/* ---- numbers ---- */

/* Writes the offsets of the chunks along one dimension, as {"n", "step"} if they are even. */
static void write_axis(text_out *out, const int64_t *offsets, size_t count) {
    bool even = true;
    for (size_t i = 1; i < count; i++) {
        even = even && offsets[i] == (int64_t)i * offsets[1];
    }
    if (even) {
        text_printf(out, "{\"n\":%zu,\"step\":%lld}", count, count > 1 ? (long long)offsets[1] : 0LL);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        text_printf(out, "%c%lld", i ? ',' : '[', (long long)offsets[i]);
    }
    text_puts(out, "]");
}

/* "0-3,8" */
static void write_rank_runs(text_out *out, const rank_span *span) {
    for (size_t i = 0, end; i < span->count; i = end) {
        for (end = i + 1; end < span->count && span->ranks[end] == span->ranks[end - 1] + 1; end++) {
        }
        text_printf(out, "%s%u", i ? "," : "", (unsigned)span->ranks[i]);
        if (end > i + 1) {
            text_printf(out, "-%u", (unsigned)span->ranks[end - 1]);
        }
    }
}

/* Writes the holders of each cell: "r" is 1 if only rank i holds cell i, and missing if the ranks are unknown. */
static void write_holders(inspection *in, const inspect_holders *holders) {
    const uint32_t *cells = in->scratch.cells;
    const size_t ncells = in->scratch.ncells;
    bool known = true, plain = true;
    for (size_t i = 0; i < ncells; i++) {
        const rank_span *span = &holders->spans[cells[i] - 1];
        known = known && span->count > 0;
        plain = plain && span->count == 1 && span->ranks[0] == i;
    }
    if (!known) {
        return;
    }
    text_puts(in->out, plain ? ",\"r\":1" : ",\"r\":");
    for (size_t i = 0; i < ncells && !plain; i++) {
        text_puts(in->out, i ? ",\"" : "[\"");
        write_rank_runs(in->out, &holders->spans[cells[i] - 1]);
        text_puts(in->out, "\"");
    }
    text_puts(in->out, plain ? "" : "]");
}

static void write_boxes(text_out *out, const fc_tensor *t) {
    for (size_t i = 0; i < t->nchunks; i++) {
        text_puts(out, i ? ",[" : ",\"b\":[[");
        for (int d = 0; d < 2 * t->ndim; d++) {
            text_printf(out, "%s%lld", d ? "," : "", (long long)t->chunks[i].dims[d]);
        }
        text_puts(out, "]");
    }
    for (size_t i = 0; i < t->nchunks; i++) {
        const uint32_t rank = t->chunks[i].rank;
        text_printf(out, "%s%lld", i ? "," : "],\"w\":[", rank == FC_NO_RANK ? -1LL : (long long)rank);
    }
    text_puts(out, "]");
}

/* The axes of a grid of chunks, and which ranks hold each cell. */
static fc_code write_grid(inspection *in, const fc_tensor *t, const fc_sharding *c, fc_error *err) {
    text_out *out = in->out;
    inspect_holders holders = {0};
    fc_arena *arena = fc_arena_new();
    fc_code rc;
    FC_TRY_GOTO(arena ? inspect_find_holders(in, t, arena, &holders, err) : fc_no_memory(err, in->checkpoint->path), rc,
                out);
    text_puts(out, ",\"a\":[");
    for (int d = 0; d < t->ndim; d++) {
        text_puts(out, d ? "," : "");
        write_axis(out, in->scratch.axis[d], (size_t)c->counts[d]);
    }
    text_puts(out, "]");
    write_holders(in, &holders);
out:
    fc_arena_free(arena);
    return rc;
}

static fc_code write_kind(inspection *in, const fc_tensor *t, fc_error *err) {
    text_out *out = in->out;
    fc_sharding c;
    FC_NEED(fc_recognise_sharding(t, &in->scratch, &c), err, in->checkpoint->path);
    text_puts(out, "{\"s\":[");
    for (int d = 0; d < t->ndim; d++) {
        text_printf(out, "%s%lld", d ? "," : "", (long long)t->shape[d]);
    }
    text_puts(out, "]");
    if (!c.grid && t->nchunks > 0 && t->nchunks <= MAX_BOXES && t->ndim > 0) {
        write_boxes(out, t);
    }
    if (c.grid && t->ndim > 0 && in->scratch.ncells <= MAX_CELLS) {
        FC_TRY(write_grid(in, t, &c, err));
    }
    text_puts(out, "}");
    return FC_OK;
}

/* [value, how often, value, how often …] */
static void write_runs(text_out *out, const char *key, const rank_load *loads, size_t ranks) {
    text_printf(out, ",\"%s\":[", key);
    for (size_t i = 0, end; i < ranks && loads; i = end) {
        for (end = i + 1; end < ranks && loads[end].bytes == loads[i].bytes; end++) {
        }
        text_printf(out, "%s%llu,%zu", i ? "," : "", (unsigned long long)loads[i].bytes, end - i);
    }
    text_puts(out, "]");
}

fc_code inspect_html_data(inspection *in, const inspect_loads *loads, fc_error *err) {
    text_out *out = in->out;
    fc_code rc = FC_OK;
    text_puts(out, "<script type=\"application/json\" id=\"data\">{\"mesh\":[");
    for (int d = 0; d < in->mesh.ndim; d++) {
        text_printf(out, "%s%lld", d ? "," : "", (long long)in->mesh.sizes[d]);
    }
    text_puts(out, "]");
    write_runs(out, "stored", loads->stored, loads->ranks);
    write_runs(out, "held", loads->held, loads->ranks);
    html_stats_data(in);
    text_puts(out, ",\"kinds\":[");
    for (size_t i = 0; i < in->nkinds && rc == FC_OK && out->error == 0; i++) {
        text_puts(out, i ? ",\n" : "");
        if (in->kinds[i].example->object) {
            text_puts(out, "0");
        } else {
            rc = write_kind(in, in->kinds[i].example, err);
        }
    }
    text_puts(out, "]}</script>\n");
    return rc;
}
