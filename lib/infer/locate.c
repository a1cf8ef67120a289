/*
 * Finds where the elements of a tensor are in another one, by their values, and the axes that this makes: the element
 * at (i, j) of the first is at base + i * stride + j * stride of the second.
 */
#include "infer/locate.h"

#include "fsdpckpt/box.h"
#include "fsdpckpt/order.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"

#include <stdlib.h>
#include <string.h>

enum { SHORT_RUN = 4 };

/* A value, or a short run of values that are too short to differ, and where it is. */
typedef struct place {
    uint64_t key;
    int64_t at; /* negative: at several places */
} place;

static int by_key(const void *a, const void *b) {
    const place *x = a, *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

static uint64_t run_key(const unsigned char *bytes, size_t size, int64_t at, int64_t stride, int run) {
    uint64_t key = 0;
    for (int i = 0; i < run; i++) {
        uint64_t value = 0;
        memcpy(&value, bytes + (size_t)(at + i * stride) * size, size < sizeof value ? size : sizeof value);
        key = key * 0x9e3779b97f4a7c15U + value;
    }
    return key;
}

/* The place of a tensor among those of its thing. */
static int64_t place_of(const fc_side *side, const fc_thing *t, size_t tensor) {
    int64_t at = 0;
    for (int k = 0; k < t->ninner; k++) {
        at = at * t->counts[k] + (int64_t)side->things[tensor].numbers[t->inner[k]];
    }
    return at;
}

/* Reads all elements of a thing. The caller frees them. */
static fc_code read_thing(const fc_side *side, const fc_thing *t, fc_dtype dtype, unsigned char **out, fc_error *err) {
    static const int64_t origin[FC_MAX_DIMS];
    const size_t size = (size_t)t->elements * fc_dtype_size(dtype), each = size / t->number;
    unsigned char *bytes = malloc(size + 1);
    FC_NEED(bytes, err, side->checkpoint->path);
    for (size_t k = 0; k < t->number; k++) {
        const size_t index = side->order[t->first + k];
        const fc_tensor *tensor = side->tensors[index];
        const fc_box box = {tensor->ndim, origin, tensor->shape};
        const int64_t at = t->ninner > 0 ? place_of(side, t, index) : 0;
        const fc_code rc = fc_read_box(side->checkpoint, tensor, &box, dtype, bytes + (size_t)at * each, err);
        if (rc != FC_OK) {
            free(bytes);
            return rc;
        }
    }
    *out = bytes;
    return FC_OK;
}

/* Lists the places of all values of a tensor, in the order of their keys. */
static size_t list_places(const unsigned char *bytes, size_t size, int64_t count, int64_t stride, int run, place *out) {
    size_t n = 0;
    for (int64_t i = 0; i + (run - 1) * stride < count; i++) {
        out[n++] = (place){run_key(bytes, size, i, stride, run), i};
    }
    fc_sort_items(out, n, sizeof *out, by_key);
    for (size_t i = 1; i < n; i++) {
        if (out[i].key == out[i - 1].key) {
            out[i].at = out[i - 1].at = -1;
        }
    }
    return n;
}

static int64_t find_place(const place *places, size_t count, uint64_t key) {
    const place wanted = {.key = key};
    const place *found = fc_find_item(&wanted, places, count, sizeof *places, by_key);
    return found && found->at >= 0 ? found->at : FC_LOCATE_UNKNOWN;
}

/* Makes axes of places: the innermost first. @return false: the places follow no axes. */
static bool find_axes(int64_t *at, int64_t count, fc_located *out) {
    out->count = 0;
    while (count > 1) {
        int64_t first = 0;
        while (first + 1 < count && (at[first] == FC_LOCATE_UNKNOWN || at[first + 1] == FC_LOCATE_UNKNOWN)) {
            first++;
        }
        const int64_t stride = first + 1 < count ? at[first + 1] - at[first] : 0;
        int64_t size = 0;
        while (size < count && stride > 0 &&
               (at[size] == FC_LOCATE_UNKNOWN || at[size] == at[first] + (size - first) * stride)) {
            size++;
        }
        while (size > 1 && count % size != 0) {
            size--;
        }
        if (size < 2 || out->count == FC_LOCATE_AXES) {
            return false;
        }
        for (int64_t i = 0; i < count / size; i++) {
            int64_t known = FC_LOCATE_UNKNOWN;
            for (int64_t k = 0; k < size && known == FC_LOCATE_UNKNOWN; k++) {
                known = at[i * size + k] == FC_LOCATE_UNKNOWN ? known : at[i * size + k] - k * stride;
            }
            at[i] = known;
        }
        out->axes[out->count++] = (fc_located_axis){.size = size, .stride = stride};
        count /= size;
    }
    out->base = at[0];
    return at[0] >= 0;
}

/* Finds the places of all elements of a part. */
static bool locate_part(const unsigned char *bytes, size_t size, const fc_thing *t, int run, const place *places,
                        size_t nplaces, int64_t *at, fc_located *out) {
    const int64_t count = (int64_t)t->elements, row = t->tensor->ndim ? t->tensor->shape[t->tensor->ndim - 1] : 1;
    for (int64_t i = 0; i < count; i++) {
        at[i] = i % row + run > row ? FC_LOCATE_UNKNOWN : find_place(places, nplaces, run_key(bytes, size, i, 1, run));
    }
    return find_axes(at, count, out);
}

static fc_code locate_all(const fc_search *s, const fc_match *m, const unsigned char *one, int64_t stride, int run,
                          place *places, int64_t *at, fc_located *out, bool *found, fc_error *err) {
    const fc_side *side = m->reverse ? &s->a : &s->b;
    const fc_dtype dtype = m->reverse ? m->one->tensor->dtype : m->many[0]->tensor->dtype;
    const size_t size = fc_dtype_size(dtype);
    const size_t n = list_places(one, size, (int64_t)m->one->elements, stride, run, places);
    *found = true;
    for (int i = 0; i < m->nmany && *found; i++) {
        unsigned char *bytes = NULL;
        FC_TRY(read_thing(side, m->many[i], dtype, &bytes, err));
        *found = locate_part(bytes, size, m->many[i], run, places, n, at, &out[i]);
        free(bytes);
    }
    return FC_OK;
}

fc_code fc_locate(const fc_search *s, const fc_match *m, fc_located *out, bool *found, fc_error *err) {
    const fc_tensor *one = m->one->tensor;
    const fc_dtype dtype = m->reverse ? one->dtype : m->many[0]->tensor->dtype;
    const int64_t count = (int64_t)m->one->elements;
    const int run = fc_dtype_size(dtype) < 4 ? SHORT_RUN : 1;
    unsigned char *bytes = NULL;
    fc_code rc = FC_OK;
    *found = false;
    if (count > FC_LOCATE_MOST || m->one->ninner > 0) {
        return FC_OK;
    }
    place *places = malloc((size_t)count * sizeof *places);
    int64_t *at = malloc((size_t)count * sizeof *at), stride = 1;
    FC_TRY_GOTO(places && at ? FC_OK : fc_no_memory(err, s->source->path), rc, out);
    FC_TRY_GOTO(read_thing(m->reverse ? &s->b : &s->a, m->one, dtype, &bytes, err), rc, out);
    for (int d = one->ndim - 1; d >= 0 && !*found && rc == FC_OK; d--) {
        if (d == one->ndim - 1 || (run > 1 && one->shape[d + 1] > 1)) {
            rc = locate_all(s, m, bytes, stride, run, places, at, out, found, err);
        }
        stride *= one->shape[d];
    }
out:
    free(places);
    free(at);
    free(bytes);
    return rc;
}
