/*
 * FSDP units: module trees from names, policies, checks, and the parameters of each unit.
 */
#include "fsdpckpt/wrap_policy.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const int64_t two_by_three[] = {2, 3};

/* A tree of parameters of 2 × 3 float32, and an arena. */
typedef struct fixture {
    fc_arena *arena;
    fc_module_tree tree;
    fc_wrap_targets targets;
    fc_error err;
} fixture;

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    f->arena = fc_arena_new();
    assert_non_null(f->arena);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    fc_arena_free(f->arena);
    free(f);
    return 0;
}

enum { MOST = 64 };

static fc_code grow(fixture *f, const char *const *names, const fc_model_info *info) {
    fc_parameter_spec specs[MOST];
    size_t n = 0;
    for (; names[n]; n++) {
        specs[n] = (fc_parameter_spec){.fqn = names[n], .dtype = FC_F32, .ndim = 2, .shape = two_by_three};
    }
    fc_code rc = fc_module_tree_new(specs, n, info, f->arena, &f->tree, &f->err);
    if (rc == FC_OK) {
        fc_unit_options root = {.strategy = FC_HYBRID_SHARD, .mixed_precision = true, .param_dtype = FC_BF16};
        assert_int_equal(fc_wrap_targets_new(&f->tree, &root, f->arena, &f->targets, &f->err), FC_OK);
    }
    return rc;
}

static void grow_good(fixture *f, const char *const *names, const fc_model_info *info) {
    if (grow(f, names, info) != FC_OK) {
        fail_msg("%s", f->err.message);
    }
}

#define NAMES(...) ((const char *const[]){__VA_ARGS__, NULL})

static uint32_t module(const fixture *f, const char *fqn) {
    for (uint32_t m = 0; m < f->tree.nmodules; m++) {
        const fc_name *n = &f->tree.modules[m].fqn;
        if (n->len == strlen(fqn) && memcmp(n->text, fqn, n->len) == 0) {
            return m;
        }
    }
    fail_msg("no module %s", fqn);
    return 0;
}

/* Compares the units and their parameters with "a=p,q;=r". */
static void assert_units(fixture *f, const char *want) {
    char got[2048] = "";
    fc_units units;
    assert_int_equal(fc_wrap_units(&f->targets, f->arena, &units, &f->err), FC_OK);
    for (size_t u = 0; u < units.count; u++) {
        sprintf(got + strlen(got), "%s%s=", u ? ";" : "", units.units[u].fqn);
        for (size_t i = 0; i < units.units[u].nparameters; i++) {
            sprintf(got + strlen(got), "%s%s", i ? "," : "", f->tree.parameters[units.units[u].parameters[i]].fqn);
        }
        assert_int_equal(units.units[u].numel, 6 * units.units[u].nparameters);
        assert_int_equal(units.units[u].bytes, 24 * units.units[u].nparameters);
    }
    assert_string_equal(got, want);
}

static void names_make_a_tree(void **state) {
    fixture *f = *state;
    grow_good(f,
              NAMES("m.layers.10.w", "m.layers.2.w", "m.layers.2.inner.w", "head.w", "m._orig_mod.layers.0.w",
                    "m.layers.2.b", "own"),
              NULL);
    static const char *const order[] = {
        "", "m", "m.layers", "m.layers.0", "m.layers.2", "m.layers.2.inner", "m.layers.10", "head"};
    assert_int_equal(f->tree.nmodules, 8);
    for (uint32_t m = 0; m < 8; m++) {
        assert_int_equal(f->tree.modules[m].fqn.len, strlen(order[m]));
        assert_memory_equal(f->tree.modules[m].fqn.text ? f->tree.modules[m].fqn.text : "", order[m], strlen(order[m]));
    }
    assert_int_equal(f->tree.modules[0].end, 8);
    assert_int_equal(f->tree.modules[module(f, "m.layers.2")].end, module(f, "m.layers.10"));
    assert_int_equal(f->tree.modules[module(f, "m.layers.2")].nparameters, 2);
    assert_string_equal(f->tree.parameters[0].fqn, "own");
    assert_string_equal(f->tree.parameters[1].fqn, "m.layers.0.w");
    assert_int_equal(f->tree.parameters[1].spec, 4);
    assert_string_equal(f->tree.modules[module(f, "m.layers")].classes[0], "ModuleList");
    assert_int_equal(f->tree.modules[module(f, "head")].nclasses, 0);
    uint32_t order_of[8];
    fc_module_post_order(&f->tree, order_of);
    static const uint32_t post[] = {3, 5, 4, 6, 2, 1, 7, 0};
    assert_memory_equal(order_of, post, sizeof post);
}

