/*
 * train: what units refuse, casts of inputs and outputs, buffers, and what clipping refuses.
 */
#include "fsdp_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "on_ranks.h"

static fc_code load_ones(void *context, const fc_parameter *parameter, fc_fsdp_tensor *out, fc_error *err) {
    fc_comm *comm = context;
    return fc_array_new(comm->device, parameter->dtype, parameter->ndim, parameter->shape, &out->local, err);
}

/* Units whose communicators do not fit. */
static void wrong_groups(fc_comm *comm) {
    fc_fsdp *fsdp;
    fc_fsdp_unit *unit;
    fc_device *other;
    fc_comm strange = *comm;
    fc_error err = {FC_OK, ""};
    fc_fsdp_options options = {0};
    MUST(fc_fsdp_new(comm, comm, NULL, &options, &fsdp, NULL) == FC_OK);
    MUST(fc_device_cpu(&other, NULL) == FC_OK);
    strange.device = other;
    fc_fsdp_unit_options plain = {.is_root = true}, far = {.is_root = true, .shard = &strange},
                         alone = {.is_root = true, .shard = comm, .strategy = FC_HYBRID_SHARD};
    MUST_FAIL(fc_fsdp_add_unit(fsdp, "x", &plain, &unit, &err), FC_EUSAGE, err, "a communicator of its own");
    MUST_FAIL(fc_fsdp_add_unit(fsdp, "x", &far, &unit, &err), FC_EUSAGE, err, "are on another device");
    MUST_FAIL(fc_fsdp_add_unit(fsdp, "x", &alone, &unit, &err), FC_EUSAGE, err, "needs a communicator over replicas");
    other->destroy(other);
    fc_fsdp_free(fsdp);
}

/* A plan that the instance cannot have. */
static void wrong_plan(fc_comm *comm) {
    fc_fsdp *fsdp;
    fc_fsdp_unit *units[2];
    fc_fsdp_handle *handles[2];
    fc_error err = {FC_OK, ""};
    fc_parameter_spec specs[] = {{.fqn = "a.w", .dtype = FC_F32, .ndim = 1, .shape = (int64_t[]){5}}};
    fc_module_tree tree;
    fc_wrap_targets targets;
    fc_units planned;
    fc_unit_options root = {.use_orig_params = true};
    fc_fsdp_options options = {0};
    fc_arena *arena = fc_arena_new();
    MUST(arena && fc_fsdp_new(comm, NULL, NULL, &options, &fsdp, NULL) == FC_OK);
    MUST(fc_module_tree_new(specs, 1, NULL, arena, &tree, NULL) == FC_OK);
    MUST(fc_wrap_targets_new(&tree, &root, arena, &targets, NULL) == FC_OK);
    MUST(fc_wrap_units(&targets, arena, &planned, NULL) == FC_OK);
    fc_fsdp_plan plan = {.tree = &tree, .units = &planned, .load = load_ones, .context = comm};
    MUST_FAIL(fc_fsdp_add_planned(fsdp, &plan, units, handles, &err), FC_EUSAGE, err,
              "unit '(root)': expects one homogeneous value for use_orig_params");
    fc_fsdp_free(fsdp);
    fc_arena_free(arena);
}

static void refused_units(void **state) {
    (void)state;
    on_ranks(2, wrong_groups);
    on_ranks(2, wrong_plan);
}

