/*
 * Prints a report of diff as a table or as JSON.
 */
#pragma once

#include "commands/beside.h"

#include "fsdpckpt/compare.h"

typedef struct diff_view {
    const char *a, *b; /**< paths, as given */
    const fc_compare_options *options;
    bool verbose; /**< also list values that are the same */
    const fc_compare_report *report;
    beside *beside[2]; /**< of both sides, for the table; NULL: every value has a row */
} diff_view;

/** Prints one row per difference, or per group of values beside a model, then a summary. */
void diff_print_text(text_out *out, const diff_view *d);
/** Prints the document that docs/schemas/diff.json describes. */
void diff_print_json(text_out *out, const diff_view *d);
