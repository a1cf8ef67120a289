/*
 * Forks, limits and confines the reader process, and reports how it died. See child.h.
 */
#include "hdf5/reader_process/child.h"

#include "base/child_filter.h"
#include "base/child_process.h"
#include "fsdpckpt/try.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

enum { CPU_SECONDS = 600, EXTERNAL_FILES = 256, EXIT_NOT_CONFINED = 97, EXIT_NO_MEMORY = 98, MAX_KEEP = 4096 };

/* /dev/null three times, the pipe, the socket, and the descriptor that it receives. */
enum { RECEIVING_FILES = 6 };

static const uint64_t default_memory = UINT64_C(1) << 30;

/* ---- in the child ---- */

/* @return the address space in use, in bytes. The limit must be above it, or nothing could be allocated. */
static uint64_t address_space(void) {
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f) {
        if (fscanf(f, "%llu", &pages) != 1) {
            pages = 0;
        }
        fclose(f);
    }
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void set_limits(const fc_h5_job *job, fc_h5_shared *shared) {
    const uint64_t mostly_used = UINT64_C(4) << 30;
    fc_child_limit(RLIMIT_CORE, 0);
    fc_child_limit(RLIMIT_FSIZE, 0);
    fc_child_limit(RLIMIT_CPU, CPU_SECONDS);
    uint64_t used = SANITIZED ? 0 : address_space(); /* a sanitizer's shadow memory takes terabytes */
    if (used == 0 && !SANITIZED) {
        atomic_fetch_or(&shared->missing, FC_H5_NO_PROC);
        used = mostly_used;
    }
    if (used > 0) {
        fc_child_limit(RLIMIT_AS, (rlim_t)(used + (job->memory ? job->memory : default_memory)));
    }
    fc_child_limit(RLIMIT_NOFILE, job->may_open ? MAX_KEEP + EXTERNAL_FILES : job->receives ? RECEIVING_FILES : 0);
}

bool fc_h5_child_close_others(const fc_h5_job *job, int out) {
    int keep[MAX_KEEP + 1];
    if (job->nkeep > MAX_KEEP) {
        return false;
    }
    if (job->nkeep > 0) {
        memcpy(keep, job->keep, job->nkeep * sizeof *keep);
    }
    keep[job->nkeep] = out;
    return fc_child_keep_only(keep, job->nkeep + 1);
}

#ifdef FSDPCKPT_HAVE_SECCOMP
static bool confine(const fc_h5_job *job, int out, fc_h5_shared *shared) {
    static const int always[] = {
        SCMP_SYS(read),         SCMP_SYS(pread64),       SCMP_SYS(lseek),        SCMP_SYS(brk),
        SCMP_SYS(munmap),       SCMP_SYS(mremap),        SCMP_SYS(madvise),      SCMP_SYS(futex),
        SCMP_SYS(exit_group),   SCMP_SYS(exit),          SCMP_SYS(rt_sigreturn), SCMP_SYS(rt_sigprocmask),
        SCMP_SYS(gettimeofday), SCMP_SYS(clock_gettime), SCMP_SYS(getpid),       SCMP_SYS(gettid),
        SCMP_SYS(close),        SCMP_SYS(getrandom),
    };
    static const int opening[] = {SCMP_SYS(fstat),  SCMP_SYS(stat),   SCMP_SYS(newfstatat),
                                  SCMP_SYS(lstat),  SCMP_SYS(access), SCMP_SYS(readlink),
                                  SCMP_SYS(getcwd), SCMP_SYS(statx),  SCMP_SYS(chdir)};
    scmp_filter_ctx filter = fc_child_filter_new(always, sizeof always / sizeof *always);
    if (!filter) {
        return false;
    }
    int rc =
        fc_child_filter_allow(filter, SCMP_SYS(write), (struct scmp_arg_cmp){0, SCMP_CMP_EQ, (scmp_datum_t)out, 0});
    if (SANITIZED) { /* the sanitizer's runtime calls it before _exit */
        rc |= seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(sigaltstack), 0);
    }
    if (job->receives) {
        const scmp_datum_t socket = (scmp_datum_t)job->keep[0];
        rc |= fc_child_filter_allow(filter, SCMP_SYS(recvmsg), (struct scmp_arg_cmp){0, SCMP_CMP_EQ, socket, 0});
    }
    if (job->may_open) {
        const scmp_datum_t writing = O_ACCMODE | O_CREAT | O_TRUNC;
        for (size_t i = 0; i < sizeof opening / sizeof *opening; i++) {
            rc |= seccomp_rule_add(filter, SCMP_ACT_ALLOW, opening[i], 0);
        }
        rc |= fc_child_filter_allow(filter, SCMP_SYS(openat),
                                    (struct scmp_arg_cmp){2, SCMP_CMP_MASKED_EQ, writing, O_RDONLY});
        rc |= fc_child_filter_allow(filter, SCMP_SYS(open),
                                    (struct scmp_arg_cmp){1, SCMP_CMP_MASKED_EQ, writing, O_RDONLY});
    }
    /*
     * A kernel or a container without seccomp refuses to load it. Then the process, its limits and the parent's checks
     * remain, as in a build without libseccomp.
     */
    if (rc == 0 && seccomp_load(filter) != 0) {
        atomic_fetch_or(&shared->missing, FC_H5_NO_SECCOMP);
    }
    seccomp_release(filter);
    return rc == 0;
}
#else
static bool confine(const fc_h5_job *job, int out, fc_h5_shared *shared) {
    (void)job, (void)out;
    atomic_fetch_or(&shared->missing, FC_H5_NO_SECCOMP);
    return true;
}
#endif

