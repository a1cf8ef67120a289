/*
 * lib/derived/unflatten, flat_units and flat_order: which flat parameter holds which parameters, and every reason why
 * that may be unknown. Sources and models are schemas, because only names and shapes matter here.
 * tests/oracle/flat_state.py compares bytes.
 */
#include "derived/flat_units.h"
#include "fsdpckpt/format.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static char paths[2][64];

static int make_files(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        strcpy(paths[i], "/tmp/fsdpckpt-unflatten-XXXXXX");
        int fd = mkstemp(paths[i]);
        if (fd < 0 || close(fd) != 0) {
            return -1;
        }
    }
    return 0;
}

static int remove_files(void **state) {
    (void)state;
    return unlink(paths[0]) | unlink(paths[1]);
}

/* Writes a schema: "a 2 3;b" is a tensor a of shape [2, 3] and a scalar b; "b=a" ties b to a. */
static void write_schema(const char *path, const char *order, const char *tensors) {
    char copy[1024], *next = copy;
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    strcpy(copy, tensors);
    fprintf(f, "{\"fsdpckpt\": \"schema\", \"version\": 1, %s \"tensors\": [", order);
    for (const char *entry; (entry = strsep(&next, ";")) != NULL;) {
        char *shape = strchr(entry, ' '), *tie = strchr(entry, '=');
        fprintf(f, "%s{\"name\": \"%.*s\", \"dtype\": \"float32\", \"shape\": [", entry == copy ? "" : ", ",
                (int)strcspn(entry, " ="), entry);
        for (char *s = shape; s && *s; s++) {
            fputc(s > shape && *s == ' ' ? ',' : *s, f);
        }
        fprintf(f, "]");
        if (tie) {
            fprintf(f, ", \"same_as\": \"%.*s\"", (int)strcspn(tie + 1, " "), tie + 1);
        }
        fprintf(f, "}");
    }
    fprintf(f, "]}");
    assert_int_equal(fclose(f), 0);
}

static fc_code open_as(const char *source, const char *order, const char *model, fc_checkpoint **out, fc_error *err) {
    fc_checkpoint *told = NULL;
    write_schema(paths[0], "", source);
    write_schema(paths[1], order, model);
    fc_code rc = fc_checkpoint_open(paths[1], NULL, &told, err);
    rc = rc == FC_OK ? fc_checkpoint_open_model(paths[0], NULL, told, out, err) : rc;
    fc_checkpoint_close(told); /* the result does not depend on it */
    return rc;
}

static const char ordered[] = "\"order\": \"model\",";

static void check_good(const char *source, const char *model, const char *expected) {
    char got[1024] = "";
    fc_checkpoint *c = NULL;
    fc_error err = {FC_OK, ""};
    if (open_as(source, ordered, model, &c, &err) != FC_OK) {
        fail_msg("%s", err.message);
    }
    for (size_t i = 0; i < c->ntensors; i++) {
        size_t used = strlen(got);
        snprintf(got + used, sizeof got - used, "%s%s", i ? ";" : "", c->tensors[i].name);
        for (int d = 0; d < c->tensors[i].ndim; d++) {
            used = strlen(got);
            snprintf(got + used, sizeof got - used, " %d", (int)c->tensors[i].shape[d]);
        }
    }
    assert_string_equal(got, expected);
    assert_true(fc_was_flat(c));
    assert_true(fc_knows_model_order(c, NULL));
    fc_checkpoint_close(c);
}

static void check_bad(const char *source, const char *order, const char *model, fc_code code, const char *word) {
    fc_checkpoint *c = NULL;
    fc_error err = {FC_OK, ""};
    if (open_as(source, order, model, &c, &err) != code) {
        fail_msg("%s", err.message);
    }
    assert_null(c);
    if (!strstr(err.message, word) || strchr(err.message, '\n')) {
        fail_msg("'%s' is not in: %s", word, err.message);
    }
}

static void units_are_the_flat_parameters(void **state) {
    (void)state;
    check_good("_flat_param 20;n.buf 3;n._flat_param 9", "z 2 3;n.b 2;n.buf 3;n.a.w 7;y 14",
               "z 2 3;n.b 2;n.buf 3;n.a.w 7;y 14");
    /* A unit below a unit; a unit without elements; scalars. */
    check_good("_flat_param 1;n._flat_param 4;n.m.k._flat_param 2", "s;n.w 4;n.m.k.w 2 1;n.m.k.e 0",
               "s;n.w 4;n.m.k.w 2 1;n.m.k.e 0");
    /* Names of torch 1, and wrapper components. */
    check_good("flat_param 2;layers.0.flat_param 3", "w 2;layers.0.w 3", "w 2;layers.0.w 3");
    check_good("_fsdp_wrapped_module.flat_param 2;_fsdp_wrapped_module._fpw_module.n.flat_param_0 3", "w 2;n.w 3",
               "w 2;n.w 3");
    /* Not a flat parameter of FSDP1, since it has two dimensions. */
    check_good("_flat_param 2;n.flat_param 2 2", "w 2;n.flat_param 2 2", "w 2;n.flat_param 2 2");
}

