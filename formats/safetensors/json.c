/*
 * Reads JSON member by member. See json.h.
 */
#include "safetensors/json.h"

#include "fsdpckpt/try.h"

#include <inttypes.h>
#include <string.h>

fc_code fc_st_json_fail(const fc_st_json *json, size_t at, const char *what, fc_error *err) {
    if (json->where) {
        return fc_fail(err, FC_ECORRUPT, "%s: __metadata__: %.128s: at character %zu: %s", json->path, json->where, at,
                       what);
    }
    return fc_fail(err, FC_ECORRUPT, "%s: offset %" PRIu64 ": %s", json->path, json->offset + at, what);
}

static void skip_blanks(fc_st_json *json) {
    while (json->at < json->size && json->text[json->at] && strchr(" \t\r\n", json->text[json->at])) {
        json->at++;
    }
}

static bool take_char(fc_st_json *json, char c) {
    skip_blanks(json);
    if (json->at < json->size && json->text[json->at] == c) {
        json->at++;
        return true;
    }
    return false;
}

fc_code fc_st_json_enter(fc_st_json *json, fc_error *err) {
    return take_char(json, '{') ? FC_OK : fc_st_json_fail(json, json->at, "a JSON object should start here", err);
}

bool fc_st_json_at_object(fc_st_json *json) {
    skip_blanks(json);
    return json->at < json->size && json->text[json->at] == '{';
}

fc_code fc_st_json_value(fc_st_json *json, json_t **value, fc_error *err) {
    json_error_t wrong;
    skip_blanks(json);
    size_t left = json->size - json->at;
    bool string = left > 0 && json->text[json->at] == '"';
    bool shortened = !string && left > ST_JSON_VALUE;
    const char *start = left > 0 ? json->text + json->at : "";
    *value = json_loadb(start, shortened ? ST_JSON_VALUE : left,
                        JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK | JSON_REJECT_DUPLICATES, &wrong);
    if (*value) {
        json->at += (size_t)wrong.position;
        return FC_OK;
    }
    if (wrong.text[0] == '\0') { /* jansson reports a failed allocation without a text */
        return fc_no_memory(err, json->path);
    }
    enum json_error_code what = json_error_code(&wrong);
    if (what == json_error_null_character || what == json_error_null_byte_in_key) {
        fc_st_json_fail(json, json->at, "a name or string contains a NUL character (\\u0000), which is not supported",
                        err);
        return err->code = FC_EUNSUPPORTED;
    }
    if (shortened && (what == json_error_premature_end_of_input || (size_t)wrong.position >= ST_JSON_VALUE)) {
        return fc_st_json_fail(json, json->at, "a value has more than 64 KiB", err);
    }
    return fc_st_json_fail(json, json->at + (size_t)(wrong.position > 0 ? wrong.position : 0), wrong.text, err);
}

fc_code fc_st_json_key(fc_st_json *json, bool first, json_t **key, fc_error *err) {
    *key = NULL;
    if (take_char(json, '}')) {
        return FC_OK;
    }
    if (!first && !take_char(json, ',')) {
        return fc_st_json_fail(json, json->at, "'}' or ',' is missing", err);
    }
    skip_blanks(json);
    if (json->at >= json->size || json->text[json->at] != '"') {
        return fc_st_json_fail(json, json->at, "a name in quotation marks is missing", err);
    }
    FC_TRY(fc_st_json_value(json, key, err));
    if (!take_char(json, ':')) {
        json_decref(*key);
        *key = NULL;
        return fc_st_json_fail(json, json->at, "':' is missing", err);
    }
    return FC_OK;
}

fc_code fc_st_json_end(fc_st_json *json, fc_error *err) {
    skip_blanks(json);
    return json->at == json->size ? FC_OK
                                  : fc_st_json_fail(json, json->at, "something follows the end of the JSON", err);
}

fc_code fc_st_json_object(fc_st_json *json, fc_st_json_member *member, void *context, fc_error *err) {
    FC_TRY(fc_st_json_enter(json, err));
    for (bool first = true;; first = false) {
        json_t *key, *value = NULL;
        FC_TRY(fc_st_json_key(json, first, &key, err));
        if (!key) {
            return FC_OK;
        }
        fc_code rc;
        FC_TRY_GOTO(fc_st_json_value(json, &value, err), rc, next);
        rc = member(context, json_string_value(key), value, err);
    next:
        json_decref(key);
        json_decref(value);
        FC_TRY(rc);
    }
}

fc_code fc_st_json_members(fc_st_json *json, fc_st_json_member *member, void *context, fc_error *err) {
    FC_TRY(fc_st_json_object(json, member, context, err));
    return fc_st_json_end(json, err);
}
