/*
 * Checks that all ranks read the same files. Ranks of several machines may each have a copy of the checkpoint. Copies
 * of two steps have the same names, tensors and sizes, so samples of the content are compared. Times and inodes are
 * not, because good copies differ in them.
 */
#include "ranks/exchange.h"

#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "read/open_files.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    /* Spread over a file from its first to its last byte. Most bytes of two steps differ, headers and zip directories
     * are at the ends. */
    SAMPLES = 4,
    SAMPLE_BYTES = 4096,
};

/* The files of a checkpoint while they are sampled. */
typedef struct sampler {
    const fc_checkpoint *source;
    uint64_t *prints; /* one per file */
} sampler;

static fc_code hash_samples(const char *path, int fd, uint64_t size, uint64_t *print, fc_error *err) {
    unsigned char bytes[SAMPLE_BYTES];
    const size_t n = size < sizeof bytes ? (size_t)size : sizeof bytes;
    const int samples = size > n ? SAMPLES : 1;
    *print = XXH3_64bits_withSeed(&size, sizeof size, 0);
    for (int i = 0; i < samples; i++) {
        const uint64_t at = samples == 1 ? 0 : (size - n) / (SAMPLES - 1) * (uint64_t)i;
        FC_TRY(fc_pread_full(fd, bytes, n, i == SAMPLES - 1 ? size - n : at, path, err));
        *print = XXH3_64bits_withSeed(bytes, n, *print);
    }
    return FC_OK;
}

/* Leaves 0 for a derived checkpoint's own path, which is not a file. */
static fc_code sample_file(void *context, size_t index, void *slot, fc_error *err) {
    const sampler *s = context;
    const char *path = s->source->files[index].path;
    struct stat st;
    int fd;
    uint64_t size;
    if (fc_stat(path, &st) != 0 || !S_ISREG(st.st_mode)) {
        return FC_OK;
    }
    FC_TRY(fc_open_input(path, &fd, &size, err));
    fc_code rc = hash_samples(path, fd, size, slot, err);
    close(fd);
    return rc;
}

static fc_code take_print(void *context, size_t index, void *slot, fc_error *err) {
    const sampler *s = context;
    (void)err;
    s->prints[index] = *(const uint64_t *)slot;
    return FC_OK;
}

static void drop_print(void *slot) {
    (void)slot;
}

static fc_code sample_all(const fc_checkpoint *source, uint64_t *prints, fc_error *err) {
    sampler s = {source, prints};
    const fc_file_opener how = {.count = source->nfiles,
                                .slot_size = sizeof *prints,
                                .context = &s,
                                .open = sample_file,
                                .take = take_print,
                                .close = drop_print};
    return fc_open_files(&how, err);
}

/* Compares the prints with those of rank 0. All ranks have the same number of files. */
static fc_code compare_samples(fc_comm *comm, const fc_checkpoint *source, const uint64_t *prints, uint64_t *leader,
                               fc_error *err) {
    FC_TRY(comm->broadcast(comm, leader, source->nfiles * sizeof *leader, 0, err));
    for (size_t i = 0; i < source->nfiles; i++) {
        if (prints[i] != leader[i]) {
            return fc_fail(err, FC_EUSAGE,
                           "%s: this rank does not see the same file as rank 0: put the checkpoint on a shared file "
                           "system, or copy the same step to all machines",
                           source->files[i].path);
        }
    }
    return FC_OK;
}

fc_code fc_ranks_compare_files(fc_comm *comm, const fc_checkpoint *source, fc_error *err) {
    uint64_t *prints = calloc(2 * source->nfiles + 1, sizeof *prints), *leader = prints;
    fc_code mine = prints ? sample_all(source, prints, err) : fc_no_memory(err, source->path);
    fc_code rc;
    FC_TRY_GOTO(fc_ranks_agree(comm, mine, err), rc, out);
    leader += source->nfiles;
    memcpy(leader, prints, source->nfiles * sizeof *prints);
    rc = fc_ranks_agree(comm, compare_samples(comm, source, prints, leader, err), err);
out:
    free(prints);
    return rc;
}
