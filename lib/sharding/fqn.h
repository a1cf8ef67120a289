/*
 * Names of parameters and modules (FQNs) as components: the text between the dots, without the names that wrappers
 * insert. Used by tensor-parallel plans and by the module tree of wrap policies.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/** The most components that a name is split into; real names have far fewer. */
enum { FC_FQN_COMPONENTS = 64 };

/** A component of a name or pattern. The text is borrowed and does not end in NUL. */
typedef struct fc_fqn_component {
    const char *text;
    size_t len;
} fc_fqn_component;

/** The last components of a name, in order. */
typedef struct fc_fqn {
    fc_fqn_component components[FC_FQN_COMPONENTS];
    int count;
} fc_fqn;

/** @return whether the component equals `text`. */
bool fc_fqn_is(fc_fqn_component p, const char *text);

/** @return whether the component equals one of `texts`. */
bool fc_fqn_is_one_of(fc_fqn_component p, const char *const *texts, size_t count);

/** Splits `text` at its dots and keeps the last `most` (up to FC_FQN_COMPONENTS) components that no wrapper inserted.
 */
void fc_fqn_split(const char *text, int most, fc_fqn *out);

/** @return whether the component is a key that torch.optim's optimizers keep for each parameter. */
bool fc_fqn_is_state_key(fc_fqn_component p);

/**
 * Removes the key from a name of optimizer state, "optim.state.<parameter>.<key>" in any of its spellings, so that the
 * name ends with that of the parameter.
 * @param n all components of the name.
 * @return the key, or an empty component when the name is not one of optimizer state.
 */
fc_fqn_component fc_fqn_take_state_key(fc_fqn *n);

/** @return whether `p` matches a pattern component, in which `*` stands for any text. */
bool fc_fqn_component_matches(fc_fqn_component pattern, fc_fqn_component p);

/** @return whether the last components of the name, which is `len` bytes long, match all components of `pattern`. */
bool fc_fqn_ends_with(const char *name, size_t len, const char *pattern);
