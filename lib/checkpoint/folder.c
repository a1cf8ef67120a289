/*
 * Lists the checkpoints in a directory and decides which one is read: see folder.h.
 */
#include "checkpoint/folder.h"

#include "base/file_name.h"
#include "base/name_table.h"
#include "checkpoint/other_files.h"
#include "fsdpckpt/try.h"
#include "io/directory.h"
#include "io/file.h"
#include "io/path.h"

#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEAD_SIZE = 4096, MOST_NAMED = 6, TEXT_SIZE = 512 };

/* How far a search below a directory goes. */
enum { MOST_LOOKED = 10000, MOST_DEPTH = 3 };

/* ---- recognising ---- */

fc_code fc_read_head(const char *path, unsigned char *head, size_t *size, fc_error *err) {
    int fd;
    uint64_t total;
    FC_TRY(fc_open_input(path, &fd, &total, err));
    *size = total < *size ? (size_t)total : *size;
    fc_code rc = fc_pread_full(fd, head, *size, 0, path, err);
    close(fd);
    return rc;
}

const fc_format *fc_recognise_file(const char *path, const unsigned char *head, size_t size) {
    const fc_probe probe = {path, head, size};
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        if ((*f)->reader.probe && (*f)->reader.probe(&probe)) {
            return *f;
        }
    }
    return NULL;
}

/* Returns the format of `path`, a directory entry called `name`, if it is a checkpoint on its own, or NULL. */
static const fc_format *format_of(const char *path, const char *name) {
    unsigned char head[HEAD_SIZE];
    size_t size = sizeof head;
    const fc_format *format = NULL;
    struct stat st;
    if (fc_stat(path, &st) != 0) {
        return NULL;
    }
    if (S_ISREG(st.st_mode) &&
        (fc_holds_data(name) || fc_ends_with(name, ".h5") || fc_ends_with(name, ".keras") ||
         fc_ends_with(name, ".weights.json")) &&
        !fc_ends_with(name, ".distcp")) {
        return fc_read_head(path, head, &size, NULL) == FC_OK ? fc_recognise_file(path, head, size) : NULL;
    }
    if (S_ISDIR(st.st_mode)) {
        fc_listing listing = {.arena = fc_arena_new()};
        fc_error ignored; /* the caller names what can be read */
        if (listing.arena && fc_folder_list(path, NULL, &listing, &ignored) == FC_OK && listing.count > 0) {
            format = listing.items[0].format;
        }
        fc_arena_free(listing.arena);
    }
    return format;
}

/* ---- listing ---- */

fc_code fc_listing_add(fc_listing *l, const char *name, const char *file, fc_listed_role role, fc_error *err) {
    for (size_t i = 0; i < l->count; i++) {
        if (strcmp(l->items[i].name, name) == 0) {
            return FC_OK;
        }
    }
    if (l->count == l->capacity) {
        const size_t capacity = l->capacity ? 2 * l->capacity : 8;
        fc_listed *items = fc_arena_calloc(l->arena, capacity, sizeof *items);
        FC_NEED(items, err, name);
        if (l->count > 0) {
            memcpy(items, l->items, l->count * sizeof *items);
        }
        l->items = items;
        l->capacity = capacity;
    }
    const fc_listed item = {l->format, fc_arena_strndup(l->arena, name, strlen(name)),
                            fc_arena_strndup(l->arena, file, strlen(file)), role};
    l->items[l->count++] = item;
    return item.name && item.file ? FC_OK : fc_no_memory(err, name);
}

fc_code fc_folder_list(const char *directory, const fc_format *only, fc_listing *out, fc_error *err) {
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        if ((*f)->reader.list && (!only || only == *f)) {
            out->format = *f;
            err->code = FC_OK;
            FC_TRY((*f)->reader.list(directory, out, err));
        }
    }
    return FC_OK;
}

/* ---- texts ---- */

void fc_append_name(char *text, size_t size, const char *separator, const char *name) {
    size_t used = strlen(text);
    snprintf(text + used, size - used, "%s%s", used ? separator : "", name);
}

/* The first few names of a list, as a message shows them. */
typedef struct shown_names {
    char text[TEXT_SIZE];
    char first[NAME_MAX + 1];
    size_t count;
} shown_names;

static void add_name(shown_names *list, const char *name, const fc_format *format) {
    char item[NAME_MAX + 64];
    if (list->count++ == 0) {
        snprintf(list->first, sizeof list->first, "%s", name);
    }
    if (list->count <= MOST_NAMED) {
        snprintf(item, sizeof item, "%.60s (%s)", name, format->name);
        fc_append_name(list->text, sizeof list->text, ", ", item);
    }
}

