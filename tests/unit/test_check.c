/*
 * check: findings when names, shapes and dtypes differ, and none when they do not. Checkpoints are made in memory;
 * docs/CHECK_MESSAGES.md tests the messages with real ones.
 */
#include "fsdpckpt/check.h"
#include "fsdpckpt/digest.h"
#include "fsdpckpt/format.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 4096 };

/* A tensor of one chunk, or an object. `data` stands for its bytes: its digest depends only on that number. */
typedef struct value {
    const char *name;
    fc_dtype dtype;
    int ndim;
    int64_t shape[3];
    uint64_t data; /* 0: no digest is recorded */
} value;

typedef struct made {
    fc_checkpoint checkpoint;
    fc_format format;
    fc_tensor tensors[MOST];
    fc_path_element elements[MOST];
    uint64_t data[MOST];
} made;

static fc_code made_digest(const fc_checkpoint *checkpoint, const fc_tensor *tensor, size_t index, fc_digest *out,
                           fc_error *err) {
    const made *m = checkpoint->state;
    (void)err;
    assert_true(index == FC_WHOLE_TENSOR);
    uint64_t data = m->data[tensor - m->tensors];
    *out = (fc_digest){.kind = data ? FC_DIGEST_CRC64 : FC_DIGEST_NONE, .value = data};
    return FC_OK;
}

static made *make(const char *path, const value *values, size_t count) {
    static const fc_object object = {.encoding = "torch.save"};
    made *m = calloc(1, sizeof *m);
    assert_non_null(m);
    assert_true(count <= MOST);
    m->format = (fc_format){
        .name = "made",
        .layout_only = true,
        .reader = {.digest = made_digest},
    };
    for (size_t i = 0; i < count; i++) {
        m->elements[i] = (fc_path_element){values[i].name, false};
        m->data[i] = values[i].data;
        m->tensors[i] = (fc_tensor){.name = values[i].name,
                                    .path = {&m->elements[i], 1},
                                    .dtype = values[i].dtype,
                                    .ndim = values[i].ndim,
                                    .shape = values[i].shape,
                                    .object = values[i].dtype == FC_OPAQUE ? &object : NULL};
    }
    m->checkpoint =
        (fc_checkpoint){.format = &m->format, .path = path, .tensors = m->tensors, .ntensors = count, .state = m};
    return m;
}

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* Findings as "kind: message" lines. */
typedef struct result {
    char text[8192];
    fc_report report;
    fc_code code;
    fc_error err;
} result;

static result check_with(const value *here, size_t nhere, const value *there, size_t nthere, fc_check_options options) {
    result r = {.text = ""};
    made *a = make("ckpt", here, nhere), *b = make("ref", there, nthere);
    fc_arena *arena = fc_arena_new();
    options.reference = there ? &b->checkpoint : NULL;
    r.code = fc_check(&a->checkpoint, &options, arena, &r.report, &r.err);
    size_t used = 0;
    for (size_t i = 0; r.code == FC_OK && i < r.report.count && used < sizeof r.text; i++) {
        const fc_finding *f = &r.report.findings[i];
        assert_true(f->count >= 1);
        used += (size_t)snprintf(r.text + used, sizeof r.text - used, "%s: %s\n", fc_finding_info_get(f->kind)->id,
                                 f->message);
        assert_null(strchr(f->message, '{'));
    }
    fc_arena_free(arena);
    free(a);
    free(b);
    r.report.findings = NULL;
    return r;
}

#define CHECK(here, there) check_with(here, COUNT(here), there, COUNT(there), (fc_check_options){0})
#define CHECK_ALONE(here) check_with(here, COUNT(here), NULL, 0, (fc_check_options){0})

