/*
 * Records the identity of files and compares it later. See identity.h.
 */
#include "checkpoint/identity.h"
#include "io/file.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "io/path.h"
#include "net/remote.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { AHEAD = 32 }; /* files on servers that are asked for at once */

typedef struct identity {
    const char *path; /* of the checkpoint's file; NULL: the file was missing */
    dev_t device;
    ino_t inode;
    off_t size;
    struct timespec modified, changed;
} identity;

/* A file that describes the others and is not among them, such as an index. */
typedef struct header {
    struct header *next;
    identity file;
} header;

struct fc_identities {
    header *headers;
    size_t count;
    identity items[];
};

static bool same_time(const struct timespec *a, const struct timespec *b) {
    return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

/* The identity of file `index`; NULL if it is unknown. */
static const identity *known(const fc_checkpoint *checkpoint, size_t index) {
    const struct fc_identities *all = checkpoint->identities;
    const identity *was = all && index < all->count ? &all->items[index] : NULL;
    return was && was->path && strcmp(was->path, checkpoint->files[index].path) == 0 ? was : NULL;
}

static identity read_identity(const char *path) {
    struct stat st;
    if (fc_stat(path, &st) != 0) {
        return (identity){.path = NULL}; /* opening the file reports the error */
    }
    return (identity){path, st.st_dev, st.st_ino, st.st_size, st.st_mtim, st.st_ctim};
}

/* `checkpoint` keeps the identities of its headers. */
static struct fc_identities *new_identities(const fc_checkpoint *checkpoint) {
    const size_t count = checkpoint->nfiles; /* their list is in memory, so the size does not overflow */
    struct fc_identities *all = fc_arena_alloc(checkpoint->arena, sizeof *all + count * sizeof *all->items);
    if (all) {
        memset(all, 0, sizeof *all + count * sizeof *all->items);
        all->count = count;
        all->headers = checkpoint->identities ? checkpoint->identities->headers : NULL;
    }
    return all;
}

fc_code fc_identities_add_header(fc_checkpoint *checkpoint, const char *path, const fc_open_options *options,
                                 fc_error *err) {
    if (options->headers_only) {
        return FC_OK;
    }
    header *h = fc_arena_alloc(checkpoint->arena, sizeof *h);
    struct fc_identities *all = h ? new_identities(checkpoint) : NULL;
    FC_NEED(all, err, checkpoint->path);
    *h = (header){all->headers, read_identity(path)};
    all->headers = h;
    for (size_t i = 0; i < all->count; i++) {
        const identity *was = known(checkpoint, i);
        all->items[i] = was ? *was : (identity){.path = NULL};
    }
    checkpoint->identities = all;
    return FC_OK;
}

const char **fc_identities_headers(const fc_checkpoint *checkpoint, size_t *count) {
    const header *first = checkpoint->identities ? checkpoint->identities->headers : NULL;
    size_t n = 0;
    for (const header *h = first; h; h = h->next) {
        n++;
    }
    const char **paths = calloc(n + 1, sizeof *paths);
    n = 0;
    for (const header *h = first; h && paths; h = h->next) {
        if (h->file.path) { /* NULL: it was missing */
            paths[n++] = h->file.path;
        }
    }
    *count = n;
    return paths;
}

/* Asks servers for the files, some at once. The fetcher keeps what they begin with, so what follows need not wait. */
static void look_at_files(const fc_checkpoint *checkpoint) {
    for (size_t i = 0, expected = 0; i < checkpoint->nfiles && fc_is_remote(checkpoint->files[i].path); i++) {
        for (; expected < checkpoint->nfiles && expected < i + AHEAD; expected++) {
            fc_expect(checkpoint->files[expected].path);
        }
        (void)read_identity(checkpoint->files[i].path);
    }
}

fc_code fc_identities_take(fc_checkpoint *checkpoint, const fc_open_options *options, fc_error *err) {
    look_at_files(checkpoint);
    if (options->headers_only) {
        return FC_OK;
    }
    struct fc_identities *all = new_identities(checkpoint);
    FC_NEED(all, err, checkpoint->path);
    for (size_t i = 0; i < all->count; i++) {
        const identity *was = known(checkpoint, i);
        all->items[i] = was ? *was : read_identity(checkpoint->files[i].path);
    }
    checkpoint->identities = all;
    return FC_OK;
}

static void join_headers(header **list, const struct fc_identities *part) {
    while (*list) {
        list = &(*list)->next;
    }
    *list = part ? part->headers : NULL;
}

fc_code fc_identities_gather(fc_checkpoint *checkpoint, const fc_checkpoint *parts, size_t nparts, fc_error *err) {
    struct fc_identities *all = new_identities(checkpoint);
    size_t n = 0;
    FC_NEED(all, err, checkpoint->path);
    for (size_t p = 0; p < nparts; p++) {
        for (size_t i = 0; i < parts[p].nfiles && n < all->count; i++) {
            const identity *was = known(&parts[p], i);
            all->items[n++] = was ? *was : (identity){.path = NULL};
        }
        join_headers(&all->headers, parts[p].identities);
    }
    checkpoint->identities = nparts > 0 && parts[0].identities ? all : NULL;
    return FC_OK;
}

static fc_code compare(const identity *was, const struct stat *st, fc_error *err) {
    bool same = st->st_dev == was->device && st->st_ino == was->inode;
    if (same && st->st_size == was->size && same_time(&st->st_mtim, &was->modified) &&
        same_time(&st->st_ctim, &was->changed)) {
        return FC_OK;
    }
    return fc_fail(err, FC_ECORRUPT, "%s: %s while the checkpoint was read: start again when nothing writes to it",
                   was->path, same ? "was changed" : "was replaced by another file");
}

fc_code fc_identity_check(const fc_checkpoint *checkpoint, size_t index, int fd, fc_error *err) {
    struct stat st;
    const identity *was = known(checkpoint, index);
    if (!was) {
        return FC_OK;
    }
    return fc_fstat(fd, &st) == 0 ? compare(was, &st, err)
                                  : fc_fail_errno(err, errno, "%s: cannot be examined", was->path);
}

fc_code fc_identity_open(const fc_checkpoint *checkpoint, size_t index, int *fd, fc_error *err) {
    uint64_t size;
    FC_TRY(fc_open_input(checkpoint->files[index].path, fd, &size, err));
    fc_code rc = fc_identity_check(checkpoint, index, *fd, err);
    if (rc != FC_OK) {
        close(*fd);
        *fd = -1;
    }
    return rc;
}

static fc_code compare_by_name(const identity *was, fc_error *err) {
    struct stat st;
    if (!was || !was->path) {
        return FC_OK;
    }
    if (fc_stat(was->path, &st) == 0) {
        return compare(was, &st, err);
    }
    return errno == ENOENT || errno == ENOTDIR
               ? fc_fail(err, FC_ECORRUPT,
                         "%s: was removed while the checkpoint was read: start again when nothing writes to it",
                         was->path)
               : fc_fail_errno(err, errno, "%s: cannot be examined", was->path);
}

fc_code fc_checkpoint_unchanged(const fc_checkpoint *checkpoint, fc_error *err) {
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        FC_TRY(compare_by_name(known(checkpoint, i), err));
    }
    for (const header *h = checkpoint->identities ? checkpoint->identities->headers : NULL; h; h = h->next) {
        FC_TRY(compare_by_name(&h->file, err));
    }
    return FC_OK;
}

