/*
 * Judges what Python would run besides creating data when it loads a pickle: see judge.c.
 */
#pragma once

#include "torch/names/harmless.h"
#include "torch/pickle/machine.h"

/** A judgement that is under way. */
typedef struct fc_judge {
    fc_pickle *p;
    fc_pv *todo; /* values to be visited */
    size_t ntodo, capacity;
    unsigned char *seen_cells, *seen_containers; /* one bit for each */
    uint64_t left;                               /* how many slots may still be compared */
    bool no_memory;
} fc_judge;

static inline fc_global_kind fc_judge_kind(const fc_pickle *p, fc_pv v) {
    uint32_t aux;
    return fc_pv_typeof(v) == FC_PV_GLOBAL ? fc_pickle_global(p, v, &aux) : FC_GLOBAL_UNKNOWN;
}

static inline const fc_harmless *fc_judge_entry(const fc_pickle *p, fc_pv v) {
    const uint32_t number = fc_pv_typeof(v) == FC_PV_GLOBAL ? fc_pickle_global_entry(p, v) : 0;
    return number ? fc_harmless_get(number) : NULL;
}

/** Puts `v` on the list of values to visit: it may be any value, but no function that the table does not allow. */
void fc_judge_visit(fc_judge *j, fc_pv v);

/** @return whether a class or function may be a value. */
bool fc_judge_may_be_value(const fc_pickle *p, fc_pv global);

/** @return whether `n` values fit a pattern. */
bool fc_judge_match(fc_judge *j, const char *pattern, const fc_pv *items, size_t n);

/** @return whether the state of a numpy.ndarray has an object for each element, which NumPy does not check. */
bool fc_judge_is_object_state(const fc_pickle *p, fc_pv v);

/** @return whether the state of a numpy.dtype agrees with its name. */
bool fc_judge_is_dtype_state(const fc_pickle *p, fc_pv v);

/**
 * Judges all calls of a loaded pickle, also those whose results were dropped, and raises p->risk.
 * @param size of the pickle in bytes, which limits the work
 * @param as_value whether the root is a value, in which no function may be hidden
 * @return false when out of memory.
 */
bool fc_pickle_judge(fc_pickle *p, const fc_pv *calls, size_t ncalls, uint64_t size, bool as_value);

/** @return whether it is a function that may be a value, or be called later, such as a factory or a partial. */
bool fc_pickle_is_harmless_function(const fc_pickle *p, fc_pv v);

/** @return whether a global that is not in the allowlist is harmless unless it is called: a class of torch or numpy. */
bool fc_global_is_reference(const char *module, const char *name);

/** @return whether a string is a name with a meaning for Python, such as __class__. */
bool fc_pickle_is_dunder(const fc_pickle *p, fc_pv name);
