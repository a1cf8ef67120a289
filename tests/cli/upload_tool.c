/*
 * Writes objects for test_net_uploads.py as a conversion does:
 *
 *     upload_tool parts NAME FILE PART-BYTES THREADS complete|new|abort|wait
 *     upload_tool whole NAME FILE replace|new
 *     upload_tool delete|delete-own|check|clear|clear-folder NAME
 *     upload_tool see NAME FILE
 *
 * "see" prints what can be read of the name and its folder before the object is written, then, and after it is deleted.
 * "wait" sends the parts, says so, and waits until it is killed.
 */
#include "net/remote.h"
#include "net/upload.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_THREADS = 64, RUN = 0x1234abcd };

typedef struct work {
    fc_upload *upload;
    int fd;
    uint64_t size, part_bytes;
    unsigned parts, thread, threads;
    fc_error error;
    fc_code rc;
} work;

/* A copy of the file in memory, which has no name. */
static int copy_of(const char *path, uint64_t *size) {
    static char buffer[1 << 16];
    const int from = open(path, O_RDONLY | O_CLOEXEC), to = memfd_create("upload", MFD_CLOEXEC);
    ssize_t n;
    if (from < 0 || to < 0) {
        perror(path);
        exit(99);
    }
    *size = 0;
    while ((n = read(from, buffer, sizeof buffer)) > 0) {
        if (write(to, buffer, (size_t)n) != n) {
            perror("memfd");
            exit(99);
        }
        *size += (uint64_t)n;
    }
    close(from);
    return to;
}

static void *send_parts(void *context) {
    work *w = context;
    for (unsigned i = w->thread; i < w->parts && w->rc == FC_OK; i += w->threads) {
        const uint64_t at = i * w->part_bytes, left = w->size - at;
        w->rc = fc_upload_part(w->upload, w->fd, at, left < w->part_bytes ? left : w->part_bytes, i + 1, &w->error);
    }
    return NULL;
}

static fc_code send_by_threads(fc_upload *upload, int fd, uint64_t size, uint64_t part_bytes, unsigned threads,
                               unsigned *parts, fc_error *err) {
    static work works[MOST_THREADS];
    static pthread_t ids[MOST_THREADS];
    fc_code rc = FC_OK;
    *parts = (unsigned)((size + part_bytes - 1) / part_bytes);
    for (unsigned i = 0; i < threads; i++) {
        works[i] = (work){upload, fd, size, part_bytes, *parts, i, threads, {.code = FC_OK}, FC_OK};
        if (pthread_create(&ids[i], NULL, send_parts, &works[i]) != 0) {
            exit(99);
        }
    }
    for (unsigned i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
        if (works[i].rc != FC_OK && rc == FC_OK) {
            *err = works[i].error;
            rc = works[i].rc;
        }
    }
    return rc;
}

static fc_code send_in_parts(char **arguments, fc_error *err) {
    fc_upload *upload = NULL;
    uint64_t size;
    unsigned parts = 0;
    const char *end = arguments[4];
    const int fd = copy_of(arguments[1], &size);
    fc_code rc = fc_upload_begin(arguments[0], RUN, NULL, &upload, err);
    if (rc != FC_OK) {
        return rc;
    }
    rc = send_by_threads(upload, fd, size, strtoull(arguments[2], NULL, 10), (unsigned)atoi(arguments[3]), &parts, err);
    if (rc != FC_OK || strcmp(end, "abort") == 0) {
        int patience = FC_UPLOAD_PATIENCE;
        fc_upload_abort(upload, &patience);
        return rc;
    }
    if (strcmp(end, "wait") == 0) {
        puts("sent");
        fflush(stdout);
        pause();
    }
    bool gone = false;
    rc = fc_upload_complete(upload, parts, strcmp(end, "new") == 0, &gone, err);
    if (rc != FC_OK) {
        int patience = FC_UPLOAD_PATIENCE;
        fc_upload_abort(upload, &patience);
    }
    return rc;
}

static fc_code print_what_is_seen(const char *name, const char *folder, fc_error *err) {
    fc_remote_info object, around;
    fc_code rc = fc_remote_stat(folder, false, &around, err);
    rc = rc == FC_OK ? fc_remote_stat(name, false, &object, err) : rc;
    if (rc == FC_OK) {
        printf("%s %d %" PRIu64 "\n", around.is_folder ? "folder" : "nothing", object.found, object.size);
    }
    return rc;
}

static fc_code see(const char *name, int fd, uint64_t size, fc_error *err) {
    char *folder = strdup(name);
    if (!folder) {
        exit(99);
    }
    *strrchr(folder, '/') = '\0';
    fc_code rc = print_what_is_seen(name, folder, err);
    rc = rc == FC_OK ? fc_upload_whole(name, RUN, fd, size, true, err) : rc;
    rc = rc == FC_OK ? print_what_is_seen(name, folder, err) : rc;
    rc = rc == FC_OK ? fc_upload_delete(name, err) : rc;
    rc = rc == FC_OK ? print_what_is_seen(name, folder, err) : rc;
    free(folder);
    return rc;
}

static fc_code run(int count, char **arguments, fc_error *err) {
    const char *what = arguments[1], *name = arguments[2];
    uint64_t size;
    size_t aborted = 0;
    if (strcmp(what, "parts") == 0 && count == 7) {
        return send_in_parts(arguments + 2, err);
    }
    if (strcmp(what, "whole") == 0 && count == 5) {
        const int fd = copy_of(arguments[3], &size);
        return fc_upload_whole(name, RUN, fd, size, strcmp(arguments[4], "new") == 0, err);
    }
    if (strcmp(what, "see") == 0 && count == 4) {
        const int fd = copy_of(arguments[3], &size);
        return see(name, fd, size, err);
    }
    if (strcmp(what, "delete") == 0) {
        return fc_upload_delete(name, err);
    }
    if (strcmp(what, "delete-own") == 0) {
        bool left = false;
        const fc_code rc = fc_upload_delete_own(name, RUN, &left, err);
        puts(left ? "left" : "deleted");
        return rc;
    }
    if (strcmp(what, "check") == 0) {
        return fc_upload_check(name, err);
    }
    const fc_code rc = fc_upload_clear(name, strcmp(what, "clear-folder") == 0, &aborted, err);
    printf("%zu\n", aborted);
    return rc;
}

int main(int count, char **arguments) {
    fc_error err = {.code = FC_OK};
    if (count < 3) {
        return 99;
    }
    const fc_code rc = run(count, arguments, &err);
    if (rc != FC_OK) {
        fprintf(stderr, "error: %s%s\n", err.message, err.hint == FC_HINT_FORCE ? " [force]" : "");
    }
    return fc_exit_status(rc);
}
