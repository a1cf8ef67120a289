/*
 * Megatron's rules: how the modules of megatron.core and of older Megatron-LM shard their parameters, by name; which
 * numbers in names are those of layers and experts; and which ranks a checkpoint must have.
 */
#include "megatron/stages.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void cuts_by_name(void **state) {
    static const struct {
        const char *name;
        fc_mg_rule rule;
        int dim;
    } cases[] = {
        {"model.embedding.word_embeddings.weight", MG_SHARD, 0},
        {"model.embedding.position_embeddings.weight", MG_COPY, 0},
        {"model.decoder.layers.0.self_attention.linear_qkv.weight", MG_SHARD, 0},
        {"model.decoder.layers.0.self_attention.linear_qkv.bias", MG_SHARD, 0},
        {"model.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", MG_COPY, 0},
        {"model.decoder.layers.0.self_attention.q_layernorm.weight", MG_COPY, 0},
        {"model.decoder.layers.0.self_attention.linear_proj.weight", MG_SHARD, 1},
        {"model.decoder.layers.0.self_attention.linear_proj.bias", MG_COPY, 0},
        {"model.decoder.layers.0.mlp.linear_fc2.weight", MG_SHARD, 1},
        {"model.decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", MG_SHARD, 0},
        {"model.decoder.layers.0.mlp.experts.linear_fc2.weight12", MG_SHARD, 1},
        {"model.decoder.layers.0.mlp.experts.weight1", MG_SHARD, 1},
        {"model.decoder.layers.0.mlp.experts.weight2", MG_SHARD, 0},
        {"model.decoder.layers.0.mlp.shared_experts.linear_fc2.weight", MG_SHARD, 1},
        {"model.decoder.layers.0.mlp.router.weight", MG_COPY, 0},
        {"model.mtp.layers.0.eh_proj.weight", MG_SHARD, 0},
        {"model.output_layer.weight", MG_SHARD, 0},
        {"model.language_model.encoder.layers.0.self_attention.dense.weight", MG_SHARD, 1},
        {"model.language_model.encoder.layers.0.mlp.dense_h_to_4h.bias", MG_SHARD, 0},
        {"model.language_model.encoder.layers.0.mlp.dense_4h_to_h.bias", MG_COPY, 0},
        /* An unsharded matrix in BERT's head, with the same name as a sharded one of attention. */
        {"model.lm_head.dense.weight", MG_UNKNOWN, 0},
        {"model.lm_head.bias", MG_SHARD, 0},
        {"model.decoder.layers.0.self_attention.linear_qkv._extra_state", MG_UNKNOWN, 0},
        {"model.decoder.layers.0.mixer.in_proj.weight", MG_UNKNOWN, 0},
        {"model.decoder.layers.0.self_attention.linear_qkv.weighty", MG_UNKNOWN, 0},
        {"linear_qkv.weight", MG_SHARD, 0},
        {"weight", MG_UNKNOWN, 0},
        {"", MG_UNKNOWN, 0},
        {".", MG_UNKNOWN, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fc_mg_sharding sharding = fc_mg_rule_of(cases[i].name);
        if (sharding.rule != cases[i].rule || sharding.dim != cases[i].dim) {
            fail_msg("%s: rule %d, dim %d", cases[i].name, (int)sharding.rule, sharding.dim);
        }
    }
}

