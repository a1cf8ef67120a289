/*
 * Adds an optimizer to torch_dist as megatron-core's distributed optimizer looks for it in the form
 * `fully_reshardable`: a state becomes `optimizer.state.<key>.<parameter>`, and the groups go into common.pt, with the
 * step.
 */
#include "checkpoint/path.h"
#include "fsdpckpt/try.h"
#include "torch_dist/adapting.h"

#include <stdio.h>

typedef struct adding {
    fc_dist_adapting *a;
    fc_arena *scratch;
} adding;

static fc_code add_state(void *context, const fc_tensor *value, const char *key, const char *parameter) {
    const adding *x = context;
    const char *name = fc_arena_printf(x->scratch, "optimizer.state.%s.%s", key, parameter);
    return name ? fc_dist_keep(x->a, value, name, NULL) : fc_no_memory(x->a->err, x->a->source->path);
}

/* Makes the path of a value in the state dict of an optimizer. */
static fc_path dist_path(bool experts, size_t optimizer, fc_path_element room[6], const char *number, const char *key) {
    size_t n = 0;
    room[n++] = (fc_path_element){.key = "optimizer"};
    if (experts) {
        room[n++] = (fc_path_element){.key = optimizer > 0 ? "1" : "0", .is_number = true};
    }
    if (number) {
        room[n++] = (fc_path_element){.key = "optimizer"};
        room[n++] = (fc_path_element){.key = "param_groups"};
        room[n++] = (fc_path_element){.key = number, .is_index = true};
    }
    room[n++] = (fc_path_element){.key = key};
    return (fc_path){room, n};
}

static fc_code add_setting(void *context, const fc_dist_setting *s) {
    const adding *x = context;
    fc_path_element room[6];
    char text[24];
    snprintf(text, sizeof text, "%zu", s->number);
    const fc_path path = dist_path(s->experts, s->optimizer, room, text, s->key);
    const char *name = fc_path_spell(x->a->out->arena, &path, '.');
    FC_NEED(name, x->a->err, x->a->source->path);
    return s->value ? fc_dist_keep(x->a, s->value, name, &path) : fc_dist_add_text(x->a, name, &path, s->json);
}

static fc_code add_types(const adding *x, bool experts) {
    for (size_t optimizer = 0; optimizer <= experts; optimizer++) {
        fc_path_element room[6];
        const fc_path path = dist_path(experts, optimizer, room, NULL, "param_state_sharding_type");
        const char *name = fc_path_spell(x->a->out->arena, &path, '.');
        FC_TRY(fc_dist_add_text(x->a, name, &path, "\"fully_reshardable\""));
    }
    return FC_OK;
}

fc_code fc_dist_add_optimizer(fc_dist_adapting *a, const fc_target *target, bool *taken, int64_t *step) {
    adding x = {a, fc_arena_new()};
    const fc_dist_optimizer to = {.context = &x, .add_state = add_state, .add_setting = add_setting};
    bool experts = false;
    fc_code rc = x.scratch ? fc_dist_find_optimizer(a, target, &to, taken, step, &experts)
                           : fc_no_memory(a->err, a->source->path);
    rc = rc == FC_OK && *step >= 0 ? add_types(&x, experts) : rc;
    fc_arena_free(x.scratch);
    return rc;
}
