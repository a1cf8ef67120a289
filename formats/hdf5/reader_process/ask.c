/*
 * Asks the parent for bytes of a file on a server, and keeps those of headers. See ask.h.
 *
 * Each question may become a request to the server. libhdf5 reads a header in several small pieces, and comes back to
 * the same place for the next one. So small reads are rounded to blocks, and blocks are kept.
 */
#include "hdf5/reader_process/ask.h"

#include "fsdpckpt/order.h"
#include "hdf5/reader_process/child.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    BLOCK = 64 << 10,     /* the least that is asked for, and its alignment, in bytes */
    MOST_BLOCK = 1 << 20, /* the most, where headers are next to each other */
    MOST_KEPT = 64 << 20, /* bytes of all blocks */
    MOST_BLOCKS = MOST_KEPT / BLOCK
};

typedef struct block {
    uint64_t at;
    size_t size;
    unsigned char *bytes;
} block;

struct fc_h5_asking {
    fc_h5_sink *out;
    int fd;
    uint64_t size;
    block blocks[MOST_BLOCKS]; /* a ring: the oldest makes room */
    size_t oldest, count, kept;
    size_t ahead; /* bytes that were asked for ahead */
};

fc_h5_asking *fc_h5_asking_new(fc_h5_sink *out, int fd, uint64_t size) {
    fc_h5_asking *asking = fc_h5_child_calloc(1, sizeof *asking);
    asking->out = out;
    asking->fd = fd;
    asking->size = size;
    return asking;
}

static void drop_oldest(fc_h5_asking *a) {
    block *b = &a->blocks[a->oldest];
    free(b->bytes);
    a->kept -= b->size;
    a->oldest = (a->oldest + 1) % MOST_BLOCKS;
    a->count--;
}

void fc_h5_asking_free(fc_h5_asking *asking) {
    while (asking && asking->count > 0) {
        drop_oldest(asking);
    }
    free(asking);
}

/* Takes the answer. The parent shuts the socket down if it cannot read the bytes. */
static bool take(int fd, unsigned char *bytes, size_t size) {
    while (size > 0) {
        const ssize_t n = read(fd, bytes, size);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        bytes += n;
        size -= (size_t)n;
    }
    return true;
}

static bool ask(const fc_h5_asking *a, uint64_t at, size_t size, unsigned char *bytes) {
    while (size > 0) {
        const size_t some = size < FC_H5_MOST_LENT ? size : FC_H5_MOST_LENT;
        fc_h5_put_want(a->out, &(fc_h5_part){at, some}, 1);
        if (a->out->failed || !take(a->fd, bytes, some)) {
            return false;
        }
        at += some;
        bytes += some;
        size -= some;
    }
    return true;
}

static const block *find(const fc_h5_asking *a, uint64_t at) {
    for (size_t i = 0; i < a->count; i++) {
        const block *b = &a->blocks[(a->oldest + i) % MOST_BLOCKS];
        if (at >= b->at && at - b->at < b->size) {
            return b;
        }
    }
    return NULL;
}

/* The size of a new block. If the one before it is known, headers are read in a row, and it is twice as large. */
static size_t size_of_next(const fc_h5_asking *a, uint64_t at) {
    const block *before = at > 0 ? find(a, at - 1) : NULL;
    const size_t more = before ? 2 * before->size : BLOCK;
    const size_t wanted = more < MOST_BLOCK ? more : MOST_BLOCK;
    return wanted < a->size - at ? wanted : (size_t)(a->size - at);
}

/* Adds a block without its bytes. It is the newest. */
static block *add_block(fc_h5_asking *a, uint64_t start, size_t size) {
    while (a->count == MOST_BLOCKS || (a->count > 0 && a->kept + size > MOST_KEPT)) {
        drop_oldest(a);
    }
    block *b = &a->blocks[(a->oldest + a->count) % MOST_BLOCKS];
    *b = (block){start, size, fc_h5_child_calloc(1, size)};
    a->count++;
    a->kept += size;
    return b;
}

static void drop_newest(fc_h5_asking *a) {
    a->count--;
    const block *b = &a->blocks[(a->oldest + a->count) % MOST_BLOCKS];
    a->kept -= b->size;
    free(b->bytes);
}

/* Asks for a block that contains `at`. @return NULL if it cannot be read */
static const block *fetch(fc_h5_asking *a, uint64_t at) {
    const uint64_t start = at - at % BLOCK;
    const block *b = add_block(a, start, size_of_next(a, start));
    if (ask(a, start, b->size, b->bytes)) {
        return b;
    }
    drop_newest(a);
    return NULL;
}

bool fc_h5_ask(fc_h5_asking *asking, uint64_t at, size_t size, unsigned char *bytes) {
    if (size > BLOCK) {
        return ask(asking, at, size, bytes); /* data */
    }
    while (size > 0) {
        const block *b = find(asking, at);
        b = b ? b : fetch(asking, at);
        if (!b) {
            return false;
        }
        const size_t left = b->size - (size_t)(at - b->at), some = left < size ? left : size;
        memcpy(bytes, b->bytes + (at - b->at), some);
        at += some;
        bytes += some;
        size -= some;
    }
    return true;
}

static int compare_places(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Makes parts of the blocks that are not known; neighbours become one. @return their number */
static size_t parts_of(const fc_h5_asking *a, const uint64_t *places, size_t count, fc_h5_part *parts) {
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        const uint64_t start = places[i] - places[i] % BLOCK;
        fc_h5_part *last = n > 0 ? &parts[n - 1] : NULL;
        if (places[i] >= a->size || (last && start < last->at + last->size) || find(a, places[i])) {
            continue;
        }
        const uint64_t size = a->size - start < BLOCK ? a->size - start : BLOCK;
        if (last && start == last->at + last->size && last->size < MOST_BLOCK) {
            last->size += size;
        } else {
            parts[n++] = (fc_h5_part){start, size};
        }
    }
    return n;
}

bool fc_h5_ask_ahead(fc_h5_asking *asking, uint64_t *places, size_t count) {
    fc_h5_part parts[FC_H5_MOST_PARTS];
    fc_sort_items(places, count, sizeof *places, compare_places);
    const size_t n = parts_of(asking, places, count, parts);
    if (n < 2) {
        return true; /* it is asked for when it is read */
    }
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        total += (size_t)parts[i].size;
    }
    if (total > MOST_KEPT / 2 - asking->ahead) {
        return false;
    }
    asking->ahead += total;
    fc_h5_put_want(asking->out, parts, n);
    for (size_t i = 0; i < n && !asking->out->failed; i++) {
        block *b = add_block(asking, parts[i].at, (size_t)parts[i].size);
        if (!take(asking->fd, b->bytes, b->size)) {
            drop_newest(asking);
            return false; /* reading it will fail, too */
        }
    }
    return true;
}
