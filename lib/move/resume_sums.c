/*
 * The sums of the sources of a conversion that can be resumed: see resume_sums.h.
 */
#include "move/resume_sums.h"

#include "base/grow.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>

/* What the journal has of the sums of one source, or of another state: a flag, or a change of a number, is a sum of one
 * byte. */
typedef struct fc_source_sums {
    fc_source_crc *now; /* NULL: a state */
    fc_read_state state;
    struct {
        uint64_t bytes, sum;
    } * saved; /* count_sums of them */
} source_sums;

static size_t count_sums(const source_sums *s) {
    return s->now ? fc_source_crc_count(s->now) : s->state.count;
}

static fc_saved_sum save_sum(const source_sums *s, size_t index) {
    if (s->now) {
        return fc_source_crc_save(s->now, index);
    }
    if (s->state.flags) {
        return (fc_saved_sum){.bytes = atomic_load(&s->state.flags[index]) ? 1 : 0};
    }
    const uint64_t number = s->state.numbers[index];
    return (fc_saved_sum){.bytes = s->saved[index].bytes + (number != s->saved[index].sum), .sum = number};
}

/* @return false if it cannot be one of them. */
static bool load_sum(const source_sums *s, uint64_t index, const fc_saved_sum *sum) {
    if (index >= count_sums(s)) {
        return false;
    }
    if (s->now) {
        return fc_source_crc_load(s->now, (size_t)index, sum);
    }
    if (s->state.flags) {
        return sum->bytes == 1 && !atomic_exchange(&s->state.flags[index], true);
    }
    s->state.numbers[index] ^= sum->sum;
    return sum->bytes == 1;
}

static fc_code add_source(void *context, fc_source_crc *of, const fc_read_state *state, fc_error *err) {
    fc_resume_sums *sums = context;
    FC_NEED(fc_grow(&sums->sources, &sums->capacity, sums->count + 1, sizeof *sums->sources), err, NULL);
    source_sums *s = &sums->sources[sums->count];
    *s = (source_sums){.now = of, .state = state ? *state : (fc_read_state){NULL, NULL, 0}};
    s->saved = calloc(count_sums(s) + 1, sizeof *s->saved);
    FC_NEED(s->saved, err, NULL);
    sums->count++;
    return FC_OK;
}

fc_code fc_resume_sums_find(fc_resume_sums *sums, const fc_checkpoint *source, fc_source_crc *recorded, fc_error *err) {
    FC_TRY(add_source(sums, recorded, NULL, err));
    return source->format->reader.visit_sums ? source->format->reader.visit_sums(source, add_source, sums, err) : FC_OK;
}

void fc_resume_sums_free(fc_resume_sums *sums) {
    for (size_t i = 0; i < sums->count; i++) {
        free(sums->sources[i].saved);
    }
    free(sums->sources);
    *sums = (fc_resume_sums){NULL, 0, 0};
}

fc_code fc_resume_sums_load(const fc_resume_sums *sums, const fc_tile_journal *journal, const char *folder,
                            fc_error *err) {
    for (size_t i = 0; i < journal->nsums; i++) {
        const fc_done_sum *s = &journal->sums[i];
        if (s->source >= sums->count || !load_sum(&sums->sources[s->source], s->index, &s->sum)) {
            return fc_fail(err, FC_ECORRUPT, "%s: damaged: remove %s to begin again", journal->path, folder);
        }
        sums->sources[s->source].saved[s->index].bytes += s->sum.bytes;
        sums->sources[s->source].saved[s->index].sum ^= s->sum.sum;
    }
    return FC_OK;
}

fc_code fc_resume_sums_note(const fc_resume_sums *sums, fc_noted_sums *noted, fc_error *err) {
    for (size_t s = 0; s < sums->count; s++) {
        source_sums *of = &sums->sources[s];
        const size_t count = count_sums(of);
        for (size_t i = 0; i < count; i++) {
            fc_saved_sum sum = save_sum(of, i);
            sum.bytes -= of->saved[i].bytes;
            if (sum.bytes == 0) {
                continue;
            }
            FC_NEED(fc_grow(&noted->list, &noted->capacity, noted->count + 1, sizeof *noted->list), err, NULL);
            of->saved[i].bytes += sum.bytes;
            const uint64_t whole = sum.sum;
            sum.sum ^= of->saved[i].sum;
            of->saved[i].sum = whole;
            noted->list[noted->count++] = (fc_done_sum){s, i, sum};
        }
    }
    return FC_OK;
}
