/*
 * The reader process for HDF5 headers. It may die or hang without harm, and can only read and compute.
 */
#include "base/text.h"
#include "hdf5/reader_process/records.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { NO_LIMIT_MS = 24 * 3600 * 1000 };

static int crash(void *context, int out, fc_h5_shared *shared) {
    (void)context, (void)out;
    strcpy(shared->where, "dataset /a\nb");
    raise(SIGSEGV);
    return 0;
}

static int hang(void *context, int out, fc_h5_shared *shared) {
    (void)context, (void)out;
    strcpy(shared->where, "group /g");
    for (int i = 0; i < 1000; i++) {
        pause();
    }
    return 0;
}

static int spin(void *context, int out, fc_h5_shared *shared) {
    volatile uint64_t n = 0;
    (void)context, (void)out;
    strcpy(shared->where, "the superblock");
    while (n < UINT64_MAX) {
        n++;
    }
    return 0;
}

static int refuse(void *context, int out, fc_h5_shared *shared) {
    (void)context, (void)out;
    memset(shared->where, 'x', sizeof shared->where); /* without a final NUL */
    return 7;
}

static int flood(void *context, int out, fc_h5_shared *shared) {
    static char junk[4096];
    (void)context, (void)shared;
    while (write(out, junk, sizeof junk) > 0) {
    }
    return 3;
}

/* Counts the forbidden calls that succeed. */
static int try_everything(void *context, int out, fc_h5_shared *shared) {
    int done = 0;
    (void)out, (void)shared;
    done += open("/etc/passwd", O_RDONLY) >= 0;
    done += open("/tmp/test_h5_reader-never", O_WRONLY | O_CREAT, 0600) >= 0;
    done += socket(AF_INET, SOCK_STREAM, 0) >= 0;
    done += fork() > 0;
    done += kill(getppid(), 0) == 0;
    done += write(*(int *)context, "x", 1) == 1;
    done += unlink("/tmp/test_h5_reader-never") == 0;
    return done;
}

#if defined(FSDPCKPT_HAVE_SECCOMP) && defined(__x86_64__)
/* A system call that the reader process must not make. The parent's process number stands for PARENT. */
typedef struct attempt {
    const char *name;
    long number;
    long arguments[6];
} attempt;

enum { PARENT = -4711 };
static char nowhere[] = "/tmp/test_h5_child-never", password[] = "/etc/passwd", false_command[] = "/bin/false";
static char *const no_arguments[] = {false_command, NULL};
static char room[64];
static struct iovec pieces[] = {{room, sizeof room}};

#define ADDRESS(x) ((long)(uintptr_t)(x))

