/*
 * Completions for bash, zsh and fish: see completions.h. They complete commands, options, option values where there are
 * few, tensor names (listed by `fsdpckpt __names SRC`, see main.c), and files. Tensor names come from a checkpoint, so
 * no shell may expand them.
 */
#include "options/completions.h"

#include "options/command.h"
#include "options/help.h"
#include "options/words.h"

#include "fsdpckpt/recipe.h"

#include <stdio.h>
#include <string.h>

enum { VALUES_MAX = 512 };

/* The kind of argument that an option takes. */
typedef enum arguments { ARGUMENT_FILE, ARGUMENT_TENSOR, ARGUMENT_VALUE } arguments;

static void add_word(char *buf, const char *word) {
    size_t used = strlen(buf);
    snprintf(buf + used, VALUES_MAX - used, "%s%s", used ? " " : "", word);
}

/* Lists the usual values of an option of `c`, separated by spaces. */
static arguments values_of(const command *c, option_id id, char *buf) {
    const option_row *row = &option_table[id];
    buf[0] = '\0';
    for (const char *const *choice = row->choices; choice && *choice; choice++) {
        add_word(buf, *choice);
    }
    if (row->kind == KIND_DTYPE) {
        char types[WORDS_DTYPES_MAX];
        add_word(buf, words_dtypes(types));
    }
    if (row->kind == KIND_LEVEL) {
        add_word(buf, "0 1 2 3 4 5 6 7 8 9");
    }
    switch (id) {
    case OPT_TO:
        if (strcmp(c->name, "extract") == 0) {
            add_word(buf, "raw npy json");
            return ARGUMENT_VALUE;
        }
        for (const fc_format *const *f = fc_formats(); *f; f++) {
            if (fc_format_writes(*f)) {
                add_word(buf, (*f)->name);
            }
        }
        return ARGUMENT_VALUE;
    case OPT_TP_PLAN:
        add_word(buf, "auto");
        return ARGUMENT_FILE;
    case OPT_RECIPE:
        add_word(buf, "auto");
        for (const fc_shipped_recipe *s = fc_shipped_recipes; s->name; s++) {
            add_word(buf, s->name);
        }
        return ARGUMENT_FILE;
    case OPT_POLICY:
        add_word(buf, "blocks always size: class: name:");
        return ARGUMENT_FILE;
    case OPT_TENSOR:
    case OPT_INCLUDE:
    case OPT_EXCLUDE:
        return ARGUMENT_TENSOR;
    case OPT_OUTPUT:
    case OPT_HTML:
    case OPT_JUNIT:
    case OPT_SCHEMA:
    case OPT_AGAINST:
    case OPT_CLASSES:
    case OPT_CONFIG:
        return ARGUMENT_FILE;
    default:
        return ARGUMENT_VALUE;
    }
}

/* Whether the second operand is the name of a tensor. */
static bool names_tensor(const command *c) {
    return strcmp(c->operands, "SRC NAME") == 0;
}

/* ---- bash ---- */

static const char bash_head[] =
    "# bash completion for fsdpckpt\n"
    "# Names of tensors are compared and quoted, never expanded: they come from a file.\n"
    "_fsdpckpt_names() {\n"
    "    local name\n"
    "    while IFS= read -r name; do\n"
    "        [[ $name == \"$word\"* ]] && COMPREPLY+=(\"$(printf %q \"$name\")\")\n"
    "    done < <(fsdpckpt __names \"${1/#\\~/$HOME}\" 2>/dev/null)\n"
    "}\n"
    "_fsdpckpt_files() {\n"
    "    compopt -o filenames 2>/dev/null\n"
    "    mapfile -t -O \"${#COMPREPLY[@]}\" COMPREPLY < <(compgen -f -- \"$word\")\n"
    "}\n"
    "_fsdpckpt() {\n"
    "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}\n"
    "    local options= values= kind=file i operands=()\n"
    "    COMPREPLY=()\n"
    "    [ \"$word\" = = ] && word=\n"
    "    [ \"$before\" = = ] && before=${COMP_WORDS[COMP_CWORD-2]}\n";

static void bash_values(text_out *out, const command *c, option_id id) {
    char values[VALUES_MAX];
    arguments kind = values_of(c, id, values);
    text_printf(out, "        %s:--%s", c->name, option_table[id].name);
    if (option_table[id].letter) {
        text_printf(out, "|%s:-%c", c->name, option_table[id].letter);
    }
    text_printf(out, ") values='%s' kind=%s ;;\n", values,
                kind == ARGUMENT_FILE     ? "file"
                : kind == ARGUMENT_TENSOR ? "tensor"
                                          : "value");
}

