/*
 * Megatron's rules: how the modules of megatron.core and of Megatron-LM before it cut their parameters, by name, and
 * which numbers in names are those of layers.
 */
#include "megatron/megatron.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void cuts_by_name(void **state) {
    static const struct {
        const char *name;
        mg_rule rule;
        int dim;
    } cases[] = {
        {"model.embedding.word_embeddings.weight", MG_CUT, 0},
        {"model.embedding.position_embeddings.weight", MG_COPY, 0},
        {"model.decoder.layers.0.self_attention.linear_qkv.weight", MG_CUT, 0},
        {"model.decoder.layers.0.self_attention.linear_qkv.bias", MG_CUT, 0},
        {"model.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", MG_COPY, 0},
        {"model.decoder.layers.0.self_attention.q_layernorm.weight", MG_COPY, 0},
        {"model.decoder.layers.0.self_attention.linear_proj.weight", MG_CUT, 1},
        {"model.decoder.layers.0.self_attention.linear_proj.bias", MG_COPY, 0},
        {"model.decoder.layers.0.mlp.linear_fc2.weight", MG_CUT, 1},
        {"model.decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", MG_CUT, 0},
        {"model.decoder.layers.0.mlp.experts.linear_fc2.weight12", MG_CUT, 1},
        {"model.decoder.layers.0.mlp.router.weight", MG_COPY, 0},
        {"model.output_layer.weight", MG_CUT, 0},
        {"model.language_model.encoder.layers.0.self_attention.dense.weight", MG_CUT, 1},
        {"model.language_model.encoder.layers.0.mlp.dense_h_to_4h.bias", MG_CUT, 0},
        {"model.language_model.encoder.layers.0.mlp.dense_4h_to_h.bias", MG_COPY, 0},
        /* A whole matrix in BERT's head, of the same name as a cut one of attention. */
        {"model.lm_head.dense.weight", MG_UNKNOWN, 0},
        {"model.lm_head.bias", MG_CUT, 0},
        {"model.decoder.layers.0.self_attention.linear_qkv._extra_state", MG_UNKNOWN, 0},
        {"model.decoder.layers.0.mixer.in_proj.weight", MG_UNKNOWN, 0},
        {"model.decoder.layers.0.self_attention.linear_qkv.weighty", MG_UNKNOWN, 0},
        {"linear_qkv.weight", MG_CUT, 0},
        {"weight", MG_UNKNOWN, 0},
        {"", MG_UNKNOWN, 0},
        {".", MG_UNKNOWN, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mg_cut cut = fc_mg_rule(cases[i].name);
        if (cut.rule != cases[i].rule || cut.dim != cases[i].dim) {
            fail_msg("%s: rule %d, dim %d", cases[i].name, (int)cut.rule, cut.dim);
        }
    }
}

static void layers_by_name(void **state) {
    static const struct {
        const char *name, *prefix; /* NULL: no layer */
        int64_t number;
    } cases[] = {
        {"model.decoder.layers.17.mlp.linear_fc1.weight", "model.decoder.layers.", 17},
        {"layers.0.input_layernorm.weight", "layers.", 0},
        {"model.mtp.layers.0.eh_proj.weight", NULL, 0},
        {"model.mylayers.0.weight", NULL, 0},
        {"model.layers.x.weight", NULL, 0},
        {"model.layers.3", NULL, 0},
        {"model.layers.99999999999999999999.weight", NULL, 0},
        {"", NULL, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t prefix = 0, end = 0;
        int64_t number = -1;
        bool found = fc_mg_layer(cases[i].name, &prefix, &number, &end);
        assert_int_equal(found, cases[i].prefix != NULL);
        if (found) {
            assert_int_equal(prefix, strlen(cases[i].prefix));
            assert_memory_equal(cases[i].name, cases[i].prefix, prefix);
            assert_int_equal(number, cases[i].number);
            assert_int_equal(cases[i].name[end], '.');
        }
    }
}

static void first_of_mlp(void **state) {
    const char *first = NULL, *second = NULL, *name = "a.mlp.linear_fc1.bias";
    (void)state;
    assert_ptr_equal(fc_mg_first_of_mlp(name, &first, &second), name + 5);
    assert_string_equal(second, ".linear_fc2.");
    assert_null(fc_mg_first_of_mlp("a.mlp.linear_fc2.bias", &first, &second));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuts_by_name),
        cmocka_unit_test(layers_by_name),
        cmocka_unit_test(first_of_mlp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
