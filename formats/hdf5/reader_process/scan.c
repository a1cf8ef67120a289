/*
 * Walks a file in the reader process: groups, links, attributes. scan_dataset.c describes the datasets.
 *
 * Hard links, and soft links within the file, are followed. A dataset with two names is reported under both (tied
 * tensors). A group that contains itself is entered once on every path. Committed datatypes are ignored.
 */
#include "hdf5/reader_process/scan.h"

#include "hdf5/reader_process/ahead.h"
#include "hdf5/reader_process/ask.h"
#include "hdf5/reader_process/child.h"
#include "hdf5/reader_process/links.h"
#include "hdf5/reader_process/others.h"
#include "hdf5/reader_process/values.h"
#include "hdf5/writer/tree.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_DEPTH = 256, MAX_PATH_BYTES = 256 << 10 };

/* The current position of the walk, and the path to it from the root. */
typedef struct trail {
    fc_h5_walk *walk;
    char *path;
    size_t length;
    unsigned char lists[MAX_DEPTH + 1];
    size_t depth;
    struct {
        unsigned long fileno;
        haddr_t address;
    } groups[MAX_DEPTH + 1];
    unsigned char kind; /* fc_h5_group_kind of the current group */
    uint64_t names;     /* number of names of objects so far; links between groups can make it exponential */
    uint64_t most_names;
} trail;

/* A link takes at least 16 bytes of the file. Only in unusual files do links to groups multiply the number of names.
 * The sizes of other files are unknown. */
static uint64_t most_names(const fc_h5_input *input, bool follow_external) {
    enum { LINK_BYTES = 16, SPARE = 16384, ELSEWHERE = 1000000 };
    uint64_t size = input->st.st_size > 0 ? (uint64_t)input->st.st_size : 0;
    return size / LINK_BYTES + (follow_external ? ELSEWHERE : SPARE);
}

static herr_t innermost(unsigned n, const H5E_error2_t *e, void *data) {
    (void)n;
    if (e->desc && *e->desc) {
        *(const char **)data = e->desc;
    }
    return 1; /* stops at the first message, which is the innermost */
}

void fc_h5_library_error(char *buf, size_t size) {
    const char *text = NULL;
    hid_t stack = H5Eget_current_stack();
    H5Ewalk2(stack, H5E_WALK_UPWARD, innermost, &text);
    snprintf(buf, size, "%s", text ? text : "no reason given");
    H5Eclose_stack(stack);
}

/* Since superblock 2, object headers have checksums, so a version that libhdf5 does not know is not a damaged byte. */
fc_code fc_h5_library_failure(const fc_h5_walk *walk, char *buf, size_t size) {
    fc_h5_library_error(buf, size);
    if (walk->superblock < 2 || strncmp(buf, "bad version number for", 22) != 0) {
        return FC_ECORRUPT;
    }
    const size_t used = strlen(buf);
    snprintf(buf + used, size - used, ": a newer HDF5 wrote it; save it again with libver=(\"earliest\", \"v110\")");
    return FC_EUNSUPPORTED;
}

static const char *prefix(fc_code code) {
    return code == FC_ECORRUPT ? "corrupt HDF5 file: " : "";
}

static void set_where(fc_h5_shared *shared, const char *kind, const char *path) {
    snprintf(shared->where, sizeof shared->where, "%s /%s", kind, path);
    atomic_fetch_add(&shared->beats, 1);
}

void fc_h5_scan_failure(fc_h5_walk *walk, fc_code code, const char *fmt, ...) {
    char text[1024];
    va_list args;
    if (walk->failed) {
        return;
    }
    if (walk->capture && walk->capture->errnum != 0) { /* the file may be good, whatever libhdf5 says */
        code = FC_EIO;
        snprintf(text, sizeof text, "reading failed: %s", strerror(walk->capture->errnum));
    } else {
        va_start(args, fmt);
        vsnprintf(text, sizeof text, fmt, args);
        va_end(args);
    }
    fc_make_utf8(text);
    fc_h5_begin(walk->out, FC_H5_FAILURE);
    fc_h5_put_u64(walk->out, code);
    fc_h5_put_text(walk->out, text);
    fc_h5_end(walk->out);
    walk->failed = true;
}

