/*
 * lib/plan/rename.c: rules of the command line, applied to names and to the paths behind them.
 */
#include "plan/rename.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_ELEMENTS = 8 };

/* A tensor for "model|layers.0.w|#1": elements, those of a list marked with #. */
typedef struct sample {
    char name[256], keys[256];
    fc_path_element elements[MAX_ELEMENTS];
    fc_tensor tensor;
} sample;

static void make(sample *s, const char *path) {
    size_t count = 0;
    memset(s, 0, sizeof *s);
    snprintf(s->keys, sizeof s->keys, "%s", path);
    char *at = s->keys;
    while (at) {
        char *end = strchr(at, '|');
        if (end) {
            *end = '\0';
        }
        s->elements[count].is_index = *at == '#';
        s->elements[count].key = at + (*at == '#');
        strcat(s->name, count ? "." : "");
        strcat(s->name, s->elements[count++].key);
        at = end ? end + 1 : NULL;
    }
    s->tensor.name = s->name;
    s->tensor.path = (fc_path){s->elements, count};
}

static fc_code apply(const fc_selection *selection, const char *path, char *out, size_t size, fc_error *err) {
    sample s;
    fc_rename *rename = NULL;
    const char *name = NULL;
    fc_path renamed;
    bool changed = false;
    make(&s, path);
    fc_arena *arena = fc_arena_new();
    assert_non_null(arena);
    fc_code rc = fc_rename_new(selection, &rename, err);
    rc = rc == FC_OK ? fc_rename_apply(rename, &s.tensor, arena, &name, &renamed, &changed, err) : rc;
    rc = rc == FC_OK ? fc_rename_check_used(rename, "ckpt", s.name, err) : rc;
    if (rc == FC_OK) {
        int used = snprintf(out, size, "%s = ", name);
        assert_int_equal(changed, strcmp(name, s.name) != 0);
        for (size_t i = 0; i < renamed.count; i++) {
            used += snprintf(out + used, size - (size_t)used, "%s%s%s", i ? "|" : "",
                             renamed.elements[i].is_index ? "#" : "", renamed.elements[i].key);
        }
    }
    fc_rename_free(rename);
    fc_arena_free(arena);
    return rc;
}

static void becomes(const char *path, const char *first, const char *second, const char *expected) {
    const char *rules[] = {first, second, NULL};
    const fc_selection selection = {.rename = rules};
    char found[512] = "";
    fc_error err = {FC_OK, ""};
    if (apply(&selection, path, found, sizeof found, &err) != FC_OK) {
        fail_msg("%s: %s", first, err.message);
    }
    assert_string_equal(found, expected);
}

static void refused(const char *path, const char *rule, const char *message) {
    const char *rules[] = {rule, NULL};
    const fc_selection selection = {.rename = rules};
    char found[512] = "";
    fc_error err = {FC_OK, ""};
    assert_int_equal(apply(&selection, path, found, sizeof found, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, message));
}

static void rules_are_those_of_sed(void **state) {
    (void)state;
    becomes("a.b.c", "s/b/x/", NULL, "a.x.c = a.x.c");
    becomes("aaa", "s/a/b/", NULL, "baa = baa");
    becomes("aaa", "s/a/b/g", NULL, "bbb = bbb");
    becomes("aAa", "s/a/b/gi", NULL, "bbb = bbb");
    becomes("abc", "s/x*/-/g", NULL, "-a-b-c- = -a-b-c-");
    becomes("baaac", "s/a*/x/g", NULL, "xbxcx = xbxcx");
    becomes("layers.12.w", "s,layers\\.([0-9]+),h.\\1,", NULL, "h.12.w = h.12.w");
    becomes("w", "s/.*/[&]\\&\\\\/", NULL, "[w]&\\ = [w]&\\");
    becomes("a/b", "s/a\\/b/c\\/d/", NULL, "c/d = c/d");
    becomes("a+b", "s+a\\+b+c+", NULL, "c = c");
    becomes("a", "s/a/b/", "s/b/c/", "c = c");
    becomes("a", "s/(b)?a/<\\1>/", NULL, "<> = <>");
    becomes("größe", "s/gr.(.)e/\\1/", NULL, "ß = ß"); /* . matches a character, not a byte */
    becomes("größe", "s/x*/-/g", NULL, "-g-r-ö-ß-e- = -g-r-ö-ß-e-");
}

