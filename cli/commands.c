/*
 * The table of commands. Adding one is its file cmd_<name>.c and its line in command_list.h.
 */
#include "command.h"

#include <string.h>

#define X(name) extern const command command_##name;
#include "command_list.h"
#undef X
#define COMMANDS(X)                                                                                                    \
    X(consolidate)                                                                                                     \
    X(reshard)                                                                                                         \
    X(inspect)                                                                                                         \
    X(check)                                                                                                           \
    X(diff)                                                                                                            \
    X(schema)

const command *const command_table[] = {
#define X(name) &command_##name,
#include "command_list.h"
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
