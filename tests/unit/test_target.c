/*
 * lib/plan/target.c: which values are selected, how they are renamed, and what each rank's file contains.
 */
#include "fsdpckpt/select.h"
#include "plan/target_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const fc_path_element path_q[] = {{.key = "model"}, {.key = "layers.0.q_proj.weight"}};
static const fc_path_element path_norm[] = {{.key = "model"}, {.key = "norm.weight"}};
static const fc_path_element path_list[] = {{.key = "lists"}, {.key = "1", .is_index = true}, {.key = "step"}};
static const fc_path_element path_lr[] = {{.key = "optim"}, {.key = "lr"}};
static const int64_t shape_q[] = {8, 4}, shape_norm[] = {5}, shape_lr[] = {100};
static const fc_object object_lr = {.encoding = "torch.save"};

static const fc_tensor tensors[] = {
    {.name = "model.layers.0.q_proj.weight", .path = {path_q, 2}, .dtype = FC_F32, .ndim = 2, .shape = shape_q},
    {.name = "model.norm.weight", .path = {path_norm, 2}, .dtype = FC_F64, .ndim = 1, .shape = shape_norm},
    {.name = "lists.1.step", .path = {path_list, 3}, .dtype = FC_I64, .ndim = 0, .shape = NULL},
    {.name = "optim.lr", .path = {path_lr, 2}, .dtype = FC_OPAQUE, .ndim = 1, .shape = shape_lr, .object = &object_lr},
};
static const fc_checkpoint source = {.path = "ckpt", .tensors = tensors, .ntensors = 4};

typedef struct fixture {
    fc_arena *arena;
    fc_target target;
    fc_selected counts;
    fc_error err;
} fixture;

static int setup(void **state) {
    static fixture f;
    memset(&f, 0, sizeof f);
    f.arena = fc_arena_new();
    *state = &f;
    return f.arena ? 0 : -1;
}

static int teardown(void **state) {
    fc_arena_free(((fixture *)*state)->arena);
    return 0;
}

static fc_code make(fixture *f, fc_selection selection) {
    return fc_target_new(&source, &selection, f->arena, &f->target, &f->counts, &f->err);
}

static void everything_by_default(void **state) {
    fixture *f = *state;
    assert_int_equal(make(f, (fc_selection){0}), FC_OK);
    assert_int_equal(f->target.ntensors, 4);
    assert_int_equal(f->counts.tensors, 3);
    assert_int_equal(f->counts.objects, 1);
    fc_target_file file;
    assert_int_equal(fc_target_file_of(&f->target, 0, f->arena, &file, &f->err), FC_OK);
    assert_int_equal(file.nitems, 4);
    uint64_t bytes[] = {8 * 4 * 4, 5 * 8, 8, 100};
    for (size_t i = 0; i < 4; i++) {
        assert_true(file.items[i].owned);
        assert_int_equal(fc_target_item_bytes(&f->target, &file.items[i]), bytes[i]);
    }
}

static void globs_select(void **state) {
    fixture *f = *state;
    const char *include[] = {"model.*", "optim.*", NULL}, *exclude[] = {"*norm*", NULL}, *none[] = {"modle.*", NULL};
    assert_int_equal(make(f, (fc_selection){.include = include, .exclude = exclude}), FC_OK);
    assert_int_equal(f->target.ntensors, 2);
    assert_int_equal(f->counts.left_out, 2);
    assert_string_equal(f->target.tensors[0].name, "model.layers.0.q_proj.weight");
    assert_string_equal(f->target.tensors[1].name, "optim.lr");
    assert_int_equal(make(f, (fc_selection){.include = none}), FC_EUSAGE);
    assert_string_equal(f->err.message,
                        "ckpt: the glob 'modle.*' to include matches none of the 4 names; the nearest is "
                        "'model.layers.0.q_proj.weight'");
    const char *all[] = {"*", NULL};
    assert_int_equal(make(f, (fc_selection){.exclude = all}), FC_EUSAGE);
    assert_string_equal(f->err.message, "ckpt: nothing is selected: all 4 names are excluded");
}

static void prefix_is_stripped_from_name_and_path(void **state) {
    fixture *f = *state;
    assert_int_equal(make(f, (fc_selection){.strip_prefix = "model."}), FC_OK);
    const fc_target_tensor *t = f->target.tensors;
    assert_string_equal(t[0].name, "layers.0.q_proj.weight");
    assert_int_equal(t[0].path.count, 1);
    assert_string_equal(t[0].path.elements[0].key, "layers.0.q_proj.weight");
    assert_string_equal(t[2].name, "lists.1.step");
    assert_int_equal(t[2].path.count, 3);

    assert_int_equal(make(f, (fc_selection){.strip_prefix = "model.layers."}), FC_OK);
    assert_string_equal(f->target.tensors[0].path.elements[0].key, "0.q_proj.weight");
    assert_string_equal(f->target.tensors[1].name, "model.norm.weight");
    assert_int_equal(make(f, (fc_selection){.strip_prefix = "lists.1."}), FC_OK);
    assert_int_equal(f->target.tensors[2].path.count, 1);
    assert_string_equal(f->target.tensors[2].path.elements[0].key, "step");

    assert_int_equal(make(f, (fc_selection){.strip_prefix = "module."}), FC_EUSAGE);
    assert_string_equal(f->err.message,
                        "ckpt: no name has the prefix 'module.' to strip; one is 'model.layers.0.q_proj.weight'");
    assert_int_equal(make(f, (fc_selection){.strip_prefix = "optim.lr"}), FC_EUSAGE);
    assert_string_equal(f->err.message, "the name 'optim.lr' would be empty without the prefix 'optim.lr'");
}

