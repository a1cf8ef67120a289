/*
 * inspect --html: writes one self-contained page. The summary, the tree of modules and the tables are plain HTML;
 * page.js adds search and draws the tensors that the user opens.
 */
#include "inspect/page/page.h"

#include "page_assets.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_FILES = 2000, MAX_VALUE = 4000, SHORT_VALUE = 120 };

static void write_head(inspection *in) {
    text_out *out = in->out;
    text_puts(out, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
                   "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
                   "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
                   "style-src 'unsafe-inline'; script-src 'sha256-" PAGE_JS_SHA256 "'\">\n<title>");
    text_html(out, in->checkpoint->path);
    text_puts(out, " · fsdpckpt</title>\n<style>\n");
    text_write(out, page_css, sizeof page_css);
    text_puts(out, "</style></head><body>\n<a class=\"skip\" href=\"#tensors\">Skip to the tensors</a>\n");
}

static void write_fact(text_out *out, const char *name, const char *value) {
    text_printf(out, "<div><dt>%s</dt><dd>", name);
    text_html(out, value);
    text_puts(out, "</dd></div>");
}

/* Writes "3 NaN, 1 infinite" into `buf`. @return false if all values are finite. */
static bool count_bad(const inspection *in, char *buf, size_t size) {
    uint64_t nans = 0, infinities = 0;
    char a[TEXT_SIZE_MAX], b[TEXT_SIZE_MAX];
    for (size_t i = 0; i < in->nitems; i++) {
        const fc_stats *s = inspect_stats_of(in, in->items[i]);
        nans = inspect_add(nans, s ? s->nans : 0);
        infinities = inspect_add(infinities, s ? s->infinities : 0);
    }
    snprintf(buf, size, "%s%s%s%s%s", nans > 0 ? text_count(a, nans) : "", nans > 0 ? " NaN" : "",
             nans > 0 && infinities > 0 ? ", " : "", infinities > 0 ? text_count(b, infinities) : "",
             infinities > 0 ? " infinite" : "");
    return nans > 0 || infinities > 0;
}

static void write_facts(inspection *in) {
    const fc_checkpoint *c = in->checkpoint;
    text_out *out = in->out;
    char text[3 * TEXT_SIZE_MAX];
    const char *name = strrchr(c->path, '/');
    text_html_in(out, "<header><h1>", name && name[1] ? name + 1 : c->path, "</h1>\n<p class=\"sub\"><code>");
    text_html(out, c->path);
    text_puts(out, "</code></p><p class=\"sub\">");
    text_html(out, c->format->description);
    if (c->producer) {
        text_puts(out, ", written by ");
        text_html(out, c->producer);
    }
    text_puts(out, "</p>\n");
    if (c->note) {
        text_html_in(out, "<p class=\"note\">Note: ", c->note, "</p>\n");
    }
    text_puts(out, "<dl class=\"facts\">");
    write_fact(out, "Tensors", text_count(text, in->sum.tensors));
    write_fact(out, "Elements", text_params(text, in->sum.elements));
    write_fact(out, "Size", text_bytes(text, in->sum.bytes));
    write_fact(out, "Objects", text_count(text, in->sum.objects));
    write_fact(out, "Chunks", text_count(text, in->sum.chunks));
    write_fact(out, "Files", text_count(text, c->nfiles));
    if (!in->headers_only) {
        write_fact(out, "On disk", text_bytes(text, in->sum.file_bytes));
    }
    if (in->stats) {
        write_fact(out, "Values", count_bad(in, text, sizeof text) ? text : "all finite");
    }
    text_puts(out, "</dl>");
    if (in->nitems < c->ntensors) {
        text_printf(out, "<p class=\"note\">%zu of %zu values are left out by --include and --exclude.</p>",
                    c->ntensors - in->nitems, c->ntensors);
    }
    text_puts(out, "</header>\n");
}

