/*
 * What the parts of check share: the state of a check, and helpers to add findings and build their texts.
 */
#pragma once

#include "fsdpckpt/check.h"
#include "plan/names.h"

typedef struct fc_check_run {
    const char *path;
    const fc_checkpoint *checkpoint; /* NULL when it cannot be opened */
    const fc_check_options *options;
    fc_arena *arena;
    const char *idle_exclude; /* as in fc_report */
    fc_names names;
    uint64_t
        *present; /* for each file, the bytes that are not yet reported as missing; NULL before the files are checked */
    fc_finding *findings; /* in the arena */
    size_t count, capacity;
    size_t allowed; /* number of allowed missing or unexpected names */
    bool no_memory; /* something could not be allocated: the whole check fails */
    fc_code failed; /* the first failure of the system, which says nothing about the checkpoint: the check fails */
    fc_error failure;
} fc_check_run;

/** Adds a copy of `finding` with its message. A count of 0 becomes 1. */
void fc_check_add(fc_check_run *c, const fc_finding *finding);

/** Fills the report, at the end. */
void fc_check_sum_up(const fc_check_run *c, fc_report *out);

/** Keeps a failure of the system: no memory, or an I/O error. @return whether `rc` is one. */
bool fc_check_failed(fc_check_run *c, fc_code rc, const fc_error *why);

/** Formats a text in the arena. On failure sets `no_memory` and returns "". */
const char *fc_check_text(fc_check_run *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/** Allocates `count` times `size` zeroed bytes in the arena. On failure sets `no_memory` and returns NULL. */
void *fc_check_alloc(fc_check_run *c, size_t count, size_t size);

/** Returns "float32[10, 6]", or "object" for an object. */
const char *fc_check_type(fc_check_run *c, const fc_tensor *tensor);

/** Returns "[10, 6]". */
const char *fc_check_shape(fc_check_run *c, const fc_tensor *tensor);

/** Returns " and 11 more", to append to the first of several names, or "" for a count of 1. */
const char *fc_check_others(fc_check_run *c, uint64_t count);

/**
 * Returns the rest of a name after "<word>.", which must be at the start or after a component that contains "optim":
 * "w.step" for the name "optim.state.w.step" and the word "state". NULL when there is none.
 */
const char *fc_check_after_section(const char *name, const char *word);

/** Returns the fix that gives `setting` one value. */
fc_fix fc_check_fix(fc_check_run *c, fc_setting setting, const char *value);

/** Returns the name of a setting in messages. */
const char *fc_check_setting(const fc_check_run *c, fc_setting setting);

/** Builds the message of a finding in the arena. NULL when out of memory. */
const char *fc_finding_message(const fc_check_run *c, const fc_finding *finding);

/** The parts of a check. Each adds its findings. */
void fc_check_files(fc_check_run *c);
void fc_check_coverage(fc_check_run *c);
void fc_check_objects(fc_check_run *c);
void fc_check_wrappers(fc_check_run *c);
void fc_check_optimizer(fc_check_run *c);
void fc_check_fit(fc_check_run *c);
void fc_check_against(fc_check_run *c, const fc_names *reference);

/** The names of one side that have no partner on the other side yet. */
typedef struct fc_unpaired {
    const fc_names *names;
    size_t *items; /* indexes into names, ascending */
    size_t count;
} fc_unpaired;

/** A pair of names that mean the same value. */
typedef struct fc_pair {
    size_t here, there; /* indexes into the names of the checkpoint and of the reference */
} fc_pair;

/**
 * Pair names that differ by a prefix, a wrapper or a rename. They remove the pairs from `here` and `there` and add
 * findings. The caller compares the shapes and dtypes of the pairs.
 * @param pairs receives at most here->count pairs. @return their number.
 */
size_t fc_check_prefixes(fc_check_run *c, fc_unpaired *here, fc_unpaired *there, fc_pair *pairs);
size_t fc_check_renames(fc_check_run *c, fc_unpaired *here, fc_unpaired *there, fc_pair *pairs);

/** Removes the pairs from both lists. */
void fc_check_take(fc_unpaired *here, fc_unpaired *there, const fc_pair *pairs, size_t count, fc_check_run *c);

/** A name component that FSDP, DDP, torch.compile or activation checkpointing adds. */
typedef struct fc_wrapper {
    const char *component; /* with its dot: "_orig_mod." */
    const char *by;        /* "torch.compile" */
} fc_wrapper;
enum { FC_WRAPPERS = 5 };
extern const fc_wrapper fc_wrappers[FC_WRAPPERS];

/** Returns a name without wrapper components. `which` (may be NULL) receives one bit per wrapper found. */
const char *fc_check_unwrap(fc_check_run *c, const char *name, size_t len, unsigned *which);

/** Returns a regular expression that matches exactly the first `len` characters of a text. */
const char *fc_check_regex(fc_check_run *c, const char *text, size_t len);

/** Escapes a text for the replacement of a rename rule. */
const char *fc_check_replacement(fc_check_run *c, const char *text);

/** Returns the rename rules that drop the `which` wrappers everywhere: "s/_orig_mod\.//g" for each. */
fc_fix fc_check_drop_wrappers(fc_check_run *c, unsigned which);

/** Lists the `which` wrappers for a message: who adds them ("torch.compile, FSDP"), or their components, which the
 *  message puts in quotes. */
const char *fc_check_list_wrappers(fc_check_run *c, unsigned which, bool by);
