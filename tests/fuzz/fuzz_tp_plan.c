/*
 * Fuzzes the file of a TP plan. If it loads, every name gets a dimension that it has, from a rule of the plan.
 */
#include "fsdpckpt/layout.h"
#include "sharding/tp_plan.h"

#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fc_arena *arena = fc_arena_new();
    const fc_tp_plan *plan;
    fc_error err;
    if (fc_tp_plan_load(fuzz_file(data, size), arena, &plan, &err) == FC_OK) {
        for (int i = 0; i < FUZZ_NAMES; i++) {
            for (int ndim = 0; ndim < 4; ndim++) {
                fc_tp_style style;
                const int dim = fc_tp_plan_dim(plan, fuzz_names[i], ndim, &style);
                if (dim < -1 || dim >= ndim || (dim >= 0 && style == FC_TP_NONE)) {
                    abort();
                }
            }
            const int64_t rule = fc_tp_plan_rule_of(plan, fuzz_names[i]);
            if (rule < -1 || rule >= (int64_t)fc_tp_plan_rules(plan)) {
                abort();
            }
            for (size_t k = 0; k < fc_tp_plan_rules(plan); k++) {
                if (!fc_tp_plan_pattern(plan, k)) {
                    abort();
                }
            }
        }
    } else if (!err.message[0]) {
        abort();
    }
    fc_arena_free(arena);
    return 0;
}
