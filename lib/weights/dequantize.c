/*
 * Dequantizes: finds codes and scales, and adds the weights that are computed from them.
 */
#include "base/checked.h"
#include "derived/derived.h"
#include "fsdpckpt/format.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/try.h"
#include "fsdpckpt/weights.h"
#include "io/json_file.h"
#include "plan/quantized_values.h"
#include "weights/dequantizer.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- which tensors ---- */

/* What belongs to codes besides their scales, after the beginning that both names share. */
static const char *const companions[] = {"_zero_point", "_shape", "_g_idx", "_global_scale", "_scale_2",
                                         /* of torchao, for activations */
                                         "_act_quant_scale", "_act_quant_zero_point",
                                         /* of bitsandbytes */
                                         ".quant_map", ".nested_absmax", ".nested_quant_map",
                                         ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4",
                                         ".weight_format",
                                         /* of GPTQ and AWQ */
                                         ".qzeros", ".g_idx"};
/* Scales of activations, after the name of the module. */
static const char *const activations[] = {".input_scale",        ".output_scale",     ".input_scale_ub",
                                          ".activation_scale",   ".input_zero_point", ".output_zero_point",
                                          ".input_global_scale", ".k_scale",          ".v_scale"};
/* What the inputs of a module are multiplied with before its weight. */
static const char *const smoothing[] = {".pre_quant_scale", ".smooth_scale", "_act_pre_scale"};

/* Finds the part of the configuration about quantization. */
static const json_t *part_of_config(const json_t *root) {
    static const char *const members[] = {"quantization_config", "compression_config"};
    const json_t *const places[] = {root, json_object_get(root, "text_config")};
    for (size_t i = 0; i < 4; i++) {
        const json_t *part = json_object_get(places[i % 2], members[i / 2]);
        const json_t *inner = json_object_get(part, members[0]); /* compression_config of old versions has one inside */
        if (json_object_size(part) > 0) {
            return inner ? inner : part;
        }
    }
    return json_is_integer(json_object_get(root, "bits")) ? root
                                                          : NULL; /* quantize_config.json of GPTQ is such a part */
}

/* The size of blocks, if the model's configuration has it: {"quantization_config": {"weight_block_size": [128, 128]}},
 * or as compressed-tensors writes it, in a group. */
static const json_t *block_sizes(const json_t *config) {
    const json_t *sizes = json_object_get(config, "weight_block_size");
    json_t *groups = json_object_get(config, "config_groups"), *group;
    const char *key;
    json_object_foreach(groups, key, group) {
        const json_t *more = json_object_get(json_object_get(group, "weights"), "block_structure");
        sizes = sizes ? sizes : json_array_size(more) == 2 ? more : NULL;
    }
    return sizes;
}

static fc_code read_config(fc_dequantizer *f, const char *path) {
    FC_TRY(fc_json_load_config(path, f->scratch, &path, &f->root, f->err));
    FC_TRY(fc_derived_add_header(f->out, path, f->err));
    f->config = part_of_config(f->root);
    const json_t *sizes = block_sizes(f->config);
    for (size_t i = 0; json_array_size(sizes) == 2 && i < 2; i++) {
        f->blocks[i] = (int64_t)json_integer_value(json_array_get(sizes, i));
    }
    return FC_OK;
}

/* Finds the value called `name` without `less` bytes at its end, but with `more`. */
static size_t find_near(const fc_dequantizer *f, const char *name, size_t less, const char *more) {
    const char *near = fc_arena_printf(f->scratch, "%.*s%s", (int)(strlen(name) - less), name, more);
    return near ? fc_name_table_find(f->names, near, strlen(near)) : FC_NO_NAME;
}

const fc_tensor *fc_dequantizer_near(const fc_dequantizer *f, const char *name, size_t less, const char *more) {
    const size_t at = find_near(f, name, less, more);
    return at == FC_NO_NAME ? NULL : &f->source->tensors[at];
}

