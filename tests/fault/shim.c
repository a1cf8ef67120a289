/*
 * Fault injection by LD_PRELOAD. Fails the n-th call of a family, counted over the whole process (a child starts at 0).
 * The command itself has no hooks for this, and libhdf5's system calls fail like our own.
 *
 *   FAULT_FAMILY=sys|mem|dir|stat  which calls to fail (dir: only those of sys that list directories; stat: those that
 *                             ask whether a file exists, which sys does not fail)
 *   FAULT_AT=n                the number of the call, counted from 1
 *   FAULT_FIRST=1             counts only the first call from each place: from the same functions, up to 8 of them. A
 *                             loop over a thousand tensors is then one place.
 *   FAULT_MOVED=n             instead of FAULT_AT: the first call after n bytes were read and written in all
 *   FAULT_ERRNO=number        the error of the call
 *   FAULT_KILL=1              kills the process instead, as kill -9 does
 *   FAULT_STOP=1              stops the process before the call instead, so that the driver can change its files, and
 *                             lets the call through. A child is not stopped.
 *   FAULT_NO_EXCHANGE=1       renameat2 supports no flags, as on NFS
 *   FAULT_OURS=1              does not count calls of libraries, such as those of MPI
 *   FAULT_LOG=path            an existing file of 64 bytes that gets the name of the failed call. It is mapped at the
 *                             start, so that a child confined by seccomp can still write to it.
 *
 * A program can set this itself, as often as it likes: fault_arm, which also has the family `thread`, pthread_create.
 *
 * mem fails only allocations of the command itself; libhdf5 without memory is not tested. If libhdf5 is linked
 * statically, its functions are recognised by their symbols, which begin with H5.
 */
/* This file defines both names of each call, such as open and open64. */
#undef _FILE_OFFSET_BITS

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long calls, moved;
static long fault_at, fault_moved;
static bool family_mem, family_dir, family_stat, family_thread, kills, stops, no_exchange, only_ours, only_first;
static pid_t first_process;
static int fault_errno = EIO;
static uintptr_t text_begin, text_end;
static char *fault_log;
static const char *failed_call;
static uintptr_t loaded_at;
static const ElfW(Sym) * symbols; /* of the executable, which stays mapped */
static size_t nsymbols;
static const char *symbol_names;

enum { LOG_SIZE = 64 };

static int find_text(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    /* The first object is the executable. */
    loaded_at = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_LOAD && (p->p_flags & PF_X)) {
            text_begin = info->dlpi_addr + p->p_vaddr;
            text_end = text_begin + p->p_memsz;
        }
    }
    return 1;
}

/* Without a symbol table the whole executable counts as ours. */
static void find_symbols(void) {
    struct stat st;
    int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    const char *map =
        fd >= 0 && fstat(fd, &st) == 0 ? mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
    if (fd >= 0) {
        close(fd);
    }
    if (map == MAP_FAILED) {
        return;
    }
    const ElfW(Ehdr) *header = (const void *)map;
    const ElfW(Shdr) *sections = (const void *)(map + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type == SHT_SYMTAB) {
            symbols = (const void *)(map + sections[i].sh_offset);
            nsymbols = sections[i].sh_size / sizeof *symbols;
            symbol_names = map + sections[sections[i].sh_link].sh_offset;
        }
    }
}

static bool is_libhdf5(uintptr_t address) {
    for (size_t i = 0; i < nsymbols; i++) {
        if (address - loaded_at - symbols[i].st_value < symbols[i].st_size) {
            return strncmp(symbol_names + symbols[i].st_name, "H5", 2) == 0;
        }
    }
    return false;
}

