/*
 * What follows when a server does not give what it was asked for: another region, or why not. See fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool transfer_move(fetcher *f, transfer *t) {
    char url[MOST_URL];
    const char *name = transfer_name(t);
    if (t->moved || !name_region_keep(f, name, t->answer.region) || (!t->object && t->folder->pages > 1) ||
        !(t->object ? name_url(f, name, url) : list_url(f, t->folder, url))) {
        return false;
    }
    char *copy = strdup(url);
    if (!copy) {
        return false;
    }
    free(t->url);
    t->url = copy;
    t->moved = true;
    t->progress = WAITS;
    t->wake = 0;
    return true;
}

void transfer_refused(fetcher *f, transfer *t) {
    const long status = t->answer.status;
    const char *code = t->answer.code;
    const bool refused = status == 401 || status == 403, hub = name_provider(transfer_name(t)) == PROVIDER_HUB;
    char text[512];
    snprintf(text, sizeof text, "%s (status %ld%s%s)%s",
             refused ? "the server refuses access" : "the server cannot answer", status, *code ? ", " : "", code,
             !refused                                                     ? ""
             : hub && !f->setup.hub_token[0]                              ? "; HF_TOKEN gives access"
             : strchr(transfer_name(t), '?') && !transfer_is_of_bucket(t) ? "; the URL may have expired: get a new one"
             : transfer_is_of_bucket(t) && !f->setup.key[0]
                 ? "; no key is set in AWS_ACCESS_KEY_ID and "
                   "AWS_SECRET_ACCESS_KEY or for AWS_PROFILE; those of roles "
                   "and SSO come from 'aws configure export-credentials "
                   "--format env'"
             : strncmp(code, "Expired", 7) == 0          ? "; the key or the token has expired: get a new one"
             : strcmp(code, "RequestTimeTooSkewed") == 0 ? "; set the clock of this machine"
                                                         : "");
    transfer_fail(f, t, FC_EIO, text);
}
