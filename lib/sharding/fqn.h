/*
 * Names of parameters and modules (FQNs) as components: what stands between the dots, without what wrappers leave
 * there, and whether it is optimizer state. For tensor-parallel plans and for the module tree of wrap policies.
 */
#ifndef FSDPCKPT_SHARDING_FQN_H
#define FSDPCKPT_SHARDING_FQN_H

#ifndef FSDPCKPT_PRIVATE
#error "this header is private to fsdpckpt: include <fsdpckpt/...> instead"
#endif

#include <stdbool.h>
#include <stddef.h>

/** Components of a name at most; no real one has as many. */
enum { FC_FQN_PARTS = 64 };

/** A component of a name or pattern, borrowed from it. */
typedef struct fc_fqn_part {
    const char *text;
    size_t len;
} fc_fqn_part;

/** The last components of a name, in order. */
typedef struct fc_fqn {
    fc_fqn_part parts[FC_FQN_PARTS];
    int count;
} fc_fqn;

bool fc_fqn_is(fc_fqn_part p, const char *text);
bool fc_fqn_is_one_of(fc_fqn_part p, const char *const *texts, size_t count);

/** Splits `text` at the dots, from the end: the last `most` (up to FC_FQN_PARTS) components that are no wrappers'. */
void fc_fqn_split(const char *text, int most, fc_fqn *out);

/**
 * Optimizer state is named "optim.state.<parameter>.<key>", with many spellings of the first part: the key is cut off,
 * so that what remains ends with the parameter's name.
 * @param n of all components.
 * @return the key; an empty part for what is no optimizer state.
 */
fc_fqn_part fc_fqn_cut_state_key(fc_fqn *n);

/** Whether `p` matches a component of a pattern, in which `*` stands for any text. */
bool fc_fqn_component_matches(fc_fqn_part pattern, fc_fqn_part p);

/**
 * Whether the name of `len` bytes equals `pattern` or ends with "." and it, component by component.
 */
bool fc_fqn_ends_with(const char *name, size_t len, const char *pattern);

#endif