static void equal_checkpoints_have_no_findings(void **state) {
    (void)state;
    const value a[] = {{"w", FC_F32, 2, {3, 4}, 0}, {"b", FC_BF16, 1, {3}, 0}, {"step", FC_OPAQUE, 1, {10}, 0}};
    const value b[] = {{"step", FC_OPAQUE, 1, {99}, 0}, {"b", FC_BF16, 1, {3}, 0}, {"w", FC_F32, 2, {3, 4}, 0}};
    result r = CHECK(a, b);
    assert_int_equal(r.code, FC_OK);
    assert_string_equal(r.text, "");
    assert_int_equal(r.report.tensors, 2);
    assert_int_equal(r.report.objects, 1);
    assert_int_equal(r.report.errors + r.report.warnings, 0);
}

static void all_findings_are_listed(void **state) {
    (void)state;
    const value a[] = {{"same", FC_F32, 1, {4}, 0},
                       {"shape", FC_F32, 1, {5}, 0},
                       {"dtype", FC_I32, 1, {4}, 0},
                       {"extra.x", FC_F32, 0, {0}, 0},
                       {"kind", FC_OPAQUE, 1, {9}, 0}};
    const value b[] = {{"same", FC_F32, 1, {4}, 0},   {"shape", FC_F32, 1, {7}, 0}, {"dtype", FC_I64, 1, {4}, 0},
                       {"absent", FC_F32, 1, {9}, 0}, {"kind", FC_F32, 0, {0}, 0},  {"lr", FC_OPAQUE, 1, {9}, 0}};
    result r = CHECK(a, b);
    assert_string_equal(r.text,
                        "missing: absent: missing: ref has it as float32[9]\n"
                        "missing-object: lr: missing: ref has it as an object\n"
                        "unexpected: extra.x: unexpected: float32[], not in ref\n"
                        "shape-dimension: shape: shape [5], but [7] in ref: dimension 0 is 2 shorter; padded or "
                        "resized?\n"
                        "not-a-tensor: kind: an object, but a tensor (float32[]) in ref\n"
                        "dtype-other: dtype: int32, but int64 in ref\n");
    assert_int_equal(r.report.errors, 6);
}

static void equal_digests_reveal_renames(void **state) {
    (void)state;
    /*
     * The names have nothing in common, but the bytes do. Tensors of ones that occur twice on both sides are no
     * evidence.
     */
    const value a[] = {{"zz", FC_F32, 1, {4}, 7}, {"n1", FC_F32, 1, {4}, 5}, {"n2", FC_F32, 1, {4}, 5}};
    const value b[] = {{"weight", FC_F32, 1, {4}, 7}, {"gain", FC_F32, 1, {4}, 5}, {"scale", FC_F32, 1, {4}, 5}};
    result r = CHECK(a, b);
    assert_non_null(strstr(r.text, "renamed: zz: renamed: ref has the same float32[4], bit for bit, as weight; convert "
                                   "with rename 's/^zz$/weight/'\n"));
    assert_int_equal(r.report.errors, 5);
    /* Equal bytes with another dtype are a different tensor. */
    const value c[] = {{"zz", FC_F32, 1, {4}, 7}}, d[] = {{"weight", FC_I32, 1, {4}, 7}};
    assert_null(strstr(CHECK(c, d).text, "renamed"));
    /* Tensors that differ in the same component share one finding. It is certain if it is for all of them. */
    const value e[] = {{"h.0.w", FC_F32, 1, {4}, 1}, {"h.1.w", FC_F32, 1, {4}, 2}};
    const value f[] = {{"layers.0.w", FC_F32, 1, {4}, 1}, {"layers.1.w", FC_F32, 1, {4}, 2}};
    assert_string_equal(CHECK(e, f).text,
                        "renamed-component: 2 names differ in one component: 'h' here is 'layers' in ref, e.g. "
                        "h.0.w is layers.0.w, bit for bit; convert with rename "
                        "'s/^h\\./layers./'\n");
}

