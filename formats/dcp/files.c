/*
 * The data files of a DCP checkpoint: their table, the check that they exist, and a bounded, thread-safe cache of
 * descriptors. Older versions of torch write one file per item, so there may be many thousands.
 */
#include "dcp/files.h"
#include "dcp/packed_stream.h"
#include "dcp/stages.h"

#include "base/checked.h"
#include "base/file_name.h"
#include "base/grow.h"
#include "checkpoint/identity.h"
#include "checkpoint/path.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "io/path.h"
#include "io/stand_in.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* @return the rank in "__<rank>_<number>.distcp", or FC_NO_RANK. */
static uint32_t rank_of(const char *name) {
    const char *at = fc_base_name(name);
    const int64_t rank = fc_take_text(&at, "__") ? fc_take_number(&at, FC_NO_RANK) : -1;
    return rank >= 0 && *at == '_' ? (uint32_t)rank : FC_NO_RANK;
}

static fc_code add_data_file(fc_dcp_builder *b, fc_pv path, size_t tensor, uint32_t *file) {
    size_t n;
    const char *name = fc_pickle_bytes(b->p, path, &n);
    if (strlen(name) != n || !fc_path_is_safe(name)) {
        return fc_dcp_fail(b, FC_ECORRUPT, b->tensors[tensor].name,
                           "the file name %.128s leads out of the checkpoint: this file may be hostile", name);
    }
    const char *copy = fc_arena_strndup(b->checkpoint->arena, name, n);
    FC_NEED(copy && fc_grow(&b->files, &b->files_capacity, b->nfiles + 1, sizeof *b->files), b->err, b->metadata_path);
    b->files[b->nfiles] = (fc_dcp_file){copy, 0, 0, tensor, rank_of(copy)};
    *file = (uint32_t)b->nfiles++;
    return FC_OK;
}

fc_code fc_dcp_add_item(fc_dcp_builder *b, fc_pv path, size_t tensor, uint64_t offset, uint64_t length,
                        uint32_t *file) {
    if (fc_pv_typeof(path) != FC_PV_STR) {
        return fc_dcp_fail(b, FC_ECORRUPT, b->tensors[tensor].name, "storage_data has no file name for it");
    }
    uint32_t *tag = &fc_pickle_record(b->p, path)->tag[1];
    if (*tag == 0) {
        FC_TRY(add_data_file(b, path, tensor, file));
        *tag = *file + 1;
    }
    *file = *tag - 1;
    fc_dcp_file *f = &b->files[*file];
    f->items++;
    if (offset + length > f->needed) {
        f->needed = offset + length;
        f->farthest = tensor;
    }
    return FC_OK;
}

static fc_code report_missing(const fc_dcp_builder *b, size_t first, size_t missing) {
    const fc_dcp_file *f = &b->files[first];
    char more[64] = "";
    if (missing > 1) {
        snprintf(more, sizeof more, "; %zu more file%s missing too", missing - 1, missing == 2 ? " is" : "s are");
    }
    return fc_fail(b->err, FC_ECORRUPT,
                   "%s: the file is missing: .metadata places %" PRIu64 " item%s in it, for example of tensor %.256s%s",
                   b->checkpoint->files[first].path, f->items, f->items == 1 ? "" : "s", b->tensors[f->farthest].name,
                   more);
}

/* Checks links even with headers_only, because extents may be read later. */
static fc_code check_files(const fc_dcp_builder *b) {
    char root[PATH_MAX];
    size_t missing = 0, first = 0;
    if (!fc_realpath(b->directory, root)) {
        return fc_fail_errno(b->err, errno, "%s: cannot be examined", b->directory);
    }
    fc_progress_begin(b->options->progress, FC_PHASE_OPENING, FC_COUNTED_FILES, b->nfiles);
    for (size_t i = 0; i < b->nfiles; i++) {
        struct stat st;
        const fc_file *file = &b->checkpoint->files[i];
        const fc_dcp_file *f = &b->files[i];
        FC_TRY(b->options->follow_external ? FC_OK : fc_check_link(file->path, file->name, root, b->err));
        FC_TRY(fc_progress_count(b->options->progress, 1, b->err));
        if (b->options->headers_only) {
            continue;
        }
        if (fc_stat(file->path, &st) != 0) {
            if (errno != ENOENT && errno != ENOTDIR) {
                return fc_fail_errno(b->err, errno, "%s: cannot be examined", file->path);
            }
            first = missing++ ? first : i;
            continue;
        }
        if (!S_ISREG(st.st_mode)) {
            return fc_fail(b->err, FC_ECORRUPT, "%s: not a regular file", file->path);
        }
        if ((uint64_t)st.st_size < f->needed) {
            FC_TRY(fc_check_stand_in(file->path, b->err));
            return fc_fail(b->err, FC_ECORRUPT,
                           "%s: truncated: it has %" PRIu64 " bytes, .metadata places items up to byte %" PRIu64
                           " in it, the last one of tensor %.256s: copy the file again, or save again",
                           file->path, (uint64_t)st.st_size, f->needed, b->tensors[f->farthest].name);
        }
    }
    return missing ? report_missing(b, first, missing) : FC_OK;
}

