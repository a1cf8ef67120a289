/*
 * Folding names that differ only in numbers: which names share a line, and the pattern of that line.
 */
#include "inspect/fold.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 4096 };

typedef struct names {
    fold_name items[MOST];
    size_t count;
    fc_arena *arena;
    fold_line *lines;
    size_t nlines;
} names;

static void begin(names *n) {
    memset(n, 0, sizeof *n);
    n->arena = fc_arena_new();
    assert_non_null(n->arena);
}

static void add(names *n, uint32_t kind, const char *name) {
    assert_in_range(n->count, 0, MOST - 1);
    char *copy = fc_arena_strndup(n->arena, name, strlen(name));
    assert_non_null(copy);
    n->items[n->count++] = (fold_name){copy, kind};
}

/* Folds the names, then checks the pattern of each line and that no name is lost. */
static void check(names *n, size_t count, const char *const *patterns) {
    size_t total = 0;
    bool listed[MOST] = {false}; /* each name is a member of one line */
    assert_true(fold_names(n->items, n->count, n->arena, &n->lines, &n->nlines));
    for (size_t i = 0; i < n->nlines && i < count; i++) {
        assert_string_equal(n->lines[i].pattern, patterns[i]);
    }
    assert_int_equal(n->nlines, count);
    for (size_t i = 0; i < n->nlines; i++) {
        assert_true(i == 0 || n->lines[i - 1].first < n->lines[i].first);
        total += n->lines[i].count;
        for (size_t k = 0; k < n->lines[i].count; k++) {
            const size_t member = n->lines[i].members[k];
            assert_true(member < n->count && !listed[member]);
            listed[member] = true;
        }
    }
    assert_int_equal(total, n->count);
    fc_arena_free(n->arena);
}

#define CHECK(n, ...)                                                                                                  \
    do {                                                                                                               \
        const char *const wanted[] = {__VA_ARGS__};                                                                    \
        check(n, sizeof wanted / sizeof *wanted, wanted);                                                              \
    } while (0)

static void layers(names *n, int count, int other, uint32_t kind, const char *rest) {
    char name[64];
    for (int i = 0; i < count; i++) {
        snprintf(name, sizeof name, "layers.%d.%s", i, rest);
        add(n, kind + (i == other), name);
    }
}

static void layers_become_one_line(void **state) {
    (void)state;
    names n;
    begin(&n);
    add(&n, 0, "embed.weight");
    layers(&n, 32, -1, 1, "wq.weight");
    layers(&n, 32, -1, 1, "wk.weight");
    add(&n, 2, "norm.weight");
    CHECK(&n, "embed.weight", "layers.{0..31}.wq.weight", "layers.{0..31}.wk.weight", "norm.weight");
}

static void different_tensors_get_lines_of_their_own(void **state) {
    (void)state;
    names n;
    begin(&n);
    layers(&n, 32, 3, 7, "mlp.weight");
    CHECK(&n, "layers.{0..2,4..31}.mlp.weight", "layers.3.mlp.weight");
}

