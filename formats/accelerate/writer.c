/*
 * Writes the folders that accelerate's load_state takes: one DCP checkpoint for each model and one for each optimizer,
 * every one by DCP's own writer. Each of these writers has a target of its own: the values of its section, under the
 * names that they have in its folder.
 */
#include "accelerate/accelerate.h"

#include "dcp/writer.h"
#include "fsdpckpt/try.h"
#include "io/path.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- the sections ---- */

/* State while every value gets its section. */
typedef struct sorting {
    const char *spelled[ACCELERATE_SECTIONS]; /* a name of each section */
    const char *outsider;                     /* the first of them; NULL: there is none */
    size_t outsiders;
    bool model, optimizer; /* whether there are values of any */
} sorting;

/* Two spellings of one section could give two values one name. */
static fc_code sort_value(sorting *s, fc_target_tensor *t, fc_error *err) {
    char folder[ACCELERATE_NAME];
    size_t length;
    if (!fc_accelerate_section(t->name, &t->section, &length)) {
        s->outsider = s->outsider ? s->outsider : t->name;
        s->outsiders++;
        return FC_OK;
    }
    const char **spelled = &s->spelled[t->section];
    *spelled = *spelled ? *spelled : t->name;
    *(t->section % ACCELERATE_KINDS == ACCELERATE_OPTIMIZER ? &s->optimizer : &s->model) = true;
    if (strncmp(*spelled, t->name, length + 1) != 0) {
        fc_accelerate_folder(t->section, folder);
        return fc_fail(err, FC_EUSAGE, "%.256s and %.256s would both be in %s: use only one of these spellings",
                       *spelled, t->name, folder);
    }
    return FC_OK;
}

/* Accelerate looks for its models by number, and for a model of each optimizer. */
static fc_code check_models(const sorting *s, fc_error *err) {
    char folder[ACCELERATE_NAME];
    for (uint32_t section = 0; section < ACCELERATE_SECTIONS; section++) {
        uint32_t model = section - section % ACCELERATE_KINDS,
                 before = model == section && section > 0 ? section - 2 : 0;
        if (s->spelled[section] && !(s->spelled[model] && s->spelled[before])) {
            fc_accelerate_folder(s->spelled[model] ? before : model, folder);
            return fc_fail(err, FC_EUSAGE, "%.256s needs a model in %s, but there are no values of that model",
                           s->spelled[section], folder);
        }
    }
    return FC_OK;
}

fc_code fc_accelerate_set_sections(fc_target_tensor *tensors, size_t count, fc_error *err) {
    sorting s = {0};
    for (size_t i = 0; i < count; i++) {
        FC_TRY(sort_value(&s, &tensors[i], err));
    }
    if (s.outsiders == 0) {
        return check_models(&s, err);
    }
    fc_code rc = fc_fail(err, FC_EUSAGE,
                         "accelerate keeps only model.* and optimizer.* (or optim.*); %zu of the %zu values %s "
                         "neither, such as %.256s",
                         s.outsiders, count, s.outsiders == 1 ? "is" : "are", s.outsider);
    if (s.optimizer) {
        return s.model ? fc_advise(err, rc, FC_HINT_SELECT_STATE, NULL) : rc;
    }
    return fc_advise(err, rc, FC_HINT_MODEL_PREFIX, s.model ? "model*.*" : NULL);
}

const char *fc_accelerate_name_as_read(const fc_target_tensor *tensor, fc_arena *arena) {
    uint32_t section = 0;
    size_t length = 0;
    fc_accelerate_section(tensor->name, &section, &length); /* set_sections has found one for each value */
    const char *head = fc_accelerate_own_head(arena, section);
    return head ? fc_arena_printf(arena, "%s%s", head, tensor->name + length) : NULL;
}

/* ---- what there will be ---- */

bool fc_accelerate_is_directory(const fc_target *target) {
    (void)target;
    return true;
}

const char *fc_accelerate_index(const fc_target *target) {
    return fc_dcp_index(target);
}

/* The index of the first value after the section of value `first`. */
static size_t end_of_section(const fc_target *target, size_t first) {
    size_t end = first;
    while (end < target->ntensors && target->tensors[end].section == target->tensors[first].section) {
        end++;
    }
    return end;
}

/* Only rank 0 has objects, so another rank has no file of a section without tensors. If no section has any, it has an
   empty one of the first. */
size_t fc_accelerate_files(const fc_target *target) {
    size_t ranks = (size_t)fc_mesh_ranks(target->mesh), files = 0, idle = ranks - 1;
    for (size_t first = 0, end; first < target->ntensors; first = end) {
        bool tensors = false;
        end = end_of_section(target, first);
        for (size_t i = first; i < end && !tensors; i++) {
            tensors = !target->tensors[i].source->object;
        }
        files += tensors ? ranks : 1;
        idle = tensors ? 0 : idle;
    }
    return files + idle;
}

