/*
 * A virtual file driver of HDF5 that only creates files. libhdf5 writes headers through it; tensor data goes into the
 * same file later, from the engine, at the places that `allocate` gave out.
 */
#include "hdf5/writer/driver.h"

#include "base/grow.h"

#if H5_VERSION_GE(1, 13, 0)
#include <H5FDdevelop.h>
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    HEADER_ALIGN = 8,
    SMALLEST_BLOCK = 2048,
    WINDOW = 64 << 10, /* libhdf5 writes each header by itself, here and there: they leave by the window */
    WINDOWS = 8
};

typedef struct config {
    fc_h5_channel *channel;
    uint64_t headers;
} config;

/* A part of the file in memory, at a multiple of its size; what differs from the file is from `low` to `high`. */
typedef struct window {
    haddr_t at;
    size_t low, high;
    uint64_t last_use; /* 0: holds nothing yet */
    unsigned char bytes[WINDOW];
} window;

typedef struct driver_file {
    H5FD_t pub; /* first: libhdf5 casts */
    fc_h5_channel *channel;
    int fd;
    haddr_t eoa;                     /* end of what has been given out */
    haddr_t eof;                     /* length of the file */
    haddr_t header_next, header_end; /* free part of the block for headers */
    hsize_t block;                   /* size of the next such block */
    haddr_t written_end;             /* nothing beyond it is in the file */
    uint64_t clock;
    window windows[WINDOWS];
} driver_file;

static void record(driver_file *f, const char *doing, haddr_t offset) {
    if (f->channel->errnum == 0) {
        f->channel->errnum = errno;
        f->channel->doing = doing;
        f->channel->offset = offset;
    }
}

static H5FD_t *file_open(const char *name, unsigned flags, hid_t fapl, haddr_t maxaddr) {
    (void)maxaddr;
    const config *c = H5Pget_driver_info(fapl);
    driver_file *f = c ? calloc(1, sizeof *f) : NULL;
    if (!f) {
        return NULL;
    }
    f->channel = c->channel;
    f->block = c->headers < SMALLEST_BLOCK ? SMALLEST_BLOCK : c->headers;
    f->fd = flags & H5F_ACC_CREAT ? open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666) : (errno = EINVAL, -1);
    if (f->fd < 0) {
        record(f, "creating the file", 0);
        free(f);
        return NULL;
    }
    return &f->pub;
}

static void write_through(driver_file *f, const unsigned char *p, size_t size, haddr_t at) {
    while (size > 0 && f->channel->errnum == 0) {
        ssize_t n = pwrite(f->fd, p, size, (off_t)at);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            errno = n == 0 ? ENOSPC : errno;
            record(f, "writing", at);
            return;
        }
        p += n;
        at += (haddr_t)n;
        size -= (size_t)n;
    }
}

static void write_window(driver_file *f, window *w) {
    if (w->high > w->low) {
        write_through(f, w->bytes + w->low, w->high - w->low, w->at + w->low);
        f->written_end = w->at + w->high > f->written_end ? w->at + w->high : f->written_end;
    }
    w->low = WINDOW;
    w->high = 0;
}

static void write_windows(driver_file *f) {
    for (int i = 0; i < WINDOWS; i++) {
        write_window(f, &f->windows[i]);
    }
}

static void read_through(driver_file *f, unsigned char *p, size_t size, haddr_t at) {
    while (size > 0) {
        ssize_t n = pread(f->fd, p, size, (off_t)at);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            record(f, "reading back", at);
        }
        if (n <= 0) {
            memset(p, 0, size); /* past the end: allocated, not yet written */
            return;
        }
        p += n;
        at += (haddr_t)n;
        size -= (size_t)n;
    }
}

