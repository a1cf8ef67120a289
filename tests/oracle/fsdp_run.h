/*
 * A scenario of fsdp_tool while one rank runs it. fsdp_run.c reads the JSON, fsdp_plan.c adds units by a wrap policy.
 */
#pragma once

#include "fsdpckpt/train/fsdp.h"

#include <jansson.h>

enum { MOST_UNITS = 16, MOST_PARAMS = 16, NAME_MAX_BYTES = 64 };

/* Pairs of 4 ranks, with which a unit communicates. */
typedef enum group { GROUP_WORLD, GROUP_NEIGHBOURS, GROUP_ACROSS, GROUP_COUNT } group;

typedef struct unit_run {
    fc_fsdp_unit *unit;
    fc_fsdp_handle *handle;
    const json_t *spec;
    fc_fsdp_tensor tensors[MOST_PARAMS];
} unit_run;

typedef struct rank_run {
    const json_t *scenario;
    json_t *result, *trace;
    fc_comm *comm, *groups[GROUP_COUNT];
    fc_fsdp *fsdp;
    unit_run units[MOST_UNITS];
    size_t nunits;
} rank_run;

const char *string_of(const json_t *object, const char *key);
int64_t integer_of(const json_t *object, const char *key);
bool is_true(const json_t *object, const char *key);
bool dtype_of(const json_t *object, const char *key, fc_dtype *out);
void bytes_of_hex(const char *hex, void *out, size_t bytes);

/* Returns a setting of a unit: its own, or that of the scenario. */
const json_t *setting(const rank_run *r, const json_t *spec, const char *key);
bool dtype_setting(const rank_run *r, const json_t *spec, const char *key, fc_dtype *out);
fc_sharding_strategy strategy_setting(const rank_run *r, const json_t *spec);
fc_backward_prefetch prefetch_setting(const rank_run *r, const json_t *spec);
/* Sets the communicators. "replicas" without "group" is HSDP over neighbours. */
void choose_groups(const rank_run *r, const json_t *spec, fc_comm **shard, fc_comm **replicate);

/* Reads parameter `i` of a unit into u->tensors[i]. */
fc_code read_param(rank_run *r, unit_run *u, size_t i, const json_t *spec, fc_fsdp_param_init *out, fc_error *err);

/* Returns the unit of the scenario with this name of a module, or 0, and the description of a unit. */
size_t run_unit(const rank_run *r, const char *name, size_t len);
const json_t *run_spec(const rank_run *r, size_t unit);

/* Plans the units with a policy, and adds them. */
fc_code run_plan(rank_run *r, fc_error *err);
