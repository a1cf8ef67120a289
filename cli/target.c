/*
 * Chooses a format from -o and --to: see target.h.
 */
#include "target.h"

#include "options/help.h"
#include "options/suggest.h"
#include "output/text.h"

#include "fsdpckpt/io.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

enum { EXTENSION_MAX = 32 };

/* Names of formats in other tools. Extensions are accepted, too, and need no alias. */
static const struct {
    const char *word, *format;
} aliases[] = {{"torch", "pt"},       {"pytorch", "pt"},     {"torch.save", "pt"},           {"torch_save", "pt"},
               {"st", "safetensors"}, {"hf", "safetensors"}, {"huggingface", "safetensors"}, {"distcp", "dcp"},
               {"torch_dcp", "dcp"},  {"hdf", "h5"}};

/* Extensions of files that fsdpckpt does not write; other programs would misread its files under such names. */
static const char *const foreign[] = {".arrow", ".csv",    ".gguf", ".ggml", ".gz",      ".index", ".json",
                                      ".keras", ".mat",    ".npy",  ".npz",  ".msgpack", ".onnx",  ".parquet",
                                      ".pb",    ".pickle", ".pkl",  ".tar",  ".tflite",  ".tgz",   ".txt",
                                      ".xml",   ".yaml",   ".zarr", ".html", ".zip",     ".zst",   NULL};

static const char *const html_extensions[] = {".html", ".htm", ".xhtml", NULL};
static const char *const json_extensions[] = {".json", NULL};
static const char *const view_extensions[] = {".h5", ".hdf5", NULL};
static const char *const xml_extensions[] = {".xml", NULL};
const target_kind target_html = {"an HTML page", html_extensions};
const target_kind target_json = {"JSON", json_extensions};
const target_kind target_view = {"an HDF5 file", view_extensions};
const target_kind target_xml = {"JUnit XML", xml_extensions};

static bool is_version(const char *extension) {
    return (extension[1] == 'v' || extension[1] == 'V') && extension[2] &&
           strspn(extension + 2, "0123456789") == strlen(extension + 2);
}

/* Copies the extension of the last component of `path`, with its dot. @return false if there is none. */
static bool extension_of(const char *path, char out[EXTENSION_MAX]) {
    size_t len = strlen(path);
    while (len > 0 && path[len - 1] == '/') {
        len--;
    }
    size_t dot = len;
    while (dot > 0 && path[dot - 1] != '/' && path[dot - 1] != '.') {
        dot--;
    }
    bool found = dot > 1 && path[dot - 1] == '.' && path[dot - 2] != '/' && len - dot + 2 <= EXTENSION_MAX &&
                 isalpha((unsigned char)path[dot]);
    for (size_t i = dot; found && i < len; i++) {
        found = isalnum((unsigned char)path[i]) != 0;
    }
    if (!found) {
        return false;
    }
    memcpy(out, path + dot - 1, len - dot + 1);
    out[len - dot + 1] = '\0';
    return !is_version(out);
}

static bool is_among(const char *extension, const char *const *list) {
    while (*list && strcasecmp(*list, extension) != 0) {
        list++;
    }
    return *list != NULL;
}

/* @return the extension that was probably meant, or NULL. Short extensions allow one wrong letter at most. */
static const char *meant_extension(const char *extension, const char *const *known, const char *best, size_t *score) {
    for (; *known; known++) {
        size_t len = strlen(extension), most = len > 5 ? 2 : len > 3;
        size_t distance = suggest_distance(extension, len, *known, strlen(*known), most);
        if (distance <= most && distance < *score) {
            *score = distance;
            best = *known;
        }
    }
    return best;
}

static const char *meant_of_formats(const char *extension) {
    const char *best = NULL;
    size_t score = SUGGEST_NONE;
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        best = fc_format_writes(*f) ? meant_extension(extension, (*f)->extensions, best, &score) : best;
    }
    return best;
}

const fc_format *target_named_format(const char *target) {
    char extension[EXTENSION_MAX];
    return extension_of(target, extension) ? fc_format_of_extension(extension) : NULL;
}

bool target_is_directory(const char *target) {
    struct stat st;
    size_t len = strlen(target);
    return (len > 0 && target[len - 1] == '/') || (fc_stat(target, &st) == 0 && S_ISDIR(st.st_mode));
}

