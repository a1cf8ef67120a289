/*
 * Errors are values: a code and one line for a person.
 *
 * Every function that can fail returns fc_code and takes `fc_error *err` as its last parameter. The caller
 * owns the fc_error. It contains no pointers, so it can be copied between threads and sent between processes. `err` may
 * be NULL if the caller needs only the code.
 */
#ifndef FSDPCKPT_ERROR_H
#define FSDPCKPT_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

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

/** One error. `message` is one line without a newline that begins with the most general context. */
typedef struct fc_error {
    fc_code code;
    char message[1024];
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

/** Records FC_ENOMEM: "<path>: out of memory", or "out of memory" when `path` is NULL. @return FC_ENOMEM. */
fc_code fc_no_memory(fc_error *err, const char *path);

/** Prepends "<context>: " to the message. @return `code`, so that it can end a function. */
fc_code fc_context(fc_error *err, fc_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#ifdef __clang_analyzer__
/* The analyzer sees one file at a time; this tells it that an error is never FC_OK. */
#define fc_fail(err, code, ...) ((fc_fail)(err, code, __VA_ARGS__), (code))
#define fc_fail_errno(err, errnum, ...) ((fc_fail_errno)(err, errnum, __VA_ARGS__), FC_EIO)
#define fc_no_memory(err, path) ((fc_no_memory)(err, path), FC_ENOMEM)
#define fc_context(err, code, ...) ((fc_context)(err, code, __VA_ARGS__), (code))
#endif

/** Returns the exit status of the command for `code`. */
int fc_exit_status(fc_code code);

#ifdef __cplusplus
}
#endif
#endif