fc_code fc_dequantizer_refuse(const fc_dequantizer *f, const fc_tensor *codes, const char *format, ...) {
    char why[512];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    return fc_fail(f->err, FC_EUNSUPPORTED, "%s: tensor %.256s holds quantized codes: %s", f->source->path, codes->name,
                   why);
}

/* Codes that have more than scales which this layout does not have. */
static fc_code check_more(const fc_dequantizer *f, const fc_tensor *codes, size_t end) {
    static const char *const others[] = {"_global_scale", "_scale_2"};
    const size_t count = codes->dtype == FC_U8 ? 1 : 2; /* pairs of four-bit floats have it in ModelOpt */
    for (size_t i = 0; end == 0 && i < count; i++) {
        const fc_tensor *more = fc_dequantizer_near(f, codes->name, 0, others[i]);
        if (more) {
            return fc_fail(f->err, FC_EUNSUPPORTED,
                           "%s: tensor %.256s has %.256s besides its scales, which cannot be dequantized",
                           f->source->path, codes->name, more->name);
        }
    }
    return FC_OK;
}

/* The weight alone is not what the module multiplies with. @param less the length of the end of the name. */
static fc_code check_smoothing(const fc_dequantizer *f, const fc_tensor *codes, size_t less) {
    for (size_t i = 0; i < sizeof smoothing / sizeof *smoothing; i++) {
        const fc_tensor *t = fc_dequantizer_near(f, codes->name, less, smoothing[i]);
        if (t) {
            return fc_dequantizer_refuse(f, codes,
                                         "%.256s multiplies the inputs of the module, and a model that is not "
                                         "quantized does not have it",
                                         t->name);
        }
    }
    return FC_OK;
}

static fc_code refuse_codes(const fc_dequantizer *f, const fc_tensor *codes, const fc_quantizer *q) {
    return fc_fail(f->err, FC_EUNSUPPORTED,
                   "%s: tensor %.256s holds codes of type %s as %s stores them, which cannot be "
                   "dequantized",
                   f->source->path, codes->name, fc_dtype_get(codes->dtype)->torch_name, q->by);
}

/* Whether the name of the weight is that of the codes without the end. */
static bool is_renamed(const fc_quantizer *q) {
    return q->kind == FC_CODES_SCALED && *q->codes && strcmp(q->codes, ".weight") != 0;
}

static bool is_of_torchao(const fc_quantizer *q) {
    return strcmp(q->codes, "_qdata") == 0;
}

/* Drops the values called `name` without `less` bytes at its end, but with one of `ends`. */
static void drop_near(const fc_dequantizer *f, const char *name, size_t less, const char *const *ends, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const size_t at = find_near(f, name, less, ends[i]);
        if (at != FC_NO_NAME) {
            f->dropped[at] = true;
        }
    }
}

/* Finds all pairs of codes and scales, what else belongs to them, and the scales of activations next to them. */
static fc_code find_pairs(fc_dequantizer *f) {
    static const char weight[] = ".weight";
    const size_t module = sizeof weight - 1;
    for (size_t i = 0; i < f->source->ntensors; i++) {
        const char *name = f->source->tensors[i].name;
        f->found[i] = fc_quantized_find(f->source, f->names, i);
        const fc_quantizer *q = f->found[i].quantizer;
        if (!q) {
            continue;
        }
        const size_t end = strlen(q->codes), len = strlen(name);
        const size_t packed = is_renamed(q) ? end : 0;
        f->count++;
        f->dropped[f->found[i].scales] = true;
        FC_TRY(check_more(f, &f->source->tensors[i], end));
        drop_near(f, name, end, companions, sizeof companions / sizeof *companions);
        if (len > packed + module && memcmp(name + len - packed - module, weight, module) == 0) {
            drop_near(f, name, packed + module, activations, sizeof activations / sizeof *activations);
            FC_TRY(check_smoothing(f, &f->source->tensors[i], packed + module));
        }
        if (is_of_torchao(q)) {
            FC_TRY(check_smoothing(f, &f->source->tensors[i], end));
            FC_TRY(fc_torchao_drop_whole(f, name, end));
        }
    }
    return FC_OK;
}

