/*
 * The module fsdpckpt._native: its functions, and how Python loads it.
 */
#include "native.h"

#include "fsdpckpt/format.h"
#include "fsdpckpt/layout.h"
#include "fsdpckpt/read.h"
#include "fsdpckpt/recipe.h"

static PyObject *local_box(PyObject *module, PyObject *args) {
    PyObject *sizes, *pairs, *tuples;
    long long rank;
    int64_t shape[FC_MAX_DIMS], offsets[FC_MAX_DIMS], counts[FC_MAX_DIMS], coordinate[FC_MAX_MESH_DIMS];
    fc_placement placements[FC_MAX_MESH_DIMS];
    fc_mesh mesh;
    fc_error err = {.code = FC_OK};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOL", &sizes, &pairs, &tuples, &rank) || !native_mesh(pairs, &mesh) ||
        !native_read_placements(tuples, mesh.ndim, placements)) {
        return NULL;
    }
    int ndim = native_integers(sizes, FC_MAX_DIMS, shape);
    if (ndim < 0) {
        return NULL;
    }
    if (rank < 0 || rank >= fc_mesh_ranks(&mesh)) {
        native_usage("rank %lld: the mesh has %lld ranks", rank, (long long)fc_mesh_ranks(&mesh));
        return NULL;
    }
    fc_mesh_coordinate(&mesh, rank, coordinate);
    if (fc_local_box(ndim, shape, &mesh, placements, coordinate, offsets, counts, &err) != FC_OK) {
        return native_raise(&err);
    }
    return Py_BuildValue("(NN)", native_tuple(ndim, offsets), native_tuple(ndim, counts));
}

/* The placements that `reshard` gives the tensor `name` on a mesh of the dimensions replicate, dp and tp. */
static PyObject *placements(PyObject *module, PyObject *args) {
    const char *name, *plan_name;
    int ndim;
    PyObject *pairs;
    fc_mesh mesh;
    fc_placement made[FC_MAX_MESH_DIMS];
    fc_error err = {.code = FC_OK};
    (void)module;
    if (!PyArg_ParseTuple(args, "siOz", &name, &ndim, &pairs, &plan_name) || !native_mesh(pairs, &mesh)) {
        return NULL;
    }
    fc_arena *arena = fc_arena_new();
    if (!arena) {
        return PyErr_NoMemory();
    }
    const fc_tp_plan *plan = NULL;
    fc_tp_style style;
    fc_code rc = fc_tp_plan_load(plan_name, arena, &plan, &err);
    PyObject *tuple = NULL;
    if (rc == FC_OK) {
        fc_layout_placements(&mesh, ndim, fc_tp_plan_dim(plan, name, ndim, &style), made);
        tuple = native_placements(mesh.ndim, made);
    }
    fc_arena_free(arena);
    return rc == FC_OK ? tuple : native_raise(&err);
}

static PyObject *extensions(const fc_format *format) {
    PyObject *list = PyList_New(0);
    for (const char *const *e = format->extensions; list && e && *e; e++) {
        PyObject *text = PyUnicode_FromString(*e);
        if (!text || PyList_Append(list, text) != 0) {
            Py_DECREF(list);
            list = NULL;
        }
        Py_XDECREF(text);
    }
    return list;
}

static PyObject *formats(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    for (const fc_format *const *f = fc_formats(); list && *f; f++) {
        PyObject *row = Py_BuildValue("(sNNN)", (*f)->name, extensions(*f), PyBool_FromLong(fc_format_writes(*f)),
                                      PyBool_FromLong((*f)->target.self_contained));
        if (!row || PyList_Append(list, row) != 0) {
            Py_DECREF(list);
            list = NULL;
        }
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *recipes(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    for (const fc_shipped_recipe *r = fc_shipped_recipes; list && r->name; r++) {
        PyObject *row = Py_BuildValue("(ss)", r->name, r->text);
        if (!row || PyList_Append(list, row) != 0) {
            Py_DECREF(list);
            list = NULL;
        }
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *fits_cache(PyObject *module, PyObject *bytes) {
    const unsigned long long count = PyLong_AsUnsignedLongLong(bytes);
    (void)module;
    return PyErr_Occurred() ? NULL : PyBool_FromLong(fc_fits_cache(count));
}

static PyMethodDef functions[] = {
    {"fits_cache", fits_cache, METH_O, "Whether the page cache should hold so many bytes that are read"},
    {"local_box", local_box, METH_VARARGS, "(offsets, sizes) of a rank: shape, mesh, placements, rank"},
    {"formats", formats, METH_NOARGS,
     "[(name, extensions, whether it can be written, whether each file of a rank has all that the rank holds), ...]"},
    {"recipes", recipes, METH_NOARGS, "[(name, JSON text), ...] of the shipped recipes"},
    {"save", NATIVE_KEYWORDS(native_save), METH_VARARGS | METH_KEYWORDS, "Writes values in memory as a checkpoint."},
    {"layout", native_layout, METH_VARARGS,
     "(mesh, [((placements, owner), [index of each chunk that is stored, ...]), ...]): path, values, number of ranks"},
    {"write_shard", NATIVE_KEYWORDS(native_write_shard), METH_VARARGS | METH_KEYWORDS,
     "Writes the files of one rank, and returns its notes."},
    {"write_index", native_write_index, METH_VARARGS,
     "path, staging, format, values, mesh, layout, notes of all ranks, trust_objects"},
    {"delta", NATIVE_KEYWORDS(native_delta), METH_VARARGS | METH_KEYWORDS,
     "Writes a delta. Returns (counts, encoding, bytes of the frames)."},
    {"delta_index", native_delta_index, METH_VARARGS,
     "Writes the index of a delta: folder, number, base, encoding, checksum, [(name, file), ...], number of files"},
    {"placements", placements, METH_VARARGS, "The placements of reshard: name, ndim, mesh, tp_plan"},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    return native_add_checkpoint(module) == 0 && native_add_staging(module) == 0 && native_add_delta_part(module) == 0
               ? PyModule_AddStringConstant(module, "version", FSDPCKPT_VERSION)
               : -1;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "fsdpckpt._native",
    .m_doc = "The library, for the package fsdpckpt.",
    .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void) {
    return PyModuleDef_Init(&definition);
}
