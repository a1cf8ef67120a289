/*
 * Formats progress as a line for a terminal, a log or a program. Pure functions of the counters, the time and the
 * width.
 */
#pragma once

#include "fsdpckpt/progress.h"

#include <stddef.h>

/** Measures the rate. Initialize it with zeros; times are seconds since the start of the command. */
typedef struct progress_meter {
    fc_progress_state state; /**< the last counters */
    double began;            /**< when the phase began */
    double now;              /**< the time of these counters */
    double rate;             /**< units per second, smoothed over about two seconds; 0: not known yet */
} progress_meter;

/** Updates the meter with the counters at the time `now`. */
void progress_meter_see(progress_meter *meter, const fc_progress_state *state, double now);

/** @return the remaining seconds of the phase; negative if unknown. */
double progress_meter_left(const progress_meter *meter);

typedef struct progress_style {
    unsigned width; /**< columns that the line may take */
    bool utf8;      /**< the bar may be drawn with line characters */
    bool color;
} progress_style;

enum { PROGRESS_LINE_MAX = 768 };

/**
 * "copying ━━━━━━────── 48% 1.23 of 2.56 GB 812 MB/s 0:02 left": at most `width` columns. Parts that do not fit are
 * left out, the least important first. @param line of PROGRESS_LINE_MAX bytes. @return its length; it ends in a NUL.
 */
size_t progress_line_terminal(const progress_meter *meter, const progress_style *style, char *line);

/** Formats a complete line for a log, with a newline. */
size_t progress_line_log(const progress_meter *meter, char *line);

/** Formats a JSON object on one line: docs/schemas/progress.json. */
size_t progress_line_json(const progress_meter *meter, char *line);

/** Where the lines go, and how often. */
typedef enum progress_kind {
    PROGRESS_KIND_TERMINAL, /**< one line, rewritten ten times a second, after the first second */
    PROGRESS_KIND_LOG,      /**< requested: every two seconds, later when the time has grown by a quarter */
    PROGRESS_KIND_LONG_LOG, /**< not requested: likewise, after the first minute, at most one per minute */
    PROGRESS_KIND_JSON      /**< once a second */
} progress_kind;

/** Whether the next line is due. @param last the time of the last line; negative: none yet. */
bool progress_line_is_due(progress_kind kind, double now, double last);
