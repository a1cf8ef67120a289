/*
 * inspect --stats: computes statistics, and writes them as text and as JSON.
 */
#include "inspect/stats.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIGITS = 10 }; /* of means and deviations: further digits depend on the order in which threads finish */

fc_code inspect_read_stats(inspection *in, const fc_tensor *const *tensors, size_t count,
                           const fc_stats_options *options, fc_error *err) {
    const fc_checkpoint *c = in->checkpoint;
    const fc_tensor **wanted = calloc(count + 1, sizeof *wanted);
    fc_stats *found = calloc(count + 1, sizeof *found);
    size_t nwanted = 0;
    fc_code rc;
    in->stats = fc_arena_calloc(in->arena, c->ntensors, sizeof *in->stats);
    FC_TRY_GOTO(in->stats && wanted && found ? FC_OK : fc_no_memory(err, in->checkpoint->path), rc, out);
    for (size_t i = 0; i < count; i++) {
        if (!tensors[i]->object) {
            wanted[nwanted++] = tensors[i];
        }
    }
    FC_TRY_GOTO(fc_stats_read(c, wanted, nwanted, options, in->arena, found, err), rc, out);
    for (size_t i = 0; i < nwanted; i++) {
        in->stats[wanted[i] - c->tensors] = found[i];
    }
out:
    free(found);
    free(wanted);
    return rc;
}

const fc_stats *inspect_stats_of(const inspection *in, const fc_tensor *tensor) {
    return in->stats && !tensor->object ? &in->stats[tensor - in->checkpoint->tensors] : NULL;
}

/*
 * Writes a mean or a deviation (`digits` significant digits), or with digits 0 an extreme of a tensor of `dtype` as the
 * shortest text that reads back as the same number. @return buf, of INSPECT_NUMBER bytes.
 */
static const char *number_text(long double value, fc_dtype dtype, int digits, char *buf) {
    const fc_dtype_class cls = fc_dtype_get(dtype)->cls;
    const double wide = (double)value + 0.0; /* no negative zero */
    if (digits > 0) {
        snprintf(buf, INSPECT_NUMBER, "%.*g", digits, wide);
    } else if (cls == FC_CLASS_SIGNED || cls == FC_CLASS_UNSIGNED || cls == FC_CLASS_BOOL) {
        snprintf(buf, INSPECT_NUMBER, "%.0Lf", value);
    } else {
        const float narrow = (float)wide;
        const bool narrows = dtype != FC_F64;
        fc_element_text(narrows ? FC_F32 : FC_F64, narrows ? (const void *)&narrow : &wide, buf);
    }
    return buf;
}

/* ---- text ---- */

enum { COLUMNS = 7, SHORT = 4 };

static const char *const headings[COLUMNS] = {"MEAN", "STD", "MIN", "MAX", "ZEROS", "NAN", "INF"};

/* @param digits of real numbers; 0: all. Integer extremes are always exact. */
static void real_cells(const fc_stats *s, fc_dtype dtype, int digits, stats_cells *out) {
    const fc_dtype_class cls = fc_dtype_get(dtype)->cls;
    const int of_extremes = cls == FC_CLASS_FLOAT || cls == FC_CLASS_PACKED ? digits : 0;
    number_text(s->mean, dtype, digits ? digits : DIGITS, out->text[0]);
    if (cls == FC_CLASS_COMPLEX) {
        char imaginary[INSPECT_NUMBER];
        const size_t used = strlen(out->text[0]);
        number_text(s->mean_imaginary, dtype, digits ? digits : DIGITS, imaginary);
        snprintf(out->text[0] + used, sizeof out->text[0] - used, "%s%sj", imaginary[0] == '-' ? "" : "+", imaginary);
    }
    number_text(fc_stats_deviation(s), dtype, digits ? digits : DIGITS, out->text[1]);
    if (s->ordered) {
        number_text(s->min, dtype, of_extremes, out->text[2]);
        number_text(s->max, dtype, of_extremes, out->text[3]);
    }
}

void stats_format(const fc_stats *s, fc_dtype dtype, bool full, stats_cells *out) {
    for (int i = 0; i < COLUMNS; i++) {
        strcpy(out->text[i], "-");
    }
    if (!s) {
        return;
    }
    if (s->finite > 0) {
        real_cells(s, dtype, full ? 0 : SHORT, out);
    }
    text_count(out->text[4], s->zeros);
    text_count(out->text[5], s->nans);
    text_count(out->text[6], s->infinities);
}

void stats_measure(const inspection *in, stats_widths *w) {
    stats_cells cells;
    for (int i = 0; i < COLUMNS; i++) {
        w->columns[i] = strlen(headings[i]);
    }
    for (size_t k = 0; k < in->nlines; k++) {
        if (in->lines[k].tensors == 0) {
            continue;
        }
        stats_format(in->lines[k].stats, in->lines[k].first->dtype, false, &cells);
        for (int i = 0; i < COLUMNS; i++) {
            const size_t width = strlen(cells.text[i]);
            w->columns[i] = width > w->columns[i] ? width : w->columns[i];
        }
    }
}

