/*
 * Tensor-parallel plans: the built-in plan on the names of real models, JSON plans, optimizer state, bad files.
 */
#include "fsdpckpt/layout.h"
#include "sharding/tp_plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static fc_arena *plans;

static int make_arena(void **state) {
    (void)state;
    plans = fc_arena_new();
    return plans ? 0 : -1;
}

static int free_arena(void **state) {
    (void)state;
    fc_arena_free(plans);
    return 0;
}

static const fc_tp_plan *built_in(void) {
    const fc_tp_plan *plan = NULL;
    assert_int_equal(fc_tp_plan_load("auto", plans, &plan, NULL), FC_OK);
    return plan;
}

static int dim_of(const fc_tp_plan *plan, const char *fqn, int ndim) {
    fc_tp_style style;
    return fc_tp_plan_dim(plan, fqn, ndim, &style);
}

static void auto_plan_knows_the_usual_names(void **state) {
    (void)state;
    static const struct {
        const char *fqn;
        int ndim, dim;
    } cases[] = {
        /* Llama, Qwen, Mistral */
        {"model.embed_tokens.weight", 2, 0},
        {"model.layers.0.self_attn.q_proj.weight", 2, 0},
        {"model.layers.0.self_attn.q_proj.bias", 1, 0},
        {"model.layers.11.self_attn.o_proj.weight", 2, 1},
        {"model.layers.11.self_attn.o_proj.bias", 1, -1},
        {"model.layers.0.self_attn.q_norm.weight", 1, -1},
        {"model.layers.0.mlp.gate_proj.weight", 2, 0},
        {"model.layers.0.mlp.down_proj.weight", 2, 1},
        {"model.layers.0.input_layernorm.weight", 1, -1},
        {"model.norm.weight", 1, -1},
        {"lm_head.weight", 2, 0},
        /* Meta's and torchtitan's Llama */
        {"tok_embeddings.weight", 2, 0},
        {"layers.0.attention.wq.weight", 2, 0},
        {"layers.0.attention.wo.weight", 2, 1},
        {"layers.0.feed_forward.w1.weight", 2, 0},
        {"layers.0.feed_forward.w2.weight", 2, 1},
        {"layers.0.attention_norm.weight", 1, -1},
        {"output.weight", 2, 0},
        /* Mixtral, and experts fused in one tensor */
        {"model.layers.0.block_sparse_moe.experts.3.w1.weight", 2, 0},
        {"model.layers.0.block_sparse_moe.experts.3.w2.weight", 2, 1},
        {"model.layers.0.block_sparse_moe.gate.weight", 2, -1},
        {"model.layers.0.mlp.experts.gate_up_proj", 3, 1},
        {"model.layers.0.mlp.experts.down_proj", 3, 2},
        /* GPT-2: Conv1D weights are [in, out] */
        {"transformer.wte.weight", 2, 0},
        {"transformer.wpe.weight", 2, -1},
        {"transformer.h.0.attn.c_attn.weight", 2, 1},
        {"transformer.h.0.attn.c_attn.bias", 1, 0},
        {"transformer.h.0.attn.c_proj.weight", 2, 0},
        {"transformer.h.0.attn.c_proj.bias", 1, -1},
        {"transformer.h.0.mlp.c_fc.weight", 2, 1},
        {"transformer.h.0.ln_1.weight", 1, -1},
        /* GPT-NeoX */
        {"gpt_neox.embed_in.weight", 2, 0},
        {"gpt_neox.layers.0.attention.query_key_value.weight", 2, 0},
        {"gpt_neox.layers.0.attention.dense.weight", 2, 1},
        {"gpt_neox.layers.0.attention.dense.bias", 1, -1},
        {"gpt_neox.layers.0.mlp.dense_h_to_4h.bias", 1, 0},
        {"embed_out.weight", 2, 0},
        /* TP does not cut these */
        {"bert.encoder.layer.0.attention.output.dense.weight", 2, -1},
        {"conv1.weight", 4, -1},
        {"my_q_proj.weight", 2, -1},
        {"", 2, -1},
        {"_orig_mod", 2, -1},
    };
    const fc_tp_plan *plan = built_in();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int got = dim_of(plan, cases[i].fqn, cases[i].ndim);
        if (got != cases[i].dim) {
            fail_msg("%s: dimension %d, expected %d", cases[i].fqn, got, cases[i].dim);
        }
    }
    const fc_tp_plan *null_plan = NULL;
    assert_int_equal(fc_tp_plan_load(NULL, plans, &null_plan, NULL), FC_OK);
    assert_int_equal(fc_tp_plan_rules(null_plan), fc_tp_plan_rules(plan));
    assert_ptr_equal(fc_tp_plan_pattern(null_plan, 0), fc_tp_plan_pattern(plan, 0));
}