/* Finds a format by its name, an extension with or without the dot, or an alias; letter case does not matter. */
static const fc_format *format_called(const char *word) {
    char extension[EXTENSION_MAX];
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        if (strcasecmp((*f)->name, word) == 0) {
            return *f;
        }
    }
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++) {
        if (strcasecmp(aliases[i].word, word) == 0) {
            return fc_format_find(aliases[i].format);
        }
    }
    snprintf(extension, sizeof extension, "%s%s", word[0] == '.' ? "" : ".", word);
    return fc_format_of_extension(extension);
}

static fc_code unknown_format(const char *word, fc_error *err) {
    char names[HELP_FORMATS_MAX];
    const char *best = NULL;
    size_t score = SUGGEST_NONE;
    for (const fc_format *const *f = fc_formats(); *f; f++) {
        if (fc_format_writes(*f)) {
            suggest_consider(word, strlen(word), (*f)->name, &best, &score);
        }
    }
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++) {
        size_t before = score;
        suggest_consider(word, strlen(word), aliases[i].word, &best, &score);
        best = score < before ? aliases[i].format : best;
    }
    return fc_fail(err, FC_EUSAGE, "--to %s: %s%s%schoose one of %s", word,
                   best ? "did you mean '" : "no such format; ", best ? best : "", best ? "'? " : "",
                   help_formats(names));
}

/* Reports a target whose name does not select a format. */
static fc_code ask_for_format(const char *target, const char *extension, fc_error *err) {
    char names[HELP_FORMATS_MAX];
    const fc_format *called = extension ? format_called(extension + 1) : NULL;
    const char *best = extension ? meant_of_formats(extension) : NULL;
    help_formats(names);
    if (best) {
        return fc_fail(err, FC_EUSAGE,
                       "-o %s: unknown extension '%s'; did you mean '%s'? (to keep the name, give --to: %s)", target,
                       extension, best, names);
    }
    if (called && fc_format_writes(called)) {
        return fc_fail(err, FC_EUSAGE, "-o %s: '%s' is not an extension; did you mean --to %s?", target, extension,
                       called->name);
    }
    if (extension) {
        return fc_fail(err, FC_EUSAGE,
                       "-o %s: no format that can be written has the extension '%s'; give --to FORMAT: %s", target,
                       extension, names);
    }
    if (target_is_directory(target)) {
        return fc_fail(err, FC_EUSAGE,
                       "-o %s: is a directory, which does not name a format; give --to safetensors or --to dcp, or "
                       "name one file in it, such as model.h5",
                       target);
    }
    return fc_fail(
        err, FC_EUSAGE,
        "-o %s: the name does not name a format; give --to FORMAT (%s), or end the name in .h5, .pt or .safetensors",
        target, names);
}

fc_code target_format(const options *o, bool sharded, const fc_format **out, fc_error *err) {
    char extension[EXTENSION_MAX];
    *out = NULL;
    if (o->to) {
        *out = format_called(o->to);
        if (*out && !fc_format_writes(*out)) {
            char names[HELP_FORMATS_MAX];
            return fc_fail(err, FC_EUNSUPPORTED, "--to %s: can only be read; formats that can be written: %s", o->to,
                           help_formats(names));
        }
        return *out ? FC_OK : unknown_format(o->to, err);
    }
    bool extended = o->output && extension_of(o->output, extension);
    *out = extended ? fc_format_of_extension(extension) : NULL;
    if (*out) {
        return FC_OK;
    }
    bool wrong =
        extended && (format_called(extension + 1) || meant_of_formats(extension) || is_among(extension, foreign));
    if (o->output && (!sharded || wrong)) {
        return ask_for_format(o->output, extended ? extension : NULL, err);
    }
    *out = fc_format_find("h5");
    return FC_OK;
}

fc_code target_check(const char *path, const target_kind *kind, fc_error *err) {
    char extension[EXTENSION_MAX];
    size_t score = SUGGEST_NONE;
    if (!extension_of(path, extension) || is_among(extension, kind->extensions)) {
        return FC_OK;
    }
    bool other = fc_format_of_extension(extension) || is_among(extension, foreign);
    const char *best = other ? NULL : meant_extension(extension, kind->extensions, NULL, &score);
    if (best) {
        return fc_fail(err, FC_EUSAGE, "%s: unknown extension '%s'; did you mean '%s'?", path, extension, best);
    }
    return other
               ? fc_fail(err, FC_EUSAGE, "%s: the file would be %s, which does not match its extension '%s'; use '%s'",
                         path, kind->what, extension, kind->extensions[0])
               : FC_OK;
}