static void print_right(text_out *out, const char *text, size_t width) {
    text_repeat(out, " ", width - strlen(text) + 2);
    text_puts(out, text);
}

void stats_print_heading(text_out *out, const stats_widths *w) {
    for (int i = 0; i < COLUMNS; i++) {
        print_right(out, headings[i], w->columns[i]);
    }
}

void stats_print_line(text_out *out, const inspect_line *line, const stats_widths *w) {
    stats_cells cells;
    stats_format(line->stats, line->first->dtype, false, &cells);
    for (int i = 0; i < COLUMNS; i++) {
        print_right(out, cells.text[i], w->columns[i]);
    }
}

void stats_print_tensor(text_out *out, const fc_stats *s, fc_dtype dtype) {
    static const char *const names[COLUMNS] = {"mean", "std", "min", "max", "zeros", "NaN", "infinite"};
    stats_cells cells;
    stats_format(s, dtype, true, &cells);
    for (int i = 0; i < COLUMNS; i++) {
        text_printf(out, "  %-12s%s\n", names[i], cells.text[i]);
    }
}

/* Prints "Values      3 NaN in 2 tensors, first in model.norm.weight". */
static bool print_kind(const inspection *in, bool infinite, const char *what) {
    uint64_t values = 0;
    size_t tensors = 0;
    const char *first = NULL;
    char a[TEXT_SIZE_MAX], b[TEXT_SIZE_MAX];
    for (size_t i = 0; i < in->nitems; i++) {
        const fc_stats *s = inspect_stats_of(in, in->items[i]);
        const uint64_t n = !s ? 0 : infinite ? s->infinities : s->nans;
        first = n > 0 && !first ? in->items[i]->name : first;
        values = inspect_add(values, n);
        tensors += n > 0;
    }
    if (tensors > 0) {
        text_printf(in->out, "Values      %s %s in %s %s, first in ", text_count(a, values), what,
                    text_count(b, tensors), tensors == 1 ? "tensor" : "tensors");
        text_name(in->out, first);
        text_puts(in->out, "\n");
    }
    return tensors > 0;
}

void stats_print_summary(const inspection *in) {
    const bool nan = print_kind(in, false, "NaN"), infinite = print_kind(in, true, "infinite");
    if (!nan && !infinite) {
        text_puts(in->out, "Values      all finite\n");
    }
}

/* ---- JSON ---- */

static void write_number(json_out *j, const char *key, long double value, fc_dtype dtype, int digits) {
    char text[INSPECT_NUMBER];
    JSON_MEMBER(j, raw, key, number_text(value, dtype, digits, text));
}

static void write_none(json_out *j, const char *key) {
    JSON_MEMBER(j, string, key, NULL);
}

static void write_mean(json_out *j, const fc_stats *s, fc_dtype dtype) {
    char text[INSPECT_NUMBER];
    if (s->finite == 0) {
        write_none(j, "mean");
    } else if (fc_dtype_get(dtype)->cls != FC_CLASS_COMPLEX) {
        write_number(j, "mean", s->mean, dtype, DIGITS);
    } else {
        jw_member_open(j, "mean", '[');
        jw_raw(j, number_text(s->mean, dtype, DIGITS, text));
        jw_raw(j, number_text(s->mean_imaginary, dtype, DIGITS, text));
        jw_close(j, ']');
    }
}

static void write_histogram(json_out *j, const fc_histogram *h) {
    if (!h) {
        write_none(j, "histogram");
        return;
    }
    jw_member_open(j, "histogram", '{');
    write_number(j, "from", h->from, FC_F64, DIGITS);
    write_number(j, "to", h->to, FC_F64, DIGITS);
    JSON_UINTS(j, {"below", h->below}, {"above", h->above});
    jw_member_open(j, "counts", '[');
    for (int i = 0; i < FC_HISTOGRAM_BINS; i++) {
        jw_uint(j, h->bins[i]);
    }
    jw_close(j, ']');
    jw_close(j, '}');
}

void stats_write_json(json_out *j, const fc_stats *s, fc_dtype dtype) {
    jw_member_open(j, "stats", '{');
    JSON_UINTS(j, {"values", s->values}, {"finite", s->finite}, {"zeros", s->zeros}, {"nan", s->nans},
               {"inf", s->infinities});
    write_mean(j, s, dtype);
    if (s->finite > 0) {
        write_number(j, "std", fc_stats_deviation(s), dtype, DIGITS);
    } else {
        write_none(j, "std");
    }
    if (s->ordered) {
        write_number(j, "min", s->min, dtype, 0);
        write_number(j, "max", s->max, dtype, 0);
    } else {
        write_none(j, "min");
        write_none(j, "max");
    }
    write_histogram(j, s->histogram);
    jw_close(j, '}');
}
