/*
 * Decides which files a target may replace. Each format says itself which names it writes, and what is a checkpoint.
 */
#include "checkpoint/own_files.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"
#include "io/path.h"
#include "io/replace.h"

#include <errno.h>
#include <fnmatch.h>
#include <sys/stat.h>

fc_code fc_own_if_read(fc_code read, bool *own) {
    *own = read == FC_OK;
    return read == FC_ENOMEM || read == FC_EIO || read == FC_EINTERRUPTED ? read : FC_OK;
}

/* Whether the format writes files of this name and content into directories. */
static fc_code check_named(const fc_format *format, const char *path, const char *name, bool *own, fc_error *err) {
    for (const fc_own_file *file = format->target.own_files; file && file->glob && !*own; file++) {
        FC_TRY(fnmatch(file->glob, name, FNM_PATHNAME) == 0 ? file->is_ours(path, own, err) : FC_OK);
    }
    return FC_OK;
}

fc_code fc_is_own_file(const char *path, const char *name, bool *own, fc_error *err) {
    struct stat st;
    *own = false;
    if (fc_lstat(path, &st) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be examined", path);
    }
    for (const fc_format *const *f = fc_formats(); *f && !*own; f++) {
        if (st.st_size == 0) {
            *own = name ? fc_is_target_name((*f)->target.own_files, name) : true;
        } else if (name) {
            FC_TRY(check_named(*f, path, name, own, err));
        } else if ((*f)->target.is_checkpoint) {
            FC_TRY((*f)->target.is_checkpoint(path, own, err));
        }
    }
    return FC_OK;
}
