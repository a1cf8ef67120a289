/*
 * Splits the names of an optimizer's values: see optim_name.h.
 */
#include "derived/optim_name.h"

#include "checkpoint/parameters.h"
#include "sharding/fqn.h"

#include <string.h>

static bool all_digits(const char *text, size_t len) {
    size_t i = 0;
    while (i < len && text[i] >= '0' && text[i] <= '9') {
        i++;
    }
    return i == len && len > 0;
}

static fc_optim_kind section(const char *text, size_t len) {
    return len == 5 && memcmp(text, "state", len) == 0           ? FC_OPTIM_STATE
           : len == 12 && memcmp(text, "param_groups", len) == 0 ? FC_OPTIM_GROUP
                                                                 : FC_OPTIM_NONE;
}

/* Finds a key of Megatron-Core's optimizers at the start of a name's rest. */
static const char *leading_key(const char *rest) {
    static const char *const keys[] = {"param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"};
    const size_t len = strcspn(rest, ".");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (strlen(keys[i]) == len && memcmp(keys[i], rest, len) == 0 && rest[len] == '.') {
            return keys[i];
        }
    }
    return NULL;
}

/* Splits Megatron-Core's "optimizer.state.exp_avg.layers.0.weight". A torch spelling ends in a key. */
static void put_key_first(fc_optim_name *n) {
    const char *key = n->kind == FC_OPTIM_STATE ? leading_key(n->text) : NULL;
    if (key && !fc_fqn_is_state_key((fc_fqn_component){n->key, strlen(n->key)})) {
        n->key = key;
        n->text += strlen(key) + 1;
        n->len = strlen(n->text);
        n->is_number = all_digits(n->text, n->len);
        n->key_first = true;
    }
}

/* Splits a name such as "optim.state.layers.0.weight.exp_avg". All of it, or its end, is in one path element. */
static fc_optim_name name_of_text(const char *text, size_t levels) {
    fc_optim_name n = {.levels = levels};
    const char *dot = strrchr(text, '.');
    for (const char *at = text; n.kind == FC_OPTIM_NONE && *at;) {
        size_t len = strcspn(at, ".");
        const char *rest = at + len + 1;
        if (dot && dot > rest && section(at, len) != FC_OPTIM_NONE) {
            n.kind = section(at, len);
            n.extra = at > text ? (size_t)(at - text) - 1 : 0;
            n.text = rest;
            n.len = (size_t)(dot - rest);
            n.key = dot + 1;
            n.is_number = all_digits(n.text, n.len);
        }
        at += len + (at[len] == '.');
    }
    put_key_first(&n);
    return n;
}

fc_optim_name fc_optim_name_of(const fc_target_tensor *w) {
    const fc_path_element *e = w->path.elements;
    fc_optim_name n = {0};
    for (size_t i = w->path.count; i-- > 0 && n.kind == FC_OPTIM_NONE;) {
        fc_optim_kind kind = section(e[i].key, strlen(e[i].key));
        bool number = i + 2 < w->path.count && (e[i + 1].is_number || e[i + 1].is_index);
        if (i + 2 < w->path.count && (kind == FC_OPTIM_STATE || (kind == FC_OPTIM_GROUP && number))) {
            n = (fc_optim_name){.kind = kind,
                                .levels = i,
                                .text = e[i + 1].key,
                                .len = strlen(e[i + 1].key),
                                .is_number = number,
                                .key = i + 3 == w->path.count ? e[i + 2].key : NULL};
        }
    }
    if (n.kind == FC_OPTIM_NONE) {
        n = w->path.count > 0 ? name_of_text(e[w->path.count - 1].key, w->path.count - 1) : name_of_text(w->name, 0);
    }
    if ((n.kind == FC_OPTIM_STATE && !n.key_first && !fc_is_optimizer_state(w->name)) ||
        (n.kind == FC_OPTIM_GROUP && !w->source->object)) {
        n.kind = FC_OPTIM_NONE;
    }
    return n;
}

bool fc_optim_is_list(const fc_optim_name *n) {
    return n->kind == FC_OPTIM_GROUP && n->is_number && n->key && strcmp(n->key, "params") == 0;
}