static void styles_are_reported(void **state) {
    (void)state;
    fc_tp_style style;
    fc_tp_plan_dim(built_in(), "layers.0.attention.wo.bias", 1, &style);
    assert_int_equal(style, FC_TP_ROWWISE);
    fc_tp_plan_dim(built_in(), "model.norm.weight", 1, &style);
    assert_int_equal(style, FC_TP_REPLICATE);
    fc_tp_plan_dim(built_in(), "conv1.weight", 4, &style);
    assert_int_equal(style, FC_TP_NONE);
}

static void optimizer_state_follows_its_parameter(void **state) {
    (void)state;
    const fc_tp_plan *plan = built_in();
    static const char *const rowwise[] = {
        "optim.state.layers.0.attention.wo.weight.exp_avg",
        "optimizer.state.model.layers.0.attention.wo.weight.exp_avg_sq",
        "state.layers.0.attention.wo.weight.max_exp_avg_sq",
        "app.optimizer.state.module.layers.0.attention.wo.weight.momentum_buffer",
        "optim.state._orig_mod.layers.0._fsdp_wrapped_module.attention.wo._orig_mod.weight.some_key",
        "optimizer_states.0.state.layers.0._checkpoint_wrapped_module.attention.wo.weight.exp_avg",
        "_orig_mod.layers.0.attention.wo.weight",
        "module.module.layers.0.attention.wo.weight",
        "layers.0.attention._fsdp_wrapped_module._checkpoint_wrapped_module._fpw_module._orig_mod.dense.weight",
        "state.layers.0.attention.wo.weight",
    };
    for (size_t i = 0; i < sizeof rowwise / sizeof *rowwise; i++) {
        if (dim_of(plan, rowwise[i], 2) != 1) {
            fail_msg("%s: dimension %d, expected 1", rowwise[i], dim_of(plan, rowwise[i], 2));
        }
    }
    assert_int_equal(dim_of(plan, "optim.state.layers.0.attention.wo.weight.step", 0), -1);
    assert_int_equal(dim_of(plan, "optim.state.layers.0.attention.wq.weight.step", 1), -1);
    assert_int_equal(dim_of(plan, "optim.state.layers.0.attention.wo.bias.exp_avg", 1), -1);
    assert_int_equal(dim_of(plan, "optim.state.layers.0.mlp.experts.down_proj.exp_avg", 3), 2);
    assert_true(fc_tp_plan_rule_of(plan, "optim.state.layers.0.attention.wo.weight.step") >= 0);
}

static void write_plan(const char *path, const char *text, size_t len) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, len, f), len);
    assert_int_equal(fclose(f), 0);
}

/* Loads `text` as a plan file whose name is stable, so that whole messages can be compared. */
static fc_code load_text(const char *text, size_t len, fc_arena *arena, const fc_tp_plan **plan, fc_error *err) {
    char path[] = "/tmp/fsdpckpt-plan-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    write_plan(path, text, len);
    fc_code code = fc_tp_plan_load(path, arena, plan, err);
    unlink(path);
    if (code != FC_OK) {
        assert_null(*plan);
        assert_non_null(strstr(err->message, path));
        assert_null(strchr(err->message, '\n'));
    }
    return code;
}