static const attempt attempts[] = {
    /* files */
    {"open", SYS_open, {ADDRESS(password), O_RDONLY}},
    {"openat", SYS_openat, {AT_FDCWD, ADDRESS(password), O_RDONLY}},
    {"openat for writing", SYS_openat, {AT_FDCWD, ADDRESS(nowhere), O_WRONLY | O_CREAT, 0600}},
    {"openat2", SYS_openat2, {AT_FDCWD, ADDRESS(password), ADDRESS(room), 24}},
    {"creat", SYS_creat, {ADDRESS(nowhere), 0600}},
    {"memfd_create", SYS_memfd_create, {ADDRESS(nowhere), 0}},
    {"mkdir", SYS_mkdir, {ADDRESS(nowhere), 0700}},
    {"symlink", SYS_symlink, {ADDRESS(password), ADDRESS(nowhere)}},
    {"link", SYS_link, {ADDRESS(false_command), ADDRESS(nowhere)}},
    {"rename", SYS_rename, {ADDRESS(nowhere), ADDRESS(nowhere)}},
    {"unlink", SYS_unlink, {ADDRESS(nowhere)}},
    {"chmod", SYS_chmod, {ADDRESS(nowhere), 0}},
    {"ftruncate", SYS_ftruncate, {0, 0}},
    {"pwrite64 to another descriptor", SYS_pwrite64, {0, ADDRESS(room), 1, 0}},
    {"writev to another descriptor", SYS_writev, {0, ADDRESS(pieces), 1}},
    {"sendfile", SYS_sendfile, {0, 0, 0, 1}},
    {"fcntl", SYS_fcntl, {0, F_DUPFD, 3}},
    {"dup", SYS_dup, {0}},
    {"ioctl", SYS_ioctl, {0, 0x5412, ADDRESS(room)}}, /* TIOCSTI */
    {"getdents64", SYS_getdents64, {0, ADDRESS(room), sizeof room}},
    {"mount", SYS_mount, {ADDRESS(nowhere), ADDRESS(nowhere), 0, 0, 0}},
    {"chroot", SYS_chroot, {ADDRESS(nowhere)}},
    /* network */
    {"socket", SYS_socket, {AF_INET, SOCK_STREAM, 0}},
    {"socket of this machine", SYS_socket, {AF_UNIX, SOCK_STREAM, 0}},
    {"socketpair", SYS_socketpair, {AF_UNIX, SOCK_STREAM, 0, ADDRESS(room)}},
    {"connect", SYS_connect, {0, ADDRESS(room), 16}},
    {"bind", SYS_bind, {0, ADDRESS(room), 16}},
    {"sendto", SYS_sendto, {0, ADDRESS(room), 1, 0, 0, 0}},
    {"recvfrom", SYS_recvfrom, {0, ADDRESS(room), 1, 0, 0, 0}},
    {"recvmsg", SYS_recvmsg, {0, ADDRESS(room), 0}},
    /* programs and processes */
    {"execve", SYS_execve, {ADDRESS(false_command), ADDRESS(no_arguments), 0}},
    {"execveat", SYS_execveat, {AT_FDCWD, ADDRESS(false_command), ADDRESS(no_arguments), 0, 0}},
    {"fork", SYS_fork, {0}},
    {"vfork", SYS_vfork, {0}},
    {"clone", SYS_clone, {SIGCHLD, 0, 0, 0, 0}},
    {"clone3", SYS_clone3, {ADDRESS(room), 64}},
    {"unshare", SYS_unshare, {0}},
    {"setns", SYS_setns, {0, 0}},
    {"personality", SYS_personality, {0xffffffff}},
    {"setuid", SYS_setuid, {0}},
    /* other processes */
    {"ptrace of the parent", SYS_ptrace, {PTRACE_SEIZE, PARENT, 0, 0}},
    {"ptrace by the parent", SYS_ptrace, {PTRACE_TRACEME, 0, 0, 0}},
    {"process_vm_readv", SYS_process_vm_readv, {PARENT, ADDRESS(pieces), 1, ADDRESS(pieces), 1, 0}},
    {"process_vm_writev", SYS_process_vm_writev, {PARENT, ADDRESS(pieces), 1, ADDRESS(pieces), 1, 0}},
    {"kill", SYS_kill, {PARENT, 0}},
    {"tkill", SYS_tkill, {PARENT, 0}},
    {"tgkill", SYS_tgkill, {PARENT, PARENT, 0}},
    {"rt_sigqueueinfo", SYS_rt_sigqueueinfo, {PARENT, SIGCONT, ADDRESS(room)}},
    {"pidfd_open", SYS_pidfd_open, {PARENT, 0}},
    {"pidfd_send_signal", SYS_pidfd_send_signal, {0, SIGCONT, 0, 0}},
    {"prlimit64", SYS_prlimit64, {PARENT, RLIMIT_CORE, 0, ADDRESS(room)}},
    {"setpriority", SYS_setpriority, {0, PARENT, 19}},
    {"rt_sigaction", SYS_rt_sigaction, {SIGUSR1, 0, ADDRESS(room), 8}},
    {"prctl", SYS_prctl, {PR_GET_DUMPABLE}},
    /* code, and doors into the kernel */
    {"mmap of code", SYS_mmap, {0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0}},
    {"mprotect to code", SYS_mprotect, {0, 4096, PROT_READ | PROT_EXEC}},
    {"pkey_mprotect", SYS_pkey_mprotect, {0, 4096, PROT_EXEC, -1}},
    {"io_uring_setup", SYS_io_uring_setup, {1, ADDRESS(room)}},
    {"bpf", SYS_bpf, {0, ADDRESS(room), sizeof room}},
    {"perf_event_open", SYS_perf_event_open, {ADDRESS(room), 0, -1, -1, 0}},
    {"userfaultfd", SYS_userfaultfd, {0}},
    {"keyctl", SYS_keyctl, {0, 0, 0, 0, 0}},
    {"add_key", SYS_add_key, {ADDRESS(nowhere), ADDRESS(nowhere), 0, 0, 0}},
    {"shmget", SYS_shmget, {0, 4096, 0600 | IPC_CREAT}},
    {"reboot", SYS_reboot, {0, 0, 0, 0}},
    {"seccomp", SYS_seccomp, {0, 0, 0}},
};

