/*
 * Mapped tensors: their memory, and the object that frees it when the last array of it is gone.
 */
#include "native.h"

#include "fsdpckpt/read.h"

static void free_mapping(PyObject *capsule) {
    fc_mapping *mapping = PyCapsule_GetPointer(capsule, NULL);
    if (mapping) {
        fc_mapping_free(mapping);
        PyMem_Free(mapping);
    }
}

/* @return (what keeps the mapping, address, bytes, strides); `*mapping` belongs to it. NULL with an exception set. */
static PyObject *mapping_tuple(fc_mapping *mapping, int ndim) {
    PyObject *capsule = PyCapsule_New(mapping, NULL, free_mapping);
    if (!capsule) {
        fc_mapping_free(mapping);
        PyMem_Free(mapping);
        return NULL;
    }
    return Py_BuildValue("(NKKN)", capsule, (unsigned long long)(uintptr_t)mapping->first,
                         (unsigned long long)mapping->bytes, native_tuple(ndim, mapping->strides));
}

PyObject *native_map(const fc_checkpoint *checkpoint, const fc_tensor *tensor) {
    fc_mapping *mapping = PyMem_Calloc(1, sizeof *mapping);
    if (!mapping) {
        return PyErr_NoMemory();
    }
    fc_error err = {.code = FC_OK};
    fc_code rc;
    Py_BEGIN_ALLOW_THREADS rc = fc_map_tensor(checkpoint, tensor, mapping, &err);
    Py_END_ALLOW_THREADS if (rc == FC_OK && mapping->pages) {
        return mapping_tuple(mapping, tensor->ndim);
    }
    PyMem_Free(mapping);
    if (rc == FC_EUSAGE) {
        return native_usage("%s; mmap=False reads it", err.message);
    }
    return rc == FC_OK ? Py_NewRef(Py_None) : native_raise(&err);
}