/* The window that holds `at`, in place of the one that was not used for longest. */
static window *find_window(driver_file *f, haddr_t at) {
    window *oldest = &f->windows[0];
    at -= at % WINDOW;
    for (int i = 0; i < WINDOWS; i++) {
        window *w = &f->windows[i];
        if (w->last_use > 0 && w->at == at) {
            w->last_use = ++f->clock;
            return w;
        }
        oldest = w->last_use < oldest->last_use ? w : oldest;
    }
    write_window(f, oldest);
    oldest->at = at;
    oldest->last_use = ++f->clock;
    size_t known = f->written_end <= at ? 0 : f->written_end - at < WINDOW ? (size_t)(f->written_end - at) : WINDOW;
    read_through(f, oldest->bytes, known, at);
    memset(oldest->bytes + known, 0, WINDOW - known);
    return oldest;
}

static herr_t file_close(H5FD_t *file) {
    driver_file *f = (driver_file *)file;
    write_windows(f);
    if (close(f->fd) != 0) {
        record(f, "closing the file", 0);
    }
    free(f);
    return 0;
}

static herr_t file_query(const H5FD_t *file, unsigned long *flags) {
    (void)file;
    *flags = H5FD_FEAT_ACCUMULATE_METADATA | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
    return 0;
}

static haddr_t align_up(haddr_t at, haddr_t to) {
    return (at + to - 1) / to * to;
}

/* Notes that a part of the file is for headers. It begins at or behind the end of those noted before, or in the last.
 */
static void note_headers(driver_file *f, haddr_t at, hsize_t size) {
    fc_h5_blocks *b = &f->channel->blocks;
    fc_h5_block *last = b->count > 0 ? &b->items[b->count - 1] : NULL;
    if (last && at <= last->at + last->size) {
        last->size = at + size > last->at + last->size ? at + size - last->at : last->size;
        return;
    }
    if (!fc_grow(&b->items, &b->capacity, b->count + 1, sizeof *b->items)) {
        errno = ENOMEM;
        record(f, "noting the place of headers", at);
        return;
    }
    b->items[b->count++] = (fc_h5_block){at, size};
}

/* Data goes to the end of the file; headers (heaps with strings included) into blocks of their own. */
static haddr_t allocate(H5FD_t *file, H5FD_mem_t type, hid_t dxpl, hsize_t size) {
    (void)dxpl;
    driver_file *f = (driver_file *)file;
    const haddr_t limit = INT64_MAX;
    if ((f->channel->reserving || f->channel->placing) && type == H5FD_MEM_DRAW) {
        haddr_t at = align_up(f->eoa, size >= FC_H5_LARGE ? FC_H5_LARGE_ALIGN : FC_H5_SMALL_ALIGN);
        if (at > limit || size > limit - at) {
            errno = EFBIG;
            record(f, "reserving space", f->eoa);
            return HADDR_UNDEF;
        }
        f->eoa = at + size;
        f->channel->place = at;
        return at;
    }
    size = align_up(size, HEADER_ALIGN);
    if (size > f->header_end - f->header_next) {
        hsize_t block = size > f->block ? size : f->block;
        haddr_t at = f->header_end == f->eoa ? f->header_next : align_up(f->eoa, HEADER_ALIGN);
        if (at > limit || block > limit - at) {
            errno = EFBIG;
            record(f, "reserving space", f->eoa);
            return HADDR_UNDEF;
        }
        note_headers(f, at, block);
        f->header_next = at;
        f->header_end = at + block;
        f->eoa = f->header_end;
        /* The first block should have sufficed; what is still to come is little. */
        f->block = f->block / 8 < SMALLEST_BLOCK ? SMALLEST_BLOCK : f->block / 8;
    }
    haddr_t at = f->header_next;
    f->header_next += size;
    return at;
}

/* Headers that moved while they grew; a few bytes of hole, not worth a list. */
static herr_t release(H5FD_t *file, H5FD_mem_t type, hid_t dxpl, haddr_t at, hsize_t size) {
    (void)file, (void)type, (void)dxpl, (void)at, (void)size;
    return 0;
}

