/*
 * The texts of --help and --version: see help.h.
 */
#include "options/help.h"

#include "build_info.h"

#include "fsdpckpt/format.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

const char help_intro[] =
    "Converts training checkpoints between full, sharded and 2D FSDP+TP layouts, and between HDF5, PyTorch distributed "
    "checkpoints (DCP), torch.save files and safetensors. Needs neither Python nor PyTorch; the bytes of every tensor "
    "are kept exactly.";

const exit_status exit_statuses[] = {
    {0, "done"},
    {1, "check, diff or verify found something"},
    {2, "usage error: the command line is wrong, or the target exists"},
    {3, "the input is damaged, incomplete or not a checkpoint"},
    {4, "I/O or system failure: no space, no permission, no memory"},
    {5, "unsupported: the input is valid, but this build cannot handle it"},
    {130, "interrupted; no partial output remains"},
    {0, NULL},
};

enum { HELP_WIDTH = 80, HELP_COLUMN = 27 };

/* Writes a paragraph wrapped at words, each line after `indent` blanks; the cursor is already at `column`. */
static void wrap_text(text_out *out, const char *s, size_t indent, size_t column) {
    bool fresh = true; /* at the start of a line */
    while (*s) {
        size_t len = strcspn(s, " \n");
        if (!fresh && column + 1 + len > HELP_WIDTH) {
            text_puts(out, "\n");
            text_repeat(out, " ", indent);
            column = indent;
            fresh = true;
        }
        text_puts(out, fresh ? "" : " ");
        text_write(out, s, len);
        column += len + !fresh;
        fresh = false;
        s += len;
        if (*s == '\n') {
            size_t breaks = strspn(s, "\n");
            text_repeat(out, "\n", breaks);
            text_repeat(out, " ", indent);
            column = indent;
            fresh = true;
            s += breaks;
        } else if (*s == ' ') {
            s++;
        }
    }
    text_puts(out, "\n");
}

size_t help_option_term(char *buf, size_t size, const option_row *row) {
    char letter[8] = "";
    if (row->letter) {
        snprintf(letter, sizeof letter, "-%c, ", row->letter);
    }
    int n = snprintf(buf, size, "%s--%s%s%s", letter, row->name, row->arg ? " " : "", row->arg ? row->arg : "");
    return n < 0 ? 0 : (size_t)n;
}

const char *help_option(const command *c, option_id id) {
    for (const option_help *own = c->helps; own && own->help; own++) {
        if (own->option == id) {
            return own->help;
        }
    }
    return option_table[id].help;
}

/* Copies the first statement of a help text: up to a full stop, colon, semicolon or parenthesis. */
static void cut_help(char *buf, size_t size, const char *text) {
    static const char *const ends[] = {". ", "; ", ": ", " ("};
    size_t len = strlen(text);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        const char *end = strstr(text, ends[i]);
        len = end && (size_t)(end - text) < len ? (size_t)(end - text) : len;
    }
    snprintf(buf, size, "%.*s", (int)len, text);
}

static void print_option(text_out *out, const command *c, option_id id, bool brief) {
    const option_row *row = &option_table[id];
    const char *help = help_option(c, id);
    char first[400];
    char term[80];
    size_t indent = row->letter ? 2 : 6;
    size_t column = indent + help_option_term(term, sizeof term, row);
    text_repeat(out, " ", indent);
    text_puts(out, term);
    if (column + 2 > HELP_COLUMN) {
        text_puts(out, "\n");
        column = 0;
    }
    text_repeat(out, " ", HELP_COLUMN - column);
    if (brief) {
        cut_help(first, sizeof first, help);
        help = first;
    }
    wrap_text(out, help, HELP_COLUMN, HELP_COLUMN);
}

const char *help_formats(char *buf) {
    size_t used = 0;
    buf[0] = '\0';
    for (const fc_format *const *f = fc_formats(); *f && used < HELP_FORMATS_MAX; f++) {
        if (fc_format_writes(*f)) {
            used += (size_t)snprintf(buf + used, HELP_FORMATS_MAX - used, "%s%s", used ? ", " : "", (*f)->name);
        }
    }
    return buf;
}

