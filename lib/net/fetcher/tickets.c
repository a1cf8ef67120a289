/*
 * Tickets: what the fetcher of another process needs to complete an upload. Its first line is the server's ID of the
 * upload; then each part has a line with its size and its ETag. See uploads.h.
 */
#include "net/fetcher/uploads.h"

#include "base/grow.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static fc_code fail_to_understand(const upload *u, fc_error *error) {
    return fc_fail(error, FC_ECORRUPT, "%s: what another process says of this upload cannot be understood", u->name);
}

/* ---- a ticket of an upload that was begun here ---- */

static bool is_line(const char *text) {
    bool good = *text != '\0';
    for (const char *c = text; *c && good; c++) {
        good = !iscntrl((unsigned char)*c);
    }
    return good;
}

static fc_code write_ticket(const upload *u, unsigned parts, fc_notes *out, fc_error *error) {
    char size[32];
    if (!u->id || !is_line(u->id)) {
        return fc_fail(error, FC_EUNSUPPORTED, "%s: another process cannot be told the server's ID of this upload",
                       u->name);
    }
    bool good = fc_notes_add(out, u->id, strlen(u->id)) && fc_notes_add(out, "\n", 1);
    for (unsigned i = 0; i < parts && good; i++) {
        const char *etag = i < u->capacity ? u->parts[i].etag : NULL;
        if (!etag) {
            return fc_fail(error, FC_EUSAGE, "%s: part %u was not sent", u->name, i + 1);
        }
        snprintf(size, sizeof size, "%" PRIu64 " ", u->parts[i].size);
        good = fc_notes_add(out, size, strlen(size)) && fc_notes_add(out, etag, strlen(etag)) &&
               fc_notes_add(out, "\n", 1);
    }
    return good ? FC_OK : fc_no_memory(error, u->name);
}

void ticket_write(fetcher *f, const upload *u, const fc_net_request *request, int answer) {
    fc_notes text = {NULL, 0, 0};
    fc_error error;
    fc_code rc = write_ticket(u, request->part, &text, &error);
    if (rc == FC_OK && text.size > request->length) {
        rc = fc_fail(&error, FC_EUNSUPPORTED, "%s: the ETags of its parts are too long", u->name);
    }
    if (rc != FC_OK) {
        fetcher_send_error(f, answer, &error);
    } else {
        fetcher_send(f, answer, (fc_net_answer){.kind = FC_NET_DATA, .size = text.size}, text.data, text.size);
        fetcher_send(f, answer, (fc_net_answer){.kind = FC_NET_DONE, .size = text.size}, NULL, 0);
    }
    fetcher_close(f, answer);
    free(text.data);
}

/* ---- an upload that another process has begun ---- */

void upload_adopt(fetcher *f, const fc_net_request *request, int answer, int socket) {
    upload *u = upload_new(request, NULL);
    if (!u || !fetcher_add_file(f, (opened_file){socket, NULL, u})) {
        fc_error error;
        (void)fc_no_memory(&error, request->name);
        fetcher_send_error(f, answer, &error);
        close(socket);
        if (u) {
            upload_release(f, u);
        }
    } else {
        u->open = true;
        fetcher_send(f, answer, (fc_net_answer){.kind = FC_NET_DONE}, NULL, 0);
    }
    fetcher_close(f, answer);
}

/* Cuts the first line off. @return NULL: there is none */
static char *cut_line(char **text, size_t most) {
    char *line = *text, *end = strchr(line, '\n');
    if (!end || end == line || (size_t)(end - line) > most) {
        return NULL;
    }
    *end = '\0';
    *text = end + 1;
    return is_line(line) ? line : NULL;
}

/* @return false: it is no line about a part, or memory is short */
static bool take_part(upload *u, unsigned number, const char *line) {
    char *end = NULL;
    const uint64_t size = isdigit((unsigned char)*line) ? strtoull(line, &end, 10) : 0;
    if (!end || *end != ' ' || !end[1]) {
        return false;
    }
    return upload_keep_part(u, number, strdup(end + 1), size);
}

static fc_code read_ticket(upload *u, char *text, unsigned parts, fc_error *error) {
    const char *id = cut_line(&text, FC_NET_MOST_ID);
    if (!id || parts > MOST_PARTS) {
        return fail_to_understand(u, error);
    }
    for (unsigned i = 0; i < parts; i++) {
        const char *line = cut_line(&text, MOST_ETAG + 32);
        if (!line || strlen(line) >= MOST_ETAG + 22 || !take_part(u, i + 1, line)) {
            return fail_to_understand(u, error);
        }
    }
    u->id = *text ? NULL : strdup(id); /* with it, the upload is one that can be completed and aborted */
    return u->id ? FC_OK : fail_to_understand(u, error);
}

void ticket_take(fetcher *f, upload *u, const fc_net_request *request, int answer, int file) {
    fc_error error;
    const size_t size = (size_t)request->length;
    char *text = size <= FC_NET_MOST_TICKET ? malloc(size + 1) : NULL;
    fc_code rc;
    if (!text) {
        rc = fc_no_memory(&error, u->name);
    } else if (u->id || file < 0 || pread(file, text, size, 0) != (ssize_t)size) {
        rc = fail_to_understand(u, &error);
    } else {
        text[size] = '\0';
        rc = read_ticket(u, text, request->part, &error);
    }
    if (rc != FC_OK) {
        fetcher_send_error(f, answer, &error);
    } else {
        fetcher_send(f, answer, (fc_net_answer){.kind = FC_NET_DONE}, NULL, 0);
    }
    fetcher_close(f, answer);
    free(text);
}