static void numbers_in_names_must_match(void **state) {
    (void)state;
    const value a[] = {{"blocks.1.w", FC_F32, 1, {4}, 0}, {"blocks.2.w", FC_F32, 1, {4}, 0}};
    const value b[] = {{"layers.2.w", FC_F32, 1, {4}, 0}, {"layers.3.w", FC_F32, 1, {4}, 0}};
    result r = CHECK(a, b);
    assert_non_null(strstr(r.text, "missing: layers.3.w"));
    assert_non_null(strstr(r.text, "unexpected: blocks.1.w"));
    assert_non_null(strstr(r.text, "blocks.2.w: possibly renamed: it is not in ref, and layers.2.w"));
}

static void a_missing_prefix_is_one_finding(void **state) {
    (void)state;
    const value plain[] = {{"a.w", FC_F32, 1, {4}, 0}, {"b.w", FC_F32, 1, {5}, 0}, {"c.w", FC_F32, 1, {6}, 0}};
    const value wrapped[] = {
        {"module.a.w", FC_F32, 1, {4}, 0}, {"module.b.w", FC_F32, 1, {50}, 0}, {"module.c.w", FC_F16, 1, {6}, 0}};
    result r = CHECK(wrapped, plain);
    /* The names share one finding; shapes and dtypes of the pairs are still compared. */
    assert_string_equal(r.text,
                        "prefix-extra: 3 names have the prefix 'module.' (DistributedDataParallel), e.g. module.a.w; "
                        "ref has no such prefix; convert with strip_prefix module.\n"
                        "shape-dimension: module.b.w: shape [50], but [5] in ref: dimension 0 is 45 longer; padded or "
                        "resized?\n"
                        "dtype: module.c.w: float16, but float32 in ref; convert with dtype f32\n");
    r = CHECK(plain, wrapped);
    assert_non_null(strstr(r.text, "prefix-lacking: 3 names lack the prefix 'module.'"));
    assert_non_null(strstr(r.text, "convert with rename 's/^/module./'"));
    /* One name with the same end is no evidence of a prefix. */
    const value one[] = {{"x.w", FC_F32, 1, {4}, 0}}, other[] = {{"w", FC_F32, 1, {9}, 0}};
    assert_null(strstr(CHECK(one, other).text, "prefix"));
}

static void strip_prefix_and_globs(void **state) {
    (void)state;
    const value a[] = {{"m.w", FC_F32, 1, {4}, 0}, {"optim.x", FC_F32, 1, {4}, 0}};
    const value b[] = {{"w", FC_F32, 1, {4}, 0}, {"optim.y", FC_F32, 1, {9}, 0}};
    const char *exclude[] = {"optim.*", NULL};
    fc_selection s = {.exclude = exclude, .strip_prefix = "m."};
    fc_check_options o = {.selection = &s};
    assert_string_equal(check_with(a, 2, b, 2, o).text, "");
    s.strip_prefix = "nothing.";
    assert_int_equal(check_with(a, 2, b, 2, o).code, FC_EUSAGE);
    const value clash[] = {{"m.w", FC_F32, 1, {4}, 0}, {"w", FC_F32, 1, {4}, 0}};
    s.strip_prefix = "m.";
    result r = check_with(clash, 2, b, 2, o);
    assert_int_equal(r.code, FC_EUSAGE);
    assert_non_null(strstr(r.err.message, "would both be renamed to 'w'"));
}

static void allowed_names_are_not_reported(void **state) {
    (void)state;
    const value a[] = {{"w", FC_F32, 1, {4}, 0}, {"new.x", FC_F32, 1, {3}, 0}};
    const value b[] = {{"w", FC_F32, 1, {4}, 0}, {"old.y", FC_F32, 1, {9}, 0}, {"old.z", FC_F32, 1, {9}, 0}};
    const char *missing[] = {"old.?", "never", NULL}, *unexpected[] = {"new.*", NULL};
    fc_check_options o = {.allow_missing = missing, .allow_unexpected = unexpected};
    result r = check_with(a, 2, b, 3, o);
    assert_string_equal(r.text, "idle-allow-missing: allow_missing 'never' matches no missing name; remove it\n");
    assert_int_equal(r.report.errors, 0);
    assert_int_equal(r.report.allowed, 3);
}

