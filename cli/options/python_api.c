/*
 * Writes fsdpckpt/_commands.py, the functions of the Python package that run a command: see python_api.h. Their
 * parameters are the operands and options of the command, so a new option needs no Python code.
 */
#include "options/python_api.h"

#include "options/command.h"
#include "options/help.h"

#include <ctype.h>
#include <string.h>

/* Options that a Python function has in another form (progress=) or does not need (text output, ranks). */
#define NOT_PYTHON                                                                                                     \
    (TAKES_COMMON | TAKES(OPT_JSON) | TAKES(OPT_COMM) | TAKES(OPT_LOCAL) | TAKES(OPT_GITHUB) | TAKES(OPT_OUTPUT) |     \
     TAKES(OPT_ALL) | TAKES(OPT_TREE) | TAKES(OPT_SORT) | TAKES(OPT_DEPTH))

/* Writes `text` as the content of a Python string or docstring, escaped so that it cannot end the string. */
static void put_text(text_out *out, const char *text) {
    for (; *text; text++) {
        if (text[0] == '-' && text[1] == '-' && islower((unsigned char)text[2])) {
            text++; /* an option is a keyword argument here */
            continue;
        }
        if (*text == '\\' || *text == '"') {
            text_puts(out, "\\");
        }
        text_write(out, text, 1);
    }
}

/* Writes the name of an option as an identifier: strip_prefix. */
static void put_name(text_out *out, const char *name) {
    for (; *name; name++) {
        text_write(out, *name == '-' ? "_" : name, 1);
    }
}

static const char *annotation(option_kind kind) {
    switch (kind) {
    case KIND_FLAG:
        return "bool = False";
    case KIND_LIST:
        return "Strings = ()";
    case KIND_COUNT:
    case KIND_NUMBER:
    case KIND_INDEX:
    case KIND_LEVEL:
        return "int | None = None";
    case KIND_BYTES:
    case KIND_SIZE:
        return "int | str | None = None";
    case KIND_REAL:
        return "float | None = None";
    default:
        return "Text | None = None";
    }
}

/* The function takes state dicts as operands, too. */
static bool takes_states(const command *c) {
    return strcmp(c->name, "delta") == 0;
}

/* Writes the operands: "SRC" and "A B" as parameters, "SRC SRC..." as one sequence. */
static void put_operands(text_out *out, const command *c, bool declare) {
    if (strstr(c->operands, "...")) {
        text_puts(out, declare ? "sources: Sequence[Path], " : "*sources, ");
        return;
    }
    for (const char *at = c->operands; *at;) {
        size_t length = strcspn(at, " ");
        for (size_t i = 0; i < length; i++) {
            text_printf(out, "%c", tolower((unsigned char)at[i]));
        }
        text_puts(out, !declare ? ", " : takes_states(c) ? ": Path | Mapping[str, Any], " : ": Path, ");
        at += length + (at[length] == ' ');
    }
}

static void put_signature(text_out *out, const command *c) {
    option_set takes = c->takes & ~NOT_PYTHON;
    text_printf(out, "\n\n@checked\ndef %s(\n    ", c->name);
    put_operands(out, c, true);
    text_puts(out, c->takes & TAKES(OPT_OUTPUT) ? "output: Path | None = None, " : "");
    text_puts(out, "*,\n");
    for (int id = 0; id < OPT_COUNT; id++) {
        if (takes & TAKES(id)) {
            text_puts(out, "    ");
            put_name(out, option_table[id].name);
            text_printf(out, ": %s,\n", annotation(option_table[id].kind));
        }
    }
    text_puts(out, "    progress: Progress = \"auto\",\n) -> Report:\n");
}

static void put_docstring(text_out *out, const command *c) {
    option_set takes = c->takes & ~NOT_PYTHON;
    text_puts(out, "    \"\"\"");
    put_text(out, c->summary);
    text_puts(out, ".\n\n    ");
    put_text(out, c->description);
    text_puts(out, takes_states(c)
                       ? "\n\n    Either side may be a state dict of NumPy arrays or PyTorch tensors, or an open "
                         "checkpoint.\n"
                       : "\n");
    text_puts(out, "\n    Args:\n");
    for (int id = 0; id < OPT_COUNT; id++) {
        if (takes & TAKES(id)) {
            text_puts(out, "        ");
            put_name(out, option_table[id].name);
            text_puts(out, ": ");
            put_text(out, help_option(c, (option_id)id));
            text_puts(out, "\n");
        }
    }
    text_puts(out, "        progress: a function that is called with each Update; \"auto\" shows a bar in a "
                   "notebook or on a terminal; None: nothing\n    \"\"\"\n");
}

static void put_body(text_out *out, const command *c) {
    option_set takes = c->takes & ~NOT_PYTHON;
    text_printf(out, "    return %s(\n        \"%s\",\n        [", takes_states(c) ? "run_delta" : "run", c->name);
    put_operands(out, c, false);
    text_puts(out, "],\n        {");
    text_puts(out, c->takes & TAKES(OPT_OUTPUT) ? "\"output\": output, " : "");
    for (int id = 0; id < OPT_COUNT; id++) {
        if (takes & TAKES(id)) {
            text_printf(out, "\"%s\": ", option_table[id].name);
            put_name(out, option_table[id].name);
            text_puts(out, ", ");
        }
    }
    text_printf(out, "},\n        progress,\n        json=%s,\n    )\n", c->takes & TAKES(OPT_JSON) ? "True" : "False");
}

/* Lists the options without an argument. The package uses them to turn `--option` in messages into keyword arguments.
 */
static void put_flags(text_out *out) {
    text_puts(out, "\nFLAGS = frozenset(\n    {\n");
    for (int id = 0; id < OPT_COUNT; id++) {
        if (option_table[id].kind == KIND_FLAG) {
            text_printf(out, "        \"%s\",\n", option_table[id].name);
        }
    }
    text_puts(out, "    }\n)\n");
}

/* Commands that print JSON are functions. `extract` is not: a tensor of an open checkpoint does the same. */
static bool is_function(const command *c) {
    return (c->takes & TAKES(OPT_JSON)) || strcmp(c->name, "schema") == 0;
}

void python_api(text_out *out) {
    text_puts(out,
              "\"\"\"The commands of fsdpckpt as functions. CMake generates this file from the option table.\"\"\"\n\n"
              "from __future__ import annotations\n\n"
              "from collections.abc import Mapping, Sequence\n"
              "from typing import Any\n\n"
              "from ._arguments import checked\n"
              "from ._delta import run_delta\n"
              "from ._run import Path, Progress, Report, Strings, Text, run\n\n__all__ = [\n");
    for (const command *const *c = command_table; *c; c++) {
        if (is_function(*c)) {
            text_printf(out, "    \"%s\",\n", (*c)->name);
        }
    }
    text_puts(out, "]\n");
    put_flags(out);
    for (const command *const *c = command_table; *c; c++) {
        if (is_function(*c)) {
            put_signature(out, *c);
            put_docstring(out, *c);
            put_body(out, *c);
        }
    }
}