static void json_plan(void **state) {
    (void)state;
    static const char text[] = "{\"layers.*.self_attn.q_proj\": \"colwise\", \"layers.*.mlp.c_proj\": \"rowwise_rep\","
                               " \"embed_tokens\": \"colwise_rep\", \"lm_head\": \"embedding_rowwise\","
                               " \"layers.0.self_attn.q_proj\": \"replicate\", \"experts\": \"grouped_gemm\","
                               " \"layers.*.mlp.experts.w\": \"local_rowwise\", \"w*\": \"sequence_parallel\","
                               " \"unused\": \"colwise_gather_output\", \"kv_a_proj_with_mqa\": \"mla_kv_a_proj\","
                               " \"moe\": \"ep_dispatch_experts\", \"shared\": \"all_reduce\"}";
    fc_arena *arena = fc_arena_new();
    const fc_tp_plan *plan;
    fc_error err;
    assert_int_equal(load_text(text, sizeof text - 1, arena, &plan, &err), FC_OK);
    assert_int_equal(fc_tp_plan_rules(plan), 12);
    assert_string_equal(fc_tp_plan_pattern(plan, 1), "layers.*.mlp.c_proj");
    assert_int_equal(fc_tp_plan_rule_of(plan, "model.layers.7.self_attn.q_proj.weight"), 0);
    assert_int_equal(fc_tp_plan_rule_of(plan, "model.layers.0.self_attn.q_proj.weight"), 4); /* fewer wildcards */
    assert_int_equal(fc_tp_plan_rule_of(plan, "model.layers.7.x.self_attn.q_proj.weight"), -1);
    assert_int_equal(fc_tp_plan_rule_of(plan, "self_attn.q_proj.weight"), -1);
    assert_int_equal(dim_of(plan, "layers.7.self_attn.q_proj.weight", 2), 0);
    assert_int_equal(dim_of(plan, "layers.7.mlp.c_proj.weight", 2), 1); /* a plan file assumes nn.Linear */
    assert_int_equal(dim_of(plan, "embed_tokens.weight", 2), 1);
    assert_int_equal(dim_of(plan, "lm_head.weight", 2), 0);
    assert_int_equal(dim_of(plan, "layers.1.mlp.experts.gate", 3), 0);
    assert_int_equal(dim_of(plan, "layers.1.self_attn.kv_a_proj_with_mqa.weight", 2), -1);
    assert_int_equal(dim_of(plan, "layers.1.moe.bias", 1), -1);
    assert_int_equal(dim_of(plan, "layers.1.shared.weight", 2), -1);
    assert_int_equal(fc_tp_plan_rule_of(plan, "layers.1.mlp.experts.w"), 6); /* the parameter beats its module */
    assert_int_equal(fc_tp_plan_rule_of(plan, "layers.1.wide.weight"), 7);
    fc_arena_free(arena);
}

/* A name under optim.state that ends in "weight" is a parameter, not a key of its state. */
static void parameter_named_in_full(void **state) {
    (void)state;
    static const char text[] = "{\"head.weight\": \"rowwise\", \"head.bias\": \"colwise\"}";
    fc_arena *arena = fc_arena_new();
    const fc_tp_plan *plan;
    fc_error err;
    assert_int_equal(load_text(text, sizeof text - 1, arena, &plan, &err), FC_OK);
    assert_int_equal(dim_of(plan, "head.weight", 2), 1);
    assert_int_equal(dim_of(plan, "head.bias", 1), 0);
    assert_int_equal(dim_of(plan, "optim.state.head.weight", 2), 1);
    assert_int_equal(dim_of(plan, "optim.state.head.weight.exp_avg", 2), 1);
    assert_int_equal(dim_of(plan, "head.scale", 1), -1);
    fc_arena_free(arena);
}

