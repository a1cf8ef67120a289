/*
 * Stores and reads the values of a pickle: tuples, instances, strings and containers.
 */
#include "base/checked.h"
#include "base/grow.h"
#include "base/little.h"
#include "torch/names/harmless.h"
#include "torch/pickle/machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define XXH_INLINE_ALL /* the header contains everything, so there is nothing to link */
#include <xxhash.h>

bool fc_pickle_add_cells(fc_pickle *p, size_t n, uint64_t *index) {
    size_t needed;
    if (!fc_add_size(p->ncells, n, &needed) || !fc_grow(&p->cells, &p->cells_capacity, needed, sizeof *p->cells)) {
        return false;
    }
    *index = p->ncells;
    p->ncells = needed;
    return true;
}

bool fc_pickle_add_tuple(fc_pickle *p, fc_pv_type type, const fc_pv *items, size_t n, fc_pv *out) {
    uint64_t at;
    if (!fc_pickle_add_cells(p, n + 1, &at)) {
        return false;
    }
    p->cells[at] = n;
    if (n > 0) {
        memcpy(p->cells + at + 1, items, n * sizeof *items);
    }
    *out = fc_pv_make(type, at);
    return true;
}

bool fc_pickle_add_text(fc_pickle *p, fc_pv_type type, uint64_t n, fc_pv *out, unsigned char **bytes) {
    size_t size, needed;
    if (n > SIZE_MAX / 2 || !fc_add_size((size_t)n, sizeof(fc_pickle_text) + 8, &size)) {
        return false;
    }
    size -= size % 8;
    if (!fc_add_size(p->ntext, size, &needed) || !fc_grow(&p->text, &p->text_capacity, needed, 1)) {
        return false;
    }
    fc_pickle_text *record = (fc_pickle_text *)(void *)(p->text + p->ntext);
    *record = (fc_pickle_text){n, {0, 0}};
    *bytes = (unsigned char *)(record + 1);
    (*bytes)[n] = '\0';
    *out = fc_pv_make(type, p->ntext / 8);
    p->ntext = needed;
    return true;
}

static const fc_pickle_text *interned_at(const fc_pickle *p, uint64_t slot) {
    return (const fc_pickle_text *)(const void *)(p->text + (slot - 1) * 8);
}

/* @return the slot with `text`, or the empty slot where it belongs. */
static size_t find_slot(const fc_pickle *p, const uint64_t *slots, size_t nslots, const fc_pickle_text *text) {
    size_t n = (size_t)text->length;
    size_t i = (size_t)XXH3_64bits_withSeed(text + 1, n, p->hash_seed) & (nslots - 1);
    for (; slots[i]; i = (i + 1) & (nslots - 1)) {
        const fc_pickle_text *other = interned_at(p, slots[i]);
        if (other->length == n && memcmp(other + 1, text + 1, n) == 0) {
            break;
        }
    }
    return i;
}

/*
 * The author of a file must not know which strings collide. If there is no randomness yet (early in boot), an address
 * is better than a constant.
 */
static uint64_t random_seed(const fc_pickle *p) {
    uint64_t seed;
    return getrandom(&seed, sizeof seed, GRND_NONBLOCK) == (ssize_t)sizeof seed ? seed : (uint64_t)(uintptr_t)p;
}

static bool grow_interned(fc_pickle *p) {
    size_t nslots = p->interned_slots ? p->interned_slots * 2 : 64;
    if (p->interned_slots == 64) {
        /* Small tables need no seed: few strings cannot collide harmfully, and this saves a system call. */
        p->hash_seed = random_seed(p);
    }
    uint64_t *slots = calloc(nslots, sizeof *slots);
    if (!slots) {
        return false;
    }
    for (size_t i = 0; i < p->interned_slots; i++) {
        if (p->interned[i]) {
            slots[find_slot(p, slots, nslots, interned_at(p, p->interned[i]))] = p->interned[i];
        }
    }
    free(p->interned);
    p->interned = slots;
    p->interned_slots = nslots;
    return true;
}

bool fc_pickle_intern_last(fc_pickle *p, fc_pv *text) {
    if (p->ninterned * 2 >= p->interned_slots && !grow_interned(p)) {
        return false;
    }
    uint64_t at = fc_pv_payload(*text);
    size_t slot = find_slot(p, p->interned, p->interned_slots, fc_pickle_record(p, *text));
    if (p->interned[slot]) {
        p->ntext = (size_t)at * 8; /* already stored, so free the new copy */
        *text = fc_pv_make(FC_PV_STR, p->interned[slot] - 1);
    } else {
        p->interned[slot] = at + 1;
        p->ninterned++;
    }
    return true;
}

bool fc_pickle_add_string(fc_pickle *p, const char *s, size_t n, fc_pv *out) {
    unsigned char *bytes;
    if (!fc_pickle_add_text(p, FC_PV_STR, n, out, &bytes)) {
        return false;
    }
    memcpy(bytes, s, n);
    return fc_pickle_intern_last(p, out);
}

bool fc_pickle_add_container(fc_pickle *p, fc_pv_type type, fc_pv *out) {
    uint64_t index;
    if (p->free_container) {
        index = p->free_container - 1;
        p->free_container = p->containers[index].next_free;
    } else {
        if (p->ncontainers >= UINT32_MAX - 1 ||
            !fc_grow(&p->containers, &p->containers_capacity, p->ncontainers + 1, sizeof *p->containers)) {
            return false;
        }
        index = p->ncontainers++;
        p->containers[index] = (fc_pickle_container){0};
    }
    *out = fc_pv_make(type, index);
    return true;
}

