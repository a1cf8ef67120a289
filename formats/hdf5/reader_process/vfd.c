/*
 * The file driver of the reader process. See vfd.h.
 */
#include "hdf5/reader_process/vfd.h"

#include "base/checked.h"
#include "hdf5/reader_process/ask.h"
#include "hdf5/reader_process/child.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/*
 * Headers are read in blocks of 50 bytes to 4 KiB. For an index of a thousand tensors, a window saves two thousand
 * system calls. Names, links and headers of datasets are in different places of a file, and are read in turn, so there
 * are several windows.
 */
enum { WINDOW = 64 << 10, WINDOWS = 8 };

typedef struct vfd_window {
    haddr_t at; /* it contains `filled` bytes of the file from this address on */
    size_t filled;
    unsigned char *bytes; /* NULL until it is used */
} vfd_window;

typedef struct vfd_file {
    H5FD_t pub; /* must be the first member, because libhdf5 sees only this */
    const fc_h5_source *source;
    int fd;
    bool close_fd;
    haddr_t eoa, eof;
    dev_t device;
    ino_t inode;
    vfd_window windows[WINDOWS];
    size_t oldest; /* the window that is filled next */
} vfd_file;

typedef struct vfd_info {
    const fc_h5_source *source;
} vfd_info;

static int open_other(const fc_h5_source *source, const char *name, struct stat *st) {
    if (!source->may_open) {
        return -1;
    }
    /* With O_NONBLOCK, opening a FIFO does not hang. */
    int fd = open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0 && (fstat(fd, st) != 0 || !S_ISREG(st->st_mode))) {
        close(fd);
        fd = -1;
    }
    if (fd >= 0) {
        fc_h5_note_other(source->capture->others, name);
    }
    return fd;
}

static H5FD_t *vfd_open(const char *name, unsigned flags, hid_t fapl, haddr_t maxaddr) {
    const vfd_info *info = H5Pget_driver_info(fapl);
    (void)maxaddr;
    if (!info || (flags & (H5F_ACC_RDWR | H5F_ACC_CREAT | H5F_ACC_TRUNC))) {
        return NULL;
    }
    const fc_h5_source *source = info->source;
    bool other = strcmp(name, source->path) != 0;
    struct stat st = *source->st;
    int fd = other ? open_other(source, name, &st) : source->fd;
    vfd_file *file = fd >= 0 ? fc_h5_child_calloc(1, sizeof *file) : NULL;
    if (!file) {
        if (other && fd >= 0) {
            close(fd);
        }
        return NULL;
    }
    file->source = source;
    file->fd = fd;
    file->close_fd = other;
    file->eof = (haddr_t)st.st_size;
    file->device = st.st_dev;
    file->inode = st.st_ino;
    return &file->pub;
}

/* Files that libhdf5 opens on its own (external links, virtual sources) use the same driver. */
static void *vfd_fapl_get(H5FD_t *pub) {
    vfd_info *info = fc_h5_child_calloc(1, sizeof *info);
    info->source = ((vfd_file *)pub)->source;
    return info;
}

static void *vfd_fapl_copy(const void *fapl) {
    vfd_info *info = fc_h5_child_calloc(1, sizeof *info);
    *info = *(const vfd_info *)fapl;
    return info;
}

static herr_t vfd_fapl_free(void *fapl) {
    free(fapl);
    return 0;
}

static herr_t vfd_close(H5FD_t *pub) {
    vfd_file *file = (vfd_file *)pub;
    if (file->close_fd) {
        close(file->fd);
    }
    for (size_t i = 0; i < WINDOWS; i++) {
        free(file->windows[i].bytes);
    }
    free(file);
    return 0;
}

static int vfd_cmp(const H5FD_t *a, const H5FD_t *b) {
    const vfd_file *x = (const vfd_file *)a, *y = (const vfd_file *)b;
    if (x->device != y->device) {
        return x->device < y->device ? -1 : 1;
    }
    return (x->inode > y->inode) - (x->inode < y->inode);
}

static herr_t vfd_query(const H5FD_t *pub, unsigned long *flags) {
    (void)pub;
    *flags = H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
    return 0;
}

static haddr_t vfd_get_eoa(const H5FD_t *pub, H5FD_mem_t type) {
    (void)type;
    return ((const vfd_file *)pub)->eoa;
}

static herr_t vfd_set_eoa(H5FD_t *pub, H5FD_mem_t type, haddr_t address) {
    (void)type;
    ((vfd_file *)pub)->eoa = address;
    return 0;
}

static haddr_t vfd_get_eof(const H5FD_t *pub, H5FD_mem_t type) {
    (void)type;
    return ((const vfd_file *)pub)->eof;
}

/* Reads `size` bytes, which must be within the file. */
static bool read_bytes(const fc_h5_source *source, int fd, haddr_t address, size_t size, unsigned char *at) {
    fc_h5_capture *capture = source->capture;
    if (source->asking) { /* then other files are not opened */
        if (!fc_h5_ask(source->asking, address, size, at)) {
            capture->errnum = EIO;
            return false;
        }
        return true;
    }
    while (size > 0) {
        ssize_t n = pread(fd, at, size, (off_t)address);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            capture->errnum = n < 0 ? errno : EIO;
            return false;
        }
        at += n;
        address += (haddr_t)n;
        size -= (size_t)n;
    }
    return true;
}

static bool read_range(const vfd_file *file, haddr_t address, size_t size, unsigned char *at) {
    const uint64_t base = file->close_fd ? 0 : file->source->base;
    return read_bytes(file->source, file->fd, base + address, size, at);
}

