/*
 * Divides the memory of a job. See budget.h.
 */
#include "read/budget.h"

#include "fsdpckpt/try.h"
#include "net/remote.h"
#include "read/source.h"
#include "read/threads.h"
#include "read/tuning.h"

#include <inttypes.h>

static size_t clamp(uint64_t value, uint64_t low, uint64_t high) {
    return (size_t)(value < low ? low : value > high ? high : value);
}

uint64_t fc_memory_of(const fc_work_options *options) {
    return options && options->memory ? options->memory : FC_DEFAULT_MEMORY;
}

fc_code fc_memory_check(uint64_t memory, fc_error *err) {
    if (memory == 0 || memory >= FC_LEAST_MEMORY) {
        return FC_OK;
    }
    return fc_advise(
        err, fc_fail(err, FC_EUSAGE, "%" PRIu64 " bytes of memory are too few: at least 1 MiB is needed", memory),
        FC_HINT_MEMORY, NULL);
}

bool fc_reads_from_servers(const fc_checkpoint *checkpoint) {
    bool remote = false;
    for (size_t i = 0; i < checkpoint->nfiles && !remote; i++) {
        remote = fc_is_remote(checkpoint->files[i].path);
    }
    return remote;
}

int fc_wanted_threads(int given, bool remote, int processes) {
    const int each = FC_THREADS_REMOTE / (processes > 1 ? processes : 1);
    return given > 0 ? given : !remote ? 0 : each > FC_THREADS_SHARED ? each : FC_THREADS_SHARED;
}

fc_code fc_budget_divide(const fc_work_options *options, int threads, const fc_worker_needs *each, fc_budget *out,
                         fc_error *err) {
    const uint64_t memory = fc_memory_of(options);
    const uint64_t windows = (uint64_t)each->sources, tiles = (uint64_t)each->tiles;
    const uint64_t fixed = windows * fc_source_overhead() + each->extra;
    const uint64_t workers = each->remote ? memory / 4 * 3 : memory / 2;
    const uint64_t least = each->remote ? FC_LEAST_REMOTE_BYTES : FC_LEAST_TILE_BYTES;
    FC_TRY(fc_memory_check(memory, err));
    const uint64_t fit = workers / (fixed + (windows + tiles) * least);
    out->threads = (uint64_t)threads <= fit ? threads : fit < 1 ? 1 : (int)fit;
    const uint64_t share = workers / (uint64_t)out->threads, rest = share > fixed ? share - fixed : 0;
    uint64_t part = rest / (windows + tiles);
    out->window = clamp(part, FC_LEAST_TILE_BYTES, FC_SCRATCH_BYTES);
    if (each->remote && part > out->window) { /* what the windows do not need */
        part = (rest - windows * out->window) / tiles;
    }
    out->tile = clamp(part, FC_LEAST_TILE_BYTES, FC_TILE_BYTES);
    out->large_tile = clamp(part, out->tile, FC_LARGE_TILE_BYTES);
    const uint64_t held = (uint64_t)out->threads * (fixed + windows * out->window + tiles * out->large_tile);
    out->decoded = (memory > held ? memory - held : 0) / windows;
    out->files = fc_files_per_worker(each->sources * out->threads);
    return FC_OK;
}
