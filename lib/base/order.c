/*
 * Comparisons, sorted lists of texts, and lists of structs sorted by their texts. See order.h.
 */
#include "fsdpckpt/order.h"

#include <stdlib.h>
#include <string.h>

void fc_sort_items(void *items, size_t count, size_t size, fc_order_fn *order) {
    if (count > 1) {
        qsort(items, count, size, order);
    }
}

void fc_sort_items_by(void *items, size_t count, size_t size, fc_order_by_fn *order, void *context) {
    if (count > 1) {
        qsort_r(items, count, size, order, context);
    }
}

void *fc_find_item(const void *key, const void *items, size_t count, size_t size, fc_order_fn *order) {
    return count > 0 ? bsearch(key, items, count, size, order) : NULL;
}

int fc_order_row(const int64_t *a, const int64_t *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        FC_ORDER_BY(a[i], b[i]);
    }
    return 0;
}

int fc_order_texts(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

int fc_order_named(const void *a, const void *b) {
    return fc_order_texts(*(const void *const *)a, *(const void *const *)b);
}

int fc_order_named_places(const void *a, const void *b) {
    const void *x = *(const void *const *)a, *y = *(const void *const *)b;
    const int order = fc_order_texts(x, y);
    return order ? order : FC_ORDER((uintptr_t)x, (uintptr_t)y);
}

int fc_order_numbers(const void *a, const void *b) {
    return fc_order_row(a, b, 1);
}

int fc_order_rows(const void *a, const void *b, void *width) {
    return fc_order_row(a, b, *(const size_t *)width);
}

void fc_sort_texts(const char **texts, size_t count) {
    fc_sort_items(texts, count, sizeof *texts, fc_order_texts);
}

size_t fc_find_text(const char *const *texts, size_t count, const char *text) {
    const char *const *found = fc_find_struct(texts, count, sizeof *texts, text);
    return found ? (size_t)(found - texts) : count;
}

size_t fc_count_texts(const char *const *texts) {
    size_t count = 0;
    while (texts && texts[count]) {
        count++;
    }
    return count;
}

bool fc_has_text(const char *const *texts, const char *text) {
    while (texts && *texts && strcmp(*texts, text) != 0) {
        texts++;
    }
    return texts && *texts;
}

void *fc_find_struct(const void *structs, size_t count, size_t size, const char *text) {
    return fc_find_item(&text, structs, count, size, fc_order_texts);
}

void *fc_find_named(const void *pointers, size_t count, const char *text) {
    const char *const *key = &text;
    void *const *found = fc_find_item(&key, pointers, count, sizeof *found, fc_order_named);
    return found ? *found : NULL;
}

void *fc_list_named(const void *structs, size_t count, size_t size) {
    const void **list = malloc((count + 1) * sizeof *list);
    for (size_t i = 0; list && i < count; i++) {
        list[i] = (const char *)structs + i * size;
    }
    if (list) {
        fc_sort_items(list, count, sizeof *list, fc_order_named_places);
    }
    return list;
}
