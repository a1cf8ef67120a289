/*
 * Commands: what main.c needs to know of each. A new command is a file cmd_<name>.c that defines `command_<name>`
 * and one line in command_list.h; usage, --help, the man page and the completions follow.
 */
#ifndef FSDPCKPT_CLI_COMMAND_H
#define FSDPCKPT_CLI_COMMAND_H

#include "options.h"
#include "text.h"

#include "fsdpckpt/move.h"

/** What a running command is given. */
typedef struct cli_call {
    const options *options;
    text_out *out;         /**< stdout; main flushes it and reports its errors */
    fc_progress *progress; /**< shown as --progress wants */
    double started;        /**< by progress_now */
} cli_call;

/** What an option means to one command, where that is not what the table says. */
typedef struct option_help {
    option_id option;
    const char *help;
} option_help;

typedef struct command {
    const char *name;
    const char *operands; /**< for the usage line: "SRC" */
    size_t min_operands, max_operands;
    const char *summary;         /**< a few words */
    const char *description;     /**< paragraphs separated by an empty line; lines are wrapped for the reader */
    const char *const *examples; /**< pairs (command line, what it does), NULL-terminated */
    const char *synopsis;        /**< for the usage line, the options that are always given: "-o DST"; or NULL */
    const option_help *helps;    /**< ended by one without help; NULL: none */
    uint64_t takes;              /**< TAKES bits */
    uint64_t needs;              /**< TAKES bits of options that must be given, unless --dry-run is */
    fc_code (*run)(cli_call *call, fc_error *err);
} command;

/** NULL-terminated, in the order of the usage. */
extern const command *const command_table[];

/** @return NULL when there is none. */
const command *command_find(const char *name);

#endif
