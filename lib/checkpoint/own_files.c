/*
 * Decides which files in a directory are ours, by the names and contents that the formats list.
 */
#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"

#include <fnmatch.h>

enum { HEAD_SIZE = 4096 };

/* An empty file holds nothing that could be lost. */
static bool has_own_content(const fc_own_file *file, int fd, uint64_t size) {
    unsigned char head[HEAD_SIZE];
    const size_t n = size < sizeof head ? (size_t)size : sizeof head;
    return size == 0 || (fc_pread_full(fd, head, n, 0, "", NULL) == FC_OK && fc_is_content(file->content, head, n) &&
                         (!file->is_ours || file->is_ours(fd, size)));
}

bool fc_is_own_file(const char *name, int fd, uint64_t size) {
    bool own = false;
    for (const fc_format *const *format = fc_formats(); *format && !own; format++) {
        for (const fc_own_file *file = (*format)->writer.own_files; file && file->glob && !own; file++) {
            own = fnmatch(file->glob, name, FNM_PATHNAME) == 0 && has_own_content(file, fd, size);
        }
    }
    return own;
}
