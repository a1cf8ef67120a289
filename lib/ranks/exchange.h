/*
 * What the ranks of a conversion exchange: outcomes, paths and offsets, and sums. Every function is collective, and
 * does nothing when `comm` is NULL, so fc_convert is the same code for one process and for many.
 */
#pragma once

#include "fsdpckpt/comm.h"
#include "fsdpckpt/select.h"

/** Returns whether this process writes headers and commits: rank 0. */
static inline bool fc_ranks_leads(const fc_comm *comm) {
    return !comm || comm->rank == 0;
}

/** Like fc_comm_agree, and also returns `mine` when only this rank failed. */
static inline fc_code fc_ranks_agree(fc_comm *comm, fc_code mine, fc_error *err) {
    fc_code rc = comm ? fc_comm_agree(comm, mine, err) : mine;
    return rc == FC_OK ? mine : rc;
}

/** Agrees, and checks that all ranks see the same checkpoint: the same tensors in the same files. */
fc_code fc_ranks_compare(fc_comm *comm, fc_code mine, const fc_target *target, fc_error *err);

/** Fails on all ranks unless they read the same files. All ranks have the same number of files. (same_files.c) */
fc_code fc_ranks_compare_files(fc_comm *comm, const fc_checkpoint *source, fc_error *err);

/**
 * Agrees, and sends rank 0's path to all ranks.
 * @param path in on rank 0, out on the others.
 * @param arena owns the copy on the other ranks; rank 0 keeps its own path.
 */
fc_code fc_ranks_share_path(fc_comm *comm, fc_code mine, const char **path, fc_arena *arena, fc_error *err);

/** Agrees, and sends rank 0's number to all ranks. */
fc_code fc_ranks_share_number(fc_comm *comm, fc_code mine, size_t *number, fc_error *err);

/**
 * Agrees, and sends what rank 0's format has reserved for the target file to all ranks: its path, the items' offsets,
 * and which items the engine writes.
 */
fc_code fc_ranks_share_file(fc_comm *comm, fc_code mine, fc_target_file *file, fc_arena *arena, fc_error *err);

/** Agrees, syncs what this rank has written into the target file, and combines the digests of its items. */
fc_code fc_ranks_join_items(fc_comm *comm, fc_code mine, const fc_target *target, fc_target_file *file, bool crc32,
                            fc_error *err);

/**
 * Gathers every rank's bytes on every rank. Collective.
 * @param all receives them in the order of ranks, malloc'ed.
 * @param at  receives where each rank's bytes begin, malloc'ed.
 */
fc_code fc_ranks_gather_bytes(fc_comm *comm, const void *bytes, size_t size, unsigned char **all, size_t **at,
                              fc_error *err);

/** Sets each flag that is set on any rank. Collective. */
fc_code fc_ranks_join_flags(fc_comm *comm, bool *flags, size_t count, fc_error *err);

/** Agrees, and combines `count` sums (fc_move_options.digests). */
fc_code fc_ranks_join_sums(fc_comm *comm, fc_code mine, uint64_t *sums, size_t count, fc_error *err);
