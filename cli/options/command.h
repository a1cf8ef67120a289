/*
 * Commands, as main.c sees them. A new command is a file cmd_<name>.c that defines `command_<name>` and one line in
 * command_list.h; usage, --help, the man page and the completions use these.
 */
#pragma once

#include "options/options.h"
#include "output/text.h"

#include "fsdpckpt/arena.h"
#include "fsdpckpt/move.h"

enum { CLI_MOST_NOTES = 32 };

/** Lines that main prints on stderr after the command, unless it failed: a failure is one line. */
typedef struct cli_notes {
    char *lines[CLI_MOST_NOTES]; /**< malloc'ed, all different */
    size_t count;
    bool silent; /**< another process prints them */
} cli_notes;

/** The arguments of a running command. */
typedef struct cli_call {
    const options *options;
    text_out *out;         /**< stdout; main flushes it and reports its errors */
    fc_progress *progress; /**< shown according to --progress */
    double started;        /**< seconds, from progress_now */
    struct cli_notes *notes;
    fc_session *session; /**< for all sources that the command opens */
    fc_arena *arena;     /**< lives as long as the command runs */
} cli_call;

/** The help of an option for one command, where it differs from the option table. */
typedef struct option_help {
    option_id option;
    const char *help;
} option_help;

typedef struct command {
    const char *name;
    const char *operands;    /**< for the usage line, and how many there are: "SRC NAME" two, "[NAME]" one or none */
    const char *summary;     /**< one line, without a full stop */
    const char *description; /**< paragraphs separated by an empty line; --help wraps them */
    const char *const *examples; /**< pairs of a command line and its explanation, NULL-terminated */
    const char *synopsis;        /**< required options for the usage line, such as "-o DST"; or NULL */
    const option_help *helps;    /**< the last one has no help; NULL: none */
    option_set takes;            /**< TAKES bits */
    option_set usual;            /**< TAKES bits of the options that most people use, at most ten: -h shows them */
    option_set needs;            /**< TAKES bits of options that are required without --dry-run */
    fc_code (*run)(cli_call *call, fc_error *err);
} command;

/** NULL-terminated, in the order of the usage. */
extern const command *const command_table[];

/** @return the fewest and the most operands of a command; "SRC SRC..." are any number from two on. */
size_t command_least_operands(const command *c);
size_t command_most_operands(const command *c);

/** @return the command called `name`, or NULL. */
const command *command_find(const char *name);
