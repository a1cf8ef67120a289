/*
 * The checksums of tensors that deltas change. A checksum takes bytes in order, and blocks come almost in order: a few
 * that come early are kept until those in front of them are there. What is then still missing is read once more at the
 * end.
 */
#include "delta/patched.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Compares the checksum of a tensor. */
static fc_code end_sum(const fc_patched *p, fc_patched_state *s, fc_error *err) {
    const fc_delta_link *link = s->of->link;
    const fc_delta_tensor *last = link->tensors[link->count - 1];
    char digits[FC_DELTA_DIGITS];
    fc_delta_sum_end(s->sum, digits);
    free(s->sum);
    s->sum = NULL;
    return strcasecmp(digits, last->checksum) == 0
               ? FC_OK
               : fc_fail(err, FC_ECORRUPT,
                         "%s: tensor %.256s: the checksum of the new bytes is %s, but the delta says %.64s: %s is not "
                         "the version that the first delta changes, or the bytes of one of them are damaged",
                         last->path, last->name, digits, last->checksum, p->base.sources[0]->path);
}

/* Adds the next bytes of a tensor. All functions up to fc_patched_sum are called with the lock held. */
static fc_code add_sum(fc_patched *p, fc_patched_state *s, const unsigned char *bytes, size_t size, fc_error *err) {
    fc_delta_sum_add(s->sum, bytes, size);
    s->summed += size;
    fc_delta_sum_save(s->sum, s->summed, s->progress);
    return s->summed == s->of->bytes ? end_sum(p, s, err) : FC_OK;
}

/* Lists the tensor as one that was read, and begins its checksum: goes on with that of an earlier run, if there is one.
 */
static fc_code begin_state(fc_patched *p, fc_patched_state *s, fc_error *err) {
    const fc_delta_link *link = s->of->link;
    s->read = true;
    s->next = p->states;
    p->states = s;
    s->sum = aligned_alloc(_Alignof(fc_delta_sum), sizeof *s->sum);
    FC_NEED(s->sum, err, s->tensor->name);
    s->summed = fc_delta_sum_load(s->sum, link->versions[link->count - 1]->checksum, s->progress);
    if (s->summed >= s->of->bytes) { /* it was compared then */
        free(s->sum);
        s->sum = NULL;
    }
    return FC_OK;
}

/* Keeps a block for later; without memory it is read again. */
static void keep_block(fc_patched *p, const fc_patched_state *s, uint64_t at, const unsigned char *bytes, size_t size) {
    fc_patch_kept *k = &p->kept[p->next_kept++ % FC_PATCH_KEPT];
    k->of = NULL;
    if (k->room < size) {
        free(k->bytes);
        k->bytes = malloc(size);
        k->room = k->bytes ? size : 0;
    }
    if (k->bytes && k->room >= size) {
        memcpy(k->bytes, bytes, size);
        k->of = s;
        k->at = at;
        k->size = size;
    }
}

/* Finds the kept block that is next. */
static fc_patch_kept *find_kept(fc_patched *p, const fc_patched_state *s) {
    for (size_t i = 0; i < FC_PATCH_KEPT; i++) {
        if (p->kept[i].of == s && p->kept[i].at == s->summed) {
            return &p->kept[i];
        }
    }
    return NULL;
}

static fc_code sum_block(fc_patched *p, fc_patched_state *s, uint64_t at, const unsigned char *bytes, size_t size,
                         fc_error *err) {
    FC_TRY(s->read ? FC_OK : begin_state(p, s, err));
    if (at > s->summed) {
        keep_block(p, s, at, bytes, size);
        return FC_OK;
    }
    if (at < s->summed) {
        return FC_OK; /* it is read again */
    }
    FC_TRY(add_sum(p, s, bytes, size, err));
    for (fc_patch_kept *k; (k = find_kept(p, s)) != NULL;) {
        k->of = NULL;
        FC_TRY(add_sum(p, s, k->bytes, k->size, err));
    }
    return FC_OK;
}

fc_code fc_patched_sum(fc_patched *p, fc_patched_state *s, uint64_t at, const unsigned char *bytes, size_t size,
                       fc_error *err) {
    pthread_mutex_lock(&p->lock);
    const fc_code rc = sum_block(p, s, at, bytes, size, err);
    pthread_mutex_unlock(&p->lock);
    return rc;
}

/* Reads the blocks of a tensor that its checksum lacks. */
static fc_code complete_sum(fc_derived *derived, const fc_patched_state *s, fc_error *err) {
    const fc_tensor *t = s->tensor;
    unsigned char *buf = NULL;
    size_t room = 0;
    fc_code rc = FC_OK;
    for (size_t i = 0; rc == FC_OK && i < t->nchunks; i++) {
        const fc_box box = fc_chunk_box(t, &t->chunks[i]);
        const size_t size = (size_t)fc_box_volume(&box) * fc_dtype_size(t->dtype);
        if (fc_patched_offset(t, i) < s->summed) {
            continue;
        }
        if (size > room) {
            free(buf);
            buf = malloc(size);
            room = size;
        }
        rc = buf ? fc_patched_block(derived, t, i, derived->no_crcs, buf, err) : fc_no_memory(err, t->name);
    }
    free(buf);
    return rc;
}

static bool was_read(const fc_patched_tensor *t) {
    bool read = false;
    for (size_t i = 0; i < t->state->tensor->nchunks && !read; i++) {
        read = atomic_load(&t->from.read[i]);
    }
    return read;
}

fc_code fc_patched_check(const fc_checkpoint *checkpoint, const fc_comm *comm, fc_error *err) {
    fc_patched *p = checkpoint->state;
    (void)comm; /* each rank compares what it has read */
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_patched_tensor *t = checkpoint->tensors[i].detail;
        if (t->link && !t->state->read && was_read(t)) {
            FC_TRY(begin_state(p, t->state, err)); /* by an earlier run, perhaps without the end of its checksum */
        }
    }
    for (const fc_patched_state *s = p->states; s; s = s->next) {
        if (s->summed < s->of->bytes) {
            FC_TRY(complete_sum(&p->base, s, err));
        }
    }
    return FC_OK;
}

void fc_patched_sums_free(fc_patched *p) {
    for (fc_patched_state *s = p->states; s; s = s->next) {
        free(s->sum);
    }
    for (size_t i = 0; i < FC_PATCH_KEPT; i++) {
        free(p->kept[i].bytes);
    }
}