static haddr_t get_eoa(const H5FD_t *file, H5FD_mem_t type) {
    (void)type;
    return ((const driver_file *)file)->eoa;
}

static herr_t set_eoa(H5FD_t *file, H5FD_mem_t type, haddr_t addr) {
    (void)type;
    driver_file *f = (driver_file *)file;
    if (addr > f->eoa) { /* a header at the end of the file grows */
        note_headers(f, f->eoa, addr - f->eoa);
    }
    f->eoa = addr;
    return 0;
}

static haddr_t get_eof(const H5FD_t *file, H5FD_mem_t type) {
    (void)type;
    return ((const driver_file *)file)->eof;
}

static herr_t file_read(H5FD_t *file, H5FD_mem_t type, hid_t dxpl, haddr_t at, size_t size, void *buffer) {
    (void)type, (void)dxpl;
    driver_file *f = (driver_file *)file;
    write_windows(f);
    read_through(f, buffer, size, at);
    return 0;
}

static herr_t file_write(H5FD_t *file, H5FD_mem_t type, hid_t dxpl, haddr_t at, size_t size, const void *buffer) {
    (void)dxpl;
    driver_file *f = (driver_file *)file;
    const unsigned char *p = buffer;
    if (f->channel->placing && type == H5FD_MEM_DRAW && at == f->channel->place) {
        return 0;
    }
    if (f->channel->shared) {
        write_windows(f); /* from before it was shared */
        write_through(f, p, size, at);
        f->eof = at + size > f->eof ? at + size : f->eof;
        return 0;
    }
    while (size > 0) {
        window *w = find_window(f, at);
        size_t low = (size_t)(at - w->at), n = size < WINDOW - low ? size : WINDOW - low;
        memcpy(w->bytes + low, p, n);
        w->low = low < w->low ? low : w->low;
        w->high = low + n > w->high ? low + n : w->high;
        p += n;
        at += n;
        size -= n;
    }
    f->eof = at > f->eof ? at : f->eof;
    return 0;
}

static herr_t file_truncate(H5FD_t *file, hid_t dxpl, hbool_t closing) {
    (void)dxpl, (void)closing;
    driver_file *f = (driver_file *)file;
    write_windows(f);
    if (f->eof != f->eoa || f->channel->shared) { /* shared: others may have made it longer */
        if (f->channel->errnum == 0 && ftruncate(f->fd, (off_t)f->eoa) != 0) {
            record(f, "extending the file", f->eoa);
        }
        f->eof = f->eoa;
    }
    return 0;
}

static const H5FD_class_t driver_class = {
#if H5_VERSION_GE(1, 13, 0)
    .version = H5FD_CLASS_VERSION,
    .value = 599, /* of the range that is not registered with the HDF Group */
#endif
    .name = "fsdpckpt",
    .maxaddr = INT64_MAX,
    .fc_degree = H5F_CLOSE_WEAK,
    .fapl_size = sizeof(config),
    .open = file_open,
    .close = file_close,
    .query = file_query,
    .alloc = allocate,
    .free = release,
    .get_eoa = get_eoa,
    .set_eoa = set_eoa,
    .get_eof = get_eof,
    .read = file_read,
    .write = file_write,
    .truncate = file_truncate,
    .fl_map = {H5FD_MEM_DEFAULT, H5FD_MEM_DEFAULT, H5FD_MEM_DEFAULT, H5FD_MEM_DEFAULT, H5FD_MEM_DEFAULT,
               H5FD_MEM_DEFAULT, H5FD_MEM_DEFAULT},
};

hid_t fc_h5_driver_register(void) {
    return H5FDregister(&driver_class);
}

herr_t fc_h5_driver_use(hid_t fapl, hid_t driver, uint64_t headers, fc_h5_channel *channel) {
    config c = {channel, headers};
    return H5Pset_driver(fapl, driver, &c);
}
