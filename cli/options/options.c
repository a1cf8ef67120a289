/*
 * Parses argv into struct options with the option table.
 */
#include "options/options.h"

#include "options/command.h"
#include "options/words.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "fsdpckpt/try.h"

/* The state of parsing, for storing values and reporting errors. */
typedef struct parser {
    const char *command;
    option_set takes;
    options *out;
    int argc;
    char *const *argv;
    int next;
    fc_error *err;
} parser;

option_id option_find(const char *name, size_t len) {
    int id = 0;
    while (id < OPT_COUNT && (strlen(option_table[id].name) != len || memcmp(option_table[id].name, name, len) != 0)) {
        id++;
    }
    return (option_id)id;
}

static const char *of_command(const parser *p) {
    return p->command ? p->command : "--help";
}

/* The rest of the command line in "see 'fsdpckpt reshard --help'". */
static const char *see_help(const parser *p) {
    return p->command ? " --help" : "";
}

/* Reports an option that only other commands take, and names them. */
static fc_code not_taken(const parser *p, option_id id) {
    char others[160] = "";
    size_t used = 0;
    for (const command *const *c = command_table; *c; c++) {
        if (((*c)->takes & TAKES(id)) && used + strlen((*c)->name) + 3 < sizeof others) {
            used += (size_t)snprintf(others + used, sizeof others - used, "%s%s", used ? ", " : "", (*c)->name);
        }
    }
    return fc_fail(p->err, FC_EUSAGE, "%s does not take --%s, which is for %s; see 'fsdpckpt %s --help'", p->command,
                   option_table[id].name, others, p->command);
}

/* @param known the option of other commands with this name, or OPT_COUNT. */
static fc_code unknown_option(const parser *p, const char *arg, size_t len, option_id known) {
    const char *reply = words_reply(p->command, arg, len, p->takes);
    if (reply) {
        return fc_fail(p->err, FC_EUSAGE, "%s%sunknown option '%.*s'; %s", p->command ? p->command : "",
                       p->command ? ": " : "", (int)len, arg, reply);
    }
    if (known != OPT_COUNT) {
        return p->command ? not_taken(p, known)
                          : fc_fail(p->err, FC_EUSAGE, "--%s goes after a command; see 'fsdpckpt --help'",
                                    option_table[known].name);
    }
    const char *best = len > 2 ? words_option(arg + 2, len - 2, p->takes) : NULL;
    if (best) {
        return fc_fail(p->err, FC_EUSAGE, "unknown option '%.*s'; did you mean '--%s'?", (int)len, arg, best);
    }
    return fc_fail(p->err, FC_EUSAGE, "unknown option '%.*s'; see 'fsdpckpt %s%s'", (int)len, arg, of_command(p),
                   see_help(p));
}

/* Accepts decimal digits only; strtoll also accepts blanks, signs and an empty text. */
static bool parse_digits(const char *text, const char **end, uint64_t *out) {
    uint64_t value = 0;
    const char *s = text;
    for (; *s >= '0' && *s <= '9'; s++) {
        if (__builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*s - '0'), &value)) {
            return false;
        }
    }
    *end = s;
    *out = value;
    return s != text;
}

static fc_code store_number(const parser *p, const option_row *row, const char *text) {
    const char *end = NULL;
    uint64_t value = 0, least = row->kind == KIND_NUMBER;
    if (!parse_digits(text, &end, &value) || *end || value < least || value > (uint64_t)row->max) {
        return fc_fail(p->err, FC_EUSAGE, "--%s: '%s' is not a number from %d to %lld", row->name, text, (int)least,
                       (long long)row->max);
    }
    int64_t number = (int64_t)value;
    memcpy((char *)p->out + row->offset, &number, sizeof number);
    return FC_OK;
}

/* A size without a unit is in bytes. Below 1 MB the unit was probably forgotten. */
enum { LEAST_WITHOUT_UNIT = 1000000 };

