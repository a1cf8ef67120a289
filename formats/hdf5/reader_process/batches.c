/*
 * Runs the reader processes over the files of a checkpoint. libhdf5 needs about 50 µs per dataset, so several processes
 * read ahead while the records of the first one are taken, always in the order of the files. Files that one process
 * reads anyway are read by the process that the command shares, if it has one (server.c).
 */
#include "hdf5/reader.h"

#include "fsdpckpt/try.h"
#include "hdf5/reader_process/lend.h"
#include "hdf5/reader_process/scan.h"
#include "hdf5/reader_process/server.h"
#include "hdf5/reader_process/take.h"
#include "io/file.h"

#include <fcntl.h>
#include <unistd.h>

enum { FILES_PER_CHILD = 64, CHILDREN = 8 };

/* A reader process and its files. */
typedef struct batch {
    fc_h5_child child;
    fc_h5_scan scan;
    fc_h5_input inputs[FILES_PER_CHILD];
    uint64_t sizes[FILES_PER_CHILD];
    int files[FILES_PER_CHILD]; /* of those on a server, which are open as long as the process; else -1 */
    fc_h5_loan loans[FILES_PER_CHILD];
    size_t first, count;
} batch;

/* Opens the next file. */
static fc_code add_input(batch *b, const char *path, const fc_h5_span *span, fc_error *err) {
    const size_t i = b->count;
    fc_h5_input *input = &b->inputs[i];
    uint64_t size;
    int fd;
    FC_TRY(fc_open_input(path, &fd, &size, err));
    *input = (fc_h5_input){.path = path, .span = *span};
    const fc_code rc = fc_h5_loan_begin(&b->loans[i], path, fd, size, &input->fd, err);
    if (rc != FC_OK) {
        close(fd);
        return rc;
    }
    input->lent = b->loans[i].to >= 0 ? size : 0;
    b->files[i] = input->fd == fd ? -1 : fd;
    b->sizes[i] = span->length ? span->length : size;
    b->count++;
    return FC_OK;
}

/* Closes what is left of the files. */
static void close_files(batch *b) {
    for (size_t i = 0; i < b->count; i++) {
        fc_h5_loan_end(&b->loans[i]);
        if (b->files[i] >= 0) {
            close(b->files[i]);
        }
    }
    b->count = 0;
}

static fc_code start_batch(batch *b, const char *const *paths, size_t first, size_t count, const fc_h5_span *span,
                           bool follow, const char *plugins, fc_error *err) {
    int keep[FILES_PER_CHILD];
    fc_code rc = FC_OK;
    b->first = first;
    b->count = 0;
    for (size_t i = 0; i < count; i++) {
        FC_TRY_GOTO(add_input(b, paths[first + i], span, err), rc, out);
        keep[i] = b->inputs[i].fd;
    }
    b->scan = (fc_h5_scan){.inputs = b->inputs, .ninputs = b->count, .follow_external = follow, .plugins = plugins};
    fc_h5_job job = {.prepare = fc_h5_scan_prepare,
                     .run = fc_h5_scan_run,
                     .context = &b->scan,
                     .keep = keep,
                     .nkeep = b->count,
                     .spin_ms = 5000,
                     .may_open = follow};
    FC_TRY_GOTO(fc_h5_child_start(&b->child, &job, err), rc, out);
    fcntl(b->child.fd, F_SETPIPE_SZ, FC_H5_PIPE_SIZE); /* limits how far it reads ahead; 64 KiB if this is refused */
out:
    for (size_t i = 0; i < b->count; i++) {
        close(b->inputs[i].fd); /* the process has it */
    }
    if (rc != FC_OK) {
        close_files(b);
    }
    return rc;
}

/* Takes the records of a batch's process, and ends it. */
static fc_code take_batch(batch *b, fc_arena *arena, fc_h5_visit visit, void *context, fc_error *err) {
    fc_h5_in in = {.child = &b->child};
    fc_error local, *reason = err ? err : &local;
    fc_code rc = FC_OK;
    bool broken = false;
    const char *path = b->inputs[0].path;
    for (size_t i = 0; rc == FC_OK && i < b->count; i++) {
        fc_h5_file file;
        path = b->inputs[i].path;
        rc = fc_h5_take_file(&in, arena, path, b->sizes[i], &b->loans[i], &file, &broken, reason);
        rc = rc == FC_OK ? visit(context, b->first + i, &file, reason) : rc;
    }
    close_files(b);
    return fc_h5_end_taking(&in, path, rc, broken, err);
}

