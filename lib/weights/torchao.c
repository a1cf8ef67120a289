/*
 * Weights of torchao, as it takes its tensors apart for safetensors: M.weight becomes M._weight_qdata, M._weight_scale
 * and more, and the object __metadata__ has JSON text for M.weight with the name of its class. Where that is lost,
 * shapes and dtypes tell enough.
 */
#include "fsdpckpt/format.h"
#include "fsdpckpt/try.h"
#include "weights/dequantizer.h"

#include <stdlib.h>
#include <string.h>

static const char object_name[] = "__metadata__", list_name[] = "tensor_names";

/* Classes whose values are (code - zero point) × scale in the order of the codes. */
static const char *const classes[] = {"Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"};

/* @return the name of the class in a member of the object; NULL: it is another member. */
static const char *class_of(const json_t *member, fc_arena *arena) {
    const char *text = json_string_value(member);
    json_t *root = text && *text == '{' ? json_loads(text, 0, NULL) : NULL;
    const char *type = json_string_value(json_object_get(root, "_type"));
    const char *out = type ? fc_arena_strndup(arena, type, strlen(type)) : NULL;
    json_decref(root);
    return out;
}

/* Takes the members that say how weights are stored out of the object. */
static void take_classes(fc_dequantizer *d) {
    const char *key;
    json_t *member;
    void *next;
    json_object_foreach_safe(d->metadata, next, key, member) {
        const char *type = class_of(member, d->scratch);
        if (type) {
            json_object_set_new(d->classes, key, json_string(type));
            json_object_del(d->metadata, key);
        }
    }
    if (json_object_size(d->classes) > 0) {
        json_object_del(d->metadata, list_name);
    }
}

fc_code fc_torchao_read(fc_dequantizer *d) {
    const size_t at = fc_name_table_find(d->names, object_name, sizeof object_name - 1);
    const char *text = NULL;
    d->described = at;
    if (at == FC_NO_NAME || !d->source->tensors[at].object || d->source->format->layout_only) {
        d->described = FC_NO_NAME;
        return FC_OK;
    }
    FC_TRY(fc_checkpoint_object_json(d->source, &d->source->tensors[at], d->scratch, &text, d->err));
    d->metadata = json_loads(text, 0, NULL);
    d->classes = json_object();
    FC_NEED(d->classes, d->err, d->source->path);
    take_classes(d);
    return FC_OK;
}

fc_code fc_torchao_keep_rest(fc_dequantizer *d) {
    const fc_tensor *object = &d->source->tensors[d->described];
    if (json_object_size(d->classes) == 0) {
        return fc_computed_keep(d->out, object, d->err);
    }
    if (json_object_size(d->metadata) == 0) {
        return FC_OK;
    }
    char *text = json_dumps(d->metadata, JSON_COMPACT);
    const char *copy = text ? fc_arena_strndup(d->out->arena, text, strlen(text)) : NULL;
    free(text);
    return copy ? fc_computed_text(d->out, object, copy, d->err) : fc_no_memory(d->err, d->source->path);
}

const char *fc_torchao_name(const fc_dequantizer *d, const char *codes, size_t end) {
    char *name = fc_arena_strndup(d->scratch, codes, strlen(codes) - end);
    char *dot = name ? strrchr(name, '.') : NULL, *last = dot ? dot + 1 : name;
    if (last && *last == '_') {
        memmove(last, last + 1, strlen(last));
    }
    return name;
}

fc_code fc_torchao_drop_whole(const fc_dequantizer *d, const char *codes, size_t end) {
    const char *name = fc_torchao_name(d, codes, end);
    const size_t at = name ? fc_name_table_find(d->names, name, strlen(name)) : FC_NO_NAME;
    if (at != FC_NO_NAME && d->source->tensors[at].object && d->source->tensors[at].object->refusal) {
        d->dropped[at] = true;
    }
    return name ? FC_OK : fc_no_memory(d->err, d->source->path);
}

fc_code fc_torchao_check(const fc_dequantizer *d, const fc_scaled *w, const char *name) {
    const char *type = json_string_value(json_object_get(d->classes, name));
    bool known = !type && w->scales->dtype != FC_U8 && w->scales->dtype != FC_F8_E8M0FNU;
    for (size_t i = 0; type && i < sizeof classes / sizeof *classes; i++) {
        known = known || strcmp(type, classes[i]) == 0;
    }
    return known ? FC_OK
                 : fc_dequantizer_refuse(d, w->codes, "they are torchao's %.64s, which cannot be dequantized",
                                         type ? type : "MXTensor or NVFP4Tensor");
}
