/*
 * Decodes the frames of deltas without the model, and counts what they change. Where the bytes of the base are there,
 * the checksums are compared. See frames.h.
 */
#include "delta/frames.h"
#include "fsdpckpt/try.h"
#include "io/file.h"
#include "read/threads.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = FC_FRAMES_BLOCK, LEAST_PER_THREAD = 1 << 20 };

static const uint64_t most_overwrite = (uint64_t)UINT32_MAX + 1; /* bytes that its positions reach */

typedef struct frames_worker {
    fc_frames_job *job;
    fc_delta_decoder **decoders; /* `longest` */
    uint64_t *bytes, *elements;  /* that each frame changes */
    uint64_t read;
    unsigned char block[BLOCK], changed[BLOCK];
} frames_worker;

static bool is_summed(const fc_looked_frame *f, const fc_sync_tensor *base) {
    return base && f->version->checksum != FC_DELTA_BLAKE3;
}

static fc_code begin_item(frames_worker *w, const fc_frames_item *it, size_t *failed, fc_error *err) {
    for (size_t k = 0; k < it->count; k++) {
        const fc_looked_frame *f = &it->frames[k];
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

/* Counts the elements with a changed byte. @param changed 1 for each byte that changed, 0 for others. */
static uint64_t count_elements(const unsigned char *changed, size_t size, size_t element) {
    uint64_t count = 0, word;
    size_t i = 0;
    if (element == 1 || element == 2 || element == 4 || element == 8) {
        const uint64_t ones = UINT64_C(0x0101010101010101); /* times it, the highest byte is the sum of all bytes */
        const uint64_t lowest = element == 8 ? 1 : UINT64_MAX / ((UINT64_C(1) << 8 * element) - 1);
        for (; i + sizeof word <= size; i += sizeof word) {
            memcpy(&word, changed + i, sizeof word);
            for (size_t shift = 8; shift < 8 * element; shift *= 2) {
                word |= word >> shift;
            }
            count += (word & lowest) * ones >> 56;
        }
    }
    for (; element > 0 && i < size; i += element) {
        unsigned any = 0;
        for (size_t k = i; k < i + element && k < size; k++) {
            any |= changed[k];
        }
        count += any;
    }
    return count;
}

/* Lets a block of the tensor pass through the frames. */
static fc_code decode_block(frames_worker *w, const fc_frames_item *it, size_t size, size_t *failed, fc_error *err) {
    for (size_t k = 0; k < it->count; k++) {
        *failed = k;
        memset(w->changed, 0, size);
        FC_TRY(fc_delta_decode(w->decoders[k], it->base || k > 0 ? w->block : NULL, w->block, w->changed, size, err));
        w->bytes[k] += count_elements(w->changed, size, 1);
        w->elements[k] += count_elements(w->changed, size, it->frames[k].seen->element_bytes);
    }
    return FC_OK;
}

/* Goes to the block with the next position, where nothing else needs those between. */
static fc_code skip_blocks(frames_worker *w, const fc_frames_item *it, uint64_t *at, uint64_t bytes, fc_error *err) {
    uint64_t position;
    if (it->base || it->frames[0].version->encoding != FC_DELTA_OVERWRITE) {
        return FC_OK;
    }
    FC_TRY(fc_delta_next_position(w->decoders[0], &position, err));
    *at = position >= bytes ? bytes : position - position % BLOCK;
    fc_delta_decoder_skip_to(w->decoders[0], *at);
    return FC_OK;
}

static fc_code decode_blocks(frames_worker *w, const fc_frames_item *it, int fd, size_t *failed, fc_error *err) {
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
static void compare_sums(frames_worker *w, const fc_frames_item *it) {
    bool wrong = false;
    fc_error why = {FC_OK};
    for (size_t k = 0; k < it->count; k++) {
        const fc_looked_frame *f = &it->frames[k];
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
            fc_delta_report_frame(w->job, f, FC_DELTA_BAD_SUM, &why);
        }
    }
}

/* @param failed receives the frame that is wrong; it->count: none of them is. */
static fc_code decode_item(frames_worker *w, const fc_frames_item *it, size_t *failed, fc_error *err) {
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
static fc_code look_at_item(frames_worker *w, const fc_frames_item *whole, fc_error *err) {
    fc_frames_item it = *whole;
    size_t singles = it.count;
    while (it.count > 0) {
        size_t failed = it.count;
        const fc_code rc = decode_item(w, &it, &failed, err);
        if (rc == FC_OK) {
            break;
        }
        if (fc_delta_is_failure(rc) || failed == it.count) {
            return rc;
        }
        fc_delta_report_frame(w->job, &it.frames[failed], FC_DELTA_BAD_FRAME, err);
        it.frames[failed].bad = true;
        it.count = singles = failed;
    }
    for (size_t k = singles; k < whole->count; k++) {
        const fc_frames_item single = {whole->frames + k, 1, NULL};
        size_t failed = 1;
        const fc_code rc = whole->frames[k].bad ? FC_OK : decode_item(w, &single, &failed, err);
        if (rc != FC_OK && (fc_delta_is_failure(rc) || failed == 1)) {
            return rc;
        }
        if (rc != FC_OK) {
            fc_delta_report_frame(w->job, &whole->frames[k], FC_DELTA_BAD_FRAME, err);
        }
    }
    return FC_OK;
}

static fc_code count_item(const fc_frames_job *job, const fc_frames_item *it, fc_error *err) {
    uint64_t stored = 0;
    for (size_t k = 0; k < it->count; k++) {
        stored += it->frames[k].tensor->size;
    }
    return fc_progress_count(job->looking->options->work.progress, stored, err);
}

/* ---- workers ---- */

static const fc_frames_item *take_item(fc_frames_job *job, fc_code rc, const fc_error *err) {
    pthread_mutex_lock(&job->lock);
    if (rc != FC_OK && job->code == FC_OK) {
        job->code = rc;
        job->error = *err;
    }
    const fc_frames_item *found = job->code == FC_OK && job->next < job->nitems ? &job->items[job->next++] : NULL;
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
    fc_frames_job *job = context;
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
    for (const fc_frames_item *it; (it = take_item(job, rc, &err)) != NULL;) {
        rc = look_at_item(w, it, &err);
        rc = rc == FC_OK ? count_item(job, it, &err) : rc;
    }
    pthread_mutex_lock(&job->lock);
    job->looking->bytes_read += w->read;
    pthread_mutex_unlock(&job->lock);
    free_frames_worker(w);
    return NULL;
}

fc_code fc_frames_run(fc_frames_job *job, fc_error *err) {
    const fc_work_options *work = &job->looking->options->work;
    const uint64_t fit = job->budget / (job->memory + FC_FRAMES_WORKER);
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
    if (job->code != FC_OK && err) {
        *err = job->error;
    }
    return job->code;
}