fc_code fc_dcp_finish_files(fc_dcp_builder *b) {
    fc_arena *arena = b->checkpoint->arena;
    fc_file *files = fc_arena_calloc(arena, b->nfiles, sizeof *files);
    for (size_t i = 0; files && i < b->nfiles; i++) {
        if (!fc_file_in(arena, b->directory, b->files[i].name, &files[i])) {
            files = NULL;
        }
    }
    FC_NEED(files, b->err, b->metadata_path);
    b->checkpoint->files = files;
    b->checkpoint->nfiles = b->nfiles;
    FC_TRY(fc_identities_take(b->checkpoint, b->options, b->err));
    return check_files(b);
}

enum {
    MAX_OPEN = 64,
    AHEAD = 64 << 10, /* bytes read at once if items are small and read in order: about forty items of 1 KiB */
    SMALL_ITEM = AHEAD / 4,
    MOST_SKIPPED = 16 << 10, /* the most bytes between two items that count as read in order */
    WINDOWS = 4              /* per file, because several workers read it in order from different offsets */
};

/* A part of a file in memory, from which items are copied. */
typedef struct window {
    unsigned char *bytes; /* AHEAD bytes; NULL until they are needed */
    uint64_t offset, size;
    uint64_t last_end; /* end of the last item that was copied, or could have been */
    uint64_t last_use;
} window;

typedef struct open_file {
    uint32_t file;
    uint32_t users;
    uint64_t last_use;
    int fd;
    window windows[WINDOWS];
} open_file;

struct fc_dcp_state {
    pthread_mutex_t lock;
    uint32_t *slots; /* per file: index into `open` plus 1, or 0 */
    open_file *open;
    size_t nopen, capacity; /* exceeds MAX_OPEN only while all are in use */
    uint64_t clock;
    fc_dcp_streams *streams;
};

fc_dcp_streams *fc_dcp_streams_of(const fc_checkpoint *checkpoint) {
    const fc_dcp_state *state = checkpoint->state;
    return state->streams;
}

fc_dcp_state *fc_dcp_state_new(size_t nfiles) {
    fc_dcp_state *state = calloc(1, sizeof *state);
    if (!state) {
        return NULL;
    }
    state->slots = calloc(nfiles + 1, sizeof *state->slots);
    state->streams = fc_dcp_streams_new();
    if (!state->slots || !state->streams || pthread_mutex_init(&state->lock, NULL) != 0) {
        fc_dcp_streams_free(state->streams);
        free(state->slots);
        free(state);
        return NULL;
    }
    return state;
}

static void free_windows(open_file *o) {
    for (int w = 0; w < WINDOWS; w++) {
        free(o->windows[w].bytes);
        o->windows[w] = (window){.bytes = NULL};
    }
}

void fc_dcp_rest(const fc_checkpoint *checkpoint) {
    fc_dcp_state *state = checkpoint->state;
    pthread_mutex_lock(&state->lock);
    for (size_t i = 0; i < state->nopen; i++) {
        open_file *o = &state->open[i];
        if (o->fd >= 0 && o->users == 0) {
            close(o->fd);
            o->fd = -1;
            state->slots[o->file] = 0;
            free_windows(o);
        }
    }
    pthread_mutex_unlock(&state->lock);
}

void fc_dcp_state_free(fc_dcp_state *state) {
    if (!state) {
        return;
    }
    for (size_t i = 0; i < state->nopen; i++) {
        if (state->open[i].fd >= 0) {
            close(state->open[i].fd);
        }
        free_windows(&state->open[i]);
    }
    pthread_mutex_destroy(&state->lock);
    fc_dcp_streams_free(state->streams);
    free(state->open);
    free(state->slots);
    free(state);
}

/*
 * @return a slot for one more descriptor: a new one, or that of the file that was used longest ago. NULL when out of
 * memory.
 */
