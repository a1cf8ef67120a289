/*
 * The build step that writes the man pages (here) and the shell completions (completions.c) from the tables of
 * commands and options.
 * Usage: fsdpckpt_manual man [COMMAND] | bash | zsh | fish | python > FILE
 */
#include "build_info.h"
#include "options/command.h"
#include "options/completions.h"
#include "options/help.h"
#include "options/python_api.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The date of the release, not of the build: the same source always gives the same pages. */
#define MANUAL_DATE "2026-11-22"

/* Escapes text for roff: hyphens, backslashes, and a dot or quote at the start of a line. */
static void write_roff(text_out *out, const char *s) {
    bool start = true;
    for (; *s; s++) {
        if (start && (*s == '.' || *s == '\'')) {
            text_puts(out, "\\&");
        }
        start = *s == '\n';
        if (*s == '\\') {
            text_puts(out, "\\e");
        } else if (*s == '-') {
            text_puts(out, "\\-");
        } else if (*s == '\n' && s[1] == '\n') {
            text_puts(out, "\n.PP\n");
            s++;
            start = true;
        } else {
            text_write(out, s, 1);
        }
    }
}

/* Escapes an argument of a macro between double quotes. */
static void roff_quoted(text_out *out, const char *s) {
    for (; *s; s++) {
        if (*s == '"') {
            text_puts(out, "\\(dq");
        } else if (*s == '\\') {
            text_puts(out, "\\e");
        } else if (*s == '-') {
            text_puts(out, "\\-");
        } else {
            text_write(out, s, 1);
        }
    }
}

static void roff_option(text_out *out, const option_row *row, const char *help) {
    text_puts(out, ".TP\n");
    if (row->letter) {
        text_printf(out, "\\fB\\-%c\\fR, ", row->letter);
    }
    text_puts(out, "\\fB");
    write_roff(out, "--");
    write_roff(out, row->name);
    text_puts(out, "\\fR");
    if (row->arg) {
        text_puts(out, " \\fI");
        write_roff(out, row->arg);
        text_puts(out, "\\fR");
    }
    text_puts(out, "\n");
    write_roff(out, help);
    text_puts(out, "\n");
}

static void man_title(text_out *out, const char *name, const char *summary) {
    text_puts(out, ".TH ");
    for (const char *at = name; *at; at++) {
        text_printf(out, "%c", toupper((unsigned char)*at));
    }
    text_puts(out, " 1 \"" MANUAL_DATE "\" \"fsdpckpt " FEATURE_VERSION "\" \"User Commands\"\n.SH NAME\n");
    write_roff(out, name);
    text_puts(out, " \\- ");
    write_roff(out, summary);
    text_puts(out, "\n.SH SYNOPSIS\n");
}

static void man_exit_status(text_out *out) {
    text_puts(out, ".SH EXIT STATUS\n");
    for (const exit_status *e = exit_statuses; e->meaning; e++) {
        text_printf(out, ".TP\n.B %d\n", e->status);
        write_roff(out, e->meaning);
        text_puts(out, "\n");
    }
}

static void man_examples(text_out *out, const command *c) {
    for (const char *const *e = c->examples; *e; e += 2) {
        text_puts(out, ".TP\n.B \"");
        roff_quoted(out, e[0]);
        text_puts(out, "\"\n");
        write_roff(out, e[1]);
        text_puts(out, "\n");
    }
}