static void an_empty_tree_has_a_root(void **state) {
    fixture *f = *state;
    grow_good(f, NAMES("w"), NULL);
    assert_int_equal(f->tree.nmodules, 1);
    assert_units(f, "=w");
    assert_int_equal(fc_module_tree_new(NULL, 0, NULL, f->arena, &f->tree, &f->err), FC_OK);
    assert_int_equal(f->tree.nmodules, 1);
    assert_int_equal(f->tree.nparameters, 0);
}

static void names_without_a_tree(void **state) {
    fixture *f = *state;
    char deep[2 * 64 + 1];
    for (int i = 0; i < 64; i++) {
        memcpy(deep + 2 * (size_t)i, "a.", 2);
    }
    deep[127] = '\0'; /* 64 levels */
    grow_good(f, NAMES(deep), NULL);
    strcpy(deep + 127, ".");
    assert_int_equal(grow(f, NAMES(deep), NULL), FC_EUNSUPPORTED);
    assert_non_null(strstr(f->err.message, "more than 64 levels"));
    assert_int_equal(grow(f, NAMES("a.w", "a._orig_mod.w"), NULL), FC_EUSAGE);
    assert_non_null(strstr(f->err.message, "there are two parameters 'a._orig_mod.w'"));
    static const int64_t huge[] = {INT64_MAX, 2};
    fc_parameter_spec spec = {.fqn = "w", .dtype = FC_F32, .ndim = 2, .shape = huge};
    assert_int_equal(fc_module_tree_new(&spec, 1, NULL, f->arena, &f->tree, &f->err), FC_ECORRUPT);
    /* Each size fits, but their sum overflows. */
    static const int64_t half[] = {INT64_MAX / 2 + 1};
    fc_parameter_spec two[] = {{.fqn = "a", .dtype = FC_I8, .ndim = 1, .shape = half},
                               {.fqn = "b", .dtype = FC_I8, .ndim = 1, .shape = half}};
    fc_units units;
    assert_int_equal(fc_module_tree_new(two, 2, NULL, f->arena, &f->tree, &f->err), FC_OK);
    assert_int_equal(fc_wrap_targets_new(&f->tree, &(fc_unit_options){0}, f->arena, &f->targets, &f->err), FC_OK);
    assert_int_equal(fc_wrap_by_size(&f->targets, 1, NULL, NULL, &f->err), FC_ECORRUPT);
    assert_int_equal(fc_wrap_units(&f->targets, f->arena, &units, &f->err), FC_ECORRUPT);
}

static void blocks_are_the_outermost_numbered(void **state) {
    fixture *f = *state;
    grow_good(f,
              NAMES("embed.w", "layers.0.attn.w", "layers.0.experts.0.up.w", "layers.0.experts.1.up.w",
                    "layers.1.attn.w", "mlp.0.w", "mlp.2.w"),
              NULL);
    fc_wrap_blocks(&f->targets);
    assert_units(f, "layers.0=layers.0.attn.w,layers.0.experts.0.up.w,layers.0.experts.1.up.w;layers.1=layers.1.attn.w;"
                    "=embed.w,mlp.0.w,mlp.2.w");
}

