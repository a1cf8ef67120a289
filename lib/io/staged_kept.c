/*
 * What an unfinished target in a bucket leaves for a run that goes on: see staged_kept.h.
 */
#include "io/staged_kept.h"

#include "fsdpckpt/try.h"
#include "io/path.h"
#include "io/staging_private.h"
#include "net/remote.h"
#include "net/upload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

fc_code fc_staged_journal_name(const char *target, char **out, fc_error *err) {
    const char *slash = strrchr(target, '/');
    *out = NULL;
    if (fc_remote_is_root(target) || !slash) {
        return FC_OK;
    }
    if (asprintf(out, "%.*s/.%s" FC_STAGING_SUFFIX "resume", (int)(slash - target), target, slash + 1) < 0) {
        *out = NULL;
        return fc_no_memory(err, target);
    }
    return FC_OK;
}

fc_code fc_staged_journal_find(const char *journal, bool *found, fc_error *err) {
    struct stat st;
    *found = false;
    return journal ? fc_stat_path(journal, &st, found, err) : FC_OK;
}

void fc_staged_journal_end(const char *journal, const char *target, bool is_folder, bool others) {
    size_t count;
    if (!journal) {
        return;
    }
    if (others) { /* first, because the journal keeps the next run from doing it */
        (void)fc_upload_clear(target, is_folder, &count, NULL);
    }
    (void)fc_upload_delete_journal(journal, NULL);
}
