/*
 * Classes and functions that run code or commands when they are called. Safety does not depend on this list being
 * complete, because everything outside the table of harmless ones (harmless.h) is at least unknown. The list only
 * decides which message a user reads.
 */
#include "torch/names/globals.h"
#include "torch/names/words.h"

#include <string.h>

/* Modules whose functions run code, start programs, or load other pickles. Their submodules count, too. */
static const char running_modules[] =
    "os posix nt subprocess sys shutil pty commands popen2 ctypes importlib imp runpy code codeop pdb bdb "
    "timeit profile cProfile trace pickle _pickle cPickle marshal dill cloudpickle joblib webbrowser socket "
    "http urllib requests smtplib ftplib asyncio multiprocessing threading _thread signal pip setuptools "
    "distutils types operator _operator torch.hub torch.jit torch.package torch.fx torch._dynamo "
    "torch._inductor torch.ops torch.utils.cpp_extension torch.distributed.rpc numpy.f2py numpy.testing "
    "numpy.distutils pydoc doctest venv ensurepip site _posixsubprocess _osx_support _aix_support _pyrepl "
    "pkgutil zipimport lib2to3 idlelib logging.config test.support torch.testing._internal "
    "torch.utils.model_zoo torch.utils.bottleneck torch.utils.collect_env";

static const struct {
    const char *module, *name;
} running_functions[] = {
    {"torch", "load"},
    {"torch", "compile"},
    {"torch.serialization", "load"},
    {"torch.storage", "_load_from_bytes"},
    {"numpy", "load"},
    {"functools", "reduce"},
    {"copyreg", "_reconstructor"},
    {"copyreg", "__newobj__"},
    {"copyreg", "__newobj_ex__"},
};

static const char running_builtins[] =
    "eval exec execfile compile open file __import__ getattr setattr delattr apply map filter reduce globals "
    "locals vars input help type breakpoint super classmethod staticmethod";

/* Whether `module` is the package of `n` bytes, or in it. */
static bool is_within(const char *module, const char *package, size_t n) {
    return strncmp(module, package, n) == 0 && (module[n] == '\0' || module[n] == '.');
}

bool fc_module_is_within(const char *module, const char *package) {
    return is_within(module, package, strlen(package));
}

static bool is_running_module(const char *module) {
    for (const char *at = running_modules; *at; at = fc_words_next(at)) {
        if (is_within(module, at, fc_words_length(at))) {
            return true;
        }
    }
    return false;
}

/* A dotted name can reach other modules: torch has imported os, so its "os.system" is os.system, and so is its
 * "serialization.os.system". */
static bool reaches_running_module(const char *name) {
    for (const char *dot = strchr(name, '.'); dot; dot = strchr(name, '.')) {
        if (is_running_module(name)) {
            return true;
        }
        name = dot + 1;
    }
    return false;
}

/* Whether importing it runs a program, such as numpy.f2py.__main__. A script's own classes are in __main__. */
static bool is_program(const char *module) {
    const char *last = strrchr(module, '.');
    return last && strcmp(last, ".__main__") == 0;
}

bool fc_global_runs(const char *module, const char *name) {
    if (is_running_module(module) || is_program(module) || reaches_running_module(name)) {
        return true;
    }
    if (strcmp(module, "builtins") == 0 || strcmp(module, "__builtin__") == 0) {
        return fc_words_have(running_builtins, name, strlen(name));
    }
    for (size_t i = 0; i < sizeof running_functions / sizeof *running_functions; i++) {
        if (strcmp(module, running_functions[i].module) == 0 && strcmp(name, running_functions[i].name) == 0) {
            return true;
        }
    }
    return false;
}