static void classes_by_the_most_specific_rule(void **state) {
    fixture *f = *state;
    static const char *const block[] = {"Block", "Base", NULL}, *const odd[] = {"Odd", "Base", NULL},
                             *const lost[] = {"Lost", NULL};
    const fc_class_rule rules[] = {
        {"layers.*", block, 2}, {"layers.1", odd, 2}, {"*", lost, 1}, {"nothing.*", lost, 1}};
    const fc_model_info info = {.classes = rules, .nclasses = 4};
    grow_good(f, NAMES("layers.0.w", "layers.1.w", "head.w"), &info);
    assert_string_equal(f->tree.modules[module(f, "layers.0")].classes[0], "Block");
    assert_string_equal(f->tree.modules[module(f, "layers.1")].classes[0], "Odd");
    assert_string_equal(f->tree.modules[module(f, "head")].classes[0], "Lost");
    assert_int_equal(f->tree.idle, 1);
    assert_string_equal(f->tree.idle_one, "nothing.*");
    fc_wrap_by_class(&f->targets, NAMES("Base"));
    assert_units(f, "layers.0=layers.0.w;layers.1=layers.1.w;=head.w");
    assert_int_equal(f->targets.options[module(f, "layers.0")].strategy, FC_HYBRID_SHARD);
}

static void outer_units_keep_the_rest(void **state) {
    fixture *f = *state;
    static const char *const kind[] = {"K", NULL};
    const fc_class_rule rules[] = {{"a", kind, 1}, {"a.b", kind, 1}, {"empty", kind, 1}};
    const fc_model_info info = {.classes = rules, .nclasses = 3, .ignored = NAMES("a.b.x", "c"), .buffers = NAMES("r")};
    grow_good(f, NAMES("a.w", "a.b.w", "a.b.x", "c.w", "d.w", "a.r", "empty.r", "a.v"), &info);
    fc_wrap_by_class(&f->targets, kind);
    assert_units(f, "a.b=a.b.w;a=a.w,a.v;empty=;=d.w");
}

static fc_code choose(const fc_module_tree *tree, uint32_t m, void *user, fc_wrap_choice *choice, fc_error *err) {
    const fc_module *at = &tree->modules[m];
    if (at->name.len == 3 && memcmp(at->name.text, "bad", 3) == 0) {
        return fc_fail(err, FC_EUSAGE, "no");
    }
    ++*(int *)user;
    choice->wrap = at->name.len == 1;
    if (at->name.len == 1 && at->name.text[0] == 'b') {
        choice->set = FC_UNIT_SET_STRATEGY | FC_UNIT_SET_MIXED_PRECISION | FC_UNIT_SET_CPU_OFFLOAD;
        choice->options = (fc_unit_options){.strategy = FC_NO_SHARD, .cpu_offload = true};
    }
    return FC_OK;
}

static void custom_options_over_the_roots(void **state) {
    fixture *f = *state;
    int asked = 0;
    grow_good(f, NAMES("a.w", "b.w", "long.w"), NULL);
    assert_int_equal(fc_wrap_custom(&f->targets, choose, &asked, &f->err), FC_OK);
    assert_int_equal(asked, 4);
    assert_units(f, "a=a.w;b=b.w;=long.w");
    const fc_unit_options *a = &f->targets.options[module(f, "a")], *b = &f->targets.options[module(f, "b")];
    assert_int_equal(a->strategy, FC_HYBRID_SHARD);
    assert_true(a->mixed_precision);
    assert_int_equal(a->param_dtype, FC_BF16);
    assert_int_equal(b->strategy, FC_NO_SHARD);
    assert_false(b->mixed_precision);
    assert_true(b->cpu_offload);
    assert_false(a->cpu_offload);
    grow_good(f, NAMES("bad.w"), NULL);
    assert_int_equal(fc_wrap_custom(&f->targets, choose, &asked, &f->err), FC_EUSAGE);
}

