/*
 * The file where ranks of several processes meet. It has a header and a slot for each rank, in which the rank says that
 * it has come, has failed and why, or has left.
 *
 * Each rank locks a byte of its own. The kernel drops the lock when the process ends in any way, so a rank that has
 * come and has no lock is dead. The locks belong to the open file, not to the process, so ranks can be threads too; a
 * child that is forked and does not call exec keeps the lock of its parent. Where the file system has no locks, only
 * ranks that say so have failed.
 *
 * Rank 0 removes the name of the file when all have joined. The ranks keep the file open.
 */
#include "gather/file_meet.h"

#include "fsdpckpt/try.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    LOCKS = 1 << 30, /* the byte of rank 0; the file is shorter */
    POLL_MS = 10,
    CHECK_MS = 5, /* between two looks at the file */
    AT_ONCE = 16  /* ranks per look */
};

typedef enum slot_state { ABSENT, CAME, FAILED, LEFT } slot_state;

typedef struct slot {
    uint64_t state, calls;
    char message[496];
} slot;

static const char magic[16] = "fsdpckpt meeting";

typedef struct header {
    char magic[sizeof magic];
    uint64_t size, is_shared;
    char shared[FC_MEETING_SHARED];
    char unused[512 - sizeof magic - 2 * sizeof(uint64_t) - FC_MEETING_SHARED];
} header;

struct fc_meeting {
    int fd, rank, size, seconds;
    bool is_closed;               /* whether the name of the file is gone */
    bool locks;                   /* whether the file system has them */
    bool has_failed;              /* whether this rank has said so */
    int next;                     /* the rank to look at next */
    struct timespec start, until; /* when this rank came; when to look again */
    fc_code code;                 /* the failure of another rank */
    fc_error error;
    char path[];
};

static struct timespec now_plus(long ms) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += ms % 1000 * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_nsec -= 1000000000;
        t.tv_sec++;
    }
    return t;
}

static bool is_over(struct timespec t) {
    const struct timespec now = now_plus(0);
    return now.tv_sec > t.tv_sec || (now.tv_sec == t.tv_sec && now.tv_nsec >= t.tv_nsec);
}

static void pause_for(long ms) {
    const struct timespec pause = {0, ms * 1000000};
    nanosleep(&pause, NULL);
}

static bool time_is_up(const fc_meeting *m) {
    return is_over((struct timespec){m->start.tv_sec + m->seconds, m->start.tv_nsec});
}

/* ---- the file ---- */

static off_t slot_at(int rank) {
    return (off_t)sizeof(header) + (off_t)rank * (off_t)sizeof(slot);
}

static struct flock byte_of(int rank) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCKS + (off_t)rank, .l_len = 1};
}

