/*
 * units: prints the FSDP units that a wrap policy derives from a checkpoint's names, with their parameters. Reads
 * headers only.
 */
#include "options/command.h"
#include "output/json_out.h"
#include "source.h"
#include "unit_plan.h"

#include <string.h>

#include "fsdpckpt/try.h"

typedef struct totals {
    int64_t numel;
    uint64_t bytes;
    size_t parameters, ignored, buffers, shared;
    const fc_unit *largest;
} totals;

static fc_code add_up_units(const unit_plan *c, totals *t, fc_error *err) {
    *t = (totals){.largest = c->units.units};
    for (size_t i = 0; i < c->units.count; i++) {
        const fc_unit *u = &c->units.units[i];
        t->parameters += u->nparameters;
        t->largest = u->bytes > t->largest->bytes ? u : t->largest;
        if (__builtin_add_overflow(t->numel, u->numel, &t->numel) ||
            __builtin_add_overflow(t->bytes, u->bytes, &t->bytes)) {
            return fc_fail(err, FC_ECORRUPT, "%s: the total size of all units does not fit in 64 bits",
                           c->source->path);
        }
    }
    for (size_t i = 0; i < c->tree.nparameters; i++) {
        const fc_parameter *p = &c->tree.parameters[i];
        t->buffers += p->buffer;
        t->ignored += p->ignored && !p->buffer;
        t->shared += p->same_as != i && !p->buffer && !p->ignored;
    }
    return FC_OK;
}

static const char *mixed_name(fc_dtype dtype) {
    return dtype == FC_OPAQUE ? NULL : fc_dtype_get(dtype)->torch_name;
}

static void unit_name(text_out *out, const fc_unit *u) {
    if (u->fqn[0]) {
        text_name(out, u->fqn);
    }
    text_puts(out, u->module == 0 ? (u->fqn[0] ? " (root)" : "(root)") : "");
}

static void options_text(text_out *out, const fc_unit_options *o, const fc_unit_options *root) {
    if (o->strategy != root->strategy) {
        text_printf(out, ", %s", fc_sharding_strategy_name(o->strategy));
    }
    if (o->mixed_precision != root->mixed_precision) {
        text_puts(out, o->mixed_precision ? ", mixed precision" : ", no mixed precision");
    }
    if (o->cpu_offload != root->cpu_offload) {
        text_puts(out, o->cpu_offload ? ", offloaded" : ", not offloaded");
    }
}

static void parameter_text(text_out *out, const fc_module_tree *tree, uint32_t i) {
    const fc_parameter *p = &tree->parameters[i];
    char size[TEXT_SIZE_MAX], shape[64];
    size_t width = strlen(text_bytes(size, p->bytes)), name = strlen(fc_dtype_get(p->dtype)->torch_name);
    text_repeat(out, " ", width < 10 ? 10 - width : 0);
    text_puts(out, size);
    text_puts(out, "  ");
    text_puts(out, fc_dtype_get(p->dtype)->torch_name);
    text_repeat(out, " ", name < 8 ? 10 - name : 2);
    text_name(out, p->fqn);
    text_puts(out, " ");
    text_puts(out, text_shape(shape, sizeof shape, p->ndim, p->shape));
    text_puts(out, p->frozen ? ", frozen\n" : "\n");
}

static void print_unit(const unit_plan *c, const fc_unit *u) {
    char numel[TEXT_SIZE_MAX], bytes[TEXT_SIZE_MAX];
    unit_name(c->out, u);
    text_printf(c->out, ": %zu %s, %s elements, %s", u->nparameters, u->nparameters == 1 ? "parameter" : "parameters",
                text_count(numel, (uint64_t)u->numel), text_bytes(bytes, u->bytes));
    options_text(c->out, &u->options, &c->targets.root);
    text_puts(c->out, "\n");
    for (size_t i = 0; i < u->nparameters && c->out->error == 0; i++) {
        parameter_text(c->out, &c->tree, u->parameters[i]);
    }
}

static void print_notes(const unit_plan *c, const totals *t) {
    text_out *out = c->out;
    char bytes[TEXT_SIZE_MAX];
    const char *idle = NULL;
    if (t->shared > 0) {
        text_printf(out, "%zu more names of shared parameters\n", t->shared);
        for (size_t i = 0; i < c->tree.nparameters; i++) {
            const fc_parameter *p = &c->tree.parameters[i];
            if (p->same_as != i && !p->buffer && !p->ignored) {
                text_name_in(out, "  ", p->fqn, " is ");
                text_name(out, c->tree.parameters[p->same_as].fqn);
                text_puts(out, "\n");
            }
        }
    }
    if (t->buffers + t->ignored + c->tree.left_out > 0) {
        text_printf(out, "not in a unit: %zu buffers, %zu ignored, %zu objects and tensors of optimizer state\n",
                    t->buffers, t->ignored, c->tree.left_out);
    }
    for (const char *const *class = c->overridden; class && *class; class ++) {
        text_name_in(out, "kept out of mixed precision, in units of their own: ", *class, "\n");
    }
    size_t rules = c->file ? fc_wrap_file_idle(c->file, &idle) : 0;
    if (rules + c->tree.idle > 0) {
        text_printf(out, "%zu rules match nothing, the first is '", rules + c->tree.idle);
        text_name(out, rules ? idle : c->tree.idle_one);
        text_puts(out, "'\n");
    }
    text_puts(out, "largest unit: ");
    unit_name(out, t->largest);
    text_printf(out, ", %s\n", text_bytes(bytes, t->largest->bytes));
}

