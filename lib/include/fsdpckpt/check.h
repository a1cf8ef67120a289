/*
 * Checks a checkpoint by its headers: whether it is whole, and whether it fits a reference and a mesh. Only manifests
 * are compared. The result is a list of findings, each with a kind, the values that it concerns, and one line for a
 * person.
 */
#pragma once

#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/layout.h"
#include "fsdpckpt/select.h"

FC_BEGIN_DECLS

/** The kinds of findings. Each has one message, in the table of lib/check/messages.c. */
typedef enum fc_finding_kind {
    /* The checkpoint alone. */
    FC_FOUND_UNREADABLE,       /**< the headers are damaged */
    FC_FOUND_FILE_MISSING,     /**< a data file is missing */
    FC_FOUND_FILE_TRUNCATED,   /**< a data file is shorter than the headers say */
    FC_FOUND_FILE_DAMAGED,     /**< a data file is damaged in another way */
    FC_FOUND_COVERAGE,         /**< the chunks of a tensor leave a hole or overlap */
    FC_FOUND_UNSUPPORTED,      /**< a value is unreadable: fc_object.refusal */
    FC_FOUND_RUNS,             /**< an object runs code when PyTorch loads it */
    FC_FOUND_FILE_RUNS,        /**< a file runs code when PyTorch loads it: fc_checkpoint.risk */
    FC_FOUND_UNKNOWN_CLASS,    /**< an object is not known to be harmless */
    FC_FOUND_OBJECT_DAMAGED,   /**< an object cannot be loaded */
    FC_FOUND_NOTE,             /**< the format cannot guarantee something: fc_checkpoint.note */
    FC_FOUND_EMPTY,            /**< there is no tensor and no object */
    FC_FOUND_WRAPPED_PREFIX,   /**< all names begin with a wrapper's prefix */
    FC_FOUND_WRAPPED_NAMES,    /**< some names contain a wrapper's component */
    FC_FOUND_FLAT_PARAMETERS,  /**< there are flat parameters of FSDP1 */
    FC_FOUND_STATE_ORPHAN,     /**< optimizer state without its parameter */
    FC_FOUND_STATE_SHAPE,      /**< optimizer state has another shape than its parameter */
    FC_FOUND_STATE_INCOMPLETE, /**< a parameter lacks a state that others have */
    FC_FOUND_GROUP_ORPHAN,     /**< param_groups lists a missing parameter */
    FC_FOUND_GROUP_STATE,      /**< a parameter has state and is in no group */
    /* Versions of a model: fc_delta_check. */
    FC_FOUND_VERSION_DAMAGED, /**< the headers of a version are damaged, or files are missing */
    FC_FOUND_VERSION_GAP,     /**< the base of a version is missing */
    FC_FOUND_VERSION_FORK,    /**< a version does not lead to a later one */
    /* Against a reference. */
    FC_FOUND_MISSING,
    FC_FOUND_MISSING_OBJECT,
    FC_FOUND_UNEXPECTED,
    FC_FOUND_UNEXPECTED_OBJECT,
    FC_FOUND_TIED,              /**< a head and the embedding that the other side ties it to */
    FC_FOUND_PREFIX_EXTRA,      /**< names have a prefix that those of the reference lack */
    FC_FOUND_PREFIX_LACKING,    /**< names lack a prefix that those of the reference have */
    FC_FOUND_WRAPPER_EXTRA,     /**< names have a wrapper's component that those of the reference lack */
    FC_FOUND_WRAPPER_LACKING,   /**< the other way round */
    FC_FOUND_RENAMED,           /**< same dtype, shape and bytes under another name */
    FC_FOUND_RENAMED_PERHAPS,   /**< same dtype and shape, a similar name */
    FC_FOUND_RENAMED_COMPONENT, /**< one component differs in several names */
    FC_FOUND_SHAPE,
    FC_FOUND_SHAPE_TRANSPOSED,
    FC_FOUND_SHAPE_RESHAPED,  /**< another shape with as many elements */
    FC_FOUND_SHAPE_SHARD,     /**< one dimension is a fraction 1/n of the expected size */
    FC_FOUND_SHAPE_DIMENSION, /**< one dimension differs */
    FC_FOUND_DTYPE,           /**< another dtype, which a cast can repair */
    FC_FOUND_DTYPE_MIXED,     /**< another dtype; a cast would also change tensors that are right */
    FC_FOUND_DTYPE_OTHER,     /**< another dtype that is not floating-point */
    FC_FOUND_NOT_A_TENSOR,    /**< an object where the reference has a tensor */
    FC_FOUND_NOT_AN_OBJECT,   /**< the other way round */
    FC_FOUND_NESTING,         /**< the same name has another path in the nested state dict */
    FC_FOUND_IDLE_ALLOW_MISSING,
    FC_FOUND_IDLE_ALLOW_UNEXPECTED,
    /* For a mesh. */
    FC_FOUND_UNEVEN,       /**< a dimension does not divide by the ranks that share it */
    FC_FOUND_EMPTY_SHARDS, /**< a dimension is shorter than the number of ranks */
    FC_FOUND_TP_UNEVEN,
    FC_FOUND_TP_EMPTY_SHARDS,
    FC_FOUND_TP_NO_RULE,     /**< no rule of the plan covers a matrix */
    FC_FOUND_TP_SHARDS_NONE, /**< the plan shards no tensor at all */
    FC_FOUND_TP_IDLE_RULE,   /**< a rule covers no tensor */
    FC_FOUND_KINDS
} fc_finding_kind;

