/*
 * inspect --html --stats: the statistics in the tree of modules, and the numbers for its histograms.
 */
#include "inspect/stats.h"
#include "inspect/page/page.h"

#include <math.h>

/* The heights of the bars of a histogram, 0 to 63. All are harmless in HTML and JSON. */
static const char heights[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
enum { TALLEST = 63 };

void html_stats_badge(inspection *in, const inspect_line *line) {
    char count[TEXT_SIZE_MAX];
    const fc_stats *s = line->stats;
    if (s && s->nans > 0) {
        text_printf(in->out, " <b class=\"bad\">%s NaN</b>", text_count(count, s->nans));
    }
    if (s && s->infinities > 0) {
        text_printf(in->out, " <b class=\"bad\">%s infinite</b>", text_count(count, s->infinities));
    }
}

void html_stats_terms(inspection *in, const inspect_line *line) {
    static const char *const names[] = {"Mean", "Deviation", "Smallest", "Largest", "Zeros", "NaN", "Infinite"};
    stats_cells cells;
    if (!line->stats) {
        return;
    }
    stats_format(line->stats, line->first->dtype, false, &cells);
    text_puts(in->out, "<p class=\"numbers\">");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        text_printf(in->out, "%s%s: %s", i ? "\n" : "", names[i], cells.text[i]);
    }
    text_puts(in->out, "</p>");
}

/* Writes from, to, the values outside, and the heights of the bars relative to the highest. */
static void write_bars(text_out *out, const fc_histogram *h) {
    uint64_t most = 1;
    char text[FC_HISTOGRAM_BINS + 1] = "";
    for (int i = 0; i < FC_HISTOGRAM_BINS; i++) {
        most = h->bins[i] > most ? h->bins[i] : most;
    }
    for (int i = 0; i < FC_HISTOGRAM_BINS; i++) { /* a bin with values is never empty */
        text[i] = heights[(int)ceil((double)h->bins[i] / (double)most * TALLEST)];
    }
    text_printf(out, ",%.6g,%.6g,%llu,%llu,\"%s\"", h->from, h->to, (unsigned long long)h->below,
                (unsigned long long)h->above, text);
}

/* One tensor: its numbers as text, then its histogram. */
static void write_tensor(inspection *in, const fc_tensor *t) {
    const fc_stats *s = inspect_stats_of(in, t);
    stats_cells cells;
    stats_format(s, t->dtype, false, &cells);
    text_puts(in->out, "[");
    for (size_t i = 0; i < sizeof cells.text / sizeof *cells.text; i++) {
        text_printf(in->out, "%s\"%s\"", i ? "," : "", cells.text[i]);
    }
    if (s->histogram) {
        write_bars(in->out, s->histogram);
    }
    text_puts(in->out, "]");
}

void html_stats_data(inspection *in) {
    text_out *out = in->out;
    if (!in->stats) {
        return;
    }
    text_puts(out, ",\"stats\":[");
    for (size_t i = 0; i < in->nlines && out->error == 0; i++) {
        const inspect_line *line = &in->lines[i];
        text_puts(out, i ? ",\n[" : "[");
        for (size_t k = 0; k < line->folded && line->tensors > 0; k++) {
            text_puts(out, k ? "," : "");
            write_tensor(in, line->members ? in->items[line->members[k]] : line->first);
        }
        text_puts(out, "]");
    }
    text_puts(out, "]");
}