fc_code fc_checkpoint_check_inputs(const fc_checkpoint *source, struct fc_comm *comm, fc_error *err) {
    return source->format->reader.check_inputs ? source->format->reader.check_inputs(source, comm, err)
                                               : fc_checkpoint_unchanged(source, err);
}

/* Gives `made` the identities of the files of a source, from number `first` on, and its headers. */
static fc_code add_identities(fc_checkpoint *made, size_t first, struct fc_identities *all, const fc_checkpoint *source,
                              fc_error *err) {
    for (size_t i = 0; i < source->nfiles; i++) {
        const identity *was = known(source, i);
        all->items[first + i] = was ? *was : (identity){.path = NULL};
    }
    for (const header *h = source->identities ? source->identities->headers : NULL; h; h = h->next) {
        header *copy = fc_arena_alloc(made->arena, sizeof *copy);
        FC_NEED(copy, err, made->path);
        *copy = (header){all->headers, h->file};
        all->headers = copy;
    }
    return FC_OK;
}

fc_code fc_files_gather(fc_checkpoint *made, const fc_file *own, fc_checkpoint *const *sources, size_t count,
                        fc_error *err) {
    size_t n = own ? 1 : 0;
    for (size_t i = 0; i < count; i++) {
        n += sources[i]->nfiles;
    }
    fc_file *files = fc_arena_calloc(made->arena, n + 1, sizeof *files);
    FC_NEED(files, err, made->path);
    n = 0;
    if (own) {
        files[n++] = *own;
    }
    for (size_t i = 0; i < count; i++) {
        for (size_t f = 0; f < sources[i]->nfiles; f++) {
            files[n++] = sources[i]->files[f];
        }
    }
    made->files = files;
    made->nfiles = n;
    struct fc_identities *all = new_identities(made);
    FC_NEED(all, err, made->path);
    n = own ? 1 : 0;
    for (size_t i = 0; i < count; i++) {
        FC_TRY(add_identities(made, n, all, sources[i], err));
        n += sources[i]->nfiles;
    }
    made->identities = all;
    return FC_OK;
}

