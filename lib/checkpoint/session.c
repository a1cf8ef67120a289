/*
 * What the openings of one command share. See session.h.
 */
#include "checkpoint/session.h"

#include "net/remote.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>

struct fc_session {
    fc_session_part *parts;
    const char *plugins;
};

fc_session *fc_session_new(void) {
    return calloc(1, sizeof(fc_session));
}

void fc_session_free(fc_session *session) {
    while (session && session->parts) {
        fc_session_part *part = session->parts;
        session->parts = part->next;
        if (part->state) {
            part->release(part->state);
        }
        free(part);
    }
    free(session);
}

fc_code fc_session_set_plugins(fc_session *session, const char *folder, fc_error *err) {
    if (fc_is_remote(folder)) {
        return fc_fail(err, FC_EUSAGE, "%s: plugins are code, so their folder must be on this machine", folder);
    }
    DIR *opened = opendir(folder);
    if (!opened) {
        return fc_fail_errno(err, errno, "%s: the folder of plugins cannot be opened", folder);
    }
    closedir(opened);
    session->plugins = folder;
    return FC_OK;
}

const char *fc_session_plugins(const fc_session *session) {
    return session ? session->plugins : NULL;
}

fc_session_part *fc_session_part_of(fc_session *session, const struct fc_format *format) {
    fc_session_part *part = session->parts;
    while (part && part->format != format) {
        part = part->next;
    }
    if (!part) {
        part = calloc(1, sizeof *part);
        if (part) {
            part->format = format;
            part->next = session->parts;
            session->parts = part;
        }
    }
    return part;
}
