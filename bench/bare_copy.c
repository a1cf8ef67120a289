/*
 * The limit of the machine, as a peer of bench/run. Several threads copy the files of a directory into one file, in
 * tiles of 1 MiB, with direct writes and a sync at the end. A conversion that takes longer than this spends the rest in
 * our code; the time of the copy is that of the disk and the kernel.
 *
 *   bare_copy warm|cold SOURCE TARGET [THREADS]     cold: also reads past the page cache
 *   bare_copy write SOURCE TARGET [THREADS]         writes as many bytes without reading
 */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TILE = 1 << 20, BLOCK = 4096, MOST_FILES = 4096, MOST_THREADS = 64, THREADS = 8 };

typedef struct input {
    int fd;
    off_t size, at; /* in bytes; `at` is the offset of its tiles in the target */
} input;

typedef struct job {
    input inputs[MOST_FILES];
    int ninputs;
    int target;
    bool reads;
    off_t tiles;
    _Atomic off_t next;
    atomic_bool failed;
} job;

static bool open_inputs(job *j, const char *path, int flags) {
    DIR *dir = opendir(path);
    if (!dir) {
        return false;
    }
    for (struct dirent *e; (e = readdir(dir)) != NULL && j->ninputs < MOST_FILES;) {
        struct stat st;
        int fd = e->d_name[0] == '.' ? -1 : openat(dirfd(dir), e->d_name, O_RDONLY | O_CLOEXEC | flags);
        if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
            j->inputs[j->ninputs++] = (input){fd, st.st_size, j->tiles * TILE};
            j->tiles += (st.st_size + TILE - 1) / TILE;
        }
    }
    closedir(dir);
    return j->ninputs > 0;
}

/* Copies one tile, rounded up to a block. The rest of the last block has arbitrary bytes. */
static bool copy_tile(const job *j, off_t tile, char *buffer) {
    int i = 0;
    while (i + 1 < j->ninputs && j->inputs[i + 1].at <= tile * TILE) {
        i++;
    }
    off_t from = tile * TILE - j->inputs[i].at;
    size_t size = j->inputs[i].size - from < TILE ? (size_t)(j->inputs[i].size - from) : TILE;
    if (j->reads && pread(j->inputs[i].fd, buffer, TILE, from) < (ssize_t)size) {
        return false;
    }
    size = (size + BLOCK - 1) / BLOCK * BLOCK;
    return pwrite(j->target, buffer, size, tile * TILE) == (ssize_t)size;
}

static void *work(void *context) {
    job *j = context;
    void *buffer = NULL;
    if (posix_memalign(&buffer, BLOCK, TILE) != 0) {
        j->failed = true;
        return NULL;
    }
    memset(buffer, 1, TILE);
    for (off_t tile; !j->failed && (tile = atomic_fetch_add(&j->next, 1)) < j->tiles;) {
        if (!copy_tile(j, tile, buffer)) {
            j->failed = true;
        }
    }
    free(buffer);
    return NULL;
}

int main(int argc, char **argv) {
    static job j;
    pthread_t threads[MOST_THREADS];
    if (argc < 4) {
        fputs("usage: bare_copy warm|cold|write SOURCE TARGET [THREADS]\n", stderr);
        return 2;
    }
    int n = argc > 4 ? atoi(argv[4]) : THREADS, started = 0;
    n = n < 1 ? 1 : n > MOST_THREADS ? MOST_THREADS : n;
    j.reads = strcmp(argv[1], "write") != 0;
    j.target = open(argv[3], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_DIRECT, 0666);
    if (j.target < 0 || !open_inputs(&j, argv[2], strcmp(argv[1], "cold") == 0 ? O_DIRECT : 0) ||
        posix_fallocate(j.target, 0, j.tiles * TILE) != 0) {
        perror("bare_copy");
        return 1;
    }
    while (started < n && pthread_create(&threads[started], NULL, work, &j) == 0) {
        started++;
    }
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    if (started == 0 || j.failed || fsync(j.target) != 0) {
        perror("bare_copy");
        return 1;
    }
    return 0;
}
