/*
 * formats/torch: the pickle machine and the JSON decoding, on real pickles, on bombs, and on damaged input.
 */
#include "torch/object/item.h"
#include "torch/pickle/pickle.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "pickle_cases.h"

static fc_code load(const void *bytes, size_t n, fc_pickle_mode mode, fc_pickle **out, fc_error *err) {
    fc_pickle_source source = {"x.pkl", 1000, n, -1, bytes};
    return fc_pickle_load(&source, mode, out, err);
}

/* Loads a string literal's bytes without its NUL. */
#define LOAD(text, mode, p, err) load(text, sizeof(text) - 1, mode, p, err)

static char *decode(const void *bytes, size_t n) {
    fc_pickle *p;
    fc_error err;
    const char *json = NULL;
    if (load(bytes, n, FC_PICKLE_ITEM, &p, &err) != FC_OK) {
        print_error("%s\n", err.message);
        return NULL;
    }
    fc_arena *arena = fc_arena_new();
    assert_int_equal(fc_torch_json(p, p->root, 65536 + 16 * n, arena, &json, &err), FC_OK);
    char *copy = strdup(json);
    fc_arena_free(arena);
    fc_pickle_free(p);
    return copy;
}

static void assert_json(const void *bytes, size_t n, const char *json) {
    char *got = decode(bytes, n);
    assert_non_null(got);
    assert_string_equal(got, json);
    free(got);
}

#define ASSERT_JSON(text, json) assert_json(text, sizeof(text) - 1, json)

static void assert_refused(const void *bytes, size_t n, fc_pickle_mode mode, fc_code code, const char *message) {
    fc_pickle *p;
    fc_error err;
    assert_int_equal(load(bytes, n, mode, &p, &err), code);
    assert_null(p);
    assert_string_equal(err.message, message);
}

#define ASSERT_REFUSED(text, message) assert_refused(text, sizeof(text) - 1, FC_PICKLE_STRICT, FC_ECORRUPT, message)

static size_t from_hex(const char *hex, unsigned char *out) {
    size_t n = strlen(hex) / 2;
    for (size_t i = 0; i < n; i++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
        out[i] = (unsigned char)byte;
    }
    return n;
}

static void python_values(void **state) {
    (void)state;
    unsigned char bytes[4096];
    for (size_t i = 0; i < sizeof pickle_cases / sizeof *pickle_cases; i++) {
        size_t n = from_hex(pickle_cases[i].hex, bytes);
        char *json = decode(bytes, n);
        assert_non_null(json);
        if (strcmp(json, pickle_cases[i].json) != 0) {
            print_error("%s\n", pickle_cases[i].name);
        }
        assert_string_equal(json, pickle_cases[i].json);
        free(json);
    }
}

/* Every proper prefix of every real pickle is refused with a message. */
static void every_prefix_is_refused(void **state) {
    (void)state;
    unsigned char bytes[4096];
    for (size_t i = 0; i < sizeof pickle_cases / sizeof *pickle_cases; i++) {
        size_t n = from_hex(pickle_cases[i].hex, bytes);
        for (size_t cut = 0; cut < n; cut++) {
            fc_pickle *p;
            fc_error err = {FC_OK, ""};
            unsigned char *exact = malloc(cut + 1); /* so that AddressSanitizer sees a read past the end */
            memcpy(exact, bytes, cut);
            exact = realloc(exact, cut ? cut : 1);
            assert_int_equal(load(exact, cut, FC_PICKLE_ITEM, &p, &err), FC_ECORRUPT);
            assert_true(strncmp(err.message, "x.pkl: offset ", 14) == 0);
            free(exact);
        }
    }
}

static void nesting_does_not_recurse(void **state) {
    (void)state;
    enum { DEPTH = 1000000 };
    unsigned char *bytes = malloc(2 * DEPTH + 3);
    memcpy(bytes, "\x80\x04", 2);
    memset(bytes + 2, ']', DEPTH);
    memset(bytes + 2 + DEPTH, 'a', DEPTH - 1);
    bytes[2 * DEPTH + 1] = '.';
    char *json = decode(bytes, 2 * DEPTH + 2);
    assert_non_null(json);
    assert_true(strncmp(json, "[[[[", 4) == 0);
    assert_non_null(strstr(json, "[{\"$omitted\":\"too deep\"}]"));
    free(json);
    bytes[2] = 'N';
    memset(bytes + 3, 0x85, DEPTH);
    bytes[DEPTH + 3] = '.';
    json = decode(bytes, DEPTH + 4);
    assert_non_null(strstr(json, "[{\"$omitted\":\"too deep\"}]"));
    free(json);
    memset(bytes + 2, '(', 2 * DEPTH); /* marks only */
    fc_pickle *p;
    fc_error err;
    assert_int_equal(load(bytes, 2 * DEPTH + 2, FC_PICKLE_ITEM, &p, &err), FC_ECORRUPT);
    free(bytes);
}

