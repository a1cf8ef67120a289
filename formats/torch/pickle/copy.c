/*
 * Copies a value of one pickle into another: see copy.h.
 */
#include "torch/pickle/copy.h"

#include "base/grow.h"
#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_DEPTH = 1000 }; /* as deep as Python's own pickler goes */

typedef struct fc_pv_map_slot {
    fc_pv key; /* 0 if the slot is free; no value that is looked up is 0 */
    uint32_t value;
} slot;

static slot *find_slot(slot *slots, size_t nslots, fc_pv key) {
    size_t i = (size_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & (nslots - 1);
    while (slots[i].key && slots[i].key != key) {
        i = (i + 1) & (nslots - 1);
    }
    return &slots[i];
}

static bool grow_map(fc_pv_map *map) {
    size_t nslots = map->nslots ? map->nslots * 2 : 64;
    slot *slots = calloc(nslots, sizeof *slots);
    if (!slots) {
        return false;
    }
    for (size_t i = 0; i < map->nslots; i++) {
        if (map->slots[i].key) {
            *find_slot(slots, nslots, map->slots[i].key) = map->slots[i];
        }
    }
    free(map->slots);
    map->slots = slots;
    map->nslots = nslots;
    return true;
}

uint32_t *fc_pv_map_at(fc_pv_map *map, fc_pv v) {
    if (map->used * 2 >= map->nslots && !grow_map(map)) {
        return NULL;
    }
    slot *s = find_slot(map->slots, map->nslots, v);
    map->used += !s->key;
    s->key = v;
    return &s->value;
}

fc_pv fc_pv_map_key(const fc_pv_map *map, size_t i) {
    return map->slots[i].key;
}

void fc_pv_map_free(fc_pv_map *map) {
    free(map->slots);
    *map = (fc_pv_map){0};
}

/* Records that `v` was just written, so that it is fetched from the memo from now on. */
static fc_code put_memo(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    uint32_t *memo = fc_pv_map_at(&c->memo, v);
    FC_NEED(memo, err, NULL);
    *memo = fc_torch_pickle_put(c->w) + 1;
    return FC_OK;
}

static fc_code copy_all(fc_pickle_copy *c, const fc_pv *items, size_t n, fc_error *err) {
    for (size_t i = 0; i < n; i++) {
        FC_TRY(fc_pickle_copy_value(c, items[i], err));
    }
    return FC_OK;
}

static fc_code copy_tuple(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    size_t n;
    const fc_pv *items = fc_pickle_tuple(c->p, v, &n);
    if (n > 3) {
        fc_torch_pickle_op(c->w, FC_PICKLE_MARK);
    }
    FC_TRY(copy_all(c, items, n, err));
    if (n > 3) {
        fc_torch_pickle_op(c->w, FC_PICKLE_TUPLE);
    } else {
        fc_torch_pickle_tuple(c->w, n);
    }
    return n > 0 ? put_memo(c, v, err) : FC_OK;
}

/* Writes MARK, the items, and the opcode that takes them; nothing if there are no items. */
static fc_code copy_items(fc_pickle_copy *c, fc_pv container, fc_pickle_opcode op, fc_error *err) {
    size_t n;
    const fc_pv *items = fc_pickle_items(c->p, container, &n);
    if (n == 0) {
        return FC_OK;
    }
    fc_torch_pickle_op(c->w, FC_PICKLE_MARK);
    FC_TRY(copy_all(c, items, n, err));
    fc_torch_pickle_op(c->w, op);
    return FC_OK;
}

static fc_code copy_state(fc_pickle_copy *c, fc_pv state, fc_error *err) {
    if (!state) {
        return FC_OK;
    }
    FC_TRY(fc_pickle_copy_value(c, state, err));
    fc_torch_pickle_op(c->w, FC_PICKLE_BUILD);
    return FC_OK;
}

static const char *text_of_value(const fc_pickle *p, fc_pv v) {
    size_t n;
    return fc_pickle_bytes(p, v, &n);
}

static void copy_global(fc_pickle_copy *c, fc_pv v) {
    const uint64_t *cell = c->p->cells + fc_pv_payload(v);
    fc_torch_pickle_global(c->w, text_of_value(c->p, cell[1]), text_of_value(c->p, cell[2]));
}

static fc_code copy_dict(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    const fc_pickle_container *d = fc_pickle_container_of(c->p, v);
    if (!d->cls) {
        fc_torch_pickle_op(c->w, FC_PICKLE_EMPTY_DICT);
    } else {
        copy_global(c, d->cls);
        if (d->factory) {
            FC_TRY(fc_pickle_copy_value(c, d->factory, err));
        }
        fc_torch_pickle_tuple(c->w, d->factory ? 1 : 0);
        fc_torch_pickle_op(c->w, FC_PICKLE_REDUCE);
    }
    FC_TRY(put_memo(c, v, err));
    FC_TRY(copy_items(c, v, FC_PICKLE_SETITEMS, err));
    return copy_state(c, d->state, err);
}

static fc_code copy_list(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    fc_torch_pickle_op(c->w, FC_PICKLE_EMPTY_LIST);
    FC_TRY(put_memo(c, v, err));
    return copy_items(c, v, FC_PICKLE_APPENDS, err);
}

/* Writes set([…]) or frozenset([…]), because protocol 2 has no opcodes for them. */
static fc_code copy_set(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    fc_torch_pickle_global(c->w, "__builtin__", fc_pv_typeof(v) == FC_PV_SET ? "set" : "frozenset");
    fc_torch_pickle_op(c->w, FC_PICKLE_EMPTY_LIST);
    FC_TRY(copy_items(c, v, FC_PICKLE_APPENDS, err));
    fc_torch_pickle_tuple(c->w, 1);
    fc_torch_pickle_op(c->w, FC_PICKLE_REDUCE);
    return put_memo(c, v, err);
}

static fc_code copy_size(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    fc_torch_pickle_global(c->w, "torch", "Size");
    FC_TRY(copy_tuple(c, fc_pv_make(FC_PV_TUPLE, fc_pv_payload(v)), err));
    fc_torch_pickle_tuple(c->w, 1);
    fc_torch_pickle_op(c->w, FC_PICKLE_REDUCE);
    return put_memo(c, v, err);
}

static fc_code copy_bytes(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    size_t n;
    const char *bytes = fc_pickle_bytes(c->p, v, &n);
    if (fc_pv_typeof(v) == FC_PV_BYTES) {
        fc_torch_pickle_bytes(c->w, bytes, n);
        return put_memo(c, v, err);
    }
    fc_torch_pickle_global(c->w, "__builtin__", "bytearray");
    fc_torch_pickle_bytes(c->w, bytes, n);
    fc_torch_pickle_tuple(c->w, 1);
    fc_torch_pickle_op(c->w, FC_PICKLE_REDUCE);
    return put_memo(c, v, err);
}

static fc_code copy_call(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    uint64_t kind = fc_pickle_call_kind(c->p, v);
    if (kind == 2) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "it is created with keyword arguments, which pickles of torch.save cannot express");
    }
    FC_TRY(fc_pickle_copy_value(c, fc_pickle_callee(c->p, v), err));
    FC_TRY(fc_pickle_copy_value(c, fc_pickle_arguments(c->p, v), err));
    fc_torch_pickle_op(c->w, kind == 1 ? FC_PICKLE_NEWOBJ : FC_PICKLE_REDUCE);
    FC_TRY(put_memo(c, v, err));
    fc_pv list = fc_pickle_list_items(c->p, v), dict = fc_pickle_dict_items(c->p, v);
    if (list) {
        FC_TRY(copy_items(c, list, FC_PICKLE_APPENDS, err));
    }
    if (dict) {
        FC_TRY(copy_items(c, dict, FC_PICKLE_SETITEMS, err));
    }
    return copy_state(c, fc_pickle_state(c->p, v), err);
}