/* Fails if a part of a quantized weight is without the rest. */
static fc_code check_alone(const fc_dequantizer *f, const fc_tensor *t) {
    static const char *const parts[] = {".weight_packed",
                                        ".weight_scale",
                                        ".weight_zero_point",
                                        ".weight_g_idx",
                                        ".weight_global_scale",
                                        ".absmax",
                                        ".quant_map",
                                        ".nested_absmax",
                                        ".nested_quant_map",
                                        ".SCB",
                                        ".qweight",
                                        ".qzeros",
                                        ".g_idx"};
    const size_t len = strlen(t->name);
    for (size_t i = 0; !t->object && i < sizeof parts / sizeof *parts; i++) {
        const size_t end = strlen(parts[i]);
        if (len >= end && strcmp(t->name + len - end, parts[i]) == 0) {
            return fc_fail(f->err, FC_EUNSUPPORTED,
                           "%s: tensor %.256s is a part of a quantized weight, but %s are not here", f->source->path,
                           t->name, i == 0 ? "its scales" : "codes with scales that it belongs to");
        }
    }
    return FC_OK;
}

/* Fails if there are codes in a layout that is not known, or parts of quantized weights alone. */
static fc_code check_others(const fc_dequantizer *f) {
    fc_quantized_values values;
    FC_TRY(fc_quantized_values_find(f->source, f->scratch, &values, f->err));
    for (size_t i = 0; i < f->source->ntensors; i++) {
        if (!f->found[i].quantizer && !f->dropped[i]) {
            FC_TRY(check_alone(f, &f->source->tensors[i]));
        }
    }
    for (size_t i = 0; i < f->source->ntensors; i++) {
        if (values.of[i].codes == i && !f->found[i].quantizer && !f->dropped[i]) {
            return fc_quantized_refuse(f->source, &values, i, "this layout cannot be dequantized", f->err);
        }
    }
    return f->count > 0 ? FC_OK
                        : fc_fail(f->err, FC_EUSAGE, "%s: has no quantized weights: there are no scales next to codes",
                                  f->source->path);
}

/* Whether each byte of these codes holds two. int8 with inverse scales is what Transformers reads as such pairs. */
static bool are_pairs(const fc_tensor *codes, const fc_quantizer *q) {
    return codes->dtype == FC_F4_E2M1FN_X2 || (codes->dtype == FC_I8 && !is_renamed(q) &&
                                               strcmp(q->scales, "_scale") != 0 && strcmp(q->scales, ".SCB") != 0);
}

/* bitsandbytes divides by 127 like this: scales are the largest magnitude of a row. */
static const float LARGEST_INVERSE = 7.874015718698502e-3F;

/* Old versions of bitsandbytes could save codes in orders for certain GPUs, and say so in a number. */
static fc_code check_format(const fc_dequantizer *f, const fc_tensor *codes) {
    static const int64_t start[1] = {0};
    const fc_tensor *t = fc_dequantizer_near(f, codes->name, 6, "weight_format");
    unsigned char format = 0;
    if (t && !t->object && t->dtype == FC_U8 && t->ndim == 0 && !f->source->format->layout_only) {
        const fc_box box = {0, start, start};
        FC_TRY(fc_read_box(f->source, t, &box, FC_U8, &format, f->err));
    }
    return format == 0 ? FC_OK : fc_dequantizer_refuse(f, codes, "it is not in row-major order (%.256s)", t->name);
}