static void hostile_names_are_quoted(void **state) {
    (void)state;
    /* Braces in names are not expanded, and shell quoting survives. */
    const value a[] = {{"{name}{option}", FC_F32, 1, {4}, 0}, {"it's", FC_F32, 1, {5}, 0}};
    const value b[] = {{"w", FC_F64, 1, {40}, 0}, {"it's.", FC_F32, 1, {5}, 0}};
    made *m = make("ckpt", a, 2), *n = make("ref", b, 2);
    fc_arena *arena = fc_arena_new();
    fc_report report;
    static const char *const names[FC_SETTING_COUNT] = {[FC_SETTING_RENAME] = "--rename"};
    fc_check_options o = {.reference = &n->checkpoint, .setting_names = names};
    assert_int_equal(fc_check(&m->checkpoint, &o, arena, &report, NULL), FC_OK);
    bool seen = false;
    for (size_t i = 0; i < report.count; i++) {
        seen |= strcmp(report.findings[i].message, "{name}{option}: unexpected: float32[4], not in ref") == 0;
        if (report.findings[i].option) {
            assert_int_equal(report.findings[i].fix.setting, FC_SETTING_RENAME);
            assert_string_equal(report.findings[i].fix.values[0], "s/^it's$/it's./");
            assert_string_equal(report.findings[i].option, "--rename 's/^it'\\''s$/it'\\''s./'");
        }
    }
    assert_true(seen);
    fc_arena_free(arena);
    free(m);
    free(n);
}

static void optimizer_state_must_fit_its_parameter(void **state) {
    (void)state;
    const value a[] = {{"model.w", FC_F32, 1, {4}, 0},
                       {"model.v", FC_F32, 1, {4}, 0},
                       {"optim.state.w.exp_avg", FC_F32, 1, {4}, 0},
                       {"optim.state.w.step", FC_F32, 0, {0}, 0},
                       {"optim.state.v.exp_avg", FC_F32, 1, {2}, 0},
                       {"optim.state.v.step", FC_F32, 0, {0}, 0},
                       {"optim.state.gone.exp_avg", FC_F32, 1, {4}, 0}};
    assert_string_equal(
        CHECK_ALONE(a).text,
        "state-shape: optim.state.v.exp_avg: float32[2], but its parameter model.v is float32[4]: the optimizer cannot "
        "use it\n"
        "state-orphan: optim.state.gone.exp_avg: optimizer state (exp_avg) of gone, which is missing: the parameter "
        "is lost or has another name; to drop the state, exclude it with exclude "
        "'optim.state.gone.*'\n");
    /* An optimizer on its own, numbered state, and a model that calls a module "state" give no findings. */
    const value alone[] = {{"optim.state.w.exp_avg", FC_F32, 1, {4}, 0}};
    assert_string_equal(CHECK_ALONE(alone).text, "");
    const value numbered[] = {{"w", FC_F32, 1, {4}, 0}, {"optim.state.0.exp_avg", FC_F32, 1, {9}, 0}};
    assert_string_equal(CHECK_ALONE(numbered).text, "");
    const value named[] = {{"ssm.state.w", FC_F32, 1, {4}, 0}, {"ssm.state.x.exp_avg", FC_F32, 1, {9}, 0}};
    assert_string_equal(CHECK_ALONE(named).text, "");
    /* Adafactor's rows and columns have other shapes than their parameter. */
    const value rows[] = {{"w", FC_F32, 2, {4, 6}, 0}, {"optim.state.w.exp_avg_sq_row", FC_F32, 1, {4}, 0}};
    assert_string_equal(CHECK_ALONE(rows).text, "");
    /* The model is wrapped, but the optimizer's names are not. */
    const value compiled[] = {{"_orig_mod.w", FC_F32, 1, {4}, 0}, {"optim.state.w.exp_avg", FC_F32, 1, {4}, 0}};
    assert_null(strstr(CHECK_ALONE(compiled).text, "state-"));
}