/* Writes ('storage', class, key, location, number of elements) with a new key and the location "cpu". */
static fc_code copy_persid(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    size_t n = 0;
    char key[24];
    fc_pv id = fc_pickle_persid(c->p, v);
    const fc_pv *items = fc_pv_typeof(id) == FC_PV_TUPLE ? fc_pickle_tuple(c->p, id, &n) : NULL;
    if (n < 5 || !fc_pickle_is_str(c->p, items[0], "storage") || fc_pv_typeof(items[2]) != FC_PV_STR) {
        return fc_fail(err, FC_EUNSUPPORTED, "it refers to something that is not a storage of torch.save");
    }
    uint32_t *number = fc_pv_map_at(&c->keys, items[2]);
    FC_NEED(number, err, NULL);
    if (*number == 0) {
        FC_NEED(fc_grow(&c->storages, &c->storages_capacity, c->nstorages + 1, sizeof *c->storages), err, NULL);
        c->storages[c->nstorages++] = v;
        *number = (uint32_t)c->nstorages;
    }
    snprintf(key, sizeof key, "%" PRIu64, c->first_storage + *number - 1);
    fc_torch_pickle_op(c->w, FC_PICKLE_MARK);
    fc_torch_pickle_often(c->w, "storage");
    FC_TRY(fc_pickle_copy_value(c, items[1], err));
    fc_torch_pickle_str(c->w, key);
    fc_torch_pickle_often(c->w, "cpu");
    FC_TRY(fc_pickle_copy_value(c, items[4], err));
    fc_torch_pickle_op(c->w, FC_PICKLE_TUPLE);
    fc_torch_pickle_op(c->w, FC_PICKLE_BINPERSID);
    return FC_OK;
}

