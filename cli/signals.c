/*
 * Handles SIGINT, SIGTERM and SIGHUP: see signals.h. A signal handler reaches its data only through static variables;
 * these two and those of output/terminal.c are the only mutable ones of the program.
 */
#include "signals.h"

#include "output/terminal.h"

#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

static _Atomic(fc_progress *) running;
static pid_t owner;

static void on_signal(int number) {
    static const char line[] = "fsdpckpt: interrupted\n";
    (void)number;
    fc_progress *progress = atomic_load(&running);
    if (progress) {
        atomic_store(&progress->cancel, true);
        return;
    }
    /* The child that reads HDF5 inherits this handler; only the parent prints. */
    if (getpid() == owner) {
        terminal_interrupt_line();
        ssize_t ignored = write(STDERR_FILENO, line, sizeof line - 1);
        (void)ignored;
    }
    _exit(FC_EINTERRUPTED);
}

void signals_install(void) {
    struct sigaction action, hangup;
    memset(&action, 0, sizeof action);
    owner = getpid();
    sigemptyset(&action.sa_mask);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART | (int)SA_RESETHAND; /* the second signal has its default action and kills */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) { /* ignored: started by nohup */
        sigaction(SIGHUP, &action, NULL);
    }
    action.sa_handler = SIG_IGN; /* a closed pipe is reported by write instead */
    action.sa_flags = 0;
    sigaction(SIGPIPE, &action, NULL);
    sigaction(SIGXFSZ, &action, NULL); /* so is a file beyond ulimit -f */
}

void signals_cancel(fc_progress *progress) {
    atomic_store(&running, progress);
    fc_progress_watch(progress);
}