static void sizes_are_counted_before(void **state) {
    fixture *f = *state;
    const char *const *names = NAMES("list.0.w", "list.0.v", "list.1.w", "mha.in_proj_weight", "mha.out_proj.w", "x.w");
    grow_good(f, names, NULL);
    assert_int_equal(fc_wrap_by_size(&f->targets, 6, NULL, NULL, &f->err), FC_OK);
    assert_units(f, "list.0=list.0.w,list.0.v;list.1=list.1.w;x=x.w;=mha.in_proj_weight,mha.out_proj.w");
    grow_good(f, names, NULL);
    assert_int_equal(fc_wrap_by_size(&f->targets, 12, NAMES("none"), NAMES("none"), &f->err), FC_OK);
    assert_units(f, "list.0=list.0.w,list.0.v;mha=mha.in_proj_weight,mha.out_proj.w;=list.1.w,x.w");
    grow_good(f, names, NULL);
    assert_int_equal(fc_wrap_by_size(&f->targets, 18, NAMES("none"), NAMES("none"), &f->err), FC_OK);
    assert_units(f, "list=list.0.w,list.0.v,list.1.w;=mha.in_proj_weight,mha.out_proj.w,x.w");
    grow_good(f, names, NULL);
    assert_int_equal(fc_wrap_by_size(&f->targets, 37, NULL, NULL, &f->err), FC_OK);
    assert_units(f, "=list.0.w,list.0.v,list.1.w,mha.in_proj_weight,mha.out_proj.w,x.w");
}

static void overridden_classes_are_named_once(void **state) {
    fixture *f = *state;
    static const char *const one[] = {"BatchNorm1d", "_BatchNorm"}, *const two[] = {"BatchNorm2d", "_BatchNorm"};
    const fc_class_rule rules[] = {{"n1", one, 2}, {"n2", two, 2}, {"n3", two, 2}};
    const fc_model_info info = {.classes = rules, .nclasses = 3, .ignored = NAMES("n3")};
    const char *const *classes;
    grow_good(f, NAMES("n1.w", "n2.w", "n3.w", "x.w", "n4.running_mean"), &info);
    fc_wrap_by_class(&f->targets, NAMES("BatchNorm1d"));
    assert_int_equal(fc_wrap_override_mixed_precision(&f->targets, NAMES("_BatchNorm"), f->arena, &classes, &f->err),
                     FC_OK);
    assert_string_equal(classes[0], "BatchNorm1d");
    assert_string_equal(classes[1], "BatchNorm2d");
    assert_string_equal(classes[2], "_BatchNorm"); /* recognised by its name */
    assert_null(classes[3]);
    assert_false(f->targets.options[module(f, "n1")].mixed_precision);
    assert_true(f->targets.chosen[module(f, "n2")]);
    assert_false(f->targets.chosen[module(f, "n3")]);
    assert_true(f->targets.root.mixed_precision);
}

static void count_warning(void *user, const char *text) {
    assert_non_null(strstr(text, "(12 numel instead of 6 numel before sharding via reduce-scatter)"));
    ++*(int *)user;
}

static void units_are_frozen_or_not(void **state) {
    fixture *f = *state;
    int warnings = 0;
    const fc_model_info info = {.frozen = NAMES("layers.0.a", "layers.1")};
    grow_good(f, NAMES("layers.0.a.w", "layers.0.b.w", "layers.1.a.w", "layers.1.b.w", "x.w"), &info);
    fc_wrap_blocks(&f->targets);
    assert_int_equal(fc_wrap_check_frozen(&f->targets, NULL, NULL, &f->err), FC_EUSAGE);
    assert_string_equal(
        f->err.message,
        "layers.0 has both parameters with requires_grad=True and False. FSDP does not support wrapping "
        "such modules when use_orig_params=False. If possible, wrap the frozen parameters with FSDP "
        "separately. The following parameters have requires_grad=True: ['layers.0.b.w'] The following "
        "parameters have requires_grad=False: ['layers.0.a.w']");
    f->targets.options[module(f, "layers.0")].use_orig_params = true;
    assert_int_equal(fc_wrap_check_frozen(&f->targets, count_warning, &warnings, &f->err), FC_OK);
    assert_int_equal(warnings, 1);
    f->targets.chosen[module(f, "layers.1")] = false; /* then the root has frozen and other parameters */
    assert_int_equal(fc_wrap_check_frozen(&f->targets, NULL, NULL, &f->err), FC_EUSAGE);
    assert_int_equal(strncmp(f->err.message, "the root module has both", 24), 0);
}