static fc_code copy_scalar(fc_pickle_copy *c, fc_pv v) {
    size_t n;
    int64_t integer = 0;
    const char *bytes;
    switch (fc_pv_typeof(v)) {
    case FC_PV_NONE:
        fc_torch_pickle_op(c->w, FC_PICKLE_NONE);
        break;
    case FC_PV_BOOL:
        fc_torch_pickle_bool(c->w, fc_pv_is_true(v));
        break;
    case FC_PV_FLOAT:
        fc_torch_pickle_float(c->w, fc_pickle_float(c->p, v));
        break;
    case FC_PV_BIGINT:
        bytes = fc_pickle_bytes(c->p, v, &n);
        fc_torch_pickle_bigint(c->w, (const unsigned char *)bytes, n);
        break;
    default:
        fc_pickle_int(c->p, v, &integer);
        fc_torch_pickle_int(c->w, integer);
        break;
    }
    return FC_OK;
}

/* Strings often repeat, as keys, so long ones go to the memo. */
static fc_code copy_string(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    size_t n;
    const char *text = fc_pickle_bytes(c->p, v, &n);
    fc_torch_pickle_strn(c->w, text, n);
    return put_memo(c, v, err);
}

static fc_code copy_compound(fc_pickle_copy *c, fc_pv v, fc_error *err) {
    switch (fc_pv_typeof(v)) {
    case FC_PV_STR:
        return copy_string(c, v, err);
    case FC_PV_BYTES:
    case FC_PV_BYTEARRAY:
        return copy_bytes(c, v, err);
    case FC_PV_TUPLE:
        return copy_tuple(c, v, err);
    case FC_PV_SIZE:
        return copy_size(c, v, err);
    case FC_PV_LIST:
        return copy_list(c, v, err);
    case FC_PV_DICT:
        return copy_dict(c, v, err);
    case FC_PV_SET:
    case FC_PV_FROZENSET:
        return copy_set(c, v, err);
    case FC_PV_GLOBAL:
        copy_global(c, v);
        return FC_OK;
    case FC_PV_CALL:
        return copy_call(c, v, err);
    case FC_PV_PERSID:
        return copy_persid(c, v, err);
    default:
        return fc_fail(err, FC_EUNSUPPORTED, "it contains a value that torch.save would not write");
    }
}

fc_code fc_pickle_copy_value(fc_pickle_copy *copy, fc_pv v, fc_error *err) {
    fc_pv_type type = fc_pv_typeof(v);
    if (type == FC_PV_NONE || type == FC_PV_BOOL || type == FC_PV_INT || type == FC_PV_BIGINT || type == FC_PV_FLOAT) {
        return copy_scalar(copy, v);
    }
    const uint32_t *memo = fc_pv_map_at(&copy->memo, v);
    FC_NEED(memo, err, NULL);
    if (*memo) {
        fc_torch_pickle_get(copy->w, *memo - 1);
        return FC_OK;
    }
    if (copy->depth == MAX_DEPTH) {
        return fc_fail(err, FC_EUNSUPPORTED, "it is nested too deeply");
    }
    copy->depth++;
    fc_code rc = copy_compound(copy, v, err);
    copy->depth--;
    return rc == FC_OK ? fc_torch_pickle_error(copy->w, err) : rc;
}

void fc_pickle_copy_free(fc_pickle_copy *copy) {
    free(copy->storages);
    fc_pv_map_free(&copy->memo);
    fc_pv_map_free(&copy->keys);
}