__attribute__((constructor)) static void start(void) {
    const char *at = getenv("FAULT_AT"), *bytes = getenv("FAULT_MOVED"), *family = getenv("FAULT_FAMILY"),
               *number = getenv("FAULT_ERRNO");
    dl_iterate_phdr(find_text, NULL);
    find_symbols();
    family_mem = family && strcmp(family, "mem") == 0;
    fault_errno = number ? atoi(number) : EIO;
    family_dir = family && strcmp(family, "dir") == 0;
    family_stat = family && strcmp(family, "stat") == 0;
    kills = getenv("FAULT_KILL") != NULL;
    stops = getenv("FAULT_STOP") != NULL;
    first_process = getpid();
    no_exchange = getenv("FAULT_NO_EXCHANGE") != NULL;
    only_ours = getenv("FAULT_OURS") != NULL;
    only_first = getenv("FAULT_FIRST") != NULL;
    void *frame;
    backtrace(&frame, 1); /* loads what it needs, before there is seccomp */
    const char *path = getenv("FAULT_LOG");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *map = mmap(NULL, LOG_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        fault_log = map == MAP_FAILED ? NULL : map;
        close(fd);
    }
    /* Last, since it arms the faults. */
    fault_moved = bytes ? atol(bytes) : 0;
    fault_at = at ? atol(at) : fault_moved > 0 ? -1 : 0;
}

/* Whether this is the call that fails. */
static bool is_the_one(void) {
    return fault_moved > 0 ? atomic_load(&moved) >= fault_moved : atomic_fetch_add(&calls, 1) + 1 == fault_at;
}

/* Whether no earlier call came from the same place. */
static bool is_first(void) {
    enum { FRAMES = 11, OURS = 3, PLACES = 1 << 16 }; /* the innermost functions are those of this file */
    static _Atomic uint64_t places[PLACES];
    void *frames[FRAMES];
    uint64_t place = 14695981039346656037u;
    const int n = backtrace(frames, FRAMES);
    for (int i = OURS; i < n; i++) {
        place = (place ^ ((uintptr_t)frames[i] - loaded_at)) * 1099511628211u;
    }
    for (uint64_t i = place; n > OURS; i++) {
        uint64_t found = 0;
        if (atomic_compare_exchange_strong(&places[(i ^ i >> 32) % PLACES], &found, place)) {
            return true;
        }
        if (found == place) {
            return false;
        }
    }
    return true;
}

static bool fails(bool mem, const char *name) {
    if (fault_at == 0 || mem != family_mem || (only_first && !is_first()) || !is_the_one()) {
        return false;
    }
    if (stops && getpid() != first_process) {
        return false;
    }
    failed_call = name;
    if (fault_log) {
        strncpy(fault_log, name, LOG_SIZE - 1);
    }
    if (kills) {
        raise(SIGKILL);
    }
    if (stops) {
        raise(SIGSTOP);
        return false;
    }
    errno = mem ? ENOMEM : fault_errno;
    return true;
}

static bool called_by_us(const void *from) {
    return fault_at != 0 && (uintptr_t)from >= text_begin && (uintptr_t)from < text_end && !is_libhdf5((uintptr_t)from);
}

void fault_arm(long at, const char *family, int number);
const char *fault_failed(void);

/* Fails call number `at` from now on. 0: none. */
void fault_arm(long at, const char *family, int number) {
    fault_at = 0;
    family_mem = strcmp(family, "mem") == 0;
    family_thread = strcmp(family, "thread") == 0;
    fault_errno = number;
    failed_call = NULL;
    atomic_store(&calls, 0);
    fault_at = at;
}

/* Returns the name of the call that failed since fault_arm, or NULL. */
const char *fault_failed(void) {
    return failed_call;
}

/* Like fails, for a call that returns to `from`. */
static bool system_call_fails(const char *name, const void *from) {
    return !family_thread && (!only_ours || called_by_us(from)) && fails(false, name);
}

/* Returns whether a call that does not list a directory fails. */
static bool call_fails(const char *name, const void *from) {
    return !family_dir && !family_stat && system_call_fails(name, from);
}

#define REAL(type, name)                                                                                               \
    static __typeof__(type) real;                                                                                      \
    if (!real)                                                                                                         \
    real = (__typeof__(type))dlsym(RTLD_NEXT, name)

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*work)(void *), void *argument) {
    REAL(int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *), "pthread_create");
    return family_thread && fails(false, "pthread_create") ? EAGAIN : real(thread, how, work, argument);
}

int posix_memalign(void **out, size_t align, size_t size) {
    REAL(int (*)(void **, size_t, size_t), "posix_memalign");
    return called_by_us(__builtin_return_address(0)) && fails(true, "posix_memalign") ? ENOMEM : real(out, align, size);
}

