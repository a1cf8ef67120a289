/*
 * The extension module fsdpckpt._native: the library, as the Python code of the package sees it. It converts arguments,
 * releases the interpreter lock and turns errors into exceptions. Everything that people call is in Python.
 *
 * It uses only the limited API of Python 3.10, so that one binary serves this and every later version.
 */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "fsdpckpt/arena.h"
#include "fsdpckpt/box.h"
#include "fsdpckpt/checkpoint.h"
#include "fsdpckpt/dtype.h"
#include "fsdpckpt/error.h"
#include "fsdpckpt/io.h"
#include "fsdpckpt/mesh.h"

#include <stdbool.h>
#include <stdint.h>

/** As PyMethodDef.ml_meth; the cast that every method with keywords needs. */
#define NATIVE_KEYWORDS(function) ((PyCFunction)(void (*)(void))(function))

/** Sets the exception that fsdpckpt._errors makes of `err`. @return NULL. */
PyObject *native_raise(const fc_error *err);

/** Sets a UsageError, whose text is made as by PyUnicode_FromFormat. @return NULL. */
PyObject *native_usage(const char *format, ...);

/** A reporter that turns each line into a Python warning. It may be called without the interpreter lock. */
fc_reporter native_reporter(void);

/**
 * Converts a sequence of strings into a NULL-terminated array in `arena`, or None into NULL.
 * @return false with an exception set.
 */
bool native_strings(PyObject *sequence, fc_arena *arena, const char *const **out);

/**
 * Converts a path for PyArg_ParseTuple's "O&" as PyUnicode_FSConverter does, but leaves NULL in `out` for None. The
 * caller releases what is in it.
 */
int native_optional_path(PyObject *value, void *out);

/** Decodes a path or a message, which may contain one, as Python decodes file names; NULL becomes None. */
PyObject *native_text(const char *text);

/** Copies a sequence of at most `most` integers. @return how many, or -1 with an exception set. */
int native_integers(PyObject *sequence, int most, int64_t *out);

/** Makes a tuple of `count` integers. */
PyObject *native_tuple(int count, const int64_t *values);

/** Converts a mesh, a tuple of pairs (name, size). @return false with an exception set. */
bool native_mesh(PyObject *pairs, fc_mesh *out);

/** Makes a tuple of pairs (name, size). */
PyObject *native_mesh_pairs(const fc_mesh *mesh);

/** Makes a tuple of `count` placements, each (kind, dim, split_factor). */
PyObject *native_placements(int count, const fc_placement *placements);

/** Converts what native_placements makes. @return false with an exception set. */
bool native_read_placements(PyObject *tuples, int count, fc_placement *out);

/** Makes a list of a path in the nested state dict: keys, and for an index into a list or tuple its number. */
PyObject *native_path(const fc_path *path);

/**
 * Maps a tensor from its file. Releases the interpreter lock.
 * @return (what keeps the mapping, address, bytes, strides in elements), or None if the tensor has no elements.
 */
PyObject *native_map(const fc_checkpoint *checkpoint, const fc_tensor *tensor);

/** Makes the type Checkpoint and adds it to the module. @return -1 with an exception set. */
int native_add_checkpoint(PyObject *module);

/** Makes the type Staging and adds it to the module. @return -1 with an exception set. */
int native_add_staging(PyObject *module);

/** Makes the type DeltaPart and adds it to the module. @return -1 with an exception set. */
int native_add_delta_part(PyObject *module);

/* Functions of the module. */
PyObject *native_save(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *native_layout(PyObject *module, PyObject *args);
PyObject *native_write_shard(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *native_write_index(PyObject *module, PyObject *args);
PyObject *native_delta(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *native_delta_index(PyObject *module, PyObject *args);
