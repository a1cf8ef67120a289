/*
 * Errors are values: a code and one line for a person.
 *
 * Every function that can fail returns fc_code and takes `fc_error *err` as its last parameter. The caller
 * owns the fc_error. It contains no pointers, so it can be copied between threads and sent between processes. `err` may
 * be NULL if the caller needs only the code.
 */
#pragma once

#include "fsdpckpt/decls.h"

FC_BEGIN_DECLS

/** What went wrong. The command line exits with the same number (FC_ENOMEM exits with 4). */
typedef enum fc_code {
    FC_OK = 0,
    FC_EFOUND = 1,        /**< check, diff or verify found something */
    FC_EUSAGE = 2,        /**< the call or the command line is wrong */
    FC_ECORRUPT = 3,      /**< the input is damaged, incomplete, or not a checkpoint */
    FC_EIO = 4,           /**< a system failure: no space, no permission, an I/O error */
    FC_EUNSUPPORTED = 5,  /**< the input is valid, but this build cannot handle it */
    FC_ENOMEM = 6,        /**< out of memory */
    FC_EINTERRUPTED = 130 /**< cancelled, e.g. by a signal */
} fc_code;

/** What the caller can change to make the call succeed. The command spells each as an option. */
typedef enum fc_hint {
    FC_HINT_NONE,
    FC_HINT_INCLUDE,         /**< select one of the branches: fc_selection.include */
    FC_HINT_EXCLUDE,         /**< exclude the value: fc_selection.exclude */
    FC_HINT_TRUST_OBJECTS,   /**< exclude the object, or copy it unchanged: fc_convert_options.trust_objects */
    FC_HINT_FORCE,           /**< allow the target to be replaced: fc_convert_options.force */
    FC_HINT_FOLLOW_EXTERNAL, /**< follow links: fc_open_options.follow_external; or exclude the value */
    FC_HINT_MEMORY,          /**< allow more memory: fc_work_options.memory */
    FC_HINT_SHARDED_BY_TP,   /**< say how tensor parallelism sharded the ranks: fc_open_options.tp_plan */
    FC_HINT_TP_PLAN,         /**< give a TP plan that names the modules: fc_selection.tp_plan */
    FC_HINT_POLICY,          /**< choose another wrap policy, or exclude the value */
    FC_HINT_BUFFERS,         /**< name the buffers, or exclude the value */
    FC_HINT_TAKE_FIRST,      /**< take the first source's values, or exclude them */
    FC_HINT_LAYOUT,          /**< choose the number of ranks of each mesh dimension */
    FC_HINT_DRY_RUN,         /**< only plan: fc_convert_options.dry_run */
    FC_HINT_KEEP_DTYPE,      /**< keep the dtype of these tensors: fc_selection.dtype_rules */
    FC_HINT_RECIPE,          /**< choose a recipe: fc_export_options.recipe */
    FC_HINT_RECIPE_CONFIG,   /**< choose a recipe, or give the model's config.json: fc_recipe_options.config */
    FC_HINT_DEQUANTIZE,      /**< compute weights from codes and scales first: fc_dequantize */
    FC_HINT_CONFIG,          /**< give the model's config.json: fc_recipe_options.config */
    FC_HINT_CHECK,           /**< compare with a schema through fc_check instead */
    FC_HINT_SELECT_STATE,    /**< select model and optimizer only: fc_selection.include */
    FC_HINT_MODEL_PREFIX,    /**< give all names the prefix "model.", or select those that have it */
    FC_HINT_ADAPTER_CONFIG,  /**< give the adapter's configuration: fc_export_options.adapter_config */
    FC_HINT_EXCLUDE_EACH,    /**< exclude several values: `about` has globs, separated by ", " */
    FC_HINT_EXCLUDE_OTHERS,  /**< exclude all adapters but one: `about` has globs for one of them, as above */
    FC_HINT_ONE_FILE,        /**< make a full target, which is one file, or name a directory */
    FC_HINT_UNSPLIT,         /**< do not divide the target by size, or name a directory: fc_selection.max_file_bytes */
    FC_HINT_PLUGINS,         /**< name a folder of plugins: fc_session_set_plugins; or exclude the value */
    FC_HINT_COUNT
} fc_hint;

/** One error. `message` is one line without a newline that begins with the most general context. */
typedef struct fc_error {
    fc_code code;
    char message[1024];
    fc_hint hint;
    char about[256]; /**< the value that the hint refers to, e.g. the name to exclude; "" if there is none */
} fc_error;

/**
 * Records an error in `err`, replacing an earlier one. A message that is too long ends in "...". Control characters in
 * the text are replaced, so hostile names cannot break the line or control the terminal.
 * @return `code`, so that a function can end with `return fc_fail(err, FC_EIO, ...)`.
 */
fc_code fc_fail(fc_error *err, fc_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/**
 * Like fc_fail, and appends ": " and the text of the system error `errnum`.
 * @return FC_EIO, or FC_ENOMEM if errnum is ENOMEM.
 */
fc_code fc_fail_errno(fc_error *err, int errnum, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/**
 * Adds a hint to the error that was just recorded: `return fc_advise(err, fc_fail(err, ...), FC_HINT_EXCLUDE, name)`.
 * @param about may be NULL.
 * @return `code`.
 */
fc_code fc_advise(fc_error *err, fc_code code, fc_hint hint, const char *about);

/** Records FC_ENOMEM: "<path>: out of memory", or "out of memory" when `path` is NULL. @return FC_ENOMEM. */
fc_code fc_no_memory(fc_error *err, const char *path);

/** Prepends "<context>: " to the message. @return `code`, so that it can end a function. */
fc_code fc_context(fc_error *err, fc_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#ifdef __clang_analyzer__
/* The analyzer sees one file at a time; this tells it that an error is never FC_OK. */
#define fc_fail(err, code, ...) ((fc_fail)(err, code, __VA_ARGS__), (code))
#define fc_fail_errno(err, errnum, ...) ((fc_fail_errno)(err, errnum, __VA_ARGS__), FC_EIO)
#define fc_advise(err, code, hint, about) ((fc_advise)(err, code, hint, about), (code))
#define fc_no_memory(err, path) ((fc_no_memory)(err, path), FC_ENOMEM)
#define fc_context(err, code, ...) ((fc_context)(err, code, __VA_ARGS__), (code))
#endif

/** Returns the exit status of the command for `code`. */
int fc_exit_status(fc_code code);

FC_END_DECLS