/* Each tuple holds the previous one twice: 2^60 values in 424 bytes. */
static void doubling_bomb_is_bounded(void **state) {
    (void)state;
    unsigned char bytes[512] = "\x80\x04)\x94";
    size_t n = 4;
    for (unsigned i = 0; i < 60; i++) {
        const unsigned char step[] = {'0', 'h', (unsigned char)i, 'h', (unsigned char)i, 0x86, 0x94};
        memcpy(bytes + n, step, sizeof step);
        n += sizeof step;
    }
    bytes[n++] = '.';
    char *json = decode(bytes, n);
    assert_non_null(strstr(json, "{\"$omitted\":\"too large\"}"));
    assert_true(strlen(json) < 10 * (65536 + 16 * n));
    free(json);
}

static void cycles_are_decoded_once(void **state) {
    (void)state;
    char *json = decode("\x80\x04]\x94h\x00"
                        "a.",
                        8);
    assert_non_null(strstr(json, "[{\"$omitted\":\"too deep\"}]"));
    free(json);
    json = decode("\x80\x02}q\x00X\x01\x00\x00\x00kh\x00s.", 15);
    assert_non_null(strstr(json, "{\"k\":{\"$omitted\":\"too deep\"}}"));
    free(json);
}

/* Marks on an empty stack, found by the fuzzer. */
static void empty_stack(void **state) {
    (void)state;
    ASSERT_JSON("\x80\x02(t.", "{\"$tuple\":[]}");
    ASSERT_JSON("\x80\x04(\x91.", "{\"$frozenset\":[]}");
    ASSERT_JSON("\x80\x02(1].", "[]");
    ASSERT_JSON("\x80\x02(0].", "[]");
    ASSERT_JSON("\x80\x02](e.", "[]");
    ASSERT_JSON("\x80\x02}(u.", "{}");
}

/* Folded values must still exist when the memo refers to them. */
static void memo_outlives_folding(void **state) {
    (void)state;
    ASSERT_JSON("\x80\x02"
                "ctorch\nSize\nK\x01K\x02\x86\x85q\x00Rh\x00\x86.",
                "{\"$tuple\":[{\"$size\":[1,2]},{\"$tuple\":[{\"$tuple\":[1,2]}]}]}");
    static const char object[] = "\x80\x02"
                                 "ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)\x81}q\x05X\x07\x00"
                                 "\x00\x00offsets)sX\x05\x00\x00\x00sizesK\x07sb}X\x01\x00\x00\x00zK\x01sh\x05\x87.";
    fc_pickle *p;
    fc_error err;
    assert_int_equal(LOAD(object, FC_PICKLE_STRICT, &p, &err), FC_OK);
    size_t n;
    const fc_pv *items = fc_pickle_tuple(p, p->root, &n);
    assert_int_equal(n, 3);
    int64_t seven;
    assert_true(fc_pickle_is_object(p, items[0], FC_CLASS_CHUNK_STORAGE));
    assert_true(fc_pickle_int(p, fc_pickle_slot(p, items[0], FC_CHUNK_SIZES), &seven));
    assert_int_equal(seven, 7);
    fc_pickle_items(p, items[1], &n);
    assert_int_equal(n, 2);
    fc_pickle_items(p, items[2], &n);
    assert_int_equal(n, 4);
    fc_pickle_free(p);
}

