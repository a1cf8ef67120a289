/*
 * Reads the frames of deltas without the model: decodes each, and counts what it changes. Where a full version is at
 * the start of a chain, its bytes pass through the frames that follow, and the checksums are compared. See look.h.
 */
#include "base/checked.h"
#include "delta/decode.h"
#include "delta/look.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 64 << 10, LEAST_PER_THREAD = 1 << 20 };

static const uint64_t most_overwrite = (uint64_t)UINT32_MAX + 1; /* bytes that its positions reach */

/* A frame, with what is known of it. */
typedef struct looked_frame {
    const fc_delta_version *version;
    const fc_delta_tensor *tensor;
    fc_delta_changed *seen;
    size_t root, memory; /* memory: of its decoder */
    bool bad;
} looked_frame;

/* Frames of one tensor that are decoded in lockstep. */
typedef struct work_item {
    looked_frame *frames;
    size_t count;
    const fc_sync_tensor *base; /* whose bytes pass through them; NULL: there is one frame, and zeros do */
} work_item;

typedef struct frames_job {
    fc_delta_looking *looking;
    looked_frame *frames;
    work_item *items;
    size_t nframes, nitems;
    size_t longest; /* the most frames of an item */
    size_t memory;  /* of the item that needs most */
    uint64_t budget;
    pthread_mutex_t lock; /* guards all that follows, and reports */
    size_t next;
    fc_code code;
    fc_error error;
} frames_job;

typedef struct frames_worker {
    frames_job *job;
    fc_delta_decoder **decoders; /* `longest` */
    uint64_t *bytes, *elements;  /* that each frame changes */
    uint64_t read;
    unsigned char block[BLOCK], changed[BLOCK];
} frames_worker;

/* Whether an error says nothing about the frames. */
static bool is_failure(fc_code rc) {
    return rc == FC_ENOMEM || rc == FC_EIO || rc == FC_EINTERRUPTED;
}

static void report_frame(frames_job *job, const looked_frame *f, fc_delta_fault_kind kind, const char *message) {
    const fc_delta_look_options *o = job->looking->options;
    if (o->report) {
        pthread_mutex_lock(&job->lock);
        o->report(o->context, &(fc_delta_fault){.kind = kind,
                                                .path = f->tensor->path,
                                                .number = f->version->number,
                                                .tensor = f->tensor->name,
                                                .offset = f->tensor->offset,
                                                .message = message});
        pthread_mutex_unlock(&job->lock);
    }
}

static void refuse_frame(frames_job *job, looked_frame *f, const char *message) {
    f->bad = true;
    report_frame(job, f, FC_DELTA_BAD_FRAME, message);
}

/* ---- sizes ---- */

/* Finds a tensor in the full version that leads to a frame, or else in any one. */
static const fc_sync_tensor *find_full_tensor(const fc_delta_looking *l, const looked_frame *f) {
    const fc_sync_model *own = f->root == FC_DELTA_NO_ROOT ? NULL : l->looked[f->root].full;
    const fc_sync_tensor *found = own ? fc_sync_model_find(own, f->tensor->name) : NULL;
    for (size_t i = 0; !own && !found && i < l->all.count; i++) {
        found = l->looked[i].full ? fc_sync_model_find(l->looked[i].full, f->tensor->name) : NULL;
    }
    return found;
}

/* Reads what the start of a frame says. @param where receives a file that has a tensor of this size. */
static fc_code look_at_start(frames_job *job, looked_frame *f, uint64_t *bytes, const char **where, fc_error *err) {
    const fc_sync_tensor *full = find_full_tensor(job->looking, f);
    size_t window = 0;
    uint64_t content = FC_DELTA_UNKNOWN;
    const fc_code rc = fc_delta_window(f->tensor, &window, &content, err);
    if (is_failure(rc)) {
        return rc;
    }
    if (full) {
        *bytes = full->size;
        *where = full->file->path;
        f->seen->element_bytes = full->element;
    }
    f->memory = fc_delta_decoder_memory(f->version->encoding, window);
    if (rc != FC_OK) {
        refuse_frame(job, f, err->message);
    } else if (f->version->encoding == FC_DELTA_XOR && content != FC_DELTA_UNKNOWN) {
        *where = *bytes == FC_DELTA_UNKNOWN ? f->tensor->path : *where;
        *bytes = *bytes == FC_DELTA_UNKNOWN ? content : *bytes;
        if (content != *bytes) {
            (void)fc_fail(err, FC_ECORRUPT,
                          "%s: tensor %.256s: the frame has %" PRIu64 " bytes, but the tensor has %" PRIu64 " in %s",
                          f->tensor->path, f->tensor->name, content, *bytes, *where);
            refuse_frame(job, f, err->message);
        }
    }
    return FC_OK;
}