/* Makes the calls one by one. Stops at one that is not refused by the filter, with its name in `where`. */
static int attempt_all(void *context, int out, fc_h5_shared *shared) {
    const long parent = *(const pid_t *)context;
    (void)out;
    for (size_t i = 0; i < sizeof attempts / sizeof *attempts; i++) {
        long a[6];
        for (int k = 0; k < 6; k++) {
            a[k] = attempts[i].arguments[k] == PARENT ? parent : attempts[i].arguments[k];
        }
        snprintf(shared->where, sizeof shared->where, "%s", attempts[i].name);
        errno = 0;
        if (syscall(attempts[i].number, a[0], a[1], a[2], a[3], a[4], a[5]) != -1 || errno != EPERM) {
            return 9;
        }
    }
    return 0;
}

/* Like attempt_all, but may receive on the socket that it has. It cannot send there. */
static int attempt_all_but_receiving(void *context, int out, fc_h5_shared *shared) {
    const int socket = *(const int *)context;
    pid_t parent = getppid();
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 1};
    char extra;
    snprintf(shared->where, sizeof shared->where, "receiving");
    if (recvmsg(socket, &message, 0) != 1 || room[0] != 'x') {
        return 9;
    }
    snprintf(shared->where, sizeof shared->where, "other calls on the socket");
    if (sendmsg(socket, &message, 0) != -1 || recv(socket, &extra, 1, MSG_DONTWAIT) != -1 || errno != EPERM ||
        write(socket, "x", 1) != -1) {
        return 9;
    }
    return attempt_all(&parent, out, shared);
}

/* Calls that get around the filter by the numbers of other machines end the process. */
static int attempt_foreign_numbers(void *context, int out, fc_h5_shared *shared) {
    (void)context, (void)out, (void)shared;
    return syscall(0x40000000 | SYS_getpid) == -1 ? 0 : 9; /* x32 */
}
#endif

/* Runs `run` in the reader process and returns the parent's error. */
static fc_code run_child(int (*run)(void *, int, fc_h5_shared *), void *context, bool read_it, fc_error *err) {
    fc_h5_child child;
    char buf[64];
    fc_h5_job job = {.run = run,
                     .context = context,
                     .timeout_ms = run == hang ? 5000 : NO_LIMIT_MS,
                     .not_confined = run == hang || run == crash};
    assert_int_equal(fc_h5_child_start(&child, &job, err), FC_OK);
    while (read_it && fc_h5_child_read(&child, buf, sizeof buf) > 0) {
    }
    fc_code rc = fc_h5_child_finish(&child, "x.h5", err);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    return rc;
}

static void reader_process_may_die(void **state) {
    fc_error err = {0};
    (void)state;
    assert_int_equal(run_child(crash, NULL, true, &err), FC_ECORRUPT);
    assert_string_equal(
        err.message, "x.h5: corrupt HDF5 file (the reader process was killed by SIGSEGV while reading dataset /a?b)");
    assert_int_equal(run_child(hang, NULL, true, &err), FC_ECORRUPT);
    assert_string_equal(err.message,
                        "x.h5: corrupt HDF5 file (the reader process was stopped: no progress while reading group /g)");
    assert_int_equal(run_child(refuse, NULL, true, &err), FC_ECORRUPT);
    assert_non_null(strstr(err.message, "failed with status 7 while reading xxx"));
    assert_int_equal(run_child(flood, NULL, false, &err), FC_ECORRUPT); /* its write fails when nobody reads */
    assert_non_null(strstr(err.message, "failed with status 3"));
}

