/*
 * Prints a report of check as text, JSON, GitHub Actions annotations or JUnit XML.
 */
#pragma once

#include "commands/beside.h"

#include "fsdpckpt/check.h"

/** A report and the names that it is printed with. */
typedef struct check_view {
    const char *path;
    const char *reference; /**< NULL: none */
    const char *schema;    /**< the schema file that annotations point at; NULL: none */
    bool mesh;             /**< whether a mesh was checked */
    bool versions;         /**< whether versions of a model were checked */
    const fc_report *report;
    beside *beside[2]; /**< of the checkpoint and of the reference, for the text; NULL: every value has a line */
} check_view;

/** Prints one line per finding, or per group of values beside a model, then a summary. */
void check_print_text(text_out *out, const check_view *c);
/** Prints one workflow command per finding, then the summary. */
void check_print_github(text_out *out, const check_view *c);
/** Prints the document that docs/schemas/check.json describes. */
void check_print_json(text_out *out, const check_view *c);
/** Prints one test case per kind of finding that was checked; a case fails if the kind was found. */
void check_print_junit(text_out *out, const check_view *c);
