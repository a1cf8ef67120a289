/*
 * safetensors: members of `__metadata__` that fsdpckpt and torch write, damaged in one place; names of files, and files
 * that do not belong together. Each case says what the message must contain.
 */
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/format.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { MOST = 3 }; /* files of a case */

static char directory[] = "/tmp/fc-test-kept-XXXXXX";

/* A file. If it has a key, its header has this member in `__metadata__`, whose text is `value`. */
typedef struct made {
    const char *name, *entries, *key, *value;
} made;

static const char *path_of(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

/* Appends `text` to a header, within a JSON string. */
static void quote(char *header, const char *text) {
    char *end = header + strlen(header);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') {
            *end++ = '\\';
        }
        *end++ = *text;
    }
    *end = '\0';
}

/* Four bytes of data follow the header. A name that ends in .json is a text file. */
static void write_file(const made *m) {
    static char header[300000];
    FILE *f = fopen(path_of(m->name), "wb");
    assert_non_null(f);
    strcpy(header, m->entries);
    if (m->key) {
        sprintf(header, "{\"__metadata__\":{\"%s\":\"", m->key);
        quote(header, m->value);
        sprintf(header + strlen(header), "\"}%s%s}", *m->entries ? "," : "", m->entries);
    } else if (!strstr(m->name, ".json")) {
        sprintf(header, "{%s}", m->entries);
    }
    if (!strstr(m->name, ".json")) {
        for (int i = 0; i < 8; i++) {
            fputc((int)(strlen(header) >> (8 * i) & 255), f);
        }
    }
    fputs(header, f);
    if (!strstr(m->name, ".json")) {
        fputs("abcd", f);
    }
    fclose(f);
}

static void expect(const made *files, const char *opened, fc_code code, const char *message) {
    fc_checkpoint *c = NULL;
    fc_error err = {0};
    size_t n = 0;
    for (; n < MOST && files[n].name; n++) {
        write_file(&files[n]);
    }
    char *path = strdup(path_of(opened));
    assert_non_null(path);
    fc_code rc = fc_checkpoint_open(path, NULL, &c, &err);
    const char *text = rc == FC_OK ? c->note ? c->note : "" : err.message;
    while (n-- > 0) {
        unlink(path_of(files[n].name));
    }
    if (rc != code || !strstr(text, message) || (rc == FC_OK && !*message && *text)) {
        fail_msg("%s %s %s: %d: %s", files[0].name, files[0].entries, files[0].value ? files[0].value : "", (int)rc,
                 text);
    }
    fc_checkpoint_close(c);
    free(path);
}

#define T(name, dtype, shape, begin, end)                                                                              \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"
#define ONE T("a", "U8", "[4]", "0", "4")
#define HALF T("a", "F16", "[2]", "0", "4")
#define LONG "0123456789012345678901234567890123456789012345678901234567890123456789"
#define OBJECT "fsdpckpt.object.o"
#define DTYPES "fsdpckpt.dtypes"
#define PATHS "fsdpckpt.paths"
#define LAYOUT "fsdpckpt.layout"
#define MESH "fsdpckpt.mesh"
#define SHARDING "DCP_SHARDING_INFO"
#define NONE "the file has no tensor of that name"
#define UNFIT "the dtype does not fit"
#define OFFSETS "saved_offsets should have one number"
#define WRONG_PATH "the path should be a list of keys and indexes"
#define WRONG_MESH "should be a mesh and a rank in it"
#define INCOMPLETE "encoding, data or json is missing or invalid"