/* ---- attributes ---- */

typedef struct attributes {
    fc_text text;     /* foreign attributes as JSON */
    uint32_t present; /* the schema's attributes that are present: a set of fc_h5_attribute */
    bool ours;        /* whether the file has our schema */
} attributes;

static herr_t one_attribute(hid_t object, const char *name, const H5A_info_t *info, void *context) {
    attributes *a = context;
    const fc_h5_attribute number = fc_h5_attribute_find(name);
    const bool known = number != FC_H5_A_COUNT;
    (void)info;
    a->present |= known ? UINT32_C(1) << number : 0;
    if (a->ours && known) {
        return 0;
    }
    hid_t attribute = H5Aopen(object, name, H5P_DEFAULT);
    if (attribute < 0) {
        return -1;
    }
    fc_text_raw(&a->text, a->text.size > 0 ? ", " : "{");
    if (fc_is_utf8(name, strlen(name))) {
        fc_text_string(&a->text, name, strlen(name));
    } else {
        char key[32]; /* a JSON key must be text; the number makes it unique */
        snprintf(key, sizeof key, "\"$attribute-%zu\"", a->text.size);
        fc_text_raw(&a->text, key);
    }
    fc_text_raw(&a->text, ": ");
    fc_text_attribute(&a->text, attribute);
    H5Aclose(attribute);
    if (a->text.no_memory) {
        fc_h5_child_no_memory();
    }
    return a->text.failed ? -1 : 0;
}

/* Reads all attributes of an object in one pass. @return false if they cannot be read. */
static bool read_attributes(const fc_h5_walk *walk, hid_t object, attributes *a) {
    hsize_t at = 0;
    *a = (attributes){.ours = walk->ours};
    return H5Aiterate2(object, H5_INDEX_NAME, H5_ITER_INC, &at, one_attribute, a) >= 0 && !a->text.failed;
}

/* Sends the foreign attributes, if there are any. */
static void send_attributes(fc_h5_walk *walk, attributes *a, const char *path) {
    if (a->text.size > 0) {
        fc_text_raw(&a->text, "}");
        fc_h5_begin(walk->out, FC_H5_ATTRIBUTES);
        fc_h5_put_text(walk->out, path);
        fc_h5_put_bytes(walk->out, a->text.data, a->text.size);
        fc_h5_end(walk->out);
    }
}

static const char *name_of(fc_h5_attribute attribute) {
    return fc_h5_attribute_get(attribute)->name;
}

static bool send_root(fc_h5_walk *walk) {
    int64_t schema = 0, mesh[FC_MAX_MESH_DIMS], rank = -1, world = -1;
    fc_h5_root root = {0};
    root.schema = fc_h5_read_i64s(walk->file, name_of(FC_H5_A_SCHEMA), &schema, 1) == 1 ? schema : 0;
    root.schema = root.schema < INT32_MAX ? root.schema : INT32_MAX;
    walk->ours = root.schema != 0;
    root.rank = root.world_size = root.nmesh = -1;
    char *layout = NULL, *producer = NULL, *names = NULL;
    if (walk->ours) {
        layout = fc_h5_attribute_text(walk->file, name_of(FC_H5_A_LAYOUT));
        producer = fc_h5_attribute_text(walk->file, name_of(FC_H5_A_PRODUCER));
        names = fc_h5_read_names(walk->file, name_of(FC_H5_A_MESH_NAMES));
        root.rank = fc_h5_read_i64s(walk->file, name_of(FC_H5_A_RANK), &rank, 1) == 1 ? rank : -1;
        root.world_size = fc_h5_read_i64s(walk->file, name_of(FC_H5_A_WORLD_SIZE), &world, 1) == 1 ? world : -1;
        walk->copies = root.world_size >= 0;
        root.nmesh = fc_h5_read_i64s(walk->file, name_of(FC_H5_A_MESH_SHAPE), mesh, FC_MAX_MESH_DIMS);
        root.mesh_shape = mesh;
        root.layout = layout;
        root.producer = producer;
        root.mesh_names = names;
        walk->index = root.rank < 0 && root.world_size > 0;
    }
    fc_h5_put_root(walk->out, &root);
    free(layout);
    free(producer);
    free(names);
    return true;
}

