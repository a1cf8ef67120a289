/*
 * How each hint of the library is spelled as an option: see hint.h.
 */
#include "options/hint.h"

#include <stdio.h>
#include <string.h>

const char *const hint_settings[FC_SETTING_COUNT] = {[FC_SETTING_NONE] = "",
                                                     [FC_SETTING_EXCLUDE] = "--exclude",
                                                     [FC_SETTING_RENAME] = "--rename",
                                                     [FC_SETTING_STRIP_PREFIX] = "--strip-prefix",
                                                     [FC_SETTING_DTYPE] = "--dtype",
                                                     [FC_SETTING_MODEL] = "--schema",
                                                     [FC_SETTING_TP_PLAN] = "--tp-plan",
                                                     [FC_SETTING_ALLOW_MISSING] = "--allow-missing",
                                                     [FC_SETTING_ALLOW_UNEXPECTED] = "--allow-unexpected"};

/* The texts of each hint: with %s for the value that it names, and for a hint without a value. */
static const struct {
    const char *named, *plain;
} spellings[FC_HINT_COUNT] = {
    [FC_HINT_INCLUDE] = {NULL, "choose one with --include 'BRANCH.*'"},
    [FC_HINT_EXCLUDE] = {"--exclude '%s' leaves it out", "--exclude leaves it out"},
    [FC_HINT_TRUST_OBJECTS] = {"--exclude '%s' leaves it out, --trust-objects copies it unchanged",
                               "--exclude leaves it out, --trust-objects copies it unchanged"},
    [FC_HINT_FORCE] = {NULL, "--force replaces it"},
    [FC_HINT_FOLLOW_EXTERNAL] = {"--follow-external reads it, --exclude '%s' leaves it out",
                                 "--follow-external allows it"},
    [FC_HINT_MEMORY] = {NULL, "raise --memory"},
    [FC_HINT_SHARDED_BY_TP] = {NULL, "if tensor parallelism sharded it, consolidate with --tp-plan"},
    [FC_HINT_TP_PLAN] = {NULL, "give a --tp-plan that names their modules"},
    [FC_HINT_POLICY] = {NULL, "choose another --policy, or leave the optimizer out with --exclude"},
    [FC_HINT_BUFFERS] = {NULL, "name the buffers with --classes FILE, or leave the optimizer out with --exclude"},
    [FC_HINT_TAKE_FIRST] = {NULL, "--take-first takes those of the first source, --exclude leaves them out"},
    [FC_HINT_LAYOUT] = {NULL, "use 'fsdpckpt reshard' with --dp, --tp or --replicas, or 'consolidate'"},
    [FC_HINT_DRY_RUN] = {NULL, "--dry-run plans the conversion"},
    [FC_HINT_SELECT_STATE] = {NULL, "--include 'model*.*' --include 'optim*.*' leaves these out"},
    [FC_HINT_MODEL_PREFIX] = {"--rename 's/^/model./' makes all of them the model's, --include '%s' leaves these out",
                              "--rename 's/^/model./' makes them the model's"},
    [FC_HINT_KEEP_DTYPE] = {"leave --dtype out, or keep both as they are with --dtype-for 'GLOB=keep', or %s",
                            "leave --dtype out, or keep both as they are with --dtype-for 'GLOB=keep', or "
                            "compute the weights with --dequantize"},
    [FC_HINT_DEQUANTIZE] = {NULL, "compute the weights with --dequantize"},
    [FC_HINT_RECIPE] = {NULL, "choose one with --recipe"},
    [FC_HINT_RECIPE_CONFIG] = {NULL, "choose one with --recipe, or name the model's config.json with --config"},
    [FC_HINT_CONFIG] = {NULL, "give it with --config"},
    [FC_HINT_ADAPTER_CONFIG] = {NULL, "--adapter-config FILE, its adapter_config.json, merges it"},
    [FC_HINT_EXCLUDE_EACH] = {"leave all of them out with %s", "leave all of them out with --exclude GLOB"},
    [FC_HINT_EXCLUDE_OTHERS] = {"leave out all but one, as with %s", "leave out all but one with --exclude GLOB"},
    [FC_HINT_ONE_FILE] = {NULL, "use 'fsdpckpt consolidate', or name a directory"},
    [FC_HINT_UNSPLIT] = {NULL, "leave out --max-shard-size, or name a directory"},
    [FC_HINT_PLUGINS] = {"--hdf5-plugins DIR reads it with a plugin of libhdf5, --exclude '%s' leaves it out",
                         "--hdf5-plugins DIR reads it with a plugin of libhdf5"},
    [FC_HINT_CHECK] = {"use 'fsdpckpt check --schema %s'", "use 'fsdpckpt check --schema'"},
};

/* Spells globs as options: "a, b" as "--exclude 'a' --exclude 'b'". */
static void spell_excludes(const char *globs, char *buf, size_t size) {
    size_t used = 0;
    while (*globs && used < size) {
        const size_t len = strcspn(globs, ",");
        used += (size_t)snprintf(buf + used, size - used, "%s--exclude '%.*s'", used ? " " : "", (int)len, globs);
        globs += len + strspn(globs + len, ", ");
    }
}

const char *hint_text(const fc_error *err, char *buf, size_t size) {
    const char *named = err->hint < FC_HINT_COUNT ? spellings[err->hint].named : NULL;
    const char *plain = err->hint < FC_HINT_COUNT ? spellings[err->hint].plain : NULL;
    const char *at = named && err->about[0] ? strstr(named, "%s") : NULL;
    buf[0] = '\0';
    char spelled[8 * sizeof err->about];
    if (err->hint == FC_HINT_EXCLUDE_EACH || err->hint == FC_HINT_EXCLUDE_OTHERS) {
        spell_excludes(err->about, spelled, sizeof spelled);
    } else {
        snprintf(spelled, sizeof spelled, "%s", err->about);
    }
    if (at) {
        snprintf(buf, size, "; %.*s%s%s", (int)(at - named), named, spelled, at + 2);
    } else if (plain) {
        snprintf(buf, size, "; %s", plain);
    }
    return buf;
}
