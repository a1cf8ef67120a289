/*
 * What --help and --version print, made from the tables of commands and options.
 */
#ifndef FSDPCKPT_CLI_HELP_H
#define FSDPCKPT_CLI_HELP_H

#include "command.h"

#include "fsdpckpt/format.h"

/** The usage of the whole program. */
void help_program(text_out *out);
/** The usage of one command. */
void help_command(text_out *out, const command *c);
/** The version and what was built in. */
void help_version(text_out *out);

/** The parts that the man page repeats. */
typedef struct exit_status {
    int status;
    const char *meaning;
} exit_status;
extern const exit_status exit_statuses[]; /**< ends with meaning NULL */
extern const char help_intro[];

enum { HELP_FORMATS_MAX = 256 };
/** The formats that can be written, "dcp, h5": those of --to. @return buf, of HELP_FORMATS_MAX. */
const char *help_formats(char *buf);

/** "HDF5: .h5 .hdf5" */
void help_format(text_out *out, const fc_format *format);

/** What `c` says about one of its options. */
const char *help_option(const command *c, option_id id);

/** "-o, --output DST" into `buf`. @return its length. */
size_t help_option_term(char *buf, size_t size, const option_row *row);

#endif