static void paths_follow(void **state) {
    (void)state;
    becomes("model|layers.0.w", "s/^model\\.//", NULL, "layers.0.w = layers.0.w");
    becomes("model|layers.0.w", "s/^model\\./net./", NULL, "net.layers.0.w = net|layers.0.w");
    becomes("model|layers.0.w", "s/^model\\.(.*)$/net.\\1/", NULL, "net.layers.0.w = net|layers.0.w");
    becomes("model|layers.0.w", "s/layers/h/", NULL, "model.h.0.w = model|h.0.w");
    becomes("model|w", "s/^/my.own./", NULL, "my.own.model.w = my.own.model|w");
    becomes("optim|state|w|exp_avg", "s/exp_avg/m/", NULL, "optim.state.w.m = optim|state|w|m");
    becomes("optim|groups|#10|lr", "s/^optim/o/", NULL, "o.groups.10.lr = o|groups|#10|lr");
    becomes("optim|groups|#10|lr", "s/10/11/", NULL, "optim.groups.11.lr = optim|groups|11|lr");
    becomes("a|b|c", "s/a\\.b\\.c/x.y/", NULL, "x.y = x|y");
    becomes("a|b.c", "s/$/.d/", NULL, "a.b.c.d = a|b.c.d");
}

static void prefixes_are_whole_elements(void **state) {
    (void)state;
    fc_error err;
    char found[512];
    const struct {
        const char *path, *prefix, *expected;
    } cases[] = {
        {"model|layers.0.w", "model.", "layers.0.w = layers.0.w"},
        {"model|layers.0.w", "model", "layers.0.w = layers.0.w"},
        {"model|layers.0.w", "model.layers", "0.w = 0.w"},
        {"lists|#1|step", "lists", "1.step = #1|step"},
        {"model_x.w", "model_", "x.w = x.w"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const fc_selection selection = {.strip_prefix = cases[i].prefix};
        assert_int_equal(apply(&selection, cases[i].path, found, sizeof found, &err), FC_OK);
        assert_string_equal(found, cases[i].expected);
    }
}

static void wrong_rules_are_refused(void **state) {
    (void)state;
    refused("a", "a/b/", "it does not begin with s and a delimiter");
    refused("a", "s", "it does not begin with s and a delimiter");
    refused("a", "s\\a\\b\\", "it does not begin with s and a delimiter");
    refused("a", "s/a/b", "a delimiter is missing");
    refused("a", "s/a", "a delimiter is missing");
    refused("a", "s/a/b/x", "it ends in an unknown flag");
    refused("a", "s/a/\\1/", "names a group that the regex does not have");
    refused("a", "s/(a/b/", "rename rule 's/(a/b/': Unmatched");
    refused("a", "s/x/b/", "ckpt: the rename rule 's/x/b/' matches no name; one is 'a'");
    refused("a", "s/a//", "the name 'a' would be empty after renaming");
    refused("a", "s/a/\xff/", "'a' would be renamed to text that is not UTF-8");
}

/* The C library writes counted repetitions out: a short rule could take gigabytes. */
static void small_rules_stay_small(void **state) {
    (void)state;
    static const char *const large[] = {
        "s/((a{200}){200}){200}/b/", "s/(a{0,100}){100}/b/", "s/(((a{900}){900}){900}/b/",
        "s/[a-z(]{30000}/b/",        "s/(a|b*){501}/b/",     "s/((((((((((((a+)+)+)+)+)+)+)+)+)+)+)+)/b/",
        "s/(a{,32767}){,32767}/b/",  "s/(a{1,}){20000}/b/",
    };
    static const char *const small[] = {
        "s/^(model|net)\\.layers\\.([0-9]{1,3})\\.(attention|feed_forward)\\.w([0-9]+)$/\\2/",
        "s/[[:alpha:](){}*+]{100}|\\(*/b/",
        "s/(a{100}){100}|x*/b/",
    };
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        refused("a", large[i], "it has too many repetitions when they are expanded");
    }
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
        char found[256];
        fc_error err;
        const char *const rules[] = {small[i], NULL};
        const fc_selection selection = {.rename = rules};
        err.message[0] = '\0';
        apply(&selection, "a", found, sizeof found, &err);
        assert_null(strstr(err.message, "repetitions"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rules_are_those_of_sed),
        cmocka_unit_test(small_rules_stay_small),
        cmocka_unit_test(paths_follow),
        cmocka_unit_test(prefixes_are_whole_elements),
        cmocka_unit_test(wrong_rules_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