static void print_units_text(const unit_plan *c, const totals *t) {
    char numel[TEXT_SIZE_MAX], bytes[TEXT_SIZE_MAX];
    for (size_t i = 0; i < c->units.count && c->out->error == 0; i++) {
        print_unit(c, &c->units.units[i]);
    }
    text_name(c->out, c->source->path);
    text_printf(c->out, ": %zu %s of %zu parameters, %s elements, %s\n", c->units.count,
                c->units.count == 1 ? "unit" : "units", t->parameters, text_count(numel, (uint64_t)t->numel),
                text_bytes(bytes, t->bytes));
    print_notes(c, t);
}

static void options_json(json_out *j, const fc_unit_options *o) {
    static const char *const prefetches[] = {"BACKWARD_PRE", "BACKWARD_POST", NULL};
    jw_member_open(j, "options", '{');
    JSON_MEMBER(j, string, "sharding_strategy", fc_sharding_strategy_name(o->strategy));
    jw_key(j, "mixed_precision");
    if (o->mixed_precision) {
        jw_open(j, '{');
        JSON_MEMBER(j, string, "param_dtype", mixed_name(o->param_dtype));
        JSON_MEMBER(j, string, "reduce_dtype", mixed_name(o->reduce_dtype));
        JSON_MEMBER(j, string, "buffer_dtype", mixed_name(o->buffer_dtype));
        JSON_MEMBER(j, bool, "keep_low_precision_grads", o->keep_low_precision_grads);
        JSON_MEMBER(j, bool, "cast_forward_inputs", o->cast_forward_inputs);
        JSON_MEMBER(j, bool, "cast_root_forward_inputs", !o->no_cast_root_forward_inputs);
        jw_close(j, '}');
    } else {
        jw_string(j, NULL);
    }
    JSON_MEMBER(j, bool, "use_orig_params", o->use_orig_params);
    JSON_MEMBER(j, bool, "cpu_offload", o->cpu_offload);
    JSON_MEMBER(j, string, "backward_prefetch", prefetches[o->prefetch]);
    JSON_MEMBER(j, bool, "forward_prefetch", o->forward_prefetch);
    JSON_MEMBER(j, bool, "fp32_inputs", o->fp32_inputs);
    jw_close(j, '}');
}

static void unit_json(json_out *j, const unit_plan *c, const fc_unit *u) {
    const fc_module *m = &c->tree.modules[u->module];
    jw_open(j, '{');
    JSON_MEMBER(j, string, "module", u->fqn);
    JSON_MEMBER(j, bool, "root", u->module == 0);
    JSON_MEMBER(j, string, "class", m->nclasses > 0 ? m->classes[0] : NULL);
    JSON_MEMBER(j, int, "numel", u->numel);
    JSON_MEMBER(j, uint, "bytes", u->bytes);
    options_json(j, &u->options);
    jw_member_open(j, "parameters", '[');
    for (size_t i = 0; i < u->nparameters && j->out->error == 0; i++) {
        const fc_parameter *p = &c->tree.parameters[u->parameters[i]];
        jw_open(j, '{');
        JSON_MEMBER(j, string, "name", p->fqn);
        JSON_MEMBER(j, string, "dtype", fc_dtype_get(p->dtype)->torch_name);
        jw_member_ints(j, "shape", p->ndim, p->shape);
        JSON_MEMBER(j, int, "numel", p->numel);
        JSON_MEMBER(j, uint, "bytes", p->bytes);
        JSON_MEMBER(j, bool, "frozen", p->frozen);
        jw_close(j, '}');
    }
    jw_close(j, ']');
    jw_close(j, '}');
}

static void names_json(json_out *j, const unit_plan *c, const char *key, bool buffers) {
    jw_member_open(j, key, '[');
    for (size_t i = 0; i < c->tree.nparameters; i++) {
        const fc_parameter *p = &c->tree.parameters[i];
        if (buffers ? p->buffer : p->ignored && !p->buffer) {
            jw_string(j, p->fqn);
        }
    }
    jw_close(j, ']');
}

