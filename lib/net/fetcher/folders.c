/*
 * Folders: see fetcher.h. A web server does not list its folders. So the fetcher asks for files with the usual names of
 * checkpoints, and for those that an index names. Buckets and the hub have lists (lists.c).
 */
#include "net/fetcher/fetcher.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The names that a folder of a web server can have without being in an index. */
static const char *const names[] = {"model.safetensors.index.json",
                                    "model.safetensors",
                                    "config.json",
                                    "adapter_config.json",
                                    "adapter_model.safetensors",
                                    "diffusion_pytorch_model.safetensors.index.json",
                                    "diffusion_pytorch_model.safetensors",
                                    "pytorch_model.bin.index.json",
                                    "pytorch_model.bin",
                                    "pytorch_model_fsdp.bin",
                                    "flax_model.msgpack"};

folder *folder_get(fetcher *f, const char *name, size_t size) {
    folder *d = calloc(1, sizeof *d);
    char *copy = strndup(name, size);
    if (!d || !copy) {
        free(d);
        free(copy);
        return NULL;
    }
    d->name = copy;
    d->next = f->folders;
    f->folders = d;
    return d;
}

folder *folder_of(const fetcher *f, const char *name, const char **rest) {
    folder *best = NULL;
    size_t length = 0;
    for (folder *d = f->folders; d; d = d->next) {
        const size_t n = strlen(d->name);
        if (!d->forgotten && n > length && strncmp(d->name, name, n) == 0 && (name[n] == '/' || name[n] == '\0')) {
            best = d;
            length = n;
            *rest = name[n] == '/' ? name + n + 1 : name + n;
        }
    }
    return best;
}

bool folder_add(folder *d, const char *name) {
    if (d->count == d->capacity) {
        const size_t capacity = d->capacity ? 2 * d->capacity : 32;
        entry *more = realloc(d->entries, capacity * sizeof *more);
        if (!more) {
            return false;
        }
        d->entries = more;
        d->capacity = capacity;
    }
    d->entries[d->count].name = strdup(name);
    d->bytes += strlen(name) + 1;
    return d->entries[d->count].name && ++d->count;
}

static bool has_entry(const folder *d, const char *name) {
    bool has = false;
    for (size_t i = 0; i < d->count && !has; i++) {
        has = strcmp(d->entries[i].name, name) == 0;
    }
    return has;
}

static object *object_in(fetcher *f, const folder *d, const char *name) {
    char whole[FC_NET_MOST_NAME + 1];
    return snprintf(whole, sizeof whole, "%s/%s", d->name, name) < (int)sizeof whole ? object_get(f, whole) : NULL;
}

void folder_end(fetcher *f, folder *d, const fc_error *error) {
    if (d->state != STATE_ASKED) {
        return;
    }
    d->known_since = fetcher_now();
    d->state = error ? STATE_FAILED : d->count > 0 ? STATE_READY : STATE_MISSING;
    if (error) {
        d->error = *error;
    }
    waiter *first = d->waiters;
    d->waiters = NULL;
    waiters_retry(f, first);
}

/* Adds the name of a file once. Its head is asked for at once. @param known names that were added; has this one after
 */
static bool take_indexed(fetcher *f, folder *d, const char *name, json_t *known) {
    if (!*name || strchr(name, '/') || d->count >= MOST_INDEXED || json_object_get(known, name)) {
        return true;
    }
    if (json_object_set_new(known, name, json_true()) != 0 || !folder_add(d, name)) {
        return false;
    }
    object *shard = d->count < MOST_AHEAD && name_has_data(name) ? object_in(f, d, name) : NULL;
    if (shard && shard->state == STATE_NEW) {
        object_open(f, shard, NULL, -1);
    }
    return true;
}

/* The names of files in an index become entries. */
static bool take_index(fetcher *f, folder *d, const object *o) {
    json_error_t ignored;
    json_t *index = json_loadb((const char *)o->head, o->head_size, 0, &ignored);
    json_t *map = json_object_get(index, "weight_map"), *known = json_object(), *file;
    const char *key;
    bool good = known != NULL;
    for (size_t i = 0; i < d->count && good; i++) {
        good = json_object_set_new(known, d->entries[i].name, json_true()) == 0;
    }
    json_object_foreach(map, key, file) {
        const char *name = json_string_value(file);
        good = good && (!name || take_indexed(f, d, name, known));
    }
    json_decref(known);
    json_decref(index);
    return good;
}

