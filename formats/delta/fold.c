/*
 * Folds the deltas of a chain: the frames of one tensor are decoded in lockstep, and what they change together is
 * encoded again. Each worker folds one tensor at a time.
 */
#include "base/checked.h"
#include "checkpoint/identity.h"
#include "codec/zstd.h"
#include "delta/chain.h"
#include "delta/decode.h"
#include "delta/encode.h"
#include "delta/heads.h"
#include "delta/version.h"
#include "delta/write.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"
#include "net/remote.h"
#include "read/budget.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <ctype.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 64 << 10, LEAST_BYTES = 64 << 10 /* of frames, that justify a thread */ };

/* A tensor to fold. */
typedef struct folded {
    const fc_delta_link *link;
    uint64_t bytes;  /* of the tensor; overwrite: the most that its positions reach */
    uint64_t stored; /* of its frames */
    fc_delta_found found;
} folded;

typedef struct folder {
    const fc_fold_options *options;
    fc_fold_report *report;
    fc_arena *arena;
    fc_delta_links links;
    fc_delta_how how;
    folded *items; /* the largest frames first, or by name for a sender */
    size_t count;
    size_t each; /* the most bytes that a worker holds */
    int threads;
    pthread_mutex_t lock; /* guards all that follows */
    size_t next;
    fc_delta_encoder *encoders[FC_MOST_THREADS];
    int nencoders;
    fc_code code;
    fc_error error;
} folder;

/* What one thread works with. */
typedef struct fold_worker {
    folder *folder;
    fc_delta_encoder *encoder;
    fc_delta_decoder **decoders; /* one per delta, NULL until it is needed */
    unsigned char bytes[BLOCK], changed[BLOCK];
} fold_worker;

/* ---- what is folded ---- */

static bool is_checksum(const char *text) {
    size_t i = 0;
    while (isxdigit((unsigned char)text[i])) {
        i++;
    }
    return i > 0 && i < FC_DELTA_DIGITS && text[i] == '\0';
}

/* Takes the checksum of the last delta that changes the tensor. */
static fc_code take_checksum(folded *f, fc_error *err) {
    const fc_delta_tensor *last = f->link->tensors[f->link->count - 1];
    if (!is_checksum(last->checksum)) {
        return fc_fail(err, FC_ECORRUPT, "%s: tensor %.256s: its checksum is not in hexadecimal digits", last->path,
                       last->name);
    }
    memcpy(f->found.checksum, last->checksum, strlen(last->checksum) + 1);
    return FC_OK;
}

/* All frames of xor have the size of the tensor. */
static fc_code take_size(folded *f, const fc_delta_tensor *t, uint64_t content, fc_error *err) {
    if (content == UINT64_MAX || content == f->bytes) {
        return FC_OK;
    }
    if (f->bytes != UINT64_MAX) {
        return fc_fail(err, FC_ECORRUPT,
                       "%s: tensor %.256s: the frame has %" PRIu64 " bytes, but an earlier delta of the chain has "
                       "%" PRIu64,
                       t->path, t->name, content, f->bytes);
    }
    f->bytes = content;
    return FC_OK;
}

/* Looks at the frames of a tensor. @param memory receives what their decoders hold. */
static fc_code measure_tensor(folded *f, fc_delta_encoding encoding, size_t *memory, fc_error *err) {
    *memory = 0;
    f->bytes = UINT64_MAX;
    for (size_t i = 0; i < f->link->count; i++) {
        const fc_delta_tensor *t = f->link->tensors[i];
        size_t window = 0;
        uint64_t content = UINT64_MAX;
        FC_TRY(fc_delta_window(t, &window, &content, err));
        FC_TRY(encoding == FC_DELTA_XOR ? take_size(f, t, content, err) : FC_OK);
        *memory += fc_delta_decoder_memory(encoding, window);
        f->stored += t->size; /* at most the bytes of the files */
    }
    if (encoding == FC_DELTA_OVERWRITE) {
        f->bytes = (uint64_t)UINT32_MAX + 1;
    } else if (f->bytes == UINT64_MAX) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%s: tensor %.256s: its zstd frames do not say how many bytes they have, so they can only be "
                       "applied",
                       f->link->tensors[0]->path, f->link->name);
    }
    return FC_OK;
}

static int order_folded(const void *a, const void *b) {
    const folded *x = a, *y = b;
    FC_ORDER_BY(y->stored, x->stored);
    return strcmp(x->link->name, y->link->name);
}