static void consecutive_numbers_become_ranges(void **state) {
    (void)state;
    static const struct {
        int numbers[8], count;
        const char *pattern;
    } cases[] = {
        {{0, 1}, 2, "h.{0,1}.w"},
        {{0, 1, 2}, 3, "h.{0..2}.w"},
        {{10, 9, 11}, 3, "h.{9..11}.w"},
        {{0, 2, 4, 6}, 4, "h.{0..6..2}.w"},
        {{1, 3, 5}, 3, "h.{1,3,5}.w"},
        {{5, 0, 1, 2, 9, 12}, 6, "h.{0..2,5,9,12}.w"},
        {{0, 5, 6, 7, 8}, 5, "h.{0,5..8}.w"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        names n;
        begin(&n);
        for (int k = 0; k < cases[i].count; k++) {
            char name[32];
            snprintf(name, sizeof name, "h.%d.w", cases[i].numbers[k]);
            add(&n, 0, name);
        }
        CHECK(&n, cases[i].pattern);
    }
}

static void experts(names *n, int from, int to, int count) {
    char name[64];
    for (int layer = from; layer < to; layer++) {
        for (int expert = 0; expert < count; expert++) {
            snprintf(name, sizeof name, "layers.%d.experts.%d.w", layer, expert);
            add(n, 0, name);
        }
    }
}

static void nested_numbers_fold_to_products(void **state) {
    (void)state;
    names n;
    begin(&n);
    experts(&n, 0, 4, 8);
    CHECK(&n, "layers.{0..3}.experts.{0..7}.w");
    begin(&n);
    experts(&n, 0, 4, 8);
    experts(&n, 4, 6, 16); /* these layers have more experts, so they fold separately */
    CHECK(&n, "layers.{0..3}.experts.{0..7}.w", "layers.{4,5}.experts.{0..15}.w");
    begin(&n);
    experts(&n, 0, 3, 2);
    n.items[3].kind = 1; /* layer 1, expert 1 */
    CHECK(&n, "layers.{0,2}.experts.{0,1}.w", "layers.1.experts.0.w", "layers.1.experts.1.w");
}

static void only_numbers_between_dots_vary(void **state) {
    (void)state;
    names n;
    begin(&n);
    add(&n, 0, "w1.weight");
    add(&n, 0, "w2.weight");
    add(&n, 0, "layers.0.w");
    add(&n, 0, "layers.00.w"); /* a number has no leading zero, so this is a different name */
    add(&n, 0, "layers.*.w");  /* the fold uses * internally */
    add(&n, 0, "layers.1234567890.w");
    add(&n, 0, "");
    add(&n, 0, ".");
    add(&n, 0, "a.*.0");
    add(&n, 0, "a.0.*");
    CHECK(&n, "w1.weight", "w2.weight", "layers.0.w", "layers.00.w", "layers.*.w", "layers.1234567890.w", "", ".",
          "a.*.0", "a.0.*");
}

static void numbers_at_the_ends_vary(void **state) {
    (void)state;
    names n;
    begin(&n);
    add(&n, 0, "0");
    add(&n, 0, "2.b");
    add(&n, 0, "1");
    add(&n, 0, "1.b");
    add(&n, 0, "list.0");
    add(&n, 0, "list.1");
    CHECK(&n, "{0,1}", "{1,2}.b", "list.{0,1}");
}

static void many_numbers_in_a_name(void **state) {
    (void)state;
    names n;
    char name[256] = "0", other[256];
    begin(&n);
    for (int i = 0; i < 80; i++) {
        strcat(name, ".0");
    }
    strcpy(other, name);
    other[strlen(other) - 1] = '1';
    add(&n, 0, name);
    add(&n, 0, other);
    CHECK(&n, name, other); /* the last number is one more than may vary */
}

static void members_are_in_the_order_of_the_pattern(void **state) {
    (void)state;
    names n;
    char name[64];
    begin(&n);
    experts(&n, 0, 12, 11);
    for (size_t i = 0; i < n.count / 2; i += 3) { /* the names are in no order */
        const fold_name other = n.items[i];
        n.items[i] = n.items[n.count - 1 - i];
        n.items[n.count - 1 - i] = other;
    }
    assert_true(fold_names(n.items, n.count, n.arena, &n.lines, &n.nlines));
    assert_int_equal(n.nlines, 1);
    for (size_t k = 0; k < n.lines[0].count; k++) {
        snprintf(name, sizeof name, "layers.%zu.experts.%zu.w", k / 11, k % 11);
        assert_string_equal(n.items[n.lines[0].members[k]].name, name);
    }
    fc_arena_free(n.arena);
}

static void components_hold_folds(void **state) {
    (void)state;
    assert_int_equal(fold_component("layers.{0..31}.w"), 6);
    assert_int_equal(fold_component("{0..2,4..31}.w"), 12);
    assert_int_equal(fold_component("{0..2"), 2);
    assert_int_equal(fold_component("{x.y}"), 2);
    assert_int_equal(fold_component(""), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_become_one_line),
        cmocka_unit_test(different_tensors_get_lines_of_their_own),
        cmocka_unit_test(consecutive_numbers_become_ranges),
        cmocka_unit_test(nested_numbers_fold_to_products),
        cmocka_unit_test(only_numbers_between_dots_vary),
        cmocka_unit_test(numbers_at_the_ends_vary),
        cmocka_unit_test(many_numbers_in_a_name),
        cmocka_unit_test(members_are_in_the_order_of_the_pattern),
        cmocka_unit_test(components_hold_folds),
    };
    return cmocka_run_group_tests_name("fold", tests, NULL, NULL);
}