static bool is_index(const char *name) {
    static const char extension[] = ".index.json";
    const size_t n = strlen(name), e = sizeof extension - 1;
    return n > e && strcmp(name + n - e, extension) == 0;
}

/* The rest of a long index comes as a page. @return whether it is asked for */
static bool ask_for_rest(fetcher *f, folder *d, object *o) {
    char url[MOST_URL];
    if (o->head_size >= o->version.size || o->version.size > MOST_PAGE || !name_url(f, o->name, url)) {
        return false;
    }
    transfer *t = transfer_new(f, FOR_PAGE, url);
    if (t) {
        t->folder = d;
        t->object = o;
        d->pending++;
    }
    return t != NULL;
}

static void count_down(fetcher *f, folder *d) {
    if (--d->pending == 0) {
        folder_end(f, d, NULL);
    }
}

void folder_object_known(fetcher *f, folder *d, object *o) {
    const char *name = o->name + strlen(d->name) + 1;
    if (o->state == STATE_FAILED) {
        folder_end(f, d, &o->error);
    } else if (o->state == STATE_READY) {
        fc_error error;
        const bool good = (has_entry(d, name) || folder_add(d, name)) &&
                          (!is_index(name) || ask_for_rest(f, d, o) || take_index(f, d, o));
        if (!good) {
            (void)fc_no_memory(&error, d->name);
            folder_end(f, d, &error);
        }
    }
    count_down(f, d);
}

void folder_open(fetcher *f, folder *d, int reply) {
    d->state = STATE_ASKED;
    if (name_provider(d->name) != PROVIDER_HTTP) {
        fc_error error;
        (void)fc_fail(&error, FC_EUNSUPPORTED, "%s: the name is too long", d->name);
        if (!list_ask(f, d, "")) {
            folder_end(f, d, &error);
        }
        return;
    }
    d->pending = 1; /* until all have been asked for */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        object *o = object_in(f, d, names[i]);
        if (o && o->state == STATE_NEW) {
            d->pending++;
            object_open(f, o, d, reply);
        } else if (o && o->state == STATE_READY) {
            d->pending++;
            folder_object_known(f, d, o);
        }
    }
    count_down(f, d);
}

void folder_page_done(fetcher *f, folder *d, transfer *t) {
    fc_error error = t->error;
    if (!t->object) {
        if (error.code != FC_OK || !list_take(f, d, t, &error)) {
            folder_end(f, d, &error);
        }
        return;
    }
    object whole = {.name = t->object->name, .head = t->body, .head_size = (size_t)t->done};
    if (error.code == FC_OK && !take_index(f, d, &whole)) {
        (void)fc_no_memory(&error, d->name);
    }
    if (error.code != FC_OK) {
        folder_end(f, d, &error);
    }
    count_down(f, d);
}

knowledge folder_find(const folder *d, const char *rest, bool *is_folder) {
    const size_t n = strlen(rest);
    *is_folder = n == 0;
    bool found = *is_folder;
    for (size_t i = 0; i < d->count && !found; i++) {
        const char *name = d->entries[i].name;
        found = strncmp(name, rest, n) == 0 && (name[n] == '\0' || name[n] == '/');
        *is_folder = found && name[n] == '/';
    }
    return found ? STATE_READY : STATE_MISSING;
}

void folder_send(fetcher *f, const folder *d, const char *below, int answer) {
    const size_t n = strlen(below);
    const char *last = "";
    size_t last_size = 0;
    for (size_t i = 0; i < d->count; i++) {
        const char *name = d->entries[i].name;
        if (n > 0 && (strncmp(name, below, n) != 0 || name[n] != '/')) {
            continue;
        }
        name += n > 0 ? n + 1 : 0;
        const size_t size = strcspn(name, "/");
        const bool dots = (size == 1 && name[0] == '.') || (size == 2 && name[0] == '.' && name[1] == '.');
        if (size > 0 && size <= FC_NET_MOST_TEXT && !dots && (size != last_size || strncmp(name, last, size) != 0)) {
            fetcher_send(f, answer, (fc_net_answer){.kind = FC_NET_NAME, .text = (uint32_t)size}, name, size);
            last = name;
            last_size = size;
        }
    }
    fetcher_send(f, answer, (fc_net_answer){.kind = FC_NET_DONE}, NULL, 0);
}
