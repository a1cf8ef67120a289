/*
 * Errors are values: a code and one line for a person.
 *
 * Every function that can fail returns fc_code and takes `fc_error *err` as its last parameter. The caller
 * owns the fc_error; it holds no pointers, so it may be copied between threads and sent between processes.
 * `err` may be NULL where the caller only wants the code.
 */
#ifndef FSDPCKPT_ERROR_H
#define FSDPCKPT_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

/** What went wrong. The command line exits with the same number (FC_ENOMEM exits with 4). */
typedef enum fc_code {
    FC_OK = 0,
    FC_EFOUND = 1,       /**< check, diff or verify found something */
    FC_EUSAGE = 2,       /**< the call or the command line asks for something that makes no sense */
    FC_ECORRUPT = 3,     /**< the input is damaged, incomplete, or not a checkpoint */
    FC_EIO = 4,          /**< the system refused: no space, no permission, an I/O error */
    FC_EUNSUPPORTED = 5, /**< valid, but not something this build handles */
    FC_ENOMEM = 6,       /**< out of memory */
    FC_EINTERRUPTED = 130
} fc_code;

/** One error: `message` is a single line without a newline, most general context first. */
typedef struct fc_error {
    fc_code code;
    char message[1024];
} fc_error;

/**
 * Records an error, replacing what `err` held. Over-long messages end in "...".
 * Control characters in the formatted text are replaced, so hostile names cannot break the line or the terminal.
 * @return `code`, so that a function can write `return fc_fail(err, FC_EIO, ...)`.
 */
fc_code fc_fail(fc_error *err, fc_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/**
 * Like fc_fail, and appends ": " with the text of the system error `errnum`. ENOMEM becomes FC_ENOMEM.
 */
fc_code fc_fail_errno(fc_error *err, int errnum, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/** Records FC_ENOMEM: "<path>: out of memory", or "out of memory" when `path` is NULL. @return FC_ENOMEM. */
fc_code fc_no_memory(fc_error *err, const char *path);

/** Puts "<context>: " before the message on its way up. @return `code`, so that it can end a function. */
fc_code fc_context(fc_error *err, fc_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#ifdef __clang_analyzer__
/* The analyzer sees one file at a time; this tells it that an error is never FC_OK. */
#define fc_fail(err, code, ...) ((fc_fail)(err, code, __VA_ARGS__), (code))
#define fc_fail_errno(err, errnum, ...) ((fc_fail_errno)(err, errnum, __VA_ARGS__), FC_EIO)
#define fc_no_memory(err, path) ((fc_no_memory)(err, path), FC_ENOMEM)
#define fc_context(err, code, ...) ((fc_context)(err, code, __VA_ARGS__), (code))
#endif

/** The exit status of the command line for `code`. */
int fc_exit_status(fc_code code);

#ifdef __cplusplus
}
#endif
#endif