/* ---- groups and links ---- */

static bool follow_link(trail *t, hid_t group, const fc_h5_link *link);

static bool follow_links(trail *t, hid_t group) {
    fc_h5_links links;
    bool ok = fc_h5_links_read(t->walk->file, group, &links) >= 0;
    for (size_t i = 0; i < links.count && ok; i++) {
        fc_h5_links_ask(t->walk->source, &links, i);
        ok = follow_link(t, group, &links.items[i]);
    }
    fc_h5_links_free(&links);
    return ok;
}

static bool walk_group(trail *t, hid_t group, unsigned long fileno, haddr_t address) {
    fc_h5_walk *walk = t->walk;
    for (size_t i = 0; i < t->depth; i++) {
        if (t->groups[i].fileno == fileno && t->groups[i].address == address) {
            return true; /* a cycle: everything in it also has a shorter name */
        }
    }
    if (t->depth >= MAX_DEPTH) {
        fc_h5_scan_failure(walk, FC_EUNSUPPORTED, "groups are nested more than %d deep at /%.200s", MAX_DEPTH, t->path);
        return false;
    }
    set_where(walk->shared, "group", t->path);
    attributes a;
    bool ok = read_attributes(walk, group, &a);
    char *kind =
        walk->ours && (a.present >> FC_H5_A_KIND & 1) ? fc_h5_attribute_text(group, name_of(FC_H5_A_KIND)) : NULL;
    unsigned char outer = t->kind;
    t->kind = fc_h5_group_kind_parse(kind);
    free(kind);
    t->groups[t->depth].fileno = fileno;
    t->groups[t->depth].address = address;
    t->depth++;
    if (ok) {
        send_attributes(walk, &a, t->path);
    }
    fc_text_free(&a.text);
    ok = ok && follow_links(t, group);
    if (!ok && !walk->failed && !walk->out->failed) {
        char why[256];
        const fc_code code = fc_h5_library_failure(walk, why, sizeof why);
        fc_h5_scan_failure(walk, code, "%sgroup /%s cannot be read (%s)", prefix(code), t->path, why);
    }
    t->depth--;
    t->kind = outer;
    return ok;
}

/* Whether a link may be followed. libhdf5 resolves soft links; links out of the file need `follow_external`. */
static bool may_follow(trail *t, H5L_type_t type) {
    fc_h5_walk *walk = t->walk;
    if (type == H5L_TYPE_HARD || type == H5L_TYPE_SOFT || (type == H5L_TYPE_EXTERNAL && walk->scan->follow_external)) {
        return true;
    }
    if (type == H5L_TYPE_EXTERNAL) {
        fc_h5_scan_elsewhere(walk, t->path, t->lists, t->depth, "a link into another file, which is not followed");
    } else {
        fc_h5_scan_unreadable(walk, t->path, t->lists, t->depth, FC_EUNSUPPORTED,
                              "a user-defined link, which only the program that made it can follow");
    }
    return false;
}

static void visit_object(trail *t, hid_t object) {
    fc_h5_walk *walk = t->walk;
    H5O_info_t info;
    if (H5Oget_info2(object, &info, H5O_INFO_BASIC) < 0) {
        char why[256];
        fc_h5_library_error(why, sizeof why);
        fc_h5_scan_unreadable(walk, t->path, t->lists, t->depth, FC_ECORRUPT, "its header is corrupt (%s)", why);
        return;
    }
    if (info.type == H5O_TYPE_GROUP) {
        walk_group(t, object, info.fileno, info.addr);
    } else if (info.type == H5O_TYPE_DATASET) {
        set_where(walk->shared, "dataset", t->path);
        attributes a;
        if (read_attributes(walk, object, &a)) {
            fc_h5_scan_dataset(walk, object, t->path, t->lists, t->depth, info.fileno != walk->fileno, a.present);
            send_attributes(walk, &a, t->path);
        } else {
            char why[256];
            const fc_code code = fc_h5_library_failure(walk, why, sizeof why);
            fc_h5_scan_failure(walk, code, "%sthe attributes of dataset /%s cannot be read (%s)", prefix(code), t->path,
                               why);
        }
        fc_text_free(&a.text);
    }
}

