/*
 * Parts of the page of inspect --html.
 */
#pragma once

#include "inspect/inspect.h"

/** Writes the module tree as nested details with one line per pattern; data-k is the kind of the line, data-s its
 * number. */
fc_code inspect_html_tree(inspection *in, fc_error *err);
/** Writes the data for the script as JSON of numbers: the mesh, the bytes of each rank, the chunks of each kind. */
fc_code inspect_html_data(inspection *in, const inspect_loads *loads, fc_error *err);

/* With --stats, otherwise nothing: */

/** Writes how many values of a line are NaN or infinite, if any. */
void html_stats_badge(inspection *in, const inspect_line *line);
/** Writes the numbers of an open line. */
void html_stats_terms(inspection *in, const inspect_line *line);
/** Writes the numbers and histograms of the tensors of each line for the script. */
void html_stats_data(inspection *in);