/* Returns whether a rank holds its lock. Of this rank itself, and without locks, nothing is known: true. */
static bool is_alive(const fc_meeting *m, int rank) {
    struct flock lock = byte_of(rank);
    return !m->locks || rank == m->rank || fcntl(m->fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

static fc_code take_lock(fc_meeting *m, fc_error *err) {
    struct flock lock = byte_of(m->rank);
    m->locks = fcntl(m->fd, F_OFD_SETLK, &lock) == 0;
    return m->locks || (errno != EAGAIN && errno != EACCES)
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "%s: another process is rank %d", m->path, m->rank);
}

static fc_code put_bytes(const fc_meeting *m, const void *data, size_t bytes, off_t at, fc_error *err) {
    const ssize_t written = pwrite(m->fd, data, bytes, at);
    return written == (ssize_t)bytes
               ? FC_OK
               : fc_fail_errno(err, written < 0 ? errno : ENOSPC, "%s: cannot be written", m->path);
}

static fc_code set_state(const fc_meeting *m, slot_state state, uint64_t calls, fc_error *err) {
    const uint64_t numbers[] = {state, calls};
    return put_bytes(m, numbers, sizeof numbers, slot_at(m->rank), err);
}

/* Reads slots. Those past the end of the file belong to ranks that have not come yet. */
static void get_slots(const fc_meeting *m, int first, int count, slot *out) {
    memset(out, 0, (size_t)count * sizeof *out);
    if (pread(m->fd, out, (size_t)count * sizeof *out, slot_at(first)) < 0) {
        memset(out, 0, (size_t)count * sizeof *out);
    }
}

static bool is_same_file(const fc_meeting *m) {
    struct stat opened, named;
    return fstat(m->fd, &opened) == 0 && stat(m->path, &named) == 0 && opened.st_dev == named.st_dev &&
           opened.st_ino == named.st_ino;
}

static void remove_name(const fc_meeting *m) {
    if (is_same_file(m)) {
        unlink(m->path);
    }
}

/* ---- coming ---- */

static fc_code write_header(const fc_meeting *m, fc_error *err) {
    header h = {.size = (uint64_t)m->size};
    memcpy(h.magic, magic, sizeof magic);
    return put_bytes(m, &h, sizeof h, 0, err);
}

/* Removes a file whose rank 0 is dead. */
static fc_code remove_left_file(fc_meeting *m, fc_error *err) {
    char found[sizeof magic];
    m->fd = open(m->path, O_RDWR | O_CLOEXEC);
    if (m->fd < 0) {
        return errno == ENOENT ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be opened", m->path);
    }
    fc_code rc = take_lock(m, err);
    if (rc == FC_OK &&
        (pread(m->fd, found, sizeof found, 0) != (ssize_t)sizeof found || memcmp(found, magic, sizeof magic) != 0)) {
        rc = fc_fail(err, FC_EUSAGE, "%s: exists, and is not a file where ranks meet", m->path);
    }
    if (rc == FC_OK) {
        remove_name(m);
    }
    close(m->fd);
    m->fd = -1;
    return rc;
}

static fc_code make_file(fc_meeting *m, fc_error *err) {
    const int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
    m->fd = open(m->path, flags, 0600);
    if (m->fd < 0 && errno == EEXIST) {
        FC_TRY(remove_left_file(m, err));
        m->fd = open(m->path, flags, 0600);
    }
    return m->fd >= 0 ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be created", m->path);
}

/* The header comes last: it tells the others that rank 0 has its lock. */
static fc_code begin_meeting(fc_meeting *m, fc_error *err) {
    FC_TRY(make_file(m, err));
    FC_TRY(take_lock(m, err));
    FC_TRY(set_state(m, CAME, 0, err));
    return write_header(m, err);
}

/* Looks once. @return FC_OK with m->fd == -1 if the file is not there, or is one that a killed rank 0 has left. */
static fc_code look_for_file(fc_meeting *m, fc_error *err) {
    header h;
    m->fd = open(m->path, O_RDWR | O_CLOEXEC);
    if (m->fd < 0) {
        return errno == ENOENT ? FC_OK : fc_fail_errno(err, errno, "%s: cannot be opened", m->path);
    }
    FC_TRY(take_lock(m, err));
    const ssize_t got = pread(m->fd, &h, sizeof h, 0);
    const bool is_begun = got >= (ssize_t)sizeof magic && h.magic[0] != '\0'; /* the slot of rank 0 comes first */
    if (is_begun && memcmp(h.magic, magic, sizeof magic) != 0) {
        return fc_fail(err, FC_ECORRUPT, "%s: not a file where ranks meet", m->path);
    }
    if (!is_begun || got != (ssize_t)sizeof h || !is_alive(m, 0)) {
        close(m->fd);
        m->fd = -1;
        return FC_OK;
    }
    return h.size == (uint64_t)m->size
               ? FC_OK
               : fc_fail(err, FC_EUSAGE, "%s: rank 0 expects %llu ranks, and rank %d expects %d", m->path,
                         (unsigned long long)h.size, m->rank, m->size);
}

static fc_code find_file(fc_meeting *m, fc_error *err) {
    for (;;) {
        FC_TRY(look_for_file(m, err));
        if (m->fd >= 0) {
            return FC_OK;
        }
        if (time_is_up(m)) {
            return fc_fail(err, FC_EIO, "%s: rank 0 did not write this file within %d seconds", m->path, m->seconds);
        }
        pause_for(POLL_MS);
    }
}

fc_code fc_meeting_come(const char *path, int rank, int size, int seconds, fc_meeting **out, fc_error *err) {
    fc_meeting *m = calloc(1, sizeof *m + strlen(path) + 1);
    fc_code rc;
    *out = NULL;
    FC_NEED(m, err, path);
    *m = (fc_meeting){.fd = -1, .rank = rank, .size = size, .seconds = seconds, .start = now_plus(0)};
    memcpy(m->path, path, strlen(path) + 1);
    FC_TRY_GOTO(rank == 0 ? begin_meeting(m, err) : find_file(m, err), rc, failed);
    FC_TRY_GOTO(set_state(m, CAME, 0, err), rc, failed);
    *out = m;
    return FC_OK;
failed:
    if (m->fd >= 0) {
        if (rank == 0) {
            remove_name(m);
        }
        close(m->fd);
    }
    free(m);
    return rc;
}

/* ---- sharing ---- */

static bool get_shared(const fc_meeting *m, void *data, size_t bytes) {
    header h;
    if (pread(m->fd, &h, sizeof h, 0) != (ssize_t)sizeof h || !h.is_shared) {
        return false;
    }
    memcpy(data, h.shared, bytes);
    return true;
}

static fc_code wait_for_shared(fc_meeting *m, void *data, size_t bytes, fc_error *err) {
    while (!get_shared(m, data, bytes)) {
        FC_TRY(fc_meeting_check(m, 0, err));
        if (time_is_up(m)) {
            return fc_fail(err, FC_EIO, "%s: rank 0 did not begin within %d seconds", m->path, m->seconds);
        }
        pause_for(POLL_MS);
    }
    return FC_OK;
}

fc_code fc_meeting_share(fc_meeting *m, void *data, size_t bytes, fc_error *err) {
    const uint64_t yes = 1;
    if (m->rank != 0) {
        return wait_for_shared(m, data, bytes, err);
    }
    FC_TRY(put_bytes(m, data, bytes, offsetof(header, shared), err));
    return put_bytes(m, &yes, sizeof yes, offsetof(header, is_shared), err);
}

static bool have_all_come(const fc_meeting *m) {
    slot s;
    for (int r = 0; r < m->size; r++) {
        get_slots(m, r, 1, &s);
        if (s.state == ABSENT) {
            return false;
        }
    }
    return true;
}

void fc_meeting_close(fc_meeting *m) {
    if (m->rank == 0 && !m->is_closed) {
        m->is_closed = true;
        remove_name(m);
    }
}

/* ---- failing ---- */

void fc_meeting_fail(fc_meeting *m, const char *message) {
    slot s = {.state = CAME};
    if (!m->has_failed) {
        m->has_failed = true;
        snprintf(s.message, sizeof s.message, "%s", message);
        if (put_bytes(m, &s, sizeof s, slot_at(m->rank), NULL) == FC_OK) {
            set_state(m, FAILED, 0, NULL); /* else the others notice when this process ends */
        }
    }
}

static fc_code note_code(fc_meeting *m, fc_code code) {
    m->code = code;
    return code;
}

/* A rank leaves before it drops its lock, so one that is dead may have left since its slot was read. */
static bool is_dead(const fc_meeting *m, int rank) {
    slot s;
    if (is_alive(m, rank)) {
        return false;
    }
    get_slots(m, rank, 1, &s);
    return s.state == CAME;
}

static fc_code look_at(fc_meeting *m, int rank, slot *s, uint64_t calls) {
    if (rank == m->rank) {
        return FC_OK;
    }
    if (s->state == FAILED) {
        s->message[sizeof s->message - 1] = '\0';
        return note_code(m, fc_fail(&m->error, FC_EIO, "%s", s->message));
    }
    if (s->state == LEFT && s->calls < calls) {
        return note_code(
            m, fc_fail(&m->error, FC_EIO, "rank %d has freed its communicator, and other ranks wait for it", rank));
    }
    if (s->state == CAME && is_dead(m, rank)) {
        if (rank == 0) {
            remove_name(m);
        }
        return note_code(m, fc_fail(&m->error, FC_EIO, "rank %d: its process has ended", rank));
    }
    return FC_OK;
}

fc_code fc_meeting_check(fc_meeting *m, uint64_t calls, fc_error *err) {
    slot slots[AT_ONCE];
    if (m->code == FC_OK && is_over(m->until)) {
        const int left = m->size - m->next, count = left < AT_ONCE ? left : AT_ONCE;
        get_slots(m, m->next, count, slots);
        for (int i = 0; i < count && m->code == FC_OK; i++) {
            look_at(m, m->next + i, &slots[i], calls);
        }
        m->next = (m->next + count) % m->size;
        m->until = now_plus(CHECK_MS);
    }
    if (m->code != FC_OK && err) {
        *err = m->error;
    }
    return m->code;
}

void fc_meeting_leave(fc_meeting *m, uint64_t calls) {
    while (m->rank == 0 && !m->is_closed && !have_all_come(m) && !time_is_up(m)) {
        pause_for(POLL_MS);
    }
    fc_meeting_close(m);
    if (!m->has_failed) {
        set_state(m, LEFT, calls, NULL);
    }
    close(m->fd);
    free(m);
}