/* Finds the form of codes that are not packed, and the shape of the weight. */
static fc_code fit_plain(const fc_dequantizer *f, const fc_quantized *q, fc_scaled *w, int64_t *shape) {
    const fc_tensor *codes = w->codes;
    const int last = codes->ndim - 1;
    const bool floats = fc_dtype_get(codes->dtype)->cls == FC_CLASS_FLOAT;
    memcpy(shape, codes->shape, (size_t)codes->ndim * sizeof *shape);
    if (codes->dtype == FC_U8 && strcmp(q->quantizer->scales, "_scale") == 0 && !is_renamed(q->quantizer)) {
        return fc_modelopt_fit(f, w, shape);
    }
    w->form = are_pairs(codes, q->quantizer) ? FC_FORM_PAIRS : FC_FORM_WHOLE;
    if (!floats && w->form == FC_FORM_WHOLE && codes->dtype != FC_I8) {
        return refuse_codes(f, codes, q->quantizer);
    }
    if (w->form == FC_FORM_PAIRS && (last < 0 || !fc_mul_i64(shape[last], 2, &shape[last]))) {
        return refuse_codes(f, codes, q->quantizer);
    }
    /* Where each row has scales of its own, they are those of groups, which are equal parts. */
    w->equal_blocks = last > 0 && w->scales->ndim == codes->ndim && w->scales->shape[last] > 0 &&
                      strcmp(q->quantizer->scales, "_scale") == 0 &&
                      memcmp(w->scales->shape, shape, (size_t)last * sizeof *shape) == 0 &&
                      shape[last] % w->scales->shape[last] == 0 && f->blocks[1] == 0;
    if (strcmp(q->quantizer->scales, ".SCB") == 0) {
        w->factor = LARGEST_INVERSE;
        return check_format(f, codes);
    }
    return fc_packed_zeros(f, w, is_of_torchao(q->quantizer) ? strlen(q->quantizer->codes) : 0);
}

/* Adds a weight whose elements are in the order of its codes. */
static fc_code add_scaled(const fc_dequantizer *f, const fc_quantized *q, fc_scaled *w) {
    int64_t shape[FC_MAX_DIMS], block[FC_MAX_DIMS];
    const size_t end = strlen(q->quantizer->codes);
    const bool packed = strcmp(q->quantizer->codes, "_packed") == 0;
    const char *name = is_of_torchao(q->quantizer) ? fc_torchao_name(f, w->codes->name, end)
                       : is_renamed(q->quantizer)
                           ? fc_arena_strndup(f->scratch, w->codes->name, strlen(w->codes->name) - end)
                           : NULL;
    fc_tensor like = *w->codes;
    FC_NEED(name || !is_renamed(q->quantizer), f->err, f->source->path);
    FC_TRY(is_of_torchao(q->quantizer) ? fc_torchao_check(f, w, name) : FC_OK);
    FC_TRY(packed ? fc_packed_fit(f, w, end, shape) : fit_plain(f, q, w, shape));
    FC_TRY_CONTEXT(fc_scaled_fit(w, shape, f->blocks, f->err), f->err, "%s", f->source->path);
    const fc_tensor *const shared[] = {w->scales, w->zeros, w->columns, w->general};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        FC_TRY(shared[i] ? fc_computed_shares(f->out, 0, shared[i], f->err) : FC_OK);
    }
    like.shape = shape;
    like.dtype = f->dtype;
    fc_computed_run(&like, block);
    return fc_computed_add(f->out, &like, name, block, fc_scaled_compute, w, f->err);
}