static void uneven_meshes_are_reported(void **state) {
    (void)state;
    const value a[] = {{"l.0.w", FC_F32, 2, {9, 8}, 0}, {"l.1.w", FC_F32, 2, {9, 8}, 0}, {"scalar", FC_F32, 0, {0}, 0},
                       {"empty", FC_F32, 1, {0}, 0},    {"even", FC_F32, 1, {8}, 0},     {"o", FC_OPAQUE, 1, {3}, 0}};
    fc_mesh mesh;
    fc_layout_spec spec = {.dp = 4, .replicas = 3};
    assert_int_equal(fc_layout_mesh(&spec, &mesh, NULL), FC_OK);
    fc_check_options o = {.mesh = &mesh};
    assert_string_equal(
        check_with(a, COUNT(a), NULL, 0, o).text,
        "uneven: l.0.w and 1 more: float32[9, 8]: dimension 0 does not divide evenly by dp 4: 3 ranks get 3, 1 "
        "gets nothing\n");
    /* Optimizer state is sharded like its parameter, so it is reported only when there are no parameters. */
    const value b[] = {{"w", FC_F32, 1, {9}, 0}, {"optim.state.w.exp_avg", FC_F32, 1, {9}, 0}};
    assert_string_equal(
        check_with(b, 2, NULL, 0, o).text,
        "uneven: w: float32[9]: dimension 0 does not divide evenly by dp 4: 3 ranks get 3, 1 gets nothing\n");
    assert_non_null(strstr(check_with(b + 1, 1, NULL, 0, o).text, "uneven: optim.state.w.exp_avg: "));
    spec = (fc_layout_spec){.dp = 1};
    assert_int_equal(fc_layout_mesh(&spec, &mesh, NULL), FC_OK);
    assert_string_equal(check_with(a, COUNT(a), NULL, 0, o).text, "");
}

/* Many names without partners take linear time. */
static void many_names(void **state) {
    (void)state;
    static char names[2][MOST][32];
    static value values[2][MOST];
    for (int side = 0; side < 2; side++) {
        for (int i = 0; i < MOST; i++) {
            snprintf(names[side][i], sizeof names[side][i], "%s.%d.w", side ? "layers" : "blocks", i);
            values[side][i] = (value){names[side][i], FC_F32, 1, {8}, 0};
        }
    }
    result r = check_with(values[0], MOST, values[1], MOST, (fc_check_options){0});
    assert_int_equal(r.report.count, 1);
    assert_non_null(strstr(r.text, "4096 names differ in one component: 'blocks' here is 'layers'"));
}

/* Every row of the table has a unique id and a text. */
static void table_is_complete(void **state) {
    (void)state;
    for (int i = 0; i < FC_FOUND_KINDS; i++) {
        const fc_finding_info *info = fc_finding_info_get((fc_finding_kind)i);
        assert_non_null(info->id);
        assert_true(strlen(info->text) > 0);
        for (int j = 0; j < i; j++) {
            assert_string_not_equal(info->id, fc_finding_info_get((fc_finding_kind)j)->id);
        }
    }
    assert_string_equal(fc_finding_info_get((fc_finding_kind)-1)->id, "unknown");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_checkpoints_have_no_findings),
        cmocka_unit_test(all_findings_are_listed),
        cmocka_unit_test(equal_digests_reveal_renames),
        cmocka_unit_test(numbers_in_names_must_match),
        cmocka_unit_test(a_missing_prefix_is_one_finding),
        cmocka_unit_test(strip_prefix_and_globs),
        cmocka_unit_test(allowed_names_are_not_reported),
        cmocka_unit_test(hostile_names_are_quoted),
        cmocka_unit_test(optimizer_state_must_fit_its_parameter),
        cmocka_unit_test(uneven_meshes_are_reported),
        cmocka_unit_test(many_names),
        cmocka_unit_test(table_is_complete),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