static void shared_parameters_have_one_unit(void **state) {
    fixture *f = *state;
    const char *const *const groups[] = {NAMES("head.w", "embed.w"), NULL};
    const fc_model_info info = {.shared = groups};
    grow_good(f, NAMES("embed.w", "layers.0.a.w", "head.w"), &info);
    fc_wrap_blocks(&f->targets);
    assert_int_equal(fc_wrap_check_shared(&f->targets, &f->err), FC_OK);
    assert_units(f, "layers.0=layers.0.a.w;=embed.w");
    f->targets.chosen[module(f, "head")] = true;
    assert_int_equal(fc_wrap_check_shared(&f->targets, &f->err), FC_EUSAGE);
    assert_string_equal(
        f->err.message,
        "'embed.w' and 'head.w' are one shared parameter, but the policy puts them into two units, 'the "
        "root' and 'head'; their lowest common ancestor 'the root', or a module above it, must manage "
        "them: do not wrap any module in between");
    /* A file that stores the tensor once, under the first name. */
    grow_good(f, NAMES("embed.w", "layers.0.a.w"), &info);
    assert_int_equal(f->tree.nparameters, 3);
    assert_string_equal(f->tree.parameters[2].fqn, "head.w");
    assert_int_equal(f->tree.parameters[2].same_as, 0);
    assert_int_equal(f->tree.parameters[2].numel, 6);
    fc_parameter_spec tied[] = {{.fqn = "a.w", .dtype = FC_F32, .ndim = 2, .shape = two_by_three},
                                {.fqn = "b.w", .dtype = FC_F32, .ndim = 2, .shape = two_by_three, .tied_to = "a.w"}};
    assert_int_equal(fc_module_tree_new(tied, 2, NULL, f->arena, &f->tree, &f->err), FC_OK);
    assert_int_equal(f->tree.parameters[1].same_as, 0);
    tied[1].dtype = FC_BF16;
    assert_int_equal(fc_module_tree_new(tied, 2, NULL, f->arena, &f->tree, &f->err), FC_EUSAGE);
    tied[1].tied_to = "c";
    assert_int_equal(fc_module_tree_new(tied, 2, NULL, f->arena, &f->tree, &f->err), FC_EUSAGE);
}

static void units_are_flat_parameters(void **state) {
    fixture *f = *state;
    const char *const *const groups[] = {NAMES("head.w", "embed.w"), NULL};
    const fc_model_info info = {.shared = groups, .frozen = NAMES("layers.0")};
    fc_units units;
    fc_flat_layout layout;
    const fc_flat_desc *descs;
    grow_good(f, NAMES("embed.w", "layers.0.a.w", "head.w", "norm.w"), &info);
    fc_wrap_blocks(&f->targets);
    assert_int_equal(fc_wrap_units(&f->targets, f->arena, &units, &f->err), FC_OK);
    assert_int_equal(units.units[1].nnames, 3);
    for (size_t u = 0; u < 2; u++) {
        assert_int_equal(fc_unit_flat_descs(&f->tree, &units.units[u], f->arena, &descs, &f->err), FC_OK);
        assert_int_equal(fc_flat_layout_new(descs, units.units[u].nnames, 4, false, FC_F32, f->arena, &layout, &f->err),
                         FC_OK);
        assert_int_equal(layout.numel, units.units[u].numel);
        assert_int_equal(layout.nparams, units.units[u].nparameters);
        assert_int_equal(layout.requires_grad, u == 1);
    }
    assert_int_equal(layout.nshared, 1);
    assert_string_equal(layout.shared[0].fqn, "head.w");
    assert_string_equal(layout.params[layout.shared[0].primary].fqn, "embed.w");
    assert_int_equal(layout.shard_numel, 3);
}