/* A sender gets the frames in the order of the file. */
static int order_folded_by_name(const void *a, const void *b) {
    return strcmp(((const folded *)a)->link->name, ((const folded *)b)->link->name);
}

static fc_code list_tensors(folder *f, bool sends, fc_error *err) {
    fc_delta_link *list = NULL;
    size_t most = 0;
    fc_delta_heads_read(f->links.versions, f->links.count);
    FC_TRY(fc_delta_links_tensors(f->arena, &f->links, &list, &f->count, err));
    f->items = fc_arena_calloc(f->arena, f->count + 1, sizeof *f->items);
    FC_NEED(f->items, err, NULL);
    for (size_t i = 0; i < f->count; i++) {
        size_t memory;
        f->items[i].link = &list[i];
        FC_TRY(measure_tensor(&f->items[i], f->report->encoding, &memory, err));
        most = memory > most ? memory : most;
        f->report->source_bytes += f->items[i].stored;
    }
    f->report->tensors = f->count;
    f->each = most + sizeof(fold_worker) + fc_delta_encoder_memory(&f->how);
    fc_sort_items(f->items, f->count, sizeof *f->items, sends ? order_folded_by_name : order_folded);
    return FC_OK;
}

/* As many threads as are useful, and as memory and open files suffice for. */
static fc_code choose_threads(folder *f, const char *path, fc_error *err) {
    const fc_work_options *work = &f->options->work;
    const uint64_t memory = fc_delta_workers_memory(path, fc_memory_of(work));
    const uint64_t fit = f->each > 0 ? memory / f->each : 1;
    FC_TRY(fc_memory_check(work->memory, err));
    if (fit == 0 && f->links.count > 2) {
        return fc_advise(err,
                         fc_fail(err, FC_EUSAGE,
                                 "%zu deltas at once need %zu MiB of memory: fold them in groups, and then what was "
                                 "folded",
                                 f->links.count, (f->each >> 20) + 1),
                         FC_HINT_MEMORY, NULL);
    }
    f->threads = fc_useful_threads(work->threads, f->report->source_bytes, LEAST_BYTES);
    f->threads = (uint64_t)f->threads > fit ? (int)(fit > 0 ? fit : 1) : f->threads;
    while (f->threads > 1 && (size_t)fc_files_per_worker(f->threads) < f->links.count) {
        f->threads--;
    }
    return FC_OK;
}

/* ---- folding ---- */

static fc_code begin_frames(const fold_worker *w, const folded *f, fc_error *err) {
    for (size_t i = 0; i < f->link->count; i++) {
        if (!w->decoders[i]) {
            FC_TRY(fc_delta_decoder_new(&w->decoders[i], err));
        }
        FC_TRY(fc_delta_decoder_begin(w->decoders[i], f->link->versions[i], f->link->tensors[i], f->bytes, err));
        fc_delta_decoder_skip_checksum(w->decoders[i]);
    }
    return FC_OK;
}

static fc_code fold_block(fold_worker *w, const folded *f, bool overwrite, size_t size, fc_error *err) {
    if (overwrite) {
        memset(w->changed, 0, size);
    }
    for (size_t i = 0; i < f->link->count; i++) {
        FC_TRY(fc_delta_decode(w->decoders[i], i > 0 ? w->bytes : NULL, w->bytes, overwrite ? w->changed : NULL, size,
                               err));
    }
    return fc_delta_encoder_add_known(w->encoder, w->bytes, overwrite ? w->changed : NULL, size, err);
}

/* Finds out whether the frames of a tensor change a byte from now on. */
static fc_code any_positions(const fold_worker *w, const folded *f, bool *any, fc_error *err) {
    *any = false;
    for (size_t i = 0; i < f->link->count && !*any; i++) {
        uint64_t position;
        FC_TRY(fc_delta_next_position(w->decoders[i], &position, err));
        *any = position != UINT64_MAX;
    }
    return FC_OK;
}