static void unused_state_is_recycled(void **state) {
    (void)state;
    enum { COUNT = 10000 };
    static const char head[] = "\x80\x02"
                               "ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\nq\x00"
                               "0](";
    static const char one[] = "h\x00)\x81}q\x01(X\x07\x00\x00\x00offsetsctorch\nSize\nK\x01K\x02\x86\x85RX\x05\x00"
                              "\x00\x00sizesNub";
    unsigned char *bytes = malloc(sizeof head + COUNT * sizeof one + 2);
    size_t n = sizeof head - 1;
    memcpy(bytes, head, n);
    for (int i = 0; i < COUNT; i++, n += sizeof one - 1) {
        memcpy(bytes + n, one, sizeof one - 1);
    }
    memcpy(bytes + n, "e.", 2);
    fc_pickle *p;
    fc_error err;
    assert_int_equal(load(bytes, n + 2, FC_PICKLE_STRICT, &p, &err), FC_OK);
    assert_true(p->ncontainers <= 2);
    assert_true(p->ntext < 4096);
    size_t count;
    const fc_pv *items = fc_pickle_items(p, p->root, &count);
    assert_int_equal(count, COUNT);
    fc_pickle_tuple(p, fc_pickle_slot(p, items[COUNT - 1], FC_CHUNK_OFFSETS), &count);
    assert_int_equal(count, 2);
    fc_pickle_free(p);
    free(bytes);
}

/* A pickle at an offset of a file, larger than the window and with a string that does not fit into it. */
static void window_moves_over_a_file(void **state) {
    (void)state;
    enum { STRINGS = 60000, LONG = 700000 };
    char *bytes = malloc(STRINGS * 16 + LONG + 64);
    size_t n = 0;
    memcpy(bytes, "\x80\x04](", 4);
    n = 4;
    for (int i = 0; i < STRINGS; i++) {
        n += (size_t)sprintf(bytes + n, "\x8c\x08s%07d", i % 1000);
        if (i == STRINGS / 2) {
            memcpy(bytes + n, "X\x60\xae\x0a\x00", 5);
            memset(bytes + n + 5, 'L', LONG);
            n += 5 + LONG;
        }
    }
    memcpy(bytes + n, "e.", 2);
    n += 2;
    FILE *f = tmpfile();
    assert_int_equal(fwrite("prefix", 1, 6, f), 6);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fflush(f);
    fc_pickle_source source = {"file", 6, n, fileno(f), NULL};
    fc_pickle *p;
    fc_error err;
    size_t count, length;
    assert_int_equal(fc_pickle_load(&source, FC_PICKLE_STRICT, &p, &err), FC_OK);
    const fc_pv *items = fc_pickle_items(p, p->root, &count);
    assert_int_equal(count, STRINGS + 1);
    assert_string_equal(fc_pickle_bytes(p, items[999], &length), "s0000999");
    assert_int_equal(items[0], items[1000]); /* interned */
    const char *text = fc_pickle_bytes(p, items[STRINGS / 2 + 1], &length);
    assert_int_equal(length, LONG);
    assert_int_equal(strspn(text, "L"), LONG);
    assert_string_equal(fc_pickle_bytes(p, items[STRINGS], &length), "s0000999");
    assert_int_equal(p->ninterned, 1001);
    fc_pickle_free(p);
    /* A file that is shorter than it claims. */
    source.size = n + 10;
    source.offset = 7;
    assert_int_equal(fc_pickle_load(&source, FC_PICKLE_STRICT, &p, &err), FC_ECORRUPT);
    fclose(f);
    free(bytes);
}

