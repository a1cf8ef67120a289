/*
 * The filter of system calls of the fetcher: see start.h.
 */
#include "net/start.h"

#include "base/child_filter.h"

#include <sys/socket.h>

#ifdef FSDPCKPT_HAVE_SECCOMP
static int allow_socket(scmp_filter_ctx filter, int family) {
    const struct scmp_arg_cmp conditions[] = {
        {0, SCMP_CMP_EQ, (scmp_datum_t)family, 0},
        {1, SCMP_CMP_MASKED_EQ, ~(scmp_datum_t)(SOCK_CLOEXEC | SOCK_NONBLOCK), SOCK_STREAM}};
    return seccomp_rule_add_array(filter, SCMP_ACT_ALLOW, SCMP_SYS(socket), 2, conditions);
}

bool fc_fetcher_confine(void) {
    static const int always[] = {
        SCMP_SYS(read),
        SCMP_SYS(write),
        SCMP_SYS(pread64), /* what is sent, from files that it was handed */
        SCMP_SYS(readv),
        SCMP_SYS(writev),
        SCMP_SYS(recvfrom),
        SCMP_SYS(sendto),
        SCMP_SYS(recvmsg),
        SCMP_SYS(sendmsg),
        SCMP_SYS(sendmmsg),
        SCMP_SYS(connect),
        SCMP_SYS(shutdown),
        SCMP_SYS(getsockopt),
        SCMP_SYS(setsockopt),
        SCMP_SYS(getsockname),
        SCMP_SYS(getpeername),
        SCMP_SYS(poll),
        SCMP_SYS(ppoll),
        SCMP_SYS(epoll_wait),
        SCMP_SYS(epoll_ctl),
        SCMP_SYS(epoll_create1),
        SCMP_SYS(epoll_pwait),
        SCMP_SYS(select),
        SCMP_SYS(pselect6),
        SCMP_SYS(fcntl),
        SCMP_SYS(pipe2),
        SCMP_SYS(eventfd2),
        SCMP_SYS(close),
        SCMP_SYS(fstat),
        SCMP_SYS(lseek),
        SCMP_SYS(brk),
        SCMP_SYS(munmap),
        SCMP_SYS(mremap),
        SCMP_SYS(madvise),
        SCMP_SYS(futex),
        SCMP_SYS(exit_group),
        SCMP_SYS(exit),
        SCMP_SYS(rt_sigreturn),
        SCMP_SYS(rt_sigprocmask),
        SCMP_SYS(rt_sigaction),
        SCMP_SYS(gettimeofday),
        SCMP_SYS(clock_gettime),
        SCMP_SYS(clock_getres),
        SCMP_SYS(nanosleep),
        SCMP_SYS(clock_nanosleep),
        SCMP_SYS(getpid),
        SCMP_SYS(gettid),
        SCMP_SYS(getrandom),
        SCMP_SYS(sched_yield),
        SCMP_SYS(restart_syscall),
        SCMP_SYS(sigaltstack),
    };
    scmp_filter_ctx filter = fc_child_filter_new(always, sizeof always / sizeof *always);
    if (!filter) {
        return false;
    }
    const int rc = allow_socket(filter, AF_INET) | allow_socket(filter, AF_INET6);
    if (rc == 0) {
        /* A kernel or a container without seccomp refuses it: the process and its limits remain. */
        (void)seccomp_load(filter);
    }
    seccomp_release(filter);
    return rc == 0;
}
#else
bool fc_fetcher_confine(void) {
    return true;
}
#endif
