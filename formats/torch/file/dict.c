/*
 * Looks up many keys of one dict. fc_torch_dict_get compares one key after the other, which takes quadratic time where
 * every key of one dict is looked up in another.
 */
#include "torch/file/file.h"

#include "fsdpckpt/order.h"

#include <stdlib.h>
#include <string.h>

/* Text before numbers. */
static int compare_keys(const torch_dict_entry *x, const torch_dict_entry *y) {
    if (!x->text || !y->text) {
        return x->text || y->text ? (x->text ? -1 : 1) : (x->number > y->number) - (x->number < y->number);
    }
    const size_t shorter = x->length < y->length ? x->length : y->length;
    const int order = memcmp(x->text, y->text, shorter);
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

/* The last of several values for a key comes first: Python keeps it. */
static int compare_entries(const void *a, const void *b) {
    const torch_dict_entry *x = a, *y = b;
    const int order = compare_keys(x, y);
    return order ? order : (x->place < y->place) - (x->place > y->place);
}

fc_pv fc_torch_dict_get(const fc_pickle *p, fc_pv dict, const char *key) {
    size_t n;
    const fc_pv *pairs = fc_pickle_items(p, dict, &n);
    for (size_t i = n / 2 * 2; i >= 2; i -= 2) { /* Python keeps the last of several values for a key */
        if (fc_pickle_is_str(p, pairs[i - 2], key)) {
            return pairs[i - 1];
        }
    }
    return 0;
}

bool fc_torch_dict_begin(torch_dict *dict, const fc_pickle *p, fc_pv v) {
    size_t n = 0;
    const fc_pv *pairs = fc_pv_typeof(v) == FC_PV_DICT ? fc_pickle_items(p, v, &n) : NULL;
    *dict = (torch_dict){.entries = malloc((n / 2 + 1) * sizeof *dict->entries)};
    for (size_t i = 0; dict->entries && i + 1 < n; i += 2) {
        torch_dict_entry entry = {.value = pairs[i + 1], .place = i};
        if (fc_pv_typeof(pairs[i]) == FC_PV_STR) {
            entry.text = fc_pickle_bytes(p, pairs[i], &entry.length);
        } else if (!fc_pickle_int(p, pairs[i], &entry.number)) {
            continue;
        }
        dict->entries[dict->count++] = entry;
    }
    fc_sort_items(dict->entries, dict->count, sizeof *dict->entries, compare_entries);
    return dict->entries != NULL;
}

static fc_pv find_value(const torch_dict *dict, const torch_dict_entry *key) {
    size_t low = 0;
    FC_BISECT(low, dict->count, middle, compare_keys(&dict->entries[middle], key) < 0);
    return low < dict->count && compare_keys(&dict->entries[low], key) == 0 ? dict->entries[low].value : 0;
}

fc_pv fc_torch_dict_find(const torch_dict *dict, const char *key) {
    const torch_dict_entry wanted = {.text = key, .length = strlen(key)};
    return find_value(dict, &wanted);
}

fc_pv fc_torch_dict_find_number(const torch_dict *dict, int64_t key) {
    const torch_dict_entry wanted = {.number = key};
    return find_value(dict, &wanted);
}

void fc_torch_dict_free(torch_dict *dict) {
    free(dict->entries);
    *dict = (torch_dict){0};
}