/* Whether the path of a link may be made longer by `name`. */
static bool is_usable(trail *t, const char *name, size_t length) {
    if (++t->names > t->most_names) {
        fc_h5_scan_failure(t->walk, FC_EUNSUPPORTED,
                           "its links give objects more than %" PRIu64
                           " names, which is too many for its size: too many paths lead to the same groups",
                           t->most_names);
        return false;
    }
    if (t->length + length + 2 > MAX_PATH_BYTES) {
        fc_h5_scan_failure(t->walk, FC_EUNSUPPORTED, "a name has more than %d bytes", MAX_PATH_BYTES);
        return false;
    }
    if (!fc_is_utf8(name, length)) {
        fc_h5_scan_failure(t->walk, FC_EUNSUPPORTED,
                           "group /%s has a member whose name is not UTF-8: rename it (h5py: f.move) and try again",
                           t->path);
        return false;
    }
    return true;
}

static void open_and_visit(trail *t, hid_t group, const fc_h5_link *link) {
    /* Opens it by its address, because looking up the name again takes longer. */
    const bool hard = link->type == H5L_TYPE_HARD;
    fc_h5_walk *walk = t->walk;
    const size_t patches = walk->source->patches->count;
    walk->newer = (fc_h5_newer){0};
    if (hard && walk->superblock >= 2 && !walk->ours) {
        fc_h5_newer_patch(walk->source, link->address, &walk->newer);
    }
    const hid_t object = hard ? H5Oopen_by_addr(group, link->address) : H5Oopen(group, link->name, H5P_DEFAULT);
    if (object >= 0) {
        visit_object(t, object);
        H5Oclose(object);
    } else {
        char why[256];
        const fc_code code = fc_h5_library_failure(t->walk, why, sizeof why);
        fc_h5_scan_unreadable(
            t->walk, t->path, t->lists, t->depth, code,
            hard ? "it cannot be opened by this libhdf5 (%s)" : "a link whose target does not exist (%s)", why);
    }
    H5Eclear2(H5E_DEFAULT);
    walk->source->patches->count = patches;
}

/* @return false when the walk must stop. */
static bool follow_link(trail *t, hid_t group, const fc_h5_link *link) {
    const size_t before = t->length, length = strlen(link->name);
    if (!is_usable(t, link->name, length)) {
        return false;
    }
    if (before > 0) {
        t->path[t->length++] = '/';
    }
    memcpy(t->path + t->length, link->name, length + 1);
    t->length += length;
    t->lists[t->depth - 1] = t->kind;
    set_where(t->walk->shared, "object", t->path);
    if (may_follow(t, link->type)) {
        open_and_visit(t, group, link);
    }
    t->length = before;
    t->path[before] = '\0';
    return !t->walk->failed && !t->walk->out->failed;
}

/* ---- files ---- */

/*
 * libhdf5 lets its users redirect and debug it through HDF5_ variables of the environment. What a file contains does
 * not depend on them, and a prefix of ${ORIGIN} crashes libhdf5 where the current directory cannot be read, as it is
 * here. libhdf5 may have read them already, in the parent, so it has to start again.
 */
static void ignore_environment(void) {
    bool found = false;
    char **kept = environ;
    for (char **variable = environ; variable && *variable; variable++) {
        if (strncmp(*variable, "HDF5_", 5) == 0) {
            found = true;
        } else {
            *kept++ = *variable;
        }
    }
    if (found) {
        *kept = NULL;
        H5close();
    }
}

void fc_h5_scan_prepare(void *context) {
    fc_h5_scan *scan = context;
    ignore_environment();
    H5open();
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    H5PLset_loading_state(0);
    fc_h5_lend_filters();
    fc_h5_load_filters(scan->plugins);
    if (!scan->follow_external) {
        H5Lunregister(H5L_TYPE_EXTERNAL);
    }
    scan->driver = fc_h5_vfd_register();
    for (size_t i = 0; i < scan->ninputs; i++) {
        const off_t lent = (off_t)scan->inputs[i].lent;
        if (lent > 0 || fstat(scan->inputs[i].fd, &scan->inputs[i].st) != 0) {
            scan->inputs[i].st = (struct stat){.st_size = lent};
        }
        if (scan->inputs[i].span.length > 0) {
            scan->inputs[i].st.st_size = (off_t)scan->inputs[i].span.length;
        }
    }
}