static void end_names(shown_names *list) {
    char rest[48];
    if (list->count > MOST_NAMED) {
        snprintf(rest, sizeof rest, " and %zu more", list->count - MOST_NAMED);
        fc_append_name(list->text, sizeof list->text, "", rest);
    }
}

/* ---- choosing ---- */

/* Whether a checkpoint is a link to another one, as Composer's latest-rank0.pt is to the last checkpoint. */
static bool is_alias(const char *directory, const fc_listing *l, size_t index) {
    char path[PATH_MAX];
    struct stat link, own, other;
    bool is = false;
    if (snprintf(path, sizeof path, "%s/%s", directory, l->items[index].file) >= PATH_MAX ||
        fc_lstat(path, &link) != 0 || !S_ISLNK(link.st_mode) || fc_stat(path, &own) != 0) {
        return false;
    }
    for (size_t i = 0; i < l->count && !is; i++) {
        is = i != index && snprintf(path, sizeof path, "%s/%s", directory, l->items[i].file) < PATH_MAX &&
             fc_lstat(path, &other) == 0 && other.st_dev == own.st_dev && other.st_ino == own.st_ino;
    }
    return is;
}

/* Returns the checkpoint that goes before all others, or NULL. */
static const fc_listed *find_first(const char *directory, const fc_listing *l) {
    const fc_listed *best = NULL;
    bool only = true;
    size_t others = 0;
    for (size_t i = 0; i < l->count; i++) {
        const fc_listed *item = &l->items[i];
        if (l->count > 1 && is_alias(directory, l, i)) {
            continue;
        }
        others += item->role == FC_LISTED_OTHER;
        if (!best || item->role < best->role) {
            best = item;
            only = true;
        } else {
            only = only && item->role != best->role;
        }
    }
    const bool first = best && only && (best->role == FC_LISTED_TRAINING || others == (best->role == FC_LISTED_OTHER));
    return first ? best : NULL;
}

static fc_code fail_several(const char *directory, const fc_listing *l, const char *wanted, fc_error *err) {
    shown_names names = {.count = 0};
    for (size_t i = 0; i < l->count; i++) {
        add_name(&names, l->items[i].name, l->items[i].format);
    }
    end_names(&names);
    if (wanted) {
        return fc_fail(err, FC_ECORRUPT, "%s/%s: no such checkpoint; the directory has %s", directory, wanted,
                       names.text[0] ? names.text : "none");
    }
    return fc_fail(err, FC_EUSAGE,
                   "%s: the directory has %zu checkpoints, and no rule says which one is meant: %s; give the path of "
                   "one of them, such as '%s/%s'",
                   directory, l->count, names.text, directory, names.first);
}

fc_code fc_folder_choose(const char *directory, const fc_listing *listing, const char *wanted, const fc_listed **out,
                         fc_error *err) {
    *out = NULL;
    for (size_t i = 0; wanted && i < listing->count; i++) {
        *out = strcmp(listing->items[i].name, wanted) == 0 ? &listing->items[i] : *out;
    }
    if (!wanted) {
        *out = find_first(directory, listing);
    }
    return *out || (!wanted && listing->count == 0) ? FC_OK : fail_several(directory, listing, wanted, err);
}

/* ---- what is not read ---- */

/* Notes the entries of the directory that the files of the checkpoint are or are in. */
static fc_name_table *used_entries(const fc_checkpoint *checkpoint, const char *directory, fc_arena *arena) {
    const size_t n = strlen(directory);
    fc_name_table *used = fc_name_table_new(arena, checkpoint->nfiles + 1);
    for (size_t i = 0; used && i < checkpoint->nfiles; i++) {
        const char *entry = checkpoint->files[i].path + n;
        if (strncmp(checkpoint->files[i].path, directory, n) == 0) {
            entry += strspn(entry, "/");
            fc_name_table_put(used, entry, strcspn(entry, "/"), i);
        }
    }
    return used;
}

static bool is_used(const fc_name_table *used, const char *entry) {
    return fc_name_table_find(used, entry, strlen(entry)) != FC_NO_NAME;
}