/* Frames of xor, and full versions, say how large a tensor is. */
static fc_code find_size(frames_job *job, looked_frame *frames, size_t count, fc_error *err) {
    uint64_t bytes = FC_DELTA_UNKNOWN;
    const char *where = NULL;
    for (size_t i = 0; i < count; i++) {
        FC_TRY(fc_progress_count(job->looking->options->work.progress, 0, err));
        FC_TRY(look_at_start(job, &frames[i], &bytes, &where, err));
    }
    for (size_t i = 0; i < count; i++) {
        frames[i].seen->bytes = bytes;
    }
    return FC_OK;
}

/* ---- items ---- */

static void add_item(frames_job *job, looked_frame *frames, size_t count, const fc_sync_tensor *base) {
    size_t memory = 0;
    for (size_t i = 0; i < count; i++) {
        memory += frames[i].memory;
    }
    job->items[job->nitems++] = (work_item){frames, count, base};
    job->memory = memory > job->memory ? memory : job->memory;
    job->longest = count > job->longest ? count : job->longest;
}

/* Adds a frame that is decoded on its own, if its size is known; positions need none. */
static void add_single(frames_job *job, looked_frame *f, fc_delta_compared why) {
    f->seen->compared = why;
    if (!f->bad && (f->seen->bytes != FC_DELTA_UNKNOWN || f->version->encoding == FC_DELTA_OVERWRITE)) {
        add_item(job, f, 1, NULL);
    }
}

/* Takes the frames that follow one full version, as many as fit into memory. @return how many. */
static size_t count_together(const frames_job *job, const looked_frame *frames, size_t count) {
    uint64_t memory = sizeof(frames_worker);
    size_t together = 0;
    while (together < count && frames[together].root == frames[0].root && !frames[together].bad &&
           memory + frames[together].memory <= job->budget) {
        memory += frames[together++].memory;
    }
    return together;
}

static void add_items(frames_job *job, looked_frame *frames, size_t count) {
    const fc_delta_looking *l = job->looking;
    const bool compare = l->options->depth == FC_DELTA_CHECKSUMS;
    for (size_t i = 0; i < count;) {
        const size_t root = frames[i].root;
        const fc_sync_tensor *base = compare && root != FC_DELTA_NO_ROOT
                                         ? fc_sync_model_find(l->looked[root].full, frames[i].tensor->name)
                                         : NULL;
        size_t end = i + 1;
        while (end < count && root != FC_DELTA_NO_ROOT && frames[end].root == root) {
            end++;
        }
        const size_t together = base ? count_together(job, frames + i, end - i) : 0;
        if (together > 0) {
            add_item(job, frames + i, together, base);
        }
        const bool broken = base && i + together < end && frames[i + together].bad;
        for (size_t k = i + together; k < end; k++) {
            add_single(job, &frames[k],
                       !compare || broken || (root != FC_DELTA_NO_ROOT && !base) ? FC_DELTA_NOT_COMPARED
                       : base                                                    ? FC_DELTA_NEEDS_MEMORY
                                                                                 : FC_DELTA_NEEDS_MODEL);
        }
        i = end;
    }
}

/* A tensor that the full version at the start of a chain lacks. */
static void check_names(frames_job *job, looked_frame *frames, size_t count) {
    const fc_delta_looking *l = job->looking;
    fc_error line;
    for (size_t i = 0; i < count; i++) {
        looked_frame *f = &frames[i];
        if (!f->bad && f->root != FC_DELTA_NO_ROOT && !fc_sync_model_find(l->looked[f->root].full, f->tensor->name)) {
            (void)fc_fail(&line, FC_ECORRUPT, "%s: it changes tensor %.256s, which %s does not have", f->tensor->path,
                          f->tensor->name, l->all.versions[f->root].path);
            refuse_frame(job, f, line.message);
        }
    }
}

