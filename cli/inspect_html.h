/*
 * The parts of the page of inspect --html.
 */
#ifndef FSDPCKPT_CLI_INSPECT_HTML_H
#define FSDPCKPT_CLI_INSPECT_HTML_H

#include "inspect.h"

/** The module tree of the tensors: nested details, a line for each pattern, whose data-k is its kind. */
fc_code inspect_html_tree(inspection *in, fc_error *err);
/** What the script draws from, as JSON of numbers only: the mesh, bytes of each rank, the pieces of each kind. */
fc_code inspect_html_data(inspection *in, const inspect_loads *loads, fc_error *err);

#endif