/* Floating-point inputs are cast to the param dtype, integers are not, and a transposed input keeps its values. */
static void inputs(fc_comm *comm) {
    fsdp_model m;
    fc_fsdp_options options = {0};
    fc_fsdp_unit_options unit = {.has_param_dtype = true, .param_dtype = FC_BF16};
    fc_array in[2];
    MUST(model_open(&m, comm, NULL, comm->rank, options, unit, NULL) == FC_OK);
    MUST(fc_array_new(comm->device, FC_F32, 2, (int64_t[]){3, 2}, &in[0], NULL) == FC_OK);
    MUST(fc_array_new(comm->device, FC_I64, 1, (int64_t[]){2}, &in[1], NULL) == FC_OK);
    fc_array before[2] = {in[0], in[1]};
    for (int i = 0; i < 6; i++) {
        ((float *)in[0].data)[i] = (float)i;
    }
    in[0].sizes[0] = 2;
    in[0].sizes[1] = 3;
    in[0].strides[0] = 1;
    in[0].strides[1] = 2;
    MUST(fc_fsdp_root_pre_forward(m.fsdp, in, 2, NULL) == FC_OK);
    MUST(in[0].dtype == FC_BF16 && in[0].memory && in[0].memory != before[0].memory);
    MUST(in[1].dtype == FC_I64 && in[1].memory == before[1].memory);
    static const float wanted[] = {0, 2, 4, 1, 3, 5};
    for (int i = 0; i < 6; i++) {
        uint16_t high;
        memcpy(&high, (const char *)&wanted[i] + 2, 2);
        MUST(((const uint16_t *)in[0].data)[i] == high);
    }
    /* An input in the param dtype is not cast again. */
    void *cast = in[0].memory;
    MUST(fc_fsdp_pre_forward(m.units[0], true, in, 2, NULL) == FC_OK && in[0].memory == cast);
    MUST(fc_fsdp_post_forward(m.units[0], NULL) == FC_OK);
    fc_array_free(&in[0]);
    fc_array_free(&before[0]);
    fc_array_free(&before[1]);
    model_close(&m);
}

static void cast_inputs(void **state) {
    (void)state;
    on_ranks(2, inputs);
}

/* A scalar in bf16 and an empty array in f16: outputs get the dtype of the last input that was cast. */
static void cast_and_back(fc_fsdp_unit *unit, fc_array *in) {
    MUST(fc_fsdp_pre_forward(unit, true, in, 2, NULL) == FC_OK);
    MUST(in[0].dtype == FC_F32 && *(float *)in[0].data == 1 && in[1].dtype == FC_F32);
    fc_array out = in[0];
    MUST(fc_fsdp_cast_outputs(unit, &out, 1, NULL) == FC_OK && out.dtype == FC_F16);
    fc_array_free(&out);
    MUST(fc_fsdp_post_forward(unit, NULL) == FC_OK);
}

/* A module in float32 among others. No input is cast in its second forward, so no output is. */
static void norm(fc_comm *comm) {
    fsdp_model m;
    fc_fsdp_options options = {0};
    fc_fsdp_unit_options units[MODEL_UNITS] = {{0}, {.fp32_inputs = true}};
    fc_array in[2];
    MUST(model_open_each(&m, comm, NULL, comm->rank, options, units, NULL) == FC_OK);
    MUST(fc_array_new(comm->device, FC_BF16, 0, NULL, &in[0], NULL) == FC_OK);
    MUST(fc_array_new(comm->device, FC_F16, 1, (int64_t[]){0}, &in[1], NULL) == FC_OK);
    memcpy(in[0].data, &(uint16_t){0x3f80}, 2);
    fc_array before[2] = {in[0], in[1]};
    MUST(fc_fsdp_root_pre_forward(m.fsdp, NULL, 0, NULL) == FC_OK);
    cast_and_back(m.units[1], in);
    MUST(fc_fsdp_pre_forward(m.units[1], true, in, 2, NULL) == FC_OK);
    fc_array out = in[0];
    MUST(fc_fsdp_cast_outputs(m.units[1], &out, 1, NULL) == FC_OK && out.memory == in[0].memory);
    MUST(fc_fsdp_cast_outputs(m.units[2], &out, 1, NULL) == FC_OK && out.memory == in[0].memory);
    for (int i = 0; i < 2; i++) {
        fc_array_free(&in[i]);
        fc_array_free(&before[i]);
    }
    model_close(&m);
}

static void fp32_module(void **state) {
    (void)state;
    on_ranks(2, norm);
}

