/*
 * A report of diff as a table and as JSON. From fc_compared items to a text_out.
 */
#ifndef FSDPCKPT_CLI_DIFF_PRINT_H
#define FSDPCKPT_CLI_DIFF_PRINT_H

#include "text.h"

#include "fsdpckpt/compare.h"

typedef struct diffed {
    const char *a, *b; /**< as given */
    const fc_compare_options *options;
    bool verbose; /**< what is the same, too */
    const fc_compare_report *report;
} diffed;

/** A row for each difference, then a summary. */
void diff_print_text(text_out *out, const diffed *d);
/** Prints the document that docs/schemas/diff.json describes. */
void diff_print_json(text_out *out, const diffed *d);

#endif