static void hostile_globals_are_refused(void **state) {
    (void)state;
    ASSERT_REFUSED("\x80\x02"
                   "cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
                   "x.pkl: offset 1002: pickle global os.system is not allowed: this file may be hostile");
    ASSERT_REFUSED("\x80\x04\x8c\x05posix\x8c\x06system\x93.",
                   "x.pkl: offset 1017: pickle global posix.system is not allowed: this file may be hostile");
    ASSERT_REFUSED("\x80\x02"
                   "cbuiltins\ngetattr\nNX\x01\x00\x00\x00x\x86R.",
                   "x.pkl: offset 1028: pickle global builtins.getattr is not allowed: this file may be hostile");
    ASSERT_REFUSED("\x80\x02"
                   "ctorch.hub\nload\n.",
                   "x.pkl: offset 1002: pickle global torch.hub.load is not allowed: this file may be hostile");
    /* An unknown class is not called hostile. */
    assert_refused("\x80\x02"
                   "cmine\nConfig\n)R.",
                   18, FC_PICKLE_STRICT, FC_EUNSUPPORTED, "x.pkl: offset 1016: unsupported: class Config of mine");
    /* In an object the name is kept and nothing is called. */
    ASSERT_JSON("\x80\x02"
                "cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
                "{\"$unsafe\":\"os.system\"}");
    ASSERT_JSON("\x80\x02"
                "cmine\nConfig\n)R.",
                "{\"$opaque\":\"mine.Config\"}");
    ASSERT_JSON("\x80\x02"
                "cbuiltins\ngetattr\nNX\x01\x00\x00\x00x\x86R.",
                "{\"$unsafe\":\"builtins.getattr\"}");
    ASSERT_JSON("\x80\x02"
                "cos\nsystem\n)R}X\x01\x00\x00\x00xNsbK\x01K\x02s.",
                "{\"$unsafe\":\"os.system\"}");
    /* Enumeration members as Python 3.11.0 to 3.11.3 write them. */
    ASSERT_JSON("\x80\x02"
                "c__builtin__\ngetattr\nctorch.distributed.fsdp.api\nShardingStrategy\nX\x01\x00\x00\x00x\x86R.",
                "{\"$object\":\"torch.distributed.fsdp.api.ShardingStrategy\",\"arguments\":[\"x\"]}");
    ASSERT_JSON("\x80\x02"
                "c__builtin__\ngetattr\nctorch.distributed.fsdp.api\nShardingStrategy\nX\x01\x00\x00\x00_\x86R.",
                "{\"$unsafe\":\"__builtin__.getattr\"}");
    ASSERT_JSON("\x80\x02"
                "c__builtin__\ngetattr\ncargparse\nNamespace\nX\x01\x00\x00\x00x\x86R.",
                "{\"$unsafe\":\"__builtin__.getattr\"}");
    fc_pickle *p;
    fc_error err;
    assert_int_equal(LOAD("\x80\x02"
                          "cbuiltins\ngetattr\nctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
                          "X\x01\x00\x00\x00x\x86R.",
                          FC_PICKLE_STRICT, &p, &err),
                     FC_OK);
    fc_pickle_free(p);
}

/* 10,000 sets made from one shared list of 10,000 numbers: each takes four bytes of the pickle. */
static void shared_lists_cost_no_memory(void **state) {
    (void)state;
    enum { MANY = 10000 };
    static const char head[] = "\x80\x02"
                               "c__builtin__\nset\nq\x01(](";
    char *bytes = malloc(sizeof head + 16 * MANY);
    char *at = bytes;
    fc_pickle *p = NULL;
    fc_error err;
    memcpy(at, head, sizeof head - 1);
    at += sizeof head - 1;
    for (int i = 0; i < MANY; i++) {
        *at++ = 'K';
        *at++ = (char)(i & 0x7f);
    }
    memcpy(at, "eq\x02", 3);
    at += 3;
    for (int i = 0; i < MANY; i++) {
        memcpy(at, "h\x01h\x02\x85R", 6);
        at += 6;
    }
    memcpy(at, "t\x86.", 3);
    at += 3;
    const fc_pickle_source source = {"x.pkl", 0, (uint64_t)(at - bytes), -1, (const unsigned char *)bytes};
    assert_int_equal(fc_pickle_load(&source, FC_PICKLE_ITEM, &p, &err), FC_EUNSUPPORTED);
    assert_non_null(strstr(err.message, "made from one shared value"));
    free(bytes);
}

