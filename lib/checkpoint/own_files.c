/*
 * Decides which files in a directory are ours, by the names and contents that the formats list.
 */
#include "fsdpckpt/format.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/try.h"

#include <fnmatch.h>

enum { HEAD_SIZE = 4096 };

/* An empty file holds nothing that could be lost. */
static fc_code check_content(const fc_own_file *file, const char *name, int fd, uint64_t size, bool *own,
                             fc_error *err) {
    unsigned char head[HEAD_SIZE];
    const size_t n = size < sizeof head ? (size_t)size : sizeof head;
    FC_TRY(fc_pread_full(fd, head, n, 0, name, err));
    *own = size == 0 || fc_is_content(file->content, head, n);
    return *own && size > 0 && file->is_ours ? file->is_ours(fd, size, name, own, err) : FC_OK;
}

fc_code fc_is_own_file(const char *name, int fd, uint64_t size, bool *own, fc_error *err) {
    *own = false;
    for (const fc_format *const *format = fc_formats(); *format && !*own; format++) {
        for (const fc_own_file *file = (*format)->writer.own_files; file && file->glob && !*own; file++) {
            if (fnmatch(file->glob, name, FNM_PATHNAME) == 0) {
                FC_TRY(check_content(file, name, fd, size, own, err));
            }
        }
    }
    return FC_OK;
}
