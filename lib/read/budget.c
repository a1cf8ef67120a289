/*
 * Divides the memory of a job. See budget.h.
 */
#include "read/budget.h"

#include "fsdpckpt/try.h"
#include "read/source.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <inttypes.h>

static size_t clamp(uint64_t value, uint64_t low, uint64_t high) {
    return (size_t)(value < low ? low : value > high ? high : value);
}

fc_code fc_memory_check(uint64_t memory, fc_error *err) {
    if (memory == 0 || memory >= FC_LEAST_MEMORY) {
        return FC_OK;
    }
    return fc_advise(
        err, fc_fail(err, FC_EUSAGE, "%" PRIu64 " bytes of memory are too few: at least 1 MiB is needed", memory),
        FC_HINT_MEMORY, NULL);
}

fc_code fc_budget_divide(const fc_work_options *options, int threads, const fc_worker_needs *each, fc_budget *out,
                         fc_error *err) {
    const uint64_t memory = options && options->memory ? options->memory : FC_DEFAULT_MEMORY;
    const uint64_t windows = (uint64_t)each->sources, tiles = (uint64_t)each->tiles;
    const uint64_t fixed = windows * fc_source_overhead() + each->extra;
    FC_TRY(fc_memory_check(memory, err));
    const uint64_t fit = memory / 2 / (fixed + (windows + tiles) * FC_LEAST_TILE_BYTES);
    out->threads = (uint64_t)threads <= fit ? threads : fit < 1 ? 1 : (int)fit;
    const uint64_t share = memory / 2 / (uint64_t)out->threads;
    const uint64_t part = share > fixed ? (share - fixed) / (windows + tiles) : 0;
    out->tile = clamp(part, FC_LEAST_TILE_BYTES, FC_TILE_BYTES);
    out->large_tile = clamp(part, out->tile, FC_LARGE_TILE_BYTES);
    out->window = clamp(part, FC_LEAST_TILE_BYTES, FC_SCRATCH_BYTES);
    const uint64_t held = (uint64_t)out->threads * (fixed + windows * out->window + tiles * out->large_tile);
    out->decoded = (memory > held ? memory - held : 0) / windows;
    out->files = fc_files_per_worker(each->sources * out->threads);
    return FC_OK;
}
