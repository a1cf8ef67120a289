/*
 * What the parts of check share: the check being made, its names, and how findings are added.
 */
#ifndef FSDPCKPT_CHECK_CHECK_H
#define FSDPCKPT_CHECK_CHECK_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include "fsdpckpt/check.h"
#include "plan/names.h"

typedef struct checking {
    const char *path;
    const fc_checkpoint *checkpoint; /* NULL: it cannot be opened */
    const fc_check_options *options;
    fc_arena *arena;
    fc_names names;
    fc_finding *findings; /* grown in the arena */
    size_t count, capacity;
    size_t allowed; /* missing and unexpected ones */
    bool no_memory; /* a finding could not be added: the check fails as a whole */
} checking;

/** Adds a copy of `finding` and makes its message; a count of 0 becomes 1. */
void fc_check_add(checking *c, const fc_finding *finding);

/** A formatted text in the arena; "" and `no_memory` when there is none. */
const char *fc_check_text(checking *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/** `count` times `size` zeroed bytes in the arena; NULL and `no_memory` when there are none. */
void *fc_check_room(checking *c, size_t count, size_t size);

/** "float32[10, 6]", "object" for an object. */
const char *fc_check_type(checking *c, const fc_tensor *tensor);

/** "[10, 6]" */
const char *fc_check_shape(checking *c, const fc_tensor *tensor);

/** " and 11 more", "" for a count of 1: what goes behind the first of several names. */
const char *fc_check_others(checking *c, uint64_t count);

/** A text quoted for a shell, where it needs to be. */
const char *fc_check_quote(checking *c, const char *text);

/**
 * What follows "<word>." in a name, behind a component with "optim" in it or at the start: of "optim.state.w.step" and
 * the word "state" "w.step". NULL: nothing.
 */
const char *fc_check_after_section(const char *name, const char *word);

/** The message of a finding, allocated from the arena; NULL when out of memory. */
const char *fc_finding_message(const checking *c, const fc_finding *finding);

/** The parts of a check. Each adds what it finds. */
void fc_check_files(checking *c);
void fc_check_coverage(checking *c);
void fc_check_objects(checking *c);
void fc_check_wrappers(checking *c);
void fc_check_optimizer(checking *c);
void fc_check_fit(checking *c);
void fc_check_against(checking *c, const fc_names *reference);

/** Names of one side that the other does not have, while they are being paired. */
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
 * Pairs names that differ by a prefix, a wrapper or a rename: they leave `here` and `there`, a finding says how, and
 * their shapes and dtypes are compared by the caller.
 * @param pairs room for as many as there are in `here`; @return how many.
 */
size_t fc_check_prefixes(checking *c, fc_unpaired *here, fc_unpaired *there, fc_pair *pairs);
size_t fc_check_renames(checking *c, fc_unpaired *here, fc_unpaired *there, fc_pair *pairs);

/** Takes the pairs out of the lists they come from. */
void fc_check_take(fc_unpaired *here, fc_unpaired *there, const fc_pair *pairs, size_t count, checking *c);

/** What FSDP, DDP, torch.compile and activation checkpointing put into names. */
typedef struct fc_wrapper {
    const char *component; /* with its dot: "_orig_mod." */
    const char *by;        /* "torch.compile" */
} fc_wrapper;
enum { FC_WRAPPERS = 5 };
extern const fc_wrapper fc_wrappers[FC_WRAPPERS];

/** A name without the components that wrappers leave; `which` receives the bits of those that were there. */
const char *fc_check_unwrap(checking *c, const char *name, size_t len, unsigned *which);

/** The first `len` characters of a text as a regular expression that matches just them. */
const char *fc_check_regex(checking *c, const char *text, size_t len);

/** A text as the replacement of a rule, which stands for itself. */
const char *fc_check_replacement(checking *c, const char *text);

/** "--rename 's/_orig_mod\.//'" for each of `which` wrappers: drops them wherever they are. */
const char *fc_check_drop_options(checking *c, unsigned which);

/** "torch.compile" for each of `which` wrappers, with commas. */
const char *fc_check_wrapped_by(checking *c, unsigned which);

#endif