/* For memory "2G" is 2 GiB. For files it is 2·10^9 bytes, as in Hugging Face, and "2GiB" is 2 GiB. */
static fc_code store_size(const parser *p, const option_row *row, const char *text) {
    static const char units[] = "KMGT";
    bool files = row->kind == KIND_BYTES;
    const char *end = NULL;
    uint64_t value = 0;
    bool good = parse_digits(text, &end, &value);
    bool bare = good && !*end;
    end += good && strcmp(end, "B") == 0;
    const char *unit = good && *end ? strchr(units, *end >= 'a' ? *end - 'a' + 'A' : *end) : NULL;
    if (unit) {
        bool binary = strcmp(end + 1, "iB") == 0;
        end += binary ? 3 : 1 + (end[1] == 'B');
        for (const char *u = units; good && u <= unit; u++) {
            good = !__builtin_mul_overflow(value, files && !binary ? UINT64_C(1000) : UINT64_C(1024), &value);
        }
    }
    if (!good || *end || value == 0) {
        return fc_fail(p->err, FC_EUSAGE, "--%s: '%s' is not a size such as %s", row->name, text,
                       files ? "5GB or 500MiB" : "64M or 2G");
    }
    if (bare && value < LEAST_WITHOUT_UNIT) {
        return fc_fail(p->err, FC_EUSAGE, "--%s %s: is that %s byte%s? write %sB, %sMB or %sGB", row->name, text, text,
                       value == 1 ? "" : "s", text, text, text);
    }
    memcpy((char *)p->out + row->offset, &value, sizeof value);
    return FC_OK;
}

/* Restricts strtod, which also accepts "inf", "nan", blanks and hexadecimal numbers. */
static fc_code store_real(const parser *p, const option_row *row, const char *text) {
    char *end = NULL;
    bool plain = text[strspn(text, "0123456789.eE+-")] == '\0' && text[0] != '-' && text[0] != '+';
    double value = plain ? strtod(text, &end) : -1;
    if (!plain || end == text || *end || !(value >= 0 && value <= DBL_MAX)) {
        return fc_fail(p->err, FC_EUSAGE, "--%s: '%s' is not a number such as 1e-5, at least 0", row->name, text);
    }
    memcpy((char *)p->out + row->offset, &value, sizeof value);
    return FC_OK;
}

static fc_code store_dtype(const parser *p, const option_row *row, const char *text) {
    fc_dtype dtype;
    if (!words_dtype(text, &dtype)) {
        const char *near = words_near_dtype(text);
        char all[WORDS_DTYPES_MAX];
        return fc_fail(p->err, FC_EUSAGE, "--%s: unknown type '%s'; %s%s%schoose one of %s or PyTorch's names for them",
                       row->name, text, near ? "did you mean '" : "", near ? near : "", near ? "'? " : "",
                       words_dtypes(all));
    }
    if (fc_dtype_get(dtype)->cls != FC_CLASS_FLOAT) {
        return fc_fail(p->err, FC_EUSAGE, "--%s: %s is not a floating-point type; only those can be converted",
                       row->name, text);
    }
    memcpy((char *)p->out + row->offset, &dtype, sizeof dtype);
    return FC_OK;
}

static fc_code store_level(const parser *p, const option_row *row, const char *text) {
    if (text[0] < '0' || text[0] > '9' || text[1]) {
        return fc_fail(p->err, FC_EUSAGE, "--%s: '%s' is not a level from 0 to 9", row->name, text);
    }
    int level = text[0] - '0';
    memcpy((char *)p->out + row->offset, &level, sizeof level);
    return FC_OK;
}

static fc_code store_choice(const parser *p, const option_row *row, const char *text) {
    for (int i = 0; row->choices[i]; i++) {
        if (strcasecmp(row->choices[i], text) == 0) {
            memcpy((char *)p->out + row->offset, &i, sizeof i);
            return FC_OK;
        }
    }
    char all[64] = "";
    for (int i = 0; row->choices[i]; i++) {
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s", i ? ", " : "", row->choices[i]);
    }
    return fc_fail(p->err, FC_EUSAGE, "--%s: '%s' is not one of %s", row->name, text, all);
}

static fc_code store_list(const parser *p, const option_row *row, const char *text) {
    option_list *list = (option_list *)(void *)((char *)p->out + row->offset);
    if (!list->items) {
        /* Allocates room for every argument, so that the list never has to grow. */
        list->items = calloc((size_t)p->argc + 1, sizeof *list->items);
        FC_NEED(list->items, p->err, NULL);
    }
    list->items[list->count++] = text;
    return FC_OK;
}