void *malloc(size_t size) {
    REAL(void *(*)(size_t), "malloc");
    return called_by_us(__builtin_return_address(0)) && fails(true, "malloc") ? NULL : real(size);
}

void *realloc(void *old, size_t size) {
    REAL(void *(*)(void *, size_t), "realloc");
    return called_by_us(__builtin_return_address(0)) && fails(true, "realloc") ? NULL : real(old, size);
}

/* dlsym calls calloc while we look up calloc. It gets memory that is never freed. */
void *calloc(size_t count, size_t size) {
    static _Alignas(16) char early[4096];
    static size_t used;
    static bool looking;
    static void *(*real)(size_t, size_t);
    if (!real) {
        if (looking) {
            void *p = early + used;
            used += (count * size + 15) / 16 * 16;
            return p;
        }
        looking = true;
        real = (void *(*)(size_t, size_t))dlsym(RTLD_NEXT, "calloc");
    }
    return called_by_us(__builtin_return_address(0)) && fails(true, "calloc") ? NULL : real(count, size);
}

/* Only anonymous mappings are memory; a mapped file is input. */
static bool mapping_fails(int flags, const void *from) {
    return flags & MAP_ANONYMOUS && called_by_us(from) && fails(true, "mmap");
}

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    REAL(void *(*)(void *, size_t, int, int, int, off_t), "mmap");
    return mapping_fails(flags, __builtin_return_address(0)) ? MAP_FAILED
                                                             : real(at, size, protection, flags, fd, offset);
}

void *mmap64(void *at, size_t size, int protection, int flags, int fd, off64_t offset) {
    REAL(void *(*)(void *, size_t, int, int, int, off64_t), "mmap64");
    return mapping_fails(flags, __builtin_return_address(0)) ? MAP_FAILED
                                                             : real(at, size, protection, flags, fd, offset);
}

static mode_t mode_of(int flags, va_list args) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;
}

