/*
 * Reports lines: see report.h.
 */
#include "io/report.h"

#include <stdarg.h>
#include <stdio.h>

void fc_report(const fc_reporter *reporter, const char *format, ...) {
    fc_error line; /* makes the text printable */
    char text[sizeof line.message];
    va_list args;
    if (!reporter || !reporter->report) {
        return;
    }
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fc_fail(&line, FC_OK, "%s", text);
    reporter->report(reporter->context, line.message);
}