static fc_code list_frames_of(frames_job *job, const fc_delta_link *link, looked_frame *frames, fc_error *err) {
    const fc_delta_looking *l = job->looking;
    for (size_t i = 0; i < link->count; i++) {
        const fc_delta_version *v = link->versions[i];
        const fc_delta_looked *looked = &l->looked[v - l->all.versions];
        frames[i] = (looked_frame){.version = v,
                                   .tensor = link->tensors[i],
                                   .seen = &looked->seen->frames[link->tensors[i] - v->tensors],
                                   .root = looked->root};
    }
    FC_TRY(find_size(job, frames, link->count, err));
    check_names(job, frames, link->count);
    if (l->options->depth >= FC_DELTA_FRAMES) {
        add_items(job, frames, link->count);
    }
    return FC_OK;
}

static fc_code list_items(frames_job *job, fc_error *err) {
    fc_delta_looking *l = job->looking;
    fc_delta_links links = {fc_arena_calloc(l->headers, l->all.count + 1, sizeof(fc_delta_version *)), 0};
    fc_delta_link *list = NULL;
    size_t count = 0;
    FC_NEED(links.versions, err, l->all.path);
    for (size_t i = 0; i < l->all.count; i++) {
        fc_delta_version *v = &l->all.versions[i];
        links.versions[links.count] = v;
        links.count += v->base != FC_DELTA_NO_NUMBER && !v->damaged;
        job->nframes += v->ntensors;
    }
    FC_TRY(fc_delta_links_tensors(l->headers, &links, &list, &count, err));
    job->frames = fc_arena_calloc(l->headers, job->nframes + 1, sizeof *job->frames);
    job->items = fc_arena_calloc(l->headers, job->nframes + 1, sizeof *job->items);
    FC_NEED(job->frames && job->items, err, l->all.path);
    looked_frame *next = job->frames;
    for (size_t i = 0; i < count; i++) {
        FC_TRY(list_frames_of(job, &list[i], next, err));
        next += list[i].count;
    }
    return FC_OK;
}

/* ---- decoding ---- */

static bool is_summed(const looked_frame *f, const fc_sync_tensor *base) {
    return base && f->version->checksum != FC_DELTA_BLAKE3;
}

static fc_code begin_item(frames_worker *w, const work_item *it, size_t *failed, fc_error *err) {
    for (size_t k = 0; k < it->count; k++) {
        const looked_frame *f = &it->frames[k];
        *failed = k;
        w->bytes[k] = w->elements[k] = 0;
        FC_TRY(w->decoders[k] ? FC_OK : fc_delta_decoder_new(&w->decoders[k], err));
        FC_TRY(fc_delta_decoder_begin(w->decoders[k], f->version, f->tensor,
                                      f->seen->bytes == FC_DELTA_UNKNOWN ? most_overwrite : f->seen->bytes, err));
        if (!is_summed(f, it->base)) {
            fc_delta_decoder_skip_checksum(w->decoders[k]);
        }
        w->read += f->tensor->size;
    }
    return FC_OK;
}

static uint64_t count_elements(const unsigned char *changed, size_t size, size_t element) {
    uint64_t count = 0;
    for (size_t i = 0; element > 0 && i < size; i += element) {
        unsigned any = 0;
        for (size_t k = i; k < i + element && k < size; k++) {
            any |= changed[k];
        }
        count += any;
    }
    return count;
}

/* Lets a block of the tensor pass through the frames. */
static fc_code decode_block(frames_worker *w, const work_item *it, size_t size, size_t *failed, fc_error *err) {
    for (size_t k = 0; k < it->count; k++) {
        *failed = k;
        memset(w->changed, 0, size);
        FC_TRY(fc_delta_decode(w->decoders[k], w->block, w->changed, size, err));
        w->bytes[k] += count_elements(w->changed, size, 1);
        w->elements[k] += count_elements(w->changed, size, it->frames[k].seen->element_bytes);
    }
    return FC_OK;
}