void fc_h5_child_become(const fc_h5_job *job, int out, int memory, pid_t parent) {
    fc_child_reset_signals();
    if (parent != 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    }
    fc_h5_shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if ((parent != 0 && getppid() != parent) || !job->run || shared == MAP_FAILED ||
        !fc_h5_child_close_others(job, out)) {
        _exit(EXIT_NOT_CONFINED);
    }
    if (job->prepare) {
        job->prepare(job->context);
    }
    set_limits(job, shared);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || (!job->not_confined && !confine(job, out, shared))) {
        _exit(EXIT_NOT_CONFINED);
    }
    /* _exit, because the parent's exit handlers must not run twice. */
    _exit(job->run(job->context, out, shared));
}

_Noreturn void fc_h5_child_no_memory(void) {
    _exit(EXIT_NO_MEMORY);
}

void *fc_h5_child_calloc(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size ? size : 1);
    if (!memory) {
        fc_h5_child_no_memory();
    }
    return memory;
}

/* ---- in the parent ---- */

fc_code fc_h5_child_prepare(fc_h5_child *child, const fc_h5_job *job, int *out, int *shared, fc_error *err) {
    static const char cannot[] = "the HDF5 reader process cannot be started";
    int ends[2];
    int memory = memfd_create("fsdpckpt-reader", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, sizeof *child->shared) != 0) {
        int saved = errno;
        if (memory >= 0) {
            close(memory);
        }
        return fc_fail_errno(err, saved, cannot);
    }
    *child = (fc_h5_child){
        .fd = -1, .timeout_ms = job->timeout_ms ? job->timeout_ms : 60000, .spin_ms = job->spin_ms, .shared = NULL};
    void *page = mmap(NULL, sizeof *child->shared, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (page == MAP_FAILED || pipe2(ends, O_CLOEXEC) != 0) {
        int saved = errno;
        if (page != MAP_FAILED) {
            munmap(page, sizeof *child->shared);
        }
        close(memory);
        return fc_fail_errno(err, saved, cannot);
    }
    child->shared = page;
    child->fd = ends[0];
    *out = ends[1];
    *shared = memory;
    return FC_OK;
}

void fc_h5_child_unprepare(fc_h5_child *child) {
    close(child->fd);
    munmap(child->shared, sizeof *child->shared);
}

fc_code fc_h5_child_start(fc_h5_child *child, const fc_h5_job *job, fc_error *err) {
    int out = -1, shared = -1;
    FC_TRY(fc_h5_child_prepare(child, job, &out, &shared, err));
    pid_t self = getpid();
    child->pid = fork();
    if (child->pid == 0) {
        fc_h5_child_become(job, out, shared, self);
    }
    int saved = errno;
    close(out);
    close(shared);
    if (child->pid < 0) {
        fc_h5_child_unprepare(child);
        return fc_fail_errno(err, saved, "the HDF5 reader process cannot be started");
    }
    return FC_OK;
}