/* An endless computation is stopped by its limit of processor time. The other time limit is for slow file systems, and
   is so long here that the test would hang. */
static void spinning_reader_is_stopped(void **state) {
    fc_h5_child child;
    char buf[64];
    fc_error err = {0};
    fc_h5_job job = {.run = spin, .timeout_ms = NO_LIMIT_MS, .spin_ms = 50, .not_confined = true};
    (void)state;
    assert_int_equal(fc_h5_child_start(&child, &job, &err), FC_OK);
    assert_int_equal(fc_h5_child_read(&child, buf, sizeof buf), 0);
    assert_int_equal(fc_h5_child_finish(&child, "x.h5", &err), FC_ECORRUPT);
    assert_string_equal(
        err.message,
        "x.h5: corrupt HDF5 file (the reader process was stopped: no progress while reading the superblock)");
}

static void reader_process_is_confined(void **state) {
#ifdef FSDPCKPT_HAVE_SECCOMP
    fc_error err = {0};
    int fd = open("/dev/null", O_WRONLY);
    (void)state;
    if (run_child(try_everything, &fd, true, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    close(fd);
#else
    (void)state, (void)try_everything;
    skip();
#endif
}

static void every_forbidden_call_is_stopped(void **state) {
    (void)state;
#if defined(FSDPCKPT_HAVE_SECCOMP) && defined(__x86_64__)
    fc_error err = {FC_OK, ""};
    pid_t self = getpid();
    if (run_child(attempt_all, &self, true, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(access(nowhere, F_OK), -1);
    int ends[2];
    fc_h5_child child;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    const fc_h5_job receiving = {
        .run = attempt_all_but_receiving, .context = &ends[1], .keep = &ends[1], .nkeep = 1, .receives = true};
    assert_int_equal(send(ends[0], "x", 1, 0), 1);
    assert_int_equal(fc_h5_child_start(&child, &receiving, &err), FC_OK);
    if (fc_h5_child_finish(&child, "x.h5", &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    close(ends[0]);
    close(ends[1]);
    fc_code rc = run_child(attempt_foreign_numbers, NULL, true, &err);
    if (rc != FC_OK && !strstr(err.message, "killed by a signal")) {
        fail_msg("%s", err.message);
    }
#else
    skip();
#endif
}

/* ---- text ---- */

static void json_text_is_checked(void **state) {
    static const char *const good[] = {"null", " [1, -2.5e+3, 0, true] ", "{\"a\": {\"b\": []}}", "\"\\u00e9\\n\"",
                                       "123456789012345678901234567890"};
    static const char *const bad[] = {"",      "[1,]",  "{\"a\" 1}", "01",     "1.",       "nul",   "\"a",
                                      "[1 2]", "{1:2}", "\"\\x\"",   "\"\t\"", "\"\xff\"", "[] []", "-"};
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_true(fc_is_json(good[i], strlen(good[i])));
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_false(fc_is_json(bad[i], strlen(bad[i])));
    }
    char *deep = malloc(100001);
    memset(deep, '[', 100000);
    assert_false(fc_is_json(deep, 100000));
    free(deep);
    fc_text t = {0};
    fc_text_string(&t, "a\"\\\x01\xc3\xa9", 6);
    fc_text_string(&t, "\xc0\x80", 2);
    fc_text_nul(&t);
    assert_string_equal(t.data, "\"a\\\"\\\\\\u0001\xc3\xa9\"{\"$bytes\": \"wIA=\"}");
    fc_text_free(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reader_process_may_die),
        cmocka_unit_test(spinning_reader_is_stopped),
        cmocka_unit_test(every_forbidden_call_is_stopped),
        cmocka_unit_test(reader_process_is_confined),
        cmocka_unit_test(json_text_is_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