/* Goes to the block with the next position, where nothing else needs those between. */
static fc_code skip_blocks(frames_worker *w, const work_item *it, uint64_t *at, uint64_t bytes, fc_error *err) {
    uint64_t position;
    if (it->base || it->frames[0].version->encoding != FC_DELTA_OVERWRITE) {
        return FC_OK;
    }
    FC_TRY(fc_delta_next_position(w->decoders[0], &position, err));
    *at = position >= bytes ? bytes : position - position % BLOCK;
    fc_delta_decoder_skip_to(w->decoders[0], *at);
    return FC_OK;
}

static fc_code decode_blocks(frames_worker *w, const work_item *it, int fd, size_t *failed, fc_error *err) {
    const uint64_t known = it->frames[0].seen->bytes, bytes = known == FC_DELTA_UNKNOWN ? most_overwrite : known;
    for (uint64_t at = 0; at < bytes;) {
        *failed = 0;
        FC_TRY(skip_blocks(w, it, &at, bytes, err));
        const size_t some = bytes - at < BLOCK ? (size_t)(bytes - at) : BLOCK;
        *failed = it->count;
        FC_TRY(fc_progress_count(w->job->looking->options->work.progress, 0, err));
        if (it->base) {
            FC_TRY(fc_pread_full(fd, w->block, some, it->base->offset + at, it->base->file->path, err));
            w->read += some;
        } else {
            memset(w->block, 0, some);
        }
        FC_TRY(some > 0 ? decode_block(w, it, some, failed, err) : FC_OK);
        at += some;
    }
    for (size_t k = 0; k < it->count; k++) {
        *failed = k;
        FC_TRY(fc_delta_decoder_end(w->decoders[k], false, err));
    }
    return FC_OK;
}

/* Compares the checksums. After one that is wrong, the next ones would say the same again. */
static void compare_sums(frames_worker *w, const work_item *it) {
    bool wrong = false;
    fc_error why = {FC_OK};
    for (size_t k = 0; k < it->count; k++) {
        const looked_frame *f = &it->frames[k];
        if (!it->base || wrong) {
            continue;
        }
        if (!is_summed(f, it->base)) {
            f->seen->compared = FC_DELTA_NEEDS_BLAKE3;
            continue;
        }
        wrong = fc_delta_decoder_end(w->decoders[k], true, &why) != FC_OK;
        f->seen->compared = wrong ? FC_DELTA_NOT_COMPARED : FC_DELTA_COMPARED;
        if (wrong) {
            report_frame(w->job, f, FC_DELTA_BAD_SUM, why.message);
        }
    }
}

/* @param failed receives the frame that is wrong; it->count: none of them is. */
static fc_code decode_item(frames_worker *w, const work_item *it, size_t *failed, fc_error *err) {
    int fd = -1;
    uint64_t size;
    FC_TRY(begin_item(w, it, failed, err));
    *failed = it->count;
    FC_TRY(it->base ? fc_open_input(it->base->file->path, &fd, &size, err) : FC_OK);
    const fc_code rc = decode_blocks(w, it, fd, failed, err);
    if (fd >= 0) {
        close(fd);
    }
    FC_TRY(rc);
    compare_sums(w, it);
    for (size_t k = 0; k < it->count; k++) {
        fc_delta_changed *seen = it->frames[k].seen;
        seen->decoded = true;
        seen->changed_bytes = w->bytes[k];
        seen->changed_elements = w->elements[k];
    }
    return FC_OK;
}

/* After a frame that is wrong, those before it are decoded again without it, and those behind it each on their own. */
static fc_code look_at_item(frames_worker *w, const work_item *whole, fc_error *err) {
    work_item it = *whole;
    size_t singles = it.count;
    while (it.count > 0) {
        size_t failed = it.count;
        const fc_code rc = decode_item(w, &it, &failed, err);
        if (rc == FC_OK) {
            break;
        }
        if (is_failure(rc) || failed == it.count) {
            return rc;
        }
        report_frame(w->job, &it.frames[failed], FC_DELTA_BAD_FRAME, err->message);
        it.frames[failed].bad = true;
        it.count = singles = failed;
    }
    for (size_t k = singles; k < whole->count; k++) {
        const work_item single = {whole->frames + k, 1, NULL};
        size_t failed = 1;
        const fc_code rc = whole->frames[k].bad ? FC_OK : decode_item(w, &single, &failed, err);
        if (rc != FC_OK && (is_failure(rc) || failed == 1)) {
            return rc;
        }
        if (rc != FC_OK) {
            report_frame(w->job, &whole->frames[k], FC_DELTA_BAD_FRAME, err->message);
        }
    }
    return FC_OK;
}