int64_t fc_h5_child_processor_ms(const fc_h5_child *child) {
    clockid_t clock;
    struct timespec t;
    if (clock_getcpuclockid(child->pid, &clock) != 0 || clock_gettime(clock, &t) != 0) {
        return 0;
    }
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/*
 * Waits for bytes or the end. @return false if there was no progress for the whole time limit. A child that computes
 * gets less time than one that waits for a slow file system, because libhdf5 takes far less than a second for one step
 * of valid headers.
 */
static bool wait_for_bytes(fc_h5_child *child) {
    int step = child->timeout_ms < 1000 ? child->timeout_ms : 1000, still = 0;
    child->worked_ms = fc_h5_child_processor_ms(child);
    while (still < child->timeout_ms) {
        struct pollfd p = {child->fd, POLLIN, 0};
        int n = poll(&p, 1, step);
        if (n > 0 || (n < 0 && errno != EINTR)) {
            return true;
        }
        int64_t worked = fc_h5_child_processor_ms(child);
        uint64_t beats = atomic_load(&child->shared->beats);
        if (beats != child->beats) {
            still = 0;
            child->worked_ms = worked;
        } else if (child->spin_ms > 0 && worked - child->worked_ms >= child->spin_ms) {
            return false;
        } else {
            still = n == 0 ? still + step : still;
        }
        child->beats = beats;
    }
    return false;
}

size_t fc_h5_child_read(fc_h5_child *child, void *buf, size_t size) {
    for (;;) {
        if (!wait_for_bytes(child)) {
            child->hung = true;
            return 0;
        }
        ssize_t n = read(child->fd, buf, size);
        if (n >= 0) {
            return (size_t)n;
        }
        if (errno != EINTR) {
            return 0;
        }
    }
}

static void copy_where(const fc_h5_shared *shared, char *out, size_t size) {
    size_t n = sizeof shared->where < size ? sizeof shared->where : size;
    memcpy(out, shared->where, n);
    out[n - 1] = '\0';
}

static const char *signal_name(int number) {
    switch (number) {
    case SIGSEGV:
        return "SIGSEGV";
    case SIGBUS:
        return "SIGBUS";
    case SIGABRT:
        return "SIGABRT";
    case SIGFPE:
        return "SIGFPE";
    case SIGILL:
        return "SIGILL";
    case SIGXCPU:
        return "SIGXCPU";
    case SIGKILL:
        return "SIGKILL";
    default:
        return "a signal";
    }
}

static fc_code tell(const fc_h5_child *child, int status, const char *where, const char *path, fc_error *err) {
    if (child->hung) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: corrupt HDF5 file (the reader process was stopped: no progress while reading %s)", path,
                       where);
    }
    if (WIFSIGNALED(status)) {
        return fc_fail(err, FC_ECORRUPT, "%s: corrupt HDF5 file (the reader process was killed by %s while reading %s)",
                       path, signal_name(WTERMSIG(status)), where);
    }
    if (WEXITSTATUS(status) == EXIT_NOT_CONFINED) {
        return fc_fail(err, FC_EIO, "%s: not read, because the HDF5 reader process could not drop its privileges",
                       path);
    }
    if (WEXITSTATUS(status) == EXIT_NO_MEMORY) {
        return fc_no_memory(err, path);
    }
    return fc_fail(err, FC_ECORRUPT,
                   "%s: corrupt HDF5 file (the reader process failed with status %d while reading %s)", path,
                   WEXITSTATUS(status), where);
}

fc_code fc_h5_child_finish(fc_h5_child *child, const char *path, fc_error *err) {
    char where[512];
    int status = 0;
    close(child->fd);
    /*
     * After its last byte a well-behaved child exits at once, and closing the pipe ends one that still writes. Any
     * other is killed. It has not been reaped, so the id is still its own.
     */
    if (child->hung) {
        kill(child->pid, SIGKILL);
    }
    pid_t got;
    int patience = child->timeout_ms / 10 + 1;
    while ((got = waitpid(child->pid, &status, child->hung ? 0 : WNOHANG)) == 0 || (got < 0 && errno == EINTR)) {
        if (patience-- <= 0) {
            child->hung = true;
            kill(child->pid, SIGKILL);
        }
        struct timespec nap = {0, patience > child->timeout_ms / 10 - 20 ? 200000 : 10000000};
        nanosleep(&nap, NULL);
    }
    copy_where(child->shared, where, sizeof where);
    munmap(child->shared, sizeof *child->shared);
    if (got < 0) {
        return FC_OK; /* the program ignores SIGCHLD, so the status is lost; the records show whether they are complete
                       */
    }
    if (!child->hung && WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        return FC_OK;
    }
    return tell(child, status, where[0] ? where : "the file's first bytes", path, err);
}

void fc_h5_child_abandon(fc_h5_child *child) {
    child->hung = true;
    fc_h5_child_finish(child, "", NULL);
}
