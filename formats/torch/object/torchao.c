/*
 * Finds the parts of torchao's tensors: see torchao.h.
 */
#include "torch/object/torchao.h"

#include "base/text.h"
#include "torch/object/item.h"

#include <string.h>

/* Whether `cls` is one of torchao's whose values are codes times scales. */
static bool is_known_class(const fc_pickle *p, fc_pv cls) {
    static const char *const names[] = {"Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"};
    const char *module = fc_pv_typeof(cls) == FC_PV_GLOBAL ? fc_pickle_module(p, cls) : "";
    bool known = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        known = known || fc_pickle_is_global(p, cls, NULL, names[i]);
    }
    return known && (strcmp(module, "torchao") == 0 || strncmp(module, "torchao.", 8) == 0);
}

/* Adds a member of the tensor if it is a tensor. @return false: the tensor is of a kind that is not known. */
static bool add_part(const fc_pickle *p, fc_pv key, fc_pv value, fc_torchao *out) {
    fc_torch_tensor ignored;
    size_t n;
    const char *text = fc_pv_typeof(key) == FC_PV_STR ? fc_pickle_bytes(p, key, &n) : NULL;
    if (!text || !fc_is_plain_text(text, n)) {
        return false;
    }
    if (!fc_torch_is_tensor(p, value)) {
        return true;
    }
    if (out->count == FC_TORCHAO_MOST || fc_torch_tensor_decode(p, value, &ignored, NULL) != FC_OK) {
        return false;
    }
    out->keys[out->count] = text;
    out->parts[out->count++] = value;
    return true;
}

bool fc_torchao_find(const fc_pickle *p, fc_pv v, fc_torchao *out) {
    size_t n = 0, members = 0;
    *out = (fc_torchao){.count = 0};
    if (fc_pv_typeof(v) != FC_PV_CALL ||
        !fc_pickle_is_global(p, fc_pickle_callee(p, v), "torch._tensor", "_rebuild_from_type_v2")) {
        return false;
    }
    const fc_pv *args = fc_pickle_call_items(p, v, &n);
    if (n < 4 || !is_known_class(p, args[1]) || fc_pv_typeof(args[3]) != FC_PV_DICT) {
        return false;
    }
    const fc_pv *pairs = fc_pickle_items(p, args[3], &members);
    bool good = true;
    for (size_t i = 0; good && i + 1 < members; i += 2) {
        good = add_part(p, pairs[i], pairs[i + 1], out);
    }
    return good && out->count > 0;
}

const char *fc_torchao_key(const char *name, const char *part, fc_arena *arena) {
    const char *dot = strrchr(name, '.'), *last = dot ? dot + 1 : name;
    return fc_arena_printf(arena, "%.*s_%s_%s", (int)(last - name), name, last, part);
}