bool fc_h5_scan_file(const fc_h5_scan *scan, const fc_h5_input *input, fc_h5_sink *out, fc_h5_shared *shared) {
    fc_h5_names others = {0};
    fc_h5_capture capture = {.others = scan->follow_external ? &others : NULL};
    fc_h5_patches patches = {0};
    fc_h5_source source = {input->path, input->fd, &input->st,         scan->follow_external,
                           &capture,    &patches,  input->span.offset, NULL};
    fc_h5_walk walk = {.scan = scan, .out = out, .shared = shared, .capture = &capture, .file_path = input->path};
    walk.source = &source;
    walk.file = H5I_INVALID_HID;
    unsigned char head[9]; /* the signature, and the version of the superblock */
    uint64_t address;
    source.asking = input->lent > 0 ? fc_h5_asking_new(out, input->fd, input->lent) : NULL;
    if (source.asking) {
        fc_h5_look_ahead(&source);
    }
    walk.superblock = fc_h5_vfd_read(&source, 0, sizeof head, head) ? head[8] : 0;
    H5O_info_t info;
    bool ok = false;
    hid_t root = H5I_INVALID_HID;
    hid_t fapl = fc_h5_vfd_fapl(scan->driver, &source);
    trail *t = fc_h5_child_calloc(1, sizeof *t);
    char *path = fc_h5_child_calloc(1, MAX_PATH_BYTES);
    snprintf(shared->where, sizeof shared->where, "the superblock");
    if (fc_h5_newer_root(&source, &address)) {
        fc_h5_newer_patch(&source, address, &walk.newer);
    }
    walk.file = fapl < 0 ? H5I_INVALID_HID : H5Fopen(input->path, H5F_ACC_RDONLY, fapl);
    if (walk.file < 0 || H5Oget_info2(walk.file, &info, H5O_INFO_BASIC) < 0) {
        char why[256];
        fc_h5_library_error(why, sizeof why);
        fc_h5_scan_failure(&walk, FC_ECORRUPT, "not a readable HDF5 file (%s)", why);
        goto out;
    }
    *t = (trail){.walk = &walk, .path = path, .most_names = most_names(input, scan->follow_external)};
    walk.fileno = info.fileno;
    send_root(&walk);
    root = H5Gopen2(walk.file, "/", H5P_DEFAULT);
    if (root < 0) {
        fc_h5_scan_failure(&walk, FC_ECORRUPT, "corrupt HDF5 file: the root group cannot be opened");
        goto out;
    }
    ok = walk_group(t, root, info.fileno, info.addr) && !walk.failed;
    if (ok && capture.errnum != 0) {
        fc_h5_scan_failure(&walk, FC_EIO, "reading failed"); /* of something that only made a dataset unreadable */
        ok = false;
    }
    if (ok) {
        fc_h5_send_others(out, &others);
        fc_h5_begin(out, FC_H5_END);
        fc_h5_end(out);
    }
out:
    fc_h5_free_others(&others);
    free(patches.items);
    free(path);
    free(t);
    if (root >= 0) {
        H5Gclose(root);
    }
    if (walk.file >= 0) {
        H5Fclose(walk.file);
    }
    if (fapl >= 0) {
        H5Pclose(fapl);
    }
    fc_h5_asking_free(source.asking);
    return ok;
}

int fc_h5_scan_run(void *context, int fd, fc_h5_shared *shared) {
    const fc_h5_scan *scan = context;
    fc_h5_sink out = {.fd = fd};
    for (size_t i = 0; i < scan->ninputs; i++) {
        if (!fc_h5_scan_file(scan, &scan->inputs[i], &out, shared)) {
            break; /* a FAILURE record was sent */
        }
    }
    fc_h5_flush(&out);
    return out.failed;
}