/* The page of one command, such as fsdpckpt-reshard(1): the text of --help. */
static void write_man_command(text_out *out, const command *c) {
    char name[64];
    snprintf(name, sizeof name, "fsdpckpt-%s", c->name);
    man_title(out, name, c->summary);
    text_printf(out, ".B fsdpckpt %s\n\\fI%s\\fR%s", c->name, c->operands, c->synopsis ? " " : "");
    write_roff(out, c->synopsis ? c->synopsis : "");
    text_puts(out, " [\\fIOPTION\\fR]...\n.SH DESCRIPTION\n");
    write_roff(out, c->description);
    text_puts(out, "\n.SH OPTIONS\n");
    for (int g = 0; g < OPTION_GROUPS; g++) {
        option_set members = option_group_of(g, c->takes);
        if (members) {
            text_printf(out, ".SS %s\n", option_groups[g].title);
        }
        for (int id = 0; id < OPT_COUNT; id++) {
            if (members & TAKES(id)) {
                roff_option(out, &option_table[id], help_option(c, (option_id)id));
            }
        }
    }
    man_exit_status(out);
    text_puts(out, ".SH EXAMPLES\n");
    man_examples(out, c);
    text_puts(out, ".SH SEE ALSO\n.BR fsdpckpt (1)\n");
}

/* fsdpckpt(1): the introduction and the list of commands. */
static void write_man(text_out *out) {
    man_title(out, "fsdpckpt", "convert training checkpoints between full, sharded and 2D layouts");
    text_puts(out, ".B fsdpckpt\n\\fICOMMAND\\fR [\\fIOPTION\\fR]... \\fISRC\\fR\n.SH DESCRIPTION\n");
    write_roff(out, help_intro);
    text_puts(out, "\n.PP\n\\fISRC\\fR is a directory, a file, or the name of one on a server (https://, s3://, gs://, "
                   "hf://owner/model);\n"
                   "its format is detected from its content.\n.SH COMMANDS\n"
                   "Each command has its own page, such as \\fBfsdpckpt\\-reshard\\fR(1).\n");
    for (const command *const *c = command_table; *c; c++) {
        text_printf(out, ".TP\n.BR fsdpckpt\\-%s (1)\n", (*c)->name);
        write_roff(out, (*c)->summary);
        text_puts(out, "\n");
    }
    text_puts(out,
              ".SH FORMATS\nThe formats of \\fB\\-\\-to\\fR, and the extensions of DST that select them without it.\n");
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        if (fc_format_writes(*f)) {
            text_printf(out, ".TP\n.B %s\n", (*f)->name);
            help_format(out, *f);
            text_puts(out, "\n");
        }
    }
    text_puts(out, ".SH COMMON OPTIONS\n");
    for (int id = 0; id < OPT_COUNT; id++) {
        if (TAKES_COMMON & TAKES(id)) {
            roff_option(out, &option_table[id], option_table[id].help);
        }
    }
    man_exit_status(out);
    text_puts(out,
              ".PP\nResults go to standard output, all else to standard error; an error is one line.\n.SH EXAMPLES\n");
    for (const command *const *c = command_table; *c; c++) {
        man_examples(out, *c);
    }
}

/* @return false if there is no such document. */
static bool write_kind(text_out *out, const char *kind, const char *name) {
    static const struct {
        const char *name;
        void (*write)(text_out *out);
    } kinds[] = {{"man", write_man},
                 {"bash", completions_bash},
                 {"zsh", completions_zsh},
                 {"fish", completions_fish},
                 {"python", python_api}};
    const command *c = name ? command_find(name) : NULL;
    if (c && strcmp(kind, "man") == 0) {
        write_man_command(out, c);
        return true;
    }
    for (size_t i = 0; !name && i < sizeof kinds / sizeof *kinds; i++) {
        if (strcmp(kind, kinds[i].name) == 0) {
            kinds[i].write(out);
            return true;
        }
    }
    return false;
}

int main(int argc, char **argv) {
    text_out *out = malloc(sizeof *out);
    int status = 2;
    if (!out) {
        return 4;
    }
    text_out_init(out, STDOUT_FILENO);
    if (argc < 2 || argc > 3 || !write_kind(out, argv[1], argc == 3 ? argv[2] : NULL)) {
        fputs("usage: fsdpckpt_manual man [COMMAND] | bash | zsh | fish | python\n", stderr);
    } else {
        status = text_flush(out) == 0 ? 0 : 4;
    }
    free(out);
    return status;
}
