/*
 * Finds name components that DDP, FSDP, torch.compile and activation checkpointing add, and the conversion options that
 * remove them.
 */
#include "check/check.h"
#include "derived/flat_units.h"

#include <string.h>

const fc_wrapper fc_wrappers[FC_WRAPPERS] = {
    {"module.", "DistributedDataParallel"},
    {"_orig_mod.", "torch.compile"},
    {"_fsdp_wrapped_module.", "FSDP"},
    {"_fpw_module.", "FSDP of torch 1"},
    {"_checkpoint_wrapped_module.", "activation checkpointing"},
};

/* Returns the wrapper whose component has the `n` characters at `at`, or FC_WRAPPERS. */
static size_t wrapper_of(const char *at, size_t n) {
    size_t w = 0;
    while (w < FC_WRAPPERS && (strlen(fc_wrappers[w].component) != n || memcmp(fc_wrappers[w].component, at, n) != 0)) {
        w++;
    }
    return w;
}

/* Returns the length of the component at `at`, including its dot. */
static size_t component_length(const char *at, size_t left) {
    const char *dot = memchr(at, '.', left);
    return dot ? (size_t)(dot + 1 - at) : left;
}

const char *fc_check_unwrap(fc_check_run *c, const char *name, size_t len, unsigned *which) {
    unsigned set = 0;
    char *copy = fc_check_alloc(c, len + 1, 1);
    char *to = copy;
    for (size_t at = 0, n; copy && at < len; at += n) {
        n = component_length(name + at, len - at);
        size_t w = wrapper_of(name + at, n);
        if (w < FC_WRAPPERS) {
            set |= 1U << w;
        } else {
            memcpy(to, name + at, n);
            to += n;
        }
    }
    if (which) {
        *which = set;
    }
    return copy ? copy : "";
}

/* Returns a text with a backslash before each of the `special` characters. */
static const char *escape(fc_check_run *c, const char *text, size_t len, const char *special) {
    char *escaped = fc_check_alloc(c, 2 * len + 1, 1);
    char *to = escaped;
    for (size_t i = 0; escaped && i < len; i++) {
        if (strchr(special, text[i])) {
            *to++ = '\\';
        }
        *to++ = text[i];
    }
    return escaped ? escaped : "";
}

const char *fc_check_regex(fc_check_run *c, const char *text, size_t len) {
    return escape(c, text, len, "\\.[]{}()*+?^$|/");
}

const char *fc_check_replacement(fc_check_run *c, const char *text) {
    return escape(c, text, strlen(text), "\\&/");
}

fc_fix fc_check_drop_wrappers(fc_check_run *c, unsigned which) {
    const char **rules = fc_check_alloc(c, FC_WRAPPERS, sizeof *rules);
    size_t count = 0;
    for (size_t w = 0; rules && w < FC_WRAPPERS; w++) {
        if (which >> w & 1) {
            const char *component = fc_wrappers[w].component;
            rules[count++] = fc_check_text(c, "s/%s//g", fc_check_regex(c, component, strlen(component)));
        }
    }
    return (fc_fix){FC_SETTING_RENAME, rules, count};
}

const char *fc_check_list_wrappers(fc_check_run *c, unsigned which, bool by) {
    const char *list = "", *separator = by ? ", " : "' and '";
    for (size_t w = 0; w < FC_WRAPPERS; w++) {
        if (which >> w & 1) {
            list = fc_check_text(c, "%s%s%s", list, *list ? separator : "",
                                 by ? fc_wrappers[w].by : fc_wrappers[w].component);
        }
    }
    return list;
}

static void check_flat_parameters(fc_check_run *c) {
    fc_finding f = {.kind = FC_FOUND_FLAT_PARAMETERS};
    size_t module;
    for (size_t i = 0; i < c->names.count; i++) {
        if (fc_is_flat_key(c->names.items[i].name, &module)) {
            f.name = f.count++ ? f.name : c->names.items[i].name;
        }
    }
    if (f.count > 0) {
        fc_check_add(c, &f);
    }
}

/*
 * Without a reference the model may itself be wrapped, so these are warnings. "module." may be the model's own name for
 * a submodule, unless all names start with it.
 */
void fc_check_wrappers(fc_check_run *c) {
    fc_finding found[FC_WRAPPERS] = {{.kind = FC_FOUND_WRAPPED_NAMES}};
    size_t leading[FC_WRAPPERS] = {0};
    for (size_t i = 0; i < c->names.count; i++) {
        const char *name = c->names.items[i].name;
        unsigned which = 0;
        (void)fc_check_unwrap(c, name, strlen(name), &which);
        for (size_t w = 0; which && w < FC_WRAPPERS; w++) {
            if (which >> w & 1) {
                const char *component = fc_wrappers[w].component;
                found[w].name = found[w].count++ ? found[w].name : name;
                leading[w] += strncmp(name, component, strlen(component)) == 0;
            }
        }
    }
    for (size_t w = 0; w < FC_WRAPPERS; w++) {
        const char *component = fc_wrappers[w].component;
        bool all = leading[w] == c->names.count, telling = component[0] == '_';
        if (found[w].count > 0 && (all || telling)) {
            found[w].kind = all ? FC_FOUND_WRAPPED_PREFIX : FC_FOUND_WRAPPED_NAMES;
            found[w].detail = component;
            found[w].expected = fc_wrappers[w].by;
            found[w].fix =
                all ? fc_check_fix(c, FC_SETTING_STRIP_PREFIX, component) : fc_check_drop_wrappers(c, 1U << w);
            fc_check_add(c, &found[w]);
        }
    }
    check_flat_parameters(c);
}