static fc_code fold_tensor(fold_worker *w, folded *f, fc_error *err) {
    const bool overwrite = w->folder->report->encoding == FC_DELTA_OVERWRITE;
    fc_progress *progress = w->folder->options->work.progress;
    FC_TRY(begin_frames(w, f, err));
    FC_TRY(fc_delta_encoder_begin(w->encoder, (size_t)(f - w->folder->items), f->link->name,
                                  overwrite ? 0 : f->bytes /* it never exceeds the positions */, err));
    for (uint64_t at = 0; at < f->bytes;) {
        const size_t some = f->bytes - at < BLOCK ? (size_t)(f->bytes - at) : BLOCK;
        bool any = true;
        FC_TRY(fc_progress_count(progress, 0, err));
        FC_TRY(overwrite ? any_positions(w, f, &any, err) : FC_OK);
        if (!any) {
            break;
        }
        FC_TRY(fold_block(w, f, overwrite, some, err));
        at += some;
    }
    for (size_t i = 0; i < f->link->count; i++) {
        FC_TRY(fc_delta_decoder_end(w->decoders[i], false, err));
    }
    FC_TRY(fc_delta_encoder_end(w->encoder, &f->found, err));
    FC_TRY(take_checksum(f, err));
    return fc_progress_count(progress, f->stored, err);
}

/* Gives a worker what it needs. Its encoder outlives it. */
static fc_code prepare_worker(fold_worker *w, int number, fc_error *err) {
    folder *f = w->folder;
    w->decoders = calloc(f->links.count, sizeof(fc_delta_decoder *));
    FC_NEED(w->decoders, err, NULL);
    const fc_code rc = fc_delta_encoder_new(&f->how, number, &f->encoders[number], err);
    w->encoder = f->encoders[number];
    return rc;
}

static void free_worker(fold_worker *w, size_t count) {
    for (size_t i = 0; w && w->decoders && i < count; i++) {
        fc_delta_decoder_free(w->decoders[i]);
    }
    if (w) {
        free(w->decoders);
    }
    free(w);
}

/* Takes the next tensor. @return NULL at the end, or after a failure. */
static folded *take_tensor(folder *f, fc_code rc, const fc_error *err) {
    pthread_mutex_lock(&f->lock);
    if (rc != FC_OK && f->code == FC_OK) {
        f->code = rc;
        f->error = *err;
        fc_delta_sender_stop(f->how.sender);
    }
    folded *item = f->code == FC_OK && f->next < f->count ? &f->items[f->next++] : NULL;
    pthread_mutex_unlock(&f->lock);
    return item;
}

static void *run_folder(void *context) {
    folder *f = context;
    fc_error err = {FC_OK};
    fold_worker *w = calloc(1, sizeof *w);
    pthread_mutex_lock(&f->lock);
    const int number = f->nencoders++;
    pthread_mutex_unlock(&f->lock);
    fc_code rc = w ? FC_OK : fc_no_memory(&err, NULL);
    if (w) {
        w->folder = f;
        rc = prepare_worker(w, number, &err);
    }
    for (folded *item; (item = take_tensor(f, rc, &err)) != NULL;) {
        rc = fold_tensor(w, item, &err);
    }
    free_worker(w, f->links.count);
    return NULL;
}

/* ---- writing ---- */

static fc_code fold_content(void *context, const char *scratch, fc_delta_sender *sender, fc_delta_content *content,
                            fc_error *err) {
    folder *f = context;
    fc_fold_report *r = f->report;
    fc_delta_member *members = fc_arena_calloc(f->arena, f->count + 1, sizeof *members);
    FC_NEED(members, err, NULL);
    f->how.directory = scratch;
    f->how.sender = sender;
    FC_TRY(sender ? fc_delta_sender_begin(sender, f->count, err) : FC_OK);
    fc_progress_begin(f->options->work.progress, FC_PHASE_COPYING, FC_COUNTED_BYTES, r->source_bytes);
    fc_threads_run(f->threads, run_folder, f);
    if (f->code != FC_OK) {
        if (err) {
            *err = f->error;
        }
        return f->code;
    }
    for (size_t i = 0; i < f->count; i++) {
        const fc_delta_found *found = &f->items[i].found;
        if (found->changed_bytes > 0) {
            members[r->changed++] = (fc_delta_member){f->items[i].link->name, found};
            r->changed_bytes += found->changed_bytes;
            r->stored_bytes += found->frames[r->encoding].size;
        }
    }
    fc_sort_items(members, r->changed, sizeof *members, fc_order_texts);
    *content = (fc_delta_content){.number = r->number,
                                  .base = r->base,
                                  .encoding = r->encoding,
                                  .checksum = r->checksum,
                                  .members = members,
                                  .count = r->changed};
    return FC_OK;
}

