/*
 * The table of commands. Adding one is its file cmd_<name>.c and its line here.
 */
#include "command.h"

#include <string.h>

#define COMMANDS(X)                                                                                                    \
    X(consolidate)                                                                                                     \
    X(reshard)                                                                                                         \
    X(convert)                                                                                                         \
    X(extract)                                                                                                         \
    X(inspect)                                                                                                         \
    X(schema)

#define DECLARE(name) extern const command command_##name;
COMMANDS(DECLARE)

#define ADDRESS(name) &command_##name,
const command *const command_table[] = {COMMANDS(ADDRESS) NULL};

const command *command_find(const char *name) {
    for (const command *const *c = command_table; *c; c++) {
        if (strcmp((*c)->name, name) == 0) {
            return *c;
        }
    }
    return NULL;
}
