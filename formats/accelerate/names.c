/*
 * The sections of a checkpoint of accelerate: their folders, and the names of their values.
 */
#include "accelerate/accelerate.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* torch's own get_state_dict is often saved with "optim", as by most trainers that are read here. */
static const struct {
    const char *word;
    uint32_t kind;
} heads[] = {{"model", 0}, {"optimizer", ACCELERATE_OPTIMIZER}, {"optim", ACCELERATE_OPTIMIZER}};

/* "" or "_<number>". */
static bool is_number(const char *text, size_t length, uint32_t *number) {
    *number = 0;
    if (length == 0) {
        return true;
    }
    bool ok = text[0] == '_' && length >= 2 && length <= 3 && (length == 2 || text[1] != '0');
    for (size_t i = 1; ok && i < length; i++) {
        ok = isdigit((unsigned char)text[i]) != 0;
        *number = *number * 10 + (uint32_t)(text[i] - '0');
    }
    return ok;
}

bool fc_accelerate_section(const char *name, uint32_t *section, size_t *length) {
    const char *dot = strchr(name, '.');
    *length = dot ? (size_t)(dot - name) : 0;
    for (size_t i = 0; dot && i < sizeof heads / sizeof *heads; i++) {
        size_t n = strlen(heads[i].word);
        uint32_t number;
        if (*length >= n && memcmp(name, heads[i].word, n) == 0 && is_number(name + n, *length - n, &number)) {
            *section = number * ACCELERATE_KINDS + heads[i].kind;
            return true;
        }
    }
    return false;
}

const char *fc_accelerate_head(uint32_t section) {
    return section % ACCELERATE_KINDS == ACCELERATE_OPTIMIZER ? "optimizer" : "model";
}

const char *fc_accelerate_own_head(fc_arena *arena, uint32_t section) {
    const char *head = fc_accelerate_head(section);
    const uint32_t number = section / ACCELERATE_KINDS;
    return number > 0 ? fc_arena_printf(arena, "%s_%u", head, (unsigned)number) : head;
}

void fc_accelerate_folder(uint32_t section, char folder[ACCELERATE_NAME]) {
    bool optimizer = section % ACCELERATE_KINDS == ACCELERATE_OPTIMIZER;
    snprintf(folder, ACCELERATE_NAME, "%s_%u", optimizer ? "optimizer" : "pytorch_model_fsdp",
             (unsigned)(section / ACCELERATE_KINDS));
}

bool fc_accelerate_rename(fc_arena *arena, size_t length, const char *head, const char **name, fc_path *path) {
    fc_path_element *elements = fc_arena_calloc(arena, path->count + 1, sizeof *elements);
    const char *renamed = fc_arena_printf(arena, "%s%s", head, *name + length);
    if (!elements || !renamed) {
        return false;
    }
    for (size_t i = 0; i < path->count; i++) {
        elements[i] = path->elements[i];
    }
    if (path->count > 0 && strncmp(elements[0].key, *name, length) == 0) {
        elements[0].key = fc_arena_printf(arena, "%s%s", head, elements[0].key + length);
        if (!elements[0].key) {
            return false;
        }
    }
    *name = renamed;
    path->elements = elements;
    return true;
}