/* The share of each dtype in the bytes: a bar and its legend. */
static void write_dtypes(inspection *in) {
    const totals *sum = &in->sum;
    text_out *out = in->out;
    char a[TEXT_SIZE_MAX], b[TEXT_SIZE_MAX];
    if (sum->bytes == 0) {
        return;
    }
    for (int legend = 0; legend < 2; legend++) {
        text_puts(out, legend ? "</div>\n<ul class=\"legend\">"
                              : "<h2>Types</h2>\n<div class=\"share\" aria-hidden=\"true\">");
        for (int d = 0, shown = 0; d < FC_DTYPE_COUNT; d++) {
            const double bytes = (double)sum->elements_by_dtype[d] * (double)fc_dtype_size((fc_dtype)d);
            const double percent = 100 * bytes / (double)sum->bytes;
            if (sum->by_dtype[d] == 0) {
                continue;
            }
            int hue = (shown++ * 67 + 210) % 360;
            if (!legend) {
                text_printf(out, "<i style=\"--h:%d;width:%.2f%%\"></i>", hue, percent);
                continue;
            }
            text_printf(out,
                        "<li><span class=\"sw\" style=\"--h:%d\"></span>%s: %s %s, %s elements, %s, %.3g&#8239;%%</li>",
                        hue, fc_dtype_get((fc_dtype)d)->torch_name, text_count(a, sum->by_dtype[d]),
                        sum->by_dtype[d] == 1 ? "tensor" : "tensors", text_params(b, sum->elements_by_dtype[d]),
                        text_bytes((char[TEXT_SIZE_MAX]){0}, (uint64_t)bytes), percent);
        }
    }
    text_puts(out, "</ul>\n");
}

static void write_layout(inspection *in, size_t ranks) {
    text_out *out = in->out;
    char layout[256], count[TEXT_SIZE_MAX];
    text_html_in(out, "<section><h2>Layout</h2>\n<p>", inspect_layout(in, layout, sizeof layout),
                 "</p>\n<ul id=\"dims\" hidden>");
    for (int d = 0; d < in->mesh.ndim; d++) {
        text_html_in(out, "<li>", in->mesh.names[d], "</li>");
    }
    text_puts(out, "</ul>\n<ul class=\"groups\">");
    for (size_t i = 0; i < in->sharding.nstyles; i++) {
        text_puts(out, "<li><code>");
        text_html(out, in->sharding.styles[i].text);
        text_printf(out, "</code>: %s %s</li>", text_count(count, in->sharding.styles[i].tensors),
                    in->sharding.styles[i].tensors == 1 ? "tensor" : "tensors");
    }
    if (in->sharding.other > 0) {
        text_printf(out, "<li>other ways: %s tensors</li>", text_count(count, in->sharding.other));
    }
    text_puts(out, "</ul>\n");
    if (ranks > 1) {
        text_puts(out,
                  "<div class=\"live\" hidden><p><label>Highlight rank <input id=\"rank\" type=\"number\" min=\"0\" "
                  "inputmode=\"numeric\"></label> <span id=\"rank-says\" role=\"status\"></span></p>\n"
                  "<div id=\"mesh\" class=\"meshes\" role=\"region\" tabindex=\"0\" aria-label=\"The mesh of "
                  "ranks\"></div></div>\n");
    }
    text_puts(out, "</section>\n");
}

static void write_groups(inspection *in, const char *title, const rank_load *loads, size_t ranks) {
    rank_groups groups;
    if (!loads) {
        return;
    }
    inspect_group_ranks(loads, ranks, &groups);
    text_printf(in->out, "<p class=\"sub\">%s</p><ul class=\"groups\">", title);
    for (size_t i = 0; i < groups.count; i++) {
        text_printf(in->out, "<li>%s</li>", groups.text[i]);
    }
    text_puts(in->out, "</ul>\n");
}

static void write_ranks(inspection *in, const inspect_loads *loads) {
    text_out *out = in->out;
    if (loads->ranks < 2) {
        return;
    }
    text_puts(out, "<section><h2>Ranks</h2>\n");
    write_groups(in, "Stored by each rank:", loads->stored, loads->ranks);
    write_groups(in, "Held by each rank, with replicas that another rank stores:", loads->held, loads->ranks);
    text_puts(out, "<div id=\"bars\" class=\"live scroll\" hidden></div></section>\n");
}

static fc_code write_tensors(inspection *in, fc_error *err) {
    text_out *out = in->out;
    text_printf(
        out,
        "<h2 id=\"tensors\">Tensors</h2>\n<div class=\"tools live\" hidden role=\"search\">"
        "<input id=\"search\" type=\"search\" placeholder=\"Search: layers.17, q_proj, bfloat16, 4096x\" "
        "aria-label=\"Search names, types and shapes\">"
        "<button id=\"open\" type=\"button\">Open all</button><button id=\"close\" type=\"button\">Close all</button>"
        "<span id=\"found\" role=\"status\" class=\"sub\"></span></div>\n<div id=\"tree\" class=\"tree%s\">\n",
        in->stats ? " stats" : "");
    fc_code rc = inspect_html_tree(in, err);
    text_puts(out, "</div>\n");
    return rc;
}