static void tied_parameters_are_stored_once(void **state) {
    (void)state;
    check_good("_flat_param 6", "a 2 2;b 2;c=a 2 2", "a 2 2;b 2;c 2 2");
    check_bad("_flat_param 6", ordered, "a 2 2;b 2;c 2 2", FC_EUSAGE, "same_as");
}

static void other_models_are_refused(void **state) {
    (void)state;
    check_bad("_flat_param 6", ordered, "a 5", FC_EUSAGE, "the right model");
    check_bad("_flat_param 6", ordered, "a 7", FC_EUSAGE, "the right model");
    check_bad("n._flat_param 6", ordered, "n.a 6;lost 1", FC_EUSAGE, "'lost'");
    check_bad("n._flat_param 6", ordered, "other.a 6", FC_EUSAGE, "'n._flat_param'");
    char many[1024] = "";
    for (size_t i = 0; i < 17; i++) {
        size_t used = strlen(many);
        snprintf(many + used, sizeof many - used, "%sw%zu 576460752303423487", i ? ";" : "", i);
    }
    check_bad("_flat_param 6", ordered, many, FC_EUSAGE, "overflows");
    check_bad("_flat_param 6;flat_param 6", ordered, "a 6", FC_EUNSUPPORTED, "the same module");
    check_bad("_flat_param 6;left 1", ordered, "a 6;_orig_mod.a 6", FC_EUSAGE, "wrapper components");
    check_bad("_flat_param 6", ordered, "_flat_param 6", FC_EUSAGE, "flat parameters itself");
}

static void the_order_must_be_known(void **state) {
    (void)state;
    check_bad("_flat_param 6", "", "b 4;a 2", FC_EUSAGE, "does not declare");
    check_bad("_flat_param 6", "\"order\": \"names\",", "b 4;a 2", FC_ECORRUPT, "\"order\"");
}

/* Orders that result from sorting names, and orders that do not. */
static void alphabetical_order_is_suspected(void **state) {
    (void)state;
    static const fc_format keeps = {
        .name = "test",
    };
    static const struct {
        const char *names[4];
        bool known;
    } cases[] = {
        {{"a.bias", "a.weight", "b.bias", "b.weight"}, false},
        {{"layers.1.w", "layers.10.w", "layers.2.w", "norm.w"}, false},
        {{"layers.1.w", "layers.2.w", "layers.10.w", "norm.w"}, false}, /* numbers sorted by value */
        {{"a.weight", "a.bias", "b.weight", "b.bias"}, true},
        {{"0.w", "1.w", "2.w", "10.w"}, true}, /* a Sequential has no other order */
        {{"fc1.w", "fc2.w", "fc3.w", "fc4.w"}, true},
        {{"norm.w", "layers.1.w", "layers.2.w", "layers.3.w"}, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fc_tensor tensors[4];
        memset(tensors, 0, sizeof tensors);
        for (size_t k = 0; k < 4; k++) {
            tensors[k] = (fc_tensor){.name = cases[i].names[k], .dtype = FC_F32};
        }
        fc_checkpoint c = {.format = &keeps, .tensors = tensors, .ntensors = 4, .keeps_order = true};
        assert_int_equal(fc_knows_model_order(&c, NULL), cases[i].known);
        c.keeps_order = false;
        assert_false(fc_knows_model_order(&c, NULL));
    }
}

/* Rank 1's own tensors come after those of rank 0. */
static void ranks_have_orders_of_their_own(void **state) {
    (void)state;
    static const fc_format keeps = {
        .name = "test",
    };
    fc_chunk chunks[] = {{.rank = 0}, {.rank = 1}};
    fc_tensor tensors[] = {{.name = "b", .nchunks = 2, .chunks = chunks},
                           {.name = "a", .nchunks = 1, .chunks = chunks}};
    fc_checkpoint c = {.format = &keeps, .tensors = tensors, .ntensors = 2, .keeps_order = true};
    const char *why = NULL;
    assert_true(fc_knows_model_order(&c, &why));
    assert_null(why);
    tensors[1].chunks = &chunks[1];
    assert_false(fc_knows_model_order(&c, &why));
    assert_non_null(strstr(why, "ranks"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(units_are_the_flat_parameters, make_files, remove_files),
        cmocka_unit_test_setup_teardown(tied_parameters_are_stored_once, make_files, remove_files),
        cmocka_unit_test_setup_teardown(other_models_are_refused, make_files, remove_files),
        cmocka_unit_test_setup_teardown(the_order_must_be_known, make_files, remove_files),
        cmocka_unit_test(alphabetical_order_is_suspected),
        cmocka_unit_test(ranks_have_orders_of_their_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
