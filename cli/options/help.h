/*
 * The texts of --help and --version, generated from the tables of commands and options.
 */
#pragma once

#include "options/command.h"

#include "fsdpckpt/format.h"

/** Prints the usage of the whole program. */
void help_program(text_out *out);
/** Prints the usage of one command. */
void help_command(text_out *out, const command *c);
/** Prints what fits a screen: the usual options in a few words, and two examples. */
void help_command_briefly(text_out *out, const command *c);
/** Prints the version and the libraries in this build. */
void help_version(text_out *out);

/** An exit status and its meaning; the man pages print these, too. */
typedef struct exit_status {
    int status;
    const char *meaning;
} exit_status;
extern const exit_status exit_statuses[]; /**< the last one has no meaning */
extern const char help_intro[];

enum { HELP_FORMATS_MAX = 256 };
/** Lists the formats that can be written, such as "dcp, h5", in `buf` of HELP_FORMATS_MAX. @return buf. */
const char *help_formats(char *buf);

/** Prints a format and its extensions: "HDF5: .h5 .hdf5". */
void help_format(text_out *out, const fc_format *format);

/** @return the help text of one option of `c`. */
const char *help_option(const command *c, option_id id);

/** Writes "-o, --output DST" into `buf`. @return its length. */
size_t help_option_term(char *buf, size_t size, const option_row *row);
