/*
 * Asks the fetcher to write objects: see upload.h.
 */
#include "net/upload.h"

#include "fsdpckpt/try.h"
#include "net/exchange.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

struct fc_upload {
    int socket; /* on which the fetcher is asked */
    char *name;
};

/* libcurl and servers resolve "." and "..", so the object would have another name. */
static bool has_dots(const char *name) {
    bool has = false;
    for (const char *at = strchr(strstr(name, "://") + 3, '/'); at && !has; at = strchr(at + 1, '/')) {
        const size_t n = strcspn(at + 1, "/");
        has = (n == 1 && at[1] == '.') || (n == 2 && at[1] == '.' && at[2] == '.');
    }
    return has;
}

fc_code fc_upload_check(const char *name, fc_error *err) {
    FC_TRY(fc_is_remote(name) ? fc_remote_check(name, err) : FC_OK);
    if (strncmp(name, "s3://", 5) != 0 && strncmp(name, "gs://", 5) != 0) {
        return fc_fail(err, FC_EUNSUPPORTED,
                       "%.256s: nothing can be written there: write to a bucket (s3://, gs://) or a local path", name);
    }
    return has_dots(name) ? fc_fail(err, FC_EUSAGE, "%s: has \".\" or \"..\" as a folder: leave it out", name) : FC_OK;
}

static fc_code check_object(const char *name, fc_error *err) {
    FC_TRY(fc_upload_check(name, err));
    return fc_remote_is_root(name) ? fc_fail(err, FC_EUSAGE, "%s: is a bucket, not an object", name) : FC_OK;
}

/* Frees an upload. */
static void forget(fc_upload *u) {
    if (u) {
        if (u->socket >= 0) {
            close(u->socket);
        }
        free(u->name);
        free(u);
    }
}

static fc_code judge(const fc_exchange *x, fc_error *err) {
    return x->last.kind != FC_NET_EXISTS
               ? FC_OK
               : fc_advise(err,
                           fc_fail(err, FC_EUSAGE, "%s: another program created it while this one wrote it", x->name),
                           FC_HINT_FORCE, NULL);
}

/* Sends a request. @param u the upload that it is about; NULL: it has a name */
static fc_code ask(fc_exchange *x, const fc_upload *u, const fc_net_request *request, int fd, fc_error *err) {
    FC_TRY(fc_fetcher_get(&x->fetcher, err));
    return fc_exchange_ask(x, u ? u->socket : x->fetcher.requests, request, fd, err);
}

/* Sends a request about a name, where there may be an object that is not expected. */
static fc_code ask_about(const char *name, const fc_net_request *request, int fd, fc_error *err) {
    fc_exchange x = {.name = name};
    FC_TRY(ask(&x, NULL, request, fd, err));
    return judge(&x, err);
}

/* Sends a request about an upload that was begun. */
static fc_code ask_upload(const fc_upload *u, const fc_net_request *request, int fd, fc_error *err) {
    fc_exchange x = {.name = u->name};
    FC_TRY(ask(&x, u, request, fd, err));
    return judge(&x, err);
}

/* Asks for an upload with a socket. @param buffer receives what is known of it, of `size` bytes at most
 * @param out receives NULL if there is none */
static fc_code open_upload(const char *name, const fc_net_request *request, void *buffer, size_t size, fc_upload **out,
                           fc_error *err) {
    int ends[2] = {-1, -1};
    fc_exchange x = {.name = name, .buffer = buffer, .size = size};
    fc_upload *u = calloc(1, sizeof *u);
    fc_code rc;
    FC_TRY_GOTO(u ? FC_OK : fc_no_memory(err, name), rc, out);
    u->socket = -1;
    u->name = strdup(name);
    FC_TRY_GOTO(u->name ? FC_OK : fc_no_memory(err, name), rc, out);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        rc = fc_fail_errno(err, errno, "%s: a socket cannot be made", name);
        goto out;
    }
    u->socket = ends[0];
    FC_TRY_GOTO(ask(&x, NULL, request, ends[1], err), rc, out);
    if (x.last.kind == FC_NET_DONE) {
        *out = u;
        u = NULL;
    }
