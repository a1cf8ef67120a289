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

const command *command_find(const char *name) {
    for (const command *const *c = command_table; *c; c++) {
        if (strcmp((*c)->name, name) == 0) {
            return *c;
        }
    }
    return NULL;
}
