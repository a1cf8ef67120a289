/*
 * The table of commands, from command_list.h.
 */
#include "options/command.h"

#include <string.h>

#define X(name) extern const command command_##name;
#include "options/command_list.h"
#undef X

const command *const command_table[] = {
#define X(name) &command_##name,
#include "options/command_list.h"
#undef X
    NULL};

static size_t count_words(const char *text) {
    size_t words = 1;
    for (; *text; text++) {
        words += *text == ' ';
    }
    return words;
}

size_t command_least_operands(const command *c) {
    return c->operands[0] == '[' ? 0 : count_words(c->operands);
}

size_t command_most_operands(const command *c) {
    enum { MOST = 4096 };
    return strstr(c->operands, "...") ? MOST : count_words(c->operands);
}

const command *command_find(const char *name) {
    for (const command *const *c = command_table; *c; c++) {
        if (strcmp((*c)->name, name) == 0) {
            return *c;
        }
    }
    return NULL;
}