bool fc_pickle_append(fc_pickle *p, fc_pv container, const fc_pv *items, size_t n) {
    fc_pickle_container *c = &p->containers[fc_pv_payload(container)];
    size_t needed;
    if (!fc_add_size(c->count, n, &needed)) {
        return false;
    }
    if (needed > c->capacity) {
        /* Small containers mostly stay small, and there may be millions of them. */
        size_t want = c->capacity < 4 ? needed : c->capacity * 2 > needed ? c->capacity * 2 : needed;
        fc_pv *grown = want > SIZE_MAX / sizeof *grown ? NULL : realloc(c->items, want * sizeof *grown);
        if (!grown) {
            return false;
        }
        c->items = grown;
        c->capacity = want;
    }
    if (n > 0) {
        memcpy(c->items + c->count, items, n * sizeof *items);
    }
    c->count = needed;
    return true;
}

void fc_pickle_recycle(fc_pickle *p, fc_pv container) {
    uint64_t index = fc_pv_payload(container);
    fc_pickle_container *c = &p->containers[index];
    if (c->capacity > 64) {
        free(c->items);
        c->items = NULL;
        c->capacity = 0;
    }
    c->count = 0;
    c->cls = c->factory = c->state = 0;
    c->next_free = p->free_container;
    p->free_container = (uint32_t)index + 1;
}

bool fc_pickle_add_global(fc_pickle *p, fc_global_kind kind, uint32_t aux, fc_pv module, fc_pv name, fc_pv *out) {
    size_t m, n;
    const char *module_name = fc_pickle_bytes(p, module, &m), *own_name = fc_pickle_bytes(p, name, &n);
    const uint32_t entry = fc_harmless_find(module_name, m, own_name, n);
    uint64_t at;
    if (!fc_pickle_add_cells(p, 4, &at)) {
        return false;
    }
    p->cells[at + 3] = entry;
    p->cells[at] = (uint64_t)kind | (uint64_t)aux << 32;
    p->cells[at + 1] = module;
    p->cells[at + 2] = name;
    *out = fc_pv_make(FC_PV_GLOBAL, at);
    return true;
}

bool fc_pickle_add_int(fc_pickle *p, int64_t value, fc_pv *out) {
    const int64_t limit = INT64_C(1) << 55;
    if (value >= -limit && value < limit) {
        *out = fc_pv_make(FC_PV_INT, (uint64_t)value);
        return true;
    }
    unsigned char *bytes;
    if (!fc_pickle_add_text(p, FC_PV_BIGINT, 8, out, &bytes)) {
        return false;
    }
    fc_store_little(bytes, (uint64_t)value, 8);
    return true;
}

bool fc_pickle_add_float(fc_pickle *p, double value, fc_pv *out) {
    uint64_t at;
    if (!fc_pickle_add_cells(p, 1, &at)) {
        return false;
    }
    memcpy(&p->cells[at], &value, sizeof value);
    *out = fc_pv_make(FC_PV_FLOAT, at);
    return true;
}

double fc_pickle_float(const fc_pickle *p, fc_pv v) {
    double value;
    memcpy(&value, &p->cells[fc_pv_payload(v)], sizeof value);
    return value;
}

bool fc_pickle_int(const fc_pickle *p, fc_pv v, int64_t *out) {
    if (fc_pv_typeof(v) == FC_PV_INT) {
        uint64_t bits = fc_pv_payload(v);
        uint64_t sign = UINT64_C(1) << 55;
        *out = (int64_t)((bits ^ sign) - sign);
        return true;
    }
    if (fc_pv_typeof(v) != FC_PV_BIGINT) {
        return false;
    }
    size_t n;
    const unsigned char *bytes = (const unsigned char *)fc_pickle_bytes(p, v, &n);
    unsigned char fill = n > 0 && bytes[n - 1] & 0x80 ? 0xff : 0;
    uint64_t value = 0;
    for (size_t i = 0; i < n || i < 8; i++) {
        unsigned char byte = i < n ? bytes[i] : fill;
        if (i < 8) {
            value |= (uint64_t)byte << (8 * i);
        } else if (byte != fill) {
            return false;
        }
    }
    *out = (int64_t)value;
    return (value >> 63) == (fill & 1);
}

bool fc_pickle_is_str(const fc_pickle *p, fc_pv v, const char *text) {
    size_t n;
    if (fc_pv_typeof(v) != FC_PV_STR) {
        return false;
    }
    const char *s = fc_pickle_bytes(p, v, &n);
    return strlen(text) == n && memcmp(s, text, n) == 0;
}

bool fc_pickle_is_global(const fc_pickle *p, fc_pv v, const char *module, const char *name) {
    if (fc_pv_typeof(v) != FC_PV_GLOBAL) {
        return false;
    }
    const uint64_t *cell = p->cells + fc_pv_payload(v);
    return (!module || fc_pickle_is_str(p, cell[1], module)) && (!name || fc_pickle_is_str(p, cell[2], name));
}

void fc_pickle_global_name(const fc_pickle *p, fc_pv v, char *buf, size_t size) {
    snprintf(buf, size, "%s.%s", fc_pickle_module(p, v), fc_pickle_name(p, v));
}
