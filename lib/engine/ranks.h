/*
 * What the ranks of a conversion tell each other: outcomes, where the files are, and sums. Everything here is
 * collective and does nothing where `comm` is NULL, so that fc_convert is one path for one process and for many.
 */
#ifndef FSDPCKPT_ENGINE_RANKS_H
#define FSDPCKPT_ENGINE_RANKS_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/move.h"

/** Whether this process writes headers and commits: rank 0. */
static inline bool fc_ranks_leads(const fc_comm *comm) {
    return !comm || comm->rank == 0;
}

/** As fc_comm_agree: FC_OK only if `mine` is, too. */
static inline fc_code fc_ranks_agree(fc_comm *comm, fc_code mine, fc_error *err) {
    fc_code rc = comm ? fc_comm_agree(comm, mine, err) : mine;
    return rc == FC_OK ? mine : rc;
}

/** Agrees, and that all ranks see the same checkpoint at `wanted->source`. */
fc_code fc_ranks_compare(fc_comm *comm, fc_code mine, const fc_target *target, fc_error *err);

/**
 * Agrees, and gives all ranks the path that rank 0 has.
 * @param path  rank 0's; of the others it is ignored.
 * @param arena of the copy that the others get; rank 0 keeps its own.
 */
fc_code fc_ranks_share_path(fc_comm *comm, fc_code mine, const char **path, fc_arena *arena, fc_error *err);

/** Agrees, and gives all ranks the number that rank 0 has. */
fc_code fc_ranks_share_number(fc_comm *comm, fc_code mine, size_t *number, fc_error *err);

/** Agrees, and gives all ranks what rank 0's format has decided of the part: its path, the items' offsets, and which of
 *  them the engine writes. */
fc_code fc_ranks_share_part(fc_comm *comm, fc_code mine, fc_target_file *file, fc_arena *arena, fc_error *err);

/** Agrees, makes durable what this rank has written into the part, and joins the digests of its contiguous items. */
fc_code fc_ranks_join_items(fc_comm *comm, fc_code mine, const fc_target *target, fc_target_file *file, bool crc32,
                            fc_error *err);

/** Agrees, and joins `count` sums (fc_move_options.digests). */
fc_code fc_ranks_join_sums(fc_comm *comm, fc_code mine, uint64_t *sums, size_t count, fc_error *err);

#endif
