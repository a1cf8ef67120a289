/*
 * The terminal of stderr: see terminal.h. The state is static because there is only one stderr and a signal handler
 * must be able to clear its line.
 */
#include "output/terminal.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { DEFAULT_WIDTH = 80, MAX_WIDTH = 10000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* one writer at a time */
static atomic_bool shown;                                /* the line is on the screen */
static atomic_bool ended;                                /* the line is not shown again */
static atomic_bool drawing;                              /* a thread is writing the line */
static bool colors[STDERR_FILENO + 1];                   /* set before there are threads */

static bool is_variable_set(const char *name) {
    const char *value = getenv(name);
    return value && *value;
}

static bool is_dumb(void) {
    const char *term = getenv("TERM");
    return !term || !*term || strcmp(term, "dumb") == 0;
}

static bool wants_color(color_mode mode, int fd) {
    const char *force = getenv("CLICOLOR_FORCE");
    if (mode != COLOR_AUTO || is_variable_set("NO_COLOR")) { /* https://no-color.org */
        return mode == COLOR_ALWAYS;
    }
    return (force && *force && strcmp(force, "0") != 0) || (isatty(fd) && !is_dumb());
}

void terminal_set_color(color_mode mode) {
    colors[STDOUT_FILENO] = wants_color(mode, STDOUT_FILENO);
    colors[STDERR_FILENO] = wants_color(mode, STDERR_FILENO);
}

bool terminal_has_color(int fd) {
    return (fd == STDOUT_FILENO || fd == STDERR_FILENO) && colors[fd];
}

bool terminal_can_rewrite(void) {
    return isatty(STDERR_FILENO) && !is_dumb();
}

unsigned terminal_width(void) {
    struct winsize size;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
        return size.ws_col;
    }
    const char *columns = getenv("COLUMNS");
    unsigned long n = columns ? strtoul(columns, NULL, 10) : 0;
    return n > 0 && n <= MAX_WIDTH ? (unsigned)n : DEFAULT_WIDTH;
}

/* Errors are ignored: there is nowhere to report that stderr fails. */
static void write_stderr(const char *data, size_t size) {
    while (size > 0) {
        ssize_t n = write(STDERR_FILENO, data, size);
        if (n < 0 && errno != EINTR) {
            return;
        }
        data += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
}

static void erase_line(void) {
    static const char erase[] = "\r\x1b[K";
    if (atomic_exchange(&shown, false)) {
        write_stderr(erase, sizeof erase - 1);
    }
}

void terminal_show_line(const char *line, size_t size) {
    char text[1024];
    static const char start[] = "\r", end[] = "\x1b[K";
    size_t used = sizeof start - 1 + size + sizeof end - 1;
    if (used > sizeof text) {
        return;
    }
    memcpy(text, start, sizeof start - 1);
    memcpy(text + sizeof start - 1, line, size);
    memcpy(text + sizeof start - 1 + size, end, sizeof end - 1);
    pthread_mutex_lock(&lock);
    atomic_store(&drawing, true); /* before `ended` is read: see terminal_interrupt_line */
    if (!atomic_load(&ended)) {
        atomic_store(&shown, true);
        write_stderr(text, used); /* in one write, to avoid flicker */
    }
    atomic_store(&drawing, false);
    pthread_mutex_unlock(&lock);
}

void terminal_end_line(void) {
    pthread_mutex_lock(&lock);
    atomic_store(&ended, true);
    erase_line();
    pthread_mutex_unlock(&lock);
}

/* Either the thread that draws sees `ended`, or this sees it drawing and waits, but not for a terminal that blocks. */
void terminal_interrupt_line(void) {
    enum { MOST_MILLISECONDS = 500 };
    atomic_store(&ended, true);
    for (int i = 0; i < MOST_MILLISECONDS && atomic_load(&drawing); i++) {
        poll(NULL, 0, 1);
    }
    erase_line();
}

void terminal_write_lines(const char *lines, size_t size) {
    pthread_mutex_lock(&lock);
    erase_line();
    write_stderr(lines, size);
    pthread_mutex_unlock(&lock);
}
