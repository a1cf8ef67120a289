/*
 * LoRA adapters inside the weights of a training run: PEFT's modules hold the base layer, the factors of each adapter,
 * and second copies of modules that are trained as a whole. Their names say which of these a value is. So the model and
 * its adapter become two checkpoints that share the bytes of the source, and are merged like any others.
 */
#include "base/name_table.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "plan/left_out.h"
#include "weights/adapters.h"
#include "weights/computed.h"

#include <string.h>

typedef enum part_kind {
    PART_BASE,   /* of the model */
    PART_FACTOR, /* of an adapter */
    PART_SAVED   /* of a module that is trained as a whole */
} part_kind;

/* What a name says. */
typedef struct part {
    part_kind kind;
    const char *name;    /* as in the model, or as PEFT saves the adapter */
    const char *adapter; /* its name; NULL: none */
    bool wrapped;        /* in a base layer */
} part;

typedef struct splitter {
    fc_checkpoint *source;
    part *parts;          /* one per value */
    const char *adapter;  /* the name of the only adapter */
    fc_arena *arena;      /* of what is temporary */
    fc_name_table *holds; /* modules that hold a base layer */
    fc_error *err;
} splitter;

/* ---- names ---- */

static bool is_component(const char *at, size_t len, const char *what) {
    return strlen(what) == len && memcmp(at, what, len) == 0;
}

static bool is_factor(const char *at, size_t len) {
    return len > 5 && memcmp(at, "lora_", 5) == 0;
}

bool fc_is_adapter_name(const char *name) {
    for (const char *at = name; *at;) {
        const size_t len = strcspn(at, ".");
        if (is_factor(at, len) || is_component(at, len, "base_layer") || is_component(at, len, "modules_to_save")) {
            return true;
        }
        at += len + (at[len] == '.');
    }
    return false;
}

/* Whether a name has a component that begins with "lora_". */
static bool has_factor(const char *name) {
    return strncmp(name, "lora_", 5) == 0 || strstr(name, ".lora_") != NULL;
}

/* Appends a component to a name. */
static char *put(char *out, const char *start, const char *at, size_t len) {
    if (out > start) {
        *out++ = '.';
    }
    memcpy(out, at, len);
    return out + len;
}

/* Reads a name: removes what PEFT adds to it, and records what these additions mean. */
static fc_code read_name(const splitter *s, const char *name, part *p) {
    char *text = fc_arena_alloc(s->arena, strlen(name) + 1), *out = text;
    const char *at = name;
    const bool factor = has_factor(name);
    bool names_adapter = false;
    FC_NEED(text, s->err, s->source->path);
    while (*at) {
        const size_t len = strcspn(at, "."), next = len + (at[len] == '.');
        const char *rest = at + next;
        if (names_adapter) {
            p->adapter = fc_arena_strndup(s->arena, at, len);
            FC_NEED(p->adapter, s->err, s->source->path);
            names_adapter = false;
        } else if (strncmp(at, "base_model.model.", 17) == 0) {
            at += 17;
            continue;
        } else if (is_component(at, len, "base_layer") && !factor) { /* PEFT keeps it in the names of factors */
            p->wrapped = true;
            fc_name_table_put(s->holds, name, at > name ? (size_t)(at - name) - 1 : 0, 0);
        } else if (is_component(at, len, "modules_to_save")) {
            p->kind = PART_SAVED;
            names_adapter = true;
        } else if (is_factor(at, len)) {
            p->kind = PART_FACTOR;
            names_adapter = *rest && strcmp(rest, "weight") != 0 && strcmp(rest, "bias") != 0;
            out = put(out, text, at, len);
        } else if (!is_component(at, len, "original_module")) {
            out = put(out, text, at, len);
        }
        at = rest;
    }
    *out = '\0';
    p->name = text;
    return FC_OK;
}

/* ---- what belongs together ---- */

static fc_code refuse_several(const splitter *s, const char *other) {
    const char *globs = fc_arena_printf(s->arena, "*.%s, *.%s.*", other, other);
    const bool plain = !other[strcspn(other, FC_NOT_IN_GLOBS)];
    fc_code rc = fc_fail(s->err, FC_EUSAGE, "%s: the model has the LoRA adapters '%.128s' and '%.128s'",
                         s->source->path, s->adapter, other);
    return fc_advise(s->err, rc, FC_HINT_EXCLUDE_OTHERS, plain ? globs : NULL);
}