static void layers_by_name(void **state) {
    static const struct {
        const char *name, *prefix; /* NULL if not in a layer */
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

static void experts_by_name(void **state) {
    static const struct {
        const char *name;
        fc_mg_expert kind;
        int64_t number;
        const char *rest; /* the name after the number */
    } cases[] = {
        {"model.decoder.layers.7.mlp.experts.local_experts.12.linear_fc1.weight", MG_ONE_EXPERT, 12,
         ".linear_fc1.weight"},
        {"experts.local_experts.0.linear_fc2._extra_state", MG_ONE_EXPERT, 0, ".linear_fc2._extra_state"},
        {"model.decoder.layers.7.mlp.experts.linear_fc2.weight3", MG_ONE_EXPERT, 3, ""},
        {"model.decoder.layers.7.mlp.experts.linear_fc1.bias31", MG_ONE_EXPERT, 31, ""},
        {"model.language_model.encoder.layers.7.mlp.local_experts.3.dense_h_to_4h.bias", MG_ONE_EXPERT, 3,
         ".dense_h_to_4h.bias"},
        {"model.decoder.layers.7.mlp.nonlocal_experts.3.weight", MG_NO_EXPERT, 0, NULL},
        {"model.decoder.layers.7.mlp.experts.weight1", MG_ALL_EXPERTS, 0, NULL},
        {"model.decoder.layers.7.mlp.experts.weight3", MG_OTHER_EXPERT, 0, NULL},
        {"model.decoder.layers.7.mlp.experts.linear_fc1.weight", MG_OTHER_EXPERT, 0, NULL},
        {"model.decoder.layers.7.mlp.experts.linear_fc1.weight3x", MG_OTHER_EXPERT, 0, NULL},
        {"model.decoder.layers.7.mlp.experts.local_experts.3", MG_OTHER_EXPERT, 0, NULL},
        {"model.decoder.layers.7.mlp.experts.local_experts.99999999999999999999.w", MG_OTHER_EXPERT, 0, NULL},
        {"model.decoder.layers.7.mlp.shared_experts.linear_fc1.weight", MG_NO_EXPERT, 0, NULL},
        {"model.decoder.layers.7.mlp.shared_experts.experts.weight2", MG_ALL_EXPERTS, 0, NULL},
        {"model.experts", MG_NO_EXPERT, 0, NULL},
        {"", MG_NO_EXPERT, 0, NULL},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t start = 0, end = 0;
        int64_t number = -1;
        fc_mg_expert kind = fc_mg_expert_of(cases[i].name, &start, &end, &number);
        if (kind != cases[i].kind) {
            fail_msg("%s: %d", cases[i].name, (int)kind);
        }
        if (kind == MG_ONE_EXPERT) {
            assert_int_equal(number, cases[i].number);
            assert_int_equal(strtoll(cases[i].name + start, NULL, 10), number);
            assert_string_equal(cases[i].name + end, cases[i].rest);
        }
    }
}

/* The coordinates of ranks whose number args gives, and which of them are missing. */
static void coordinates_of_ranks(void **state) {
    static const struct {
        fc_mg_args args;
        int nnumbers;
        size_t count;
        fc_mg_place places[8];
        fc_code code;
        const char *words;
    } cases[] = {
        /* tp, stages, context, ep, expert_tp */
        {{2, 1, 1, 2, 2, -1, -1, -1, -1, -1, -1}, 2, 4, {{0, 0, 0}, {1, 0, 0}, {0, 1, 0}, {1, 1, 0}}, FC_OK, ""},
        {{2, 1, 1, 4, 1, -1, -1, -1, -1, -1, -1}, 2, 4, {{0, 0, 0}, {1, 1, 0}, {0, 2, 0}, {1, 3, 0}}, FC_OK, ""},
        {{4, 1, 1, 2, 1, -1, -1, -1, -1, -1, -1}, 2, 4, {{0, 0, 0}, {2, 0, 0}, {1, 1, 0}, {3, 1, 0}}, FC_OK, ""},
        {{4, 1, 1, 2, 1, -1, -1, -1, -1, -1, -1},
         2,
         3,
         {{0, 0, 0}, {1, 1, 0}, {3, 1, 0}},
         FC_ECORRUPT,
         "mp_rank_02_000"},
        {{1, 2, 1, 2, -1, -1, -1, -1, -1, -1, -1}, 3, 4, {{0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {0, 1, 1}}, FC_OK, ""},
        {{1, 2, 1, 2, -1, -1, -1, -1, -1, -1, -1}, 3, 3, {{0, 0, 0}, {0, 0, 1}, {0, 1, 0}}, FC_ECORRUPT, "_00_001_001"},
        {{1, 2, 1, 1, -1, -1, -1, -1, -1, -1, -1}, 2, 2, {{0, 0, 0}, {0, 1, 0}}, FC_OK, ""},
        {{1, 2, 1, 2, -1, -1, -1, -1, -1, -1, -1}, 2, 2, {{0, 0, 0}, {0, 1, 0}}, FC_ECORRUPT, "2 expert-parallel"},
        {{1, 1, 1, 2, 2, -1, -1, -1, -1, -1, -1}, 2, 2, {{0, 0, 0}, {0, 1, 0}}, FC_EUNSUPPORTED, "sharded over 2"},
        {{2, 1, 1, 1, INT64_MAX, -1, -1, -1, -1, -1, -1},
         1,
         2,
         {{0, 0, 0}, {1, 0, 0}},
         FC_EUNSUPPORTED,
         "sharded over"},
    };
    const fc_checkpoint checkpoint = {.path = "here"};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fc_mg_place own[8];
        fc_mg_grid grid = {.count = cases[i].count, .nnumbers = cases[i].nnumbers, .places = own};
        fc_error err = {0};
        memcpy(own, cases[i].places, sizeof own);
        fc_code rc = fc_mg_arrange(&checkpoint, &cases[i].args, &grid, &err);
        if (rc != cases[i].code || (rc != FC_OK && !strstr(err.message, cases[i].words))) {
            fail_msg("case %zu: %d: %s", i, (int)rc, err.message);
        }
    }
}

static void extra_states(void **state) {
    (void)state;
    assert_true(fc_mg_is_extra_state("model.decoder.layers.0.mlp.experts.linear_fc1._extra_state"));
    assert_true(fc_mg_is_extra_state("_extra_state3"));
    assert_false(fc_mg_is_extra_state("model._extra_state.weight"));
    assert_false(fc_mg_is_extra_state("model.my_extra_state"));
    assert_false(fc_mg_is_extra_state(""));
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
        cmocka_unit_test(cuts_by_name),         cmocka_unit_test(layers_by_name), cmocka_unit_test(experts_by_name),
        cmocka_unit_test(coordinates_of_ranks), cmocka_unit_test(extra_states),   cmocka_unit_test(first_of_mlp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
