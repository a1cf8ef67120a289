/*
 * Progress counters: workers add to them, and a reader takes a consistent snapshot. See fsdpckpt/progress.h.
 */
#include "fsdpckpt/progress.h"

const char *fc_phase_name(fc_phase phase) {
    static const char *const names[FC_PHASE_COUNT] = {
        [FC_PHASE_NONE] = "starting",       [FC_PHASE_GATHERING] = "gathering", [FC_PHASE_OPENING] = "opening",
        [FC_PHASE_PLANNING] = "planning",   [FC_PHASE_COPYING] = "copying",     [FC_PHASE_READING] = "reading",
        [FC_PHASE_COMPARING] = "comparing", [FC_PHASE_VERIFYING] = "verifying", [FC_PHASE_CHECKING] = "checking",
        [FC_PHASE_SYNCING] = "syncing",
    };
    return names[phase < FC_PHASE_COUNT ? phase : FC_PHASE_NONE];
}

const char *fc_counted_name(fc_counted unit) {
    static const char *const names[FC_COUNTED_COUNT] = {"bytes", "files", "tensors"};
    return names[unit < FC_COUNTED_COUNT ? unit : FC_COUNTED_BYTES];
}

fc_progress_state fc_progress_look(const fc_progress *progress) {
    fc_progress_state state;
    unsigned before, after;
    do { /* retries are rare: a phase changes seldom and within a few instructions */
        before = atomic_load(&progress->changes);
        state = (fc_progress_state){.phase = (fc_phase)atomic_load(&progress->phase),
                                    .unit = (fc_counted)atomic_load(&progress->unit),
                                    .done = atomic_load(&progress->done),
                                    .total = atomic_load(&progress->total),
                                    .number = before};
        after = atomic_load(&progress->changes);
    } while (before != after || before % 2);
    return state;
}

void fc_progress_begin(fc_progress *progress, fc_phase phase, fc_counted unit, uint64_t total) {
    if (!progress) {
        return;
    }
    if (atomic_load(&progress->phase) == (unsigned)phase && atomic_load(&progress->unit) == (unsigned)unit) {
        atomic_fetch_add(&progress->total, total);
        return;
    }
    atomic_fetch_add(&progress->changes, 1);
    atomic_store(&progress->phase, (unsigned)phase);
    atomic_store(&progress->unit, (unsigned)unit);
    atomic_store(&progress->done, 0);
    atomic_store(&progress->total, total);
    atomic_fetch_add(&progress->changes, 1);
    if (progress->began) {
        progress->began(progress->context, progress);
    }
}

fc_code fc_progress_count(fc_progress *progress, uint64_t n, fc_error *err) {
    if (!progress) {
        return FC_OK;
    }
    if (n > 0) {
        atomic_fetch_add_explicit(&progress->done, n, memory_order_relaxed);
    }
    return atomic_load_explicit(&progress->cancel, memory_order_relaxed) ? fc_fail(err, FC_EINTERRUPTED, "interrupted")
                                                                         : FC_OK;
}

/* Of each thread, because files on servers are read by calls that know only a descriptor (docs/ARCHITECTURE.md,
   decisions). */
static _Thread_local const fc_progress *watched;

const fc_progress *fc_progress_watch(const fc_progress *progress) {
    const fc_progress *before = watched;
    watched = progress;
    return before;
}

const fc_progress *fc_progress_watched(void) {
    return watched;
}