static void equal_names_are_refused(void **state) {
    fixture *f = *state;
    const fc_path_element a[] = {{.key = "w"}}, b[] = {{.key = "m.w"}};
    const fc_tensor two[] = {{.name = "w", .path = {a, 1}, .dtype = FC_F32, .ndim = 1, .shape = shape_norm},
                             {.name = "m.w", .path = {b, 1}, .dtype = FC_F32, .ndim = 1, .shape = shape_norm}};
    const fc_checkpoint tiny = {.path = "ckpt", .tensors = two, .ntensors = 2};
    fc_selection selection = {.strip_prefix = "m."};
    assert_int_equal(fc_target_new(&tiny, &selection, f->arena, &f->target, &f->counts, &f->err), FC_EUSAGE);
    assert_string_equal(f->err.message, "'w' and 'm.w' would both be renamed to 'w'");
}

static void only_floating_point_is_cast(void **state) {
    fixture *f = *state;
    assert_int_equal(make(f, (fc_selection){.cast = true, .dtype = FC_BF16}), FC_OK);
    fc_dtype expected[] = {FC_BF16, FC_BF16, FC_I64, FC_OPAQUE};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(f->target.tensors[i].dtype, expected[i]);
    }
}

/* Every element of every tensor is owned by exactly one rank, and all ranks but the owner see it as a copy. */
static void ranks_own_each_box_once(void **state) {
    fixture *f = *state;
    fc_mesh mesh;
    const fc_tp_plan *plan;
    fc_layout_spec spec = {2, 2, 2};
    assert_int_equal(fc_layout_mesh(&spec, &mesh, &f->err), FC_OK);
    assert_int_equal(fc_tp_plan_load("auto", f->arena, &plan, &f->err), FC_OK);
    assert_int_equal(make(f, (fc_selection){.mesh = &mesh, .tp_plan = plan}), FC_OK);
    assert_int_equal(f->counts.tp_sharded, 1);
    int owned_elements[4] = {0}, seen[4] = {0};
    for (uint32_t rank = 0; rank < 8; rank++) {
        fc_target_file file;
        assert_int_equal(fc_target_file_of(&f->target, rank, f->arena, &file, &f->err), FC_OK);
        assert_int_equal(file.nitems, rank == 0 ? 4 : 3);
        for (size_t i = 0; i < file.nitems; i++) {
            const fc_target_item *item = &file.items[i];
            const fc_target_tensor *t = &f->target.tensors[item->tensor];
            int elements = (int)(fc_target_item_bytes(&f->target, item) / fc_dtype_size(t->dtype));
            assert_int_equal(item->owned, item->owner == rank);
            owned_elements[item->tensor] += item->owned ? elements : 0;
            seen[item->tensor] += elements;
        }
    }
    assert_int_equal(owned_elements[0], 32);
    assert_int_equal(owned_elements[1], 5);
    assert_int_equal(owned_elements[2], 1);
    assert_int_equal(owned_elements[3], 100);
    assert_int_equal(seen[0], 2 * 32);
    assert_int_equal(seen[1], 4 * 5);
    assert_int_equal(seen[2], 8);
    assert_int_equal(seen[3], 100);
}

