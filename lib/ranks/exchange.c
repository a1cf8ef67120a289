/*
 * What the ranks of a conversion exchange. See ranks.h. Each function agrees first, so a failed rank never leaves the
 * others waiting. A later failure on one rank is reported at the next agreement.
 */
#include "ranks/exchange.h"

#include "base/checked.h"
#include "base/crc.h"
#include "fsdpckpt/try.h"
#include "io/sync.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

/* Hashes what the headers say: names, dtypes, shapes, numbers of chunks and of files. */
static uint64_t fingerprint(const fc_target *target) {
    const uint64_t counts[] = {target->ntensors, target->source->nfiles};
    uint64_t print = XXH3_64bits(counts, sizeof counts);
    for (size_t i = 0; i < target->ntensors; i++) {
        const fc_tensor *t = target->tensors[i].source;
        uint64_t numbers[] = {(uint64_t)t->dtype, t->nchunks};
        print = XXH3_64bits_withSeed(t->name, strlen(t->name), print);
        print = XXH3_64bits_withSeed(t->shape, (size_t)t->ndim * sizeof *t->shape, print);
        print = XXH3_64bits_withSeed(numbers, sizeof numbers, print);
    }
    return print;
}

/* Compares this rank's tensors with those of rank 0. */
static fc_code compare_with_leader(fc_comm *comm, const fc_target *target, fc_error *err) {
    uint64_t own = fingerprint(target), leader = own;
    FC_TRY(comm->broadcast(comm, &leader, sizeof leader, 0, err));
    return own == leader ? FC_OK
                         : fc_fail(err, FC_EUSAGE,
                                   "%s: this rank does not see the same tensors as rank 0; put the checkpoint on a "
                                   "shared file system",
                                   target->source->path);
}

fc_code fc_ranks_compare(fc_comm *comm, fc_code mine, const fc_target *target, fc_error *err) {
    FC_TRY(fc_ranks_agree(comm, mine, err));
    if (!comm) {
        return FC_OK;
    }
    FC_TRY(fc_ranks_agree(comm, compare_with_leader(comm, target, err), err));
    return comm->size > 1 ? fc_ranks_compare_files(comm, target->source, err) : FC_OK;
}

/* Sends rank 0's bytes to all ranks; the others get a copy from `arena`. */
static fc_code share_bytes(fc_comm *comm, const void *bytes, size_t size, void **copy, fc_arena *arena, fc_error *err) {
    uint64_t length = size;
    FC_TRY(comm->broadcast(comm, &length, sizeof length, 0, err));
    void *memory = fc_arena_alloc(arena, (size_t)length);
    FC_TRY(fc_ranks_agree(comm, memory ? FC_OK : fc_no_memory(err, NULL), err));
    if (comm->rank == 0) {
        memcpy(memory, bytes, size);
    }
    *copy = memory;
    return comm->broadcast(comm, memory, (size_t)length, 0, err);
}

fc_code fc_ranks_share_path(fc_comm *comm, fc_code mine, const char **path, fc_arena *arena, fc_error *err) {
    FC_TRY(fc_ranks_agree(comm, mine, err));
    if (!comm) {
        return FC_OK;
    }
    void *copy;
    bool leads = comm->rank == 0;
    FC_TRY(share_bytes(comm, *path, leads ? strlen(*path) + 1 : 0, &copy, arena, err));
    if (!leads) {
        *path = copy;
    }
    return FC_OK;
}

fc_code fc_ranks_share_number(fc_comm *comm, fc_code mine, size_t *number, fc_error *err) {
    FC_TRY(fc_ranks_agree(comm, mine, err));
    return comm ? comm->broadcast(comm, number, sizeof *number, 0, err) : FC_OK;
}

/* What rank 0 has reserved for an item: its offset, and whether the engine writes it. */
typedef struct reserved_item {
    uint64_t offset, owned;
} reserved_item;

fc_code fc_ranks_share_file(fc_comm *comm, fc_code mine, fc_target_file *file, fc_arena *arena, fc_error *err) {
    FC_TRY(fc_ranks_share_path(comm, mine, &file->path, arena, err));
    if (!comm) {
        return FC_OK;
    }
    reserved_item *reserved = fc_arena_calloc(arena, file->nitems, sizeof *reserved);
    FC_TRY(fc_ranks_agree(comm, reserved ? FC_OK : fc_no_memory(err, NULL), err));
    for (size_t i = 0; i < file->nitems; i++) {
        reserved[i] = (reserved_item){file->items[i].offset, file->items[i].owned};
    }
    FC_TRY(comm->broadcast(comm, reserved, file->nitems * sizeof *reserved, 0, err));
    for (size_t i = 0; i < file->nitems; i++) {
        file->items[i].offset = reserved[i].offset;
        file->items[i].owned = reserved[i].owned != 0;
    }
    return FC_OK;
}