/* What trainers write next to a checkpoint, apart from tensors of the model. */
static bool is_run_state(const char *name) {
    static const char *const starts[] = {"optim",         "sched", "lr_sched", "training_args", "rng",
                                         "random_states", "train", "scal",     "sampler",       "dl_state",
                                         "meta",          "args",  "data",     "extra",         "custom_checkpoint"};
    bool is = false;
    for (size_t i = 0; i < sizeof starts / sizeof *starts && !is; i++) {
        is = strncmp(name, starts[i], strlen(starts[i])) == 0;
    }
    return is;
}

/* Whether an entry is a file of the index `name`: model-00001-of-00002.safetensors of model.safetensors.index.json. */
static bool is_indexed(const char *name, const char *entry) {
    char glob[NAME_MAX + 2];
    const char *end = fc_is_index_of(name, "") ? strstr(name, ".index.") : NULL, *extension = end;
    while (extension && extension > name && *--extension != '.') {
    }
    if (!end) {
        return false;
    }
    snprintf(glob, sizeof glob, "%.*s*%.*s", (int)(extension - name), name, (int)(end - extension), extension);
    return fnmatch(glob, entry, 0) == 0;
}

/* Whether an entry of the directory belongs to a listed checkpoint, which the note already names. */
static bool is_listed(const fc_listing *l, const char *entry) {
    bool is = false;
    for (size_t i = 0; i < l->count && !is; i++) {
        const fc_listed *item = &l->items[i];
        is = strcmp(item->file, entry) == 0 || fnmatch(item->name, entry, 0) == 0 || is_indexed(item->name, entry);
    }
    return is;
}

static void add_entry(const char *directory, const fc_listing *l, const fc_name_table *used, const char *entry,
                      shown_names *left) {
    char path[PATH_MAX];
    if (entry[0] == '.' || left->count > MOST_NAMED || is_used(used, entry) || is_run_state(entry) ||
        is_listed(l, entry) || snprintf(path, sizeof path, "%s/%s", directory, entry) >= PATH_MAX) {
        return;
    }
    const fc_format *format = format_of(path, entry);
    if (format) {
        add_name(left, entry, format);
    }
}

/* Lists what is not read: listed checkpoints whose files are not used, then files and folders that are one. */
static void list_left(const char *directory, const fc_listing *l, const fc_listed *chosen, const fc_name_table *used,
                      shown_names *left) {
    fc_entry_names entries;
    for (size_t i = 0; i < l->count; i++) {
        if (&l->items[i] != chosen && !is_used(used, l->items[i].file)) {
            add_name(left, l->items[i].name, l->items[i].format);
        }
    }
    (void)fc_dir_names(directory, &entries, NULL); /* an error: what is listed is named */
    for (size_t i = 0; i < entries.count; i++) {
        add_entry(directory, l, used, entries.names[i], left);
    }
    fc_entry_names_free(&entries);
    end_names(left);
}

fc_code fc_folder_report(const fc_checkpoint *checkpoint, const char *directory, const fc_listing *listing,
                         const fc_listed *chosen, const fc_reporter *reporter, fc_error *err) {
    shown_names left = {.count = 0};
    fc_error line;
    const fc_name_table *used = used_entries(checkpoint, directory, listing->arena);
    FC_NEED(used, err, checkpoint->path);
    list_left(directory, listing, chosen, used, &left);
    if (left.count > 0) {
        fc_fail(&line, FC_OK, "%s: reads %.60s, and not %s; to read another, give its path, such as '%s/%s'", directory,
                chosen->name, left.text, directory, left.first);
        reporter->report(reporter->context, line.message);
    }
    return FC_OK;
}

/* ---- below ---- */

/* Whether an entry holds what trainers write next to a model, whatever it is in: optimizer/, train/rank0.pt,
 * recipe_state.pt.
 */
static bool is_beside_model(const char *name) {
    static const char *const starts[] = {
        "optim",   "sched",    "lr_sched",          "training_args", "random_states", "rng_",         "scaler",
        "sampler", "dl_state", "custom_checkpoint", "extra_state",   "dataloader",    "pytorch_optim"};
    static const char *const stems[] = {"train",  "trainer",       "data",         "meta",           "args",
                                        "random", "trainer_state", "recipe_state", "running_states", "data_reader",
                                        "rng",    "train_state",   "extra"};
    const size_t n = strcspn(name, ".");
    bool is = false;
    for (size_t i = 0; i < sizeof starts / sizeof *starts && !is; i++) {
        is = strncmp(name, starts[i], strlen(starts[i])) == 0;
    }
    for (size_t i = 0; i < sizeof stems / sizeof *stems && !is; i++) {
        is = strlen(stems[i]) == n && strncmp(name, stems[i], n) == 0;
    }
    return is;
}

