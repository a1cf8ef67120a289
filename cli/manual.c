/*
 * The build step that writes fsdpckpt.1 and the shell completions from the tables of commands and options.
 * Usage: fsdpckpt_manual man|bash|zsh > FILE
 */
#include "build_info.h"
#include "command.h"
#include "help.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Text for roff: a hyphen is a minus, a backslash and a leading dot or quote must not be commands. */
static void roff(text_out *out, const char *s) {
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

static void roff_option(text_out *out, const option_row *row, const char *help) {
    text_puts(out, ".TP\n");
    if (row->letter) {
        text_printf(out, "\\fB\\-%c\\fR, ", row->letter);
    }
    text_puts(out, "\\fB");
    roff(out, "--");
    roff(out, row->name);
    text_puts(out, "\\fR");
    if (row->arg) {
        text_puts(out, " \\fI");
        roff(out, row->arg);
        text_puts(out, "\\fR");
    }
    text_puts(out, "\n");
    roff(out, help);
    text_puts(out, "\n");
}

static void man_command(text_out *out, const command *c) {
    text_printf(out, ".SS fsdpckpt %s \\fI%s\\fR%s", c->name, c->operands, c->synopsis ? " " : "");
    roff(out, c->synopsis ? c->synopsis : "");
    text_puts(out, " [\\fIOPTION\\fR]...\n");
    roff(out, c->description);
    text_puts(out, "\n");
    for (int id = 0; id < OPT_COUNT; id++) {
        if (c->takes & ~TAKES_COMMON & TAKES(id)) {
            roff_option(out, &option_table[id], help_option(c, (option_id)id));
        }
    }
}

static void write_man(text_out *out) {
    text_puts(out, ".TH FSDPCKPT 1 \"\" \"fsdpckpt " FEATURE_VERSION "\" \"User Commands\"\n.SH NAME\n"
                   "fsdpckpt \\- convert training checkpoints between full, sharded and 2D layouts\n"
                   ".SH SYNOPSIS\n.B fsdpckpt\n\\fICOMMAND\\fR [\\fIOPTION\\fR]... \\fISRC\\fR\n.SH DESCRIPTION\n");
    roff(out, help_intro);
    text_puts(out, "\n.PP\n\\fISRC\\fR is a directory or a file; its format is found by its content.\n.SH FORMATS\n"
                   "Those of \\fB\\-\\-to\\fR, and the extensions of DST that say them without it.\n");
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        if (fc_format_writes(*f)) {
            text_printf(out, ".TP\n.B %s\n", (*f)->name);
            help_format(out, *f);
            text_puts(out, "\n");
        }
    }
    text_puts(out, ".SH COMMANDS\n");
    for (const command *const *c = command_table; *c; c++) {
        man_command(out, *c);
    }
    text_puts(out, ".SH COMMON OPTIONS\n");
    for (int id = 0; id < OPT_COUNT; id++) {
        if (TAKES_COMMON & TAKES(id)) {
            roff_option(out, &option_table[id], option_table[id].help);
        }
    }
    text_puts(out, ".SH EXIT STATUS\n");
    for (const exit_status *e = exit_statuses; e->meaning; e++) {
        text_printf(out, ".TP\n.B %d\n", e->status);
        roff(out, e->meaning);
        text_puts(out, "\n");
    }
    text_puts(out,
              ".PP\nResults go to standard output, all else to standard error; an error is one line.\n.SH EXAMPLES\n");
    for (const command *const *c = command_table; *c; c++) {
        for (const char *const *e = (*c)->examples; *e; e += 2) {
            text_puts(out, ".TP\n.B ");
            roff(out, e[0]);
            text_puts(out, "\n");
            roff(out, e[1]);
            text_puts(out, "\n");
        }
    }
}

static void bash_command(text_out *out, const command *c) {
    text_printf(out, "    %s) options='", c->name);
    for (int id = 0; id < OPT_COUNT; id++) {
        if (c->takes & TAKES(id)) {
            text_printf(out, "--%s ", option_table[id].name);
        }
    }
    text_puts(out, "' ;;\n");
}

