/*
 * Checking a checkpoint by its headers: is it whole, does it fit a reference, does it fit a mesh. Pure comparison of
 * manifests: the result is a list of findings, each with a kind, the values it speaks of and one line for a person.
 */
#ifndef FSDPCKPT_CHECK_H
#define FSDPCKPT_CHECK_H

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/layout.h"
#include "fsdpckpt/target.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What was found. Each kind has one message, in the table of lib/check/messages.c. */
typedef enum fc_finding_kind {
    /* The checkpoint alone. */
    FC_FOUND_UNREADABLE,       /**< the headers are damaged */
    FC_FOUND_FILE_MISSING,     /**< a data file is not there */
    FC_FOUND_FILE_TRUNCATED,   /**< a data file is shorter than the headers say */
    FC_FOUND_FILE_DAMAGED,     /**< anything else that is wrong with a data file as a whole */
    FC_FOUND_COVERAGE,         /**< the pieces of a tensor leave a hole, or overlap */
    FC_FOUND_UNSUPPORTED,      /**< a value that cannot be had: fc_object.refusal */
    FC_FOUND_RUNS,             /**< an object that runs code when it is loaded */
    FC_FOUND_FILE_RUNS,        /**< a file that runs code when it is loaded: fc_checkpoint.risk */
    FC_FOUND_UNKNOWN_CLASS,    /**< an object that is not known to be harmless */
    FC_FOUND_OBJECT_DAMAGED,   /**< an object that cannot be loaded */
    FC_FOUND_NOTE,             /**< what the format cannot vouch for: fc_checkpoint.note */
    FC_FOUND_EMPTY,            /**< no tensor and no object */
    FC_FOUND_WRAPPED_PREFIX,   /**< all names begin with what a wrapper leaves */
    FC_FOUND_WRAPPED_NAMES,    /**< some names contain what a wrapper leaves */
    FC_FOUND_FLAT_PARAMETERS,  /**< FSDP1's flat parameters */
    FC_FOUND_STATE_ORPHAN,     /**< optimizer state without its parameter */
    FC_FOUND_STATE_SHAPE,      /**< optimizer state of another shape than its parameter */
    FC_FOUND_STATE_INCOMPLETE, /**< a parameter lacks a state that others have */
    FC_FOUND_GROUP_ORPHAN,     /**< param_groups lists a parameter that is not there */
    FC_FOUND_GROUP_STATE,      /**< a parameter has state and is in no group */
    /* Against a reference. */
    FC_FOUND_MISSING,
    FC_FOUND_MISSING_OBJECT,
    FC_FOUND_UNEXPECTED,
    FC_FOUND_UNEXPECTED_OBJECT,
    FC_FOUND_PREFIX_EXTRA,    /**< names have a prefix that the reference's have not */
    FC_FOUND_PREFIX_LACKING,  /**< the reference's have a prefix */
    FC_FOUND_WRAPPER_EXTRA,   /**< names have a wrapper's component that the reference's have not */
    FC_FOUND_WRAPPER_LACKING, /**< the other way round */
    FC_FOUND_RENAMED,         /**< same dtype, shape and bytes under another name */
    FC_FOUND_RENAMED_PERHAPS, /**< same dtype and shape, a similar name */
    FC_FOUND_RENAMED_PART,    /**< the same component is another one in several names */
    FC_FOUND_SHAPE,
    FC_FOUND_SHAPE_TRANSPOSED,
    FC_FOUND_SHAPE_RESHAPED,  /**< as many elements */
    FC_FOUND_SHAPE_SHARD,     /**< a whole fraction of it along one dimension */
    FC_FOUND_SHAPE_DIMENSION, /**< one dimension differs */
    FC_FOUND_DTYPE,           /**< another dtype, which --dtype can mend */
    FC_FOUND_DTYPE_MIXED,     /**< another dtype, which --dtype would mend and change others for the worse */
    FC_FOUND_DTYPE_OTHER,     /**< another dtype, no floating-point one */
    FC_FOUND_NOT_A_TENSOR,    /**< an object where the reference has a tensor */
    FC_FOUND_NOT_AN_OBJECT,   /**< the other way round */
    FC_FOUND_NESTING,         /**< the same name at another place of the nested state dict */
    FC_FOUND_IDLE_ALLOW_MISSING,
    FC_FOUND_IDLE_ALLOW_UNEXPECTED,
    /* For a mesh. */
    FC_FOUND_UNEVEN,       /**< a dimension does not divide by the ranks that share it */
    FC_FOUND_EMPTY_SHARDS, /**< fewer rows than ranks */
    FC_FOUND_TP_UNEVEN,
    FC_FOUND_TP_EMPTY_SHARDS,
    FC_FOUND_TP_NO_RULE,   /**< no rule of the plan covers a matrix */
    FC_FOUND_TP_CUTS_NONE, /**< the plan cuts no tensor at all */
    FC_FOUND_TP_IDLE_RULE, /**< a rule covers no tensor */
    FC_FOUND_KINDS
} fc_finding_kind;