/* Compares the loads, and each single target item, with every rank's target file. */
static void loads_are_those_of_the_files(void **state) {
    fixture *f = *state;
    const fc_tp_plan *plan;
    uint64_t loads[24];
    assert_int_equal(fc_tp_plan_load(NULL, f->arena, &plan, &f->err), FC_OK);
    for (int i = 0; i < 64; i++) {
        fc_mesh mesh;
        fc_layout_spec spec = {i & 3, 1 + (i >> 2 & 3), i >> 4};
        fc_selection selection = {.mesh = &mesh, .tp_plan = i & 1 ? plan : NULL};
        if (spec.replicas * spec.dp * (spec.tp ? spec.tp : 1) > 24 || (spec.tp > 1 && !selection.tp_plan)) {
            continue;
        }
        assert_int_equal(fc_layout_mesh(&spec, &mesh, &f->err), FC_OK);
        assert_int_equal(make(f, selection), FC_OK);
        assert_int_equal(fc_target_loads(&f->target, loads, &f->err), FC_OK);
        uint64_t stored = 0, boxes = 0;
        for (uint32_t rank = 0; rank < fc_mesh_ranks(&mesh); rank++) {
            fc_target_file file;
            uint64_t bytes = 0;
            assert_int_equal(fc_target_file_of(&f->target, rank, f->arena, &file, &f->err), FC_OK);
            for (size_t k = 0; k < file.nitems; k++) {
                int64_t dims[2 * FC_MAX_DIMS];
                fc_target_item item;
                int ndim = f->target.tensors[file.items[k].tensor].source->ndim;
                assert_int_equal(fc_target_item_of(&f->target, file.items[k].tensor, rank, dims, &item, &f->err),
                                 FC_OK);
                assert_memory_equal(dims, file.items[k].dims, 2 * (size_t)ndim * sizeof *dims);
                assert_int_equal(item.owner, file.items[k].owner);
                assert_int_equal(item.owned, file.items[k].owned);
                bytes += item.owned ? fc_target_item_bytes(&f->target, &item) : 0;
                boxes += item.owned && fc_target_item_bytes(&f->target, &item) > 0;
            }
            assert_int_equal(loads[rank], bytes);
            stored += bytes;
        }
        assert_int_equal(stored, 8 * 4 * 4 + 5 * 8 + 8 + 100);
        assert_true(fc_target_boxes(&f->target) >= boxes);
    }
}

static void overflowing_loads_are_refused(void **state) {
    fixture *f = *state;
    const int64_t huge[] = {INT64_MAX / 8};
    fc_tensor many[3];
    for (int i = 0; i < 3; i++) {
        many[i] = (fc_tensor){
            .name = (const char *[]){"a", "b", "c"}[i], .path = {path_q, 1}, .dtype = FC_F64, .ndim = 1, .shape = huge};
    }
    const fc_checkpoint large = {.path = "ckpt", .tensors = many, .ntensors = 3};
    fc_selection selection = {0};
    uint64_t load;
    assert_int_equal(fc_target_new(&large, &selection, f->arena, &f->target, &f->counts, &f->err), FC_OK);
    assert_int_equal(fc_target_loads(&f->target, &load, &f->err), FC_ECORRUPT);
    assert_string_equal(f->err.message, "ckpt: the total size of its tensors exceeds 64 bits");
}

static void plan_that_cuts_nothing_is_refused(void **state) {
    fixture *f = *state;
    fc_mesh mesh;
    const fc_tp_plan *plan;
    const char *include[] = {"*norm*", NULL};
    fc_layout_spec spec = {0, 0, 4};
    assert_int_equal(fc_layout_mesh(&spec, &mesh, &f->err), FC_OK);
    assert_int_equal(fc_tp_plan_load(NULL, f->arena, &plan, &f->err), FC_OK);
    assert_int_equal(make(f, (fc_selection){.mesh = &mesh, .tp_plan = plan, .include = include}), FC_EUSAGE);
    assert_string_equal(f->err.message,
                        "ckpt: the TP plan 'auto' shards none of the 1 tensors over 4 ranks; names are like "
                        "'model.norm.weight'");
    assert_int_equal(f->err.hint, FC_HINT_TP_PLAN);
}

static void rules_that_decide_nothing_are_counted(void **state) {
    fixture *f = *state;
    fc_mesh mesh;
    const fc_tp_plan *plan;
    char path[] = "/tmp/fc-plan-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    dprintf(fd, "{\"layers.*.q_proj\": \"colwise\", \"layers.*.q_porj\": \"colwise\", \"nrom\": \"replicate\"}");
    close(fd);
    fc_layout_spec spec = {0, 0, 2};
    assert_int_equal(fc_layout_mesh(&spec, &mesh, &f->err), FC_OK);
    assert_int_equal(fc_tp_plan_load(path, f->arena, &plan, &f->err), FC_OK);
    unlink(path);
    assert_int_equal(make(f, (fc_selection){.mesh = &mesh, .tp_plan = plan}), FC_OK);
    assert_int_equal(f->counts.tp_sharded, 1);
    assert_int_equal(f->counts.idle_rules, 2);
    assert_string_equal(f->counts.idle_rule, "layers.*.q_porj");
    assert_int_equal(fc_tp_plan_load("auto", f->arena, &plan, &f->err), FC_OK);
    assert_int_equal(make(f, (fc_selection){.mesh = &mesh, .tp_plan = plan}), FC_OK);
    assert_int_equal(f->counts.idle_rules, 0);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(everything_by_default),
        TEST(globs_select),
        TEST(prefix_is_stripped_from_name_and_path),
        TEST(equal_names_are_refused),
        TEST(only_floating_point_is_cast),
        TEST(ranks_own_each_box_once),
        TEST(loads_are_those_of_the_files),
        TEST(overflowing_loads_are_refused),
        TEST(plan_that_cuts_nothing_is_refused),
        TEST(rules_that_decide_nothing_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
