/*
 * Fuzzes checkpoints of one file per rank, which are joined when they are opened: Megatron's, DeepSpeed's partitions,
 * and directories of torch.save files. The input chooses a checkpoint of the corpus, changes numbers, names and
 * references in the pickles of its files, whose CRC-32s are corrected, and renames files. If it opens, it must be
 * consistent.
 */
#include "fuzz_checkpoint.h"
#include "fuzz_tensor.h"
#include "torch/zip/zip.h"

#include <dirent.h>
#include <fcntl.h>
#include <zlib.h>

enum { MOST_FILES = 64, MOST_OPERANDS = 4096, MOST_EDITS = 12, MOST_MOVES = 4 };

/* A part of a pickle that can change without changing its length. */
typedef struct operand {
    uint32_t at, width;
} operand;

/* A torch.save file on disk, and its pickle in memory. */
typedef struct rank_file {
    char path[256];
    int fd;
    uint64_t at; /* of the pickle in the file */
    uint64_t crc_at[3];
    int crcs;
    size_t size;
    unsigned char *good, *bytes;
    operand *operands;
    size_t noperands;
    bool changed;
} rank_file;

typedef struct ranks {
    char path[128];
    rank_file files[MOST_FILES];
    size_t count;
} ranks;

static const char *const names[] = {"deepspeed/0.19.8-zero1-bf16",
                                    "deepspeed/0.19.8-zero2-bf16",
                                    "deepspeed/0.19.8-zero3-bf16",
                                    "deepspeed/0.19.8-zero3-subgroups",
                                    "deepspeed/0.19.8-zero3-bf16-universal",
                                    "megatron-ranks/tp2-llama-fp32",
                                    "megatron-ranks/pp2vp2-gpt",
                                    "megatron-ranks/tp2pp2-llama",
                                    "megatron-ranks/tp2ep2-grouped",
                                    "megatron-ranks/tp2dp2-distributed",
                                    "megatron-ranks/pp2ep2-moe",
                                    "pt/fsdp2-torch2.15.0",
                                    "verl/fsdp1/actor"};
enum { NAMES = sizeof names / sizeof *names };

static char home[64];

/* ---- loading ---- */

static uint32_t number_at(const unsigned char *p, uint32_t width) {
    uint32_t number = 0;
    memcpy(&number, p, width < 4 ? width : 4);
    return number;
}

/* The length of the opcode at `p` with its operand, or 0 if the walk ends. `*operand` is the start of what may change.
 */
static size_t opcode(const unsigned char *p, size_t left, uint32_t *start) {
    static const char plain[] = "}()tQRNuseia]b0123\x81\x85\x86\x87\x94", one[] = "\x80qKh", four[] = "rJj";
    const unsigned char *line;
    *start = 1;
    if (strchr(plain, *p) || *p == 0x88 || *p == 0x89) {
        *start = 0;
        return 1;
    }
    if (strchr(one, *p)) {
        return 2;
    }
    if (strchr(four, *p) || *p == 'M' || *p == 'G') {
        return *p == 'M' ? 3 : *p == 'G' ? 9 : 5;
    }
    if (*p == 0x8a || *p == 0x8c) {
        *start = 2;
        return left > 1 ? 2 + (size_t)p[1] : 0;
    }
    if (*p == 'X' && left > 5) {
        *start = 5;
        return 5 + (size_t)number_at(p + 1, 4);
    }
    if (*p == 'c' && (line = memchr(p, '\n', left)) && (line = memchr(line + 1, '\n', left - (size_t)(line + 1 - p)))) {
        return (size_t)(line + 1 - p);
    }
    return 0;
}

static void list_operands(rank_file *f) {
    f->operands = calloc(MOST_OPERANDS, sizeof *f->operands);
    for (size_t at = 0; f->operands && at < f->size && f->noperands < MOST_OPERANDS;) {
        uint32_t start;
        const size_t length = opcode(f->good + at, f->size - at, &start);
        if (length == 0 || length > f->size - at) {
            break;
        }
        if (length > start &&
            (strchr("KMJhjXG", f->good[at]) || f->good[at] == 0x8a || f->good[at] == 0x88 || f->good[at] == 0x89)) {
            f->operands[f->noperands++] = (operand){(uint32_t)at + start, (uint32_t)length - start};
        }
        at += length;
    }
}

/* Finds the places of the CRC-32 of the pickle: in both headers, and behind the bytes. */
static void find_crcs(rank_file *f, uint32_t crc, off_t end) {
    unsigned char *all = malloc((size_t)end);
    if (!all || pread(f->fd, all, (size_t)end, 0) != end) {
        abort();
    }
    for (off_t i = 0; i + 4 <= end && f->crcs < 3; i++) {
        if ((uint64_t)i >= f->at && (uint64_t)i < f->at + f->size) {
            i = (off_t)(f->at + f->size) - 1;
        } else if (number_at(all + i, 4) == crc) {
            f->crc_at[f->crcs++] = (uint64_t)i;
        }
    }
    free(all);
}