typedef enum fc_severity { FC_SEVERITY_ERROR, FC_SEVERITY_WARNING } fc_severity;

/** One row a kind. */
typedef struct fc_finding_info {
    const char *id; /**< "shape-transposed": for programs; never changes its meaning */
    fc_severity severity;
    const char *text; /**< {name} and the other members of fc_finding stand for their values */
    const char *fix;  /**< what to do, in the same notation; NULL: the text says all there is to say */
} fc_finding_info;

/** @return the row of `kind`; never NULL. */
const fc_finding_info *fc_finding_info_get(fc_finding_kind kind);

/** One finding. Texts that a kind does not speak of are NULL. */
typedef struct fc_finding {
    fc_finding_kind kind;
    const char *name;         /**< the tensor or object, or the first of several; for a file its path */
    const char *other;        /**< its name in the reference, or the parameter of an optimizer state */
    const char *found;        /**< what is there: "float32[10, 6]" */
    const char *expected;     /**< what should be */
    const char *detail;       /**< whatever else the message needs */
    const char *option;       /**< the option of a conversion that mends it, as for a shell; or NULL */
    uint64_t count;           /**< how many values this is about; at least 1 */
    const char *const *names; /**< all `count` of them where they are more than one, else NULL */
    const char *message;      /**< one line */
} fc_finding;

typedef struct fc_report {
    const fc_finding *findings;
    size_t count, errors, warnings;
    size_t tensors, objects; /**< of the checkpoint, as far as selected */
    size_t allowed;          /**< missing and unexpected ones that were allowed */
} fc_report;

typedef struct fc_check_options {
    const fc_checkpoint *reference; /**< what should be there; NULL: nothing to compare with */
    const fc_selection *selection; /**< include, exclude (globs over names, changed or not), and strip_prefix and rename
                                         (of the checkpoint's names) are looked at; NULL: all as it is */
    const char *const *allow_missing; /**< globs over names, NULL-terminated; NULL: none */
    const char *const *allow_unexpected;
    const fc_mesh *mesh;       /**< made by fc_layout_mesh; NULL: no mesh */
    const fc_tp_plan *tp_plan; /**< for a mesh with a dimension tp */
    fc_open_options open;      /**< for fc_check_path; headers_only is set by it */
} fc_check_options;

/**
 * Checks the open `checkpoint`. That something is found is no error: `out` says so.
 * @param arena owns what `out` points to, but for names of the checkpoint and the reference.
 * @return FC_EUSAGE when --strip-prefix makes two names equal or fits none; FC_ENOMEM.
 */
fc_code fc_check(const fc_checkpoint *checkpoint, const fc_check_options *options, fc_arena *arena, fc_report *out,
                 fc_error *err);

/**
 * Opens `path` and checks it. Damage that keeps it from being opened is a finding as well, and so is each data file
 * that is missing or too short.
 * @param checkpoint receives it, to be closed after the last use of `out`; NULL when it could not be opened.
 * @return as fc_check, and FC_ECORRUPT when there is nothing at `path`, FC_EIO, FC_EUNSUPPORTED.
 */
fc_code fc_check_path(const char *path, const fc_check_options *options, fc_arena *arena, fc_checkpoint **checkpoint,
                      fc_report *out, fc_error *err);

#ifdef __cplusplus
}
#endif
#endif