static void damaged_members_are_refused(void **state) {
    static const struct {
        const char *entries, *key, *value;
        fc_code code;
        const char *message;
    } cases[] = {
        {ONE, DTYPES, "{\"a\":5}", FC_ECORRUPT, "the dtype is unknown"},
        {ONE, DTYPES, "{\"a\":\"huge\"}", FC_ECORRUPT, "the dtype is unknown"},
        {ONE, DTYPES, "{\"a\":\"complex32\"}", FC_ECORRUPT, UNFIT},
        {HALF, DTYPES, "{\"a\":\"complex32\"}", FC_OK, ""},
        {T("a", "F16", "[2,1]", "0", "4"), DTYPES, "{\"a\":\"complex32\"}", FC_ECORRUPT, UNFIT},
        {T("a", "F16", "[]", "0", "2") "," T("b", "F16", "[]", "2", "4"), DTYPES, "{\"a\":\"complex32\"}", FC_ECORRUPT,
         UNFIT},
        {ONE, SHARDING, "{\"b\":{\"saved_offsets\":[0]}}", FC_ECORRUPT, NONE},
        {ONE, SHARDING, "{\"a\":{\"saved_offsets\":[-1]}}", FC_ECORRUPT, OFFSETS},
        {ONE, SHARDING, "{\"a\":{\"saved_offsets\":[\"x\"]}}", FC_ECORRUPT, OFFSETS},
        {ONE, SHARDING, "{\"a\":{\"saved_offsets\":5}}", FC_ECORRUPT, OFFSETS},
        {ONE, SHARDING, "{\"a\":{\"saved_offsets\":{}}}", FC_ECORRUPT, OFFSETS},
        {ONE, SHARDING, "{\"a\":5}", FC_ECORRUPT, OFFSETS},
        {ONE, SHARDING, "{\"a\":{\"saved_offsets\":[0]}}", FC_OK, ""},
        {T("a", "F4", "[8]", "0", "4"), SHARDING, "{\"a\":{\"saved_offsets\":[1]}}", FC_EUNSUPPORTED,
         "do not fill whole bytes"},
        {T("a", "F4", "[8]", "0", "4"), SHARDING, "{\"a\":{\"saved_offsets\":[2]}}", FC_ECORRUPT,
         "it is a shard, but the name"},
        {ONE, PATHS, "{\"b\":[\"x\"]}", FC_ECORRUPT, NONE},
        {ONE, PATHS, "{\"a\":5}", FC_ECORRUPT, WRONG_PATH},
        {ONE, PATHS, "{\"a\":[null]}", FC_ECORRUPT, WRONG_PATH},
        {ONE, PATHS, "{\"a\":[{\"tuple\":-1}]}", FC_ECORRUPT, WRONG_PATH},
        {ONE, PATHS, "{\"a\":[{\"number\":\"x\"}]}", FC_ECORRUPT, WRONG_PATH},
        {ONE, PATHS, "{\"a\":[{\"tuple\":1},{\"number\":-3},2,\"x\"]}", FC_OK, ""},
        {ONE, LAYOUT, "{\"b\":{}}", FC_ECORRUPT, NONE},
        {ONE, LAYOUT, "{\"a\":{}}", FC_ECORRUPT, "its shape or its placements are missing"},
        {ONE, LAYOUT, "{\"a\":{\"shape\":[4]}}", FC_ECORRUPT, "its shape or its placements are missing"},
        {ONE, LAYOUT, "{\"a\":{\"shape\":[4,4],\"placements\":\"[Shard(0)]\"}}", FC_ECORRUPT,
         "another number of dimensions"},
        {ONE, MESH, "{", FC_ECORRUPT, WRONG_MESH},
        {ONE, MESH, "{\"names\":[\"dp\"],\"shape\":[1]}", FC_ECORRUPT, WRONG_MESH},
        {ONE, MESH, "{\"names\":[],\"shape\":[],\"rank\":0}", FC_ECORRUPT, WRONG_MESH},
        {ONE, MESH, "{\"names\":[\"dp\"],\"shape\":[1,1],\"rank\":0}", FC_ECORRUPT, WRONG_MESH},
        {ONE, MESH, "{\"names\":[5],\"shape\":[1],\"rank\":0}", FC_ECORRUPT, WRONG_MESH},
        {ONE, MESH, "{\"names\":[\"" LONG "\"],\"shape\":[1],\"rank\":0}", FC_ECORRUPT, WRONG_MESH},
        {ONE, MESH, "{\"names\":[\"dp\"],\"shape\":[0],\"rank\":0}", FC_ECORRUPT, WRONG_MESH},
        {ONE, MESH, "{\"names\":[\"dp\"],\"shape\":[4294967295],\"rank\":0}", FC_ECORRUPT, WRONG_MESH},
        {ONE, MESH, "{\"names\":[\"a\",\"b\"],\"shape\":[4294967294,9223372036854775807],\"rank\":0}", FC_ECORRUPT,
         WRONG_MESH},
        {ONE, MESH, "{\"names\":[\"dp\"],\"shape\":[2],\"rank\":-1}", FC_ECORRUPT, WRONG_MESH},
        {ONE, MESH, "{\"names\":[\"dp\"],\"shape\":[2],\"rank\":2}", FC_ECORRUPT, WRONG_MESH},
        {ONE, MESH, "{\"names\":[\"dp\"],\"shape\":[2],\"rank\":1}", FC_OK, ""},
        {ONE, "fsdpckpt.crc64", "0123456789abcdeg", FC_ECORRUPT, "16 hexadecimal digits"},
        {ONE, OBJECT, "5", FC_ECORRUPT, "a JSON object should start here"},
        {ONE, OBJECT, "{\"encoding\":5}", FC_ECORRUPT, "the value of encoding is invalid"},
        {ONE, OBJECT, "{\"json\":5}", FC_ECORRUPT, "the value of json is invalid"},
        {ONE, OBJECT, "{\"path\":[]}", FC_ECORRUPT, "the value of path is invalid"},
        {ONE, OBJECT, "{\"data\":5}", FC_ECORRUPT, "the value of data is invalid"},
        {ONE, OBJECT, "{\"encoding\":\"x\",\"data\":\"\",\"later\":1}", FC_ECORRUPT, INCOMPLETE},
        {ONE, OBJECT, "{\"encoding\":\"x\",\"json\":\"1\"}", FC_ECORRUPT, INCOMPLETE},
        {ONE, OBJECT, "{\"json\":\"1\",\"data\":\"\"}", FC_ECORRUPT, INCOMPLETE},
        {ONE, OBJECT, "{\"encoding\":\"x\",\"json\":\"{\",\"data\":\"\"}", FC_ECORRUPT, INCOMPLETE},
        {ONE, OBJECT, "{\"encoding\":\"x\",\"json\":\"1\",\"data\":\"AAAA\",\"path\":[\"o\",1]}", FC_OK, ""},
        {ONE, "safetensors.index", "{", FC_OK, ""},
        {ONE, "DCP_VERSION", "1.0", FC_OK, ""},
        {ONE, "format", "flax", FC_OK, ""},
        {ONE, "fsdpckpt.version", "9.9; rm", FC_OK, ""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const made files[MOST] = {{"a.safetensors", cases[i].entries, cases[i].key, cases[i].value}};
        expect(files, "a.safetensors", cases[i].code, cases[i].message);
    }
}

static void long_members_are_refused(void **state) {
    enum { SIZE = 70000 };
    static char text[SIZE + 8];
    const made mesh[MOST] = {{"a.safetensors", ONE, MESH, text}}, path[MOST] = {{"a.safetensors", ONE, PATHS, text}};
    (void)state;
    sprintf(text, "{\"a\":[");
    for (int i = 0; i < 300; i++) {
        strcat(text, "1,");
    }
    strcat(text, "1]}");
    expect(path, "a.safetensors", FC_ECORRUPT, WRONG_PATH);
    memset(text, ' ', SIZE);
    expect(mesh, "a.safetensors", FC_ECORRUPT, WRONG_MESH);
}

#define S(n) "shard-0000" n "-model-00001-of-00001.safetensors"
#define AT(offset) SHARDING, "{\"a\":{\"saved_offsets\":[" offset "]}}"
#define INDEX "model.safetensors.index.json"
#define MIXED "the directory has 2 checkpoints"

static const struct {
    made files[MOST];
    const char *opened; /* in the directory; "" for the directory itself */
    fc_code code;
    const char *message; /* part of it; of the note if it is opened */
} fits[] = {
    {{{S("1"), ONE, AT("0")}, {S("2"), ONE, AT("4")}}, "", FC_OK, "make sure that number 2 is the last one"},
    {{{S("1"), ONE, AT("0")}, {S("2"), HALF, AT("4")}}, "", FC_ECORRUPT, "it is float16 with 1 dimensions here"},
    {{{S("1"), ONE, AT("0")}, {S("2"), T("a", "U8", "[4,1]", "0", "4"), AT("4,0")}},
     "",
     FC_ECORRUPT,
     "with 2 dimensions here"},
    {{{S("1"), ONE, AT("0")}}, S("1"), FC_EUSAGE, "this is one rank's shard file"},
    {{{S("0"), ONE, AT("4")}}, "", FC_ECORRUPT, "it is a shard"},
    {{{"shard-1-model-2-of-1.safetensors", ONE, AT("4")}}, "", FC_ECORRUPT, "it is a shard"},
    {{{"shard-4294967295-model-1-of-1.safetensors", ONE, AT("4")}}, "", FC_ECORRUPT, "it is a shard"},
    {{{"shard-1-model-1-of-1.x.safetensors", ONE, AT("4")}}, "", FC_ECORRUPT, "it is a shard"},
    {{{"shard-x-model-1-of-1.safetensors", ONE, AT("4")}}, "", FC_ECORRUPT, "it is a shard"},
    {{{"shard-1-model-x.safetensors", ONE, AT("4")}}, "", FC_ECORRUPT, "it is a shard"},
    {{{"shard-1-model-1-of-2.safetensors", ONE, AT("0")}, {"shard-2-model-2-of-2.safetensors", ONE, AT("4")}},
     "",
     FC_OK,
     "number 2 is the last"},
    {{{"shard-1-model-1-of-2.safetensors", ONE, AT("0")}}, "", FC_ECORRUPT, "there is no shard-*-model-00002-of-00002"},
    {{{"shard-1-model-1-of-2.safetensors", ONE, AT("0")}, {"shard-2-model-1-of-1.safetensors", ONE, AT("4")}},
     "",
     FC_EUSAGE,
     MIXED},
    {{{"m-00001-of-00002.safetensors", ONE}, {"n-00002-of-00002.safetensors", ONE}}, "", FC_EUSAGE, MIXED},
    {{{"m-00001-of-00002.safetensors", ONE}, {"m-00002-of-00003.safetensors", ONE}}, "", FC_EUSAGE, MIXED},
    {{{"m-00001-of-00002.safetensors", ONE}, {"mm-00002-of-00002.safetensors", ONE}}, "", FC_EUSAGE, MIXED},
    {{{"m-00002-of-00002.safetensors", ONE}}, "", FC_ECORRUPT, "m-00001-of-00002"},
    {{{"m-00001-of-00001.safetensors", ONE}}, "", FC_OK, ""},
    {{{"m-00003-of-00002.safetensors", ONE}, {"m-x.safetensors", T("b", "U8", "[4]", "0", "4")}}, "", FC_EUSAGE, MIXED},
    {{{"m-1-of.safetensors", ONE}, {"m-1-of-1x.safetensors", T("b", "U8", "[4]", "0", "4")}}, "", FC_EUSAGE, MIXED},
    {{{"a.safetensors", ONE}, {INDEX, "{\"weight_map\":{\"a\":\"a.safetensors\"}}"}}, INDEX, FC_OK, ""},
    {{{"a.safetensors", ONE}, {INDEX, "{\"weight_map\":{\"a\":\"a.safetensors\"},\"weight_map\":{}}"}},
     "",
     FC_ECORRUPT,
     "weight_map appears twice"},
    {{{"a.safetensors", ONE}, {INDEX, "{\"weight_map\":{\"a\":\"a.safetensors\"}} x"}},
     "",
     FC_ECORRUPT,
     "something follows"},
    {{{"a.safetensors", ONE}, {INDEX, "{\"weight_map\":{\"a\":\"a.safetensors\"},\"metadata\":}"}},
     "",
     FC_ECORRUPT,
     "offset"},
    {{{"a.safetensors", ONE}, {INDEX, "{\"weight_map\":{\"a\":\"a.safetensors\"} 5}"}}, "", FC_ECORRUPT, "'}' or ','"},
    {{{"a.safetensors", ONE}, {INDEX, "{\"weight_map\" 5}"}}, "", FC_ECORRUPT, "':' is missing"},
    {{{"a.safetensors", ONE}, {INDEX, "{\"weight_map\":{\"a\":x}}"}}, "", FC_ECORRUPT, "offset"},
    {{{"a.safetensors", ONE}, {INDEX, "[]"}}, "", FC_ECORRUPT, "a JSON object should start"},
    {{{"a.safetensors", ONE}, {INDEX, "{\"weight_map\":{\"a\":\"a.safetensors\"},\"metadata\":{\"total_size\":5}}"}},
     "",
     FC_OK,
     "total_size in model.safetensors.index.json is 5"},
    {{{"a.safetensors", ONE},
      {"b.safetensors", T("b", "U8", "[4]", "0", "4")},
      {INDEX, "{\"weight_map\":{\"a\":\"b.safetensors\",\"b\":\"b.safetensors\"}}"}},
     "",
     FC_ECORRUPT,
     "says that tensor a is in b.safetensors, but it is not"},
    {{{"a.safetensors", ONE},
      {"b.safetensors", T("b", "U8", "[4]", "0", "4")},
      {INDEX, "{\"weight_map\":{\"a\":\"b.safetensors\",\"b\":\"a.safetensors\"}}"}},
     "",
     FC_ECORRUPT,
     "but the weight_map says"},
    {{{INDEX, "{\"weight_map\":{\"a\":\"a.safetensors\",\"b\":\"a.safetensors\"}}"}},
     "",
     FC_ECORRUPT,
     "maps 2 tensors to it"},
    {{{"a.safetensors", ONE}, {"b.safetensors.index.json", "{\"weight_map\":{\"a\":\"a.safetensors\"}}"}},
     "",
     FC_OK,
     ""},
    {{{"a.safetensors", ONE}, {"b.safetensors.index.json", "{}"}, {"c.safetensors.index.json", "{}"}},
     "",
     FC_EUSAGE,
     MIXED},
    {{{"a.safetensors", ONE},
      {INDEX, "{\"weight_map\":{\"a\":\"a.safetensors\"}}"},
      {"c.safetensors.index.json", "{}"}},
     "",
     FC_OK,
     ""},
    {{{"weights", ONE}}, "weights", FC_OK, ""},
    {{{"weights", " " ONE, "k", "v"}}, "weights", FC_OK, ""},
};

static void files_that_do_not_fit_are_refused(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof fits / sizeof *fits; i++) {
        expect(fits[i].files, fits[i].opened, fits[i].code, fits[i].message);
    }
}

