/*
 * Starts the fetcher: see start.h. A process has one, as it has one file system: names alone say what is read. This is
 * the first exception to "no global mutable state" (docs/ARCHITECTURE.md, decisions).
 */
#include "net/start.h"

#include "base/child_process.h"
#include "base/module_file.h"
#include "fsdpckpt/try.h"
#include "module_places.h"
#include "net/setup.h"
#include "net/shared.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { EXIT_NOT_STARTED = 97, CORE = 0 };

static struct {
    pthread_once_t once;
    pthread_mutex_t lock;
    fc_fetcher fetcher; /* without a module: not started */
} own = {.once = PTHREAD_ONCE_INIT, .lock = PTHREAD_MUTEX_INITIALIZER};

/* A fork in another thread waits until the fetcher has been started: its child would inherit the lock, and a library
   that is being loaded. */
static _Thread_local bool starts;

static void before_fork(void) {
    if (!starts) {
        pthread_mutex_lock(&own.lock);
    }
}

static void after_fork(void) {
    if (!starts) {
        pthread_mutex_unlock(&own.lock);
    }
}

static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork, after_fork);
}

static bool fits(const fc_module_file *file, const void *table) {
    const fc_net_module *module = table;
    (void)file;
    return module->abi == FC_NET_ABI && strcmp(module->version, FSDPCKPT_VERSION) == 0;
}

static fc_code load(const fc_net_module **out, fc_error *err) {
    static const fc_module_file file = {.name = "reading from servers",
                                        .stem = "net",
                                        .is_built = FSDPCKPT_HAVE_CURL,
                                        .library = "libcurl (Debian: libcurl4-openssl-dev)",
                                        .instead = "download the files first",
                                        .symbol = FC_NET_SYMBOL_NAME,
                                        .fits = fits};
    const void *table = NULL;
    fc_code rc = fc_module_file_load(&file, &table, err);
    *out = table;
    return rc;
}

/* A target in a bucket has a socket for each of its files. */
static void raise_files(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static void __attribute__((noreturn))
become(const fc_net_module *module, int requests, unsigned char *shared, size_t shared_size) {
    fc_net_setup setup;
    fc_net_setup_read(&setup); /* before files cannot be opened any more */
    setup.shared = shared;
    setup.shared_size = shared_size;
    fc_child_reset_signals();
    if (!fc_child_keep_only(&requests, 1)) {
        _exit(EXIT_NOT_STARTED);
    }
    void *state = module->prepare(&setup, requests);
    fc_child_limit(RLIMIT_CORE, CORE);
    fc_child_limit(RLIMIT_FSIZE, 0);
    raise_files();
    if (!state || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || !fc_fetcher_confine()) {
        _exit(EXIT_NOT_STARTED);
    }
    _exit(module->serve(state)); /* not exit: the handlers are those of the parent */
}

/* The fetcher is a grandchild, so that this process, which may wait for children of its own, never sees it end. It ends
   when the last copy of the other end of its socket is closed. */
static fc_code start(const fc_net_module *module, int *out, fc_error *err) {
    static const char cannot[] = "the process that talks to servers cannot be started";
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        return fc_fail_errno(err, errno, cannot);
    }
    size_t shared_size;
    unsigned char *shared = fc_shared_make(&shared_size);
    const pid_t pid = fork();
    if (pid == 0) {
        const pid_t inner = fork();
        if (inner != 0) {
            _exit(inner < 0 ? EXIT_NOT_STARTED : 0);
        }
        become(module, ends[1], shared, shared_size);
    }
    const int saved = errno;
    close(ends[1]);
    int status = 0;
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (pid < 0 || status != 0) {
        close(ends[0]);
        return pid < 0 ? fc_fail_errno(err, saved, cannot) : fc_fail(err, FC_EIO, cannot);
    }
    *out = ends[0];
    return FC_OK;
}

fc_code fc_fetcher_get(fc_fetcher *out, fc_error *err) {
    const fc_net_module *module = NULL;
    fc_code rc = FC_OK;
    pthread_once(&own.once, watch_forks);
    pthread_mutex_lock(&own.lock);
    if (!own.fetcher.module) {
        starts = true;
        rc = load(&module, err);
        rc = rc == FC_OK ? start(module, &own.fetcher.requests, err) : rc;
        own.fetcher.module = rc == FC_OK ? module : NULL;
        starts = false;
    }
    *out = own.fetcher;
    pthread_mutex_unlock(&own.lock);
    return rc;
}
