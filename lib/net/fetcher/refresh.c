/*
 * Forgets what is known of a name that a person gives again: it may be there now, or be another version. What is open
 * or is asked for stays as it is. See fetcher.h.
 */
#include "net/fetcher/fetcher.h"

#include <stdlib.h>
#include <string.h>

/* Whether one of the names is in the other one, or they are the same. */
static bool are_related(const char *a, const char *b) {
    const size_t n = strlen(a), m = strlen(b), least = n < m ? n : m;
    return strncmp(a, b, least) == 0 && (n == m || (n > m ? a[m] : b[n]) == '/');
}

static bool is_outdated(knowledge state, int64_t known_since, int64_t fresh_ms) {
    return state != STATE_NEW && state != STATE_ASKED && fetcher_now() - known_since > fresh_ms;
}

static bool object_is_used(const fetcher *f, const object *o) {
    bool is = o->waiters != NULL;
    for (size_t i = 0; i < f->nfiles && !is; i++) {
        is = f->files[i].socket >= 0 && f->files[i].object == o;
    }
    for (const transfer *t = f->transfers; t && !is; t = t->next) {
        is = t->object == o;
    }
    return is;
}

static bool folder_is_used(const fetcher *f, const folder *d) {
    bool is = d->waiters != NULL;
    for (const transfer *t = f->transfers; t && !is; t = t->next) {
        is = t->folder == d;
    }
    return is;
}

static void free_object(fetcher *f, object *o) {
    f->heads -= o->head_size;
    free(o->head);
    free(o->direct);
    free(o->name);
    free(o);
}

static void free_folder(folder *d) {
    for (size_t i = 0; i < d->count; i++) {
        free(d->entries[i].name);
    }
    free(d->entries);
    free(d->name);
    free(d);
}

static void forget_objects(fetcher *f, const char *name, int64_t fresh_ms) {
    for (object **at = &f->objects; *at;) {
        object *o = *at;
        o->forgotten = o->forgotten || (are_related(o->name, name) && is_outdated(o->state, o->known_since, fresh_ms));
        if (o->forgotten && !object_is_used(f, o)) {
            *at = o->next;
            free_object(f, o);
        } else {
            at = &o->next;
        }
    }
}

static void forget_folders(fetcher *f, const char *name, int64_t fresh_ms) {
    for (folder **at = &f->folders; *at;) {
        folder *d = *at;
        d->forgotten = d->forgotten || (are_related(d->name, name) && is_outdated(d->state, d->known_since, fresh_ms));
        if (d->forgotten && !folder_is_used(f, d)) {
            *at = d->next;
            free_folder(d);
        } else {
            at = &d->next;
        }
    }
}

/* Hosts without an address; the network may be there now. */
static void forget_hosts(fetcher *f) {
    for (host_line **at = &f->hosts; *at;) {
        host_line *h = *at;
        if (!host_has_address(h->line)) {
            *at = h->next;
            free(h->line);
            free(h);
        } else {
            at = &h->next;
        }
    }
}

void fetcher_forget(fetcher *f, const char *name) {
    forget_hosts(f);
    forget_folders(f, name, FRESH_MS);
    forget_objects(f, name, FRESH_MS);
}

void fetcher_forget_now(fetcher *f, const char *name) {
    forget_folders(f, name, -1);
    forget_objects(f, name, -1);
}