static void damaged_pickles_are_refused(void **state) {
    (void)state;
    ASSERT_REFUSED("", "x.pkl: offset 1000: the pickle is cut off: 1 more bytes are expected, 0 are left");
    ASSERT_REFUSED("PK\x03\x04",
                   "x.pkl: offset 1000: pickle opcode 'P' (0x50) is not allowed here: this file may be hostile");
    ASSERT_REFUSED(
        "N.",
        "x.pkl: offset 1000: not a pickle of protocol 2 to 5, the only ones that are examined: it may be hostile");
    assert_refused("\x80\x06N.", 4, FC_PICKLE_STRICT, FC_EUNSUPPORTED,
                   "x.pkl: offset 1000: pickle protocol 6 is not one of 2 to 5");
    ASSERT_REFUSED("\x80\x04i.",
                   "x.pkl: offset 1002: pickle opcode 'i' (0x69) is not allowed here: this file may be hostile");
    ASSERT_REFUSED("\x80\x04\x82\x01.",
                   "x.pkl: offset 1002: pickle opcode 0x82 is not allowed here: this file may be hostile");
    ASSERT_REFUSED("\x80\x04.", "x.pkl: offset 1002: the pickle is damaged: an opcode finds too few values");
    ASSERT_REFUSED("\x80\x04NN.", "x.pkl: offset 1004: the pickle is damaged: values are left over at its end");
    ASSERT_REFUSED("\x80\x04N(.", "x.pkl: offset 1004: the pickle is damaged: an opcode finds too few values");
    ASSERT_REFUSED("\x80\x04t.", "x.pkl: offset 1002: the pickle is damaged: an opcode finds no mark");
    ASSERT_REFUSED("\x80\x04N(R.", "x.pkl: offset 1004: the pickle is damaged: an opcode finds too few values");
    ASSERT_REFUSED("\x80\x04NNR.",
                   "x.pkl: offset 1004: the pickle is damaged: it calls a value that is not a function");
    ASSERT_REFUSED("\x80\x04}(]Nu.",
                   "x.pkl: offset 1006: the pickle is damaged: a key of a dict or set cannot be hashed");
    ASSERT_REFUSED("\x80\x04\x8f(]\x85\x90.",
                   "x.pkl: offset 1006: the pickle is damaged: a key of a dict or set cannot be hashed");
    ASSERT_REFUSED("\x80\x04}(Nu.", "x.pkl: offset 1005: the pickle is damaged: a dict has a key without a value");
    ASSERT_REFUSED("\x80\x04]NNs.",
                   "x.pkl: offset 1005: the pickle is damaged: items are added to a value that is not a dict");
    ASSERT_REFUSED("\x80\x04}Na.",
                   "x.pkl: offset 1004: the pickle is damaged: items are added to a value that is not a list");
    ASSERT_REFUSED("\x80\x04}(\x90.",
                   "x.pkl: offset 1004: the pickle is damaged: items are added to a value that is not a set");
    ASSERT_REFUSED("\x80\x04N}b.", "x.pkl: offset 1004: the pickle is damaged: BUILD on a value that has no state");
    ASSERT_REFUSED("\x80\x04h\x02.",
                   "x.pkl: offset 1002: the pickle is damaged: it fetches memo entry 2, which was never stored");
    ASSERT_REFUSED("\x80\x04Nq\x05\x94.", "x.pkl: offset 1005: the pickle is damaged: it mixes MEMOIZE and PUT");
    ASSERT_REFUSED("\x80\x04NQ.", "x.pkl: offset 1003: the pickle has a persistent id, which has no meaning here");
    ASSERT_REFUSED("\x80\x04\x8c\x02\xc3(.", "x.pkl: offset 1002: the pickle is damaged: a string is not UTF-8");
    ASSERT_REFUSED("\x80\x04\x8c\x02\xc0\x80.", "x.pkl: offset 1002: the pickle is damaged: a string is not UTF-8");
    ASSERT_REFUSED("\x80\x04NN\x93.", "x.pkl: offset 1004: the pickle is damaged: a global's name is not a string");
    ASSERT_REFUSED("\x80\x02"
                   "ctorch\nSize",
                   "x.pkl: offset 1002: the pickle is damaged: a global's name does not end");
    ASSERT_REFUSED("\x80\x02"
                   "ctorch\nSize\nNR.",
                   "x.pkl: offset 1015: the pickle is damaged: the arguments of a call are not a tuple");
    ASSERT_REFUSED("\x80\x02"
                   "ctorch\nSize\nN\x85R.",
                   "x.pkl: offset 1016: the pickle is damaged: it calls torch.Size with invalid arguments");
    ASSERT_REFUSED("\x80\x04X\xff\xff\xff\xff",
                   "x.pkl: offset 1002: the pickle is cut off: 4294967295 more bytes are expected, 0 are left");
    ASSERT_REFUSED(
        "\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff",
        "x.pkl: offset 1002: the pickle is cut off: 18446744073709551615 more bytes are expected, 0 are left");
    ASSERT_REFUSED(
        "\x80\x02T\xff\xff\xff\xff",
        "x.pkl: offset 1002: the pickle is cut off: 18446744073709551615 more bytes are expected, 0 are left");
}

