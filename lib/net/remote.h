/*
 * Files on servers, by name: https://host/path, read through a process of its own, the fetcher. It is started at the
 * first such name, is confined, can open no file, and ends with this process. An open remote file is a descriptor of a
 * socket, on which fc_pread_full asks the fetcher.
 */
#pragma once

#include "fsdpckpt/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Returns whether a path is the name of something on a server. The one place where such names are recognised: also
 * "HTTPS://host/x", which fc_remote_check refuses. */
bool fc_is_remote(const char *path);

/** Returns whether a name is that of a whole bucket, model or host: no name next to it belongs to it. */
bool fc_remote_is_root(const char *name);

/** Refuses a name that this build cannot read, or that contains a password or a token (FC_EUSAGE). */
fc_code fc_remote_check(const char *name, fc_error *err);

/** Returns whether a path is a URL with a query, which may be a secret, as in presigned URLs. */
bool fc_remote_has_query(const char *path);

/** Gives the fetcher a URL with a query. @param name receives the name that stands for it from now on, for which
 * messages and reports show "?..." in place of the query; malloc'ed, owned by the caller */
fc_code fc_remote_hide(const char *url, char **name, fc_error *err);

typedef struct fc_remote_info {
    bool found, is_folder;
    uint64_t size;     /**< of a file, in bytes */
    uint64_t identity; /**< differs between versions of an object */
} fc_remote_info;

/** Finds out what a name is. If there is nothing, that is no error.
 * @param given a person gave the name: it may exist even if its folder does not list it */
fc_code fc_remote_stat(const char *name, bool given, fc_remote_info *out, fc_error *err);

/** The names in a folder, without the folders below it. */
typedef struct fc_entry_names {
    char **names; /**< malloc'ed, as is each */
    size_t count, capacity;
} fc_entry_names;

/** Lists a folder. @param out freed by the caller, also after a failure. */
fc_code fc_remote_list(const char *name, fc_entry_names *out, fc_error *err);
void fc_entry_names_free(fc_entry_names *names);

/** Lets the fetcher ask for a file that will soon be examined or opened. It is only for speed: nothing fails. */
void fc_remote_expect(const char *name);

/** Opens a file. @param fd receives a descriptor for fc_remote_read, which any thread may use. */
fc_code fc_remote_open(const char *name, int *fd, uint64_t *size, fc_error *err);

/** Reads exactly `size` bytes. @return FC_ECORRUPT if the file ends before, or was changed since it was first opened */
fc_code fc_remote_read(int fd, void *buf, size_t size, uint64_t offset, const char *name, fc_error *err);

/** Lets the server begin to send what will soon be read with this descriptor: one fc_remote_read or several of them, in
 * ascending order. It costs no memory here, and nothing fails. */
void fc_remote_ahead(int fd, uint64_t size, uint64_t offset);

/** fc_remote_stat of an open file. */
fc_code fc_remote_fstat(int fd, fc_remote_info *out, fc_error *err);