static void bash_command(text_out *out, const command *c) {
    text_printf(out, "    %s) options='", c->name);
    for (int id = 0; id < OPT_COUNT; id++) {
        if (c->takes & TAKES(id)) {
            text_printf(out, "--%s ", option_table[id].name);
        }
    }
    text_puts(out, "'");
    text_puts(out, names_tensor(c) ? "; [ ${#operands[@]} -eq 1 ] && kind=tensor ;;\n" : " ;;\n");
}

void completions_bash(text_out *out) {
    text_puts(out, bash_head);
    text_puts(out, "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
                   "        mapfile -t COMPREPLY < <(compgen -W '--help --version help");
    for (const command *const *c = command_table; *c; c++) {
        text_printf(out, " %s", (*c)->name);
    }
    text_puts(out, "' -- \"$word\")\n        return\n    fi\n"
                   "    for ((i = 2; i < COMP_CWORD; i++)); do\n"
                   "        case ${COMP_WORDS[i]} in\n        ");
    const char *between = "";
    for (int id = 0; id < OPT_COUNT; id++) {
        const option_row *row = &option_table[id];
        if (row->arg) {
            text_printf(out, "%s--%s", between, row->name);
            between = "|";
            if (row->letter) {
                text_printf(out, "|-%c", row->letter);
            }
        }
    }
    text_puts(out, ") i=$((i + 1)); [ \"${COMP_WORDS[i]}\" = = ] && i=$((i + 1)) ;;\n"
                   "        -*) ;;\n"
                   "        *) operands+=(\"${COMP_WORDS[i]}\") ;;\n"
                   "        esac\n    done\n    case $command in\n");
    for (const command *const *c = command_table; *c; c++) {
        bash_command(out, *c);
    }
    text_puts(out, "    esac\n    if [[ $before == -* ]]; then\n        case $command:$before in\n");
    for (const command *const *c = command_table; *c; c++) {
        for (int id = 0; id < OPT_COUNT; id++) {
            if (((*c)->takes & TAKES(id)) && option_table[id].arg) {
                bash_values(out, *c, (option_id)id);
            }
        }
    }
    text_puts(out, "        esac\n    fi\n"
                   "    if [[ $word == -* ]]; then\n"
                   "        mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$word\")\n"
                   "        return\n    fi\n"
                   "    mapfile -t COMPREPLY < <(compgen -W \"$values\" -- \"$word\")\n"
                   "    case $kind in\n"
                   "    tensor) [ ${#operands[@]} -gt 0 ] && _fsdpckpt_names \"${operands[0]}\" ;;\n"
                   "    file) _fsdpckpt_files ;;\n"
                   "    esac\n    return 0\n}\ncomplete -F _fsdpckpt fsdpckpt\n");
}

/* ---- zsh ---- */

/* Writes help text between the single quotes and brackets of zsh's _arguments. */
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

static void zsh_argument(text_out *out, const command *c, option_id id) {
    char values[VALUES_MAX];
    arguments kind = values_of(c, id, values);
    text_printf(out, ":%s:", option_table[id].arg);
    if (kind == ARGUMENT_TENSOR) {
        text_puts(out, "_fsdpckpt_names");
    } else if (values[0] && kind == ARGUMENT_FILE) {
        text_printf(out, "{compadd -- %s; _files}", values);
    } else if (values[0]) {
        text_printf(out, "(%s)", values);
    } else {
        text_puts(out, kind == ARGUMENT_FILE ? "_files" : " ");
    }
}

static void zsh_option(text_out *out, const command *c, option_id id) {
    const option_row *row = &option_table[id];
    const char *repeat = row->kind == KIND_LIST || row->kind == KIND_COUNT ? "*" : "";
    for (int way = row->letter ? 0 : 1; way < 2; way++) {
        text_printf(out, way ? "        '%s--%s%s[" : "        '%s-%.1s%s[", repeat, way ? row->name : &row->letter,
                    !row->arg ? ""
                    : way     ? "="
                              : "+");
        zsh_text(out, help_option(c, id));
        text_puts(out, "]");
        if (row->arg) {
            zsh_argument(out, c, id);
        }
        text_puts(out, "' \\\n");
    }
}