typedef enum fc_severity { FC_SEVERITY_ERROR, FC_SEVERITY_WARNING } fc_severity;

/** The settings that messages advise: members of fc_selection and fc_check_options. */
typedef enum fc_setting {
    FC_SETTING_NONE,
    FC_SETTING_EXCLUDE,          /**< fc_selection.exclude */
    FC_SETTING_RENAME,           /**< fc_selection.rename */
    FC_SETTING_STRIP_PREFIX,     /**< fc_selection.strip_prefix */
    FC_SETTING_DTYPE,            /**< fc_selection.dtype; its value is a short name such as "bf16" */
    FC_SETTING_MODEL,            /**< fc_check_options.model */
    FC_SETTING_TP_PLAN,          /**< fc_check_options.tp_plan */
    FC_SETTING_ALLOW_MISSING,    /**< fc_check_options.allow_missing */
    FC_SETTING_ALLOW_UNEXPECTED, /**< fc_check_options.allow_unexpected */
    FC_SETTING_COUNT
} fc_setting;

/** What fixes a finding: a setting for a conversion. */
typedef struct fc_fix {
    fc_setting setting;        /**< FC_SETTING_NONE: there is no such setting */
    const char *const *values; /**< one element for each time that it is given */
    size_t count;              /**< number of values */
} fc_fix;

/** The message of one kind. */
typedef struct fc_finding_info {
    const char *id; /**< for programs, e.g. "shape-transposed"; its meaning never changes */
    fc_severity severity;
    const char *text; /**< the message; {name} and other members of fc_finding stand for their values, and
                         {setting:model} and other settings for their names */
    const char *fix;  /**< what to do, in the same notation; NULL if the text says it */
} fc_finding_info;

/** @return the message of `kind`; never NULL. */
const fc_finding_info *fc_finding_info_get(fc_finding_kind kind);

/** One finding. Texts that do not apply to its kind are NULL. */
typedef struct fc_finding {
    fc_finding_kind kind;
    const char *name;         /**< the tensor or object, or the first of several; for a file its path */
    const char *other;        /**< its name in the reference, or the parameter of an optimizer state */
    const char *found;        /**< the actual property, e.g. "float32[10, 6]" */
    const char *expected;     /**< the expected property, in the same form */
    const char *detail;       /**< further text for the message */
    fc_fix fix;               /**< the setting of a conversion that fixes it */
    const char *option;       /**< the same as text for a shell, such as "exclude 'optim.*'"; or NULL */
    uint64_t count;           /**< number of values that it concerns; at least 1 */
    const char *const *names; /**< their `count` names if there are several, else NULL */
    const char *message;      /**< the message as one line */
} fc_finding;

typedef struct fc_report {
    const fc_finding *findings;
    size_t count, errors, warnings;
    size_t tensors, objects;  /**< number of selected tensors and objects of the checkpoint */
    size_t allowed;           /**< number of missing and unexpected values that were allowed */
    const char *idle_exclude; /**< a line about a glob of exclude that matches no name; NULL: there is none */
} fc_report;

typedef struct fc_check_options {
    const fc_checkpoint *reference; /**< the expected names, shapes and dtypes; NULL: none */
    const fc_selection *selection;  /**< only include, exclude (globs over names before or after renaming), strip_prefix
                                       and rename (for names of the checkpoint) are used; NULL: everything, unchanged */
    const char *const *allow_missing; /**< globs over names, NULL-terminated; NULL: none */
    const char *const *allow_unexpected;
    const char *const *setting_names; /**< what messages call the settings, e.g. [FC_SETTING_EXCLUDE] = "--exclude";
                                         FC_SETTING_COUNT elements; NULL: the names of the members */
    bool only_mesh;                   /**< only check whether it fits the mesh */
    const fc_mesh *mesh;              /**< made by fc_layout_mesh; NULL: no mesh */
    const fc_tp_plan *tp_plan;        /**< for a mesh with a tp dimension */
    fc_open_options open;             /**< for fc_check_path, which sets headers_only */
    const fc_checkpoint *model;       /**< for fc_check_path: as in fc_checkpoint_open_model */
} fc_check_options;

/**
 * Checks the open `checkpoint`. Findings are not errors: they are in `out`.
 * @param arena owns what `out` points to, except names, which belong to the checkpoint and the reference.
 * @return FC_EUSAGE if strip_prefix makes two names equal or matches no name; FC_ENOMEM.
 */
fc_code fc_check(const fc_checkpoint *checkpoint, const fc_check_options *options, fc_arena *arena, fc_report *out,
                 fc_error *err);

/**
 * Opens `path` and checks it. Damage that prevents opening is a finding, too, and so is each data file that is missing
 * or too short.
 * @param checkpoint receives the checkpoint, which the caller closes after the last use of `out`; NULL if it could not
 * be opened.
 * @return like fc_check, and FC_ECORRUPT if `path` does not exist, FC_EIO, FC_EUNSUPPORTED.
 */
fc_code fc_check_path(const char *path, const fc_check_options *options, fc_arena *arena, fc_checkpoint **checkpoint,
                      fc_report *out, fc_error *err);

FC_END_DECLS