/* Whether the name of a file says that it is one of several. */
static bool is_part(const char *name) {
    static const char *const signs[] = {"rank", "shard", "part", "stage",        "layer",
                                        "zero", "-of-",  "_of_", "consolidated."};
    bool is = false;
    for (size_t i = 0; i < sizeof signs / sizeof *signs && !is; i++) {
        is = strstr(name, signs[i]) != NULL;
    }
    return is;
}

/* Whether a file is what a training of LitGPT adds to the model next to it: lit_model.pth.lora, which merge_lora has
 * merged into lit_model.pth. */
static bool is_adapter_of_other(const char *path) {
    const char *end = strstr(fc_base_name(path), ".pth.");
    char model[PATH_MAX];
    struct stat st;
    return end && snprintf(model, sizeof model, "%.*s", (int)(end - path) + 4, path) < PATH_MAX &&
           fc_stat(model, &st) == 0 && S_ISREG(st.st_mode);
}

/* A search in progress. */
typedef struct search {
    fc_inner *out;
    fc_arena *arena;
    const char *root; /* where the search began */
    size_t looked;    /* entries so far */
} search;

static bool add_inner(const search *s, const char *path, bool model) {
    const char *copy = fc_arena_strndup(s->arena, path, strlen(path));
    if (s->out->count < FC_MOST_INNER) {
        s->out->paths[s->out->count] = copy;
    }
    s->out->count++;
    if (is_adapter_of_other(path)) {
        s->out->adapter = s->out->adapter ? s->out->adapter : copy;
    } else if (model) {
        s->out->model = s->out->model ? s->out->model : copy;
        s->out->models++;
    }
    return copy != NULL;
}

/* Whether a link leads to something else in the directory, which is found there: a trainer's link to the last step. */
static bool leads_into(const char *root, const char *path) {
    char whole[PATH_MAX], target[PATH_MAX];
    const char *real = fc_realpath(root, whole);
    const size_t n = real ? strlen(real) : 0;
    return real && fc_realpath(path, target) && strncmp(target, real, n) == 0 && target[n] == '/';
}

/* Whether a file in the directory says which step is the last one. If that step cannot be read, no other one is meant.
 */
static bool names_a_step(const char *directory) {
    static const char *const names[] = {"latest", "latest_checkpointed_iteration.txt"};
    bool is = false;
    for (size_t i = 0; i < sizeof names / sizeof *names && !is; i++) {
        char path[PATH_MAX];
        struct stat st;
        is = snprintf(path, sizeof path, "%s/%s", directory, names[i]) < PATH_MAX && fc_lstat(path, &st) == 0 &&
             S_ISREG(st.st_mode);
    }
    return is;
}

/* Looks at the entries of `directory`, and of the folders in it that are no checkpoints. @return false: out of memory.
 */
static bool look_below(search *s, const char *directory, int depth) { // NOLINT(misc-no-recursion): few levels
    fc_entry_names entries;
    bool good = true;
    if (names_a_step(directory)) {
        return true;
    }
    (void)fc_dir_names(directory, &entries, NULL); /* an error: nothing is found there */
    for (size_t i = 0; i < entries.count; i++) {
        const char *name = entries.names[i];
        char path[PATH_MAX];
        struct stat st;
        const bool beside = is_beside_model(name);
        if (name[0] != '.' && s->looked++ < MOST_LOOKED && good &&
            snprintf(path, sizeof path, "%s/%s", directory, name) < PATH_MAX && fc_lstat(path, &st) == 0) {
            const bool is = format_of(path, name) != NULL && !(S_ISLNK(st.st_mode) && leads_into(s->root, path));
            s->out->links += is && S_ISLNK(st.st_mode);
            good = !is || add_inner(s, path, !beside && (S_ISDIR(st.st_mode) || !is_part(name)));
            good = good && (is || beside || !S_ISDIR(st.st_mode) || depth == 0 || look_below(s, path, depth - 1));
        }
    }
    fc_entry_names_free(&entries);
    return good;
}

fc_code fc_folder_look_below(const char *directory, fc_arena *arena, fc_inner *out, fc_error *err) {
    search s = {.out = out, .arena = arena, .root = directory};
    *out = (fc_inner){.count = 0};
    FC_NEED(look_below(&s, directory, MOST_DEPTH), err, directory);
    out->all = s.looked < MOST_LOOKED;
    return FC_OK;
}