static int64_t nanoseconds(const struct timespec *at) {
    return (int64_t)at->tv_sec * 1000000000 + at->tv_nsec; /* until the year 2262 */
}

bool fc_checkpoint_identity(const fc_checkpoint *checkpoint, size_t index, fc_file_identity *out) {
    const identity *was = NULL;
    if (index < checkpoint->nfiles) {
        was = known(checkpoint, index);
    } else {
        const header *h = checkpoint->identities ? checkpoint->identities->headers : NULL;
        for (size_t i = checkpoint->nfiles; h && i < index; i++) {
            h = h->next;
        }
        if (!h) {
            return false;
        }
        was = &h->file;
    }
    *out = (fc_file_identity){.path = NULL};
    if (was && was->path) {
        *out = (fc_file_identity){was->path,           (uint64_t)was->device,       (uint64_t)was->inode,
                                  (uint64_t)was->size, nanoseconds(&was->modified), nanoseconds(&was->changed)};
    }
    return true;
}

unsigned fc_path_forbidden(const char *path) {
    struct stat st;
    if (fc_stat(path, &st) != 0) {
        return 0; /* there is nothing to copy from it */
    }
    const unsigned mode = st.st_mode & 0777U;
    if (!S_ISDIR(st.st_mode)) {
        return 0777U & ~mode &
               ~(unsigned)S_IRUSR; /* whoever makes the copy could read it, perhaps as a member of a group */
    }
    return (mode & S_IXGRP ? 0U : 070U) | (mode & S_IXOTH ? 0U : 07U);
}

unsigned fc_checkpoint_forbidden(const fc_checkpoint *checkpoint) {
    const struct fc_identities *all = checkpoint->identities;
    unsigned bits = fc_path_forbidden(checkpoint->path);
    for (size_t i = 0; i < checkpoint->nfiles; i++) {
        bits |= fc_path_forbidden(checkpoint->files[i].path);
    }
    for (const header *h = all ? all->headers : NULL; h; h = h->next) {
        bits |= h->file.path ? fc_path_forbidden(h->file.path) : 0;
    }
    return bits;
}