static fc_code store_value(const parser *p, option_id id, const char *text) {
    const option_row *row = &option_table[id];
    char *field = (char *)p->out + row->offset;
    p->out->given |= TAKES(id);
    switch (row->kind) {
    case KIND_FLAG:
        *(bool *)field = true;
        return FC_OK;
    case KIND_COUNT:
        ++*(int *)(void *)field;
        return FC_OK;
    case KIND_TEXT:
        if (!*text) {
            return fc_fail(p->err, FC_EUSAGE, "--%s: the argument is empty", row->name);
        }
        memcpy(field, &text, sizeof text);
        return FC_OK;
    case KIND_LIST:
        return store_list(p, row, text);
    case KIND_NUMBER:
    case KIND_INDEX:
        return store_number(p, row, text);
    case KIND_BYTES:
    case KIND_SIZE:
        return store_size(p, row, text);
    case KIND_REAL:
        return store_real(p, row, text);
    case KIND_DTYPE:
        return store_dtype(p, row, text);
    case KIND_LEVEL:
        return store_level(p, row, text);
    case KIND_CHOICE:
        return store_choice(p, row, text);
    }
    return FC_OK;
}

/* Takes the argument of an option: the attached text, or else the next word. */
static fc_code take_argument(parser *p, option_id id, const char *attached) {
    if (!attached) {
        if (p->next >= p->argc) {
            return fc_fail(p->err, FC_EUSAGE, "--%s needs an argument: --%s %s", option_table[id].name,
                           option_table[id].name, option_table[id].arg);
        }
        attached = p->argv[p->next++];
    }
    return store_value(p, id, attached);
}

static fc_code parse_long(parser *p, const char *arg) {
    size_t len = strcspn(arg, "=");
    const char *value = arg[len] ? arg + len + 1 : NULL;
    option_id id = option_find(arg + 2, len - 2);
    if (id == OPT_COUNT || !(p->takes & TAKES(id))) {
        return unknown_option(p, arg, len, id);
    }
    if (option_table[id].arg) {
        return take_argument(p, id, value);
    }
    if (value) {
        return fc_fail(p->err, FC_EUSAGE, "--%s takes no argument", option_table[id].name);
    }
    return store_value(p, id, "");
}

/* `-help`, `-json`: whether the text after one dash is the long name of an option, which needs two. */
static bool lacks_a_dash(const parser *p, const char *arg) {
    const size_t len = strcspn(arg + 1, "=");
    const option_id id = option_find(arg + 1, len);
    return len > 1 && id != OPT_COUNT && (p->takes & TAKES(id));
}

static fc_code unknown_letter(const parser *p, char letter, option_id known) {
    char text[3] = {'-', letter, '\0'};
    return unknown_option(p, text, 2, known);
}

option_id option_find_letter(char letter) {
    int id = 0;
    while (id < OPT_COUNT && (!letter || option_table[id].letter != letter)) {
        id++;
    }
    return (option_id)id;
}

static fc_code parse_letters(parser *p, const char *arg) {
    if (lacks_a_dash(p, arg)) { /* also -json and -force, which -j N and -f with -o DST could be */
        return fc_fail(p->err, FC_EUSAGE, "unknown option '%s'; did you mean '-%s'?", arg, arg);
    }
    for (const char *s = arg + 1; *s; s++) {
        option_id id = option_find_letter(*s);
        if (id == OPT_COUNT || !(p->takes & TAKES(id))) {
            return unknown_letter(p, *s, id);
        }
        if (option_table[id].arg) {
            return take_argument(p, id, s[1] ? s + 1 : NULL);
        }
        FC_TRY(store_value(p, id, ""));
    }
    return FC_OK;
}

fc_code options_parse(int argc, char *const *argv, const char *of, option_set takes, options *out, fc_error *err) {
    parser p = {of, takes, out, argc, argv, 0, err};
    bool only_operands = false;
    memset(out, 0, sizeof *out);
    out->operands = calloc((size_t)argc + 1, sizeof *out->operands);
    FC_NEED(out->operands, err, NULL);
    while (p.next < argc) {
        const char *arg = argv[p.next++];
        if (only_operands || arg[0] != '-' || arg[1] == '\0') {
            out->operands[out->noperands++] = arg;
        } else if (strcmp(arg, "--") == 0) {
            only_operands = true;
        } else {
            FC_TRY(arg[1] == '-' ? parse_long(&p, arg) : parse_letters(&p, arg));
        }
        if (out->help || out->version) { /* help wins over errors in the rest of the line */
            return FC_OK;
        }
    }
    return FC_OK;
}

void options_free(options *o) {
    free(o->operands);
    free(o->include.items);
    free(o->exclude.items);
    free(o->rename.items);
    free(o->dtype_for.items);
    free(o->quantize.items);
    free(o->adapter.items);
    free(o->delta.items);
    free(o->allow_missing.items);
    free(o->allow_unexpected.items);
    free(o->ignore.items);
    memset(o, 0, sizeof *o);
}