out:
    if (ends[1] >= 0) {
        close(ends[1]);
    }
    forget(u);
    return rc;
}

fc_code fc_upload_begin(const char *name, uint64_t run, char **id, fc_upload **out, fc_error *err) {
    char *text = calloc(1, FC_NET_MOST_ID + 1);
    *out = NULL;
    FC_NEED(text, err, name);
    fc_code rc;
    FC_TRY_GOTO(check_object(name, err), rc, out);
    fc_net_request request = fc_exchange_request(FC_NET_BEGIN, name);
    request.run = run;
    request.flag = id != NULL;
    FC_TRY_GOTO(open_upload(name, &request, text, id ? FC_NET_MOST_ID : 0, out, err), rc, out);
    if (id) {
        *id = text;
        text = NULL;
    }
out:
    free(text);
    return rc;
}

fc_code fc_upload_continue(const char *name, uint64_t run, const char *id, uint64_t *sizes, unsigned count,
                           fc_upload **out, fc_error *err) {
    *out = NULL;
    FC_TRY(check_object(name, err));
    fc_net_request request = fc_exchange_request(FC_NET_CONTINUE, name);
    const size_t size = strlen(id);
    if (size == 0 || size >= FC_NET_MOST_NAME - request.name_size) {
        return fc_fail(err, FC_EUNSUPPORTED, "%s: the name is too long to go on with its upload", name);
    }
    request.name[request.name_size++] = '\0';
    memcpy(request.name + request.name_size, id, size);
    request.name_size += (uint32_t)size;
    request.part = count;
    request.run = run;
    return open_upload(name, &request, sizes, count * sizeof *sizes, out, err);
}

fc_code fc_upload_ticket(const fc_upload *u, unsigned parts, char **ticket, size_t *size, fc_error *err) {
    const fc_net_request request = {.kind = FC_NET_TICKET, .part = parts, .length = FC_NET_MOST_TICKET};
    fc_exchange x = {.name = u->name, .size = FC_NET_MOST_TICKET};
    unsigned char *bytes = malloc(FC_NET_MOST_TICKET);
    fc_code rc;
    FC_NEED(bytes, err, u->name);
    x.buffer = bytes;
    FC_TRY_GOTO(ask(&x, u, &request, -1, err), rc, out);
    *size = (size_t)(x.buffer - bytes);
    char *fitting = realloc(bytes, *size + 1);
    *ticket = fitting ? fitting : (char *)bytes;
    bytes = NULL;
out:
    free(bytes);
    return rc;
}

/* Lets the fetcher read a ticket. */
static fc_code take_ticket(const fc_upload *u, const char *ticket, size_t size, unsigned parts, fc_error *err) {
    const fc_net_request request = {.kind = FC_NET_TAKE, .part = parts, .length = size};
    const int fd = memfd_create("fsdpckpt-ticket", MFD_CLOEXEC);
    if (fd < 0) {
        return fc_fail_errno(err, errno, "%s: memory cannot be reserved", u->name);
    }
    fc_code rc = pwrite(fd, ticket, size, 0) == (ssize_t)size ? ask_upload(u, &request, fd, err)
                                                              : fc_fail_errno(err, errno, "%s: no memory", u->name);
    close(fd);
    return rc;
}

fc_code fc_upload_adopt(const char *name, uint64_t run, const char *ticket, size_t size, unsigned parts,
                        fc_upload **out, fc_error *err) {
    *out = NULL;
    FC_TRY(check_object(name, err));
    fc_net_request request = fc_exchange_request(FC_NET_ADOPT, name);
    request.run = run;
    FC_TRY(open_upload(name, &request, NULL, 0, out, err));
    if (!*out) {
        return fc_fail(err, FC_EIO, "%s: the process that talks to servers did not adopt its upload", name);
    }
    const fc_code rc = take_ticket(*out, ticket, size, parts, err);
    if (rc != FC_OK) {
        forget(*out);
        *out = NULL;
    }
    return rc;
}