static void release_encoders(void *context) {
    const folder *f = context;
    for (int i = 0; i < f->nencoders; i++) {
        fc_delta_encoder_free(f->encoders[i]);
    }
}

/* The target replaces none of the deltas, and nobody can read more than in them. */
static fc_code check_sources(const folder *f, const char *path, unsigned *forbidden, fc_error *err) {
    const char **inputs = fc_arena_calloc(f->arena, f->links.count + 1, sizeof *inputs);
    FC_NEED(inputs, err, path);
    for (size_t i = 0; i < f->links.count; i++) {
        const fc_delta_version *v = f->links.versions[i];
        inputs[i] = v->path;
        *forbidden |= fc_path_forbidden(v->path);
        for (size_t k = 0; k < v->ntensors; k++) {
            *forbidden |=
                k > 0 && v->tensors[k].path == v->tensors[k - 1].path ? 0 : fc_path_forbidden(v->tensors[k].path);
        }
    }
    return fc_check_inputs(path, inputs, "a delta that is folded", err);
}

/* Only the model tells what two encodings make together, and the index has one kind of checksum. */
static fc_code check_alike(const fc_delta_version *before, const fc_delta_version *v, fc_error *err) {
    if (v->encoding != before->encoding) {
        return fc_fail(err, FC_EUSAGE,
                       "%s: its encoding is %s, that of %s is %s, and only the model tells what both make; fold the "
                       "versions of each encoding on their own",
                       v->path, fc_delta_encoding_name(v->encoding), before->path,
                       fc_delta_encoding_name(before->encoding));
    }
    if (v->checksum != before->checksum) {
        return fc_fail(
            err, FC_EUSAGE, "%s: its checksums are %s, those of %s are %s; fold the versions of each kind on their own",
            v->path, fc_delta_checksum_name(v->checksum), before->path, fc_delta_checksum_name(before->checksum));
    }
    return FC_OK;
}

static fc_code fold_all(folder *f, const char *const *sources, size_t count, const char *path, fc_error *err) {
    fc_fold_report *r = f->report;
    unsigned forbidden = 0;
    FC_TRY(fc_delta_links_find(f->arena, sources, count, fc_delta_number_of(path), FC_DELTA_NO_NUMBER, &f->links, err));
    for (size_t i = 1; i < f->links.count; i++) {
        FC_TRY(check_alike(f->links.versions[i - 1], f->links.versions[i], err));
    }
    const fc_delta_version *first = f->links.versions[0], *last = f->links.versions[f->links.count - 1];
    *r = (fc_fold_report){.number = last->number,
                          .base = first->base,
                          .encoding = last->encoding,
                          .checksum = last->checksum,
                          .deltas = f->links.count};
    f->how.encoding = r->encoding;
    FC_TRY(fc_delta_choose_numbers(path, &r->number, &r->base, err));
    FC_TRY(check_sources(f, path, &forbidden, err));
    FC_TRY(list_tensors(f, fc_is_remote(path), err));
    FC_TRY(choose_threads(f, path, err));
    const fc_delta_publication publication = {.path = path,
                                              .force = f->options->force,
                                              .forbidden = forbidden,
                                              .memory = f->options->work.memory,
                                              .reporter = f->options->reporter,
                                              .progress = f->options->work.progress,
                                              .context = f,
                                              .make = fold_content,
                                              .release = release_encoders};
    return fc_delta_publish(&publication, err);
}

fc_code fc_delta_fold(const char *const *sources, size_t count, const char *path, const fc_fold_options *options,
                      fc_fold_report *report, fc_error *err) {
    folder f = {.options = options,
                .report = report,
                .how = {.level = options->level ? options->level : 1, .no_checksum = true},
                .arena = fc_arena_new()};
    fc_code rc;
    *report = (fc_fold_report){.number = FC_DELTA_NO_NUMBER, .base = FC_DELTA_NO_NUMBER};
    pthread_mutex_init(&f.lock, NULL);
    FC_TRY_GOTO(f.arena ? FC_OK : fc_no_memory(err, path), rc, out);
    if (!fc_zstd_is_built_in()) {
        rc = fc_fail(err, FC_EUNSUPPORTED, "%s: deltas need libzstd, and this build has none", path);
        goto out;
    }
    rc = fold_all(&f, sources, count, path, err);
out:
    pthread_mutex_destroy(&f.lock);
    fc_arena_free(f.arena);
    return rc;
}