/* @return how many base layers there are in all names. */
static size_t count_layers(const fc_checkpoint *source) {
    size_t count = 0;
    for (size_t i = 0; i < source->ntensors; i++) {
        for (const char *at = strstr(source->tensors[i].name, "base_layer"); at; at = strstr(at + 1, "base_layer")) {
            count++;
        }
    }
    return count;
}

/* Reads all names. */
static fc_code read_names(splitter *s) {
    const size_t count = s->source->ntensors;
    s->parts = fc_arena_calloc(s->arena, count + 1, sizeof *s->parts);
    s->holds = fc_name_table_new(s->arena, count_layers(s->source));
    FC_NEED(s->parts && s->holds, s->err, s->source->path);
    for (size_t i = 0; i < count; i++) {
        part *p = &s->parts[i];
        FC_TRY(read_name(s, s->source->tensors[i].name, p));
        if (p->adapter && s->adapter && strcmp(p->adapter, s->adapter) != 0) {
            return refuse_several(s, p->adapter);
        }
        s->adapter = p->adapter ? p->adapter : s->adapter;
    }
    return FC_OK;
}

/* Fails if a module with a base layer has values that are neither that nor factors, as adapters of other kinds have. */
static fc_code check_others(const splitter *s) {
    for (size_t i = 0; i < s->source->ntensors; i++) {
        const char *name = s->source->tensors[i].name;
        if (s->parts[i].kind != PART_BASE || s->parts[i].wrapped) {
            continue;
        }
        for (const char *dot = strchr(name, '.'); dot; dot = strchr(dot + 1, '.')) {
            if (fc_name_table_find(s->holds, name, (size_t)(dot - name)) != FC_NO_NAME) {
                return fc_fail(s->err, FC_EUNSUPPORTED, "%s: tensor %.256s belongs to an adapter that is not LoRA",
                               s->source->path, name);
            }
        }
    }
    return FC_OK;
}

/* Makes a checkpoint of the values of the model, or of those of its adapter. */
static fc_code take_values(const splitter *s, bool model, fc_checkpoint **out) {
    FC_TRY(fc_computed_new(&s->source, 1, s->source->ntensors, out, s->err));
    for (size_t i = 0; i < s->source->ntensors; i++) {
        if ((s->parts[i].kind == PART_BASE) == model) {
            FC_TRY(fc_computed_keep_as(*out, &s->source->tensors[i], s->parts[i].name, s->err));
        }
    }
    return FC_OK;
}

static fc_code merge(splitter *s, const char *config, fc_checkpoint **out, size_t *merged) {
    fc_checkpoint *model = NULL;
    fc_opened_adapter adapter = {.weight = 1};
    fc_code rc;
    FC_TRY(fc_adapter_config_load(config, s->arena, &adapter.config, s->err));
    FC_TRY(read_names(s));
    FC_TRY(check_others(s));
    FC_TRY_GOTO(take_values(s, true, &model), rc, out);
    FC_TRY_GOTO(take_values(s, false, &adapter.values), rc, out);
    FC_TRY_GOTO(fc_merge_opened(model, &adapter, 1, out, merged, s->err), rc, out);
    rc = fc_computed_own(model, s->err);
    if (rc != FC_OK) {
        fc_checkpoint_close(*out);
        *out = NULL;
    }
    return rc;
out:
    fc_checkpoint_close(adapter.values); /* neither owns the source */
    fc_checkpoint_close(model);
    return rc;
}

fc_code fc_merge_own_adapter(fc_checkpoint *source, const char *config, fc_checkpoint **out, size_t *merged,
                             fc_error *err) {
    splitter s = {.source = source, .arena = fc_arena_new(), .err = err};
    *out = NULL;
    *merged = 0;
    const fc_code rc = s.arena ? merge(&s, config, out, merged) : fc_no_memory(err, source->path);
    fc_arena_free(s.arena);
    return rc;
}