/* A transposed buffer in bf16, and integers, which are not cast. */
static void kept(fc_comm *comm) {
    fsdp_model m;
    fc_fsdp_options options = {0};
    fc_fsdp_unit_options unit = {.has_buffer_dtype = true, .buffer_dtype = FC_BF16};
    fc_fsdp_buffer *table, *count;
    fc_array values, number, saved;
    MUST(model_open(&m, comm, NULL, comm->rank, options, unit, NULL) == FC_OK);
    MUST(fc_array_new(comm->device, FC_F32, 2, (int64_t[]){2, 3}, &values, NULL) == FC_OK);
    MUST(fc_array_new(comm->device, FC_I64, 0, NULL, &number, NULL) == FC_OK);
    for (int i = 0; i < 6; i++) {
        ((float *)values.data)[i] = (float)i + 0x1p-20f;
    }
    *(int64_t *)number.data = 7;
    values.sizes[0] = 3;
    values.sizes[1] = 2;
    values.strides[0] = 1;
    values.strides[1] = 3;
    MUST(fc_fsdp_add_buffer(m.units[1], "table", &values, &table, NULL) == FC_OK);
    MUST(fc_fsdp_add_buffer(m.units[1], "count", &number, &count, NULL) == FC_OK);
    MUST(table->array.dtype == FC_BF16 && table->dtype == FC_F32 && count->array.dtype == FC_I64);
    MUST(*(int64_t *)count->array.data == 7 && count->array.memory != number.memory);
    MUST(fc_fsdp_saved_buffer(m.fsdp, table, &saved, NULL) == FC_OK && saved.dtype == FC_F32);
    for (int i = 0; i < 6; i++) {
        float wanted = (float)(i / 2 + i % 2 * 3);
        MUST(((float *)saved.data)[i] == (wanted > 0 ? wanted : 0x1p-20f));
    }
    fc_array_free(&saved);
    fc_array_free(&values);
    fc_array_free(&number);
    model_close(&m);
}

static void buffers(void **state) {
    (void)state;
    on_ranks(2, kept);
}

static void clip_nothing(fc_comm *comm) {
    fc_fsdp *empty;
    fc_fsdp_options options = {0};
    fc_error err = {FC_OK, ""};
    double norm;
    MUST(fc_fsdp_new(comm, NULL, NULL, &options, &empty, NULL) == FC_OK);
    MUST_FAIL(fc_fsdp_clip_grad_norm(empty, 1, 2, &norm, &err), FC_EUSAGE, err, "has no units");
    fc_fsdp_free(empty);
}

static void clip(fc_comm *comm) {
    fsdp_model m;
    fc_fsdp_options options = {0};
    fc_fsdp_unit_options unit = {0};
    fc_error err = {FC_OK, ""};
    double norm = -1;
    MUST(model_open(&m, comm, NULL, comm->rank, options, unit, NULL) == FC_OK);
    MUST_FAIL(fc_fsdp_clip_grad_norm(m.fsdp, 1, 0, &norm, &err), FC_EUSAGE, err,
              "a positive number or infinity, not 0");
    MUST_FAIL(fc_fsdp_clip_grad_norm(m.fsdp, 1, (double)NAN, &norm, &err), FC_EUSAGE, err, "a positive number");
    MUST(fc_fsdp_clip_grad_norm(m.fsdp, 1, 2, &norm, NULL) == FC_OK && norm == 0); /* there are no gradients */
    MUST(model_forward(&m, NULL, NULL) == FC_OK && fc_fsdp_pre_backward(m.units[0], NULL) == FC_OK);
    MUST_FAIL(fc_fsdp_clip_grad_norm(m.fsdp, 1, 2, &norm, &err), FC_EUSAGE, err, "expected to be in states [IDLE]");
    MUST(fc_fsdp_post_backward_final(m.fsdp, NULL) == FC_OK);
    MUST(fc_fsdp_memory(m.fsdp, NULL) == 0);
    model_close(&m);
}

static void clipping(void **state) {
    (void)state;
    on_ranks(2, clip_nothing);
    on_ranks(2, clip);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused_units), cmocka_unit_test(cast_inputs), cmocka_unit_test(fp32_module),
        cmocka_unit_test(buffers),       cmocka_unit_test(clipping),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
