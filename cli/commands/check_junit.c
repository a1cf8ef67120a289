/*
 * Prints the report of check as JUnit XML. There is one test case per kind of finding that was checked, so the cases
 * stay the same from run to run and their history is meaningful.
 */
#include "commands/check_print.h"

/* XML cannot contain control characters, even escaped. They become U+FFFD, as do characters that reorder a line. */
static void print_xml(text_out *out, const char *s) {
    static const char replacement[] = "\xef\xbf\xbd";
    while (*s) {
        uint32_t code;
        size_t len = text_utf8(s, &code);
        const char *entity = *s == '&'   ? "&amp;"
                             : *s == '<' ? "&lt;"
                             : *s == '>' ? "&gt;"
                             : *s == '"' ? "&quot;"
                                         : NULL;
        bool allowed = len > 0 && !text_is_unsafe(code) && code != 0xfffe && code != 0xffff;
        if (entity) {
            text_puts(out, entity);
        } else if (allowed) {
            text_write(out, s, len);
        } else {
            text_puts(out, replacement);
        }
        s += len ? len : 1;
    }
}

/* Whether this kind of finding was checked: some kinds need a reference, a mesh or versions. */
static bool was_checked(const check_view *c, int kind) {
    if (kind >= FC_FOUND_UNEVEN) {
        return c->mesh;
    }
    if (kind >= FC_FOUND_MISSING) {
        return c->reference != NULL;
    }
    return kind < FC_FOUND_VERSION_DAMAGED || c->versions;
}

static void print_messages(text_out *out, const check_view *c, int kind) {
    for (size_t i = 0; i < c->report->count; i++) {
        if ((int)c->report->findings[i].kind == kind) {
            print_xml(out, c->report->findings[i].message);
            text_puts(out, "\n");
        }
    }
}

static void print_case(text_out *out, const check_view *c, int kind, const fc_finding *first) {
    const fc_finding_info *info = fc_finding_info_get((fc_finding_kind)kind);
    text_printf(out, "    <testcase classname=\"fsdpckpt.check\" name=\"%s\"", info->id);
    if (!first) {
        text_puts(out, "/>\n");
        return;
    }
    text_puts(out, ">\n      ");
    if (info->severity == FC_SEVERITY_ERROR) {
        text_printf(out, "<failure type=\"%s\" message=\"", info->id);
        print_xml(out, first->message);
        text_puts(out, "\">");
    } else {
        text_puts(out, "<system-out>");
    }
    print_messages(out, c, kind);
    text_printf(out, "</%s>\n    </testcase>\n", info->severity == FC_SEVERITY_ERROR ? "failure" : "system-out");
}

void check_print_junit(text_out *out, const check_view *c) {
    const fc_finding *first[FC_FOUND_KINDS] = {NULL};
    size_t cases = 0, failures = 0;
    for (size_t i = c->report->count; i-- > 0;) {
        first[c->report->findings[i].kind] = &c->report->findings[i];
    }
    for (int kind = 0; kind < FC_FOUND_KINDS; kind++) {
        bool failed = first[kind] && fc_finding_info_get((fc_finding_kind)kind)->severity == FC_SEVERITY_ERROR;
        cases += was_checked(c, kind);
        failures += failed;
    }
    text_puts(out, "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    text_printf(out, "<testsuites tests=\"%zu\" failures=\"%zu\" errors=\"0\">\n", cases, failures);
    text_puts(out, "  <testsuite name=\"fsdpckpt check ");
    print_xml(out, c->path);
    text_printf(out, "\" tests=\"%zu\" failures=\"%zu\" errors=\"0\" skipped=\"0\">\n", cases, failures);
    for (int kind = 0; kind < FC_FOUND_KINDS; kind++) {
        if (was_checked(c, kind)) {
            print_case(out, c, kind, first[kind]);
        }
    }
    text_puts(out, "  </testsuite>\n</testsuites>\n");
}