/* Adds a weight of blocks of 32 four-bit floats, with the last two dimensions exchanged. */
static fc_code add_transposed(const fc_dequantizer *f, const fc_tensor *codes, const fc_quantized *q,
                              const fc_scaled *w) {
    const int n = codes->ndim - 1;
    int64_t shape[FC_MAX_DIMS], block[FC_MAX_DIMS];
    const bool fits = codes->dtype == FC_U8 && n >= 2 && codes->shape[n] == 16 && w->scales->ndim == n &&
                      memcmp(codes->shape, w->scales->shape, (size_t)n * sizeof *shape) == 0;
    if (!fits || (w->scales->dtype != FC_U8 && w->scales->dtype != FC_F8_E8M0FNU)) {
        return refuse_codes(f, codes, q->quantizer);
    }
    for (int d = 0; d < n; d++) {
        shape[d] = codes->shape[d];
        block[d] = 1;
    }
    shape[n - 1] = codes->shape[n - 2];
    if (!fc_mul_i64(codes->shape[n - 1], 32, &shape[n - 2])) {
        return refuse_codes(f, codes, q->quantizer);
    }
    for (int d = n - 2; d < n; d++) {
        block[d] = shape[d] < FC_COMPUTED_EDGE ? shape[d] : FC_COMPUTED_EDGE;
    }
    const fc_tensor like = {.name = codes->name, .dtype = f->dtype, .ndim = n, .shape = shape};
    const char *name = fc_arena_strndup(f->scratch, codes->name, strlen(codes->name) - strlen(q->quantizer->codes));
    return name ? fc_computed_add(f->out, &like, name, block, fc_four_bits_compute, w, f->err)
                : fc_no_memory(f->err, f->source->path);
}

static fc_code add_weight(const fc_dequantizer *f, size_t index) {
    const fc_tensor *codes = &f->source->tensors[index];
    const fc_quantized *q = &f->found[index];
    fc_scaled *w = fc_arena_calloc(f->out->arena, 1, sizeof *w);
    FC_NEED(w, f->err, f->source->path);
    *w = (fc_scaled){.codes = codes, .scales = &f->source->tensors[q->scales]};
    switch (q->quantizer->kind) {
    case FC_CODES_SCALED:
        return add_scaled(f, q, w);
    case FC_CODES_BLOCKWISE:
        return fc_blockwise_add(f, codes, w->scales);
    case FC_CODES_GROUPED:
        return fc_grouped_add(f, codes, w->scales, strlen(q->quantizer->codes));
    case FC_CODES_TRANSPOSED:
        FC_TRY(fc_computed_shares(f->out, 0, w->scales, f->err));
        return add_transposed(f, codes, q, w);
    default:
        return refuse_codes(f, codes, q->quantizer);
    }
}

static fc_code build_dequantized(fc_dequantizer *f, const char *config) {
    const size_t count = f->source->ntensors;
    f->names = fc_names_of(f->source, f->scratch);
    f->found = fc_arena_calloc(f->scratch, count + 1, sizeof *f->found);
    f->dropped = fc_arena_calloc(f->scratch, count + 1, sizeof *f->dropped);
    FC_NEED(f->names && f->found && f->dropped, f->err, f->source->path);
    if (config) {
        FC_TRY(read_config(f, config));
    }
    FC_TRY(fc_torchao_read(f));
    FC_TRY(find_pairs(f));
    FC_TRY(check_others(f));
    for (size_t i = 0; i < count; i++) {
        if (f->found[i].quantizer) {
            FC_TRY(add_weight(f, i));
        } else if (i == f->described) {
            FC_TRY(fc_torchao_keep_rest(f));
        } else if (!f->dropped[i]) {
            FC_TRY(fc_computed_keep(f->out, &f->source->tensors[i], f->err));
        }
    }
    return fc_computed_own(f->out, f->err);
}

fc_code fc_dequantize(fc_checkpoint *source, fc_dtype dtype, const char *config, fc_checkpoint **out, fc_error *err) {
    *out = NULL;
    if (fc_dtype_size(dtype) < 2) {
        return fc_fail(err, FC_EUSAGE, "quantized weights cannot become %s, which has too few bits without scales",
                       fc_dtype_get(dtype)->torch_name);
    }
    fc_dequantizer f = {.source = source, .dtype = dtype, .described = FC_NO_NAME, .err = err};
    FC_TRY(fc_computed_new(&source, 1, source->ntensors, &f.out, err));
    f.scratch = fc_arena_new();
    fc_code rc = f.scratch ? build_dequantized(&f, config) : fc_no_memory(err, source->path);
    json_decref(f.root);
    json_decref(f.metadata);
    json_decref(f.classes);
    fc_arena_free(f.scratch);
    return fc_derived_finish(f.out, rc, out);
}
