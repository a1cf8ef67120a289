/*
 * The statistics of `inspect --stats` as text and as JSON.
 */
#pragma once

#include "inspect/inspect.h"
#include "output/json_out.h"

/** Mean, deviation, minimum, maximum, zeros, NaN and infinities as text; "-" where there is none. */
typedef struct stats_cells {
    char text[7][2 * INSPECT_NUMBER];
} stats_cells;

/** @param s NULL: no statistics. @param full all digits; otherwise four, but integers are exact. */
void stats_format(const fc_stats *s, fc_dtype dtype, bool full, stats_cells *out);

/** The columns of the list. */
typedef struct stats_widths {
    size_t columns[7];
} stats_widths;

void stats_measure(const inspection *in, stats_widths *w);
void stats_print_heading(text_out *out, const stats_widths *w);
void stats_print_line(text_out *out, const inspect_line *line, const stats_widths *w);

/** The lines of `inspect --tensor`. */
void stats_print_tensor(text_out *out, const fc_stats *s, fc_dtype dtype);
/** The lines of the summary: how many values are NaN or infinite. */
void stats_print_summary(const inspection *in);

/** Writes the member "stats". */
void stats_write_json(json_out *j, const fc_stats *s, fc_dtype dtype);
