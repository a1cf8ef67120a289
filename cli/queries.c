/*
 * Hides the queries of URLs on the command line: see queries.h. Presigned URLs have a secret there.
 */
#include "queries.h"

#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* @return where the URL in an option such as --like=https://host/model or -ohttps://host/model begins, or the whole
 * argument */
static char *value_of(char *argument) {
    char *plain = *argument == '-' ? strcasestr(argument, "http://") : NULL;
    char *secure = *argument == '-' ? strcasestr(argument, "https://") : NULL;
    char *first = plain && (!secure || plain < secure) ? plain : secure;
    return first ? first : argument;
}

static fc_code hide(char **argument, fc_error *err) {
    char *url = value_of(*argument), *name = NULL, *whole = NULL;
    FC_TRY(fc_hide_query(url, &name, err));
    if (!name) {
        return FC_OK;
    }
    if (asprintf(&whole, "%.*s%s", (int)(url - *argument), *argument, name) < 0) {
        whole = NULL;
    }
    free(name);
    FC_TRY(whole ? FC_OK : fc_no_memory(err, NULL));
    char *query = strchr(url, '?');
    memset(query, '*', strlen(query)); /* "ps" shows the arguments */
    *argument = whole;
    return FC_OK;
}

fc_code queries_hide(int argc, char **argv, fc_error *err) {
    for (int i = 1; i < argc; i++) {
        FC_TRY(hide(&argv[i], err));
    }
    return FC_OK;
}
