/*
 * inspect --html: one page that needs nothing else, with an SVG picture of how each tensor is cut.
 */
#include "inspect.h"

#include "fsdpckpt/format.h"

#include <string.h>

enum { MAX_CELLS = 1024, PICTURE_WIDTH = 200, PICTURE_LEAST = 48, PALETTE = 12 };

static const char page_start[] =
    "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
    "<style>\n"
    "body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}\n"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .8rem .3rem 0;vertical-align:top;"
    "border-top:1px solid #ddd}\n"
    "code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}dt{float:left;clear:left;width:8rem;color:#666}"
    "dd{margin-left:8rem}\n"
    "svg text{font:10px ui-monospace,monospace;text-anchor:middle;dominant-baseline:central}rect{stroke:#fff}\n"
    ".c0{fill:#a6cee3}.c1{fill:#b2df8a}.c2{fill:#fb9a99}.c3{fill:#fdbf6f}.c4{fill:#cab2d6}.c5{fill:#ffff99}"
    ".c6{fill:#8dd3c7}.c7{fill:#bebada}.c8{fill:#fccde5}.c9{fill:#d9d9d9}.c10{fill:#ccebc5}.c11{fill:#80b1d3}\n"
    "@media(prefers-color-scheme:dark){body{background:#1b1b1b;color:#ddd}td,th{border-color:#444}rect{stroke:#1b1b1b}"
    "svg text{fill:#111}dt{color:#999}}\n"
    "</style>\n";

/* Names and values as HTML text: also in attributes. Unsafe characters become visible escapes as on a terminal. */
static void html_text(text_out *out, const char *s) {
    while (*s) {
        size_t plain = 0;
        while (s[plain] >= 0x20 && s[plain] < 0x7f && !strchr("<>&\"'", s[plain])) {
            plain++;
        }
        text_write(out, s, plain);
        s += plain;
        if (!*s) {
            return;
        }
        uint32_t code;
        size_t len = text_utf8(s, &code);
        if (len == 0 || code < 0x20 || (code >= 0x7f && code < 0xa0) || (code >= 0x2028 && code <= 0x202e) ||
            (code >= 0x2066 && code <= 0x2069)) {
            text_printf(out, "&#65533;");
        } else {
            text_printf(out, "&#%u;", (unsigned)code);
        }
        s += len ? len : 1;
    }
}

typedef struct scale {
    double unit[2]; /* pixels an element, along the two axes of the picture */
    double size[2];
    int dims[2]; /* vertical, horizontal; -1 none */
} scale;

/* The axes of the picture: the cut dimensions, filled up with the longest others. Long sides are 200 pixels, short
 * ones at least 48, whatever the shape. */
static void choose_scale(const fc_tensor *t, const fc_cut *c, scale *s) {
    int first = c->ncut > 0 ? c->dims[0] : 0, second = c->ncut > 1 ? c->dims[1] : -1;
    for (int d = t->ndim - 1; d >= 0 && second < 0; d--) {
        second = d != first ? d : -1;
    }
    if (second >= 0 && first > second) {
        int swap = first;
        first = second;
        second = swap;
    }
    s->dims[0] = first;
    s->dims[1] = second;
    double high = (double)t->shape[first], wide = second >= 0 ? (double)t->shape[second] : 1;
    double most = high > wide ? high : wide;
    double side[2] = {PICTURE_WIDTH * high / most, PICTURE_WIDTH * wide / most};
    for (int i = 0; i < 2; i++) {
        s->size[i] = side[i] < PICTURE_LEAST ? PICTURE_LEAST : side[i];
        s->unit[i] = s->size[i] / (i == 0 ? high : wide);
    }
}

static void draw_cell(text_out *out, const fc_tensor *t, const fc_chunk *chunk, size_t index, const scale *s) {
    double at[2] = {0, 0}, side[2] = {s->size[0], s->size[1]};
    for (int i = 0; i < 2; i++) {
        int d = s->dims[i];
        if (d >= 0) {
            at[i] = (double)chunk->dims[d] * s->unit[i];
            side[i] = (double)chunk->dims[t->ndim + d] * s->unit[i];
        }
    }
    size_t number = chunk->rank != FC_NO_RANK ? chunk->rank : index;
    text_printf(out, "<rect class=\"c%zu\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>%s %zu: [",
                number % PALETTE, at[1], at[0], side[1], side[0], chunk->rank != FC_NO_RANK ? "rank" : "piece", number);
    for (int d = 0; d < t->ndim; d++) {
        text_printf(out, "%s%lld:%lld", d ? ", " : "", (long long)chunk->dims[d],
                    (long long)(chunk->dims[d] + chunk->dims[t->ndim + d]));
    }
    text_puts(out, "]</title></rect>");
    if (side[0] >= 11 && side[1] >= 16) {
        text_printf(out, "<text x=\"%.1f\" y=\"%.1f\">%zu</text>", at[1] + side[1] / 2, at[0] + side[0] / 2, number);
    }
}

