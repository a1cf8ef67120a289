/*
 * What progress looks like: from the counters, the clock and the width to a line, for a terminal, a log or a program.
 * Pure functions: the same arguments give the same line.
 */
#ifndef FSDPCKPT_CLI_PROGRESS_LINE_H
#define FSDPCKPT_CLI_PROGRESS_LINE_H

#include "fsdpckpt/progress.h"

#include <stddef.h>

/** How fast it goes. Zeros are a valid start; times are seconds since the start of the command. */
typedef struct progress_meter {
    fc_progress_state state; /**< as seen last */
    double began;            /**< the phase */
    double now;              /**< when it was seen */
    double rate;             /**< units per second, smoothed over about two seconds; 0: not known yet */
} progress_meter;

/** The counters at the time `now`. */
void progress_meter_see(progress_meter *meter, const fc_progress_state *state, double now);

/** Seconds that the phase will still take; negative: not known. */
double progress_meter_left(const progress_meter *meter);

typedef struct progress_style {
    unsigned width; /**< columns that the line may take */
    bool utf8;      /**< the bar may be drawn with line characters */
    bool color;
} progress_style;

enum { PROGRESS_LINE_MAX = 768 };

/**
 * "copying ━━━━━━────── 48% 1.23 of 2.56 GB 812 MB/s 0:02 left": at most `width` columns, whatever does not fit is
 * left out, the least important first. @param line of PROGRESS_LINE_MAX bytes. @return its bytes; it ends in a NUL.
 */
size_t progress_line_terminal(const progress_meter *meter, const progress_style *style, char *line);

/** The same for a log, with all there is and a newline. */
size_t progress_line_log(const progress_meter *meter, char *line);

/** The same as a JSON object on one line, docs/schemas/progress.json. */
size_t progress_line_json(const progress_meter *meter, char *line);

/** What becomes of the lines. */
typedef enum progress_kind {
    PROGRESS_KIND_TERMINAL, /**< one line, rewritten ten times a second, from the first second on */
    PROGRESS_KIND_LOG,      /**< asked for: every two seconds, then when a quarter more of the time has passed */
    PROGRESS_KIND_LONG_LOG, /**< not asked for: likewise, from the first minute on, and not more than one a minute */
    PROGRESS_KIND_JSON      /**< once a second */
} progress_kind;

/** Whether it is time for the next line. @param last when there was one; negative: never. */
bool progress_line_is_due(progress_kind kind, double now, double last);

#endif