/* Loads the pickle of a torch.save file. @return false for other files. */
static bool load(rank_file *f) {
    fc_zip zip;
    fc_error err;
    bool found = false;
    f->fd = open(f->path, O_RDWR | O_CLOEXEC);
    const off_t end = lseek(f->fd, 0, SEEK_END);
    if (f->fd < 0 || fc_zip_open(f->fd, f->path, 0, (uint64_t)end, &zip, &err) != FC_OK) {
        close(f->fd);
        return false;
    }
    for (size_t i = 0; i < zip.nentries && !found; i++) {
        const fc_zip_entry *e = &zip.entries[i];
        const char *slash = strchr(e->name, '/');
        found = slash && strcmp(slash, "/data.pkl") == 0 && e->method == FC_ZIP_STORED;
        if (found) {
            f->at = e->data;
            f->size = (size_t)e->size;
            f->good = malloc(f->size);
            f->bytes = malloc(f->size);
            if (!f->good || !f->bytes || pread(f->fd, f->good, f->size, (off_t)f->at) != (ssize_t)f->size) {
                abort();
            }
            memcpy(f->bytes, f->good, f->size);
            find_crcs(f, e->crc, end);
            list_operands(f);
        }
    }
    fc_zip_close(&zip);
    return found;
}

static void load_all(ranks *r, const char *directory) {
    struct dirent **entries;
    const int n = scandir(directory, &entries, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        rank_file *f = &r->files[r->count];
        snprintf(f->path, sizeof f->path, "%.160s/%.90s", directory, entries[i]->d_name);
        if (entries[i]->d_type == DT_DIR && entries[i]->d_name[0] != '.') {
            char below[256];
            memcpy(below, f->path, sizeof below);
            load_all(r, below);
        } else if (entries[i]->d_type == DT_REG && r->count + 1 < MOST_FILES && load(f)) {
            r->count++;
        }
        free(entries[i]);
    }
    free(entries);
}

static void prepare(ranks *all) {
    char *command;
    fuzz_place(home, "fuzz-ranks-XXXXXX");
    if (!mkdtemp(home)) {
        abort();
    }
    fuzz_remove_at_end(home);
    for (int i = 0; i < NAMES; i++) {
        snprintf(all[i].path, sizeof all[i].path, "%s/%d", home, i);
        if (asprintf(&command, "cp -r '%s/%s' '%s'", FSDPCKPT_CORPUS, names[i], all[i].path) < 0 ||
            system(command) != 0) {
            abort();
        }
        free(command);
        load_all(&all[i], all[i].path);
        if (all[i].count == 0) {
            abort();
        }
    }
}

/* ---- changing ---- */

static void put(rank_file *f, const unsigned char *bytes) {
    const uint32_t crc = (uint32_t)crc32(0, bytes, (uInt)f->size);
    bool ok = pwrite(f->fd, bytes, f->size, (off_t)f->at) == (ssize_t)f->size;
    for (int i = 0; i < f->crcs && ok; i++) {
        ok = pwrite(f->fd, &crc, 4, (off_t)f->crc_at[i]) == 4;
    }
    if (!ok) {
        abort();
    }
}

static void edit(ranks *r, choices *c) {
    rank_file *f = &r->files[choose(c, (int64_t)r->count - 1)];
    const size_t number = (size_t)choose(c, 255) << 8 | (size_t)choose(c, 255);
    const int64_t how = choose(c, 5), value = choose(c, 255);
    if (f->noperands == 0) {
        return;
    }
    const operand *o = &f->operands[number % f->noperands],
                  *other = &f->operands[(number + (size_t)value) % f->noperands];
    unsigned char *p = f->bytes + o->at;
    if (how == 5) {
        f->bytes[number % f->size] = (unsigned char)value;
    } else if (*p == 0x88 || *p == 0x89) {
        *p ^= 1;
    } else if (how == 0) {
        memset(p, 0, o->width);
        *p = (unsigned char)value;
    } else if (how == 1) {
        p[value % o->width] = (unsigned char)(p[value % o->width] + 1);
    } else if (how == 2) {
        p[value % o->width] = (unsigned char)(p[value % o->width] - 1);
    } else if (how == 3) {
        memset(p, value % 2 ? 0xff : 0x7f, o->width);
    } else {
        memcpy(p, f->bytes + other->at, o->width < other->width ? o->width : other->width);
    }
    f->changed = true;
}

static void exchange(const char *a, const char *b) {
    if (renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) != 0) {
        abort();
    }
}

static void restore(ranks *r) {
    for (size_t i = 0; i < r->count; i++) {
        rank_file *f = &r->files[i];
        if (f->changed) {
            memcpy(f->bytes, f->good, f->size);
            put(f, f->good);
            f->changed = false;
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static ranks all[NAMES];
    size_t moved[MOST_MOVES][2];
    choices c = {data, size};
    if (all[0].count == 0) {
        prepare(all);
    }
    ranks *r = &all[choose(&c, NAMES - 1)];
    const int moves = r->count > 1 && choose(&c, 7) == 0 ? (int)choose(&c, MOST_MOVES) : 0;
    for (int i = 0; i < moves; i++) {
        moved[i][0] = (size_t)choose(&c, (int64_t)r->count - 1);
        moved[i][1] = (size_t)choose(&c, (int64_t)r->count - 1);
        exchange(r->files[moved[i][0]].path, r->files[moved[i][1]].path);
    }
    for (int i = 0; i < MOST_EDITS && c.size > 0; i++) {
        edit(r, &c);
    }
    for (size_t i = 0; i < r->count; i++) {
        if (r->files[i].changed) {
            put(&r->files[i], r->files[i].bytes);
        }
    }
    fuzz_open(r->path);
    restore(r);
    for (int i = moves; i-- > 0;) {
        exchange(r->files[moved[i][0]].path, r->files[moved[i][1]].path);
    }
    return 0;
}
