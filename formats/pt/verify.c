/*
 * Verifies the records of a torch.save file that are not tensor data, by the CRC-32s of the archive.
 */
#include "base/file_name.h"
#include "fsdpckpt/try.h"
#include "pt/as_torch.h"
#include "pt/pt.h"
#include "pt/sharding.h"
#include "torch/file/file.h"
#include "verify/report.h"

#include "fsdpckpt/verify.h"

/* Counts objects. They come from the pickle, so its CRC covers them. */
static void count_objects(const fc_checkpoint *checkpoint, uint32_t file, struct fc_verify_report *report) {
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (t->object && t->nchunks > 0 && t->chunks[0].place.file == file) {
            fc_verify_covered(checkpoint, t, report);
        }
    }
}

/* Whether an object of the file was already reported as unsafe. */
static bool has_unsafe_object(const fc_checkpoint *checkpoint, uint32_t file) {
    fc_object_verdict verdict;
    for (size_t i = 0; i < checkpoint->ntensors; i++) {
        const fc_tensor *t = &checkpoint->tensors[i];
        if (t->object && t->nchunks > 0 && t->chunks[0].place.file == file &&
            fc_checkpoint_object_verdict(checkpoint, t, &verdict, NULL) == FC_OK && verdict.risk == FC_OBJECT_RUNS) {
            return true;
        }
    }
    return false;
}

/* Reports a call whose result is not part of any value. */
static void report_risk(const torch_file *f, const fc_defect *place, struct fc_findings *findings) {
    char name[256];
    fc_report_defect(findings, place, "%s: loading it with torch.load calls %s: it may be hostile", f->path,
                     fc_pickle_risky_name(f->p, name, sizeof name));
}

fc_code fc_pt_verify(const fc_checkpoint *checkpoint, struct fc_findings *findings, struct fc_verify_report *report,
                     fc_error *err) {
    for (uint32_t i = 0; i < checkpoint->nfiles; i++) {
        if (fc_pt_is_index(checkpoint->files[i].path) || strcmp(checkpoint->files[i].name, FC_PT_SHARDING) == 0) {
            continue; /* an index, which was compared with the files when it was read */
        }
        const fc_defect place = {.file = checkpoint->files[i].name};
        torch_file f;
        fc_error found;
        fc_code rc = fc_pt_open_as_torch(checkpoint->files[i].path, i, &f, &found);
        if (rc != FC_OK) {
            fc_report_defect(findings, &place, "%s", found.message);
            continue;
        }
        bool covered = f.pickle == NULL; /* legacy files, safetensors and JSON have no CRCs */
        rc = covered ? fc_torch_check_records(&f.item, false, &place, findings, &covered, err) : FC_OK;
        if (f.p->risk == FC_RISK_RUNS && !has_unsafe_object(checkpoint, i)) {
            report_risk(&f, &place, findings);
        }
        fc_torch_file_close(&f);
        FC_TRY(rc);
        if (covered) {
            count_objects(checkpoint, i, report);
        }
    }
    return FC_OK;
}
