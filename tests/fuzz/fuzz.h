/*
 * What the fuzzers of texts share: a file in memory with the input, and names to try rules on.
 */
#pragma once

#include "fsdpckpt/arena.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Puts the input into a file in memory. @return its path. */
static inline const char *fuzz_file(const uint8_t *data, size_t size) {
    static int fd = -1;
    static char path[32];
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size) {
        abort();
    }
    return path;
}

/* Has a shell remove the file or directory when this process ends in any way, also when libFuzzer or a signal kills it.
 */
static inline void fuzz_remove_at_end(const char *path) {
    static FILE *pipe;
    char command[192];
    snprintf(command, sizeof command, "exec setsid sh -c 'cat >/dev/null; rm -rf %s'", path);
    pipe = popen(command, "we");
    if (!pipe) {
        abort();
    }
}

/* Makes the template `name` of a file or directory in memory, if there is a file system in memory. */
static inline void fuzz_place(char path[64], const char *name) {
    snprintf(path, 64, "%s/%s", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", name);
}

static const char *const fuzz_names[] = {"model.layers.0.attention.wq.weight",
                                         "layers.10.mlp.gate_proj.weight",
                                         "layers.10.mlp.gate_proj.bias",
                                         "embed_tokens.weight",
                                         "lm_head.weight",
                                         "transformer.h.3.attn.c_attn.weight",
                                         "layers.2.mlp.experts.gate_up_proj",
                                         "norm.weight",
                                         "optim.state.layers.0.w1.weight.exp_avg",
                                         "a"};
enum { FUZZ_NAMES = sizeof fuzz_names / sizeof *fuzz_names };