static fc_code count_item(const frames_job *job, const work_item *it, fc_error *err) {
    uint64_t stored = 0;
    for (size_t k = 0; k < it->count; k++) {
        stored += it->frames[k].tensor->size;
    }
    return fc_progress_count(job->looking->options->work.progress, stored, err);
}

/* ---- workers ---- */

static const work_item *take_item(frames_job *job, fc_code rc, const fc_error *err) {
    pthread_mutex_lock(&job->lock);
    if (rc != FC_OK && job->code == FC_OK) {
        job->code = rc;
        job->error = *err;
    }
    const work_item *found = job->code == FC_OK && job->next < job->nitems ? &job->items[job->next++] : NULL;
    pthread_mutex_unlock(&job->lock);
    return found;
}

static void free_frames_worker(frames_worker *w) {
    for (size_t k = 0; w->decoders && k < w->job->longest; k++) {
        fc_delta_decoder_free(w->decoders[k]);
    }
    free(w->decoders);
    free(w->bytes);
    free(w->elements);
    free(w);
}

static void *look_at_items(void *context) {
    frames_job *job = context;
    fc_error err = {FC_OK};
    frames_worker *w = calloc(1, sizeof *w);
    if (!w) {
        (void)take_item(job, fc_no_memory(&err, NULL), &err);
        return NULL;
    }
    w->job = job;
    w->decoders = calloc(job->longest, sizeof(fc_delta_decoder *));
    w->bytes = calloc(job->longest, sizeof *w->bytes);
    w->elements = calloc(job->longest, sizeof *w->elements);
    fc_code rc = w->decoders && w->bytes && w->elements ? FC_OK : fc_no_memory(&err, NULL);
    for (const work_item *it; (it = take_item(job, rc, &err)) != NULL;) {
        rc = look_at_item(w, it, &err);
        rc = rc == FC_OK ? count_item(job, it, &err) : rc;
    }
    pthread_mutex_lock(&job->lock);
    job->looking->bytes_read += w->read;
    pthread_mutex_unlock(&job->lock);
    free_frames_worker(w);
    return NULL;
}

static void run_frames_job(frames_job *job) {
    const fc_work_options *work = &job->looking->options->work;
    const uint64_t fit = job->budget / (job->memory + sizeof(frames_worker));
    uint64_t bytes = 0, stored = 0;
    for (size_t i = 0; i < job->nframes; i++) {
        const fc_delta_changed *seen = job->frames[i].seen;
        stored += seen->stored_bytes;
        bytes += seen->bytes == FC_DELTA_UNKNOWN || bytes > UINT64_MAX - seen->bytes ? 0 : seen->bytes;
    }
    int threads = fc_useful_threads(work->threads ? work->threads : fc_processors(), bytes > stored ? bytes : stored,
                                    LEAST_PER_THREAD);
    threads = fit < 1 ? 1 : fit < (uint64_t)threads ? (int)fit : threads;
    fc_progress_begin(work->progress,
                      job->looking->options->depth == FC_DELTA_CHECKSUMS ? FC_PHASE_VERIFYING : FC_PHASE_READING,
                      FC_COUNTED_BYTES, stored);
    fc_threads_run(threads, look_at_items, job);
}

fc_code fc_delta_look_at_frames(fc_delta_looking *looking, fc_error *err) {
    const uint64_t memory = looking->options->work.memory;
    frames_job job = {.looking = looking, .budget = memory ? memory : FC_DEFAULT_MEMORY};
    pthread_mutex_init(&job.lock, NULL);
    fc_code rc = list_items(&job, err);
    if (rc == FC_OK && job.nitems > 0) {
        run_frames_job(&job);
        rc = job.code;
        if (rc != FC_OK && err) {
            *err = job.error;
        }
    }
    pthread_mutex_destroy(&job.lock);
    return rc;
}
