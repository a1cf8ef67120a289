/*
 * Examines what loading a torch.save archive with PyTorch would do besides creating data: see verdict.h.
 */
#include "torch/object/verdict.h"

#include "torch/object/item.h"

#include <stdio.h>

static void judge_unknown(const fc_pickle *p, fc_object_verdict *out) {
    out->risk = FC_OBJECT_UNKNOWN;
    if (!p->risky) {
        snprintf(out->reason, sizeof out->reason, "unsupported: it needs a class without a name");
        return;
    }
    snprintf(out->reason, sizeof out->reason, "unsupported: class %.200s of %.200s is not known to be harmless%s",
             fc_pickle_name(p, p->risky), fc_pickle_module(p, p->risky), p->risk_of_use ? " as it is used here" : "");
}

static void judge_pickle(const fc_pickle *p, fc_object_verdict *out) {
    if (p->risky) {
        fc_pickle_global_name(p, p->risky, out->global, sizeof out->global);
    }
    if (p->risk == FC_RISK_RUNS) {
        out->risk = FC_OBJECT_RUNS;
        char name[256];
        snprintf(out->reason, sizeof out->reason, "loading it calls %s: it may be hostile",
                 fc_pickle_risky_name(p, name, sizeof name));
    } else if (p->risk == FC_RISK_UNKNOWN) {
        judge_unknown(p, out);
    }
}

/* Judges an opened item and closes it. `rc` is the result of opening it, and `why` its message. */
static fc_code judge_item(fc_torch_item *item, fc_code rc, const fc_error *why, fc_object_verdict *out, fc_error *err) {
    if (rc == FC_EUNSUPPORTED) { /* torch.load may run what is not examined, such as a call in a huge pickle */
        out->risk = FC_OBJECT_RUNS;
        snprintf(out->reason, sizeof out->reason, "its pickle cannot be examined, so it may be hostile: %.400s",
                 why->message);
        return FC_OK;
    }
    if (rc != FC_OK) {
        return fc_fail(err, rc, "%s", why->message);
    }
    judge_pickle(item->pickle, out);
    if (fc_torch_is_script(item)) {
        *out = (fc_object_verdict){.risk = FC_OBJECT_RUNS, .global = "torch.jit.load"};
        snprintf(out->reason, sizeof out->reason, "loading it compiles a TorchScript program: it may be hostile");
    }
    fc_torch_item_close(item);
    return FC_OK;
}

fc_code fc_torch_verdict(int fd, const char *path, uint64_t offset, uint64_t length, fc_object_verdict *out,
                         fc_error *err) {
    fc_torch_item item;
    fc_error why;
    fc_code rc = fc_torch_item_open_to_judge(fd, path, offset, length, &item, &why);
    return judge_item(&item, rc, &why, out, err);
}

fc_code fc_torch_verdict_memory(unsigned char *bytes, uint64_t length, const char *path, fc_object_verdict *out,
                                fc_error *err) {
    fc_torch_item item;
    fc_error why;
    fc_code rc = fc_torch_item_open_memory(bytes, length, path, &item, &why);
    return judge_item(&item, rc, &why, out, err);
}
