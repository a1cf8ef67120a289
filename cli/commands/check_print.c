/*
 * Prints the report of check as text, JSON and GitHub annotations: see check_print.h.
 */
#include "commands/check_print.h"

#include "output/json_out.h"

static const char *severity_of(const fc_finding *f) {
    return fc_finding_info_get(f->kind)->severity == FC_SEVERITY_ERROR ? "error" : "warning";
}

static void print_number(text_out *out, size_t n, const char *noun) {
    char count[TEXT_SIZE_MAX];
    text_printf(out, "%s %s%s", text_count(count, n), noun, n == 1 ? "" : "s");
}

static void print_summary(text_out *out, const check_view *c) {
    const fc_report *r = c->report;
    text_name(out, c->path);
    if (c->reference) {
        text_puts(out, r->errors ? ": does not fit " : ": fits ");
        text_name(out, c->reference);
    } else {
        text_puts(out, r->errors ? ": not valid" : ": headers are valid");
    }
    text_puts(out, ": ");
    print_number(out, r->errors, "error");
    text_puts(out, ", ");
    print_number(out, r->warnings, "warning");
    text_puts(out, "; ");
    print_number(out, r->tensors, "tensor");
    text_puts(out, ", ");
    print_number(out, r->objects, "object");
    if (r->allowed) {
        text_puts(out, "; ");
        print_number(out, r->allowed, "difference");
        text_puts(out, " allowed");
    }
    text_puts(out, "\n");
}

/* The values beside a model to which a finding belongs, or NULL. */
static beside *side_of(const check_view *c, const fc_finding *f) {
    const bool here = f->kind == FC_FOUND_UNEXPECTED || f->kind == FC_FOUND_UNEXPECTED_OBJECT;
    const bool there = f->kind == FC_FOUND_MISSING || f->kind == FC_FOUND_MISSING_OBJECT;
    return here ? c->beside[0] : there ? c->beside[1] : NULL;
}

static void count_groups(const check_view *c) {
    for (size_t i = 0; i < c->report->count; i++) {
        const fc_finding *f = &c->report->findings[i];
        beside *side = side_of(c, f);
        if (side) {
            beside_count(side, f->name, f->kind == FC_FOUND_UNEXPECTED_OBJECT || f->kind == FC_FOUND_MISSING_OBJECT);
        }
    }
}

/* Prints the line of the group of a finding. @return false if the finding is in no group. */
static bool print_group(text_out *out, const check_view *c, const fc_finding *f) {
    beside *side = side_of(c, f);
    beside_group *group = side ? beside_group_of(side, f->name) : NULL;
    if (group && !group->printed) {
        const bool here = side == c->beside[0];
        group->printed = true;
        text_printf(out, "%serror:%s ", text_color(out->fd, TEXT_ERROR), text_color(out->fd, TEXT_PLAIN));
        beside_print_name(out, group);
        text_puts(out, here ? ": unexpected: " : ": missing: ");
        beside_print_count(out, group);
        text_name_in(out, here ? ", not in " : " beside the model of ", c->reference,
                     "; add --model-only (-v lists them)\n");
    }
    return group != NULL;
}

void check_print_text(text_out *out, const check_view *c) {
    count_groups(c);
    for (size_t i = 0; i < c->report->count; i++) {
        const fc_finding *f = &c->report->findings[i];
        bool error = fc_finding_info_get(f->kind)->severity == FC_SEVERITY_ERROR;
        if (print_group(out, c, f)) {
            continue;
        }
        text_printf(out, "%s%s:%s ", text_color(out->fd, error ? TEXT_ERROR : TEXT_WARNING), severity_of(f),
                    text_color(out->fd, TEXT_PLAIN));
        text_name(out, f->message);
        text_puts(out, "\n");
    }
    print_summary(out, c);
}

/* GitHub decodes %25, %0D and %0A everywhere, and %3A and %2C in properties. Other characters that must not reach a
 * terminal are escaped to keep them out of the log. */
static void print_escaped(text_out *out, const char *s, bool property) {
    while (*s) {
        uint32_t code;
        size_t len = text_utf8(s, &code);
        if (len == 0) {
            text_printf(out, "\\x%02x", (unsigned)(unsigned char)*s);
        } else if (*s == '%' || *s == '\r' || *s == '\n' || (property && (*s == ':' || *s == ','))) {
            text_printf(out, "%%%02X", (unsigned)*s);
        } else if (text_is_unsafe(code)) {
            text_printf(out, code < 0x80 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)code);
        } else {
            text_write(out, s, len);
        }
        s += len > 0 ? len : 1;
    }
}

void check_print_github(text_out *out, const check_view *c) {
    for (size_t i = 0; i < c->report->count; i++) {
        const fc_finding *f = &c->report->findings[i];
        text_printf(out, "::%s ", severity_of(f));
        if (c->schema) {
            text_puts(out, "file=");
            print_escaped(out, c->schema, true);
            text_puts(out, ",");
        }
        text_puts(out, "title=fsdpckpt check%3A ");
        print_escaped(out, fc_finding_info_get(f->kind)->id, true);
        text_puts(out, "::");
        print_escaped(out, f->message, false);
        text_puts(out, "\n");
    }
    print_summary(out, c);
}

static void write_member(json_out *j, const char *key, const char *value) {
    if (value && *value) {
        JSON_MEMBER(j, string, key, value);
    }
}

static void write_finding(json_out *j, const fc_finding *f) {
    jw_open(j, '{');
    JSON_MEMBER(j, string, "kind", fc_finding_info_get(f->kind)->id);
    JSON_MEMBER(j, string, "severity", severity_of(f));
    write_member(j, "name", f->name);
    write_member(j, "other", f->other);
    write_member(j, "found", f->found);
    write_member(j, "expected", f->expected);
    write_member(j, "detail", f->detail);
    write_member(j, "option", f->option);
    JSON_MEMBER(j, uint, "count", f->count);
    if (f->names) {
        jw_member_strings(j, "names", f->names, f->count);
    }
    JSON_MEMBER(j, string, "message", f->message);
    jw_close(j, '}');
}

void check_print_json(text_out *out, const check_view *c) {
    const fc_report *r = c->report;
    json_out j;
    jw_document(&j, out, 2, "check");
    JSON_MEMBER(&j, string, "checkpoint", c->path);
    JSON_MEMBER(&j, string, "reference", c->reference);
    JSON_MEMBER(&j, bool, "ok", r->errors == 0);
    JSON_UINTS(&j, {"errors", r->errors}, {"warnings", r->warnings}, {"tensors", r->tensors}, {"objects", r->objects},
               {"allowed", r->allowed});
    jw_member_open(&j, "findings", '[');
    for (size_t i = 0; i < r->count; i++) {
        write_finding(&j, &r->findings[i]);
    }
    jw_close(&j, ']');
    jw_end_document(&j);
}