const char *fc_h5_missing_note(unsigned missing) {
    static const char *const notes[] = {NULL,
                                        "seccomp is not available: only resource limits and the checks of what it "
                                        "reports confine the process that reads "
                                        "HDF5 headers",
                                        "/proc is not available: the process that reads HDF5 headers may use 5 GiB of "
                                        "address space instead of 1 GiB more "
                                        "than this one",
                                        "seccomp and /proc are not available: only resource limits, with 5 GiB of "
                                        "address space, and the checks of what it "
                                        "reports confine the process that reads HDF5 headers"};
    return notes[missing & (FC_H5_NO_SECCOMP | FC_H5_NO_PROC)];
}

static size_t processors(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > CHILDREN ? CHILDREN : (size_t)n;
}

/*
 * Divides the files evenly, but with at least 200 datasets per process (about 10 ms; starting one takes 2 ms), and at
 * most 2000, whose records fit into its pipe.
 */
static size_t files_per_child(size_t count, size_t datasets, size_t processes) {
    size_t share = (count + processes - 1) / processes, least = 200 / (datasets + 1) + 1;
    size_t most = 2000 / (datasets + 1) + 1;
    most = most < FILES_PER_CHILD ? most : FILES_PER_CHILD;
    share = share > least ? share : least;
    return share < most ? share : most;
}

static const fc_h5_span whole = {0, 0};

/* Reads the files from number `from` on in processes of their own. */
static fc_code scan_apart(fc_arena *arena, const char *const *paths, size_t from, size_t count, const fc_h5_span *span,
                          size_t datasets, bool follow_external, const char *plugins, fc_h5_visit visit, void *context,
                          fc_error *err) {
    size_t ahead = processors(), per_child = files_per_child(count, datasets, ahead), started = 0, taken = 0;
    size_t next = from;
    fc_code rc = FC_OK;
    batch *ring = fc_arena_calloc(arena, ahead, sizeof *ring);
    FC_NEED(ring, err, paths[0]);
    while (taken < started || next < count) {
        while (next < count && started - taken < ahead) {
            size_t n = count - next < per_child ? count - next : per_child;
            FC_TRY_GOTO(start_batch(&ring[started % ahead], paths, next, n, span, follow_external, plugins, err), rc,
                        out);
            started++;
            next += n;
        }
        FC_TRY_GOTO(take_batch(&ring[taken++ % ahead], arena, visit, context, err), rc, out);
    }
out:
    for (; taken < started; taken++) { /* after a failure */
        close_files(&ring[taken % ahead]);
        fc_h5_child_abandon(&ring[taken % ahead].child);
    }
    return rc;
}

fc_code fc_h5_scan_files(fc_arena *arena, const char *const *paths, size_t count, size_t datasets, bool follow_external,
                         fc_h5_visit visit, void *context, fc_error *err) {
    return scan_apart(arena, paths, 0, count, &whole, datasets, follow_external, NULL, visit, context, err);
}

/* Reads a file in the process that a command has for all of them. `*available`: whether there is one. */
static fc_code scan_by_server(fc_h5_server *server, fc_arena *arena, const char *path, const fc_h5_span *span,
                              bool follow_external, fc_h5_file *file, bool *available, fc_error *err) {
    fc_h5_given given = {.path = path, .follow_external = follow_external, .span = *span};
    FC_TRY(fc_open_input(path, &given.fd, &given.file_size, err));
    given.size = span->length ? span->length : given.file_size;
    const fc_code rc = fc_h5_server_read(server, &given, arena, file, available, err);
    close(given.fd);
    return rc;
}

static fc_code scan_by(fc_h5_server *server, fc_arena *arena, const char *const *paths, size_t count,
                       const fc_h5_span *span, size_t datasets, bool follow_external, fc_h5_visit visit, void *context,
                       fc_error *err) {
    bool available = server && count <= files_per_child(count, datasets, processors());
    fc_error local, *reason = err ? err : &local;
    size_t done = 0;
    while (available && done < count) {
        fc_h5_file file;
        FC_TRY(scan_by_server(server, arena, paths[done], span, follow_external, &file, &available, reason));
        if (available) {
            FC_TRY(visit(context, done++, &file, reason));
        }
    }
    return done == count ? FC_OK
                         : scan_apart(arena, paths, done, count, span, datasets, follow_external,
                                      fc_h5_server_plugins(server), visit, context, err);
}

fc_code fc_h5_scan_files_by(fc_h5_server *server, fc_arena *arena, const char *const *paths, size_t count,
                            size_t datasets, bool follow_external, fc_h5_visit visit, void *context, fc_error *err) {
    return scan_by(server, arena, paths, count, &whole, datasets, follow_external, visit, context, err);
}

fc_code fc_h5_scan_span(fc_h5_server *server, fc_arena *arena, const char *path, const fc_h5_span *span,
                        bool follow_external, fc_h5_visit visit, void *context, fc_error *err) {
    return scan_by(server, arena, &path, 1, span, 0, follow_external, visit, context, err);
}