/* Two shards with the mesh [dp 2] and these members. */
static void shards_of_different_checkpoints_are_refused(void **state) {
    static const struct {
        const char *first, *second; /* members of __metadata__ in addition to the offsets, with their values escaped */
        fc_code code;
        const char *message;
    } cases[] = {
#define OF(rank) "\"" MESH "\":\"{\\\"names\\\":[\\\"dp\\\"],\\\"shape\\\":[2],\\\"rank\\\":" rank "}\""
#define GLOBAL(shape, placements)                                                                                      \
    ",\"" LAYOUT "\":\"{\\\"a\\\":{\\\"shape\\\":" shape ",\\\"placements\\\":\\\"" placements "\\\"}}\""
#define WITH(key, value) ",\"" key "\":\"" value "\""
#define GOOD_OBJECT(json)                                                                                              \
    WITH(OBJECT, "{\\\"encoding\\\":\\\"x\\\",\\\"json\\\":\\\"" json "\\\",\\\"data\\\":\\\"\\\"}")
        {OF("0") GLOBAL("[8]", "[Shard(0)]"), OF("1") GLOBAL("[8]", "[Shard(0)]"), FC_OK, ""},
        {OF("0") GLOBAL("[8]", "[Shard(0)]"), OF("1") GLOBAL("[9]", "[Shard(0)]"), FC_ECORRUPT,
         "its global shape differs"},
        {OF("0") GLOBAL("[8]", "[Shard(0)]"), OF("1"), FC_ECORRUPT, "its global shape differs"},
        {OF("0") GLOBAL("[8]", "none"), OF("1") GLOBAL("[8]", "none"), FC_ECORRUPT,
         "the placements none do not fit the mesh"},
        {OF("0") GLOBAL("[7]", "[Shard(0)]"), OF("1") GLOBAL("[7]", "[Shard(0)]"), FC_ECORRUPT,
         "the shard exceeds the tensor"},
        {OF("0") GLOBAL("[9223372036854775807]", "[Replicate()]"),
         OF("1") GLOBAL("[9223372036854775807]", "[Replicate()]"), FC_ECORRUPT, "the product of its sizes overflows"},
        {OF("1"), OF("0"), FC_ECORRUPT, "the file holds the shard of rank 1"},
        {OF("0"), "\"k\":\"v\"", FC_ECORRUPT, "its mesh differs from that of"},
        {OF("0"), NULL, FC_ECORRUPT, "there are only the shards of the first 1"},
        {OF("0") GOOD_OBJECT("1"), OF("1") GOOD_OBJECT("1"), FC_OK, ""},
        {OF("0") GOOD_OBJECT("1"), OF("1") GOOD_OBJECT("2"), FC_ECORRUPT, "the object differs from that in"},
        {OF("0") WITH("k", "v"), OF("1") WITH("k", "v"), FC_OK, ""},
        {OF("0") WITH("k", "v"), OF("1") WITH("k", "w"), FC_OK, ""},
        {OF("0") WITH(PATHS, "{\\\"a\\\":[\\\"x\\\",1]}"), OF("1") WITH(PATHS, "{\\\"a\\\":[\\\"x\\\",1]}"), FC_OK, ""},
        {OF("0") WITH(PATHS, "{\\\"a\\\":[\\\"x\\\",1]}"), OF("1") WITH(PATHS, "{\\\"a\\\":[\\\"x\\\",2]}"), FC_OK, ""},
        {OF("0") WITH(PATHS, "{\\\"a\\\":[\\\"x\\\",1]}"), OF("1") WITH(PATHS, "{\\\"a\\\":[\\\"x\\\"]}"), FC_OK, ""},
    };
    static char text[2][2000];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *members[2] = {cases[i].first, cases[i].second};
        for (int k = 0; k < 2; k++) {
            sprintf(text[k], "\"__metadata__\":{\"" SHARDING "\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[%d]}}\",%s}," ONE,
                    4 * k, members[k] ? members[k] : "");
        }
        const made files[MOST] = {{S("1"), text[0]}, {members[1] ? S("2") : NULL, text[1]}};
        expect(files, "", cases[i].code, cases[i].message);
    }
}

static int set_up(void **state) {
    (void)state;
    return mkdtemp(directory) ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    return rmdir(directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damaged_members_are_refused),
        cmocka_unit_test(long_members_are_refused),
        cmocka_unit_test(files_that_do_not_fit_are_refused),
        cmocka_unit_test(shards_of_different_checkpoints_are_refused),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
