/*
 * The reader process for HDF5 headers. It may die, hang or send wrong records without harm, and can only read and
 * compute.
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

/* A child that sends the given bytes, in which the parent must find the error. */
static int send_bytes(void *context, int out, fc_h5_shared *shared) {
    const fc_h5_bytes *bytes = context;
    (void)shared;
    return write(out, bytes->data, bytes->size) != (ssize_t)bytes->size;
}

static fc_code decode(const void *data, size_t size, uint64_t file_size) {
    fc_h5_child child;
    fc_h5_bytes bytes = {data, size};
    fc_h5_job job = {.run = send_bytes, .context = &bytes};
    fc_error err = {0};
    fc_h5_file file;
    fc_arena *arena = fc_arena_new();
    assert_int_equal(fc_h5_child_start(&child, &job, &err), FC_OK);
    fc_h5_in in = {.child = &child, .budget = 1 << 20};
    fc_code rc = fc_h5_read_file(&in, arena, "x.h5", file_size, &file, &err);
    fc_h5_in_free(&in);
    fc_h5_child_finish(&child, "x.h5", &err);
    assert_true(fc_arena_size(arena) < 8 << 20);
    fc_arena_free(arena);
    return rc;
}

/* Encodes ROOT, one dataset, one chunk and END into a buffer instead of a pipe. */
static fc_h5_sink encode(const fc_h5_dataset *d, uint64_t offset, uint64_t size, int64_t at) {
    fc_h5_sink out = {.fd = -1};
    fc_h5_root root = {.rank = -1, .world_size = -1, .nmesh = -1};
    fc_h5_put_root(&out, &root);
    fc_h5_put_dataset(&out, d);
    if (d->where == FC_H5_IN_CHUNKS) {
        fc_h5_begin(&out, FC_H5_CHUNKS);
        fc_h5_put_u64(&out, 1);
        fc_h5_put_u64(&out, offset);
        fc_h5_put_u64(&out, size);
        fc_h5_put_u64(&out, 0);
        fc_h5_put_u64(&out, (uint64_t)at);
        fc_h5_end(&out);
    }
    fc_h5_begin(&out, FC_H5_END);
    fc_h5_end(&out);
    return out;
}

static fc_code decode_dataset(const fc_h5_dataset *d, uint64_t offset, uint64_t size, int64_t at) {
    fc_h5_sink out = encode(d, offset, size, at);
    fc_code rc = decode(out.buf, out.used, 1000);
    free(out.buf);
    return rc;
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
    fc_code rc = run_child(attempt_foreign_numbers, NULL, true, &err);
    if (rc != FC_OK && !strstr(err.message, "killed by a signal")) {
        fail_msg("%s", err.message);
    }
#else
    skip();
#endif
}

static void parent_checks_every_record(void **state) {
    static const unsigned char zeros[64];
    const int64_t shape[] = {100}, chunk[] = {10}, huge[] = {INT64_MAX};
    (void)state;
    const fc_h5_dataset good = {.path = "w",
                                .lists = {zeros, 1},
                                .where = FC_H5_AT_OFFSET,
                                .dtype = FC_U8,
                                .element = 1,
                                .ndim = 1,
                                .shape = shape,
                                .offset = 900,
                                .length = 100,
                                .owner = -1,
                                .nglobal_shape = -1,
                                .noffsets = -1};
    fc_h5_dataset d = good;
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_OK);
    d.offset = 901; /* one byte beyond the end */
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    d = good;
    d.offset = UINT64_MAX - 50;
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    d = good;
    d.length = 99;
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    d = good;
    d.element = 2;
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    d = good;
    d.shape = huge;
    d.dtype = FC_F64;
    d.element = 8;
    assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    static const char *const paths[] = {"", "/w", "w/", "a//b", "a/b", "\xff"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        d = good;
        d.path = paths[i];
        assert_int_equal(decode_dataset(&d, 0, 0, 0), FC_ECORRUPT);
    }
    d = good;
    d.where = FC_H5_IN_CHUNKS;
    d.chunk = chunk;
    d.bytes = (fc_h5_bytes){zeros, 1};
    assert_int_equal(decode_dataset(&d, 990, 10, 90), FC_OK);
    assert_int_equal(decode_dataset(&d, 991, 10, 90), FC_ECORRUPT);
    assert_int_equal(decode_dataset(&d, 990, 0, 90), FC_ECORRUPT);
    assert_int_equal(decode_dataset(&d, 990, 10, 91), FC_ECORRUPT);
    assert_int_equal(decode_dataset(&d, 990, 10, 100), FC_ECORRUPT);
    d.nfilters = 2;
    d.filters[0] = d.filters[1] = 1; /* deflate twice: there is no useful limit for its output */
    assert_int_equal(decode_dataset(&d, 990, 10, 90), FC_ECORRUPT);
    d.filters[1] = 4;
    assert_int_equal(decode_dataset(&d, 990, 10, 90), FC_ECORRUPT);
}

/* Every truncation and many random changes of a good stream give a result or an error, never a crash. */
static void any_stream_is_survived(void **state) {
    static const unsigned char zeros[64];
    const int64_t shape[] = {100}, chunk[] = {10};
    const fc_h5_dataset d = {.path = "w",
                             .lists = {zeros, 1},
                             .where = FC_H5_IN_CHUNKS,
                             .dtype = FC_U8,
                             .element = 1,
                             .ndim = 1,
                             .shape = shape,
                             .chunk = chunk,
                             .bytes = {zeros, 1},
                             .owner = -1,
                             .nglobal_shape = -1,
                             .noffsets = -1,
                             .json = "{}"};
    fc_h5_sink out = encode(&d, 990, 10, 90);
    unsigned seed = 1;
    (void)state;
    assert_int_equal(decode(out.buf, out.used, 1000), FC_OK);
    for (size_t n = 0; n < out.used; n += 7) {
        assert_int_equal(decode(out.buf, n, 1000), FC_ECORRUPT);
    }
    unsigned char *copy = malloc(out.used);
    for (int i = 0; i < 300; i++) {
        memcpy(copy, out.buf, out.used);
        seed = seed * 1103515245 + 12345;
        copy[seed / 65536 % out.used] ^= (unsigned char)(1 << seed / 4096 % 8);
        seed = seed * 1103515245 + 12345;
        copy[seed / 65536 % out.used] = (unsigned char)(seed >> 8);
        decode(copy, out.used, 1000);
    }
    free(copy);
    free(out.buf);
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
        cmocka_unit_test(parent_checks_every_record),
        cmocka_unit_test(any_stream_is_survived),
        cmocka_unit_test(json_text_is_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