void completions_zsh(text_out *out) {
    text_puts(out, "#compdef fsdpckpt\n"
                   "# The names of the tensors of the first operand.\n"
                   "_fsdpckpt_names() {\n"
                   "    local source=${(Q)line[1]}\n"
                   "    local -a names=(${(f)\"$(fsdpckpt __names ${~source} 2>/dev/null)\"})\n"
                   "    compadd -a names\n"
                   "}\n"
                   "_fsdpckpt() {\n    local -a commands=(\n");
    for (const command *const *c = command_table; *c; c++) {
        text_printf(out, "        '%s:", (*c)->name);
        zsh_text(out, (*c)->summary);
        text_puts(out, "'\n");
    }
    text_puts(out,
              "    )\n    if (( CURRENT == 2 )); then\n        _describe command commands\n        return\n    fi\n"
              "    local command=$words[2] curcontext=$curcontext\n    local -a line\n    typeset -A opt_args\n"
              "    shift words\n    (( CURRENT-- ))\n    case $command in\n");
    for (const command *const *c = command_table; *c; c++) {
        text_printf(out, "    %s) _arguments \\\n", (*c)->name);
        for (int id = 0; id < OPT_COUNT; id++) {
            if ((*c)->takes & TAKES(id)) {
                zsh_option(out, *c, (option_id)id);
            }
        }
        if (names_tensor(*c)) {
            text_puts(out, "        '1:SRC:_files' '2:NAME:_fsdpckpt_names' ;;\n");
        } else {
            text_printf(out, "        '*:%s:_files' ;;\n", (*c)->operands);
        }
    }
    text_puts(out, "    esac\n}\n_fsdpckpt \"$@\"\n");
}

/* ---- fish ---- */

/* Writes text between single quotes for fish. */
static void fish_text(text_out *out, const char *s) {
    for (; *s; s++) {
        text_puts(out, *s == '\'' || *s == '\\' ? "\\" : "");
        text_write(out, s, 1);
    }
}

static void fish_option(text_out *out, const command *c, option_id id) {
    const option_row *row = &option_table[id];
    char values[VALUES_MAX];
    text_printf(out, "complete -c fsdpckpt -n '__fsdpckpt_command %s' -l %s", c->name, row->name);
    if (row->letter) {
        text_printf(out, " -s %c", row->letter);
    }
    if (row->arg) {
        arguments kind = values_of(c, id, values);
        text_puts(out, kind == ARGUMENT_FILE ? " -r -F" : " -x");
        if (kind == ARGUMENT_TENSOR) {
            text_puts(out, " -a '(__fsdpckpt_names)'");
        } else if (values[0]) {
            text_printf(out, " -a '%s'", values);
        }
    }
    text_puts(out, " -d '");
    fish_text(out, help_option(c, id));
    text_puts(out, "'\n");
}

static void fish_functions(text_out *out) {
    text_puts(out, "# fish completion for fsdpckpt\n"
                   "function __fsdpckpt_command\n"
                   "    set -l words (commandline -opc)\n"
                   "    test (count $words) -gt 1; and test $words[2] = $argv[1]\n"
                   "end\n"
                   "function __fsdpckpt_no_command\n"
                   "    test (count (commandline -opc)) -eq 1\n"
                   "end\n"
                   "# The words after the command that are neither options nor their arguments.\n"
                   "function __fsdpckpt_operands\n"
                   "    set -l words (commandline -opc)\n"
                   "    set -l skip 0\n"
                   "    for word in $words[3..-1]\n"
                   "        if test $skip = 1\n"
                   "            set skip 0\n"
                   "        else if contains -- $word");
    for (int id = 0; id < OPT_COUNT; id++) {
        if (option_table[id].arg) {
            text_printf(out, " --%s", option_table[id].name);
            if (option_table[id].letter) {
                text_printf(out, " -%c", option_table[id].letter);
            }
        }
    }
    text_puts(out, "\n"
                   "            set skip 1\n"
                   "        else if not string match -q -- '-*' $word\n"
                   "            echo $word\n"
                   "        end\n    end\nend\n"
                   "function __fsdpckpt_names\n"
                   "    set -l operands (__fsdpckpt_operands)\n"
                   "    test (count $operands) -gt 0; and fsdpckpt __names $operands[1] 2>/dev/null\n"
                   "end\n"
                   "function __fsdpckpt_wants_name\n"
                   "    test (count (__fsdpckpt_operands)) -eq 1\n"
                   "end\n");
}

void completions_fish(text_out *out) {
    fish_functions(out);
    for (const command *const *c = command_table; *c; c++) {
        text_printf(out, "complete -c fsdpckpt -n __fsdpckpt_no_command -f -a %s -d '", (*c)->name);
        fish_text(out, (*c)->summary);
        text_puts(out, "'\n");
        for (int id = 0; id < OPT_COUNT; id++) {
            if ((*c)->takes & TAKES(id)) {
                fish_option(out, *c, (option_id)id);
            }
        }
        if (names_tensor(*c)) {
            text_printf(out,
                        "complete -c fsdpckpt -n '__fsdpckpt_command %s; and __fsdpckpt_wants_name' -f -a "
                        "'(__fsdpckpt_names)'\n",
                        (*c)->name);
        }
    }
}