void help_format(text_out *out, const fc_format *format) {
    text_puts(out, format->description);
    for (const char *const *e = format->extensions; *e; e++) {
        text_printf(out, "%s%s", e == format->extensions ? ": " : " ", *e);
    }
}

void help_program(text_out *out) {
    text_puts(out, "Usage: fsdpckpt COMMAND [OPTION]... SRC\n\n");
    wrap_text(out, help_intro, 0, 0);
    text_puts(out, "\nCommands:\n");
    for (const command *const *c = command_table; *c; c++) {
        text_printf(out, "  %-13s %s\n", (*c)->name, (*c)->summary);
    }
    text_puts(out, "\nSRC is a directory, a file, or the name of one on a server (https://, s3://, "
                   "gs://,\nhf://owner/model); its format is detected from its content.\n"
                   "Formats that can be written (chosen by --to or the extension of -o):\n");
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        if (fc_format_writes(*f)) {
            text_printf(out, "  %-13s ", (*f)->name);
            help_format(out, *f);
            text_puts(out, "\n");
        }
    }
    text_puts(out, "'fsdpckpt COMMAND -h' shows the usual options of a command, '--help' all of\n"
                   "them; 'fsdpckpt --version' shows the build.\n\n"
                   "Exit status:\n");
    for (const exit_status *e = exit_statuses; e->meaning; e++) {
        text_printf(out, "  %-4d %s\n", e->status, e->meaning);
    }
}

static void print_usage(text_out *out, const command *c) {
    text_printf(out, "Usage: fsdpckpt %s %s%s%s [OPTION]...\n\n", c->name, c->operands, c->synopsis ? " " : "",
                c->synopsis ? c->synopsis : "");
}

static void print_examples(text_out *out, const command *c, int most) {
    text_puts(out, "\nExamples:\n");
    for (const char *const *e = c->examples; *e && most > 0; e += 2, most--) {
        text_printf(out, "  %s\n      %s\n", e[0], e[1]);
    }
}

void help_command(text_out *out, const command *c) {
    print_usage(out, c);
    wrap_text(out, c->description, 0, 0);
    for (int g = 0; g < OPTION_GROUPS; g++) {
        option_set members = option_group_of(g, c->takes);
        if (members) {
            text_printf(out, "\n%s:\n", option_groups[g].title);
        }
        for (int id = 0; id < OPT_COUNT; id++) {
            if (members & TAKES(id)) {
                print_option(out, c, (option_id)id, false);
            }
        }
    }
    print_examples(out, c, INT_MAX);
}

void help_command_briefly(text_out *out, const command *c) {
    int all = 0;
    print_usage(out, c);
    text_printf(out, "Purpose: %s\n\n", c->summary);
    for (int id = 0; id < OPT_COUNT; id++) {
        all += (c->takes & TAKES(id)) != 0;
        if (c->usual & TAKES(id)) {
            print_option(out, c, (option_id)id, true);
        }
    }
    print_examples(out, c, 2);
    text_printf(out, "\n'fsdpckpt %s --help' shows all %d options.\n", c->name, all);
}

void help_version(text_out *out) {
    text_puts(out, "fsdpckpt " FEATURE_VERSION "\n"
                   "HDF5      " FEATURE_HDF5 "\n"
                   "zlib      " FEATURE_ZLIB "\n"
                   "jansson   " FEATURE_JANSSON "\n"
                   "ISA-L     " FEATURE_ISAL "\n"
                   "zstd      " FEATURE_ZSTD "\n"
                   "bzip2     " FEATURE_BZIP2 "\n"
                   "libcurl   " FEATURE_CURL "\n"
                   "seccomp   " FEATURE_SECCOMP "\n"
                   "MPI       " FEATURE_MPI "\n"
                   "CUDA      " FEATURE_CUDA "\n"
                   "NCCL      " FEATURE_NCCL "\n" FEATURE_TRAIN "compiler  " FEATURE_COMPILER "\n");
}
