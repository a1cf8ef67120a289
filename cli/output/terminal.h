/*
 * The terminal of stderr: its width, its colors, and the progress line that is rewritten in place. All other output to
 * stderr goes through here, so that it never shares a line with the progress.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef enum color_mode { COLOR_AUTO, COLOR_ALWAYS, COLOR_NEVER } color_mode;

/** Turns colors on or off by --color, NO_COLOR, CLICOLOR_FORCE, TERM and the types of stdout and stderr. */
void terminal_set_color(color_mode mode);

/** Whether colors are on for `fd`, stdout or stderr. */
bool terminal_has_color(int fd);

/** Whether a line of stderr can be rewritten: it is a terminal and TERM is not dumb. */
bool terminal_can_rewrite(void);

/** @return the current columns of the terminal: those of the window, else COLUMNS, else 80. */
unsigned terminal_width(void);

/** Replaces the progress line by `line`, which has no newline and fits the terminal. */
void terminal_show_line(const char *line, size_t size);

/** Like terminal_end_line, for a signal handler. */
void terminal_interrupt_line(void);

/** Removes the progress line for good, before stdout writes to the same terminal or to a pager on it. */
void terminal_end_line(void);

/** Writes whole lines to stderr in place of the progress line. */
void terminal_write_lines(const char *lines, size_t size);
