/*
 * How a forked process prepares to be confined: see child_process.h.
 */
#include "base/child_process.h"

#include "fsdpckpt/order.h"

#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

void fc_child_limit(int what, rlim_t value) {
    struct rlimit old, wanted = {value, value};
    if (getrlimit(what, &old) == 0 && old.rlim_max != RLIM_INFINITY && value > old.rlim_max) {
        wanted.rlim_cur = wanted.rlim_max = old.rlim_max;
    }
    setrlimit(what, &wanted);
}

/* The parent's handlers make no sense here. A crash must end the process with its signal, and the parent handles ^C. */
void fc_child_reset_signals(void) {
    static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGSYS, SIGXCPU, SIGXFSZ, SIGTRAP, SIGALRM};
    static const int ignored[] = {SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGPIPE, SIGUSR1, SIGUSR2};
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) {
        signal(fatal[i], SIG_DFL);
    }
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) {
        signal(ignored[i], SIG_IGN);
    }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static int compare_descriptors(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

static void close_between(int first, int last) {
    if (first > last) {
        return;
    }
    if (close_range((unsigned)first, (unsigned)last, 0) == 0) {
        return;
    }
    long max = sysconf(_SC_OPEN_MAX); /* kernels before 5.9 */
    for (int fd = first; fd <= last && fd < (max > 0 ? max : 65536); fd++) {
        close(fd);
    }
}

bool fc_child_keep_only(int *keep, size_t count) {
    int null = open("/dev/null", O_RDWR);
    if (null < 0) {
        return false;
    }
    for (int fd = 0; fd <= 2; fd++) {
        if (dup2(null, fd) < 0) {
            return false;
        }
    }
    fc_sort_items(keep, count, sizeof *keep, compare_descriptors);
    int next = 3;
    for (size_t i = 0; i < count; i++) {
        close_between(next, keep[i] - 1);
        next = keep[i] + 1;
    }
    close_between(next, INT32_MAX);
    return true;
}
