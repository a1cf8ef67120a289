/*
 * Groups the values beside a model: see beside.h.
 */
#include "commands/beside.h"

#include "fsdpckpt/export.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/try.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Lists what the model, which has the order of the checkpoint, lacks. */
static void list_values(beside *b, const fc_target_tensor *all, size_t count, const fc_target *model) {
    size_t next = 0;
    for (size_t i = 0; i < count; i++) {
        if (next < model->ntensors && model->tensors[next].source == all[i].source) {
            next++;
        } else {
            b->values[b->count++] = (beside_value){.name = all[i].name, .object = all[i].source->object != NULL};
        }
    }
    fc_sort_items(b->values, b->count, sizeof *b->values, fc_order_texts);
}

static bool has_names(const fc_checkpoint *checkpoint, const char *prefix, size_t len) {
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        if (strncmp(checkpoint->tensors[i].name, prefix, len) == 0) {
            return true;
        }
    }
    return false;
}

/* Names with the same first component follow each other. */
static void make_groups(beside *b, const fc_checkpoint *other) {
    beside_group *group = b->groups; /* the last one */
    for (size_t i = 0; i < b->count; i++) {
        beside_value *value = &b->values[i];
        if (i == 0 || group->len == 0 || strncmp(value->name, group->first, group->len) != 0) {
            const size_t len = strcspn(value->name, ".");
            group += i > 0;
            *group = (beside_group){.first = value->name, .len = value->name[len] ? len + 1 : 0};
            group->listed = group->len > 0 && has_names(other, value->name, group->len);
        }
        group->listed |= !value->object && !fc_is_beside_model(value->name);
        value->group = (size_t)(group - b->groups);
    }
}

fc_code beside_find(const fc_checkpoint *checkpoint, const fc_checkpoint *other, fc_arena *arena, beside *out,
                    fc_error *err) {
    static const fc_selection everything = {0};
    fc_target target = {0};
    fc_selected counts;
    fc_model_place place;
    fc_error why = {FC_OK, ""};
    *out = (beside){.count = 0};
    fc_code rc = fc_target_new(checkpoint, &everything, arena, &target, &counts, &why);
    const fc_target_tensor *all = target.tensors;
    const size_t count = target.ntensors;
    rc = rc == FC_OK ? fc_model_find(&target, arena, &place, &why) : rc;
    if (rc == FC_ENOMEM) {
        *err = why;
    }
    if (rc != FC_OK || target.ntensors == count) {
        return rc == FC_ENOMEM ? rc : FC_OK;
    }
    out->values = fc_arena_calloc(arena, count, sizeof *out->values);
    out->groups = fc_arena_calloc(arena, count, sizeof *out->groups);
    FC_NEED(out->values && out->groups, err, checkpoint->path);
    list_values(out, all, count, &target);
    make_groups(out, other);
    return FC_OK;
}

static beside_group *find_group(const beside *b, const char *name) {
    const beside_value *value = fc_find_struct(b->values, b->count, sizeof *b->values, name);
    return value && !b->groups[value->group].listed ? &b->groups[value->group] : NULL;
}

static size_t size_of(const beside_group *group) {
    return group->tensors + group->objects;
}

static void add_count(beside_group *group, bool object, int by) {
    *(object ? &group->objects : &group->tensors) += (size_t)by;
}

void beside_count(beside *b, const char *name, bool object) {
    beside_group *group = find_group(b, name);
    if (!group) {
        return;
    }
    if (size_of(group) == 1) { /* no longer alone */
        add_count(&b->rest, group->objects > 0, -1);
    }
    add_count(group, object, 1);
    if (size_of(group) == 1) {
        add_count(&b->rest, object, 1);
    }
}

beside_group *beside_group_of(beside *b, const char *name) {
    beside_group *group = find_group(b, name);
    if (!group || size_of(group) > 1) {
        return group;
    }
    if (!b->rest.first) {
        b->rest.first = name;
    }
    return size_of(&b->rest) > 1 ? &b->rest : NULL;
}

void beside_print_name(text_out *out, const beside_group *group) {
    char component[512];
    if (group->len > 0) {
        snprintf(component, sizeof component, "%.*s*", (int)group->len, group->first);
        text_name(out, component);
    } else {
        text_name(out, group->first);
        text_printf(out, " and %zu other%s", size_of(group) - 1, size_of(group) == 2 ? "" : "s");
    }
}

void beside_print_count(text_out *out, const beside_group *group) {
    if (group->tensors > 0) {
        text_printf(out, "%zu tensor%s%s", group->tensors, group->tensors == 1 ? "" : "s",
                    group->objects > 0 ? " and " : "");
    }
    if (group->objects > 0) {
        text_printf(out, "%zu object%s", group->objects, group->objects == 1 ? "" : "s");
    }
}