/* Options with a fixed set of arguments complete to them, the other arguments to file names. */
static void write_bash(text_out *out) {
    text_puts(out, "# bash completion for fsdpckpt\n_fsdpckpt() {\n"
                   "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} options=\n"
                   "    COMPREPLY=()\n    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
                   "        mapfile -t COMPREPLY < <(compgen -W '--help --version");
    for (const command *const *c = command_table; *c; c++) {
        text_printf(out, " %s", (*c)->name);
    }
    text_puts(out, "' -- \"$word\")\n        return\n    fi\n    case $before in\n");
    for (int id = 0; id < OPT_COUNT; id++) {
        const option_row *row = &option_table[id];
        if (row->choices) {
            text_printf(out, "    --%s) mapfile -t COMPREPLY < <(compgen -W '", row->name);
            for (const char *const *choice = row->choices; *choice; choice++) {
                text_printf(out, "%s ", *choice);
            }
            text_puts(out, "' -- \"$word\"); return ;;\n");
        }
    }
    text_puts(out, "    esac\n    case ${COMP_WORDS[1]} in\n");
    for (const command *const *c = command_table; *c; c++) {
        bash_command(out, *c);
    }
    text_puts(out,
              "    esac\n    case $word in\n    -*) mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$word\") ;;\n"
              "    *) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- \"$word\") ;;\n"
              "    esac\n}\ncomplete -F _fsdpckpt fsdpckpt\n");
}

/* Help text between single quotes and brackets of zsh's _arguments. */
static void zsh_text(text_out *out, const char *s) {
    for (; *s; s++) {
        if (*s == '\'') {
            text_puts(out, "'\\''");
        } else {
            text_puts(out, strchr("[]:\\", *s) ? "\\" : "");
            text_write(out, s, 1);
        }
    }
}

static void zsh_option(text_out *out, const option_row *row, const char *help) {
    const char *repeat = row->kind == KIND_LIST || row->kind == KIND_COUNT ? "*" : "";
    if (row->letter) {
        text_printf(out, "        '%s-%c%s[", repeat, row->letter, row->arg ? "+" : "");
        zsh_text(out, help);
        text_printf(out, "]%s%s%s' \\\n", row->arg ? ":" : "", row->arg ? row->arg : "", row->arg ? ":_files" : "");
    }
    text_printf(out, "        '%s--%s%s[", repeat, row->name, row->arg ? "=" : "");
    zsh_text(out, help);
    text_puts(out, "]");
    if (row->choices) {
        text_printf(out, ":%s:(", row->arg);
        for (const char *const *choice = row->choices; *choice; choice++) {
            text_printf(out, "%s ", *choice);
        }
        text_puts(out, ")");
    } else if (row->arg) {
        text_printf(out, ":%s:_files", row->arg);
    }
    text_puts(out, "' \\\n");
}

static void write_zsh(text_out *out) {
    text_puts(out, "#compdef fsdpckpt\n_fsdpckpt() {\n    local -a commands=(\n");
    for (const command *const *c = command_table; *c; c++) {
        text_printf(out, "        '%s:", (*c)->name);
        zsh_text(out, (*c)->summary);
        text_puts(out, "'\n");
    }
    text_puts(out,
              "    )\n    if (( CURRENT == 2 )); then\n        _describe command commands\n        return\n    fi\n"
              "    local command=$words[2]\n    shift words\n    (( CURRENT-- ))\n    case $command in\n");
    for (const command *const *c = command_table; *c; c++) {
        text_printf(out, "    %s) _arguments \\\n", (*c)->name);
        for (int id = 0; id < OPT_COUNT; id++) {
            if ((*c)->takes & TAKES(id)) {
                zsh_option(out, &option_table[id], help_option(*c, (option_id)id));
            }
        }
        text_printf(out, "        '*:%s:_files' ;;\n", (*c)->operands);
    }
    text_puts(out, "    esac\n}\n_fsdpckpt \"$@\"\n");
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*write)(text_out *out);
    } kinds[] = {{"man", write_man}, {"bash", write_bash}, {"zsh", write_zsh}};
    text_out *out = malloc(sizeof *out);
    int status = 2;
    if (!out) {
        return 4;
    }
    text_out_init(out, STDOUT_FILENO);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (argc == 2 && strcmp(argv[1], kinds[i].name) == 0) {
            kinds[i].write(out);
            status = text_flush(out) == 0 ? 0 : 4;
        }
    }
    if (status == 2) {
        fputs("usage: fsdpckpt_manual man|bash|zsh\n", stderr);
    }
    free(out);
    return status;
}
