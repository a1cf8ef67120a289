/*
 * Splits the names of parameters and modules at their dots. See fqn.h. Names come from checkpoints, patterns from a
 * user's plan or policy.
 */
#include "sharding/fqn.h"

#include <stdint.h>
#include <string.h>

typedef fc_fqn_component component;

bool fc_fqn_is(component p, const char *text) {
    return strlen(text) == p.len && memcmp(p.text, text, p.len) == 0;
}

bool fc_fqn_is_one_of(component p, const char *const *texts, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (fc_fqn_is(p, texts[i])) {
            return true;
        }
    }
    return false;
}

static bool contains(component p, const char *text) {
    return memmem(p.text, p.len, text, strlen(text)) != NULL;
}

/* Names that torch.compile, FSDP1 and activation checkpointing insert. Plans do not mention them. */
static bool is_wrapper(component p) {
    static const char *const wrappers[] = {"_orig_mod", "_fsdp_wrapped_module", "_fpw_module",
                                           "_checkpoint_wrapped_module"};
    return p.len > 0 && p.text[0] == '_' && fc_fqn_is_one_of(p, wrappers, sizeof wrappers / sizeof *wrappers);
}

/* Works from the end of the name, so that splitting off a few components of a long name is cheap. */
void fc_fqn_split(const char *text, int most, fc_fqn *out) {
    component reversed[FC_FQN_COMPONENTS];
    const char *end = text + strlen(text);
    int n = 0;
    for (const char *at = end; n < most; at--) {
        if (at == text || at[-1] == '.') {
            component p = {at, (size_t)(end - at)};
            if (!is_wrapper(p)) {
                reversed[n++] = p;
            }
            if (at == text) {
                break;
            }
            end = at - 1;
        }
    }
    out->count = n;
    for (int i = 0; i < n; i++) {
        out->components[i] = reversed[n - 1 - i];
    }
}

bool fc_fqn_is_state_key(component p) {
    static const char *const keys[] = {
        "step",      "exp_avg",  "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg",
        "acc_delta", "grad_avg", "sum",        "exp_inf",        "mu_product",      "prev",
        "eta",       "mu",       "ax",         "step_size",
    };
    return fc_fqn_is_one_of(p, keys, sizeof keys / sizeof *keys);
}

/*
 * Optimizer state is named "optim.state.<parameter>.<key>", with many spellings of the beginning. It is sharded like
 * its parameter, so the key is removed. Under "optim….state" any last component is a key. Elsewhere only torch.optim's
 * keys are, or a model saved under the key "state" would lose the names of its parameters.
 */
component fc_fqn_take_state_key(fc_fqn *n) {
    bool optim = false, state = false;
    component none = {"", 0};
    for (int i = 0; i + 2 < n->count; i++) {
        optim = optim || contains(n->components[i], "optim");
        state = state || fc_fqn_is(n->components[i], "state");
    }
    if (!optim && !state) {
        return none;
    }
    component last = n->components[n->count - 1];
    bool parameter = fc_fqn_is(last, "weight") || fc_fqn_is(last, "bias");
    if (fc_fqn_is_state_key(last) || (optim && state && !parameter)) {
        n->count--;
        return last;
    }
    return none;
}

bool fc_fqn_component_matches(component pattern, component p) {
    size_t i = 0, j = 0, star = SIZE_MAX, resume = 0;
    while (j < p.len) {
        if (i < pattern.len && pattern.text[i] == '*') {
            star = i++;
            resume = j;
        } else if (i < pattern.len && pattern.text[i] == p.text[j]) {
            i++;
            j++;
        } else if (star != SIZE_MAX) {
            i = star + 1;
            j = ++resume;
        } else {
            return false;
        }
    }
    while (i < pattern.len && pattern.text[i] == '*') {
        i++;
    }
    return i == pattern.len;
}

/* @return the last component of the first `len` bytes of `text`. */
static component last_of(const char *text, size_t len) {
    const char *dot = len ? memrchr(text, '.', len) : NULL;
    size_t start = dot ? (size_t)(dot - text) + 1 : 0;
    return (component){text + start, len - start};
}

bool fc_fqn_ends_with(const char *name, size_t len, const char *pattern) {
    size_t left = strlen(pattern);
    for (;;) {
        component p = last_of(pattern, left), n = last_of(name, len);
        if (!fc_fqn_component_matches(p, n)) {
            return false;
        }
        if (p.text == pattern) {
            return true;
        }
        if (n.text == name) {
            return false;
        }
        left = (size_t)(p.text - pattern) - 1;
        len = (size_t)(n.text - name) - 1;
    }
}
