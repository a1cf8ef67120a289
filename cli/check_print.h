/*
 * A report of check as text, JSON, annotations of GitHub Actions, and JUnit XML. From findings to a text_out.
 */
#ifndef FSDPCKPT_CLI_CHECK_PRINT_H
#define FSDPCKPT_CLI_CHECK_PRINT_H

#include "text.h"

#include "fsdpckpt/check.h"

/** What the report is about. */
typedef struct checked {
    const char *path;
    const char *reference; /**< NULL: none */
    const char *schema;    /**< the reference, where it is a file for annotations to point at; or NULL */
    bool mesh;             /**< whether a mesh was asked for */
    const fc_report *report;
} checked;

/** A line for each finding, then a summary. */
void check_print_text(text_out *out, const checked *c);
/** A workflow command for each finding, then the summary. */
void check_print_github(text_out *out, const checked *c);
/** Prints the document that docs/schemas/check.json describes. */
void check_print_json(text_out *out, const checked *c);
/** A test case for each kind of finding that was looked for; those that were found fail. */
void check_print_junit(text_out *out, const checked *c);

#endif
