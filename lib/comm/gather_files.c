/*
 * Copies the files of all ranks to the disk of rank 0, one rank at a time. Each sender shares a communicator with rank
 * 0, through which the files go in blocks.
 */
#include "fsdpckpt/gather_files.h"

#include "comm/file_list.h"
#include "fsdpckpt/try.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCK_BYTES = 8 << 20, PATH_BYTES = 4096 };

static fc_code join_path(char *path, const char *directory, const char *name, fc_error *err) {
    int n = snprintf(path, PATH_BYTES, "%s/%s", directory, name);
    return n > 0 && n < PATH_BYTES ? FC_OK
                                   : fc_fail(err, FC_EUSAGE, "%s/%s: the file name is too long", directory, name);
}

/* Makes the directories that `name` needs below `into`. */
static fc_code make_parents(const char *into, const char *name, fc_error *err) {
    char path[PATH_BYTES];
    FC_TRY(join_path(path, into, name, err));
    for (char *s = path + strlen(into) + 1; (s = strchr(s, '/')); s++) {
        *s = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST) {
            return fc_fail_errno(err, errno, "%s: cannot be created", path);
        }
        *s = '/';
    }
    return FC_OK;
}

static fc_code create(const char *into, const char *name, char *path, int *fd, fc_error *err) {
    FC_TRY(join_path(path, into, name, err));
    FC_TRY(make_parents(into, name, err));
    *fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return *fd < 0 ? fc_fail_errno(err, errno, "%s: cannot be created", path) : FC_OK;
}

/* Links a file of rank 0, or copies it if it cannot be linked (another file system). */
static fc_code take_own(const char *source, const char *into, const fc_sent_file *file, unsigned char *buf,
                        fc_error *err) {
    char from[PATH_BYTES], to[PATH_BYTES];
    int in = -1, out = -1;
    uint64_t size;
    fc_code rc;
    FC_TRY(join_path(from, source, file->name, err));
    FC_TRY(join_path(to, into, file->name, err));
    FC_TRY(make_parents(into, file->name, err));
    if (linkat(AT_FDCWD, from, AT_FDCWD, to, AT_SYMLINK_FOLLOW) == 0) {
        return FC_OK;
    }
    FC_TRY_GOTO(fc_open_input(from, &in, &size, err), rc, done);
    FC_TRY_GOTO(create(into, file->name, to, &out, err), rc, done);
    for (uint64_t at = 0; at < file->size; at += BLOCK_BYTES) {
        size_t bytes = file->size - at < BLOCK_BYTES ? (size_t)(file->size - at) : BLOCK_BYTES;
        FC_TRY_GOTO(fc_pread_full(in, buf, bytes, at, from, err), rc, done);
        FC_TRY_GOTO(fc_pwrite_full(out, buf, bytes, at, to, err), rc, done);
    }
done:
    if (in >= 0) {
        close(in);
    }
    return fc_close_written(out, rc, to, err);
}

/* The transfer of one rank's files to rank 0, on either side. */
typedef struct transfer {
    fc_comm *pair;
    const char *source, *into;
    unsigned char *buf; /* BLOCK_BYTES */
} transfer;

/*
 * Transfers one file. A side that fails still takes part in every broadcast, with arbitrary bytes, because the other
 * side waits for it. The caller then agrees on the outcome.
 */
static fc_code transfer_file(const transfer *t, const fc_sent_file *file, fc_error *err) {
    char path[PATH_BYTES];
    int fd = -1;
    uint64_t size;
    bool sends = t->pair->rank == 1;
    fc_code rc = sends ? join_path(path, t->source, file->name, err) : create(t->into, file->name, path, &fd, err);
    if (rc == FC_OK && sends) {
        rc = fc_open_input(path, &fd, &size, err);
    }
    for (uint64_t at = 0; at < file->size; at += BLOCK_BYTES) {
        size_t bytes = file->size - at < BLOCK_BYTES ? (size_t)(file->size - at) : BLOCK_BYTES;
        if (rc == FC_OK && sends) {
            rc = fc_pread_full(fd, t->buf, bytes, at, path, err);
        }
        fc_error why;
        fc_code sent = t->pair->broadcast(t->pair, t->buf, bytes, 1, &why);
        if (sent != FC_OK) {
            rc = fc_fail(err, sent, "%s", why.message);
            break;
        }
        if (rc == FC_OK && !sends) {
            rc = fc_pwrite_full(fd, t->buf, bytes, at, path, err);
        }
    }
    return fc_close_written(fd, rc, path, err);
}

static fc_code transfer_files(const transfer *t, const fc_sent_file *files, size_t count, int rank, fc_error *err) {
    for (size_t i = 0; i < count; i++) {
        if (files[i].rank == rank) {
            FC_TRY(fc_comm_agree(t->pair, transfer_file(t, &files[i], err), err));
        }
    }
    return FC_OK;
}

/* Transfers the files that the list assigns to `rank`. The other ranks only take part in the split. */
static fc_code gather_from_rank(fc_comm *comm, const char *source, const char *into, const fc_sent_file *files,
                                size_t count, int rank, unsigned char *buf, fc_error *err) {
    bool in_pair = comm->rank == 0 || comm->rank == rank;
    transfer t = {.source = source, .into = into, .buf = buf};
    FC_TRY(comm->split(comm, in_pair, &t.pair, err));
    fc_code rc = in_pair ? transfer_files(&t, files, count, rank, err) : FC_OK;
    t.pair->free(t.pair);
    return rc;
}

static bool sends_any(const fc_sent_file *files, size_t count, int rank) {
    for (size_t i = 0; i < count; i++) {
        if (files[i].rank == rank) {
            return true;
        }
    }
    return false;
}

/* Copies rank 0's own files, and receives the others'. */
static fc_code gather_one(fc_comm *comm, const char *source, const char *into, const fc_sent_file *files, size_t count,
                          int rank, unsigned char *buf, fc_error *err) {
    if (rank > 0) {
        return sends_any(files, count, rank) ? gather_from_rank(comm, source, into, files, count, rank, buf, err)
                                             : FC_OK;
    }
    for (size_t i = 0; comm->rank == 0 && i < count; i++) {
        if (files[i].rank == 0) {
            FC_TRY(take_own(source, into, &files[i], buf, err));
        }
    }
    return FC_OK;
}

fc_code fc_gather_files(fc_comm *comm, const char *source, const char *into, fc_error *err) {
    fc_arena *arena = fc_arena_new();
    unsigned char *buf = malloc(BLOCK_BYTES);
    fc_sent_file *files = NULL;
    size_t count = 0;
    fc_code rc;
    FC_TRY_GOTO(fc_comm_agree(comm, arena && buf ? FC_OK : fc_no_memory(err, NULL), err), rc, out);
    FC_TRY_GOTO(fc_list_files(comm, source, arena, &files, &count, err), rc, out);
    for (int rank = 0; rank < comm->size; rank++) {
        fc_code mine = gather_one(comm, source, into, files, count, rank, buf, err);
        FC_TRY_GOTO(fc_comm_agree(comm, mine, err), rc, out);
    }
out:
    free(buf);
    fc_arena_free(arena);
    return rc;
}
