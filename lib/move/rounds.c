/*
 * Exchanges the sizes of compressed chunks for their places. See rounds.h.
 */
#include "move/rounds.h"

#include "base/checked.h"
#include "fsdpckpt/try.h"
#include "ranks/exchange.h"

#include <stdlib.h>

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* All ranks take the band of the one that can hold least, and share small files too. */
static fc_code choose_band(fc_rounds *r, uint64_t most, fc_error *err) {
    const uint64_t ranks = (uint64_t)r->comm->size, even = (r->total + ranks - 1) / ranks;
    r->band = least(most, even);
    FC_TRY(r->comm->all_reduce(r->comm, &r->band, 1, FC_U64, FC_REDUCE_MIN, err));
    r->band = r->band ? r->band : 1;
    r->count = (r->total + ranks * r->band - 1) / (ranks * r->band);
    return FC_OK;
}

static fc_code make_lists(fc_rounds *r, fc_error *err) {
    size_t chunks;
    if (fc_mul_size((size_t)r->comm->size, (size_t)r->band, &chunks)) {
        r->sizes = calloc(chunks, sizeof *r->sizes);
        r->offsets = calloc(chunks, sizeof *r->offsets);
    }
    return r->sizes && r->offsets ? FC_OK : fc_no_memory(err, NULL);
}

fc_code fc_rounds_init(fc_rounds *rounds, fc_comm *comm, fc_code mine, const fc_target *target,
                       const fc_target_file *file, uint64_t most, fc_error *err) {
    *rounds = (fc_rounds){.comm = comm};
    FC_TRY(fc_ranks_agree(comm, mine, err));
    if (!comm) {
        return FC_OK;
    }
    for (size_t i = 0; i < file->nitems; i++) {
        rounds->total += file->items[i].chunk ? fc_chunk_count(target, &file->items[i]) : 0;
    }
    FC_TRY(choose_band(rounds, most, err));
    fc_code made = make_lists(rounds, err);
    made = made != FC_OK ? made : fc_chunk_walk_init(&rounds->walk, target, file, err);
    return fc_ranks_agree(comm, made, err);
}

void fc_rounds_free(fc_rounds *rounds) {
    fc_chunk_walk_free(&rounds->walk);
    free(rounds->sizes);
    free(rounds->offsets);
}

static uint64_t chunks_of_round(const fc_rounds *r) {
    const uint64_t all = r->band * (uint64_t)r->comm->size;
    return least(r->total - r->done * all, all);
}

uint64_t fc_rounds_own(const fc_rounds *rounds) {
    const uint64_t chunks = chunks_of_round(rounds), first = fc_rounds_first(rounds);
    return chunks > first ? least(chunks - first, rounds->band) : 0;
}

static fc_code place_all(fc_rounds *r, fc_writer *writer, fc_error *err) {
    const uint64_t chunks = chunks_of_round(r);
    for (uint64_t i = 0; i < chunks; i++) {
        const fc_target_item *item = r->walk.items[r->walk.next];
        const uint64_t size = r->sizes[i] >> 1;
        FC_TRY_CONTEXT(
            writer->format->writer.place(writer, item, r->walk.start, r->sizes[i] & 1, size, &r->offsets[i], err), err,
            "tensor %s", r->walk.target->tensors[item->tensor].name);
        fc_chunk_walk_step(&r->walk);
    }
    return FC_OK;
}

fc_code fc_rounds_exchange(fc_rounds *rounds, fc_code mine, fc_writer *writer, fc_error *err) {
    fc_comm *comm = rounds->comm;
    const size_t bytes = (size_t)rounds->band * sizeof *rounds->sizes;
    FC_TRY(fc_ranks_agree(comm, mine, err));
    FC_TRY(comm->all_gather(comm, rounds->sizes + fc_rounds_first(rounds), rounds->sizes, bytes, err));
    FC_TRY(fc_ranks_agree(comm, comm->rank == 0 ? place_all(rounds, writer, err) : FC_OK, err));
    FC_TRY(comm->broadcast(comm, rounds->offsets, bytes * (size_t)comm->size, 0, err));
    for (uint64_t i = 0; i < chunks_of_round(rounds); i++) {
        const uint64_t size = rounds->sizes[i] >> 1;
        rounds->stored += size;
        rounds->end = rounds->offsets[i] + size > rounds->end ? rounds->offsets[i] + size : rounds->end;
    }
    rounds->done++;
    return FC_OK;
}