static open_file *free_slot(fc_dcp_state *state) {
    open_file *oldest = NULL;
    for (size_t i = 0; i < state->nopen; i++) {
        open_file *o = &state->open[i];
        if (o->users == 0 && (!oldest || o->last_use < oldest->last_use)) {
            oldest = o;
        }
    }
    if (oldest && (oldest->fd < 0 || state->nopen >= MAX_OPEN)) {
        if (oldest->fd >= 0) {
            close(oldest->fd);
            state->slots[oldest->file] = 0;
        }
        oldest->fd = -1;
        for (int w = 0; w < WINDOWS; w++) {
            oldest->windows[w] = (window){.bytes = oldest->windows[w].bytes};
        }
        return oldest;
    }
    if (!fc_grow(&state->open, &state->capacity, state->nopen + 1, sizeof *state->open)) {
        return NULL;
    }
    state->open[state->nopen] = (open_file){.fd = -1};
    return &state->open[state->nopen++];
}

/* Opens a file into a free slot. Called with the lock held. */
static fc_code open_slot(const fc_checkpoint *checkpoint, uint32_t file, open_file **out, fc_error *err) {
    fc_dcp_state *state = checkpoint->state;
    open_file *o = free_slot(state);
    FC_NEED(o, err, checkpoint->path);
    fc_code rc = fc_identity_open(checkpoint, file, &o->fd, err);
    if (rc != FC_OK) {
        o->fd = -1;
        o->last_use = 0;
        return rc;
    }
    o->file = file;
    o->users = 0;
    state->slots[file] = (uint32_t)(o - state->open) + 1;
    *out = o;
    return FC_OK;
}

fc_code fc_dcp_acquire(const fc_checkpoint *checkpoint, uint32_t file, int *fd, fc_error *err) {
    fc_dcp_state *state = checkpoint->state;
    fc_code rc = FC_OK;
    pthread_mutex_lock(&state->lock);
    open_file *o = state->slots[file] ? &state->open[state->slots[file] - 1] : NULL;
    if (!o) {
        FC_TRY_GOTO(open_slot(checkpoint, file, &o, err), rc, out);
    }
    o->users++;
    o->last_use = ++state->clock;
    *fd = o->fd;
out:
    pthread_mutex_unlock(&state->lock);
    return rc;
}

void fc_dcp_release(const fc_checkpoint *checkpoint, uint32_t file) {
    fc_dcp_state *state = checkpoint->state;
    pthread_mutex_lock(&state->lock);
    state->open[state->slots[file] - 1].users--;
    pthread_mutex_unlock(&state->lock);
}

/* Fills the window from `offset` on; at the end of the file, only partly. */
static void fill_window(window *w, int fd, uint64_t offset) {
    ssize_t n;
    w->size = 0;
    if (!w->bytes) {
        w->bytes = malloc(AHEAD);
    }
    if (!w->bytes || offset > INT64_MAX - AHEAD) {
        return;
    }
    n = fc_pread_some(fd, w->bytes, AHEAD, offset);
    w->offset = offset;
    w->size = n > 0 ? (uint64_t)n : 0;
}

static bool holds(const window *w, uint64_t offset, uint64_t length) {
    return offset >= w->offset && fc_range_within(offset - w->offset, length, w->size);
}

/*
 * Returns the window that contains the item; else the one that the item follows, refilled; else the least recently used
 * one, which then starts at the item and is filled if the next item follows.
 */
static window *find_window(open_file *o, uint64_t offset, uint64_t length) {
    window *oldest = &o->windows[0];
    for (int i = 0; i < WINDOWS; i++) {
        window *w = &o->windows[i];
        if (holds(w, offset, length)) {
            return w;
        }
        oldest = w->last_use < oldest->last_use ? w : oldest;
    }
    for (int i = 0; i < WINDOWS; i++) {
        window *w = &o->windows[i];
        if (offset >= w->last_end && offset - w->last_end <= MOST_SKIPPED) {
            fill_window(w, o->fd, offset);
            return w;
        }
    }
    return oldest;
}

unsigned char *fc_dcp_read_ahead(const fc_checkpoint *checkpoint, uint32_t file, uint64_t offset, uint64_t length) {
    fc_dcp_state *state = checkpoint->state;
    unsigned char *bytes = NULL;
    if (length == 0 || length > SMALL_ITEM || offset > INT64_MAX - length) {
        return NULL;
    }
    pthread_mutex_lock(&state->lock);
    window *w = find_window(&state->open[state->slots[file] - 1], offset, length);
    if (holds(w, offset, length)) {
        bytes = malloc((size_t)length);
    }
    if (bytes) {
        memcpy(bytes, w->bytes + (offset - w->offset), (size_t)length);
    }
    w->last_end = offset + length;
    w->last_use = ++state->clock;
    pthread_mutex_unlock(&state->lock);
    return bytes;
}
