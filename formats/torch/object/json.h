/*
 * Shared by the two halves of the decoding of pickled values as JSON: json.c knows the values of Python itself,
 * json_instance.c instances of the harmless classes of other modules.
 */
#pragma once

#include "torch/pickle/pickle.h"

#include <jansson.h>

enum { FC_TORCH_JSON_DEPTH = 128 };

typedef struct fc_torch_json_writer {
    const fc_pickle *p;
    uint64_t budget; /* remaining bytes of JSON, approximately */
    int depth;
    bool in_config;                  /* within a value of OmegaConf, whose nodes are shown as plain values */
    fc_pv open[FC_TORCH_JSON_DEPTH]; /* the instances around this value, which may refer to them again */
    int nopen;
} fc_torch_json_writer;

/* They return NULL when out of memory. */
json_t *fc_torch_json_value(fc_torch_json_writer *w, fc_pv v);
json_t *fc_torch_json_array(fc_torch_json_writer *w, const fc_pv *items, size_t n);
json_t *fc_torch_json_dict(fc_torch_json_writer *w, const fc_pv *pairs, size_t n);
/** @return a number, or {"$float": …} for what JSON has no number for. */
json_t *fc_torch_json_real(double value);
/** @return {tag: base64 of the bytes}. */
json_t *fc_torch_json_base64(fc_torch_json_writer *w, const char *tag, const char *bytes, size_t n);
/** @return {tag: value}. Takes over `value`, which may be NULL. */
json_t *fc_torch_json_tagged(const char *tag, json_t *value);
/** @return {tag: "module.name"}. */
json_t *fc_torch_json_named(const fc_pickle *p, const char *tag, fc_pv global);

/** Decodes a call of a class or function that is known to be harmless. */
json_t *fc_torch_json_instance(fc_torch_json_writer *w, fc_pv call);
