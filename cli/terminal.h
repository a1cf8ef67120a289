/*
 * The terminal that stderr is: how wide it is, whether it takes colours, and the one line that is rewritten there. What
 * else is written to the terminal goes through here, so that it never shares a line with the progress.
 */
#ifndef FSDPCKPT_CLI_TERMINAL_H
#define FSDPCKPT_CLI_TERMINAL_H

#include "options.h"

#include <stdbool.h>
#include <stddef.h>

/** Decides on colours, by --color, NO_COLOR, CLICOLOR_FORCE, TERM and where stdout and stderr go. */
void terminal_set_color(color_mode mode);

/** Whether stdout or stderr (a descriptor) takes colours. */
bool terminal_has_color(int fd);

/** Whether a line of stderr can be rewritten: it is a terminal, and not TERM=dumb. */
bool terminal_can_rewrite(void);

/** Columns of the terminal, now: the window's, else COLUMNS, else 80. */
unsigned terminal_width(void);

/** Shows `line` (no newline; it fits) in the place of the one that was shown before. */
void terminal_show_line(const char *line, size_t size);

/** Removes that line. A signal handler may call it. */
void terminal_erase_line(void);

/** Removes that line for good: stdout speaks now, to the same terminal or to a pager that has it. */
void terminal_end_line(void);

/** Writes whole lines to stderr, where the rewritten line was. */
void terminal_write_lines(const char *lines, size_t size);

#endif