/*
 * Converts the digests of the items stored here to sums that combine by XOR, two numbers per item, or
 * back.
 */
static void convert_digests(const fc_target *target, fc_target_file *file, bool crc32, uint64_t *sums, bool back) {
    for (size_t i = 0; i < file->nitems; i++) {
        fc_target_item *item = &file->items[i];
        if (!item->owned) {
            continue;
        }
        uint64_t bytes = fc_target_item_bytes(target, item);
        if (back) {
            item->crc64 = fc_crc64_finish(sums[2 * i], bytes);
            item->crc32 = crc32 ? fc_crc32_finish((uint32_t)sums[2 * i + 1], bytes) : 0;
        } else { /* finishing is an XOR with a constant: doing it twice undoes it */
            sums[2 * i] = fc_crc64_finish(item->crc64, bytes);
            sums[2 * i + 1] = crc32 ? fc_crc32_finish(item->crc32, bytes) : 0;
        }
    }
}

fc_code fc_ranks_join_items(fc_comm *comm, fc_code mine, const fc_target *target, fc_target_file *file, bool crc32,
                            fc_error *err) {
    if (!comm) {
        return mine;
    }
    fc_arena *arena = fc_arena_new();
    uint64_t *sums = arena ? fc_arena_calloc(arena, file->nitems + 1, 2 * sizeof *sums) : NULL;
    fc_code ready = mine != FC_OK || sums ? mine : fc_no_memory(err, NULL);
    /* rank 0 cannot sync another machine's page cache */
    fc_code synced = ready == FC_OK ? fc_sync_path(AT_FDCWD, file->path, file->path, err) : ready;
    fc_code rc;
    FC_TRY_GOTO(fc_ranks_agree(comm, synced, err), rc, out);
    convert_digests(target, file, crc32, sums, false);
    FC_TRY_GOTO(comm->all_reduce(comm, sums, 2 * file->nitems, FC_U64, FC_REDUCE_XOR, err), rc, out);
    convert_digests(target, file, crc32, sums, true);
out:
    fc_arena_free(arena);
    return rc;
}

fc_code fc_ranks_join_sums(fc_comm *comm, fc_code mine, uint64_t *sums, size_t count, fc_error *err) {
    FC_TRY(fc_ranks_agree(comm, mine, err));
    return comm ? comm->all_reduce(comm, sums, count, FC_U64, FC_REDUCE_XOR, err) : FC_OK;
}

fc_code fc_ranks_join_flags(fc_comm *comm, bool *flags, size_t count, fc_error *err) {
    uint64_t *numbers = calloc(count + 1, sizeof *numbers);
    fc_code rc;
    FC_TRY_GOTO(fc_ranks_agree(comm, numbers ? FC_OK : fc_no_memory(err, NULL), err), rc, out);
    for (size_t i = 0; i < count; i++) {
        numbers[i] = flags[i];
    }
    FC_TRY_GOTO(comm->all_reduce(comm, numbers, count, FC_U64, FC_REDUCE_MAX, err), rc, out);
    for (size_t i = 0; i < count; i++) {
        flags[i] = numbers[i] != 0;
    }
out:
    free(numbers);
    return rc;
}

/* The sizes of all ranks' bytes, and where each begins. @return false when the sum overflows. */
static bool add_up(const uint64_t *counts, int ranks, size_t *sizes, size_t *at, size_t *total) {
    *total = 0;
    for (int r = 0; r < ranks; r++) {
        sizes[r] = (size_t)counts[r];
        at[r] = *total;
        if (!fc_add_size(*total, sizes[r], total)) {
            return false;
        }
    }
    return true;
}

fc_code fc_ranks_gather_bytes(fc_comm *comm, const void *bytes, size_t size, unsigned char **all, size_t **at,
                              fc_error *err) {
    const size_t ranks = (size_t)comm->size;
    uint64_t *counts = calloc(ranks, sizeof *counts), own = size;
    size_t *sizes = calloc(ranks, sizeof *sizes), *starts = calloc(ranks, sizeof *starts), total = 0;
    unsigned char *memory = NULL;
    fc_code rc;
    FC_TRY_GOTO(fc_ranks_agree(comm, counts && sizes && starts ? FC_OK : fc_no_memory(err, NULL), err), rc, out);
    FC_TRY_GOTO(comm->all_gather(comm, &own, counts, sizeof own, err), rc, out);
    memory = add_up(counts, comm->size, sizes, starts, &total) ? malloc(total + 1) : NULL;
    FC_TRY_GOTO(fc_ranks_agree(comm, memory ? FC_OK : fc_no_memory(err, NULL), err), rc, out);
    rc = comm->all_gather_v(comm, bytes, memory, sizes, starts, err);
out:
    free(counts);
    free(sizes);
    if (rc != FC_OK) {
        free(memory);
        free(starts);
        return rc;
    }
    *all = memory;
    *at = starts;
    return FC_OK;
}