static void shared_modules(void **state) {
    fixture *f = *state;
    const char *const *const groups[] = {NAMES("b.m", "a.m"), NULL};
    const fc_model_info info = {.shared = groups};
    grow_good(f, NAMES("a.m.in.w", "a.m.w", "b.m.in.w", "b.m.w", "b.w"), &info);
    assert_int_equal(f->tree.modules[module(f, "b.m")].same_as, module(f, "a.m"));
    assert_int_equal(f->tree.modules[module(f, "b.m.in")].same_as, module(f, "a.m.in"));
    f->targets.chosen[module(f, "a.m")] = true;
    assert_int_equal(fc_wrap_check_shared(&f->targets, &f->err), FC_OK);
    assert_units(f, "a.m=a.m.w,a.m.in.w;=b.w");
    f->targets.chosen[module(f, "a.m")] = false;
    f->targets.chosen[module(f, "b")] = true;
    assert_int_equal(fc_wrap_check_shared(&f->targets, &f->err), FC_EUSAGE);
    const char *const *const inside[] = {NAMES("a", "a.m"), NULL};
    assert_int_equal(grow(f, NAMES("a.m.w", "a.w"), &(fc_model_info){.shared = inside}), FC_EUSAGE);
    const char *const *const unlike[] = {NAMES("a", "b"), NULL};
    assert_int_equal(grow(f, NAMES("a.m.w", "b.n.w"), &(fc_model_info){.shared = unlike}), FC_EUSAGE);
    assert_int_equal(grow(f, NAMES("a.w", "b.v"), &(fc_model_info){.shared = unlike}), FC_EUSAGE);
    assert_int_equal(grow(f, NAMES("a.w", "c.w"), &(fc_model_info){.shared = unlike}), FC_EUSAGE);
    assert_non_null(strstr(f->err.message, "no parameter or module 'b'"));
}

static char path[] = "/tmp/fsdpckpt-policy-XXXXXX";

static int make_file(void **state) {
    int fd = mkstemp(path);
    return fd < 0 || close(fd) != 0 ? -1 : setup(state);
}

static int remove_file(void **state) {
    unlink(path);
    strcpy(path, "/tmp/fsdpckpt-policy-XXXXXX");
    return teardown(state);
}

static void write_file(const char *text) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fputs(text, file) >= 0, 1);
    assert_int_equal(fclose(file), 0);
}

static void policy_files_are_read(void **state) {
    fixture *f = *state;
    fc_wrap_file *file;
    const char *idle;
    write_file(
        "{\"layers.*\": true, \"layers.1\": false, \"class:K\": {\"sharding_strategy\": \"NO_SHARD\"},"
        "\"head\": {\"mixed_precision\": {\"param_dtype\": \"float16\"}, \"backward_prefetch\": null}, \"x\": {},"
        "\"idle\": true, \"$root\": {\"use_orig_params\": true, \"mixed_precision\": {}}, \"$fp32_classes\": \"N\"}");
    assert_int_equal(fc_wrap_file_load(path, f->arena, &file, &f->err), FC_OK);
    static const char *const kind[] = {"K", NULL};
    const fc_class_rule rules[] = {{"layers.1", kind, 1}, {"k", kind, 1}};
    grow_good(f, NAMES("layers.0.w", "layers.1.w", "k.w", "head.w", "x.w"), &(fc_model_info){rules, 2, 0, 0, 0, 0});
    f->targets.root = *fc_wrap_file_root(file);
    assert_int_equal(fc_wrap_custom(&f->targets, fc_wrap_file_fn, file, &f->err), FC_OK);
    assert_units(f, "layers.0=layers.0.w;k=k.w;head=head.w;=layers.1.w,x.w");
    assert_int_equal(f->targets.options[module(f, "k")].strategy, FC_NO_SHARD);
    const fc_unit_options *head = &f->targets.options[module(f, "head")];
    assert_true(head->use_orig_params && head->mixed_precision);
    assert_int_equal(head->reduce_dtype, FC_F16);
    assert_int_equal(head->buffer_dtype, FC_OPAQUE);
    assert_int_equal(head->prefetch, FC_BACKWARD_PREFETCH_NONE);
    assert_string_equal(fc_wrap_file_fp32_classes(file)[0], "N");
    assert_int_equal(fc_wrap_file_idle(file, &idle), 1);
    assert_string_equal(idle, "idle");
}

