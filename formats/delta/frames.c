/*
 * Looks at the frames of deltas without the model: how large their tensors are, and which can be decoded together.
 * Where a full version is at the start of a chain, its bytes pass through the frames that follow. See look.h.
 */
#include "delta/frames.h"

#include "delta/heads.h"
#include "fsdpckpt/try.h"
#include "read/tuning.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

void fc_delta_report_frame(fc_frames_job *job, const fc_looked_frame *f, fc_delta_fault_kind kind,
                           const fc_error *why) {
    const fc_delta_look_options *o = job->looking->options;
    if (o->report) {
        pthread_mutex_lock(&job->lock);
        o->report(o->context, &(fc_delta_fault){.kind = kind,
                                                .code = why->code,
                                                .path = f->tensor->path,
                                                .number = f->version->number,
                                                .tensor = f->tensor->name,
                                                .offset = f->tensor->offset,
                                                .message = why->message});
        pthread_mutex_unlock(&job->lock);
    }
}

static void refuse_frame(fc_frames_job *job, fc_looked_frame *f, const fc_error *why) {
    f->bad = true;
    fc_delta_report_frame(job, f, FC_DELTA_BAD_FRAME, why);
}

/* ---- sizes ---- */

/* Finds a tensor in the full version that leads to a frame, or else in any one. */
static const fc_sync_tensor *find_full_tensor(const fc_delta_looking *l, const fc_looked_frame *f) {
    const fc_sync_model *own = f->root == FC_DELTA_NO_ROOT ? NULL : l->looked[f->root].full;
    const fc_sync_tensor *found = own ? fc_sync_model_find(own, f->tensor->name) : NULL;
    for (size_t i = 0; !own && !found && i < l->all.count; i++) {
        found = l->looked[i].full ? fc_sync_model_find(l->looked[i].full, f->tensor->name) : NULL;
    }
    return found;
}

/* Reads what the start of a frame says. @param where receives a file that has a tensor of this size. */
static fc_code look_at_start(fc_frames_job *job, fc_looked_frame *f, uint64_t *bytes, const char **where,
                             fc_error *err) {
    const fc_sync_tensor *full = find_full_tensor(job->looking, f);
    size_t window = 0;
    uint64_t content = FC_DELTA_UNKNOWN;
    const fc_code rc = fc_delta_window(f->tensor, &window, &content, err);
    if (fc_delta_is_failure(rc)) {
        return rc;
    }
    if (full) {
        *bytes = full->size;
        *where = full->file->path;
        f->seen->element_bytes = full->element;
    }
    f->memory = fc_delta_decoder_memory(f->version->encoding, window);
    if (rc != FC_OK) {
        refuse_frame(job, f, err);
    } else if (f->version->encoding == FC_DELTA_XOR && content != FC_DELTA_UNKNOWN) {
        *where = *bytes == FC_DELTA_UNKNOWN ? f->tensor->path : *where;
        *bytes = *bytes == FC_DELTA_UNKNOWN ? content : *bytes;
        if (content != *bytes) {
            (void)fc_fail(err, FC_ECORRUPT,
                          "%s: tensor %.256s: the frame has %" PRIu64 " bytes, but the tensor has %" PRIu64 " in %s",
                          f->tensor->path, f->tensor->name, content, *bytes, *where);
            refuse_frame(job, f, err);
        }
    }
    return FC_OK;
}

/* Frames of xor, and full versions, say how large a tensor is. */
static fc_code find_size(fc_frames_job *job, fc_looked_frame *frames, size_t count, fc_error *err) {
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

static void add_item(fc_frames_job *job, fc_looked_frame *frames, size_t count, const fc_sync_tensor *base) {
    size_t memory = 0;
    for (size_t i = 0; i < count; i++) {
        memory += frames[i].memory;
    }
    job->items[job->nitems++] = (fc_frames_item){frames, count, base};
    job->memory = memory > job->memory ? memory : job->memory;
    job->longest = count > job->longest ? count : job->longest;
}

/* Adds a frame that is decoded on its own, if its size is known; positions need none. */
static void add_single(fc_frames_job *job, fc_looked_frame *f, fc_delta_compared why) {
    f->seen->compared = why;
    if (!f->bad && (f->seen->bytes != FC_DELTA_UNKNOWN || f->version->encoding == FC_DELTA_OVERWRITE)) {
        add_item(job, f, 1, NULL);
    }
}

/* Takes the frames that follow one full version, as many as fit into memory. @return how many. */
static size_t count_together(const fc_frames_job *job, const fc_looked_frame *frames, size_t count) {
    uint64_t memory = FC_FRAMES_WORKER;
    size_t together = 0;
    while (together < count && frames[together].root == frames[0].root && !frames[together].bad &&
           memory + frames[together].memory <= job->budget) {
        memory += frames[together++].memory;
    }
    return together;
}

static void add_items(fc_frames_job *job, fc_looked_frame *frames, size_t count) {
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
static void check_names(fc_frames_job *job, fc_looked_frame *frames, size_t count) {
    const fc_delta_looking *l = job->looking;
    fc_error line;
    for (size_t i = 0; i < count; i++) {
        fc_looked_frame *f = &frames[i];
        if (!f->bad && f->root != FC_DELTA_NO_ROOT && !fc_sync_model_find(l->looked[f->root].full, f->tensor->name)) {
            (void)fc_fail(&line, FC_ECORRUPT, "%s: it changes tensor %.256s, which %s does not have", f->tensor->path,
                          f->tensor->name, l->all.versions[f->root].path);
            refuse_frame(job, f, &line);
        }
    }
}

static fc_code list_frames_of(fc_frames_job *job, const fc_delta_link *link, fc_looked_frame *frames, fc_error *err) {
    const fc_delta_looking *l = job->looking;
    for (size_t i = 0; i < link->count; i++) {
        const fc_delta_version *v = link->versions[i];
        const fc_delta_looked *looked = &l->looked[v - l->all.versions];
        frames[i] = (fc_looked_frame){.version = v,
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

static fc_code list_items(fc_frames_job *job, fc_error *err) {
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
    fc_delta_heads_read(links.versions, links.count);
    FC_TRY(fc_delta_links_tensors(l->headers, &links, &list, &count, err));
    job->frames = fc_arena_calloc(l->headers, job->nframes + 1, sizeof *job->frames);
    job->items = fc_arena_calloc(l->headers, job->nframes + 1, sizeof *job->items);
    FC_NEED(job->frames && job->items, err, l->all.path);
    fc_looked_frame *next = job->frames;
    for (size_t i = 0; i < count; i++) {
        FC_TRY(list_frames_of(job, &list[i], next, err));
        next += list[i].count;
    }
    return FC_OK;
}

fc_code fc_delta_look_at_frames(fc_delta_looking *looking, fc_error *err) {
    const uint64_t memory = looking->options->work.memory;
    fc_frames_job job = {.looking = looking, .budget = memory ? memory : FC_DEFAULT_MEMORY};
    pthread_mutex_init(&job.lock, NULL);
    fc_code rc = list_items(&job, err);
    rc = rc == FC_OK && job.nitems > 0 ? fc_frames_run(&job, err) : rc;
    pthread_mutex_destroy(&job.lock);
    return rc;
}
