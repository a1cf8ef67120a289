/*
 * Flips bits of a file of a checkpoint, one at a time, and verifies: flip_tool CHECKPOINT FILE FIRST STEP
 * From bit FIRST on every STEP-th is tried. Prints the number of each bit that went unnoticed, then "tried N".
 */
#include "fsdpckpt/verify.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static void ignore(void *context, const fc_defect *defect) {
    (void)context, (void)defect;
}

/* Whether something is found, by opening or by verifying. */
static bool is_noticed(const char *path) {
    fc_checkpoint *checkpoint = NULL;
    fc_verify_report report = {0};
    const fc_verify_options options = {.work = {.threads = 1}};
    fc_error err;
    fc_code rc = fc_checkpoint_open(path, NULL, &checkpoint, &err);
    rc = rc == FC_OK ? fc_verify(checkpoint, &options, ignore, NULL, &report, &err) : rc;
    fc_checkpoint_close(checkpoint);
    return rc != FC_OK || report.defects > 0;
}

static void flip(int fd, uint64_t bit) {
    unsigned char byte;
    if (pread(fd, &byte, 1, (off_t)(bit / 8)) != 1) {
        abort();
    }
    byte ^= (unsigned char)(1u << bit % 8);
    if (pwrite(fd, &byte, 1, (off_t)(bit / 8)) != 1) {
        abort();
    }
}

int main(int argc, char **argv) {
    struct stat st;
    int fd = argc == 5 ? open(argv[2], O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0 || fstat(fd, &st) != 0) {
        fprintf(stderr, "usage: flip_tool CHECKPOINT FILE FIRST STEP\n");
        return 2;
    }
    if (is_noticed(argv[1])) {
        fprintf(stderr, "%s: damaged before any bit is flipped\n", argv[1]);
        return 1;
    }
    const uint64_t bits = 8 * (uint64_t)st.st_size, step = strtoull(argv[4], NULL, 10);
    uint64_t tried = 0;
    for (uint64_t bit = strtoull(argv[3], NULL, 10); bit < bits; bit += step, tried++) {
        flip(fd, bit);
        if (!is_noticed(argv[1])) {
            printf("%" PRIu64 "\n", bit);
        }
        flip(fd, bit);
    }
    printf("tried %" PRIu64 "\n", tried);
    close(fd);
    return 0;
}
