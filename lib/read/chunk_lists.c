/*
 * The lists of chunks of tensors that are read in many small boxes: see fc_chunk_lists in move.h. A list is made when a
 * tensor with many chunks is read for the second time: one box alone is found faster without.
 */
#include "read/chunk_lists.h"
#include "plan/coverage.h"

#include "fsdpckpt/try.h"

#include <pthread.h>
#include <stdlib.h>

/* Fewer chunks need no list. */
enum { FEW_CHUNKS = 64 };

typedef struct entry {
    fc_coverage *list; /* NULL: not made yet; it is not changed once it is made */
    bool seen;         /* a box of the tensor was read */
} entry;

struct fc_chunk_lists {
    const fc_checkpoint *checkpoint;
    pthread_mutex_t lock; /* guards the entries */
    entry *entries;       /* one per tensor */
};

fc_chunk_lists *fc_chunk_lists_new(const fc_checkpoint *checkpoint) {
    fc_chunk_lists *lists = calloc(1, sizeof *lists);
    entry *entries = calloc(checkpoint->ntensors + 1, sizeof *entries);
    if (!lists || !entries) {
        free(lists);
        free(entries);
        return NULL;
    }
    lists->checkpoint = checkpoint;
    lists->entries = entries;
    pthread_mutex_init(&lists->lock, NULL);
    return lists;
}

void fc_chunk_lists_free(fc_chunk_lists *lists) {
    if (lists) {
        for (size_t i = 0; i < lists->checkpoint->ntensors; i++) {
            fc_coverage_free(lists->entries[i].list);
        }
        pthread_mutex_destroy(&lists->lock);
        free(lists->entries);
        free(lists);
    }
}

/* Returns the list of a tensor. `*out` stays NULL the first time. */
static fc_code list_of(fc_chunk_lists *lists, const fc_tensor *tensor, const fc_coverage **out, fc_error *err) {
    entry *e = &lists->entries[tensor - lists->checkpoint->tensors];
    fc_code rc = FC_OK;
    pthread_mutex_lock(&lists->lock);
    if (e->seen && !e->list) {
        rc = fc_coverage_list(lists->checkpoint, tensor, &e->list, err);
    }
    e->seen = true;
    *out = e->list;
    pthread_mutex_unlock(&lists->lock);
    return rc;
}

fc_code fc_chunk_lists_find(fc_chunk_lists *lists, const fc_checkpoint *checkpoint, const fc_tensor *tensor,
                            const fc_box *region, fc_coverage **out, fc_error *err) {
    const fc_coverage *list = NULL;
    *out = NULL;
    if (lists && tensor->nchunks >= FEW_CHUNKS && tensor >= checkpoint->tensors &&
        tensor < checkpoint->tensors + checkpoint->ntensors) {
        FC_TRY(list_of(lists, tensor, &list, err));
    }
    return list ? fc_coverage_part(list, region, out, err) : fc_coverage_within(checkpoint, tensor, region, out, err);
}