static void wrong_files_are_refused(void **state) {
    fixture *f = *state;
    static const struct {
        const char *text, *message;
        bool info;
    } cases[] = {
        {"{\"a\": 1}", "\"a\" must be true, false or an object", false},
        {"{\"a\": {\"x\": 1}}", "unknown option \"x\"", false},
        {"{\"a\": {\"sharding_strategy\": \"FULL\"}}", "must be FULL_SHARD", false},
        {"{\"a\": {\"mixed_precision\": true}}", "must be null or an object", false},
        {"{\"a\": {\"mixed_precision\": {\"dtype\": null}}}", "an object of param_dtype, reduce_dtype, buffer_dtype",
         false},
        {"{\"a\": {\"mixed_precision\": {\"param_dtype\": \"int8\"}}}", "a floating-point type", false},
        {"{\"a\": {\"cpu_offload\": 1}}", "true or false", false},
        {"{\"a\": {\"backward_prefetch\": \"PRE\"}}", "BACKWARD_PRE", false},
        {"{\"$rot\": {}}", "unknown member \"$rot\"", false},
        {"{\"$fp32_classes\": [1]}", "array of classes", false},
        {"{\"$fp32_classes\": []}", "needs \"mixed_precision\" in \"$root\"", false},
        {"[]", "a wrap policy must be an object such as {", false},
        {"{", ":1:1: not a wrap policy", false},
        {"{\"a\": 1}", "\"a\" must be a string or an array of strings", true},
        {"{\"$frozen\": {}}", "\"$frozen\" must be", true},
        {"{\"$shared\": [\"a\"]}", "\"$shared\" must be an array of groups", true},
        {"{\"$shared\": [[\"a\"]]}", "\"$shared\" must be an array of groups", true},
        {"{\"$shared\": {}}", "\"$shared\" must be an array of groups", true},
        {"{\"$fozen\": []}", "unknown member \"$fozen\"", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fc_wrap_file *file;
        const fc_model_info *info;
        write_file(cases[i].text);
        fc_code rc = cases[i].info ? fc_model_info_load(path, f->arena, &info, &f->err)
                                   : fc_wrap_file_load(path, f->arena, &file, &f->err);
        assert_int_equal(rc, FC_EUSAGE);
        if (!strstr(f->err.message, cases[i].message)) {
            fail_msg("%s: %s", cases[i].text, f->err.message);
        }
    }
    const fc_model_info *info;
    assert_int_equal(fc_model_info_load("/nonexistent/x", f->arena, &info, &f->err), FC_EUSAGE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(names_make_a_tree, setup, teardown),
        cmocka_unit_test_setup_teardown(an_empty_tree_has_a_root, setup, teardown),
        cmocka_unit_test_setup_teardown(names_without_a_tree, setup, teardown),
        cmocka_unit_test_setup_teardown(blocks_are_the_outermost_numbered, setup, teardown),
        cmocka_unit_test_setup_teardown(classes_by_the_most_specific_rule, setup, teardown),
        cmocka_unit_test_setup_teardown(outer_units_keep_the_rest, setup, teardown),
        cmocka_unit_test_setup_teardown(custom_options_over_the_roots, setup, teardown),
        cmocka_unit_test_setup_teardown(sizes_are_counted_before, setup, teardown),
        cmocka_unit_test_setup_teardown(overridden_classes_are_named_once, setup, teardown),
        cmocka_unit_test_setup_teardown(units_are_frozen_or_not, setup, teardown),
        cmocka_unit_test_setup_teardown(shared_parameters_have_one_unit, setup, teardown),
        cmocka_unit_test_setup_teardown(units_are_flat_parameters, setup, teardown),
        cmocka_unit_test_setup_teardown(shared_modules, setup, teardown),
        cmocka_unit_test_setup_teardown(policy_files_are_read, make_file, remove_file),
        cmocka_unit_test_setup_teardown(wrong_files_are_refused, make_file, remove_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
