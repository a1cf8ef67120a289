/*
 * Fuzzes rename rules, separated by NUL. The last text is a name, which they rename too. A new name is never empty.
 */
#include "fsdpckpt/checkpoint.h"
#include "plan/rename.h"

#include "fuzz.h"

enum { RULES = 4 };

static void rename_one(fc_rename *rename, const char *name, fc_arena *arena) {
    const fc_path_element element = {.key = name};
    const fc_tensor tensor = {.name = name, .path = {&element, 1}};
    const char *to = NULL;
    fc_path path;
    bool changed = false;
    fc_error err;
    if (fc_rename_apply(rename, &tensor, arena, &to, &path, &changed, &err) == FC_OK) {
        if (!to || !*to || (!changed && strcmp(to, name) != 0)) {
            abort();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *rules[RULES + 1] = {NULL};
    char *text = malloc(size + 1);
    size_t count = 0, at = 0;
    memcpy(text, data, size);
    text[size] = '\0';
    while (count < RULES && at + strlen(text + at) < size) {
        rules[count++] = text + at;
        at += strlen(text + at) + 1;
    }
    fc_arena *arena = fc_arena_new();
    const fc_selection selection = {.rename = rules, .strip_prefix = size % 3 == 0 ? "model" : NULL};
    fc_rename *rename = NULL;
    fc_error err;
    if (fc_rename_new(&selection, &rename, &err) == FC_OK) {
        for (int i = 0; i < FUZZ_NAMES; i++) {
            rename_one(rename, fuzz_names[i], arena);
        }
        if (text[at] && strlen(text + at) < 256) {
            rename_one(rename, text + at, arena);
        }
        fc_rename_free(rename);
    }
    fc_arena_free(arena);
    free(text);
    return 0;
}