static void draw_tensor(text_out *out, const fc_tensor *t, const fc_cut *c) {
    if (t->nchunks == 0 || t->ndim == 0 || !c->grid || c->ncut > 2) {
        return;
    }
    if (t->nchunks > MAX_CELLS) {
        text_printf(out, "%zu pieces", t->nchunks);
        return;
    }
    scale s;
    choose_scale(t, c, &s);
    text_printf(out, "<svg width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.1f %.1f\" role=\"img\">", s.size[1],
                s.size[0], s.size[1], s.size[0]);
    for (size_t i = 0; i < t->nchunks; i++) {
        draw_cell(out, t, &t->chunks[i], i, &s);
    }
    text_puts(out, "</svg>");
}

static fc_code write_tensor(inspection *in, const fc_tensor *t, fc_error *err) {
    text_out *out = in->out;
    char text[160];
    fc_cut c;
    if (!fc_cut_recognise(t, &in->scratch, &c)) {
        return inspect_no_memory(in, err);
    }
    text_puts(out, "<tr><td><code>");
    html_text(out, t->name);
    text_printf(out, "</code></td><td>%s</td><td>", fc_dtype_get(t->dtype)->torch_name);
    html_text(out, text_shape(text, sizeof text, t->ndim, t->shape));
    text_puts(out, "</td><td>");
    html_text(out, cut_describe(t, &c, text, sizeof text));
    text_puts(out, "<br>");
    html_text(out, inspect_placements(in, t, &c, text, sizeof text));
    text_puts(out, "</td><td>");
    draw_tensor(out, t, &c);
    text_puts(out, "</td></tr>\n");
    return FC_OK;
}

static fc_code write_object(inspection *in, const fc_tensor *t, fc_error *err) {
    fc_error why = {FC_OK, ""};
    fc_arena *arena = fc_arena_new();
    if (!arena) {
        return inspect_no_memory(in, err);
    }
    const char *json = inspect_object(in, t, arena, &why);
    text_puts(in->out, "<tr><td><code>");
    html_text(in->out, t->name);
    text_puts(in->out, "</code></td><td><code>");
    html_text(in->out, json ? json : why.message);
    text_puts(in->out, "</code></td></tr>\n");
    fc_arena_free(arena);
    return FC_OK;
}

static fc_code write_rows(inspection *in, bool objects, fc_error *err) {
    fc_code rc = FC_OK;
    for (size_t i = 0; i < in->checkpoint->ntensors && rc == FC_OK && in->out->error == 0; i++) {
        const fc_tensor *t = &in->checkpoint->tensors[i];
        if ((t->object != NULL) == objects) {
            rc = objects ? write_object(in, t, err) : write_tensor(in, t, err);
        }
    }
    return rc;
}

static void write_head(inspection *in) {
    const fc_checkpoint *c = in->checkpoint;
    text_out *out = in->out;
    char a[TEXT_SIZE_MAX], b[TEXT_SIZE_MAX], layout[192];
    text_puts(out, page_start);
    text_puts(out, "<title>");
    html_text(out, c->path);
    text_puts(out, "</title></head><body>\n<h1>");
    html_text(out, c->path);
    text_puts(out, "</h1>\n<dl><dt>Format</dt><dd>");
    html_text(out, c->format->description);
    text_puts(out, c->producer ? ", written by " : "");
    html_text(out, c->producer ? c->producer : "");
    text_puts(out, "</dd><dt>Layout</dt><dd>");
    html_text(out, inspect_layout(in, layout, sizeof layout));
    text_printf(out, "</dd><dt>Files</dt><dd>%zu</dd><dt>Tensors</dt><dd>%zu, %s elements, %s</dd></dl>\n", c->nfiles,
                in->sum.tensors, text_params(a, in->sum.elements), text_bytes(b, in->sum.bytes));
}

fc_code inspect_html(inspection *in, fc_error *err) {
    fc_code rc = FC_OK;
    write_head(in);
    if (rc == FC_OK) {
        text_puts(in->out, "<table><tr><th>Tensor</th><th>Type</th><th>Shape</th><th>Cut</th><th>Pieces</th></tr>\n");
        rc = write_rows(in, false, err);
    }
    if (rc == FC_OK) {
        text_puts(in->out, "</table>\n<h2>Objects</h2>\n<table><tr><th>Object</th><th>Value</th></tr>\n");
        rc = write_rows(in, true, err);
    }
    text_puts(in->out, "</table>\n</body></html>\n");
    return rc;
}
