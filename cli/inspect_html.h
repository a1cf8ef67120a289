/*
 * Parts of the page of inspect --html.
 */
#ifndef FSDPCKPT_CLI_INSPECT_HTML_H
#define FSDPCKPT_CLI_INSPECT_HTML_H

#include "inspect.h"

/** Writes the module tree as nested details with one line per pattern; data-k is the kind of the line. */
fc_code inspect_html_tree(inspection *in, fc_error *err);
/** Writes the data for the script as JSON of numbers: the mesh, the bytes of each rank, the chunks of each kind. */
fc_code inspect_html_data(inspection *in, const inspect_loads *loads, fc_error *err);

#endif