/* Writes the value of an object. Long values are folded, and very long ones are shortened. */
static void write_value(text_out *out, const char *json) {
    const size_t length = strlen(json);
    size_t shown = 0;
    if (length <= SHORT_VALUE) {
        text_html_in(out, "<code>", json, "</code>");
        return;
    }
    char part[MAX_VALUE + 1];
    while (shown < length && shown + 4 < MAX_VALUE) {
        uint32_t code;
        size_t len = text_utf8(json + shown, &code);
        shown += len ? len : 1;
    }
    memcpy(part, json, shown);
    part[shown] = '\0';
    text_printf(out, "<details><summary>%zu bytes of JSON</summary><code>", length);
    text_html(out, part);
    text_puts(out, "</code>");
    if (shown < length) {
        text_printf(out, " … and %zu bytes more: fsdpckpt inspect --tensor NAME", length - shown);
    }
    text_puts(out, "</details>");
}

static fc_code write_object(inspection *in, const inspect_line *line, fc_error *err) {
    text_out *out = in->out;
    char size[TEXT_SIZE_MAX];
    fc_error why = {FC_OK, ""};
    fc_arena *arena = fc_arena_new();
    FC_NEED(arena, err, in->checkpoint->path);
    const char *json = line->kind->value                     ? line->kind->value
                       : line->kind->why || in->headers_only ? NULL
                                                             : inspect_object(in, line->first, arena, &why);
    text_html_in(out, "<tr><th scope=\"row\" class=\"name\">", line->name, "</th><td>");
    if (json) {
        write_value(out, json);
    } else if (line->kind->why) {
        text_html_in(out, "<span class=\"bad\">unreadable: ", line->kind->why, "</span>");
    } else {
        text_puts(out, text_bytes(size, line->bytes / line->folded));
    }
    if (line->folded > 1) {
        text_printf(out, " <span class=\"sub\">each of %zu</span>", line->folded);
    }
    text_puts(out, "</td></tr>\n");
    fc_arena_free(arena);
    return FC_OK;
}

static fc_code write_objects(inspection *in, fc_error *err) {
    fc_code rc = FC_OK;
    if (in->sum.objects == 0) {
        return FC_OK;
    }
    text_puts(in->out, "<h2>Objects</h2>\n<table class=\"plain\"><thead><tr><th scope=\"col\">Name</th>"
                       "<th scope=\"col\">Value</th></tr></thead><tbody>\n");
    for (size_t i = 0; i < in->nlines && rc == FC_OK && in->out->error == 0; i++) {
        if (in->lines[i].objects > 0) {
            rc = write_object(in, &in->lines[i], err);
        }
    }
    text_puts(in->out, "</tbody></table>\n");
    return rc;
}

static void write_files(inspection *in) {
    const fc_checkpoint *c = in->checkpoint;
    text_out *out = in->out;
    char size[TEXT_SIZE_MAX];
    text_printf(out, "<h2>Files</h2>\n<details%s><summary>%s %s</summary>\n<table><tbody>\n",
                c->nfiles <= 16 ? " open" : "", text_count(size, c->nfiles), c->nfiles == 1 ? "file" : "files");
    for (size_t i = 0; i < c->nfiles && i < MAX_FILES; i++) {
        struct stat st;
        text_html_in(out, "<tr><td class=\"name\">", c->files[i].name, "</td><td class=\"num\">");
        if (!in->headers_only && fc_stat(c->files[i].path, &st) == 0) {
            text_puts(out, text_bytes(size, (uint64_t)st.st_size));
        }
        text_puts(out, "</td></tr>\n");
    }
    text_puts(out, "</tbody></table>");
    if (c->nfiles > MAX_FILES) {
        text_printf(out, "<p class=\"note\">… and %s more</p>", text_count(size, c->nfiles - MAX_FILES));
    }
    text_puts(out, "</details>\n");
}

static fc_code write_main(inspection *in, const inspect_loads *loads, fc_error *err) {
    text_out *out = in->out;
    text_puts(out, "<main>\n");
    write_dtypes(in);
    text_puts(out, "<div class=\"cols\">");
    write_layout(in, loads->ranks);
    write_ranks(in, loads);
    text_puts(out, "</div>\n");
    FC_TRY(write_tensors(in, err));
    FC_TRY(write_objects(in, err));
    write_files(in);
    text_puts(out, "</main>\n<footer>Made by <code>fsdpckpt inspect --html</code>. "
                   "<span class=\"live\" hidden>Press / to search.</span></footer>\n");
    return inspect_html_data(in, loads, err);
}

fc_code inspect_html(inspection *in, fc_error *err) {
    inspect_loads loads;
    text_out *out = in->out;
    FC_TRY(inspect_ranks(in, &loads, err));
    write_head(in);
    write_facts(in);
    FC_TRY(write_main(in, &loads, err));
    text_puts(out, "<script>");
    text_write(out, page_js, sizeof page_js);
    text_puts(out, "</script>\n</body></html>\n");
    return FC_OK;
}
