/*
 * Reads past the page cache: turns runs of any length and offset into direct reads of the blocks around them. It first
 * asks the kernel which of them are cached, so that a warm file is still copied from memory.
 */
#include "io/input.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

fc_code fc_input_open(fc_input *input, const char *path, fc_error *err) {
    uint64_t size;
    *input = (fc_input){path, -1, sysconf(_SC_PAGESIZE) > FC_INPUT_BLOCK};
    return fc_open_input(path, &input->fd, &size, err);
}

void fc_input_close(fc_input *input) {
    if (input->fd >= 0) {
        close(input->fd);
    }
    input->fd = -1;
}

void fc_input_expect(const fc_input *input, uint64_t size, uint64_t offset) {
    fc_pread_expect(input->fd, input->path, size, offset);
}

/* cachestat(2) of Linux 6.5, not yet in the C library's headers. The number is the same on all architectures but alpha.
 */
enum { CACHESTAT = 451 };
struct cache_range {
    uint64_t offset, length;
};
struct cache_pages {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

/* Whether to read the bytes past the page cache: they are many, and less than half of them are cached. */
static bool better_direct(fc_input *input, size_t size, uint64_t offset) {
    struct cache_range range = {offset, size};
    struct cache_pages pages = {0};
    if (size < FC_INPUT_DIRECT_LEAST || input->cache_only) {
        return false;
    }
    if (syscall(CACHESTAT, input->fd, &range, &pages, 0) != 0) {
        input->cache_only = true; /* an older kernel, or a file of another user */
        return false;
    }
    return pages.cached < size / FC_INPUT_BLOCK / 2;
}

/* Reads blocks past the cache. @return the number of bytes read, which is less than `size` at the end of the file, or
   if the file system refuses. The caller reads the rest through the cache and reports its errors. */
static size_t read_direct(fc_input *input, unsigned char *out, size_t size, uint64_t offset) {
    int flags = fcntl(input->fd, F_GETFL);
    size_t done = 0;
    if (flags < 0 || fcntl(input->fd, F_SETFL, flags | O_DIRECT) != 0) {
        input->cache_only = true;
        return 0;
    }
    while (done < size && done % FC_INPUT_BLOCK == 0) {
        ssize_t n = pread(input->fd, out + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        input->cache_only |= n < 0;
        if (n <= 0) {
            break;
        }
        done += (size_t)n;
    }
    input->cache_only |= fcntl(input->fd, F_SETFL, flags) != 0;
    return done;
}

static size_t round_up(size_t size) {
    return (size + FC_INPUT_BLOCK - 1) / FC_INPUT_BLOCK * FC_INPUT_BLOCK;
}

/* Reads the blocks around the bytes into `buffer`. @return how many of the bytes were read. */
static size_t read_around(fc_input *input, unsigned char *buffer, size_t size, uint64_t offset) {
    size_t lead = (size_t)(offset % FC_INPUT_BLOCK);
    size_t end = read_direct(input, buffer, round_up(lead + size), offset - lead);
    return end < lead ? 0 : end - lead < size ? end - lead : size;
}

fc_code fc_input_read_near(fc_input *input, unsigned char *buffer, size_t size, uint64_t offset,
                           const unsigned char **bytes, fc_error *err) {
    unsigned char *to = buffer + offset % FC_INPUT_BLOCK;
    size_t done = better_direct(input, size, offset) ? read_around(input, buffer, size, offset) : 0;
    *bytes = to;
    return done == size ? FC_OK : fc_pread_full(input->fd, to + done, size - done, offset + done, input->path, err);
}

fc_code fc_input_read(fc_input *input, unsigned char *out, size_t size, uint64_t offset, unsigned char *window,
                      size_t window_size, fc_error *err) {
    size_t done = 0;
    bool direct = better_direct(input, size, offset);
    if (direct && (uintptr_t)out % FC_INPUT_BLOCK == 0 && offset % FC_INPUT_BLOCK == 0) {
        done = read_direct(input, out, size / FC_INPUT_BLOCK * FC_INPUT_BLOCK, offset);
    }
    while (direct && !input->cache_only && size - done >= FC_INPUT_DIRECT_LEAST) {
        size_t length = size - done < window_size ? size - done : window_size;
        size_t n = read_around(input, window, length, offset + done);
        memcpy(out + done, window + (offset + done) % FC_INPUT_BLOCK, n);
        done += n;
        if (n < length) {
            break;
        }
    }
    return done == size ? FC_OK : fc_pread_full(input->fd, out + done, size - done, offset + done, input->path, err);
}