/* ---- the writer ---- */

typedef struct section {
    fc_target target; /* of the section alone */
    fc_writer dcp;
    uint32_t first; /* index of its first value in the whole target */
} section;

typedef struct accelerate_writer {
    fc_arena *arena;
    section *sections;
    size_t nsections;
} accelerate_writer;

/* The values of a section under the names that they have in its folder. */
static fc_code rename_values(accelerate_writer *w, section *p, fc_error *err) {
    fc_target_tensor *tensors = fc_arena_calloc(w->arena, p->target.ntensors, sizeof *tensors);
    uint32_t number;
    size_t length;
    for (size_t i = 0; tensors && i < p->target.ntensors; i++) {
        fc_target_tensor *t = &tensors[i];
        *t = p->target.tensors[i];
        const char *head = fc_accelerate_head(t->section);
        if (fc_accelerate_section(t->name, &number, &length) &&
            !fc_accelerate_rename(w->arena, length, head, &t->name, &t->path)) {
            tensors = NULL;
        }
    }
    p->target.tensors = tensors;
    return tensors ? FC_OK : fc_no_memory(err, p->target.source->path);
}

static fc_code add_section(accelerate_writer *w, const fc_target *target, const char *staging, size_t first,
                           fc_error *err) {
    char folder[ACCELERATE_NAME];
    section *p = &w->sections[w->nsections++];
    p->first = (uint32_t)first;
    p->target = *target;
    p->target.tensors += first;
    p->target.ntensors = end_of_section(target, first) - first;
    fc_accelerate_folder(p->target.tensors[0].section, folder);
    FC_TRY(rename_values(w, p, err));
    const char *path = fc_arena_printf(w->arena, "%s/%s", staging, folder);
    FC_NEED(path, err, staging);
    if (fc_mkdir(path) != 0) {
        return fc_fail_errno(err, errno, "%s: cannot be created", path);
    }
    return fc_dcp_create(&p->target, path, &p->dcp, err);
}

fc_code fc_accelerate_create(const fc_target *target, const char *staging, fc_writer *writer, fc_error *err) {
    accelerate_writer *w = calloc(1, sizeof *w);
    writer->state = w;
    FC_NEED(w && (w->arena = fc_arena_new()), err, staging);
    w->sections = fc_arena_calloc(w->arena, ACCELERATE_SECTIONS, sizeof *w->sections);
    FC_NEED(w->sections, err, staging);
    for (size_t first = 0; first < target->ntensors; first = end_of_section(target, first)) {
        FC_TRY(add_section(w, target, staging, first, err));
    }
    return FC_OK;
}

/* The section of a value. */
static section *section_of(const accelerate_writer *w, uint32_t tensor) {
    size_t i = w->nsections > 0 ? w->nsections - 1 : 0;
    while (i > 0 && tensor < w->sections[i].first) {
        i--;
    }
    return &w->sections[i];
}

/* Items count the values of the whole target, and DCP's writer those of its own. */
static void shift(const fc_target_file *file, uint32_t from, uint32_t to) {
    for (size_t i = 0; i < file->nitems; i++) {
        file->items[i].tensor = file->items[i].tensor - from + to;
    }
}

/* The engine gives each file the values of one section. */
fc_code fc_accelerate_reserve(fc_writer *writer, fc_target_file *file, fc_error *err) {
    section *p = section_of(writer->state, file->nitems > 0 ? file->items[0].tensor : 0);
    shift(file, p->first, 0);
    fc_code rc = fc_dcp_reserve(&p->dcp, file, err);
    shift(file, 0, p->first);
    return rc;
}

fc_code fc_accelerate_finish_item(fc_writer *writer, const fc_target_item *item, int fd, fc_error *err) {
    section *p = section_of(writer->state, item->tensor);
    fc_target_item own = *item;
    own.tensor -= p->first;
    return fc_dcp_finish_item(&p->dcp, &own, fd, err);
}

fc_code fc_accelerate_finish(fc_writer *writer, const uint64_t *digests, fc_error *err) {
    const accelerate_writer *w = writer->state;
    for (size_t i = 0; i < w->nsections; i++) {
        FC_TRY(fc_dcp_finish(&w->sections[i].dcp, digests + w->sections[i].first, err));
    }
    return FC_OK;
}

void fc_accelerate_destroy(fc_writer *writer) {
    accelerate_writer *w = writer->state;
    if (w) {
        for (size_t i = 0; i < w->nsections; i++) {
            fc_dcp_destroy(&w->sections[i].dcp);
        }
        fc_arena_free(w->arena);
        free(w);
        writer->state = NULL;
    }
}