int open(const char *path, int flags, ...) {
    REAL(int (*)(const char *, int, ...), "open");
    va_list args;
    va_start(args, flags);
    mode_t mode = mode_of(flags, args);
    va_end(args);
    return call_fails("open", __builtin_return_address(0)) ? -1 : real(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    REAL(int (*)(const char *, int, ...), "open64");
    va_list args;
    va_start(args, flags);
    mode_t mode = mode_of(flags, args);
    va_end(args);
    return call_fails("open64", __builtin_return_address(0)) ? -1 : real(path, flags, mode);
}

int openat(int dir, const char *path, int flags, ...) {
    REAL(int (*)(int, const char *, int, ...), "openat");
    va_list args;
    va_start(args, flags);
    mode_t mode = mode_of(flags, args);
    va_end(args);
    return call_fails("openat", __builtin_return_address(0)) ? -1 : real(dir, path, flags, mode);
}

/* NOLINTBEGIN(bugprone-macro-parentheses): the arguments are types and lists */
#define FAULTY(ret, name, params, call)                                                                                \
    ret name params;                                                                                                   \
    ret name params {                                                                                                  \
        REAL(ret(*) params, #name);                                                                                    \
        return call_fails(#name, __builtin_return_address(0)) ? (ret)-1 : real call;                                   \
    }

/* Calls that move bytes. */
#define FAULTY_MOVE(name, params, call)                                                                                \
    ssize_t name params;                                                                                               \
    ssize_t name params {                                                                                              \
        REAL(ssize_t(*) params, #name);                                                                                \
        const ssize_t done = call_fails(#name, __builtin_return_address(0)) ? -1 : real call;                          \
        atomic_fetch_add(&moved, done > 0 ? done : 0);                                                                 \
        return done;                                                                                                   \
    }

FAULTY_MOVE(pread, (int fd, void *buf, size_t n, off_t at), (fd, buf, n, at))
FAULTY_MOVE(pread64, (int fd, void *buf, size_t n, off64_t at), (fd, buf, n, at))
FAULTY_MOVE(read, (int fd, void *buf, size_t n), (fd, buf, n))
FAULTY_MOVE(pwrite, (int fd, const void *buf, size_t n, off_t at), (fd, buf, n, at))
FAULTY_MOVE(pwrite64, (int fd, const void *buf, size_t n, off64_t at), (fd, buf, n, at))
FAULTY(int, fsync, (int fd), (fd))
FAULTY(int, fdatasync, (int fd), (fd))
FAULTY(int, linkat, (int fromdir, const char *from, int todir, const char *to, int flags),
       (fromdir, from, todir, to, flags))
FAULTY(int, ftruncate64, (int fd, off64_t size), (fd, size))
FAULTY(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
FAULTY(int, fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))
FAULTY(int, rename, (const char *from, const char *to), (from, to))
FAULTY(int, renameat, (int fromdir, const char *from, int todir, const char *to), (fromdir, from, todir, to))

int renameat2(int fromdir, const char *from, int todir, const char *to, unsigned flags) {
    REAL(int (*)(int, const char *, int, const char *, unsigned), "renameat2");
    if (call_fails("renameat2", __builtin_return_address(0))) {
        return -1;
    }
    if (no_exchange && flags != 0) {
        errno = EINVAL;
        return -1;
    }
    return real(fromdir, from, todir, to, flags);
}

FAULTY(int, mkdir, (const char *path, mode_t mode), (path, mode))
FAULTY(int, mkdirat, (int dir, const char *path, mode_t mode), (dir, path, mode))
FAULTY(int, flock, (int fd, int operation), (fd, operation))
FAULTY(int, fchmod, (int fd, mode_t mode), (fd, mode))

/* Clean-up calls. Their failure does not change the result of a run, so they are only killed, never failed. */
#define ONLY_KILLED(ret, name, params, call)                                                                           \
    ret name params;                                                                                                   \
    ret name params {                                                                                                  \
        REAL(ret(*) params, #name);                                                                                    \
        return kills && call_fails(#name, __builtin_return_address(0)) ? (ret)-1 : real call;                          \
    }

ONLY_KILLED(int, unlinkat, (int dir, const char *path, int flags), (dir, path, flags))
ONLY_KILLED(int, unlink, (const char *path), (path))
ONLY_KILLED(int, rmdir, (const char *path), (path))

/* Calls that list a directory. */
#define FAULTY_POINTER(ret, name, params, call)                                                                        \
    ret name params {                                                                                                  \
        REAL(ret(*) params, #name);                                                                                    \
        return !family_stat && system_call_fails(#name, __builtin_return_address(0)) ? NULL : real call;               \
    }

FAULTY_POINTER(DIR *, opendir, (const char *path), (path))
FAULTY_POINTER(DIR *, fdopendir, (int fd), (fd))
FAULTY_POINTER(struct dirent *, readdir, (DIR * dir), (dir))
FAULTY_POINTER(struct dirent64 *, readdir64, (DIR * dir), (dir))

/* Calls that ask whether a file exists. */
#define FAULTY_QUESTION(name, params, call)                                                                            \
    int name params;                                                                                                   \
    int name params {                                                                                                  \
        REAL(int(*) params, #name);                                                                                    \
        return family_stat && system_call_fails(#name, __builtin_return_address(0)) ? -1 : real call;                  \
    }

FAULTY_QUESTION(stat, (const char *path, struct stat *st), (path, st))
FAULTY_QUESTION(stat64, (const char *path, struct stat64 *st), (path, st))
FAULTY_QUESTION(lstat64, (const char *path, struct stat64 *st), (path, st))
FAULTY_QUESTION(fstatat64, (int dir, const char *path, struct stat64 *st, int flags), (dir, path, st, flags))
FAULTY_QUESTION(access, (const char *path, int mode), (path, mode))

char *mkdtemp(char *template) {
    REAL(char *(*)(char *), "mkdtemp");
    return call_fails("mkdtemp", __builtin_return_address(0)) ? NULL : real(template);
}

FAULTY(int, pipe2, (int fds[2], int flags), (fds, flags))
FAULTY(pid_t, fork, (void), ())
/* NOLINTEND(bugprone-macro-parentheses) */