static void print_units_json(const unit_plan *c, const totals *t) {
    json_out j;
    jw_document(&j, c->out, 2, "units");
    JSON_MEMBER(&j, string, "source", c->source->path);
    JSON_MEMBER(&j, string, "policy", c->o->policy ? c->o->policy : "blocks");
    JSON_MEMBER(&j, int, "numel", t->numel);
    JSON_MEMBER(&j, uint, "bytes", t->bytes);
    jw_member_open(&j, "units", '[');
    for (size_t i = 0; i < c->units.count && c->out->error == 0; i++) {
        unit_json(&j, c, &c->units.units[i]);
    }
    jw_close(&j, ']');
    jw_member_open(&j, "shared", '{');
    for (size_t i = 0; i < c->tree.nparameters; i++) {
        if (c->tree.parameters[i].same_as != i) {
            JSON_MEMBER(&j, string, c->tree.parameters[i].fqn, c->tree.parameters[c->tree.parameters[i].same_as].fqn);
        }
    }
    jw_close(&j, '}');
    names_json(&j, c, "buffers", true);
    names_json(&j, c, "ignored", false);
    JSON_MEMBER(&j, uint, "left_out", c->tree.left_out);
    jw_member_strings(&j, "overridden_classes", c->overridden, c->overridden ? SIZE_MAX : 0);
    jw_member_strings(&j, "warnings", c->warnings, c->nwarnings);
    jw_end_document(&j);
}

static void print_units(const unit_plan *c, const totals *t) {
    for (size_t i = 0; i < c->nwarnings && !c->o->quiet; i++) {
        text_report("warning: %s", c->warnings[i]);
    }
    if (c->o->json) {
        print_units_json(c, t);
    } else if (!c->o->quiet) {
        print_units_text(c, t);
    }
}

static fc_code run_units(cli_call *call, fc_error *err) {
    unit_plan c = {.o = call->options, .out = call->out, .arena = call->arena};
    /* The data files are not read, and may be absent. */
    fc_checkpoint *source = NULL;
    totals t;
    fc_code rc;
    FC_TRY_GOTO(source_open(call, c.o->operands[0], true, &source, err), rc, out);
    c.source = source;
    source_report(c.o, source);
    FC_TRY_GOTO(source_note_selection(call, source, false, err), rc, out);
    FC_TRY_GOTO(unit_plan_make(&c, NULL, err), rc, out);
    FC_TRY_GOTO(add_up_units(&c, &t, err), rc, out);
    print_units(&c, &t);
out:
    fc_checkpoint_close(source);
    return rc;
}

static const char *const examples[] = {
    "fsdpckpt units ckpt/",
    "one unit per transformer block, and a root unit for the rest",
    "fsdpckpt units model.json --policy size:100M",
    "by size; only the model's schema is needed",
    "fsdpckpt units ckpt/ --policy class:LlamaDecoderLayer --classes classes.json",
    "ModuleWrapPolicy; classes.json is {\"layers.*\": \"LlamaDecoderLayer\"}",
    "fsdpckpt units ckpt/ --policy size:100M+exclude:ModuleList+name:embed",
    "by size, and the embedding in any case",
    "fsdpckpt units ckpt/ --policy policy.json",
    "CustomPolicy; policy.json is {\"layers.*\": true, \"lm_head\": {\"sharding_strategy\": \"SHARD_GRAD_OP\"}}",
    NULL,
};

const command command_units = {
    .name = "units",
    .operands = "SRC",
    .summary = "show the FSDP units that a wrap policy defines for a model",
    .description =
        "Builds the tree of modules from the parameter names of SRC, and lets a policy choose the modules that become "
        "FSDP units. Checks the choice and prints the units in the order in which FSDP creates them, the root last, "
        "with the parameters of each flat parameter. Reads headers only; SRC may be a schema.\n\nThe checks follow "
        "FSDP: "
        "the parameters of a unit are either all frozen or all trainable (otherwise a warning, with use_orig_params), "
        "and a parameter that several modules share is managed by their lowest common ancestor or a module above "
        "it.\n\n--classes adds facts that names do not show: a pattern matches a module whose name equals it or ends "
        "with '.' and the pattern, and '*' stands for any text within one component.\n\nPolicies that are joined by "
        "'+' "
        "work like torch's _or_policy: a module becomes a unit if one of them chooses it. 'leaf:' names classes below "
        "which the policy before it chooses nothing, and 'exclude:' classes that it never chooses; for 'size:' they "
        "are torch's by default, MultiheadAttention, and ModuleList and ModuleDict.\n\nA policy file maps patterns (or "
        "\"class:NAME\") to true, false, or options that override \"$root\"; or its "
        "\"$policy\" is such a text. If \"$root\" has mixed precision, the "
        "classes "
        "in \"$fp32_classes\" (batch norms, unless the file lists others) are kept out of it, in units of their own, "
        "as "
        "in torch. Optimizer state, objects and buffers are in no unit.",
    .examples = examples,
    .takes = TAKES_COMMON | TAKES(OPT_POLICY) | TAKES(OPT_CLASSES) | TAKES(OPT_IGNORE) | TAKES(OPT_MODEL_ONLY) |
             TAKES(OPT_INCLUDE) | TAKES(OPT_EXCLUDE) | TAKES(OPT_STRIP_PREFIX) | TAKES_EXTERNAL | TAKES(OPT_SCHEMA) |
             TAKES(OPT_JSON),
    .usual = TAKES(OPT_POLICY) | TAKES(OPT_CLASSES) | TAKES(OPT_IGNORE) | TAKES(OPT_SCHEMA) | TAKES(OPT_MODEL_ONLY) |
             TAKES(OPT_JSON),
    .run = run_units,
};
