/*
 * Sorting and searching by texts and numbers. Elements may be texts, or structs whose first field is the text that
 * they go by, their name for example.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdpckpt/decls.h"

FC_BEGIN_DECLS

/** The order of two numbers or pointers: negative, 0 or positive. */
#define FC_ORDER(a, b) (((a) > (b)) - ((a) < (b)))

/** Returns the order of two numbers or pointers from the enclosing function unless they are equal. */
#define FC_ORDER_BY(a, b)                                                                                              \
    do {                                                                                                               \
        if ((a) != (b)) {                                                                                              \
            return (a) < (b) ? -1 : 1;                                                                                 \
        }                                                                                                              \
    } while (0)

/** Moves `low` to the first index of the sorted range [low, high) at which `before`, an expression in `index`, does not
 * hold, or to `high`. */
#define FC_BISECT(low, high, index, before)                                                                            \
    for (size_t fc_high = (high), index; (low) < fc_high;) {                                                           \
        (index) = (low) + (fc_high - (low)) / 2;                                                                       \
        if (before) {                                                                                                  \
            (low) = (index) + 1;                                                                                       \
        } else {                                                                                                       \
            fc_high = (index);                                                                                         \
        }                                                                                                              \
    }

/** Compares the first `n` numbers of two rows. */
int fc_order_row(const int64_t *a, const int64_t *b, size_t n);

/** Two items compared: negative, 0 or positive. */
typedef int fc_order_fn(const void *a, const void *b);

/** Two items compared with the help of `context`. */
typedef int fc_order_by_fn(const void *a, const void *b, void *context);

/** qsort, which has no behaviour defined for NULL. `items` may be NULL if there are none. */
void fc_sort_items(void *items, size_t count, size_t size, fc_order_fn *order);

/** qsort_r, on the same terms. */
void fc_sort_items_by(void *items, size_t count, size_t size, fc_order_by_fn *order, void *context);

/** bsearch, on the same terms.
 * @return the item that equals `key`, or NULL. */
void *fc_find_item(const void *key, const void *items, size_t count, size_t size, fc_order_fn *order);

/** The functions of this kind have the type fc_order_fn. This one compares texts, or structs. */
int fc_order_texts(const void *a, const void *b);

/** Compares pointers to structs. */
int fc_order_named(const void *a, const void *b);

/** Compares pointers to structs of one array: by text, then by place. */
int fc_order_named_places(const void *a, const void *b);

/** Compares numbers of the type int64_t. */
int fc_order_numbers(const void *a, const void *b);

/** An fc_order_by_fn: rows of `*(size_t *)width` numbers. */
int fc_order_rows(const void *a, const void *b, void *width);

/** Sorts texts by their bytes. `texts` may be NULL if there are none. */
void fc_sort_texts(const char **texts, size_t count);

/** @return the index of `text` in sorted texts; `count` if it is not among them. */
size_t fc_find_text(const char *const *texts, size_t count, const char *text);

/** @return the number of texts in a list that ends with NULL; 0 if `texts` is NULL. */
size_t fc_count_texts(const char *const *texts);

/** @return whether `text` is in a list that ends with NULL, or is NULL. */
bool fc_has_text(const char *const *texts, const char *text);

/** @return the struct of `text` among `count` structs of `size` bytes, sorted by fc_order_texts, or NULL. */
void *fc_find_struct(const void *structs, size_t count, size_t size, const char *text);

/** @return the struct of `text` among pointers to structs, sorted by fc_order_named, or NULL. */
void *fc_find_named(const void *pointers, size_t count, const char *text);

/** @return pointers to `count` structs of `size` bytes, by text and then by place: from malloc, NULL when out of
 * memory.
 */
void *fc_list_named(const void *structs, size_t count, size_t size);

FC_END_DECLS