bool fc_h5_vfd_read(const fc_h5_source *source, uint64_t at, size_t size, unsigned char *bytes) {
    return fc_range_within(at, size, (uint64_t)source->st->st_size) &&
           read_bytes(source, source->fd, source->base + at, size, bytes);
}

/* Puts the patches into bytes that were read. */
static void patch(const vfd_file *file, haddr_t address, size_t size, unsigned char *bytes) {
    const fc_h5_patches *p = file->source->patches;
    for (size_t i = 0; p && !file->close_fd && i < p->count; i++) {
        for (uint32_t k = 0; k < p->items[i].size; k++) {
            const uint64_t at = p->items[i].at + k;
            if (at >= address && at - address < size) {
                bytes[at - address] = p->items[i].bytes[k];
            }
        }
    }
}

/* @return the window that contains the bytes; NULL if none does. */
static const vfd_window *find_window(const vfd_file *file, haddr_t address, size_t size) {
    for (size_t i = 0; i < WINDOWS; i++) {
        const vfd_window *w = &file->windows[i];
        if (w->filled > 0 && address >= w->at && address - w->at <= w->filled &&
            size <= w->filled - (size_t)(address - w->at)) {
            return w;
        }
    }
    return NULL;
}

/* Fills the oldest window with the bytes from `address` on, and those before it in its aligned block if both fit.
 * @return it; NULL if they cannot be read. */
static const vfd_window *fill_window(vfd_file *file, haddr_t address, size_t size) {
    vfd_window *w = &file->windows[file->oldest];
    const haddr_t aligned = address - address % WINDOW;
    const haddr_t start = address - aligned + size <= WINDOW ? aligned : address;
    const haddr_t left = file->eof - start;
    const size_t wanted = left < WINDOW ? (size_t)left : WINDOW;
    if (!w->bytes) {
        w->bytes = fc_h5_child_calloc(1, WINDOW);
    }
    w->filled = 0;
    if (!read_range(file, start, wanted, w->bytes)) {
        return NULL;
    }
    w->at = start;
    w->filled = wanted;
    file->oldest = (file->oldest + 1) % WINDOWS;
    return w;
}

/*
 * Reads headers through the windows. Global heaps, which libhdf5 treats as raw data, are read through them only if they
 * already contain them.
 */
static bool read_some(vfd_file *file, H5FD_mem_t type, haddr_t address, size_t size, unsigned char *out) {
    const vfd_window *w = find_window(file, address, size);
    if (!w) {
        if (type == H5FD_MEM_DRAW || size > WINDOW) {
            return read_range(file, address, size, out);
        }
        w = fill_window(file, address, size);
    }
    if (w) {
        memcpy(out, w->bytes + (address - w->at), size);
    }
    return w != NULL;
}

static herr_t vfd_read(H5FD_t *pub, H5FD_mem_t type, hid_t dxpl, haddr_t address, size_t size, void *buffer) {
    vfd_file *file = (vfd_file *)pub;
    fc_h5_capture *capture = file->source->capture;
    (void)dxpl;
    if (capture->armed && type == H5FD_MEM_DRAW) {
        capture->hit = true;
        capture->address = address;
        capture->size = size;
        return 0;
    }
    /* A read past the end means damage; it must not give zeros. */
    bool good = address <= file->eof && size <= file->eof - address && read_some(file, type, address, size, buffer);
    if (good && type != H5FD_MEM_DRAW) {
        patch(file, address, size, buffer);
    }
    capture->failed |= !good;
    return good ? 0 : -1;
}

/* libhdf5 requires a write function. */
static herr_t vfd_write(H5FD_t *pub, H5FD_mem_t type, hid_t dxpl, haddr_t address, size_t size, const void *buffer) {
    (void)pub, (void)type, (void)dxpl, (void)address, (void)size, (void)buffer;
    return -1;
}

static const H5FD_class_t vfd_class = {
#if H5_VERSION_GE(1, 13, 0)
    .version = H5FD_CLASS_VERSION,
    .value = (H5FD_class_value_t)513, /* 512 and above are free for private use */
#endif
    .name = "fsdpckpt",
    .maxaddr = ((haddr_t)1 << 63) - 1,
    .fc_degree = H5F_CLOSE_STRONG,
    .fapl_size = sizeof(vfd_info),
    .fapl_get = vfd_fapl_get,
    .fapl_copy = vfd_fapl_copy,
    .fapl_free = vfd_fapl_free,
    .open = vfd_open,
    .close = vfd_close,
    .cmp = vfd_cmp,
    .query = vfd_query,
    .get_eoa = vfd_get_eoa,
    .set_eoa = vfd_set_eoa,
    .get_eof = vfd_get_eof,
    .read = vfd_read,
    .write = vfd_write,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

hid_t fc_h5_vfd_register(void) {
    return H5FDregister(&vfd_class);
}

hid_t fc_h5_vfd_fapl(hid_t driver, const fc_h5_source *source) {
    vfd_info info = {source};
    hid_t fapl = H5Pcreate(H5P_FILE_ACCESS);
    /*
     * Evicts the headers of closed datasets, because nothing is read twice. libhdf5 would keep 3 KB for each mapping of
     * a virtual dataset, and zeroing that memory takes a third of the time of opening an index of a thousand of them.
     */
    if (fapl >= 0 && (H5Pset_driver(fapl, driver, &info) < 0 || H5Pset_evict_on_close(fapl, true) < 0)) {
        H5Pclose(fapl);
        return H5I_INVALID_HID;
    }
    return fapl;
}