fc_code fc_upload_part(fc_upload *u, int fd, uint64_t offset, uint64_t size, unsigned part, fc_error *err) {
    const fc_net_request request = {.kind = FC_NET_PART, .offset = offset, .length = size, .part = part};
    return ask_upload(u, &request, fd, err);
}

fc_code fc_upload_complete(fc_upload *u, unsigned parts, bool only_new, bool *gone, fc_error *err) {
    const fc_net_request request = {.kind = FC_NET_COMPLETE, .part = parts, .flag = only_new};
    fc_exchange x = {.name = u->name};
    *gone = false;
    FC_TRY(ask(&x, u, &request, -1, err));
    *gone = x.last.kind == FC_NET_MISSING;
    FC_TRY(*gone ? fc_fail(err, FC_EIO,
                           "%s: the upload was completed or aborted by another program, or by a rule of the bucket",
                           u->name)
                 : judge(&x, err));
    forget(u);
    return FC_OK;
}

void fc_upload_abort(fc_upload *u, int *patience) {
    const fc_net_request request = {.kind = FC_NET_ABORT};
    fc_exchange x = {.name = u ? u->name : "", .patience = *patience};
    if (u) {
        (void)ask(&x, u, &request, -1, NULL);
        *patience = x.patience;
    }
    forget(u);
}

void fc_upload_leave(fc_upload *u) {
    forget(u);
}

fc_code fc_upload_whole(const char *name, uint64_t run, int fd, uint64_t size, bool only_new, fc_error *err) {
    FC_TRY(check_object(name, err));
    fc_net_request request = fc_exchange_request(FC_NET_WHOLE, name);
    request.length = size;
    request.flag = only_new;
    request.run = run;
    return ask_about(name, &request, fd, err);
}

/* Sends a request about a journal: a cancelled job does not wait for long. */
static fc_code ask_about_journal(const char *name, const fc_net_request *request, int fd, fc_error *err) {
    fc_exchange x = {.name = name, .stops = true, .patience = FC_UPLOAD_PATIENCE};
    return ask(&x, NULL, request, fd, err);
}

fc_code fc_upload_journal(const char *name, int fd, uint64_t size, fc_error *err) {
    FC_TRY(check_object(name, err));
    fc_net_request request = fc_exchange_request(FC_NET_WHOLE, name);
    request.length = size;
    return ask_about_journal(name, &request, fd, err);
}

fc_code fc_upload_delete_journal(const char *name, fc_error *err) {
    FC_TRY(check_object(name, err));
    const fc_net_request request = fc_exchange_request(FC_NET_DELETE, name);
    return ask_about_journal(name, &request, -1, err);
}

fc_code fc_upload_delete(const char *name, fc_error *err) {
    FC_TRY(check_object(name, err));
    const fc_net_request request = fc_exchange_request(FC_NET_DELETE, name);
    return ask_about(name, &request, -1, err);
}

fc_code fc_upload_delete_own(const char *name, uint64_t run, bool *left, fc_error *err) {
    fc_exchange x = {.name = name};
    FC_TRY(check_object(name, err));
    fc_net_request request = fc_exchange_request(FC_NET_DELETE, name);
    request.run = run;
    FC_TRY(ask(&x, NULL, &request, -1, err));
    *left = x.last.kind == FC_NET_EXISTS;
    return FC_OK;
}

fc_code fc_upload_clear(const char *name, bool is_folder, size_t *count, fc_error *err) {
    fc_exchange x = {.name = name, .patience = FC_UPLOAD_PATIENCE};
    *count = 0;
    FC_TRY(is_folder ? fc_upload_check(name, err) : check_object(name, err));
    fc_net_request request = fc_exchange_request(FC_NET_CLEAR, name);
    request.flag = is_folder;
    FC_TRY(ask(&x, NULL, &request, -1, err));
    *count = (size_t)x.last.size;
    return FC_OK;
}