/* Tensor descriptions in the forms of torch's _rebuild functions are checked on their own. */
static void huge_zero_stride_view(void **state) {
    (void)state;
    static const char bytes[] = "\x80\x02"
                                "ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
                                "X\x01\x00\x00\x00"
                                "0X\x03\x00\x00\x00"
                                "cpuK\x01tQK\x00\x8a\x06\x00\x00\x00\x00\x00\x04\x85K\x00\x85\x89"
                                "ccollections\nOrderedDict\n)RtR.";
    fc_pickle *p;
    fc_error err;
    fc_torch_tensor t;
    assert_int_equal(LOAD(bytes, FC_PICKLE_ITEM, &p, &err), FC_OK);
    assert_int_equal(fc_torch_tensor_decode(p, p->root, &t, &err), FC_OK);
    assert_int_equal(t.ndim, 1);
    assert_int_equal(t.sizes[0], INT64_C(1) << 42);
    assert_int_equal(t.strides[0], 0);
    assert_int_equal(t.dtype, FC_F32);
    assert_int_equal(t.storage_bytes, 4);
    fc_pickle_free(p);
    ASSERT_JSON(bytes, "{\"$tensor\":{\"dtype\":\"float32\",\"shape\":[4398046511104]}}");
}

/* A dtype of torch that is not supported is not called a hostile global. */
static void element_types(void **state) {
    static const char *const foreign[] = {"quint8", "bits16", "uint4", "int7", "bit", "bcomplex32"};
    uint32_t aux = 0;
    (void)state;
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        assert_int_equal(fc_global_find("torch", 5, foreign[i], strlen(foreign[i]), &aux), FC_GLOBAL_DTYPE);
        assert_int_equal(aux, FC_OPAQUE);
    }
    assert_int_equal(fc_global_find("torch", 5, "bfloat16", 8, &aux), FC_GLOBAL_DTYPE);
    assert_int_equal(aux, FC_BF16);
    assert_int_equal(fc_global_find("torch", 5, "float4", 6, &aux), FC_GLOBAL_UNKNOWN);
}

/* A harmless class is harmless only with harmless arguments and states. */
static void uses_are_judged(void **state) {
    (void)state;
#define HOLDER "cargparse\nNamespace\n)\x81}X\x04\x00\x00\x00keysctorch.nn.functional\nrelu\nsb"
    static const char holder[] = "\x80\x02" HOLDER ".";
    static const char dict_of_holder[] = "\x80\x02"
                                         "cUserDict\nIterableUserDict\n" HOLDER "\x85R.";
    static const char endless[] = "\x80\x02(ccollections\ndeque\ncitertools\ncount\n)R\x85Rt.";
    static const char class[] = "\x80\x02"
                                "cargparse\nNamespace\n)\x81N}X\x09\x00\x00\x00__class__cbuiltins\nint\ns\x86"
                                "b.";
    static const struct {
        const char *bytes;
        size_t n;
        fc_pickle_risk risk;
    } cases[] = {{holder, sizeof holder - 1, FC_RISK_NONE},
                 {dict_of_holder, sizeof dict_of_holder - 1, FC_RISK_RUNS},
                 {endless, sizeof endless - 1, FC_RISK_UNKNOWN},
                 {class, sizeof class - 1, FC_RISK_UNKNOWN}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fc_pickle *p;
        fc_error err;
        assert_int_equal(load(cases[i].bytes, cases[i].n, FC_PICKLE_ITEM, &p, &err), FC_OK);
        assert_int_equal(p->risk, cases[i].risk);
        fc_pickle_free(p);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(python_values),
        cmocka_unit_test(every_prefix_is_refused),
        cmocka_unit_test(nesting_does_not_recurse),
        cmocka_unit_test(doubling_bomb_is_bounded),
        cmocka_unit_test(cycles_are_decoded_once),
        cmocka_unit_test(memo_outlives_folding),
        cmocka_unit_test(unused_state_is_recycled),
        cmocka_unit_test(window_moves_over_a_file),
        cmocka_unit_test(hostile_globals_are_refused),
        cmocka_unit_test(shared_lists_cost_no_memory),
        cmocka_unit_test(damaged_pickles_are_refused),
        cmocka_unit_test(element_types),
        cmocka_unit_test(huge_zero_stride_view),
        cmocka_unit_test(empty_stack),
        cmocka_unit_test(uses_are_judged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
