/*
 * Counts the processes that a program forks, by LD_PRELOAD, and kills some of them while they compute.
 *
 *   PROCESSES_LOG=path   gets one byte for each process
 *   PROCESSES_KILL=n     kills the first n processes, each after PROCESSES_MS milliseconds of processor time
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

static int number(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

pid_t fork(void) {
    static int count;
    pid_t (*real)(void);
    *(void **)&real = dlsym(RTLD_NEXT, "fork");
    const int log = open(getenv("PROCESSES_LOG"), O_WRONLY | O_APPEND | O_CLOEXEC);
    const ssize_t written = write(log, "x", 1);
    (void)written;
    close(log);
    count++;
    const pid_t pid = real();
    if (pid == 0 && count <= number("PROCESSES_KILL")) {
        const struct itimerval timer = {.it_value = {0, 1000 * number("PROCESSES_MS")}};
        setitimer(ITIMER_PROF, &timer, NULL); /* SIGPROF ends a process */
    }
    return pid;
}