static void bad_plans_are_reported_in_one_line(void **state) {
    (void)state;
    static const struct {
        const char *text;
        fc_code code;
        const char *says;
    } cases[] = {
        {"", FC_EUSAGE, "not a TP plan"},
        {"{\"a\": \"colwise\"", FC_EUSAGE, ":1:"},
        {"[\"colwise\"]", FC_EUSAGE, "an object"},
        {"{}", FC_EUSAGE, "an object"},
        {"{\"a\": \"colwise\", \"a\": \"rowwise\"}", FC_EUSAGE, "duplicate"},
        {"{\"a\": 1}", FC_EUSAGE, "pattern \"a\": the style must be a string"},
        {"{\"a\": null}", FC_EUSAGE, "must be a string"},
        {"{\"a\": \"diagonal\"}", FC_EUSAGE, "pattern \"a\": unknown style \"diagonal\""},
        {"{\"gate_up\": \"packed_colwise\"}", FC_EUNSUPPORTED, "pattern \"gate_up\": the style \"packed_colwise\""},
        {"{\"a..b\": \"colwise\"}", FC_EUSAGE, "pattern \"a..b\""},
        {"{\"\": \"colwise\"}", FC_EUSAGE, "pattern \"\""},
        {"{\"a.\": \"colwise\"}", FC_EUSAGE, "pattern \"a.\""},
        {"{\"a\\u0000b\": \"colwise\"}", FC_EUSAGE, "not a TP plan"},
        {"{\"a\": \"col\xffwise\"}", FC_EUSAGE, "not a TP plan"},
        {"{\"a\": \"colwise\"} x", FC_EUSAGE, "not a TP plan"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fc_arena *arena = fc_arena_new();
        const fc_tp_plan *plan;
        fc_error err;
        assert_int_equal(load_text(cases[i].text, strlen(cases[i].text), arena, &plan, &err), cases[i].code);
        if (!strstr(err.message, cases[i].says)) {
            fail_msg("%s does not say %s", err.message, cases[i].says);
        }
        fc_arena_free(arena);
    }
}

static void unreadable_plans(void **state) {
    (void)state;
    fc_arena *arena = fc_arena_new();
    const fc_tp_plan *plan;
    fc_error err;
    assert_int_equal(fc_tp_plan_load("/nonexistent/plan.json", arena, &plan, &err), FC_EUSAGE);
    assert_string_equal(err.message, "TP plan '/nonexistent/plan.json': neither a file nor a known plan; known is "
                                     "'auto'; a file is JSON such as {\"layers.*.self_attn.q_proj\": \"colwise\"}");
    assert_int_equal(fc_tp_plan_load("/", arena, &plan, &err), FC_EIO);
    size_t len = (1 << 20) + 1;
    char *text = malloc(len);
    assert_non_null(text);
    memset(text, ' ', len);
    assert_int_equal(load_text(text, len, arena, &plan, &err), FC_EUSAGE);
    assert_non_null(strstr(err.message, "1 MiB"));
    free(text);
    fc_arena_free(arena);
}

/* Long names with very many dots, as in a hostile checkpoint, against patterns with stars. */
static void hostile_names(void **state) {
    (void)state;
    size_t len = 1 << 16;
    char *name = malloc(len + 1);
    assert_non_null(name);
    memset(name, '.', len);
    name[len] = '\0';
    assert_int_equal(dim_of(built_in(), name, 2), -1);
    memset(name, 'n', len);
    assert_int_equal(dim_of(built_in(), name, 2), -1);
    memcpy(name + len - 14, ".q_proj.weight", 14);
    assert_int_equal(dim_of(built_in(), name, 2), 0);
    free(name);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(auto_plan_knows_the_usual_names),
        cmocka_unit_test(styles_are_reported),
        cmocka_unit_test(optimizer_state_follows_its_parameter),
        cmocka_unit_test(json_plan),
        cmocka_unit_test(parameter_named_in_full),
        cmocka_unit_test(bad_plans_are_reported_in_one_line),
        cmocka_unit_test(unreadable_plans),
        cmocka_unit_test(hostile_names),
    };
    return cmocka_run_group_tests(tests, make_arena, free_arena);
}
