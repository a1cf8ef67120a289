/*
 * Records the identity of files and compares it later. See identity.h.
 */
#include "checkpoint/identity.h"

#include "fsdpckpt/try.h"

#include <errno.h>
#include <sys/stat.h>

struct fc_identity {
    bool known; /* false: the file was missing */
    dev_t device;
    ino_t inode;
    off_t size;
    struct timespec modified, changed;
};

static bool same_time(const struct timespec *a, const struct timespec *b) {
    return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

fc_code fc_identities_take(fc_checkpoint *checkpoint, fc_error *err) {
    struct fc_identity *all = fc_arena_calloc(checkpoint->arena, checkpoint->nfiles + 1, sizeof *all);
    if (!all) {
        return fc_no_memory(err, checkpoint->path);
    }
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        struct stat st;
        if (stat(checkpoint->files[i].path, &st) == 0) {
            all[i] = (struct fc_identity){true, st.st_dev, st.st_ino, st.st_size, st.st_mtim, st.st_ctim};
        }
    }
    checkpoint->identities = all;
    return FC_OK;
}

fc_code fc_identities_join(fc_checkpoint *checkpoint, fc_checkpoint *const *sources, size_t count, fc_error *err) {
    size_t total = 0, n = 0;
    for (size_t i = 0; i < count; i++) {
        total += sources[i]->nfiles;
    }
    fc_file *files = fc_arena_calloc(checkpoint->arena, total + 1, sizeof *files);
    struct fc_identity *all = fc_arena_calloc(checkpoint->arena, total + 1, sizeof *all);
    if (!files || !all) {
        return fc_no_memory(err, checkpoint->path);
    }
    for (size_t i = 0; i < count; i++) {
        for (size_t f = 0; f < sources[i]->nfiles; f++, n++) {
            files[n] = sources[i]->files[f];
            all[n] = sources[i]->identities ? sources[i]->identities[f] : (struct fc_identity){.known = false};
        }
    }
    checkpoint->files = files;
    checkpoint->nfiles = total;
    checkpoint->identities = all;
    return FC_OK;
}

static fc_code compare(const fc_checkpoint *checkpoint, size_t index, const struct stat *st, fc_error *err) {
    const struct fc_identity *was = &checkpoint->identities[index];
    bool same = st->st_dev == was->device && st->st_ino == was->inode;
    if (same && st->st_size == was->size && same_time(&st->st_mtim, &was->modified) &&
        same_time(&st->st_ctim, &was->changed)) {
        return FC_OK;
    }
    return fc_fail(err, FC_ECORRUPT, "%s: %s while the checkpoint was read: start again when nothing writes to it",
                   checkpoint->files[index].path, same ? "was changed" : "was replaced by another file");
}

fc_code fc_identity_check(const fc_checkpoint *checkpoint, size_t index, int fd, fc_error *err) {
    struct stat st;
    if (!checkpoint->identities || !checkpoint->identities[index].known) {
        return FC_OK;
    }
    return fstat(fd, &st) == 0 ? compare(checkpoint, index, &st, err)
                               : fc_fail_errno(err, errno, "%s: cannot be examined", checkpoint->files[index].path);
}

fc_code fc_identities_check(const fc_checkpoint *checkpoint, fc_error *err) {
    for (size_t i = 0; checkpoint->identities && i < checkpoint->nfiles; i++) {
        struct stat st;
        if (!checkpoint->identities[i].known) {
            continue;
        }
        if (stat(checkpoint->files[i].path, &st) != 0) {
            return errno == ENOENT ? fc_fail(err, FC_ECORRUPT, "%s: was removed while the checkpoint was read",
                                             checkpoint->files[i].path)
                                   : fc_fail_errno(err, errno, "%s: cannot be examined", checkpoint->files[i].path);
        }
        FC_TRY(compare(checkpoint, i, &st, err));
    }
    return FC_OK;
}
